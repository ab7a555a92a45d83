"""Replay puts every span where its releases allow it.

The engine is one plain loop over the rows in issue order, because each time needs the one before it. An unchanged
replay is the identity (`settle` of `timeline.model` sees to that), so whatever a fix changes is the only thing that
moves. Running the rows round after round gives the steady state of a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import (
    CONTINUED,
    EVERY_LANE,
    NEVER,
    NONE,
    PENDING_LIMIT,
    Ints,
    Kind,
    LinkKind,
    Mask,
    Timeline,
    continues_launch,
    launched_lane,
    previous_on_lane,
)

STEPS = 12
"""So many steps a replay runs to find its pace; the first of them fill the queues."""
MOST_ROWS = 400_000
"""So many rows are replayed in all, or three rounds: the first fills the queues, of the second the pace is taken."""
_KERNEL, _SYNC = int(Kind.KERNEL), int(Kind.SYNC)

Release: TypeAlias = tuple[int, int, bool]  # row of the source, lag, whether its end (else its start) counts
Row: TypeAlias = tuple[int, int, int, int, int, Sequence[int], int, Sequence[Release], int]


@dataclass(frozen=True)
class Replayed:
    """Where a replay put the rows in its last round, and how far each lane was at two marks that it passed."""

    start: Ints
    end: Ints
    progress: Ints  # a row a mark, a column a lane
    steps: int  # between those marks
    rounds: int
    lasted: Ints | None = None  # of what does not repeat itself: of each lane, from the beginning to its last end

    @property
    def pace(self) -> float:
        """Nanoseconds a step. The lane that advances most slowly sets it."""
        return float(self._paces.max())

    @property
    def slowest(self) -> int:
        """The lane that sets the pace; the first of several."""
        return int(self._paces.argmax())

    @property
    def _paces(self) -> npt.NDArray[np.float64]:
        """Of each lane, nanoseconds a step, between the same mark of two rounds."""
        if self.lasted is not None:
            return self.lasted.astype(np.float64)
        first, last = self.progress
        return np.where(first > NEVER // 2, last - first, 0) / self.steps


def replay(timeline: Timeline, rounds: int = 1) -> Timeline:
    """Re-time every span from its releases; with several rounds, the last of a run that repeats itself."""
    done = run(timeline, rounds)
    return timeline.change_spans(start=done.start, end=done.end)


def pace(timeline: Timeline) -> float:
    """Nanoseconds a step once the run is steady."""
    return steady(timeline).pace


def steady(timeline: Timeline) -> Replayed:
    """The rows replayed until so many steps have passed, and at least twice; a step of very many rows less often.

    A script that is one turn is replayed once: nothing of it runs into a turn after it.
    """
    if timeline.facts.one_turn:
        done = run(timeline, brief=True)
        known = done.end > NEVER // 2
        lasted = np.zeros(len(timeline.lanes), np.int64)
        np.maximum.at(lasted, timeline.spans.lane[known], done.end[known] - done.start[known].min())
        return replace(done, lasted=lasted)
    per_round = len(timeline.marks_of(timeline.ranks[0]))
    wanted, most = -(-STEPS // per_round) + 1, MOST_ROWS // max(1, len(timeline))
    return run(timeline, max(2, min(wanted, max(3, most))), brief=True)


def run(timeline: Timeline, rounds: int = 1, brief: bool = False) -> Replayed:
    """`brief`: work that nothing waits for is joined to the host row after it, and has no times of its own."""
    engine = _Engine(timeline, _joined(timeline) if brief else np.zeros(len(timeline), bool), rounds)
    for _ in range(rounds):
        engine.round()
    start, end = np.array(engine.start, np.int64), np.array(engine.end, np.int64)
    return Replayed(start, end, np.array(engine.progress, np.int64), engine.steps, rounds)


class _Engine:
    """The clocks of all lanes, and the one loop that moves them."""

    def __init__(self, timeline: Timeline, skipped: Mask, rounds: int) -> None:
        count, lanes = len(timeline), len(timeline.lanes)
        self.rows, self.clocks = _program(timeline, skipped), _first_clocks(timeline)
        self.start, self.end = [NEVER] * count, [NEVER] * count
        self.marks = set(timeline.marks_of(timeline.ranks[0]).tolist()) if count else set()
        meeting = timeline.spans.meeting
        self.parts = np.bincount(meeting[meeting >= 0]).tolist() if (meeting >= 0).any() else []
        self.arrived: dict[int, list[tuple[int, int, int, int]]] = {}
        commands = np.bincount(timeline.spans.lane[timeline.on_device], minlength=lanes)
        # a queue that would hold all commands of all rounds is never full, however large it is said to be
        most = rounds * int(commands.max(initial=0)) + 1
        self.limit = min(timeline.facts.pending_limit or PENDING_LIMIT, most)
        self.rings, self.places = [[NEVER] * (self.limit if held else 0) for held in commands.tolist()], [0] * lanes
        last = rounds * len(self.marks) - 1
        self.steps = max(1, rounds - max(1, rounds // 3) - 1) * len(self.marks)
        """The last ones of the run, over which its pace is taken."""
        self.passed, self.telling = -1, {last - self.steps, last}
        self.progress: list[list[int]] = []

    def round(self) -> None:
        """Every row once. Plain loops over plain lists: this is where all the time goes."""
        clocks, start, end, rings, places = self.clocks, self.start, self.end, self.rings, self.places
        marks, limit, times = self.marks, self.limit, (start, end)
        for index, lane, kind, work, lag, awaits, launches, releases, meeting in self.rows:
            if index in marks:
                self._pass()
            begin = reached = clocks[lane] + lag
            for source, later, whole in releases:
                released = times[whole][source] + later
                if released > reached:
                    reached = released
            if kind >= _KERNEL:
                start[index] = reached
                if meeting >= 0:
                    self._meet(meeting, (reached, index, lane, work), launches != CONTINUED)
                    continue
                if launches != CONTINUED:
                    places[lane] = (places[lane] + 1) % limit
                rings[lane][places[lane] - 1] = reached + work
            elif kind == _SYNC:
                start[index] = begin
                for other in awaits:
                    if clocks[other] > reached:
                        reached = clocks[other]
            else:
                start[index] = reached
                if launches >= 0 and rings[launches][places[launches]] > reached:
                    reached = rings[launches][places[launches]]  # the queue of that stream is full
            end[index] = clocks[lane] = reached + work

    def _pass(self) -> None:
        """A mark: where each lane stands there, if the pace is taken from it."""
        self.passed += 1
        if self.passed in self.telling:
            self.progress.append(self.clocks.copy())

    def _meet(self, meeting: int, part: tuple[int, int, int, int], queued: bool) -> None:
        """A part has come, with a place of its own in the queue; after the last one all leave, as they came."""
        lane = part[2]
        self.places[lane] = (self.places[lane] + queued) % self.limit
        arrived = self.arrived.setdefault(meeting, [])
        arrived.append(part)
        if len(arrived) == self.parts[meeting]:
            last = max(when for when, *_ in self.arrived.pop(meeting))
            for _, row, lane, work in arrived:
                self.end[row] = self.clocks[lane] = self.rings[lane][self.places[lane] - 1] = last + work


def _program(timeline: Timeline, skipped: Mask) -> list[Row]:
    """Every row as plain Python numbers: numpy scalars would cost more than the arithmetic."""
    spans, kept = timeline.spans, np.flatnonzero(~skipped)
    meeting = np.where(spans.kind == Kind.COLLECTIVE, spans.meeting, NONE)
    lag = spans.lag + _work_before(timeline, skipped)
    launches = np.where(continues_launch(timeline), CONTINUED, launched_lane(timeline))
    waits = (spans.awaits != NONE) & (spans.kind < Kind.KERNEL)  # a call for memory may wait as a sync does
    kind = np.where(waits, Kind.SYNC, spans.kind)
    columns = (np.arange(len(timeline)), spans.lane, kind, spans.work, lag)
    awaited, releases = _awaited_lanes(timeline, np.flatnonzero(waits)), _releases(timeline)
    return list(
        zip(
            *[column[kept].tolist() for column in columns],
            map(awaited.__getitem__, kept.tolist()),
            launches[kept].tolist(),
            [releases.get(row, ()) for row in kept.tolist()],
            meeting[kept].tolist(),
            strict=True,
        )
    )


def _awaited_lanes(timeline: Timeline, waiting: Ints) -> list[Sequence[int]]:
    """Of each row the lanes that it waits for: of most none, else one, or all device lanes of its rank."""
    lanes, awaited = timeline.lanes, list[Sequence[int]]([()]) * len(timeline)
    on_device = defaultdict[int, list[int]](list)
    for lane, about in enumerate(lanes):
        if about.device is not None:
            on_device[about.rank].append(lane)
    for row, lane, whom in zip(
        *[one.tolist() for one in (waiting, timeline.spans.lane[waiting], timeline.spans.awaits[waiting])], strict=True
    ):
        awaited[row] = on_device[lanes[lane].rank] if whom == EVERY_LANE else [whom]
    return awaited


def _joined(timeline: Timeline) -> Mask:
    """Plain host work that releases nothing, is released by nothing, begins no step and is on no awaited lane."""
    spans, links = timeline.spans, timeline.links
    plain = (spans.kind == Kind.WORK) & (spans.awaits == NONE) & ~np.isin(spans.lane, spans.awaits)
    plain[links.source] = plain[links.target] = plain[timeline.marks] = False
    last = np.full(len(timeline.lanes), NONE, np.int64)
    last[spans.lane] = np.arange(len(timeline))
    plain[last[last != NONE]] = False
    return plain


def _work_before(timeline: Timeline, joined: Mask) -> Ints:
    """Of each row, the work of the joined rows that stand directly before it on its lane."""
    if not joined.any():
        return np.zeros(len(timeline), np.int64)
    spans = timeline.spans
    order = np.argsort(spans.lane, kind="stable")
    done = np.concatenate([[0], np.cumsum(np.where(joined, spans.work + spans.lag, 0)[order])])[:-1]
    first = np.where(joined[order], 0, np.arange(len(order)))  # the sum up to the last row that was kept
    kept_before = np.concatenate([[0], np.maximum.accumulate(first)[:-1]])
    before = np.empty(len(order), np.int64)
    before[order] = done - done[kept_before]
    lane_start = previous_on_lane(spans.lane) == NONE
    return np.where(joined | lane_start, 0, before)


def _releases(timeline: Timeline) -> dict[int, list[Release]]:
    links = timeline.links
    releases = defaultdict[int, list[Release]](list)
    whole = links.kind != LinkKind.LAUNCH
    each = zip(links.source.tolist(), links.lag.tolist(), whole.tolist(), strict=True)
    for target, release in zip(links.target.tolist(), each, strict=True):
        releases[target].append(release)
    return releases


def _first_clocks(timeline: Timeline) -> list[int]:
    """A lane begins where its first span was, unless something else released that span."""
    spans, links = timeline.spans, timeline.links
    clocks = [NEVER] * len(timeline.lanes)
    released = np.zeros(len(timeline), bool)
    to_start = (links.source < links.target) & (spans.kind[links.target] != Kind.SYNC)
    released[links.target[to_start]] = True
    for row in np.flatnonzero(previous_on_lane(spans.lane) == NONE).tolist():
        if not released[row]:
            clocks[spans.lane[row]] = int(spans.start[row] - spans.lag[row])
    return clocks


def at_work_from(kind: Ints, start: Ints, end: Ints, work: Ints) -> Ints:
    """Of a collective only its end is the wire: before that it waits for its peers, or, if it sends to all, is gone."""
    return np.where(kind == Kind.COLLECTIVE, end - work, start)
