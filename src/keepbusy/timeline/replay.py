"""Replay puts every span where its releases allow it.

The engine is one plain loop over the rows in issue order, because each time needs the one before it. An unchanged
replay is the identity (`settle` of `timeline.model` sees to that), so whatever a fix changes is the only thing that
moves. Running the rows round after round gives the steady state of a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
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
Pair: TypeAlias = tuple[int, int, int, int, int, int, int]
"""A launch and the command after it, which nothing else releases: row, lag and work of the launch; then of the command,
with its lag after the launch behind its lag on the stream."""
Stretch: TypeAlias = tuple[int, int, Sequence[Pair], Sequence[Row]]  # of a host lane to a stream; then any rows


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
    return _Engine(timeline, _joined(timeline) if brief else np.zeros(len(timeline), bool), rounds).replayed()


class _Engine:
    """The clocks of all lanes, and the loops that move them."""

    def __init__(self, timeline: Timeline, skipped: Mask, rounds: int) -> None:
        count, lanes = len(timeline), len(timeline.lanes)
        self.timeline, self.kept, self.rounds, self.done = timeline, ~skipped, rounds, 0
        self.program, self.clocks = _program(timeline, skipped), _first_clocks(timeline)
        self.start, self.end = [NEVER] * count, [NEVER] * count
        self.marks = set(timeline.marks_of(timeline.ranks[0]).tolist()) if count else set()
        self.at_marks: list[list[int]] = []
        """How far each lane was at each mark that was passed."""
        meeting = timeline.spans.meeting
        self.parts = np.bincount(meeting[meeting >= 0]).tolist() if (meeting >= 0).any() else []
        self.arrived: dict[int, list[tuple[int, int, int, int]]] = {}
        commands = rounds * np.bincount(timeline.spans.lane[timeline.on_device], minlength=lanes)
        # a queue that would hold all commands of all rounds is never full, however large it is said to be
        self.limit = min(timeline.facts.pending_limit or PENDING_LIMIT, int(commands.max(initial=0)) + 1)
        self.ended = [[NEVER] * (self.limit if held else 0) for held in commands.tolist()]
        """Of each lane the ends of its commands. A queue is full until the one ends that is `limit` places back."""
        self.streams_in_full = np.flatnonzero(commands >= self.limit)
        """Those with so many commands that their queues may be full before the run has ended."""

    def replayed(self) -> Replayed:
        """All rounds. Once a round has only repeated the one before it, what is left is known."""
        left, advance = self.rounds, np.zeros(len(self.clocks), np.int64)
        while left:
            before = self.clocks.copy(), self.start.copy(), self.end.copy()
            self.round()
            left -= 1
            if 0 < left < self.rounds - 1 and (repeated := self._advance(*before)) is not None:
                advance = repeated
                break
        ahead = np.where(self.kept, left * advance[self.timeline.spans.lane], 0)
        start, end = np.array(self.start, np.int64) + ahead, np.array(self.end, np.int64) + ahead
        marks = len(self.marks)
        steps, last = max(1, self.rounds - max(1, self.rounds // 3) - 1) * marks, self.rounds * marks - 1
        progress = [self._at(mark, advance) for mark in (last - steps, last) if mark >= 0]
        return Replayed(start, end, np.array(progress, np.int64), steps, self.rounds)

    def round(self) -> None:
        """Every row once. Plain loops over plain lists: this and what it calls is where all the time goes."""
        for lane, stream, pairs, rows in self.program:
            if pairs:
                self._launch(lane, stream, pairs)
            if rows:
                self._play(rows)
        self.done += 1

    def _launch(self, lane: int, stream: int, pairs: Sequence[Pair]) -> None:
        """What nearly all of a program is, as quickly as it can be done; `_play` would do the same."""
        start, end, ended, full = self.start, self.end, self.ended[stream], -self.limit
        host, device = self.clocks[lane], self.clocks[stream]
        for launch, lag, work, command, gap, latency, lasts in pairs:
            host += lag
            start[launch] = host
            device += gap
            if host + latency > device:
                device = host + latency
            if ended[full] > host:
                host = ended[full]
            host += work
            end[launch] = host
            start[command] = device
            device += lasts
            end[command] = device
            ended.append(device)
        self.clocks[lane], self.clocks[stream] = host, device

    def _play(self, rows: Sequence[Row]) -> None:
        clocks, start, end, ended = self.clocks, self.start, self.end, self.ended
        marks, full, times = self.marks, -self.limit, (start, end)
        for index, lane, kind, work, lag, awaits, launches, releases, meeting in rows:
            if index in marks:
                self.at_marks.append(clocks.copy())
            begin = reached = clocks[lane] + lag
            for source, later, whole in releases:
                released = times[whole][source] + later
                if released > reached:
                    reached = released
            if kind >= _KERNEL:
                start[index] = reached
                if launches != CONTINUED:
                    ended[lane].append(ended[lane][full])
                if meeting >= 0:
                    self._meet(meeting, (reached, index, lane, work))
                    continue
                ended[lane][-1] = reached + work
            elif kind == _SYNC:
                start[index] = begin
                for other in awaits:
                    if clocks[other] > reached:
                        reached = clocks[other]
            else:
                start[index] = reached
                if launches >= 0 and ended[launches][full] > reached:
                    reached = ended[launches][full]
            end[index] = clocks[lane] = reached + work

    def _meet(self, meeting: int, part: tuple[int, int, int, int]) -> None:
        """A part has come, and has its place in the queue; after the last one all leave, as they came."""
        arrived = self.arrived.setdefault(meeting, [])
        arrived.append(part)
        if len(arrived) == self.parts[meeting]:
            last = max(when for when, *_ in self.arrived.pop(meeting))
            for _, row, lane, work in arrived:
                self.end[row] = self.clocks[lane] = self.ended[lane][-1] = last + work

    def _at(self, mark: int, advance: Ints) -> Ints:
        """Where each lane is at this mark of the whole run."""
        beyond = mark - len(self.at_marks)
        if beyond < 0:
            return np.array(self.at_marks[mark], np.int64)
        rounds, place = divmod(beyond, len(self.marks))
        return np.array(self.at_marks[place - len(self.marks)], np.int64) + (rounds + 1) * advance

    def _advance(self, clocks: list[int], start: list[int], end: list[int]) -> Ints | None:
        """Of each lane by how much later this round did exactly what the one before it did; None if it did not.

        It stays so if no lane may be held up by one that advances more quickly. What advances more slowly than what it
        releases falls behind, and never holds it up again.
        """
        marks = len(self.marks)
        now, then = [*self.at_marks[-marks:], self.clocks], [*self.at_marks[-2 * marks : -marks], clocks]
        moved = np.array(now, np.int64) - np.array(then, np.int64)
        advance, rows = moved[-1], np.flatnonzero(self.kept)
        if self.arrived or (moved != advance).any():
            return None
        for before, after in ((start, self.start), (end, self.end)):
            moved = np.array(after, np.int64)[rows] - np.array(before, np.int64)[rows]
            if (moved != advance[self.timeline.spans.lane[rows]]).any():
                return None
        for stream in self.streams_in_full:
            issued = (len(self.ended[stream]) - self.limit) // self.done
            queue = np.array(self.ended[stream][-self.limit - issued :], np.int64)
            if (queue[issued:] - queue[:-issued] != advance[stream]).any():
                return None
        by, lane = self._holding_up
        return advance if (advance[by] <= advance[lane]).all() else None

    @cached_property
    def _holding_up(self) -> tuple[Ints, Ints]:
        """Lanes by which others may be held up, and each of those others."""
        spans, links = self.timeline.spans, self.timeline.links
        met = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.meeting >= 0))
        first = np.zeros(len(self.parts), np.int64)
        first[spans.meeting[met]] = spans.lane[met]
        first = first[spans.meeting[met]]
        stream = launched_lane(self.timeline)
        full = np.flatnonzero(np.isin(stream, self.streams_in_full))
        awaits = [(other, row[1]) for *_, rows in self.program for row in rows for other in row[5]]
        by, lane = np.array(awaits, np.int64).reshape(-1, 2).T
        return (
            np.concatenate([by, spans.lane[links.source], stream[full], first, spans.lane[met]]),
            np.concatenate([lane, spans.lane[links.target], spans.lane[full], spans.lane[met], first]),
        )


def _program(timeline: Timeline, skipped: Mask) -> list[Stretch]:
    """Every row as plain Python numbers: numpy scalars would cost more than the arithmetic."""
    spans, kept = timeline.spans, np.flatnonzero(~skipped)
    meeting = np.where(spans.kind == Kind.COLLECTIVE, spans.meeting, NONE)
    lag = spans.lag + _work_before(timeline, skipped)
    launches = np.where(continues_launch(timeline), CONTINUED, launched_lane(timeline))
    waits = (spans.awaits != NONE) & (spans.kind < Kind.KERNEL)  # a call for memory may wait as a sync does
    kind = np.where(waits, Kind.SYNC, spans.kind)
    usual = (kind != Kind.SYNC) & (meeting == NONE) & (launches != CONTINUED)
    place, link = _paired(timeline, kept, usual, launches)
    launch, command = kept[place], kept[place + 1]
    columns = [launch, lag[launch], spans.work[launch]]
    columns += [command, lag[command], timeline.links.lag[link], spans.work[command]]
    pairs = list(zip(*[column.tolist() for column in columns], strict=True))
    alone = np.ones(len(kept), bool)
    alone[place] = alone[place + 1] = False
    others = kept[alone]
    awaited, releases = _awaited_lanes(timeline, np.flatnonzero(waits)), _releases(timeline, others)
    rows = list(
        zip(
            *[column[others].tolist() for column in (np.arange(len(timeline)), spans.lane, kind, spans.work, lag)],
            map(awaited.__getitem__, others.tolist()),
            launches[others].tolist(),
            [releases.get(row, ()) for row in others.tolist()],
            meeting[others].tolist(),
            strict=True,
        )
    )
    lane, stream = spans.lane[launch], spans.lane[command]
    begins = np.append(True, (np.diff(place) > 2) | (np.diff(lane) != 0) | (np.diff(stream) != 0))[: len(place)]
    first = np.flatnonzero(begins)
    of_pairs, of_rows = [*first.tolist(), len(pairs)], [*(place[first] - 2 * first).tolist(), len(rows)]
    stretches = zip(lane[first].tolist(), stream[first].tolist(), pairwise(of_pairs), pairwise(of_rows), strict=True)
    found = ((lane, stream, pairs[slice(*some)], rows[slice(*more)]) for lane, stream, some, more in stretches)
    return [(NONE, NONE, [], rows[: of_rows[0]]), *found]


def _paired(timeline: Timeline, kept: Ints, usual: Mask, launches: Ints) -> tuple[Ints, Ints]:
    """Where among the rows kept a launch stands before its command, which nothing else releases; and the link there."""
    spans, links = timeline.spans, timeline.links
    releases, link = np.bincount(links.target, minlength=len(timeline)), np.zeros(len(timeline), np.int64)
    link[links.target] = np.arange(len(links))
    usual, releases = usual[kept] & ~np.isin(kept, timeline.marks), releases[kept]
    place = np.flatnonzero(usual[:-1] & usual[1:] & (releases[:-1] == 0) & (releases[1:] == 1))
    launch, command = kept[place], kept[place + 1]
    link = link[command]
    paired = (links.source[link] == launch) & (links.kind[link] == LinkKind.LAUNCH)
    paired &= timeline.on_device[command] & ~timeline.on_device[launch] & (launches[launch] == spans.lane[command])
    return place[paired], link[paired]


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


def _releases(timeline: Timeline, rows: Ints) -> dict[int, list[Release]]:
    links = timeline.links.take(np.isin(timeline.links.target, rows))
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
