"""A rebuilt run as a timeline: the host's calls with their lines, what it did between them, and the GPU's commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from keepbusy.log.device_commands import collective_of
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverCall, DriverLog, StackFrame
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
_KINDS = {"launch": Kind.KERNEL, "set_memory": Kind.FILL}
_RAN_NOTHING, _PAGEABLE, _BLOCKING = (
    int(flags) for flags in (CallFlag.CAPTURED | CallFlag.FAILED, CallFlag.PAGEABLE, CallFlag.BLOCKING)
)
_HOST_LANE = 0


def timeline_of_log(
    log: DriverLog, run: RebuiltRun, times: KernelTimes, begins: Iterable[int] = (), rank: int = 0, **facts: object
) -> Timeline:
    """`begins`: when iterations began, on the log's clock. One lane has all of the host: while the backward pass
    launches from a thread of its own, the program's thread waits for it."""
    about = RunFacts(**facts)  # type: ignore[arg-type]
    return _Building(log, run, times, rank, about).timeline(np.array([*begins], np.int64))


class _SpanRow(NamedTuple):
    lane: int
    kind: Kind
    name: int
    start: float
    end: float
    frame: int = NONE
    awaits: int = NONE
    group: int = NONE
    size: int = 0
    direction: int = 0
    pinned: int = NONE


class _OpenFrames:
    """Python's stack from call to call: what two calls in a row share has not ended in between."""

    def __init__(self, names: _Names, folder: str) -> None:
        self._names, self._folder = names, f"{folder.rstrip('/')}/"
        self._open: list[tuple[StackFrame, int]] = []
        self._stack: Sequence[StackFrame] = ()
        self._reached = 0.0  # the end of the last call
        self.name, self.parent = list[int](), list[int]()
        self.start, self.end = list[float](), list[float]()

    def at(self, stack: Sequence[StackFrame], start: float, end: float) -> int:
        """The innermost frame of a call. `stack`: innermost first."""
        if stack is not self._stack:
            self._stack = stack
            self._go_to(stack, start)
        self._reached = end
        return self._open[-1][1]

    def _go_to(self, stack: Sequence[StackFrame], start: float) -> None:
        wanted = [*reversed(stack)]
        same = len([*takewhile(lambda pair: pair[0][0] == pair[1], zip(self._open, wanted, strict=False))])
        self.close(same)
        for frame in wanted[same:]:
            self.parent.append(self._open[-1][1] if self._open else NONE)
            self.name.append(self._names.number(f"{self._shown(frame.file)}({frame.line}): {frame.function}"))
            self.start.append(start)
            self.end.append(start)
            self._open.append((frame, len(self.name) - 1))

    def close(self, kept: int = 0) -> None:
        """All but the outermost ones: they went on until the last call had ended."""
        for _, number in self._open[kept:]:
            self.end[number] = self._reached
        del self._open[kept:]

    def table(self) -> Frames:
        return Frames.of(
            len(self.name),
            lane=_HOST_LANE,
            kind=FrameKind.LINE,
            name=self.name,
            parent=self.parent,
            start=np.array(self.start, np.int64),
            end=np.array(self.end, np.int64),
        )

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


class _LoggedCall(NamedTuple):
    """A row of the log. Times count from the first one."""

    begin: float
    end: float
    stream: int
    value: int
    stack: int
    flags: int
    about: DriverCall
    collective: int
    """Of a launch of NCCL's kernel: the row of NCCL's call."""

    @property
    def is_waited_for(self) -> bool:
        """Of a copy: whether the call returns once it is done."""
        waits = self.flags & (_PAGEABLE | _BLOCKING)
        return bool(waits) and self.about.kind in ("copy_to_host", "copy")


