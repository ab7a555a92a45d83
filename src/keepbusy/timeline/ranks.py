"""Several ranks in one timeline: their clocks aligned, and the parts of each collective brought together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np

from keepbusy.timeline.figures import duration, figure, unit_of
from keepbusy.timeline.frame_roles import PROFILER_STEP
from keepbusy.timeline.model import NONE, Ints, Kind, Lane, Meetings, Timeline, last_arrival, settle
from keepbusy.timeline.races import joined
from keepbusy.timeline.run_facts import LOOP, Part, RunFacts, UnevenLoop

Number = TypeVar("Number", int, float)
MOST_SHIFT = 400
"""Windows of ranks may begin this many collectives apart and still be matched."""
SKEW = 50_000
SAME_CLOCK = 100_000
"""Ranks of one host share a clock; what differs by less is skew, not offset."""
OTHER_CLOCK = 50_000_000
"""Hosts that are further apart have clocks that say nothing about where their windows begin."""
SHORTEST_LOOP, RANKS_DIFFER = 0.05, 0.1
"""Of the run: loops that take less are left out. Ranks differ if their iterations or GPUs' shares do by so much."""


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of all ranks, in an issue order in which every rank pauses at a collective for its peers."""
    if len(timelines) == 1:
        return timelines[0]
    return settle(_in_issue_order(met(timelines)))


def met(timelines: Sequence[Timeline]) -> Timeline:
    """All ranks on one clock, with the parts of each collective brought together; not in an order to be replayed."""
    timeline = _align_clocks(_match(_join(timelines)))
    spans = timeline.spans  # the root of a broadcast may be gone before the last peer comes: it did not wait for others
    early = (spans.meeting != NONE) & (spans.end < last_arrival(timeline) - SKEW)
    return timeline.change_spans(meeting=np.where(early, NONE, spans.meeting))


def _join(timelines: Sequence[Timeline]) -> Timeline:
    # how many marks end iterations of one loop on every rank; 0 where they do not. After a rank's last iteration
    # nothing may have followed, and then that iteration has no mark
    counts = [len(timeline.marks) for timeline in timelines]
    are_iterations = all(timeline.facts.loop or timeline.facts.is_whole for timeline in timelines)
    common = min(counts) if are_iterations and max(counts) - min(counts) <= 1 else 0
    names: dict[str, int] = {}
    tables: dict[str, list[Any]] = {"spans": [], "links": [], "frames": [], "memory": []}
    lanes, marks = list[Lane](), list[Ints]()
    for timeline in timelines:
        row, frame = (sum(map(len, tables[name])) for name in ("spans", "frames"))
        new = {
            "names": np.array([names.setdefault(name, len(names)) for name in timeline.names], np.int64),
            "lanes": len(lanes) + np.arange(len(timeline.lanes)),
            "spans": row + np.arange(len(timeline.spans)),
            "frames": frame + np.arange(len(timeline.frames)),
        }
        for name, parts in tables.items():
            parts.append(getattr(timeline, name).renumbered(**new))
        marks.append(timeline.marks[: common or None] + row)
        lanes += timeline.lanes
    return Timeline(
        lanes=tuple(lanes),
        names=tuple(names),
        marks=np.concatenate(marks),
        further=timelines[0].further,  # as its tree is the one that is shown
        **{name: type(parts[0]).concatenate(parts) for name, parts in tables.items()},
        facts=_joined_facts({timeline.ranks[0]: timeline.facts for timeline in timelines}, common),
    )


def _joined_facts(facts_of: Mapping[int, RunFacts], iterations: int) -> RunFacts:
    """The first rank's, and what every rank has of its own."""
    first, *_ = every = [*facts_of.values()]
    trees = {rank: facts.run for rank, facts in facts_of.items() if facts.run is not None}
    ended = [replace(facts.cut_short, rank=rank) for rank, facts in facts_of.items() if facts.cut_short is not None]
    loaders = [replace(use, rank=rank) for rank, facts in facts_of.items() for use in facts.loaders]
    beside = {number for facts in every for number in facts.beside if number < iterations - 1}
    return replace(
        first,
        sources=tuple(dict.fromkeys(facts.source for facts in every)),  # ranks of one script have one
        plain_runs={rank: run for facts in every for rank, run in facts.plain_runs.items()},
        groups={group: members for facts in every for group, members in facts.groups.items()},
        loaders=tuple(sorted(loaders, key=lambda use: use.began - use.waited)),
        uneven=tuple(uneven_loops(trees)),
        cut_short=min(ended, key=lambda end: (end.how != "failed", end.ended), default=None),  # others follow it
        races=joined(race for facts in every for race in facts.races),
        notes=(*first.notes, *where_ranks_differ(trees)),
        loop=first.loop if iterations else "",
        beside=tuple(sorted(beside)),
    )


