"""A rebuilt run as a timeline: the host's calls with their lines, what it did between them, and the GPU's commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from keepbusy.log.device_commands import collective_of
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverLog, StackFrame
from keepbusy.log.rebuild import SYNCS, RebuiltRun
from keepbusy.timeline.frame_roles import described
from keepbusy.timeline.model import (
    EVERY_LANE,
    NONE,
    UNRECORDED,
    Direction,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    Spans,
    Timeline,
    settle,
)
from keepbusy.timeline.run_facts import RunFacts

_ALLOCATING = ("allocate", "free", "allocate_host", "free_host", "register_host", "unregister_host", "map_memory")
_COPIES = {
    "copy_to_gpu": Direction.HOST_TO_DEVICE,
    "copy_to_host": Direction.DEVICE_TO_HOST,
    "copy_on_gpu": Direction.DEVICE_TO_DEVICE,
    "copy": Direction.UNKNOWN,
}
_ELEMENT_SIZES = {0: 1, 1: 1, 4: 8, 5: 8, 6: 2, 8: 8, 9: 2, 10: 1, 11: 1}
"""Bytes of NCCL's types; of those that are missing, 4."""
_HOST_LANE = 0


def timeline_of_log(
    log: DriverLog, run: RebuiltRun, times: KernelTimes, begins: Iterable[int] = (), rank: int = 0, **facts: object
) -> Timeline:
    """`begins`: when iterations began, on the log's clock. One lane has all of the host: while the backward pass
    launches from a thread of its own, the program's thread waits for it."""
    about = RunFacts(**facts)  # type: ignore[arg-type]
    return _Building(log, run, times, rank, about).timeline(np.array([*begins], np.int64))


@dataclass
class _Columns:
    """Of spans and of links, as lists."""

    lane: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    name: list[int] = field(default_factory=list)
    frame: list[int] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    awaits: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    direction: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)

    def add(
        self,
        lane: int,
        kind: Kind,
        name: int,
        start: float,
        end: float,
        *,
        frame: int = NONE,
        awaits: int = NONE,
        group: int = NONE,
        size: int = 0,
        direction: int = 0,
        pinned: int = NONE,
    ) -> int:
        for column, value in zip(
            vars(self).values(),
            (lane, kind, name, frame, start, end, awaits, group, size, direction, pinned),
            strict=True,
        ):
            column.append(value)
        return len(self.lane) - 1


class _OpenFrames:
    """Python's stack from call to call: what two calls in a row share has not ended in between."""

    def __init__(self, names: _Names, folder: str) -> None:
        self._names, self._folder = names, f"{folder.rstrip('/')}/"
        self._open: list[tuple[StackFrame, int]] = []
        self.name, self.parent = list[int](), list[int]()
        self.start, self.end = list[float](), list[float]()

    def at(self, stack: Sequence[StackFrame], start: float, end: float) -> int:
        """The innermost frame, and until when it goes on at least. `stack`: innermost first."""
        wanted = [*reversed(stack)]
        same = len([*takewhile(lambda pair: pair[0][0] == pair[1], zip(self._open, wanted, strict=False))])
        del self._open[same:]
        for frame in wanted[same:]:
            self.parent.append(self._open[-1][1] if self._open else NONE)
            self.name.append(self._names.number(f"{self._shown(frame.file)}({frame.line}): {frame.function}"))
            self.start.append(start)
            self.end.append(end)
            self._open.append((frame, len(self.name) - 1))
        for _, number in self._open:
            self.end[number] = end
        return self._open[-1][1] if self._open else NONE

    def _shown(self, file: str) -> str:
        """As the profiler shows it: below the run's folder, and of what is installed from the package on."""
        return file.rpartition("/site-packages/")[2].removeprefix(self._folder)


class _Names:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def all(self) -> tuple[str, ...]:
        return tuple(self._numbers)


