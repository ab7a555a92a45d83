"""The rows a clock writes down, and the `Timeline` they make.

What a row means is in `timeline/model.py`; here its launch stands in the row itself, because nearly every command has
one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

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


class Packed:
    """Rows of integers, many of them: bytes as they come, narrow columns of numpy as they grow.

    A clock writes a few rows for every operator. As tuples they would keep Python's garbage collector busy.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self._row = Struct(f"{width}q")
        self._bytes = self._row.pack
        self._fresh = bytearray()
        self._blocks: list[list[npt.NDArray[np.signedinteger[Any]]]] = []

    def add(self, *row: int) -> int:
        """Its number."""
        number = self.count
        if number % PACKED == 0 and self._fresh:
            self._blocks.append([_narrow(column) for column in self._unpacked()])
            self._fresh.clear()
        self._fresh += self._bytes(*row)
        self.count = number + 1
        return number

    def last(self) -> tuple[int, ...]:
        """The row that came last."""
        return self._row.unpack(self._fresh[-self._row.size :])

    def change_last(self, *row: int) -> None:
        self._fresh[-self._row.size :] = self._bytes(*row)

    def columns(self, first: int = 0) -> Ints:
        """The rows from `first` on, transposed."""
        fresh, past = self._unpacked(), first // PACKED
        blocks: list[Any] = [*self._blocks[past:], fresh]
        whole = np.stack([np.concatenate([block[at] for block in blocks]) for at in range(len(fresh))])
        return whole[:, first - min(past, len(self._blocks)) * PACKED :].astype(np.int64, copy=False)

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

    def __init__(self) -> None:
        self.names = Names({"": 0})
        self.lanes: list[Lane] = []
        self.marks: list[int] = []
        self.spans = Packed(len(COLUMNS) + 2)
        self._links = Packed(4)
        self.frames = Packed(len(_FRAME_COLUMNS))
        self.frame_ends = array("q")
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

    def open(self, lane: int, kind: int, name: int, parent: int, start: int) -> int:
        """A frame; `close` it, or it lasts until the timeline is made."""
        self.frame_ends.append(NONE)
        return self.frames.add(lane, kind, name, parent, start)

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
        lane, device, time, block, size, reserved, *_ = self.memory.columns()
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
