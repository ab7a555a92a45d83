"""CUDA graphs while they are captured: which commands they hold, which streams take part, and what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from threading import get_ident
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from keepbusy.timeline.model import NEVER, NONE
from keepbusy.virtual.clock.order import Reached

# CUDA's errors about captures: number and text.
INVALID = 1, "invalid argument"
ILLEGAL = 401, "the operation cannot be performed in the present state"
UNSUPPORTED = 900, "operation not permitted when stream is capturing"
INVALIDATED = 901, "operation failed due to a previous error during capture"
UNJOINED = 904, "capturing stream has unjoined work"
ISOLATION = 905, "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream"

_numbers = count(1)


class CaptureError(RuntimeError):
    """An error of CUDA about a capture."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Node(NamedTuple):
    """A command: launched now, or captured to run at each replay."""

    stream: int
    kind: int
    name: str
    work: int
    size: int = 0
    group: int = NONE
    last_arrival: Callable[[int], int] | None = None  # of a collective, see `Clock.collective`
    after: tuple[tuple[int, int], ...] = ()  # other streams, and how many of their commands precede it
    direction: int = 0
    pinned: int = NONE


class Graph:
    """Commands in the order of their capture; at a replay those of each stream run in order."""

    def __init__(self, origin: int = NONE, mode: str = "global", thread: int = 0) -> None:
        self.origin, self.mode, self.thread = origin, mode, thread
        self.nodes: list[Node] = []
        self.failed = False
        self.marks = [f"Graph#{next(_numbers)}"]
        """Marks of steps that each replay sets, also those set during the capture, such as an optimizer's step. So
        iterations count the same whether replayed or, as a last batch of another shape, run eagerly."""
        self._before_next = {origin: {origin: 0}}  # by stream: how many commands of each stream precede its next one
        self._before_last: dict[int, dict[int, int]] = {}  # and its last one

    def add(self, node: Node) -> None:
        """Its stream's next command."""
        counts, before_last = self._before_next[node.stream], self._before_last.get(node.stream, {})
        after = (pair for pair in counts.items() if pair[0] != node.stream and pair[1] > before_last.get(pair[0], 0))
        self.nodes.append(node._replace(after=tuple(after)))
        self._before_last[node.stream] = dict(counts)
        counts[node.stream] += 1

    def reached(self, stream: int) -> dict[int, int]:
        """How many commands of each stream come before what the stream runs next."""
        return dict(self._before_next[stream])

    def join(self, stream: int, reached: Mapping[int, int]) -> None:
        """The stream's next command comes after those reached, too."""
        counts = self._before_next.setdefault(stream, {stream: 0})
        for other, commands in reached.items():
            counts[other] = max(counts.get(other, 0), commands)

    def streams(self) -> list[int]:
        """Streams with commands, in the order of their first commands."""
        return list(self._before_last)

    def open_branches(self) -> list[int]:
        """Streams whose last command the main stream, that of the first command, does not wait for."""
        main, *others = self._before_last
        waited_for = self._before_last[main]
        return [stream for stream in others if waited_for.get(stream, 0) < self._before_next[stream][stream]]

    @property
    def joined(self) -> bool:
        """Whether everything comes before what its first stream would run next."""
        at_origin = self._before_next[self.origin]
        return all(at_origin.get(stream, 0) == counts[stream] for stream, counts in self._before_next.items())


Awaited: TypeAlias = Mapping[int, tuple[int, int]]
"""By lane, row and end of the latest command that is waited for; earlier ones in its lane end first."""
_NOTHING: Awaited = MappingProxyType({})


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    awaited: Awaited = _NOTHING  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before
    order: Reached = MappingProxyType({})  # see `StreamOrder`


BEGINNING = Moment(NEVER, NEVER)
"""The moment of an event that was never recorded; waiting for it takes no time."""


class Captures(dict[int, Graph]):
    """The graph that each capturing stream records into. Used with the clock's lock held."""

    raises: Callable[[str, int], Exception] = CaptureError
    """Makes the exception for a CUDA error of this text and number."""

    def begin(self, stream: int, mode: str) -> None:
        self.refuse("cudaStreamBeginCapture", self.get(stream), unsafe=False)
        if self:
            raise NotImplementedError("keepbusy's virtual GPU captures one CUDA graph at a time.")
        self[stream] = Graph(stream, mode, get_ident())

    def end(self, stream: int) -> Graph:
        """End the capture, also for the streams that joined. Raises if it failed; it has ended all the same."""
        if stream not in self:
            raise self._error(ILLEGAL, "cudaStreamEndCapture")
        graph = self[stream]
        for lane in [lane for lane, other in self.items() if other is graph]:
            del self[lane]
        if graph.failed or not graph.joined:
            raise self._error(INVALIDATED if graph.failed else UNJOINED)
        return graph

    def of(self, stream: int) -> Graph | None:
        """The capture that a stream takes part in, if any. Raises if it has failed."""
        graph = self.get(stream)
        if graph is not None and graph.failed:
            raise self._error(INVALIDATED)
        return graph

    def join(self, stream: int, moment: Moment) -> None:
        """The stream joins the capture that the moment belongs to. A capture may wait for nothing else."""
        self.use_event("cudaStreamWaitEvent", moment, unsafe=False)
        joined = self.get(stream)
        if moment.graph is None or joined not in (None, moment.graph):
            if joined is not None:
                joined.failed = True
            raise self._error(ISOLATION)
        self[stream] = moment.graph
        moment.graph.join(stream, moment.reached)

    def refuse(self, call: str, *graphs: Graph | None, unsafe: bool = True) -> None:
        """Refuse a call that touches these captures. A call that no capture permits anywhere is `unsafe`."""
        if not self:
            return
        refused = {graph for graph in graphs if graph is not None}
        if unsafe:
            # unsafe calls of a thread invalidate a capture, for whatever stream they are
            own = ("thread_local", get_ident())
            refused |= {graph for graph in self.values() if graph.mode == "global" or (graph.mode, graph.thread) == own}
        for graph in refused:
            graph.failed = True
        if refused:
            raise self._error(UNSUPPORTED, call)

    def use_event(self, call: str, moment: Moment, unsafe: bool = True) -> None:
        """Refuse to query a captured event, and any use of it after the capture."""
        if moment.graph is not None and moment.graph not in self.values():
            raise self._error(INVALID, call)
        if unsafe and moment.graph is not None:
            moment.graph.failed = True
            raise self._error(CAPTURED_EVENT, call)
        if unsafe:
            self.refuse(call)

    def _error(self, error: tuple[int, str], call: str = "") -> Exception:
        code, text = error
        return self.raises(f"CUDA error: {text}" + (f"\nThe call was {call}." if call else ""), code)
