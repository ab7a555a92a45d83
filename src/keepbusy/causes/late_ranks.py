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
"""Device work is unequal if a rank has so many times as much of it as its peers."""
LATE_BY = 1_000_000
"""A host is late in a section of the step if it spends this much longer there than its peers."""
WORTH_NAMING = 0.2
"""Ranks that are late by less than this share of the latest one are not named."""


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
            if sections := host_sections(inputs.timeline):
                _cut_to_peers(inputs, builder, sections)
            _share_device_work(inputs, builder)

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:
        late = sorted(found.rank for found in late_ranks(inputs, finding))
        if not late:
            subject = "Ranks come"
        elif len(late) == 1:
            subject = f"Rank {late[0]} comes"
        elif len(late) <= 4:
            subject = f"Ranks {', '.join(map(str, late[:-1]))} and {late[-1]} come"
        else:
            subject = f"{len(late)} ranks come"
        if (inputs.timeline.spans.meeting == NONE).all():
            return f"{subject} late to the next collective, which was not recorded. The others wait there."
        return f"{subject} late to the collectives, and the others wait there."


def _cut_to_peers(inputs: CauseInputs, builder: FindingBuilder, sections: HostSections) -> None:
    work, (ranks, places, steps) = inputs.timeline.spans.work, sections.spent.shape
    excess = sections.usual - sections.peers
    for rank, place in np.argwhere(sections.late).tolist():
        for step in range(steps):
            section = (rank * places + place) * steps + step
            # the longest rows are cut first: one long row is what a person would call late
            rows = np.flatnonzero(sections.of_row == section)
            rows = rows[np.argsort(-work[rows], kind="stable")]
            longer = np.cumsum(work[rows]) - work[rows]
            shortened = np.minimum(work[rows], np.maximum(excess[rank, place] - longer, 0)).astype(np.int64)
            cut = shortened > 0
            builder.edit.work[rows[cut]] = (work[rows] - shortened)[cut]
            builder.culprit[rows[cut]] = rows[cut]
            # syncs that only the late rank makes belong to its extra work
            syncs = np.flatnonzero(sections.of_sync == section)
            everywhere = [(sections.of_sync == (other * places + place) * steps + step).sum() for other in range(ranks)]
            if len(syncs) > np.median(everywhere):
                builder.edit.drop_wait[syncs] = True
                builder.edit.work[syncs] = 0
                builder.culprit[syncs] = syncs