def where_ranks_differ(trees: Mapping[int, Part]) -> Iterator[str]:
    """The tree that is shown is the first rank's. For each of its loops, the rank in which it goes otherwise: where
    ranks wait for each other iterations take as long in all, and the GPU works less in the one that is late."""
    shown, *_ = trees.values() or [Part("")]
    loops_of = {rank: {part.named: part for part in tree.within() if part.turns > 1} for rank, tree in trees.items()}
    for name, first in next(iter(loops_of.values()), {}).items():
        by_rank = {rank: loops[name] for rank, loops in loops_of.items() if name in loops}
        difference = _difference(by_rank) if len(by_rank) > 1 and first.time >= SHORTEST_LOOP * shown.time else ""
        if difference:
            yield f"{name}: {difference}"


def uneven_loops(trees: Mapping[int, Part]) -> Iterator[UnevenLoop]:
    """Loops that every rank has, that are in no other, and that take one of them longer."""
    loops_of = {rank: {part.named: part for part in tree.parts if part.kind == LOOP} for rank, tree in trees.items()}
    for name in next(iter(loops_of.values()), {}):
        times = [(loops[name].time, rank) for rank, loops in loops_of.items() if name in loops]
        longest, rank = max(times)
        average = sum(time for time, _ in times) // len(times)
        if len(times) == len(trees) and longest > (1 + RANKS_DIFFER) * average:
            yield UnevenLoop(name, rank, max(1, loops_of[rank][name].turns), longest, average)


def _difference(loop: Mapping[int, Part]) -> str:
    """Whose iterations of a loop are longer than the others', else whose GPU is at work less."""
    takes = {rank: part.turn for rank, part in loop.items() if part.turn > 0}
    late = max(takes, key=lambda rank: takes[rank], default=NONE)
    if takes and takes[late] > (1 + RANKS_DIFFER) * median(takes.values()):
        others = _others(takes, late, lambda time: figure(time, takes[late]))
        return f"an iteration takes {duration(takes[late])} on rank {late}, and on {others} {unit_of(takes[late])}."
    shares = {rank: 100 * part.busy / max(1, part.time) for rank, part in loop.items() if part.busy >= 0}
    idle = min(shares, key=lambda rank: shares[rank], default=NONE)
    if shares and shares[idle] < median(shares.values()) - 100 * RANKS_DIFFER:
        return (
            f"the GPU of rank {idle} is busy {shares[idle]:.0f}% of the time "
            f"({_others(shares, idle, '{:.0f}'.format)}%): the others wait for it, or it has less to do."
        )
    return ""


def _others(values: Mapping[int, Number], named: int, written: Callable[[Number], str]) -> str:
    rest = [written(value) for value in sorted(value for rank, value in values.items() if rank != named)]
    span = rest[0] if rest[0] == rest[-1] else f"{rest[0]} to {rest[-1]}"
    return f"the others {span}" if len(rest) > 1 else f"the other {span}"


def _match(timeline: Timeline) -> Timeline:
    """The k-th collective of a group on one rank is the k-th on the others, once their windows are aligned."""
    spans, rank, step = timeline.spans, timeline.rank_of_rows, _profiled_step(timeline)
    meeting = np.full(len(timeline), NONE, np.int64)
    tables: list[Meetings] = []
    groups = timeline.facts.groups
    parts = np.flatnonzero(spans.kind == Kind.COLLECTIVE)
    group_of = spans.group[parts]
    for group in np.unique(group_of).tolist():
        of_group = parts[group_of == group]
        ranks = np.unique(rank[of_group])
        table = _aligned(timeline, step, [of_group[rank[of_group] == number] for number in ranks.tolist()])
        together = table[(table != NONE).sum(axis=1) > 1]
        first = np.array([row[row != NONE][0] for row in together], np.int64)
        number = sum(map(len, tables)) + np.arange(len(together))
        for column in together.T:
            is_present = column != NONE
            meeting[column[is_present]] = number[is_present]
        present = (together != NONE).sum(axis=1) if len(together) else np.zeros(0, np.int64)
        members = np.full(len(together), groups.get(group, len(ranks)), np.int64)
        tables.append(
            Meetings.of(len(together), name=spans.name[first], size=spans.size[first], members=members, present=present)
        )
    meetings = Meetings.concatenate(tables) if tables else Meetings.of(0)
    return timeline.change(spans=spans.change(meeting=meeting), meetings=meetings)


