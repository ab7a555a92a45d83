"""The rows that the clock writes, and the `Timeline` that is made of them.

`timeline/model.py` says what a row means. Here the launch of a command is a column of its row, because nearly every
command has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.frame_roles import OWN_STEP, PROFILER_STEP, STEP_MARKS, described
from keepbusy.timeline.model import (
    NONE,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    MemoryUse,
    Spans,
    Timeline,
)  # fmt: skip
from keepbusy.timeline.run_facts import RunFacts

MARKS = (*STEP_MARKS, "Forward#")
"""Prefixes of the names of frames that begin the run's steps, the most trusted first."""
_COLUMNS = (
    "lane", "kind", "name", "frame", "start", "end", "work", "lag", "awaits", "group", "size", "direction", "pinned",
)  # fmt: skip
"""The columns of a row as the clock writes it, without its launch and that launch's latency."""
_FRAME_COLUMNS = ("lane", "kind", "name", "parent", "start")
_ORDINARY = dict.fromkeys(("frame", "awaits", "group", "pinned", "launch"), NONE)
"""Values of columns that a row does not name; other columns are zero then."""
_PACKED = 1 << 16
_LAUNCH = "cudaLaunchKernel"
_WORK, _OPERATOR = int(Kind.WORK), int(FrameKind.OPERATOR)


