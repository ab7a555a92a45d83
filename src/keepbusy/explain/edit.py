"""An edit: what a fix changes in a timeline. Edits of several fixes combine; applying one gives a new timeline.

Who looks for a cause writes one down, and for each row that it changes the row to blame: a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.explain.diagnosis import Where
from keepbusy.timeline.model import NONE, Ints, Lane, LinkKind, Links, Mask, Timeline, next_kept

Floats: TypeAlias = npt.NDArray[np.float64]
UNLIMITED = 1 << 62
GRAPH_SAVES = 870
"""Nanoseconds that a graph saves on the device for each of its kernels (H200, benchmarks/gpu/graph_gap.py)."""


class SideLane(IntEnum):
    """Lanes that a fix opens next to the existing ones; what moves there holds nobody up unless it is the slowest."""

    STAY = 0
    FETCH = 1  # host to device, a step ahead
    RETURN = 2  # device to host, a step behind
    WIRE = 3  # collectives during the compute
    WORKERS = 4  # input prepared by other processes


@dataclass(frozen=True, eq=False)
class Edit:
    """For each row, what becomes of it."""

    drop_wait: Mask  # it waits for nobody
    drop: Mask  # it leaves, and its time with it
    work: Ints  # it takes at most this long
    lane: Ints  # it moves to this `SideLane`
    capture: Mask  # a graph launches it
    scale: Floats  # it takes so many times as long

    @staticmethod
    def nothing(timeline: Timeline) -> Edit:
        return Edit(**{name: np.full(len(timeline), no) for name, (no, _) in _COLUMNS.items()})

    @staticmethod
    def of(edits: Sequence[Edit], timeline: Timeline) -> Edit:
        """All of these as one."""
        return edits[0] if len(edits) == 1 else reduce(or_, edits, Edit.nothing(timeline))

    def __or__(self, other: Edit) -> Edit:
        return Edit(**{name: join(getattr(self, name), getattr(other, name)) for name, (_, join) in _COLUMNS.items()})

    def only(self, rows: Mask) -> Edit:
        """The same for these rows; nothing happens to the others."""
        return Edit(**{name: np.where(rows, getattr(self, name), no) for name, (no, _) in _COLUMNS.items()})

    @property
    def touched(self) -> Mask:
        return np.logical_or.reduce([getattr(self, name) != no for name, (no, _) in _COLUMNS.items()])

    def saves(self, work: Ints) -> Ints:
        """What each row that stays would lose."""
        return np.maximum(work - np.minimum(work, self.work) * self.scale, 0).astype(np.int64)


_COLUMNS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "drop_wait": (False, np.logical_or),
    "drop": (False, np.logical_or),
    "work": (UNLIMITED, np.minimum),
    "lane": (int(SideLane.STAY), np.maximum),
    "capture": (False, np.logical_or),
    "scale": (1.0, np.multiply),
}
"""Of each column what stands where nothing happens, and how two edits of one row are one."""


@dataclass(frozen=True, eq=False)
class Finding:
    """A cause as it was found."""

    cause: str
    edit: Edit
    culprit: Ints  # of each row that the edit touches, the row to blame; NONE elsewhere
    rows: Ints  # the rows to blame
    count: int  # how often it was met
    places: Mapping[Where, Ints] = field(default_factory=dict)  # the rows to blame, by where they stand in the program
    _parts: dict[bytes, Edit] = field(default_factory=dict, repr=False)

    def only(self, rows: Ints) -> Edit:
        """The edit of these culprits alone. One object for the same rows, so that each is replayed once."""
        key = rows.tobytes()
        if key not in self._parts:
            self._parts[key] = self.edit.only(np.isin(self.culprit, rows))
        return self._parts[key]

    def held_at(self, timeline: Timeline, rows: Ints) -> int:
        """How long all took that is blamed on these culprits."""
        mine = np.isin(self.culprit, rows)
        return int((timeline.spans.end[mine] - timeline.spans.start[mine]).sum())


class Draft:
    """An edit being written down."""

    def __init__(self, cause: str, timeline: Timeline) -> None:
        self.cause, self.edit = cause, Edit.nothing(timeline)
        self.culprit = np.full(len(timeline), NONE, np.int64)
        self.count: int | None = None  # where it is not the number of rows to blame

    def finding(self) -> Finding:
        culprit = np.where(self.edit.touched, self.culprit, NONE)
        rows = np.unique(culprit[culprit != NONE])
        return Finding(self.cause, self.edit, culprit, rows, len(rows) if self.count is None else self.count)


def apply(timeline: Timeline, edit: Edit) -> Timeline:
    """The timeline with the edit made, ready to be replayed."""
    spans, moved = timeline.spans, edit.lane != SideLane.STAY
    # what moves to a side lane is prepared for there: its work is set, not only limited
    work = np.where(moved & (edit.work < UNLIMITED), edit.work, np.minimum(spans.work, edit.work))
    lag = np.where(edit.capture, np.maximum(spans.lag - GRAPH_SAVES, np.minimum(spans.lag, 0)), spans.lag)
    timeline = timeline.change_spans(
        work=(work * edit.scale).astype(np.int64), lag=lag, awaits=np.where(edit.drop_wait, NONE, spans.awaits)
    )
    # a host that waits for nobody does not wait for an event either
    links = timeline.links
    event = edit.drop_wait[links.target] & (links.kind == LinkKind.ORDER)
    if event.any():
        timeline = timeline.change(links=links.take(~event))
    return _on_side_lanes(timeline, edit.lane).keep(~edit.drop)


def _on_side_lanes(timeline: Timeline, side: Ints) -> Timeline:
    """Rows on lanes of their own: nothing on other streams waits for them, and they wait for no stream."""
    moved = side != SideLane.STAY
    if not moved.any():
        return timeline
    lanes, lane = list(timeline.lanes), timeline.spans.lane.astype(np.int64)
    rank = timeline.rank_of_rows
    for one in map(SideLane, np.unique(side[moved]).tolist()):
        for of_rank in timeline.ranks:
            rows = (side == one) & (rank == of_rank)
            if rows.any():
                lane[rows] = len(lanes)
                device = None if one == SideLane.WORKERS else 0
                lanes.append(Lane(of_rank, device, -one, f"side lane: {one.name.lower()}"))
    links = timeline.links if not timeline.facts.one_turn else _with_readers(timeline, side)
    cut = (links.kind != LinkKind.LAUNCH) & (moved[links.source] | moved[links.target])
    cut &= np.arange(len(links)) < len(timeline.links)
    spans = timeline.spans.change(lane=lane, lag=np.where(moved, 0, timeline.spans.lag))
    return timeline.change(lanes=tuple(lanes), spans=spans, links=links.take(~cut))


def _with_readers(timeline: Timeline, side: Ints) -> Links:
    """A script that is one turn has no turn before it in which to fetch: what follows a copy still waits for it."""
    copies = np.flatnonzero(side == SideLane.FETCH)
    stays = (side == SideLane.STAY) & timeline.on_device
    reader = next_kept(timeline.spans.lane, stays)[copies]
    known = (reader != NONE) & (reader > copies)
    order = Links.of(
        int(known.sum()),
        source=copies[known],
        target=reader[known],
        kind=np.full(int(known.sum()), LinkKind.ORDER),
        lag=np.zeros(int(known.sum()), np.int64),
    )
    return Links.concatenate([timeline.links, order])
