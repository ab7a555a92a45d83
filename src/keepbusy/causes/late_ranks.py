"""A rank that arrives late at a collective, where its peers wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keepbusy.causes.cause import CauseKind, Finding, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs, by_workers
from keepbusy.causes.places import Where, by_place
from keepbusy.timeline.model import NONE, Floats, Ints, Kind, Mask, Timeline

UNEQUAL_TIMES = 1.1
"""Device work is unequal where a rank has so many times as much of it as its peers."""
LATE_BY = 1_000_000
"""A host is late in a stretch if it spends this much longer there than its peers."""
WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not worth a line."""


class LatePeer(CauseKind):
    """What a rank does beyond its peers in every step, on its host or on its device."""

    place = LedgerPlace(
        name="peer_late",
        label="late peer",
        colour="#9d90dc",
        sentence="One rank is late; the others wait for it",
        happens="A rank arrives late at a collective and its peers wait.",
        fixed_by="Find out what that rank does meanwhile; the report names it.",
    )
    among_ranks = True

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        if len(inputs.timeline.ranks) > 1:
            if stretches := host_stretches(inputs.timeline):
                _cut_to_peers(inputs, builder, stretches)
            _share_device_work(inputs, builder)

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:
        late = sorted(one.rank for one in late_ranks(inputs, finding))
        if not late:
            who = "Ranks come"
        elif len(late) == 1:
            who = f"Rank {late[0]} comes"
        elif len(late) <= 4:
            who = f"Ranks {', '.join(map(str, late[:-1]))} and {late[-1]} come"
        else:
            who = f"{len(late)} ranks come"
        if (inputs.timeline.spans.meeting == NONE).all():
            return f"{who} late to the next collective, which was not recorded. The others wait there."
        return f"{who} late to the collectives, and the others wait there."


def _cut_to_peers(inputs: CauseInputs, builder: FindingBuilder, stretches: Stretches) -> None:
    work, (ranks, places, steps) = inputs.timeline.spans.work, stretches.spent.shape
    excess = stretches.usual - stretches.peers
    for rank, place in np.argwhere(stretches.late).tolist():
        for step in range(steps):
            at = (rank * places + place) * steps + step
            # the excess leaves the longest rows first: one long row is what a person would call late
            rows = np.flatnonzero(stretches.of_row == at)
            rows = rows[np.argsort(-work[rows], kind="stable")]
            longer = np.cumsum(work[rows]) - work[rows]
            taken = np.minimum(work[rows], np.maximum(excess[rank, place] - longer, 0)).astype(np.int64)
            cut = taken > 0
            builder.edit.work[rows[cut]] = (work[rows] - taken)[cut]
            builder.culprit[rows[cut]] = rows[cut]
            # syncs that only the late rank makes go with what it does there
            syncs = np.flatnonzero(stretches.of_sync == at)
            everywhere = [(stretches.of_sync == (one * places + place) * steps + step).sum() for one in range(ranks)]
            if len(syncs) > np.median(everywhere):
                builder.edit.drop_wait[syncs] = True
                builder.edit.work[syncs] = 0
                builder.culprit[syncs] = syncs


