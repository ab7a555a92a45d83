"""CUDA graphs while they are captured: which commands they hold, which streams take part, and what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from threading import get_ident
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from keepbusy.timeline.model import NEVER, NONE
from keepbusy.virtual.clock.order import Reached

# What CUDA says of a capture, and its numbers for that.
INVALID = 1, "invalid argument"
ILLEGAL = 401, "the operation cannot be performed in the present state"
UNSUPPORTED = 900, "operation not permitted when stream is capturing"
INVALIDATED = 901, "operation failed due to a previous error during capture"
UNJOINED = 904, "capturing stream has unjoined work"
ISOLATION = 905, "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream"

_numbers = count(1)


class CaptureError(RuntimeError):
    """One of these."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Node(NamedTuple):
    """A command: launched now, or captured, to run at each replay."""

    stream: int
    kind: int
    name: str
    work: int
    size: int = 0
    group: int = NONE
    last_arrival: Callable[[int], int] | None = None  # of a collective: asks the other ranks, as in `Clock.collective`
    after: tuple[tuple[int, int], ...] = ()  # other streams, and how many of their commands come before
    direction: int = 0
    pinned: int = NONE


class Graph:
    """Commands in the order in which they were captured; at replay those of each stream run one after the other."""

    def __init__(self, origin: int = NONE, mode: str = "global", thread: int = 0) -> None:
        self.origin, self.mode, self.thread = origin, mode, thread
        self.nodes: list[Node] = []
        self.failed = False
        self.marks = [f"Graph#{next(_numbers)}"]
        """What each replay begins, if those are the run's steps: also what began while it was captured, as an
        optimizer's step. So iterations count alike, replayed or, with a last batch of another shape, not."""
        self._done = {origin: {origin: 0}}  # of each of its streams: how many commands of each come before its next one
        self._known: dict[int, dict[int, int]] = {}  # the same, before its last one

    def add(self, node: Node) -> None:
        """Its stream's next command."""
        done, known = self._done[node.stream], self._known.get(node.stream, {})
        after = (pair for pair in done.items() if pair[0] != node.stream and pair[1] > known.get(pair[0], 0))
        self.nodes.append(node._replace(after=tuple(after)))
        self._known[node.stream] = dict(done)
        done[node.stream] += 1

    def reached(self, stream: int) -> dict[int, int]:
        """How many commands of each stream come before what the stream runs next."""
        return dict(self._done[stream])

    def join(self, stream: int, reached: Mapping[int, int]) -> None:
        """What the stream runs next comes after those, too."""
        done = self._done.setdefault(stream, {stream: 0})
        for other, commands in reached.items():
            done[other] = max(done.get(other, 0), commands)

    def streams(self) -> list[int]:
        """Those with commands, the first one's first."""
        return list(self._known)

    def open_branches(self) -> list[int]:
        """Streams whose last command nothing waits for in the stream of the first one."""
        main, *others = self._known
        return [stream for stream in others if self._known[main].get(stream, 0) < self._done[stream][stream]]

    @property
    def joined(self) -> bool:
        """Whether everything comes before what its first stream would run next."""
        at_origin = self._done[self.origin]
        return all(at_origin.get(stream, 0) == done[stream] for stream, done in self._done.items())


Awaited: TypeAlias = Mapping[int, tuple[int, int]]
"""By lane, the latest command that is waited for: row and end. What comes before it in its lane ends first."""
_NOTHING: Awaited = MappingProxyType({})


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    awaited: Awaited = _NOTHING  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before
    order: Reached = MappingProxyType({})  # what comes before it, whatever the clock says


BEGINNING = Moment(NEVER, NEVER)
"""What an event holds that was never recorded: nobody waits for it."""


class Captures(dict[int, Graph]):
    """The graph that each stream is being captured into, with the clock's lock held."""

    raises: Callable[[str, int], Exception] = CaptureError
    """Makes what is raised where CUDA would return an error of this text and number."""

    def begin(self, stream: int, mode: str) -> None:
        self.refuse("cudaStreamBeginCapture", self.get(stream), unsafe=False)
        if self:
            raise NotImplementedError("keepbusy's virtual GPU captures one CUDA graph at a time.")
        self[stream] = Graph(stream, mode, get_ident())

    def end(self, stream: int) -> Graph:
        """Also of the streams that joined. Raises if the capture is not whole, and it has ended all the same."""
        if stream not in self:
            raise self._error(ILLEGAL, "cudaStreamEndCapture")
        graph = self[stream]
        for lane in [lane for lane, other in self.items() if other is graph]:
            del self[lane]
        if graph.failed or not graph.joined:
            raise self._error(INVALIDATED if graph.failed else UNJOINED)
        return graph

    def of(self, stream: int) -> Graph | None:
        """The capture that a stream takes part in, if any; after an error it takes nothing more."""
        graph = self.get(stream)
        if graph is not None and graph.failed:
            raise self._error(INVALIDATED)
        return graph

    def join(self, stream: int, moment: Moment) -> None:
        """The stream takes part in the capture that the moment belongs to; nothing else may be waited for in one."""
        self.use_event("cudaStreamWaitEvent", moment, unsafe=False)
        joined = self.get(stream)
        if moment.graph is None or joined not in (None, moment.graph):
            if joined is not None:
                joined.failed = True
            raise self._error(ISOLATION)
        self[stream] = moment.graph
        moment.graph.join(stream, moment.reached)

    def refuse(self, call: str, *graphs: Graph | None, unsafe: bool = True) -> None:
        """Refuse a call that touches these captures, or that a capture forbids anywhere: then it is `unsafe`."""
        if not self:
            return
        broken = {graph for graph in graphs if graph is not None}
        if unsafe:
            # unsafe calls of a thread break a capture, whatever stream they are for
            own = ("thread_local", get_ident())
            broken |= {graph for graph in self.values() if graph.mode == "global" or (graph.mode, graph.thread) == own}
        for graph in broken:
            graph.failed = True
        if broken:
            raise self._error(UNSUPPORTED, call)

    def use_event(self, call: str, moment: Moment, unsafe: bool = True) -> None:
        """An event of a capture may not be asked for, and after the capture it may not be used at all."""
        if moment.graph is not None and moment.graph not in self.values():
            raise self._error(INVALID, call)
        if unsafe and moment.graph is not None:
            moment.graph.failed = True
            raise self._error(CAPTURED_EVENT, call)
        if unsafe:
            self.refuse(call)

    def _error(self, what: tuple[int, str], call: str = "") -> Exception:
        code, text = what
        return self.raises(f"CUDA error: {text}" + (f"\nThe call was {call}." if call else ""), code)
