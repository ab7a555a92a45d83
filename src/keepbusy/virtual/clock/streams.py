"""What stands between the host and the device: streams, points in their order, and what a capture keeps of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from keepbusy.timeline.model import NONE
from keepbusy.timeline.replay import NEVER

Awaited: TypeAlias = Mapping[int, tuple[int, int]]
"""Of each lane that is waited for the latest such command, row and end. What comes before it in its lane ends first."""
_NOTHING: Mapping[int, tuple[int, int]] = MappingProxyType({})


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    awaited: Awaited = _NOTHING  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before


BEGINNING = Moment(NEVER, NEVER)
"""What an event holds that was never recorded: nobody waits for it."""


class StreamQueue:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "launch", "place", "tail")

    def __init__(self, lane: int, device: int, limit: int) -> None:
        self.lane, self.device = lane, device
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: dict[int, tuple[int, int]] = {}  # what its next command waits for: see `Awaited`
        self.ends = [NEVER] * limit  # of the last so many commands, as `timeline/replay.py` keeps them
        self.place = 0  # of the next one
        self.launch = NONE  # that came last with commands of its own

    def append(self, launch: int, row: int, end: int) -> None:
        """A command. All of one launch, a graph's, take one place in the queue."""
        self.tail, self.last = end, row
        if launch != self.launch:
            self.place, self.launch = (self.place + 1) % len(self.ends), launch
        self.ends[self.place - 1] = end

    def until(self) -> int:
        """When everything that stands in it now, or that it waits for, has ended."""
        return max([self.tail, *(end for _, end in self.awaited.values())]) if self.awaited else self.tail

    def pending(self) -> Awaited:
        """What must have ended by then."""
        if self.last == NONE:
            return dict(self.awaited)
        return {self.lane: (self.last, self.tail), **self.awaited}

    def wait_for(self, awaited: Awaited) -> None:
        """Its next command comes after these. Of each lane only the latest counts; its own are in order anyway."""
        for lane, command in awaited.items():
            if lane != self.lane and command > self.awaited.get(lane, (NONE, NEVER)):
                self.awaited[lane] = command


class SharedDevice:
    """A device on which kernels and collectives hold each other up: NCCL takes some of the multiprocessors, so that a
    product whose tiles fill all of them once needs a second round, and both read and write the same memory.

    A command is slowed where it begins beside one that was launched before. What was launched before has its time
    already; what that should have lost, the next command of its kind makes up for.
    """

    def __init__(self, slower: Callable[[str], float]) -> None:
        self._slower, self._of_collectives = slower, 1 - 1 / slower("nccl")
        self._collectives: deque[tuple[int, int]] = deque()
        self._kernels: deque[tuple[int, int, float]] = deque(maxlen=1024)  # as many as may stand in a queue
        self._kernels_owe = self._collectives_owe = 0.0

    def lasts(self, name: str, start: int, work: int) -> int:
        """How long a kernel takes that begins then, and takes `work` alone."""
        while self._collectives and self._collectives[0][1] <= start:
            self._collectives.popleft()
        slower, left, now = self._slower(name), float(work), float(start)
        if slower > 1.0:
            left, self._kernels_owe = left + self._kernels_owe, 0.0
        for begun, ended in self._collectives:
            if ended > now and left > begun - now:
                left -= max(0.0, begun - now)
                now = max(begun, now)
                beside = min(left * slower, ended - now)
                left, now = left - beside / slower, now + beside
                self._collectives_owe += beside * self._of_collectives
        end = round(now + left)
        self._kernels.append((start, end, slower))
        return end - start

    def owed(self) -> int:
        """How much later the next collective ends for what the ones before should have lost."""
        owed, self._collectives_owe = round(self._collectives_owe), 0.0
        return owed

    def hold(self, start: int, end: int) -> None:
        """A collective is on the wire so long. While it waits for a late rank it holds them, too, but what a late rank
        costs is told by replaying its wait, and kernels would stay as they are there."""
        for begun, ended, slower in reversed(self._kernels):
            if ended <= start:
                break
            beside = max(0, min(end, ended) - max(start, begun))
            self._kernels_owe += beside * (1 - 1 / slower)
            self._collectives_owe += beside * self._of_collectives
        self._collectives.append((start, end))


_numbers = count(1)


class Node(NamedTuple):
    """A command of a capture, to come at each replay."""

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
