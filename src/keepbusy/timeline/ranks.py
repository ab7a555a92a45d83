"""Several ranks in one timeline: their clocks aligned, and the parts of each collective matched."""

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
"""Ranks of one host share a clock. A smaller difference is skew, not an offset."""
OTHER_CLOCK = 50_000_000
"""If clocks differ by more, they say nothing about where the windows begin."""
SHORTEST_LOOP, RANKS_DIFFER = 0.05, 0.1
"""Loops that take less of the run are left out. Ranks differ if their iterations or GPUs' shares do by so much."""


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of all ranks, in an issue order in which every rank pauses at a collective for its peers."""
    if len(timelines) == 1:
        return timelines[0]
    return settle(_in_issue_order(join_ranks(timelines)))


def join_ranks(timelines: Sequence[Timeline]) -> Timeline:
    """All ranks on one clock, with the parts of each collective matched. The order of rows cannot be replayed yet."""
    timeline = _align_clocks(_match(_as_one(timelines)))
    spans = timeline.spans  # the root of a broadcast may leave before the last peer arrives: it waits for none
    early = (spans.meeting != NONE) & (spans.end < last_arrival(timeline) - SKEW)
    return timeline.change_spans(meeting=np.where(early, NONE, spans.meeting))


def _as_one(timelines: Sequence[Timeline]) -> Timeline:
    # how many marks end iterations of one loop on every rank, or 0. If nothing follows a rank's last iteration, that
    # has no mark
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
        further=timelines[0].further,  # reports show the tree of that rank
        **{name: type(parts[0]).concatenate(parts) for name, parts in tables.items()},
        facts=_joined_facts({timeline.ranks[0]: timeline.facts for timeline in timelines}, common),
    )


def _joined_facts(facts_of: Mapping[int, RunFacts], iterations: int) -> RunFacts:
    """The first rank's facts, and those that every rank has of its own."""
    first, *_ = all_facts = [*facts_of.values()]
    trees = {rank: facts.run for rank, facts in facts_of.items() if facts.run is not None}
    endings = [replace(facts.cut_short, rank=rank) for rank, facts in facts_of.items() if facts.cut_short is not None]
    loaders = [replace(use, rank=rank) for rank, facts in facts_of.items() for use in facts.loaders]
    return replace(
        first,
        sources=tuple(dict.fromkeys(facts.source for facts in all_facts)),  # ranks may share one script
        plain_runs={rank: run for facts in all_facts for rank, run in facts.plain_runs.items()},
        groups={group: members for facts in all_facts for group, members in facts.groups.items()},
        loaders=tuple(sorted(loaders, key=lambda use: use.began - use.waited)),
        uneven=tuple(uneven_loops(trees)),
        cut_short=min(endings, key=lambda end: (end.how != "failed", end.ended), default=None),  # others follow
        races=joined(race for facts in all_facts for race in facts.races),
        notes=(*first.notes, *where_ranks_differ(trees)),
        loop=first.loop if iterations else "",
        beside=tuple(sorted({number for facts in all_facts for number in facts.beside if number < iterations - 1})),
    )


def where_ranks_differ(trees: Mapping[int, Part]) -> Iterator[str]:
    """For each loop of the first rank, whose tree is shown, a sentence if another rank differs. If ranks wait for each
    other, iterations take equally long on all, and the GPU of the late rank works less."""
    shown, *_ = trees.values() or [Part("")]
    loops_of = {rank: {part.named: part for part in tree.within() if part.turns > 1} for rank, tree in trees.items()}
    for name, first in next(iter(loops_of.values()), {}).items():
        by_rank = {rank: loops[name] for rank, loops in loops_of.items() if name in loops}
        difference = _difference(by_rank) if len(by_rank) > 1 and first.time >= SHORTEST_LOOP * shown.time else ""
        if difference:
            yield f"{name}: {difference}"


def uneven_loops(trees: Mapping[int, Part]) -> Iterator[UnevenLoop]:
    """Outermost loops that all ranks have and that take one of them longer."""
    loops_of = {rank: {part.named: part for part in tree.parts if part.kind == LOOP} for rank, tree in trees.items()}
    for name in next(iter(loops_of.values()), {}):
        times = [(loops[name].time, rank) for rank, loops in loops_of.items() if name in loops]
        longest, rank = max(times)
        average = sum(time for time, _ in times) // len(times)
        if len(times) == len(trees) and longest > (1 + RANKS_DIFFER) * average:
            yield UnevenLoop(name, rank, max(1, loops_of[rank][name].turns), longest, average)


