"""What a fix changes in a timeline, row by row, and the timeline with that change made, ready to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, reduce
from hashlib import blake2b
from operator import or_
from typing import Any

import numpy as np

from keepbusy.timeline.model import NONE, Floats, Ints, Lane, LinkKind, Links, Mask, Timeline, next_kept

GRAPH_SAVES = 870
"""Nanoseconds that a graph saves on the device for each of its kernels (H200, benchmarks/gpu/graph_gap.py)."""

UNLIMITED = 1 << 62
"""In an edit: no limit to the work of a row."""


class SideLane(IntEnum):
    """Lanes that a fix adds to the existing ones. Work there delays nothing unless its lane is the slowest."""

    STAY = 0
    FETCH = 1  # host to device, a step ahead
    RETURN = 2  # device to host, a step behind
    WIRE = 3  # collectives during the compute
    WORKERS = 4  # input prepared by other processes


@dataclass(frozen=True, eq=False)
class Edit:
    """What a fix changes in a timeline, for each row. Edits of several fixes combine."""

    drop_wait: Mask  # the row waits for nothing
    drop: Mask  # it is removed with its time
    work: Ints  # it takes at most this long
    lane: Ints  # it moves to this `SideLane`
    capture: Mask  # a graph launches it
    scale: Floats  # it takes so many times as long

    @staticmethod
    def nothing(timeline: Timeline) -> Edit:
        return Edit(**{name: np.full(len(timeline), no) for name, (no, _) in _EDIT_COLUMNS.items()})

    @staticmethod
    def of(edits: Sequence[Edit], timeline: Timeline) -> Edit:
        """All of these as one."""
        return edits[0] if len(edits) == 1 else reduce(or_, edits, Edit.nothing(timeline))

    def __or__(self, other: Edit) -> Edit:
        return Edit(
            **{name: join(getattr(self, name), getattr(other, name)) for name, (_, join) in _EDIT_COLUMNS.items()}
        )

    def only(self, rows: Mask) -> Edit:
        """The edit for these rows alone."""
        return Edit(**{name: np.where(rows, getattr(self, name), no) for name, (no, _) in _EDIT_COLUMNS.items()})

    @cached_property
    def digest(self) -> bytes:
        """Equal for edits that change the same, as those of different causes or fixes may."""
        return blake2b(b"".join(getattr(self, name).tobytes() for name in _EDIT_COLUMNS)).digest()

    @property
    def touched(self) -> Mask:
        return np.logical_or.reduce([getattr(self, name) != no for name, (no, _) in _EDIT_COLUMNS.items()])

    def saves(self, work: Ints) -> Ints:
        """How much work each row loses, unless it is removed."""
        return np.maximum(work - np.minimum(work, self.work) * self.scale, 0).astype(np.int64)


_EDIT_COLUMNS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "drop_wait": (False, np.logical_or),
    "drop": (False, np.logical_or),
    "work": (UNLIMITED, np.minimum),
    "lane": (int(SideLane.STAY), np.maximum),
    "capture": (False, np.logical_or),
    "scale": (1.0, np.multiply),
}
"""For each column the value for no change, and how to combine two edits of one row."""


def apply(timeline: Timeline, edit: Edit) -> Timeline:
    """The timeline with the edit made, ready to be replayed."""
    spans, moved = timeline.spans, edit.lane != SideLane.STAY
    # work that moves to a side lane is done differently there, so it is set, not only limited
    work = np.where(moved & (edit.work < UNLIMITED), edit.work, np.minimum(spans.work, edit.work))
    lag = np.where(edit.capture, np.maximum(spans.lag - GRAPH_SAVES, np.minimum(spans.lag, 0)), spans.lag)
    timeline = timeline.change_spans(
        work=(work * edit.scale).astype(np.int64), lag=lag, awaits=np.where(edit.drop_wait, NONE, spans.awaits)
    )
    # a host that waits for nothing does not wait for events either
    links = timeline.links
    event = edit.drop_wait[links.target] & (links.kind == LinkKind.ORDER)
    if event.any():
        timeline = timeline.change(links=links.take(~event))
    return _on_side_lanes(timeline, edit.lane).keep(~edit.drop)


def _on_side_lanes(timeline: Timeline, side: Ints) -> Timeline:
    """Moves rows to side lanes: nothing on other streams waits for them, and they wait for no stream."""
    moved = side != SideLane.STAY
    if not moved.any():
        return timeline
    lanes, lane = list(timeline.lanes), timeline.spans.lane.astype(np.int64)
    rank_of_rows = timeline.rank_of_rows
    for kind in map(SideLane, np.unique(side[moved]).tolist()):
        for rank in timeline.ranks:
            rows = (side == kind) & (rank_of_rows == rank)
            if rows.any():
                lane[rows] = len(lanes)
                device = None if kind == SideLane.WORKERS else 0
                lanes.append(Lane(rank, device, -kind, f"side lane: {kind.name.lower()}"))
    links = timeline.links if not timeline.facts.one_turn else _with_readers(timeline, side)
    cut = (links.kind != LinkKind.LAUNCH) & (moved[links.source] | moved[links.target])
    cut &= np.arange(len(links)) < len(timeline.links)
    spans = timeline.spans.change(lane=lane, lag=np.where(moved, 0, timeline.spans.lag))
    return timeline.change(lanes=tuple(lanes), spans=spans, links=links.take(~cut))


def _with_readers(timeline: Timeline, side: Ints) -> Links:
    """Adds links to the readers of fetched copies. In a script without iterations nothing can be fetched earlier."""
    copies = np.flatnonzero(side == SideLane.FETCH)
    stays = (side == SideLane.STAY) & timeline.on_device
    reader = next_kept(timeline.spans.lane, stays)[copies]
    has_reader = (reader != NONE) & (reader > copies)
    order = Links.of(int(has_reader.sum()), source=copies[has_reader], target=reader[has_reader], kind=LinkKind.ORDER)
    return Links.concatenate([timeline.links, order])