def _share_device_work(inputs: CauseInputs, builder: FindingBuilder) -> None:
    """Shares unequal device work among the ranks, section by section. The sum stays the same."""
    spent, section_of_row = _device_work(inputs)
    mean = spent.sum(axis=1) / inputs.steps
    peers = np.array([np.median(np.delete(mean, rank)) for rank in range(len(mean))])
    late = mean > UNEQUAL_TIMES * peers
    if not late.any():
        return
    rows = np.flatnonzero(section_of_row != NONE)
    fair = spent.mean(axis=0, keepdims=True) / np.maximum(spent, 1.0)
    builder.edit.scale[rows] = fair.ravel()[section_of_row[rows]]
    is_late = late[section_of_row[rows] // spent.shape[1]]
    culprit = np.where(inputs.launch[rows] == NONE, rows, inputs.launch[rows])
    builder.culprit[rows[is_late]] = culprit[is_late]
    builder.culprit[rows[~is_late]] = int(culprit[is_late][0])  # other ranks' work changes with the late rank's


def _device_work(inputs: CauseInputs) -> tuple[Floats, Ints]:
    """For each rank and each section between collectives (or step), the work of its device without collectives.

    And for each row its index in that table, NONE if it does not count.
    """
    timeline = inputs.timeline
    spans, ranks, rank_of_rows = timeline.spans, timeline.ranks, timeline.rank_of_rows
    meets = spans.meeting != NONE
    border = meets if borders_per_step(timeline, meets) else np.isin(np.arange(len(timeline)), timeline.marks)
    width = max(int(np.count_nonzero(border & (rank_of_rows == rank))) for rank in ranks) + 1
    section_of_row = np.full(len(timeline), NONE, np.int64)
    for index, rank in enumerate(ranks):
        place = np.cumsum(border & (rank_of_rows == rank))
        of_rank = timeline.on_device & (spans.kind != Kind.COLLECTIVE) & (rank_of_rows == rank)
        section_of_row[of_rank] = index * width + place[of_rank]
    counts = section_of_row != NONE
    spent = np.bincount(section_of_row[counts], spans.work[counts], len(ranks) * width).astype(np.float64)
    return spent.reshape(len(ranks), width), section_of_row


@dataclass(frozen=True)
class LateRank:
    """A rank that its peers wait for."""

    rank: int
    late: int  # how much later than its peers it arrives, per step
    cause: str  # what delays it
    where: Where


def late_ranks(inputs: CauseInputs, finding: Finding) -> tuple[LateRank, ...]:
    """Which ranks come late, by how much, and what delays them; the latest first."""
    excess = np.where(finding.culprit >= 0, finding.edit.saves(inputs.timeline.spans.work), 0)
    rank_of_rows = inputs.timeline.rank_of_rows
    late = np.intersect1d(rank_of_rows[finding.rows], rank_of_rows[np.flatnonzero(excess)]).tolist()
    candidates = [_late(inputs, finding, rank, np.where(rank_of_rows == rank, excess, 0)) for rank in late]
    latest = max((candidate.late for candidate in candidates), default=0)
    candidates.sort(key=lambda candidate: -candidate.late)
    return tuple(candidate for candidate in candidates if candidate.late >= WORTH_NAMING * latest)


def _late(inputs: CauseInputs, finding: Finding, rank: int, excess: Ints) -> LateRank:
    """The rank with the place that delays it most."""
    rows = np.flatnonzero(excess)
    on_device = inputs.timeline.on_device[rows]
    computing = excess[rows[on_device]].sum() > excess[rows[~on_device]].sum()
    rows = rows[on_device == computing]
    culprits = finding.culprit[rows]
    excess_of_culprit = np.bincount(culprits, excess[rows], len(excess))
    places = by_place(inputs, np.unique(culprits), "peer_late")
    worst = max(places, key=lambda place: excess_of_culprit[places[place]].sum())
    ranks, late = len(inputs.timeline.ranks), excess[rows].sum() / inputs.steps
    if computing:  # once the excess is shared out, the rank keeps its own share of it
        return LateRank(rank, int(late * ranks / (ranks - 1)), "computing", worst)
    return LateRank(rank, int(late), "host_work", worst)


@dataclass(frozen=True, eq=False)
class HostSections:
    """The time that each rank's host spent, by section of the step and by step."""

    of_row: Ints  # index into the flattened table, or NONE if the row does not count
    of_sync: Ints  # the same for syncs, NONE for other rows
    spent: Floats  # rank, place in the step, step

    @property
    def usual(self) -> Floats:
        """The median step, by rank and place."""
        return np.median(self.spent, axis=2)

    @property
    def peers(self) -> Floats:
        """The median of the peers' time, by rank and place."""
        usual = self.usual
        return np.stack([np.median(np.delete(usual, rank, axis=0), axis=0) for rank in range(len(usual))])

    @property
    def late(self) -> Mask:
        """Which ranks are late at which place."""
        return self.usual - self.peers > LATE_BY


class _Borders(NamedTuple):
    rows: Mask
    per_step: int


def host_sections(timeline: Timeline) -> HostSections | None:
    """None if nothing shows that the ranks run the same program."""
    borders = _borders(timeline)
    if borders is None:
        return None
    spans, steps, per_step = timeline.spans, len(timeline.marks_of(timeline.ranks[0])), borders.per_step
    counted = (spans.meeting == NONE) & (spans.kind != Kind.SYNC) & ~timeline.on_device & ~by_workers(timeline)
    of_row, of_sync = np.full(len(timeline), NONE, np.int64), np.full(len(timeline), NONE, np.int64)
    for index, rank in enumerate(timeline.ranks):
        of_rank = timeline.rank_of_rows == rank
        # rows after the last border of a step belong to the first section of the next
        passed = np.cumsum(borders.rows[of_rank])
        step, place = np.divmod(np.minimum(passed, per_step * steps - 1), per_step)
        section = (index * per_step + place) * steps + step
        of_row[of_rank] = np.where(counted[of_rank], section, NONE)
        of_sync[of_rank] = np.where(spans.kind[of_rank] == Kind.SYNC, section, NONE)
    counts = of_row != NONE
    spent = np.bincount(of_row[counts], spans.work[counts], len(timeline.ranks) * per_step * steps).astype(np.float64)
    return HostSections(of_row, of_sync, spent.reshape(len(timeline.ranks), per_step, steps))


def _borders(timeline: Timeline) -> _Borders | None:
    """The finest borders that every rank passes equally often in every step: launches, else collectives, else steps.

    Steps count only if all ranks meet somewhere in the run. Stages of a pipeline do not: their work differs by design,
    and they exchange messages two by two.
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
