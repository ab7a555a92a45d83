"""Timelines of a few lines: a program carried out on paper.

    run = Run()
    for _ in range(6):
        run.step().launch(kernel=900).sync().work(100)
    timeline = run.timeline()

Threads issue, streams execute in order, and each span begins as soon as everything that releases it has happened,
plus a lag. The rules stand here once more, in other words than `replay`'s, so that each can be held against the
other. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keepbusy.timeline.frame_roles import described
from keepbusy.timeline.model import (
    EVERY_LANE,
    NONE,
    PENDING_LIMIT,
    WORKERS,
    Direction,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    Meetings,
    Spans,
    Timeline,
    settle,
)
from keepbusy.timeline.run_facts import RunFacts

US, MS = 1_000, 1_000_000
MB = 1 << 20
LAUNCH, SYNC = 5, 3
"""What these calls take of the host when nobody has to be waited for."""
LAGS = (6_000, 1_000, 1_000)
"""Nanoseconds: a command begins so long after its launch, after the one before it, after one of another stream."""
IN, HOME = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
WIRE = 20
"""The stream that collectives run on."""


@dataclass
class Paper:
    """What was noted so far. Times are nanoseconds."""

    pending: int = PENDING_LIMIT
    spans: list[dict[str, int]] = field(default_factory=list)
    links: list[tuple[int, int, int]] = field(default_factory=list)
    frames: list[dict[str, int]] = field(default_factory=list)
    meetings: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    lanes: dict[Lane, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=lambda: {"": 0})
    clocks: dict[Lane, int] = field(default_factory=dict)
    last: dict[Lane, int] = field(default_factory=dict)  # the row that each lane did last
    open: dict[Lane, list[int]] = field(default_factory=dict)  # the frames that each thread is in
    held: dict[Lane, list[tuple[int, int]]] = field(default_factory=dict)  # links that the lane's next row gets
    ends: dict[Lane, list[int]] = field(default_factory=dict)  # when what a stream's launches launched ended
    launched: dict[Lane, int] = field(default_factory=dict)  # the launch of a stream's last command
    stepping: set[Lane] = field(default_factory=set)  # threads whose next row begins a step

    def add(self, lane: Lane, kind: Kind, start: int, end: int, name: str = "", **columns: int) -> int:
        row, frames = len(self.spans), self.open.get(lane, [])
        place = {"lane": self.lanes.setdefault(lane, len(self.lanes)), "kind": kind, "start": start, "end": end}
        known = {"name": self.named(name), "frame": frames[-1] if frames else NONE}
        self.spans.append(place | known | columns)
        self.links += [(source, row, link) for source, link in self.held.pop(lane, [])]
        self.marks += [row] if lane in self.stepping else []
        self.stepping.discard(lane)
        self.clocks[lane], self.last[lane] = end, row
        return row

    def named(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def released(self, lane: Lane, launch: int, lags: tuple[int, int, int]) -> int:
        """When a command may begin that this row launches now."""
        others = [self.spans[row]["end"] + lags[2] for row, _ in self.held.get(lane, [])]
        on_lane = [self.clocks[lane] + lags[1]] if lane in self.clocks else []
        return max([self.spans[launch]["start"] + lags[0], *on_lane, *others])


@dataclass(frozen=True)
class Run:
    """One host thread at work; `on` gives another one of the same run."""

    paper: Paper = field(default_factory=Paper)
    rank: int = 0
    thread: int = 0

    @staticmethod
    def of(ranks: int = 1, **options: Any) -> Run:
        run = Run(Paper(**options))
        for rank in range(ranks):
            run.on(rank).begin(0)
        return run

    def on(self, rank: int | None = None, thread: int = 0) -> Run:
        return replace(self, rank=self.rank if rank is None else rank, thread=thread)

    @property
    def lane(self) -> Lane:
        return Lane(self.rank, None, self.thread, f"thread {self.thread}")

    def stream(self, number: int) -> Lane:
        return Lane(self.rank, self.rank, number, f"stream {number}")

    @property
    def ranks(self) -> list[int]:
        return sorted({lane.rank for lane in self.paper.lanes})

    @property
    def clock(self) -> int:
        return self.paper.clocks.get(self.lane, 0)

    def begin(self, time: float) -> Run:
        """When the thread does its first row."""
        self.paper.lanes.setdefault(self.lane, len(self.paper.lanes))
        self.paper.clocks[self.lane] = round(time * US)
        return self

    @contextmanager
    def inside(self, *names: str, sequence: int = NONE, exact: bool = False) -> Iterator[Run]:
        """What is done here is done within these calls, the outermost first."""
        paper, opened = self.paper, self.paper.open.setdefault(self.lane, [])
        for name in names:
            parent = opened[-1] if opened else NONE
            about = {"lane": paper.lanes.setdefault(self.lane, len(paper.lanes)), "kind": kind_of(name, exact)}
            place = {"parent": parent, "start": self.clock, "end": self.clock, "sequence": sequence}
            opened.append(len(paper.frames))
            paper.frames.append(about | place | {"name": paper.named(name)})
        yield self
        for _ in names:
            paper.frames[opened.pop()]["end"] = self.clock

    def step(self) -> Run:
        """A step begins with whatever comes next."""
        self.paper.stepping.add(self.lane)
        return self

    def _host(self, kind: Kind, time: float, reached: int = 0, at: Sequence[str] = (), **columns: Any) -> int:
        with self.inside(*at):
            end = max(self.clock, reached) + round(time * US)
            return self.paper.add(self.lane, kind, self.clock, end, **columns)

    def work(self, time: float, at: Sequence[str] = (), **columns: Any) -> Run:
        self._host(Kind.WORK, time, at=at, **columns)
        return self

    def allocate(self, time: float, waits: bool = False, name: str = "cudaFree", at: Sequence[str] = ()) -> Run:
        reached = self._caught_up(None) if waits else 0
        self._host(Kind.ALLOCATE, time, reached, at, name=name, awaits=EVERY_LANE if waits else NONE)
        return self

    def launch(
        self,
        kernel: float | Sequence[float] = 10,
        stream: int = 7,
        at: Sequence[str] = (),
        name: str = "kernel",
        host: float = LAUNCH,
        **columns: Any,
    ) -> Run:
        """One kernel, or those of a graph."""
        times = kernel if isinstance(kernel, Sequence) else [kernel]
        call = "cudaGraphLaunch" if isinstance(kernel, Sequence) else "cudaLaunchKernel"
        with self.inside(*at):
            row = self.call(stream, call, host)
        for time in times:
            self.command(row, stream, time, name=name, **columns)
        return self

    def copy(
        self,
        size: int,
        time: float,
        way: Direction = IN,
        pinned: bool = False,
        blocking: bool = True,
        stream: int = 7,
        at: Sequence[str] = (),
    ) -> Run:
        with self.inside(*at):
            row = self.call(stream, "cudaMemcpyAsync")
            about = {"kind": Kind.COPY, "size": size, "direction": way, "pinned": pinned}
            self.command(row, stream, time, name="Memcpy", **about)
            return self.sync(stream, name="cudaStreamSynchronize") if blocking else self

    def call(self, stream: int, name: str = "cudaLaunchKernel", host: float = LAUNCH) -> int:
        """The host's side of a launch. One that finds its stream's queue full waits for a place in it."""
        ends, pending = self.paper.ends.get(self.stream(stream), []), self.paper.pending
        return self._host(Kind.LAUNCH, host, ends[-pending] if len(ends) >= pending else 0, name=name)

    def command(
        self,
        launch: int,
        stream: int,
        time: float,
        kind: Kind = Kind.KERNEL,
        lags: tuple[int, int, int] = LAGS,
        **columns: Any,
    ) -> int:
        """The device's side."""
        lane = self.stream(stream)
        start = self.paper.released(lane, launch, lags)
        row = self.paper.add(lane, kind, start, start + round(time * US), **columns)
        self.paper.links.append((launch, row, LinkKind.LAUNCH))
        ends = self.paper.ends.setdefault(lane, [])
        if self.paper.launched.get(lane) == launch:
            ends.pop()  # all commands of a graph take one place in the queue
        ends.append(self.paper.clocks[lane])
        self.paper.launched[lane] = launch
        return row

    def sync(
        self,
        stream: int | None = 7,
        time: float = SYNC,
        at: Sequence[str] = (),
        name: str = "cudaStreamSynchronize",
    ) -> Run:
        """Waits for a stream, or for the whole device."""
        awaits = EVERY_LANE if stream is None else self.paper.lanes.get(self.stream(stream), NONE)
        self._host(Kind.SYNC, time, self._caught_up(stream), at, name=name, awaits=awaits)
        return self

    def _caught_up(self, stream: int | None) -> int:
        mine = [lane for lane in self.paper.lanes if lane.rank == self.rank and lane.device is not None]
        return max((self.paper.clocks.get(lane, 0) for lane in mine if stream in (None, lane.number)), default=0)

    def event_sync(self, stream: int = 7, time: float = SYNC, at: Sequence[str] = ()) -> Run:
        """Waits for what the stream has been given last, by a link."""
        source = self.paper.last[self.stream(stream)]
        reached = self.paper.spans[source]["end"]
        row = self._host(Kind.SYNC, time, reached, at, name="cudaEventSynchronize")
        self.paper.links.append((source, row, LinkKind.ORDER))
        return self

    def order(self, source: int, target: int) -> Run:
        """An event recorded on one stream, awaited by the next command of another."""
        row = self.paper.last.get(self.stream(source))
        if row is not None and source != target:
            self.paper.held.setdefault(self.stream(target), []).append((row, LinkKind.ORDER))
        return self

    def handoff(self, thread: int) -> Run:
        """The other thread goes on where this one ended, as the backward pass does."""
        other = self.on(thread=thread)
        self.paper.held.setdefault(other.lane, []).append((self.paper.last[self.lane], LinkKind.HANDOFF))
        self.paper.clocks[other.lane] = max(other.clock, self.clock)
        return other

    def batch(self, time: float, at: Sequence[str] = ()) -> Run:
        """The loader's workers make a batch, one after the other, and the loop waits for it."""
        lane = Lane(self.rank, None, NONE, WORKERS)
        start = self.paper.clocks.get(lane, 0)
        self.paper.add(lane, Kind.WORK, start, start + round(time * US))
        reached = self.paper.clocks[lane]
        self._host(Kind.SYNC, SYNC, reached, at, name="__next__", awaits=self.paper.lanes[lane])
        return self

    def collective(
        self,
        wire: float,
        size: int = MB,
        stream: int = WIRE,
        ranks: Sequence[int] = (),
        group: int = 0,
        name: str = "nccl",
        late: Sequence[int] = (),
        lags: Sequence[int] = (),
        at: Sequence[str] = (),
    ) -> Run:
        """These ranks (or all) meet; none leaves before the last has come. `late`, `lags`: nanoseconds, of each."""
        paper, parts = self.paper, list[int]()
        members = ranks or self.ranks
        about = {"meeting": len(paper.meetings), "group": group, "size": size}
        for place, rank in enumerate(members):
            mine = self.on(rank, self.thread)
            with mine.inside(*at):
                launch = mine.call(stream, "INVALID")
            lag = (lags[place], *LAGS[1:]) if lags else LAGS
            parts.append(mine.command(launch, stream, 0, Kind.COLLECTIVE, lag, name=name, **about))
        last = max(paper.spans[part]["start"] for part in parts)
        for place, (rank, part) in enumerate(zip(members, parts, strict=True)):
            lane = self.on(rank).stream(stream)
            end = last + round(wire * US) + (late[place] if late else 0)
            paper.spans[part]["end"] = paper.clocks[lane] = paper.ends[lane][-1] = end
        paper.meetings.append(len(parts))
        return self

    def recorded(self, **facts: Any) -> Timeline:
        """Measured times and links, with neither `work` nor `lag`: `settle` derives them."""
        paper = self.paper
        spans, links = _columns(paper.spans, Spans), np.array(paper.links, np.int64).reshape(-1, 3).T
        return Timeline(
            lanes=tuple(paper.lanes),
            names=tuple(paper.names),
            spans=described(spans, paper.names),
            links=Links.of(links.shape[1], source=links[0], target=links[1], kind=links[2]),
            frames=described(_columns(paper.frames, Frames), paper.names),
            meetings=Meetings.of(len(paper.meetings), members=paper.meetings, present=paper.meetings),
            marks=np.array(paper.marks, np.int64),
            facts=RunFacts(**{"pending_limit": paper.pending, "source": "on paper", **facts}),  # type: ignore[arg-type]
        )

    def timeline(self, **facts: Any) -> Timeline:
        return settle(self.recorded(**facts))


