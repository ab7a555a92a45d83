"""CUDA graphs: what a capture keeps, and what a GPU says to a program that asks too much of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from keepbusy.timeline.model import NONE


class CaptureError(RuntimeError):
    """What CUDA says of a capture; `code` is its number for that."""

    def __init__(self, text: str, code: int = 900) -> None:
        super().__init__(text)
        self.code = code


UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
CAPTURED_EVENT = "CUDA error: operation not permitted on an event last recorded in a capturing stream"
ILLEGAL = "CUDA error: the operation cannot be performed in the present state"
INVALID = "CUDA error: invalid argument"
CODES = {
    INVALID: 1,
    ILLEGAL: 401,
    UNSUPPORTED: 900,
    INVALIDATED: 901,
    UNJOINED: 904,
    ISOLATION: 905,
    CAPTURED_EVENT: 907,
}


_numbers = count(1)


class Node(NamedTuple):
    """A command to come."""

    stream: int  # on which it was captured
    kind: int
    name: str
    work: int
    size: int = 0
    group: int = NONE
    last_arrival: Callable[[int], int] | None = None  # of a collective: asks the other ranks, as in `Clock.collective`
    after: tuple[tuple[int, int], ...] = ()  # other streams, and how many of their commands come before


class Graph:
    """Commands in the order in which they were captured; at replay those of each stream run one after the other."""

    def __init__(self, origin: int = NONE, mode: str = "global", thread: int = 0) -> None:
        self.origin, self.mode, self.thread = origin, mode, thread
        self.nodes: list[Node] = []
        self.failed = False
        self.mark = f"Graph#{next(_numbers)}"  # what its replays begin, if they are the run's steps
        self._done = {origin: {origin: 0}}  # of each of its streams: how many commands of each come before its next one
        self._known: dict[int, dict[int, int]] = {}  # the same, before its last one

    def add(self, node: Node) -> None:
        """Its stream's next command."""
        stream = node.stream
        done, known = self._done[stream], self._known.get(stream, {})
        after = tuple((one, count) for one, count in done.items() if one != stream and count > known.get(one, 0))
        self.nodes.append(node._replace(after=after))
        self._known[stream] = dict(done)
        done[stream] += 1

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
        return [one for one in others if self._known[main].get(one, 0) < self._done[one][one]]

    def forbids(self, thread: int) -> bool:
        """Whether unsafe calls of a thread break the capture, whatever stream they are for."""
        return self.mode == "global" or (self.mode == "thread_local" and self.thread == thread)

    @property
    def joined(self) -> bool:
        """Whether everything comes before what its first stream would run next."""
        at_origin = self._done[self.origin]
        return all(at_origin.get(stream, 0) == done[stream] for stream, done in self._done.items())
