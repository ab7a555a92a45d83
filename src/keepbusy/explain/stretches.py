"""Stretches between launches, or else between collectives: the same part of the program on every rank.

Ranks that run one program do the same work between two collectives. What one of them spends
there beyond the others in every step is lateness; what differs now and then is noise, which the
slowest rank of each collective would otherwise pass on to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import NONE, Ints, Kind, LinkKind, Mask, Timeline

LATE = 1_000_000
LARGEST = 4.0
MORE = 500_000
FAR = 1.25
"""A rank is late in a stretch if it spends this much longer there than its peers, and this many times as long."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """For each rank, place in the step and step: the time that its host spent."""

    cell: Ints  # of each row: index into the flattened table, or NONE where it does not count
    spent: npt.NDArray[np.float64]  # rank, place, step
    syncs: Ints  # of each sync the cell it stands in, NONE of other rows

    @property
    def usual(self) -> npt.NDArray[np.float64]:
        """Of each rank and place, the median step."""
        return np.median(self.spent, axis=2)

    def late(self) -> Mask:
        """Which ranks are late at which place."""
        return is_late(self.usual, self.peers())

    def peers(self) -> npt.NDArray[np.float64]:
        """Of each rank and place, what its peers spend there."""
        usual = self.usual
        return np.stack([np.median(np.delete(usual, rank, axis=0), axis=0) for rank in range(len(usual))])


def is_late(spent: npt.NDArray[np.float64], peers: npt.NDArray[np.float64]) -> Mask:
    return (spent - peers > LATE) & (spent > FAR * peers)


def has_more(spent: npt.NDArray[np.float64], peers: npt.NDArray[np.float64]) -> Mask:
    """Of device work, which varies little: a rank that has a tenth more to do than its peers is given more."""
    return (spent - peers > MORE) & (spent > 1.1 * peers)


def device_work(timeline: Timeline) -> tuple[npt.NDArray[np.float64], Ints]:
    """For each rank, and each stretch between collectives (or step), what its device has to do, collectives aside.

    And of each row its index in that table, NONE where it does not count.
    """
    spans, ranks, rank = timeline.spans, timeline.ranks, timeline.rank_of_rows
    met = spans.meeting != NONE
    border = met if _per_step(timeline, met) else np.isin(np.arange(len(timeline)), timeline.marks)
    width = max(int(np.count_nonzero(border & (rank == one))) for one in ranks) + 1
    cell = np.full(len(timeline), NONE, np.int64)
    for index, one in enumerate(ranks):
        place = np.cumsum(border & (rank == one))
        mine = timeline.on_device & (spans.kind != Kind.COLLECTIVE) & (rank == one)
        cell[mine] = index * width + place[mine]
    known = cell != NONE
    spent = np.bincount(cell[known], spans.work[known], len(ranks) * width).astype(np.float64)
    return spent.reshape(len(ranks), width), cell


def stretches(timeline: Timeline) -> Stretches | None:
    """None where there is one rank only, or where nothing shows that the ranks run the same program."""
    spans, rank, ranks = timeline.spans, timeline.rank_of_rows, timeline.ranks
    met = spans.meeting != NONE
    border = _launches(timeline)
    per_step = _per_step(timeline, border) or _per_step(timeline, met)
    border = border if _per_step(timeline, border) else met
    if len(ranks) < 2 or not per_step:
        return None
    steps = len(timeline.marks_of(ranks[0]))
    counted = ~met & (spans.kind != Kind.SYNC) & ~timeline.on_device
    cell, syncs = np.full(len(timeline), NONE, np.int64), np.full(len(timeline), NONE, np.int64)
    for index, one in enumerate(ranks):
        mine = rank == one
        order = np.cumsum(border[mine])  # what follows the last border of a step belongs to the next one's first
        step, place = np.divmod(np.minimum(order, per_step * steps - 1), per_step)
        here = (index * per_step + place) * steps + step
        cell[mine] = np.where(counted[mine], here, NONE)
        syncs[mine] = np.where(spans.kind[mine] == Kind.SYNC, here, NONE)
    known = cell != NONE
    spent = np.bincount(cell[known], spans.work[known], len(ranks) * per_step * steps).astype(np.float64)
    return Stretches(cell, spent.reshape(len(ranks), per_step, steps), syncs)


def _launches(timeline: Timeline) -> Mask:
    launches = np.zeros(len(timeline), bool)
    links = timeline.links
    launches[links.source[links.kind == LinkKind.LAUNCH]] = True
    return launches


def _per_step(timeline: Timeline, border: Mask) -> int:
    """How many borders each rank passes in each step, if all of them pass equally many; else 0."""
    before = np.zeros(len(timeline) + 1, np.int64)
    counts = set()
    for one in timeline.ranks:
        np.cumsum(border & (timeline.rank_of_rows == one), out=before[1:])
        marks = np.append(timeline.marks_of(one), len(timeline))
        counts |= set(np.diff(before[marks]).tolist())
    return counts.pop() if len(counts) == 1 else 0


def without_noise(timeline: Timeline) -> Timeline:
    """Host work of ranks that are not late, as it usually is: over all ranks and steps, for they do the same."""
    found = stretches(timeline)
    if found is None:
        return timeline
    late = found.late()
    punctual = np.where(late[:, :, None], np.nan, found.spent)
    typical = np.nanmedian(punctual.transpose(1, 0, 2).reshape(len(late[0]), -1), axis=1)
    wanted = np.where(late, found.usual, typical)[:, :, None]
    factor = np.minimum(LARGEST, wanted / np.maximum(found.spent, 1.0)).ravel()
    work = timeline.spans.work * np.where(found.cell == NONE, 1.0, factor[found.cell])
    return timeline.change_spans(work=work.astype(np.int64))