def _difference(loop: Mapping[int, Part]) -> str:
    """A clause on the rank whose iterations are longer than the others', or else whose GPU works less."""
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
    """Matches the collectives: the k-th of a group on one rank is the k-th on the others, once windows are aligned."""
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
    frames, launches, step_of_row = timeline.frames, timeline.launches, np.full(len(timeline), NONE, np.int64)
    numbers = np.array([_number(name) for name in timeline.names], np.int64)[frames.name]
    launched, rank_of_launch = timeline.spans.start[launches.source], timeline.rank_of_rows[launches.source]
    for rank in timeline.ranks:
        steps = np.flatnonzero((numbers != NONE) & (timeline.rank_of_lanes[frames.lane] == rank))
        steps = steps[np.argsort(frames.start[steps], kind="stable")]
        of_rank = np.flatnonzero(rank_of_launch == rank)
        begun = np.searchsorted(frames.start[steps], launched[of_rank], side="right") - 1
        step_of_row[launches.target[of_rank]] = np.where(begun == NONE, NONE, np.append(numbers[steps], NONE)[begun])
    return step_of_row


def _number(name: str) -> int:
    number = name.removeprefix(PROFILER_STEP)
    return int(number) if number != name and number.isdecimal() and len(number) < 18 else NONE


def _aligned(timeline: Timeline, step: Ints, columns: list[Ints]) -> Ints:
    """A row per collective, a column per rank: the rows of its parts, NONE outside of a rank's window."""
    shifts = [0, *(_best_shift(timeline, step, columns[0], other) for other in columns[1:])]
    low = min(-shift for shift in shifts)
    high = max(len(column) - shift for column, shift in zip(columns, shifts, strict=True))
    table = np.full((high - low, len(columns)), NONE, np.int64)
    for index, (column, shift) in enumerate(zip(columns, shifts, strict=True)):
        table[-shift - low : -shift - low + len(column), index] = column
    return table


def _best_shift(timeline: Timeline, step: Ints, base: Ints, other: Ints) -> int:
    """How many collectives earlier the other's window begins: with equal sizes in equal order, ending together.

    Steps are alike, so several shifts may fit equally well. The right one gives equal numbers of the profiler's steps,
    and equal ends, since ranks of one host share a clock.
    """
    spans, fits = timeline.spans, []
    for shift in sorted(range(-min(MOST_SHIFT, len(base) - 1), min(MOST_SHIFT, len(other) - 1) + 1), key=abs):
        first, second = base[max(0, -shift) :], other[max(0, shift) :]
        length = min(len(first), len(second))
        first, second = first[:length], second[:length]
        if length < min(len(base), len(other)) // 2 or (spans.size[first] != spans.size[second]).any():
            continue
        difference = spans.end[second] - spans.end[first]
        offset = int(np.median(difference))
        spread = float(np.median(np.abs(difference - offset)))
        # no rank leaves a collective before the other arrives: that holds for nearly all pairs of a possible shift
        leaves_early = spans.start[second] - offset > spans.end[first] + SKEW
        leaves_early |= spans.start[first] > spans.end[second] - offset + SKEW
        is_possible = bool(leaves_early.mean() < 0.02)
        of_others = round(float((step[first] != step[second]).mean()))  # 1 if most are in steps with other numbers
        order = (of_others, min(abs(offset), OTHER_CLOCK), abs(shift))
        fits.append((is_possible, spread, order, shift))
    # the root of a broadcast may leave before its peers arrive, so possibly no shift passes that test
    fits = [fit for fit in fits if fit[0]] or fits
    near = 2 * min((spread for _, spread, _, _ in fits), default=0.0) + SKEW
    alike = [(order, shift) for _, spread, order, shift in fits if spread <= near]
    return min(alike)[1] if alike else 0