def _profiled_step(timeline: Timeline) -> Ints:
    """The number of the profiler's step in which each command was launched, or NONE."""
    frames, launches, found = timeline.frames, timeline.launches, np.full(len(timeline), NONE, np.int64)
    numbers = np.array([_number(name) for name in timeline.names], np.int64)[frames.name]
    launched, rank_of_launch = timeline.spans.start[launches.source], timeline.rank_of_rows[launches.source]
    for rank in timeline.ranks:
        steps = np.flatnonzero((numbers != NONE) & (timeline.rank_of_lanes[frames.lane] == rank))
        steps = steps[np.argsort(frames.start[steps], kind="stable")]
        of_rank = np.flatnonzero(rank_of_launch == rank)
        begun = np.searchsorted(frames.start[steps], launched[of_rank], side="right") - 1
        found[launches.target[of_rank]] = np.where(begun == NONE, NONE, np.append(numbers[steps], NONE)[begun])
    return found


def _number(name: str) -> int:
    number = name.removeprefix(PROFILER_STEP)
    return int(number) if number != name and number.isdecimal() and len(number) < 18 else NONE


def _aligned(timeline: Timeline, step: Ints, columns: list[Ints]) -> Ints:
    """A row a collective, a column a rank: rows of its parts, NONE where a window does not reach."""
    shifts = [0, *(_best_shift(timeline, step, columns[0], other) for other in columns[1:])]
    low = min(-shift for shift in shifts)
    high = max(len(column) - shift for column, shift in zip(columns, shifts, strict=True))
    table = np.full((high - low, len(columns)), NONE, np.int64)
    for index, (column, shift) in enumerate(zip(columns, shifts, strict=True)):
        table[-shift - low : -shift - low + len(column), index] = column
    return table


def _best_shift(timeline: Timeline, step: Ints, base: Ints, other: Ints) -> int:
    """How many collectives earlier the other's window begins: same sizes in the same order, ending together.

    Steps are alike, so several shifts may fit equally well. Then the one is right under which the profiler numbered
    their steps alike; and, since ranks of one host share a clock, under which they leave at the same time.
    """
    spans, fits = timeline.spans, []
    for shift in sorted(range(-min(MOST_SHIFT, len(base) - 1), min(MOST_SHIFT, len(other) - 1) + 1), key=abs):
        first, second = base[max(0, -shift) :], other[max(0, shift) :]
        length = min(len(first), len(second))
        first, second = first[:length], second[:length]
        if length < min(len(base), len(other)) // 2 or (spans.size[first] != spans.size[second]).any():
            continue
        apart = spans.end[second] - spans.end[first]
        offset = int(np.median(apart))
        spread = float(np.median(np.abs(apart - offset)))
        # nobody leaves a collective before the other has come: true of nearly all pairs, or they are not pairs
        leaves_early = spans.start[second] - offset > spans.end[first] + SKEW
        leaves_early |= spans.start[first] > spans.end[second] - offset + SKEW
        is_possible = bool(leaves_early.mean() < 0.02)
        of_others = round(float((step[first] != step[second]).mean()))  # 1 where most were numbered otherwise
        order = (of_others, min(abs(offset), OTHER_CLOCK), abs(shift))
        fits.append((is_possible, spread, order, shift))
    # the root of a broadcast may be gone before its peers come; where that is so of all shifts it tells nothing
    fits = [fit for fit in fits if fit[0]] or fits
    near = 2 * min((spread for _, spread, _, _ in fits), default=0.0) + SKEW
    alike = [(order, shift) for _, spread, order, shift in fits if spread <= near]
    return min(alike)[1] if alike else 0