class _Building:
    def __init__(self, log: DriverLog, run: RebuiltRun, times: KernelTimes, rank: int, facts: RunFacts) -> None:
        self._log, self._run, self._times, self._rank, self._facts = log, run, times, rank, facts
        self._origin = int(log.begin[0]) if len(log.begin) else 0
        self._calls = [*self._logged_calls()]
        self._names = _Names()
        self._spans, self._frames = list[_SpanRow](), _OpenFrames(self._names, facts.folder)
        streams = np.unique(log.rows["stream"][run.issuers]).tolist()
        self._lanes = {stream: 1 + number for number, stream in enumerate(streams)}
        self._links = list[tuple[int, int, int]]()
        self._last = dict[int, int]()  # by lane: the span that it did last
        self._events = dict[int, int]()  # the command that each event was recorded after
        self._held = dict[int, list[int]]()  # by lane: commands that its next one waits for
        self._reached = 0.0
        self._groups = {
            line["communicator"]: (line["id"] & 0x7FFFFFFF, line["ranks"]) for line in log.communicators if "id" in line
        }

    def _logged_calls(self) -> Iterator[_LoggedCall]:
        rows, begin = self._log.rows, self._log.begin - self._origin
        columns = [rows[name].tolist() for name in ("stream", "value", "stack", "flags")]
        about = [self._log.calls[number] for number in rows["call"].tolist()]
        times = begin.astype(float).tolist(), (begin + self._log.took).astype(float).tolist()
        return map(_LoggedCall, *times, *columns, about, collective_of(self._log).tolist())

    def timeline(self, begins: Ints) -> Timeline:
        first_of = np.searchsorted(self._run.issuers, np.arange(len(self._calls) + 1)).tolist()
        commands = [*self._commands()]
        for row, one in enumerate(self._calls):
            if not one.flags & _RAN_NOTHING:
                self._call(one, commands[first_of[row] : first_of[row + 1]])
        self._frames.close()
        names = (*self._names.all(), UNRECORDED)
        spans, frames = self._table(), self._frames
        lanes = (Lane(self._rank, None, 0, "program"), *(Lane(self._rank, 0, stream) for stream in self._lanes))
        links = np.array(self._links, np.int64).reshape(-1, 3)
        timeline = Timeline(
            lanes=lanes,
            names=names,
            spans=described(spans, names),
            links=Links.of(len(links), source=links[:, 0], target=links[:, 1], kind=links[:, 2]),
            frames=described(frames.table(), names),
            facts=replace(self._facts, groups=dict(self._groups.values())),
        )
        host = timeline.rows_of(_HOST_LANE)
        marks = np.searchsorted(spans.start[host], begins - self._origin)
        return settle(timeline.change(marks=np.unique(host[marks[marks < len(host)]])))

    def _commands(self) -> Iterator[tuple[_LoggedCall, float, float]]:
        """What each is, and when it ran."""
        begin, end = ((one - self._origin).tolist() for one in (self._run.begin, self._run.end))
        return zip((self._calls[row] for row in self._run.described.tolist()), begin, end, strict=True)

    def _table(self) -> Spans:
        columns = dict(zip(_SpanRow._fields, map(np.array, zip(*self._spans, strict=True)), strict=False))
        for name in ("start", "end") if columns else ():
            columns[name] = np.round(columns[name]).astype(np.int64)
        return Spans.of(len(self._spans), **columns)

    def _on_host(self, kind: Kind, name: str, start: float, end: float, frame: int, awaits: int = NONE) -> int:
        self._spans.append(_SpanRow(_HOST_LANE, kind, self._names.number(name), start, end, frame, awaits))
        return len(self._spans) - 1

    def _call(self, one: _LoggedCall, commands: Sequence[tuple[_LoggedCall, float, float]]) -> None:
        kind, lane = one.about.kind, self._lanes.get(one.stream, NONE)
        if kind == "event_record" and lane in self._last:
            self._events[one.value] = self._last[lane]
        elif kind == "event_wait" and one.value in self._events and lane != NONE:
            self._held.setdefault(lane, []).append(self._events[one.value])
        if not (commands or kind in SYNCS or kind in _ALLOCATING):
            return
        begin = max(self._reached, one.begin)
        end = max(begin, one.end)
        stack = self._log.stacks.get(one.stack, ())
        frame = self._frames.at(stack, begin, end) if stack else NONE
        if begin > self._reached:
            self._on_host(Kind.WORK, "work", self._reached, begin, frame)
        self._reached = end
        if commands:
            # a copy that the caller waits for is a launch and a wait
            launched = min(end, begin + self._times.launch) if one.is_waited_for else end
            launch = self._on_host(Kind.LAUNCH, kind, begin, launched, frame)
            for command in commands:
                self._command(*command, launch, lane)
            if one.is_waited_for:
                self._on_host(Kind.SYNC, kind, launched, end, frame, lane)
        elif kind in SYNCS:
            awaits = {"stream_sync": lane, "context_sync": EVERY_LANE}.get(kind, NONE)
            span = self._on_host(Kind.SYNC, kind, begin, end, frame, awaits)
            if kind == "event_sync" and one.value in self._events:
                self._links.append((self._events[one.value], span, LinkKind.ORDER))
        else:
            self._on_host(Kind.ALLOCATE, kind, begin, end, frame)

    def _command(self, one: _LoggedCall, start: float, end: float, launch: int, lane: int) -> None:
        kind, size, group = _KINDS.get(one.about.kind, Kind.COPY), one.value, NONE
        if one.collective != NONE:
            collective = self._calls[one.collective]
            kind, size = Kind.COLLECTIVE, collective.value * _ELEMENT_SIZES.get(collective.about.grid[0], 4)
            group = self._groups.get(collective.about.function, (NONE, 0))[0]
        span = len(self._spans)
        self._spans.append(
            _SpanRow(
                lane,
                kind,
                self._names.number(one.about.name or one.about.kind),
                start,
                end,
                group=group,
                size=0 if kind == Kind.KERNEL else size,
                direction=_COPIES.get(one.about.kind, Direction.UNKNOWN),
                pinned=NONE if kind != Kind.COPY else int(not one.flags & _PAGEABLE),
            )
        )
        self._links.append((launch, span, LinkKind.LAUNCH))
        self._links += [(source, span, LinkKind.ORDER) for source in self._held.pop(lane, ())]
        self._last[lane] = span