def _align_clocks(timeline: Timeline) -> Timeline:
    """All ranks leave a collective at the same time, so a rank that seems not to has another clock. Broadcasts count
    only if a rank has no other collectives, as their root may leave earlier.

    Two ranks that never meet can be aligned through others that both meet.
    """
    spans, ranks = timeline.spans, timeline.ranks
    parts = np.flatnonzero(spans.meeting != NONE)
    if not len(parts):
        return timeline
    shift = dict.fromkeys(ranks, 0)
    is_telling = np.array(["roadcast" not in name for name in timeline.names], bool)[spans.name[parts]]
    of_rank = timeline.rank_of_rows[parts]
    parts_of = {rank: parts[(of_rank == rank) & (is_telling | ~is_telling[of_rank == rank].any())] for rank in ranks}
    ended = np.full(len(timeline.meetings), NONE, np.int64)  # on the common clock, once one of its ranks is aligned
    waiting = [rank for rank in ranks if len(parts_of[rank])]
    while waiting:
        connected = [rank for rank in waiting if (ended[spans.meeting[parts_of[rank]]] != NONE).any()] or waiting[:1]
        for rank in connected:
            meeting, end = spans.meeting[parts_of[rank]], spans.end[parts_of[rank]]
            is_timed = ended[meeting] != NONE
            difference = int(np.median((end - ended[meeting])[is_timed])) if is_timed.any() else 0
            shift[rank] = -difference if abs(difference) > SAME_CLOCK else 0
            ended[meeting] = np.where(is_timed, ended[meeting], end + shift[rank])
        waiting = [rank for rank in waiting if rank not in connected]
    shift_of = np.array([shift[lane.rank] for lane in timeline.lanes], np.int64)
    frames, memory = timeline.frames, timeline.memory
    return timeline.change(
        spans=spans.change(start=spans.start + shift_of[spans.lane], end=spans.end + shift_of[spans.lane]),
        frames=frames.change(start=frames.start + shift_of[frames.lane], end=frames.end + shift_of[frames.lane]),
        memory=memory.change(time=memory.time + shift_of[memory.lane]),
    )


def _in_issue_order(timeline: Timeline) -> Timeline:
    """Merges the ranks' rows: each rank runs to its next collective and goes on once all of its peers are there."""
    spans, rank_of_rows = timeline.spans, timeline.rank_of_rows
    rows_of = {rank: np.flatnonzero(rank_of_rows == rank) for rank in timeline.ranks}
    stops_of = {rank: np.flatnonzero(spans.meeting[rows] != NONE) for rank, rows in rows_of.items()}
    missing = np.bincount(spans.meeting[spans.meeting != NONE], minlength=len(timeline.meetings))
    position, next_stop = dict.fromkeys(rows_of, 0), dict.fromkeys(rows_of, 0)
    unmatched: set[int] = set()
    chunks: list[Ints] = []
    ready, blocked = list(rows_of), dict[int, int]()

    def release(meeting: int) -> None:
        for rank in [rank for rank, awaited in blocked.items() if awaited == meeting]:
            ready.append(rank)
            del blocked[rank]

    while ready or blocked:
        if not ready:  # the ranks wait in a circle: these collectives were matched wrongly
            meeting = next(iter(blocked.values()))
            unmatched.add(meeting)
            release(meeting)
            continue
        rank = ready.pop(0)
        rows, stops = rows_of[rank], stops_of[rank]
        if next_stop[rank] == len(stops):
            chunks.append(rows[position[rank] :])
            continue
        upto = int(stops[next_stop[rank]]) + 1
        chunks.append(rows[position[rank] : upto])
        position[rank], next_stop[rank] = upto, next_stop[rank] + 1
        meeting = int(spans.meeting[rows[upto - 1]])
        missing[meeting] -= 1
        blocked[rank] = meeting
        if missing[meeting] == 0 or meeting in unmatched:
            release(meeting)
    order = np.concatenate(chunks)
    new_row = np.empty(len(order), np.int64)
    new_row[order] = np.arange(len(order))
    spans = spans.take(order)
    if unmatched:
        spans = spans.change(meeting=np.where(np.isin(spans.meeting, list(unmatched)), NONE, spans.meeting))
    links = timeline.links.renumbered(spans=new_row)
    return timeline.change(spans=spans, links=links, marks=np.sort(new_row[timeline.marks]))