def _share_device_work(inputs: CauseInputs, builder: FindingBuilder) -> None:
    """Device work that is unequal is shared out, stretch by stretch: nobody has less to do altogether."""
    spent, stretch = _device_work(inputs)
    mean = spent.sum(axis=1) / inputs.steps
    peers = np.array([np.median(np.delete(mean, rank)) for rank in range(len(mean))])
    late = mean > UNEQUAL_TIMES * peers
    if not late.any():
        return
    rows = np.flatnonzero(stretch != NONE)
    fair = spent.mean(axis=0, keepdims=True) / np.maximum(spent, 1.0)
    builder.edit.scale[rows] = fair.ravel()[stretch[rows]]
    is_late = late[stretch[rows] // spent.shape[1]]
    culprit = np.where(inputs.launch[rows] == NONE, rows, inputs.launch[rows])
    builder.culprit[rows[is_late]] = culprit[is_late]
    builder.culprit[rows[~is_late]] = int(culprit[is_late][0])  # they change along with the late one's


def _device_work(inputs: CauseInputs) -> tuple[Floats, Ints]:
    """For each rank, and each stretch between collectives (or step), what its device has to do, collectives aside.

    And of each row its index in that table, NONE where it does not count.
    """
    timeline = inputs.timeline
    spans, ranks, rank = timeline.spans, timeline.ranks, timeline.rank_of_rows
    meets = spans.meeting != NONE
    border = meets if borders_per_step(timeline, meets) else np.isin(np.arange(len(timeline)), timeline.marks)
    width = max(int(np.count_nonzero(border & (rank == one))) for one in ranks) + 1
    stretch = np.full(len(timeline), NONE, np.int64)
    for index, one in enumerate(ranks):
        place = np.cumsum(border & (rank == one))
        of_rank = timeline.on_device & (spans.kind != Kind.COLLECTIVE) & (rank == one)
        stretch[of_rank] = index * width + place[of_rank]
    known = stretch != NONE
    spent = np.bincount(stretch[known], spans.work[known], len(ranks) * width).astype(np.float64)
    return spent.reshape(len(ranks), width), stretch


@dataclass(frozen=True)
class LateRank:
    """A rank that its peers wait for."""

    rank: int
    late: int  # how much later than its peers it arrives, a step
    cause: str  # what it did meanwhile
    where: Where


def late_ranks(inputs: CauseInputs, finding: Finding) -> tuple[LateRank, ...]:
    """Which ranks come late, by how much, and what they do meanwhile; the latest first."""
    excess = np.where(finding.culprit >= 0, finding.edit.saves(inputs.timeline.spans.work), 0)
    rank = inputs.timeline.rank_of_rows
    late = np.intersect1d(rank[finding.rows], rank[np.flatnonzero(excess)]).tolist()
    found = [_late(inputs, finding, one, np.where(rank == one, excess, 0)) for one in late]
    latest = max((one.late for one in found), default=0)
    return tuple(sorted((one for one in found if one.late >= WORTH_NAMING * latest), key=lambda one: -one.late))


def _late(inputs: CauseInputs, finding: Finding, rank: int, excess: Ints) -> LateRank:
    """The place that loses most, were its rank like the others."""
    rows = np.flatnonzero(excess)
    on_device = inputs.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    hosts = finding.culprit[rows]
    of_host = np.bincount(hosts, excess[rows], len(excess))
    places = by_place(inputs, np.unique(hosts), "peer_late")
    worst = max(places, key=lambda place: of_host[places[place]].sum())
    ranks, late = len(inputs.timeline.ranks), excess[rows].sum() / inputs.steps
    if computing:  # it would keep its share of what it does beyond the others
        return LateRank(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return LateRank(rank, int(late), "host_work", worst)


@dataclass(frozen=True, eq=False)
class Stretches:
    """For each rank, place in the step and step: the time that its host spent."""

    of_row: Ints  # index into the flattened table, or NONE where the row does not count
    of_sync: Ints  # of each sync the stretch it stands in, NONE of other rows
    spent: Floats  # rank, place, step

    @property
    def usual(self) -> Floats:
        """Of each rank and place, the median step."""
        return np.median(self.spent, axis=2)

    @property
    def peers(self) -> Floats:
        """Of each rank and place, what its peers spend there."""
        usual = self.usual
        return np.stack([np.median(np.delete(usual, rank, axis=0), axis=0) for rank in range(len(usual))])

    @property
    def late(self) -> Mask:
        """Which ranks are late at which place."""
        return self.usual - self.peers > LATE_BY


class _Borders(NamedTuple):
    rows: Mask
    per_step: int


def host_stretches(timeline: Timeline) -> Stretches | None:
    """None where nothing shows that the ranks run the same program."""
    borders = _borders(timeline)
    if borders is None:
        return None
    spans, steps, per_step = timeline.spans, len(timeline.marks_of(timeline.ranks[0])), borders.per_step
    counted = (spans.meeting == NONE) & (spans.kind != Kind.SYNC) & ~timeline.on_device & ~by_workers(timeline)
    of_row, of_sync = np.full(len(timeline), NONE, np.int64), np.full(len(timeline), NONE, np.int64)
    for index, rank in enumerate(timeline.ranks):
        of_rank = timeline.rank_of_rows == rank
        # what follows the last border of a step belongs to the next one's first
        passed = np.cumsum(borders.rows[of_rank])
        step, place = np.divmod(np.minimum(passed, per_step * steps - 1), per_step)
        stretch = (index * per_step + place) * steps + step
        of_row[of_rank] = np.where(counted[of_rank], stretch, NONE)
        of_sync[of_rank] = np.where(spans.kind[of_rank] == Kind.SYNC, stretch, NONE)
    known = of_row != NONE
    spent = np.bincount(of_row[known], spans.work[known], len(timeline.ranks) * per_step * steps).astype(np.float64)
    return Stretches(of_row, of_sync, spent.reshape(len(timeline.ranks), per_step, steps))


def _borders(timeline: Timeline) -> _Borders | None:
    """The finest borders of which every rank passes equally many in every step.

    Launches, else collectives; and where ranks do not even meet equally often, whole steps, as long as all ranks
    meet somewhere in the run (stages of a pipeline, which rightly differ, exchange messages two by two).
    """
    launching, meets = np.zeros(len(timeline), bool), timeline.spans.meeting != NONE
    launching[timeline.launches.source] = True
    for rows in (launching, meets):
        if per_step := borders_per_step(timeline, rows):
            return _Borders(rows, per_step)
    if (timeline.meetings.present == len(timeline.ranks)).any():
        return _Borders(np.isin(np.arange(len(timeline)), timeline.marks), 1)
    return None


def borders_per_step(timeline: Timeline, border: Mask) -> int:
    """How many borders each rank passes in each step, if all of them pass equally many; else 0."""
    before = np.zeros(len(timeline) + 1, np.int64)
    counts = set()
    for rank in timeline.ranks:
        np.cumsum(border & (timeline.rank_of_rows == rank), out=before[1:])
        marks = np.append(timeline.marks_of(rank), len(timeline))
        counts |= set(np.diff(before[marks]).tolist())
    return counts.pop() if len(counts) == 1 else 0
