"""An edit: what a fix changes in a timeline. Edits of several fixes combine; applying one gives a new timeline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import NONE, Ints, Lane, LinkKind, Mask, Timeline

Floats: TypeAlias = npt.NDArray[np.float64]
UNCHANGED = 1 << 62
GRAPH_SAVES = 870
"""Nanoseconds that a graph saves on the device for each of its kernels (H200, benchmarks/gpu/graph_gap.py)."""


class Beside(IntEnum):
    """Lanes that a fix opens beside the existing ones; what moves there holds nobody up unless it is the slowest."""

    STAYS = 0
    FETCH = 1  # host to device, a step ahead
    BRING = 2  # device to host, a step behind
    WIRE = 3  # collectives during the compute
    WORKERS = 4  # input prepared by other processes


_NAMES = {Beside.FETCH: "fetching", Beside.BRING: "bringing home", Beside.WIRE: "wire", Beside.WORKERS: "workers"}


@dataclass(frozen=True, eq=False)
class Edit:
    """Columns beside the spans."""

    free: Mask  # waits for nobody
    gone: Mask  # leaves, and its time with it
    work: Ints  # at most this much
    beside: Ints  # moves to a lane of its own
    captured: Mask  # is launched by a graph
    scale: Floats  # times this much work

    @staticmethod
    def nothing(timeline: Timeline) -> Edit:
        count = len(timeline)
        no = np.zeros(count, bool)
        return Edit(
            no.copy(), no.copy(), np.full(count, UNCHANGED), np.zeros(count, np.int64), no.copy(), np.ones(count)
        )

    def saves(self, work: Ints) -> Ints:
        """What each row that stays would lose."""
        return np.maximum(work - np.minimum(work, self.work) * self.scale, 0).astype(np.int64)

    def __or__(self, other: Edit) -> Edit:
        return Edit(
            self.free | other.free,
            self.gone | other.gone,
            np.minimum(self.work, other.work),
            np.maximum(self.beside, other.beside),
            self.captured | other.captured,
            self.scale * other.scale,
        )

    @property
    def touched(self) -> Mask:
        return self.free | self.gone | (self.work < UNCHANGED) | (self.beside > 0) | self.captured | (self.scale != 1)


def apply(timeline: Timeline, edit: Edit) -> Timeline:
    """The timeline with the edit made, ready to be replayed."""
    spans = timeline.spans
    # what moves beside is prepared for there: its work is set, not only limited
    work = np.where((edit.beside > 0) & (edit.work < UNCHANGED), edit.work, np.minimum(spans.work, edit.work))
    work = (work * edit.scale).astype(np.int64)
    lag = np.where(edit.captured, np.maximum(spans.lag - GRAPH_SAVES, np.minimum(spans.lag, 0)), spans.lag)
    timeline = timeline.change_spans(work=work, lag=lag, awaits=np.where(edit.free, NONE, spans.awaits))
    timeline = _without_event_links(timeline, edit.free)
    return _moved(timeline, edit.beside).keep(~edit.gone)


def _without_event_links(timeline: Timeline, free: Mask) -> Timeline:
    """A host that waits for nobody does not wait for an event either."""
    links = timeline.links
    cut = free[links.target] & (links.kind == LinkKind.ORDER)
    return timeline.change(links=links.take(np.flatnonzero(~cut))) if cut.any() else timeline


def _moved(timeline: Timeline, beside: Ints) -> Timeline:
    """Rows on lanes of their own: nothing on other streams waits for them, and they wait for no stream."""
    if not beside.any():
        return timeline
    lanes, lane = list(timeline.lanes), timeline.spans.lane.astype(np.int64)
    rank = timeline.rank_of_rows
    for where in np.unique(beside[beside > 0]).tolist():
        for one in timeline.ranks:
            mine = (beside == where) & (rank == one)
            if mine.any():
                lane[mine] = len(lanes)
                lanes.append(Lane(one, None if where == Beside.WORKERS else 0, -where, _NAMES[Beside(where)]))
    links, away = timeline.links, beside > 0
    cut = (links.kind != LinkKind.LAUNCH) & (away[links.source] | away[links.target])
    spans = timeline.spans.change(lane=lane, lag=np.where(away, 0, timeline.spans.lag))
    return timeline.change(lanes=tuple(lanes), spans=spans, links=links.take(np.flatnonzero(~cut)))