def _align_clocks(timeline: Timeline) -> Timeline:
    """Everyone leaves a collective at the same time; a rank that seems not to has another clock. The root of a
    broadcast may be gone before, so broadcasts tell only where nothing else does.

    Two ranks need not meet each other to share a clock: of what is known of one, those that it meets are known too.
    """
    spans, ranks = timeline.spans, timeline.ranks
    parts = np.flatnonzero(spans.meeting != NONE)
    if not len(parts):
        return timeline
    shift = dict.fromkeys(ranks, 0)
    is_telling = np.array(["roadcast" not in name for name in timeline.names], bool)[spans.name[parts]]
    of_rank = timeline.rank_of_rows[parts]
    parts_of = {rank: parts[(of_rank == rank) & (is_telling | ~is_telling[of_rank == rank].any())] for rank in ranks}
    ended = np.full(len(timeline.meetings), NONE, np.int64)  # on the common clock, as soon as one of its ranks has it
    waiting = [rank for rank in ranks if len(parts_of[rank])]
    while waiting:
        known = [rank for rank in waiting if (ended[spans.meeting[parts_of[rank]]] != NONE).any()] or waiting[:1]
        for rank in known:
            meeting, end = spans.meeting[parts_of[rank]], spans.end[parts_of[rank]]
            is_known = ended[meeting] != NONE
            apart = int(np.median((end - ended[meeting])[is_known])) if is_known.any() else 0
            shift[rank] = -apart if abs(apart) > SAME_CLOCK else 0
            ended[meeting] = np.where(is_known, ended[meeting], end + shift[rank])
        waiting = [rank for rank in waiting if rank not in known]
    by = np.array([shift[lane.rank] for lane in timeline.lanes], np.int64)
    frames, memory = timeline.frames, timeline.memory
    return timeline.change(
        spans=spans.change(start=spans.start + by[spans.lane], end=spans.end + by[spans.lane]),
        frames=frames.change(start=frames.start + by[frames.lane], end=frames.end + by[frames.lane]),
        memory=memory.change(time=memory.time + by[memory.lane]),
    )


def _in_issue_order(timeline: Timeline) -> Timeline:
    """Merge the ranks' rows: each runs on to its next collective and goes on once all of its peers are there."""
    spans, rank_of_rows = timeline.spans, timeline.rank_of_rows
    rows_of = {rank: np.flatnonzero(rank_of_rows == rank) for rank in timeline.ranks}
    stops_of = {rank: np.flatnonzero(spans.meeting[rows] != NONE) for rank, rows in rows_of.items()}
    missing = np.bincount(spans.meeting[spans.meeting != NONE], minlength=len(timeline.meetings))
    done, next_stop = dict.fromkeys(rows_of, 0), dict.fromkeys(rows_of, 0)
    unmatched: set[int] = set()
    chunks: list[Ints] = []
    ready, blocked = list(rows_of), dict[int, int]()

    def release(meeting: int) -> None:
        for rank in [rank for rank, awaited in blocked.items() if awaited == meeting]:
            ready.append(rank)
            del blocked[rank]

    while ready or blocked:
        if not ready:  # the ranks wait in a circle: their collectives were not the same after all
            meeting = next(iter(blocked.values()))
            unmatched.add(meeting)
            release(meeting)
            continue
        rank = ready.pop(0)
        rows, stops = rows_of[rank], stops_of[rank]
        if next_stop[rank] == len(stops):
            chunks.append(rows[done[rank] :])
            continue
        upto = int(stops[next_stop[rank]]) + 1
        chunks.append(rows[done[rank] : upto])
        done[rank], next_stop[rank] = upto, next_stop[rank] + 1
        meeting = int(spans.meeting[rows[upto - 1]])
        missing[meeting] -= 1
        blocked[rank] = meeting
        if missing[meeting] == 0 or meeting in unmatched:
            release(meeting)
    order = np.concatenate(chunks)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    spans = spans.take(order)
    if unmatched:
        spans = spans.change(meeting=np.where(np.isin(spans.meeting, list(unmatched)), NONE, spans.meeting))
    links = timeline.links.renumbered(spans=place)
    return timeline.change(spans=spans, links=links, marks=np.sort(place[timeline.marks]))