class Packed:
    """Rows of integers: new ones as bytes, earlier ones as narrow columns. Tuples would burden the garbage
    collector."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._row = Struct(f"{width}q")
        self._bytes, self._full = self._row.pack, _PACKED * self._row.size
        self._fresh = bytearray()
        self._blocks: list[list[npt.NDArray[np.signedinteger[Any]]]] = []

    def add(self, *row: int) -> int:
        """Add a row; returns its number."""
        fresh, number = self._fresh, self.count
        if len(fresh) >= self._full:
            self._blocks.append([_narrow(column) for column in self._unpacked()])
            fresh.clear()
        fresh += self._bytes(*row)
        self.count = number + 1
        return number

    def last(self) -> tuple[int, ...]:
        """The last row."""
        return self._row.unpack(self._fresh[-self._row.size :])

    def change_last(self, *row: int) -> None:
        self._fresh[-self._row.size :] = self._bytes(*row)

    def columns(self, first: int = 0) -> Ints:
        """The rows from `first` on, transposed."""
        fresh, full_blocks = self._unpacked(), first // _PACKED
        blocks: list[Any] = [*self._blocks[full_blocks:], fresh]
        columns = np.stack([np.concatenate([block[column] for block in blocks]) for column in range(len(fresh))])
        return columns[:, first - min(full_blocks, len(self._blocks)) * _PACKED :].astype(np.int64, copy=False)

    def _unpacked(self) -> Ints:
        return np.frombuffer(bytes(self._fresh), np.int64).reshape(-1, self._row.size // 8).T


def _narrow(column: Ints) -> npt.NDArray[np.signedinteger[Any]]:
    """The column in the smallest type that holds it: a long run has millions of rows, most with small numbers."""
    low, high = int(column.min()), int(column.max())
    fits = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return column.astype(next(fits, np.int64))


class Names(dict[str, int]):
    """A number for each text, in the order of their first use."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class Rows:
    """Spans, links, frames and names in the order in which they are written."""

    def __init__(self, call: int = 0, gap: int = 0, latency: int = 0) -> None:
        """For each launch of a kernel: the cost of the call, the gap before a kernel that waits for another one, and
        the latency of a kernel that does not wait."""
        self.launch = call, gap, latency
        self.names = Names({"": 0, _LAUNCH: 1})
        self.lanes: list[Lane] = []
        self.lines: list[tuple[int, ...]] = [()]  # of each place: the numbers of its lines, the outermost first
        self.mark_rows: dict[str, list[int]] = {mark: [] for mark in MARKS}
        self.spans = Packed(len(_COLUMNS) + 2)
        self._links = Packed(4)
        self.frames = Packed(len(_FRAME_COLUMNS))
        self.frame_ends = array("q")
        self._operators = Packed(12)
        self.memory = Packed(8)
        """Blocks allocated or freed: lane, device, time, address, bytes, reserved, requested, whether small."""
        self.add: Callable[..., int] = self.spans.add

    def lane(self, lane: Lane) -> int:
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def lengthen(self, row: int, frame: int, duration: int) -> bool:
        """Extend the work of a row, if it is the last row and within that frame."""
        if row == NONE or row != self.spans.count - 1:
            return False
        lane, kind, name, within, start, end, work, *rest = self.spans.last()
        if kind != _WORK or within != frame:
            return False
        self.spans.change_last(lane, kind, name, within, start, end + duration, work + duration, *rest)
        return True

    def link(self, source: int, target: int, kind: LinkKind, lag: int = 0) -> None:
        self._links.add(source, target, kind, lag)

    def operator(
        self, lane: int, stream: int, name: int, kernel: int, parent: int, begin: int, work: int, returned: int,
        start: int, lasting: int,
    ) -> int:  # fmt: skip
        """An operator with one kernel. Returns the row of the launch, which precedes that of the kernel."""
        spans, frames = self.spans, self.frames
        first, frame = spans.count, frames.count
        self._operators.add(first, frame, lane, stream, name, kernel, parent, begin, work, returned, start, lasting)
        frames.count = frame + 1
        self.frame_ends.append(returned)
        launch = first + 1 if work else first
        spans.count = launch + 2
        return launch

    def open(self, lane: int, kind: int, name: int, parent: int, start: int) -> int:
        """Open a frame; unless closed, it lasts until the timeline is made."""
        self.frame_ends.append(NONE)
        return self.frames.add(lane, kind, name, parent, start)

    def close(self, frame: int, end: int) -> None:
        self.frame_ends[frame] = end

    def timeline(self, now: Mapping[int, int], facts: RunFacts) -> Timeline:
        """The timeline so far. Open frames end `now`, the time of each lane."""
        columns, names = self.columns(), tuple(self.names)
        launch, latency = columns[-2], columns[-1]
        return Timeline(
            lanes=tuple(self.lanes),
            names=names,
            spans=described(Spans.of(columns.shape[1], **dict(zip(_COLUMNS, columns[:-2], strict=True))), names),
            links=self._all_links(launch, latency),
            frames=described(self._all_frames(now), names),
            # a mark is at the next row of its thread; at the end of the run there may be none yet
            marks=np.unique([row for row in self.steps() if row < self.spans.count]).astype(np.int64),
            memory=self._all_memory(),
            facts=facts,
        )

    @property
    def announced(self) -> bool:
        """Whether the program marks its steps itself."""
        return any(len(self.mark_rows[mark]) > 1 for mark in (OWN_STEP, PROFILER_STEP))

    def steps(self) -> list[int]:
        """The rows that begin the run's steps, by the most trusted kind of mark. A kind is ignored as a warm-up if
        another kind follows it at least as often, as when a graph replays whole steps afterwards."""
        candidates = [rows for rows in self.mark_rows.values() if len(rows) > 1]
        for rows in candidates:
            if not any(other[0] > rows[-1] and len(other) >= len(rows) for other in candidates):
                return rows
        return []

    def columns(self) -> Ints:
        """All spans, transposed. Those of `operator` are filled into the rows reserved for them."""
        first, frame, lane, stream, _, kernel, parent, begin, work, returned, start, lasting = self._operators.columns()
        cost, gap, latency = self.launch
        works = work > 0
        launch = first + works
        columns = np.empty((len(_COLUMNS) + 2, self.spans.count), np.int64)
        _fill(
            columns, (*_COLUMNS, "launch", "latency"), self.spans.columns(),
            (first[works], {
                "lane": lane[works], "kind": _WORK, "frame": parent[works], "start": begin[works],
                "end": (begin + work)[works], "work": work[works],
            }),
            (launch, {
                "lane": lane, "kind": Kind.LAUNCH, "name": self.names[_LAUNCH], "frame": frame,
                "start": begin + work, "end": returned, "work": cost,
            }),
            (launch + 1, {
                "lane": stream, "kind": Kind.KERNEL, "name": kernel, "start": start, "end": start + lasting,
                "work": lasting, "lag": gap, "launch": launch, "latency": latency,
            }),
        )  # fmt: skip
        return columns

    def _all_memory(self) -> MemoryUse:
        lane, device, time, block, size, reserved, *_ = self.memory.columns()
        allocated = np.zeros(len(size), np.int64)
        for index in np.unique(device):
            allocated[device == index] = np.cumsum(size[device == index])
        places = {"lane": lane, "device": device, "time": time, "block": block}
        return MemoryUse.of(len(size), **places, size=size, reserved=reserved, allocated=allocated)

    def _all_links(self, launch: Ints, latency: Ints) -> Links:
        launched = np.flatnonzero(launch != NONE)
        source, target, kind, lag = self._links.columns()
        return Links.of(
            len(launched) + len(source),
            source=np.concatenate([launch[launched], source]),
            target=np.concatenate([launched, target]),
            kind=np.concatenate([np.full(len(launched), LinkKind.LAUNCH), kind]),
            lag=np.concatenate([latency[launched], lag]),
        )

    def _all_frames(self, now: Mapping[int, int]) -> Frames:
        _, frame, lane, _, name, _, parent, begin, work, *_ = self._operators.columns()
        columns = np.empty((len(_FRAME_COLUMNS), self.frames.count), np.int64)
        operators = {"lane": lane, "kind": _OPERATOR, "name": name, "parent": parent, "start": begin + work}
        _fill(columns, _FRAME_COLUMNS, self.frames.columns(), (frame, operators))
        end = np.array(self.frame_ends, np.int64)
        current = np.array([now.get(lane, 0) for lane in range(len(self.lanes))], np.int64)
        end = np.where(end == NONE, current[columns[0]], end)
        return Frames.of(len(end), **dict(zip(_FRAME_COLUMNS, columns, strict=True)), end=end)


def _fill(columns: Ints, names: Sequence[str], other_rows: Ints, *placed_rows: tuple[Ints, Mapping[str, Any]]) -> None:
    """Fill some rows, given by their places and values, and all remaining rows with `other_rows` in order."""
    free = np.ones(columns.shape[1], bool)
    for places, values in placed_rows:
        free[places] = False
        for column, name in zip(columns, names, strict=True):
            column[places] = values.get(name, _ORDINARY.get(name, 0))
    columns[:, free] = other_rows
