"""Replay puts every span where its releases allow it.

The engine is one plain loop over the rows in issue order, because each time needs the one before it. An unchanged
replay is the identity (`settle` of `timeline.model` ensures that), so only what a fix changes moves. Several passes
over the rows give the steady state of a loop.
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
"""So many steps are replayed to find the pace. The first of them fill the queues."""
MOST_ROWS = 400_000
"""So many rows are replayed in all, or three passes: the first fills the queues, the second shows the pace."""
_KERNEL, _SYNC = int(Kind.KERNEL), int(Kind.SYNC)

Release: TypeAlias = tuple[int, int, bool]  # row of the source, lag, whether its end (else its start) counts
Row: TypeAlias = tuple[int, int, int, int, int, Sequence[int], int, Sequence[Release], int]
Pair: TypeAlias = tuple[int, int, int, int, int, int, int]
"""A launch and the command after it, which nothing else releases: row, lag and work of the launch; then row, lag on the
stream, lag after the launch and work of the command."""
Section: TypeAlias = tuple[int, int, Sequence[Pair], Sequence[Row]]  # pairs of a host lane and a stream; then any rows


@dataclass(frozen=True)
class Replayed:
    """Where a replay put the rows in its last pass, and how far each lane was at two of the marks."""

    start: Ints
    end: Ints
    progress: Ints  # a row per mark, a column per lane
    steps: int  # between those marks
    passes: int
    lasted: Ints | None = None  # for a script that runs once: by lane, from the beginning to its last end

    @property
    def pace(self) -> float:
        """Nanoseconds a step, set by the slowest lane."""
        return float(self._paces.max())

    @property
    def slowest(self) -> int:
        """The lane that sets the pace; the first of several."""
        return int(self._paces.argmax())

    @property
    def _paces(self) -> npt.NDArray[np.float64]:
        """Nanoseconds a step for each lane, between the same mark of two passes."""
        if self.lasted is not None:
            return self.lasted.astype(np.float64)
        first, last = self.progress
        return np.where(first > NEVER // 2, last - first, 0) / self.steps


def replay(timeline: Timeline, passes: int = 1) -> Timeline:
    """Computes the times of every span from its releases; after several passes, those of the last one."""
    replayed = run(timeline, passes)
    return timeline.change_spans(start=replayed.start, end=replayed.end)


def pace(timeline: Timeline) -> float:
    """Nanoseconds a step once the run is steady."""
    return steady(timeline).pace


def steady(timeline: Timeline) -> Replayed:
    """Replays the rows for STEPS steps, and at least twice; fewer if there are very many rows.

    A script without iterations is replayed once, as nothing of it overlaps with a next iteration.
    """
    if timeline.facts.one_turn:
        once = run(timeline, brief=True)
        was_played = once.end > NEVER // 2
        lasted = np.zeros(len(timeline.lanes), np.int64)
        np.maximum.at(lasted, timeline.spans.lane[was_played], once.end[was_played] - once.start[was_played].min())
        return replace(once, lasted=lasted)
    per_pass = len(timeline.marks_of(timeline.ranks[0]))
    wanted, most = -(-STEPS // per_pass) + 1, MOST_ROWS // max(1, len(timeline))
    return run(timeline, max(2, min(wanted, max(3, most))), brief=True)


def run(timeline: Timeline, passes: int = 1, brief: bool = False) -> Replayed:
    """`brief` joins work that nothing waits for to the host row after it. It gets no times of its own."""
    return _Engine(timeline, _joined(timeline) if brief else np.zeros(len(timeline), bool), passes).replayed()


class _Engine:
    """The clocks of all lanes, and the loops that move them."""

    def __init__(self, timeline: Timeline, skipped: Mask, passes: int) -> None:
        count, lanes = len(timeline), len(timeline.lanes)
        self.timeline, self.kept, self.passes, self.passed = timeline, ~skipped, passes, 0
        self.program, self.clocks = _program(timeline, skipped), _first_clocks(timeline)
        self.start, self.end = [NEVER] * count, [NEVER] * count
        self.marks = set(timeline.marks_of(timeline.ranks[0]).tolist()) if count else set()
        self.at_marks: list[list[int]] = []
        """How far each lane was at each mark so far."""
        meeting = timeline.spans.meeting
        self.parts = np.bincount(meeting[meeting >= 0]).tolist() if (meeting >= 0).any() else []
        self.arrived: dict[int, list[tuple[int, int, int, int]]] = {}
        commands = passes * np.bincount(timeline.spans.lane[timeline.on_device], minlength=lanes)
        # a queue with room for all commands of all passes is never full, so a larger limit only costs memory
        self.limit = min(timeline.facts.pending_limit or PENDING_LIMIT, int(commands.max(initial=0)) + 1)
        self.ended = [[NEVER] * (self.limit if number_of_commands else 0) for number_of_commands in commands.tolist()]
        """The ends of each lane's commands. A queue is full until the command that is `limit` places back has ended."""
        self.streams_in_full = np.flatnonzero(commands >= self.limit)
        """Streams with so many commands that their queues may become full."""

    def replayed(self) -> Replayed:
        """Plays all passes. Once a pass only repeats the one before it, the remaining ones are computed."""
        remaining, advance = self.passes, np.zeros(len(self.clocks), np.int64)
        while remaining:
            before = self.clocks.copy(), self.start.copy(), self.end.copy()
            self.play_once()
            remaining -= 1
            if 0 < remaining < self.passes - 1 and (repeated := self._advance(*before)) is not None:
                advance = repeated
                break
        ahead = np.where(self.kept, remaining * advance[self.timeline.spans.lane], 0)
        start, end = np.array(self.start, np.int64) + ahead, np.array(self.end, np.int64) + ahead
        marks = len(self.marks)
        steps, last = max(1, self.passes - max(1, self.passes // 3) - 1) * marks, self.passes * marks - 1
        progress = [self._at(mark, advance) for mark in (last - steps, last) if mark >= 0]
        return Replayed(start, end, np.array(progress, np.int64), steps, self.passes)

    def play_once(self) -> None:
        """Plays every row once. Nearly all time is spent here, so these are plain loops over plain lists."""
        for lane, stream, pairs, rows in self.program:
            if pairs:
                self._launch(lane, stream, pairs)
            if rows:
                self._play(rows)
        self.passed += 1

    def _launch(self, lane: int, stream: int, pairs: Sequence[Pair]) -> None:
        """Plays pairs, which nearly all of a program is, as fast as possible. `_play` would do the same."""
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
            for source, later, from_end in releases:
                released = times[from_end][source] + later
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
        """A part of a collective arrives, with its place in the queue. When the last has arrived, all end."""
        arrived = self.arrived.setdefault(meeting, [])
        arrived.append(part)
        if len(arrived) == self.parts[meeting]:
            last = max(when for when, *_ in self.arrived.pop(meeting))
            for _, row, lane, work in arrived:
                self.end[row] = self.clocks[lane] = self.ended[lane][-1] = last + work

    def _at(self, mark: int, advance: Ints) -> Ints:
        """How far each lane is at this mark, counted over all passes."""
        beyond = mark - len(self.at_marks)
        if beyond < 0:
            return np.array(self.at_marks[mark], np.int64)
        passes, place = divmod(beyond, len(self.marks))
        return np.array(self.at_marks[place - len(self.marks)], np.int64) + (passes + 1) * advance

    def _advance(self, clocks: list[int], start: list[int], end: list[int]) -> Ints | None:
        """For each lane, by how much this pass was later than the one before it; None if it was not otherwise the same.

        Further passes are the same if no lane can be held up by one that advances more per pass. A lane that advances
        less than those it releases falls behind, and never holds them up again.
        """
        marks = len(self.marks)
        now, earlier = [*self.at_marks[-marks:], self.clocks], [*self.at_marks[-2 * marks : -marks], clocks]
        moved = np.array(now, np.int64) - np.array(earlier, np.int64)
        advance, rows = moved[-1], np.flatnonzero(self.kept)
        if self.arrived or (moved != advance).any():
            return None
        for before, after in ((start, self.start), (end, self.end)):
            moved = np.array(after, np.int64)[rows] - np.array(before, np.int64)[rows]
            if (moved != advance[self.timeline.spans.lane[rows]]).any():
                return None
        for stream in self.streams_in_full:
            issued = (len(self.ended[stream]) - self.limit) // self.passed
            queue = np.array(self.ended[stream][-self.limit - issued :], np.int64)
            if (queue[issued:] - queue[:-issued] != advance[stream]).any():
                return None
        blocking, lane = self._holding_up
        return advance if (advance[blocking] <= advance[lane]).all() else None

    @cached_property
    def _holding_up(self) -> tuple[Ints, Ints]:
        """Pairs of lanes of which the first may hold up the second."""
        spans, links = self.timeline.spans, self.timeline.links
        parts = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.meeting >= 0))
        first = np.zeros(len(self.parts), np.int64)
        first[spans.meeting[parts]] = spans.lane[parts]
        first = first[spans.meeting[parts]]
        stream = launched_lane(self.timeline)
        full = np.flatnonzero(np.isin(stream, self.streams_in_full))
        awaits = [(other, row[1]) for *_, rows in self.program for row in rows for other in row[5]]
        blocking, lane = np.array(awaits, np.int64).reshape(-1, 2).T
        return (
            np.concatenate([blocking, spans.lane[links.source], stream[full], first, spans.lane[parts]]),
            np.concatenate([lane, spans.lane[links.target], spans.lane[full], spans.lane[parts], first]),
        )