@contextmanager
def inside(run: Run, *names: str) -> Iterator[None]:
    """All ranks within these calls."""
    with ExitStack() as calls:
        for rank in run.ranks:
            calls.enter_context(run.on(rank).inside(*names))
        yield


def _columns(rows: list[dict[str, int]], table: type[Any]) -> Any:
    fills = {name: column[0] for name, column in table.of(1).columns().items()}
    return table.of(len(rows), **{name: [row.get(name, fill) for row in rows] for name, fill in fills.items()})


def gaps(timeline: Timeline, lane: int) -> Ints:
    """Where the lane has nothing to do: pairs of (start, end) between its spans."""
    rows = timeline.rows_of(lane)
    ends = np.maximum.accumulate(timeline.spans.end[rows][:-1]) if len(rows) > 1 else np.zeros(0, np.int64)
    starts = timeline.spans.start[rows][1:]
    return np.stack([ends, starts], axis=1)[starts > ends]


def kind_of(name: str, exact: bool = False) -> FrameKind:
    if "): " in name:
        return FrameKind.LINE if exact else FrameKind.PYTHON
    return FrameKind.OPERATOR if "::" in name else FrameKind.ANNOTATION


def loop(body: Callable[[Run], Any], steps: int = 6, ranks: int = 1, **facts: Any) -> Timeline:
    """The same step again and again, each begun by every rank; of the last one only its beginning counts."""
    run = Run.of(ranks)
    for _ in range(steps + 1):
        for rank in range(ranks):
            run.on(rank).step()
        body(run)
    return run.timeline(**facts)
