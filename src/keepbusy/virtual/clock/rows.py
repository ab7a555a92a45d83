"""The rows that the clock writes, as they come, and the `Timeline` that is made of them.

What a row means is in `timeline/model.py`; here its launch stands in the row itself, because nearly every command has
one.
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
"""Begin the names of frames that begin the run's steps, the most trusted first."""
_COLUMNS = (
    "lane", "kind", "name", "frame", "start", "end", "work", "lag", "awaits", "group", "size", "direction", "pinned",
)  # fmt: skip
"""The columns of a row as the clock writes it, before its launch and the lag after it."""
_FRAME_COLUMNS = ("lane", "kind", "name", "parent", "start")
_ORDINARY = dict.fromkeys(("frame", "awaits", "group", "pinned", "launch"), NONE)
"""The values of columns that are not mentioned; the others are zero."""
_PACKED = 1 << 16
_LAUNCH = "cudaLaunchKernel"
_WORK, _OPERATOR = int(Kind.WORK), int(FrameKind.OPERATOR)


class Packed:
    """Rows of integers: bytes first, then narrow columns of numpy. Tuples would keep the garbage collector busy."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._row = Struct(f"{width}q")
        self._bytes, self._full = self._row.pack, _PACKED * self._row.size
        self._fresh = bytearray()
        self._blocks: list[list[npt.NDArray[np.signedinteger[Any]]]] = []

    def add(self, *row: int) -> int:
        """Its number."""
        fresh, number = self._fresh, self.count
        if len(fresh) >= self._full:
            self._blocks.append([_narrow(column) for column in self._unpacked()])
            fresh.clear()
        fresh += self._bytes(*row)
        self.count = number + 1
        return number

    def last(self) -> tuple[int, ...]:
        """The row that came last."""
        return self._row.unpack(self._fresh[-self._row.size :])

    def change_last(self, *row: int) -> None:
        self._fresh[-self._row.size :] = self._bytes(*row)

    def columns(self, first: int = 0) -> Ints:
        """The rows from `first` on, transposed."""
        fresh, past = self._unpacked(), first // _PACKED
        blocks: list[Any] = [*self._blocks[past:], fresh]
        whole = np.stack([np.concatenate([block[at] for block in blocks]) for at in range(len(fresh))])
        return whole[:, first - min(past, len(self._blocks)) * _PACKED :].astype(np.int64, copy=False)

    def _unpacked(self) -> Ints:
        return np.frombuffer(bytes(self._fresh), np.int64).reshape(-1, self._row.size // 8).T


def _narrow(column: Ints) -> npt.NDArray[np.signedinteger[Any]]:
    """In as few bytes a number as they need: a long run has millions of rows, and most columns are small."""
    low, high = int(column.min()), int(column.max())
    fits = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return column.astype(next(fits, np.int64))


class Names(dict[str, int]):
    """A number for each text, in the order in which they come."""

    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class Rows:
    """Spans, links, frames and names, as they come."""

    def __init__(self, call: int = 0, gap: int = 0, latency: int = 0) -> None:
        """For every launch of a kernel: what the call costs, the gap before a kernel that waits for another, and how
        late one starts that does not."""
        self.launch = call, gap, latency
        self.names = Names({"": 0, _LAUNCH: 1})
        self.lanes: list[Lane] = []
        self.lines: list[tuple[int, ...]] = [()]  # of each place the names of its lines, from the outside in
        self.mark_rows: dict[str, list[int]] = {mark: [] for mark in MARKS}
        self.spans = Packed(len(_COLUMNS) + 2)
        self._links = Packed(4)
        self.frames = Packed(len(_FRAME_COLUMNS))
        self.frame_ends = array("q")
        self._operators = Packed(12)
        self.memory = Packed(8)
        """Blocks that came or went: lane, device, time, address, bytes, reserved, bytes asked for, whether small."""
        self.add: Callable[..., int] = self.spans.add

    def lane(self, lane: Lane) -> int:
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def lengthen(self, row: int, frame: int, duration: int) -> bool:
        """Let the work of a row go on, if it is the last of all and within that frame."""
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
        """The usual operator, with one kernel. Returns the row of the launch, before that of the kernel."""
        spans, frames = self.spans, self.frames
        first, frame = spans.count, frames.count
        self._operators.add(first, frame, lane, stream, name, kernel, parent, begin, work, returned, start, lasting)
        frames.count = frame + 1
        self.frame_ends.append(returned)
        launch = first + 1 if work else first
        spans.count = launch + 2
        return launch

    def open(self, lane: int, kind: int, name: int, parent: int, start: int) -> int:
        """A frame; `close` it, or it lasts until the timeline is made."""
        self.frame_ends.append(NONE)
        return self.frames.add(lane, kind, name, parent, start)

    def close(self, frame: int, end: int) -> None:
        self.frame_ends[frame] = end

    def timeline(self, now: Mapping[int, int], facts: RunFacts) -> Timeline:
        """All so far. Frames still open end `now`, at the time of their lane."""
        columns, names = self.columns(), tuple(self.names)
        launch, latency = columns[-2], columns[-1]
        return Timeline(
            lanes=tuple(self.lanes),
            names=names,
            spans=described(Spans.of(columns.shape[1], **dict(zip(_COLUMNS, columns[:-2], strict=True))), names),
            links=self._all_links(launch, latency),
            frames=described(self._all_frames(now), names),
            # a mark stands at the next row of its thread; one at the very end has none yet
            marks=np.unique([row for row in self.steps() if row < self.spans.count]).astype(np.int64),
            memory=self._all_memory(),
            facts=facts,
        )

    @property
    def announced(self) -> bool:
        """Whether the program says itself where its steps end."""
        return any(len(self.mark_rows[mark]) > 1 for mark in (OWN_STEP, PROFILER_STEP))

    def steps(self) -> list[int]:
        """The rows that begin the run's steps: those of the most trusted kind of mark. A kind was only a warm-up where
        another one follows it at least as often, as when a graph then replays whole steps."""
        known = [rows for rows in self.mark_rows.values() if len(rows) > 1]
        for rows in known:
            if not any(other[0] > rows[-1] and len(other) >= len(rows) for other in known):
                return rows
        return []

    def columns(self) -> Ints:
        """The spans, transposed: those of the usual operators stand in the places that were left for them."""
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
        held = {"lane": lane, "device": device, "time": time, "block": block, "size": size, "reserved": reserved}
        return MemoryUse.of(len(size), **held, allocated=allocated)

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


def _fill(columns: Ints, names: Sequence[str], plain: Ints, *others: tuple[Ints, Mapping[str, Any]]) -> None:
    """Some rows by their places and what is known of them, and all the rest in the order in which they came."""
    free = np.ones(columns.shape[1], bool)
    for places, known in others:
        free[places] = False
        for column, name in zip(columns, names, strict=True):
            column[places] = known.get(name, _ORDINARY.get(name, 0))
    columns[:, free] = plain