def _program(timeline: Timeline, skipped: Mask) -> list[Section]:
    """All rows as plain Python numbers: with numpy scalars, access would cost more than the arithmetic."""
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
    borders = zip(lane[first].tolist(), stream[first].tolist(), pairwise(of_pairs), pairwise(of_rows), strict=True)
    sections = ((lane, stream, pairs[slice(*paired)], rows[slice(*single)]) for lane, stream, paired, single in borders)
    return [(NONE, NONE, [], rows[: of_rows[0]]), *sections]


def _paired(timeline: Timeline, kept: Ints, usual: Mask, launches: Ints) -> tuple[Ints, Ints]:
    """Launches directly before a command that nothing else releases: their indices in the kept rows, and the links."""
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
    """The lanes that each row waits for: for most none, else one, or all device lanes of its rank."""
    awaited, on_device = list[Sequence[int]]([()]) * len(timeline), defaultdict[int, list[int]](list)
    for number, lane in enumerate(timeline.lanes):
        if lane.device is not None:
            on_device[lane.rank].append(number)
    ranks, targets = timeline.rank_of_rows[waiting].tolist(), timeline.spans.awaits[waiting].tolist()
    for row, rank, target in zip(waiting.tolist(), ranks, targets, strict=True):
        awaited[row] = on_device[rank] if target == EVERY_LANE else [target]
    return awaited


