"""The rows a clock writes down, and the `Timeline` they make.

A clock writes a row or two for every operator, so a row is a plain tuple on a list; every so often
the list is packed into numpy. What a row means is in `timeline/model.py`; here its launch stands in
the row itself, because nearly every command has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import NONE, Frames, Ints, Kind, Lane, LinkKind, Links, MemoryUse, Spans, Timeline
from keepbusy.timeline.run_facts import RunFacts

COLUMNS = (
    "lane", "kind", "name", "frame", "start", "end", "work", "lag", "awaits", "group", "size", "direction", "pinned",
)  # fmt: skip
"""Of a row as the clock writes it; then its launch, and the lag after it."""
_FRAME_COLUMNS = ("lane", "kind", "name", "parent", "start")
PACKED = 1 << 16
_WORK = int(Kind.WORK)

Row: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]


class Packed:
    """Tuples of integers, many of them: a list that turns into numpy as it grows."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self.fresh: list[tuple[int, ...]] = []
        self._blocks: list[list[npt.NDArray[np.signedinteger[Any]]]] = []

    def add(self, row: tuple[int, ...]) -> int:
        """Its number."""
        fresh, number = self.fresh, self.count
        if len(fresh) >= PACKED:
            self._blocks.append([_narrow(column) for column in self._unpacked()])
            fresh.clear()
        fresh.append(row)
        self.count = number + 1
        return number

    def columns(self) -> Ints:
        """A row a column: the transposed table."""
        fresh = self._unpacked()
        return np.stack(
            [np.concatenate([*(block[index] for block in self._blocks), fresh[index]]) for index in range(self.width)]
        )

    def _unpacked(self) -> Ints:
        flat = np.fromiter(chain.from_iterable(self.fresh), np.int64, len(self.fresh) * self.width)
        return flat.reshape(-1, self.width).T


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

    def __init__(self) -> None:
        self.names = Names({"": 0})
        self.lanes: list[Lane] = []
        self.marks: list[int] = []
        self.spans = Packed(len(COLUMNS) + 2)
        self._links = Packed(4)
        self.frames = Packed(len(_FRAME_COLUMNS))
        self.frame_ends = array("q")
        self.memory = Packed(6)  # of each block taken or given back: lane, device, time, address, bytes, reserved
        self.add: Callable[[Row], int] = self.spans.add

    def lane(self, lane: Lane) -> int:
        self.lanes.append(lane)
        return len(self.lanes) - 1

    def lengthen(self, row: int, frame: int, duration: int) -> bool:
        """Let the work of a row go on, if it is the last of all and within that frame."""
        fresh = self.spans.fresh
        if not fresh or row != self.spans.count - 1 or fresh[-1][1] != _WORK or fresh[-1][3] != frame:
            return False
        lane, kind, name, frame, start, end, work, *rest = fresh[-1]
        fresh[-1] = (lane, kind, name, frame, start, end + duration, work + duration, *rest)
        return True

    def link(self, source: int, target: int, kind: LinkKind, lag: int = 0) -> None:
        self._links.add((source, target, kind, lag))

    def open(self, lane: int, kind: int, name: int, parent: int, start: int) -> int:
        """A frame; `close` it, or it lasts until the timeline is made."""
        self.frame_ends.append(NONE)
        return self.frames.add((lane, kind, name, parent, start))

    def close(self, frame: int, end: int) -> None:
        self.frame_ends[frame] = end

    def timeline(self, now: Mapping[int, int], facts: RunFacts) -> Timeline:
        """All so far. Frames still open end `now`, at the time of their lane."""
        columns = self.spans.columns()
        launch, latency = columns[-2], columns[-1]
        return Timeline(
            lanes=tuple(self.lanes),
            names=tuple(self.names),
            spans=Spans.of(columns.shape[1], **dict(zip(COLUMNS, columns[:-2], strict=True))),
            links=self._all_links(launch, latency),
            frames=self._all_frames(now).described(tuple(self.names)),
            # a mark stands at the next row of its thread; one at the very end has none yet
            marks=np.unique([row for row in self.marks if row < self.spans.count]).astype(np.int64),
            memory=self._all_memory(),
            facts=facts,
        )

    def _all_memory(self) -> MemoryUse:
        lane, device, time, block, size, reserved = self.memory.columns()
        allocated = np.zeros(len(size), np.int64)
        for one in np.unique(device):
            allocated[device == one] = np.cumsum(size[device == one])
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
        columns = self.frames.columns()
        end = np.array(self.frame_ends, np.int64)
        current = np.array([now.get(lane, 0) for lane in range(len(self.lanes))], np.int64)
        end = np.where(end == NONE, current[columns[0]], end)
        return Frames.of(len(end), **dict(zip(_FRAME_COLUMNS, columns, strict=True)), end=end)