class _Building:
    def __init__(self, log: DriverLog, run: RebuiltRun, times: KernelTimes, rank: int, facts: RunFacts) -> None:
        self._log, self._run, self._times, self._rank, self._facts = log, run, times, rank, facts
        self._names = _Names()
        self._spans, self._frames = _Columns(), _OpenFrames(self._names, facts.folder)
        self._lanes = {stream: 1 + number for number, stream in enumerate(self._streams())}
        self._links = list[tuple[int, int, int]]()
        self._last = dict[int, int]()  # by lane: the span that it did last
        self._events = dict[int, int]()  # the command that each event was recorded after
        self._held = dict[int, list[int]]()  # by lane: commands that its next one waits for
        self._reached = 0.0
        self._meetings = collective_of(log)
        self._groups = {
            line["communicator"]: (line["id"] & 0x7FFFFFFF, line["ranks"]) for line in log.communicators if "id" in line
        }

    def _streams(self) -> list[int]:
        return np.unique(self._log.rows["stream"][self._run.issuers]).tolist()

    def timeline(self, begins: Ints) -> Timeline:
        log, run = self._log, self._run
        origin = int(log.begin[0]) if len(log.begin) else 0
        first_of = np.searchsorted(run.issuers, np.arange(len(log.rows) + 1)).tolist()
        kinds, flags = log.kinds().tolist(), log.rows["flags"].tolist()
        self._reached = 0.0
        for row, kind in enumerate(kinds):
            if not flags[row] & (CallFlag.CAPTURED | CallFlag.FAILED):
                self._call(row, kind, range(first_of[row], first_of[row + 1]), origin)
        names = (*self._names.all(), UNRECORDED)
        spans = self._table()
        opened = self._frames
        frames = Frames.of(
            len(opened.name),
            lane=_HOST_LANE,
            kind=FrameKind.LINE,
            name=opened.name,
            parent=opened.parent,
            start=np.array(opened.start, np.int64),
            end=np.array(opened.end, np.int64),
        )
        links = np.array(self._links, np.int64).reshape(-1, 3)
        lanes = (Lane(self._rank, None, 0, "program"), *(Lane(self._rank, 0, stream) for stream in self._lanes))
        timeline = Timeline(
            lanes=lanes,
            names=names,
            spans=described(spans, names),
            links=Links.of(len(links), source=links[:, 0], target=links[:, 1], kind=links[:, 2]),
            frames=described(frames, names),
            facts=replace(self._facts, groups=dict(self._groups.values())),
        )
        host = timeline.rows_of(_HOST_LANE)
        marks = np.searchsorted(spans.start[host], begins - origin)
        return settle(timeline.change(marks=np.unique(host[marks[marks < len(host)]])))

    def _table(self) -> Spans:
        columns = {name: np.array(values) for name, values in vars(self._spans).items()}
        times = {name: np.round(columns[name]).astype(np.int64) for name in ("start", "end")}
        return Spans.of(len(self._spans.lane), **(columns | times))

    def _call(self, row: int, kind: str, commands: range, origin: int) -> None:
        log = self._log
        begin = max(self._reached, float(log.begin[row] - origin))
        end = max(begin, float(log.begin[row] + log.took[row] - origin))
        stream, value = int(log.rows["stream"][row]), int(log.rows["value"][row])
        lane = self._lanes.get(stream, NONE)
        if kind == "event_record" and lane in self._last:
            self._events[value] = self._last[lane]
        elif kind == "event_wait" and value in self._events and lane != NONE:
            self._held.setdefault(lane, []).append(self._events[value])
        if not (commands or kind in SYNCS or kind in _ALLOCATING):
            return
        stack = log.stacks.get(int(log.rows["stack"][row]), ())
        frame = self._frames.at(stack, begin, end) if stack else NONE
        if begin > self._reached:
            self._spans.add(_HOST_LANE, Kind.WORK, self._names.number("work"), self._reached, begin, frame=frame)
        self._reached = end
        if commands:
            self._issue(row, kind, commands, lane, frame, begin, end, origin)
        elif kind in SYNCS:
            waited = self._events.get(value, NONE) if kind == "event_sync" else NONE
            awaits = {"stream_sync": lane, "context_sync": EVERY_LANE}.get(kind, NONE)
            span = self._spans.add(
                _HOST_LANE, Kind.SYNC, self._names.number(kind), begin, end, frame=frame, awaits=awaits
            )
            if waited != NONE:
                self._links.append((waited, span, LinkKind.ORDER))
        else:
            self._spans.add(_HOST_LANE, Kind.ALLOCATE, self._names.number(kind), begin, end, frame=frame)

    def _issue(
        self, row: int, kind: str, commands: range, lane: int, frame: int, begin: float, end: float, origin: int
    ) -> None:
        """A copy that the caller waits for is a launch and a wait."""
        flags = int(self._log.rows["flags"][row])
        waits = kind in ("copy_to_host", "copy") and flags & (CallFlag.PAGEABLE | CallFlag.BLOCKING)
        launched = min(end, begin + self._times.launch) if waits else end
        launch = self._spans.add(_HOST_LANE, Kind.LAUNCH, self._names.number(kind), begin, launched, frame=frame)
        for number in commands:
            self._command(number, launch, lane, origin)
        if waits:
            self._spans.add(_HOST_LANE, Kind.SYNC, self._names.number(kind), launched, end, frame=frame, awaits=lane)

    def _command(self, number: int, launch: int, lane: int, origin: int) -> None:
        log, described_by = self._log, int(self._run.described[number])
        call, flags = log.calls[int(log.rows["call"][described_by])], log.rows["flags"][described_by]
        kind = {"launch": Kind.KERNEL, "set_memory": Kind.FILL}.get(call.kind, Kind.COPY)
        meeting = int(self._meetings[described_by])
        size = 0 if kind == Kind.KERNEL else int(log.rows["value"][described_by])
        group = NONE
        if meeting != NONE:
            kind, collective = Kind.COLLECTIVE, log.calls[int(log.rows["call"][meeting])]
            group = self._groups.get(collective.function, (NONE, 0))[0]
            size = int(log.rows["value"][meeting]) * _ELEMENT_SIZES.get(collective.grid[0], 4)
        span = self._spans.add(
            lane,
            kind,
            self._names.number(call.name or call.kind),
            float(self._run.begin[number] - origin),
            float(self._run.end[number] - origin),
            group=group,
            size=size,
            direction=_COPIES.get(call.kind, Direction.UNKNOWN),
            pinned=NONE if kind != Kind.COPY else int(not flags & CallFlag.PAGEABLE),
        )
        self._links.append((launch, span, LinkKind.LAUNCH))
        self._links += [(source, span, LinkKind.ORDER) for source in self._held.pop(lane, ())]
        self._last[lane] = span