def _joined(timeline: Timeline) -> Mask:
    """Which rows are host work that releases nothing, nothing releases, begins no step and is on no awaited lane."""
    spans, links = timeline.spans, timeline.links
    plain = (spans.kind == Kind.WORK) & (spans.awaits == NONE) & ~np.isin(spans.lane, spans.awaits)
    plain[links.source] = plain[links.target] = plain[timeline.marks] = False
    last = np.full(len(timeline.lanes), NONE, np.int64)
    last[spans.lane] = np.arange(len(timeline))
    plain[last[last != NONE]] = False
    return plain


def _work_before(timeline: Timeline, joined: Mask) -> Ints:
    """For each row, the work of the joined rows directly before it on its lane."""
    if not joined.any():
        return np.zeros(len(timeline), np.int64)
    spans = timeline.spans
    order = np.argsort(spans.lane, kind="stable")
    summed = np.concatenate([[0], np.cumsum(np.where(joined, spans.work + spans.lag, 0)[order])])[:-1]
    first = np.where(joined[order], 0, np.arange(len(order)))  # the sum up to the last row that was kept
    kept_before = np.concatenate([[0], np.maximum.accumulate(first)[:-1]])
    before = np.empty(len(order), np.int64)
    before[order] = summed - summed[kept_before]
    lane_start = previous_on_lane(spans.lane) == NONE
    return np.where(joined | lane_start, 0, before)


def _releases(timeline: Timeline, rows: Ints) -> dict[int, list[Release]]:
    links = timeline.links.take(np.isin(timeline.links.target, rows))
    releases = defaultdict[int, list[Release]](list)
    from_end = links.kind != LinkKind.LAUNCH
    each = zip(links.source.tolist(), links.lag.tolist(), from_end.tolist(), strict=True)
    for target, release in zip(links.target.tolist(), each, strict=True):
        releases[target].append(release)
    return releases


def _first_clocks(timeline: Timeline) -> list[int]:
    """The initial clocks: a lane begins where its first span was, unless something else released that span."""
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
    """When rows begin to work. A collective works only at its end: before that it waits for its peers."""
    return np.where(kind == Kind.COLLECTIVE, end - work, start)
