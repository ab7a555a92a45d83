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
"""Of the run: loops that take less are left out. Ranks differ when their turns do by so much, or their GPUs' shares."""


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of all ranks, in an issue order in which every rank pauses at a collective for its peers."""
    if len(timelines) == 1:
        return timelines[0]
    return settle(_in_issue_order(met(timelines)))


def met(timelines: Sequence[Timeline]) -> Timeline:
    """All ranks on one clock, with the parts of each collective brought together; not in an order to be replayed."""
    return _without_early_leavers(_align_clocks(_match(_join(timelines))))


def _join(timelines: Sequence[Timeline]) -> Timeline:
    turns = _common_turns(timelines)
    names: dict[str, int] = {}
    parts: dict[str, list[Any]] = {"spans": [], "links": [], "frames": [], "memory": []}
    lanes, marks = list[Lane](), list[Ints]()
    for one in timelines:
        row, frame = (sum(map(len, parts[name])) for name in ("spans", "frames"))
        new = {
            "names": np.array([names.setdefault(name, len(names)) for name in one.names], np.int64),
            "lanes": len(lanes) + np.arange(len(one.lanes)),
            "spans": row + np.arange(len(one.spans)),
            "frames": frame + np.arange(len(one.frames)),
        }
        for name, tables in parts.items():
            tables.append(getattr(one, name).renumbered(**new))
        marks.append(one.marks[: turns or None] + row)
        lanes += one.lanes
    return Timeline(
        lanes=tuple(lanes),
        names=tuple(names),
        marks=np.concatenate(marks),
        further=timelines[0].further,  # as its tree is the one that is shown
        **{name: type(tables[0]).concatenate(tables) for name, tables in parts.items()},
        facts=_joined_facts([one.facts for one in timelines], [one.ranks[0] for one in timelines], turns),
    )


def _joined_facts(each: Sequence[RunFacts], ranks: Sequence[int], turns: int) -> RunFacts:
    """The first rank's, and what every rank has of its own. `turns`: how many marks are turns of one loop on all."""
    trees = {rank: facts.run for rank, facts in zip(ranks, each, strict=True) if facts.run is not None}
    ended = [
        replace(facts.cut_short, rank=rank)
        for rank, facts in zip(ranks, each, strict=True)
        if facts.cut_short is not None
    ]
    loaders = [replace(use, rank=rank) for rank, facts in zip(ranks, each, strict=True) for use in facts.loaders]
    return replace(
        each[0],
        sources=tuple(dict.fromkeys(facts.source for facts in each)),  # ranks of one script have one
        plain_runs={rank: run for facts in each for rank, run in facts.plain_runs.items()},
        groups={group: members for facts in each for group, members in facts.groups.items()},
        loaders=tuple(sorted(loaders, key=lambda use: use.began - use.waited)),
        uneven=tuple(uneven_loops(trees)),
        cut_short=min(ended, key=lambda one: (one.how != "failed", one.ended), default=None),  # the others follow it
        races=joined(race for facts in each for race in facts.races),
        notes=(*each[0].notes, *where_ranks_differ(trees)),
        loop=each[0].loop if turns else "",
        beside=tuple(sorted({number for facts in each for number in facts.beside if number < turns - 1})),
    )


def _common_turns(timelines: Sequence[Timeline]) -> int:
    """How many marks end turns of one loop on every rank; 0 where they do not. After a rank's last turn nothing may
    have followed, and then that turn has no mark."""
    counts = [len(one.marks) for one in timelines]
    are_turns = all(one.facts.loop or one.facts.is_whole for one in timelines)
    return min(counts) if are_turns and max(counts) - min(counts) <= 1 else 0


def where_ranks_differ(trees: Mapping[int, Part]) -> Iterator[str]:
    """The tree that is shown is the first rank's. Of each of its loops, the rank in which it goes otherwise: where
    ranks wait for each other turns take as long in all, and the GPU is at work less in the one that comes late."""
    shown, *_ = trees.values() or [Part("")]
    loops = {rank: {part.named: part for part in tree.within() if part.turns > 1} for rank, tree in trees.items()}
    for place, first in next(iter(loops.values()), {}).items():
        here = {rank: known[place] for rank, known in loops.items() if place in known}
        if len(here) > 1 and first.time >= SHORTEST_LOOP * shown.time and (told := _difference(here)):
            yield f"{place}: {told}"


def uneven_loops(trees: Mapping[int, Part]) -> Iterator[UnevenLoop]:
    """Of the loops that every rank has and that are in no other, those that take one of them longer."""
    loops = {rank: {part.named: part for part in tree.parts if part.kind == LOOP} for rank, tree in trees.items()}
    for place in next(iter(loops.values()), {}):
        here = [(known[place].time, rank) for rank, known in loops.items() if place in known]
        longest, rank = max(here)
        average = sum(time for time, _ in here) // len(here)
        if len(here) == len(trees) and longest > (1 + RANKS_DIFFER) * average:
            yield UnevenLoop(place, rank, max(1, loops[rank][place].turns), longest, average)


def _difference(loop: Mapping[int, Part]) -> str:
    """Of a loop by rank: whose turns are longer than the others', else whose GPU is at work less."""
    turns = {rank: part.turn for rank, part in loop.items() if part.turn > 0}
    late = max(turns, key=lambda rank: turns[rank], default=NONE)
    if turns and turns[late] > (1 + RANKS_DIFFER) * median(turns.values()):
        others = _others(turns, late, lambda time: figure(time, turns[late]))
        return f"an iteration takes {duration(turns[late])} on rank {late}, and on {others} {unit_of(turns[late])}."
    shares = {rank: 100 * part.busy / max(1, part.time) for rank, part in loop.items() if part.busy >= 0}
    idle = min(shares, key=lambda rank: shares[rank], default=NONE)
    if shares and shares[idle] < median(shares.values()) - 100 * RANKS_DIFFER:
        return (
            f"the GPU of rank {idle} is busy {shares[idle]:.0f}% of the time "
            f"({_others(shares, idle, '{:.0f}'.format)}%): the others wait for it, or it has less to do."
        )
    return ""


def _others(values: Mapping[int, Number], one: int, written: Callable[[Number], str]) -> str:
    rest = [written(value) for value in sorted(value for rank, value in values.items() if rank != one)]
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
        mine = parts[group_of == group]
        ranks = np.unique(rank[mine])
        table = _aligned(timeline, step, [mine[rank[mine] == one] for one in ranks.tolist()])
        together = table[(table != NONE).sum(axis=1) > 1]
        first = np.array([row[row != NONE][0] for row in together], np.int64)
        number = sum(map(len, tables)) + np.arange(len(together))
        for column in together.T:
            here = column != NONE
            meeting[column[here]] = number[here]
        present = (together != NONE).sum(axis=1) if len(together) else np.zeros(0, np.int64)
        members = np.full(len(together), groups.get(group, len(ranks)), np.int64)
        tables.append(
            Meetings.of(len(together), name=spans.name[first], size=spans.size[first], members=members, present=present)
        )
    meetings = Meetings.concatenate(tables) if tables else Meetings.of(0)
    return timeline.change(spans=spans.change(meeting=meeting), meetings=meetings)


def _profiled_step(timeline: Timeline) -> Ints:
    """Of each command the number of the profiler's step in which it was launched, or NONE."""
    frames, launches, found = timeline.frames, timeline.launches, np.full(len(timeline), NONE, np.int64)
    numbers = np.array([_number(name) for name in timeline.names], np.int64)[frames.name]
    launched, rank = timeline.spans.start[launches.source], timeline.rank_of_rows[launches.source]
    for one in timeline.ranks:
        steps = np.flatnonzero((numbers != NONE) & (timeline.rank_of_lanes[frames.lane] == one))
        steps, mine = steps[np.argsort(frames.start[steps], kind="stable")], np.flatnonzero(rank == one)
        begun = np.searchsorted(frames.start[steps], launched[mine], side="right") - 1
        found[launches.target[mine]] = np.where(begun == NONE, NONE, np.append(numbers[steps], NONE)[begun])
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
        mine, its = base[max(0, -shift) :], other[max(0, shift) :]
        length = min(len(mine), len(its))
        mine, its = mine[:length], its[:length]
        if length < min(len(base), len(other)) // 2 or (spans.size[mine] != spans.size[its]).any():
            continue
        apart = spans.end[its] - spans.end[mine]
        offset = int(np.median(apart))
        spread = float(np.median(np.abs(apart - offset)))
        of_others = round(float((step[mine] != step[its]).mean()))  # 1 where most were numbered otherwise
        order = (of_others, min(abs(offset), OTHER_CLOCK), abs(shift))
        fits.append((_possible(timeline, mine, its, offset), spread, order, shift))
    # the root of a broadcast may be gone before its peers come; where that is so of all shifts it tells nothing
    fits = [fit for fit in fits if fit[0]] or fits
    near = 2 * min((spread for _, spread, _, _ in fits), default=0.0) + SKEW
    alike = [(order, shift) for _, spread, order, shift in fits if spread <= near]
    return min(alike)[1] if alike else 0


def _possible(timeline: Timeline, mine: Ints, its: Ints, offset: int) -> bool:
    """Nobody leaves a collective before the other has come: true of nearly all pairs, or they are not pairs."""
    spans = timeline.spans
    wrong = (spans.start[its] - offset > spans.end[mine] + SKEW) | (spans.start[mine] > spans.end[its] - offset + SKEW)
    return bool(wrong.mean() < 0.02)


def _align_clocks(timeline: Timeline) -> Timeline:
    """Everyone leaves a collective at the same time; a rank that seems not to has another clock. The root of a
    broadcast may be gone before, so broadcasts tell only where nothing else does.

    Two ranks need not meet each other to share a clock: of what is known of one, those that it meets are known too.
    """
    spans, ranks = timeline.spans, timeline.ranks
    parts = np.flatnonzero(spans.meeting != NONE)
    if not len(parts):
        return timeline
    rank, shift = timeline.rank_of_rows, dict.fromkeys(ranks, 0)
    together = np.array(["roadcast" not in name for name in timeline.names], bool)[spans.name[parts]]
    of_rank = rank[parts]
    mine = {one: parts[(of_rank == one) & (together | ~together[of_rank == one].any())] for one in ranks}
    over = np.full(len(timeline.meetings), NONE, np.int64)  # on the common clock, as soon as one of its ranks has it
    left = [one for one in ranks if len(mine[one])]
    while left:
        known = [one for one in left if (over[spans.meeting[mine[one]]] != NONE).any()] or left[:1]
        for one in known:
            meeting, end = spans.meeting[mine[one]], spans.end[mine[one]]
            told = over[meeting] != NONE
            apart = int(np.median((end - over[meeting])[told])) if told.any() else 0
            shift[one] = -apart if abs(apart) > SAME_CLOCK else 0
            over[meeting] = np.where(told, over[meeting], end + shift[one])
        left = [one for one in left if one not in known]
    shifts = np.array([shift[lane.rank] for lane in timeline.lanes], np.int64)
    return _moved(timeline, shifts)


def _moved(timeline: Timeline, shift: Ints) -> Timeline:
    """Each lane's times, by as much as its clock is behind."""
    spans, frames, memory = timeline.spans, timeline.frames, timeline.memory
    return timeline.change(
        spans=spans.change(start=spans.start + shift[spans.lane], end=spans.end + shift[spans.lane]),
        frames=frames.change(start=frames.start + shift[frames.lane], end=frames.end + shift[frames.lane]),
        memory=memory.change(time=memory.time + shift[memory.lane]),
    )


def _without_early_leavers(timeline: Timeline) -> Timeline:
    """The root of a broadcast may be gone before the last peer comes: it did not wait for the others."""
    spans = timeline.spans
    early = (spans.meeting != NONE) & (spans.end < last_arrival(timeline) - SKEW)
    return timeline.change_spans(meeting=np.where(early, NONE, spans.meeting))


def _in_issue_order(timeline: Timeline) -> Timeline:
    """Merge the ranks' rows: each runs on to its next collective and goes on once all of its peers are there."""
    spans, rank = timeline.spans, timeline.rank_of_rows
    rows = {one: np.flatnonzero(rank == one) for one in timeline.ranks}
    stops = {one: np.flatnonzero(spans.meeting[mine] != NONE) for one, mine in rows.items()}
    missing = np.bincount(spans.meeting[spans.meeting != NONE], minlength=len(timeline.meetings))
    done, next_stop = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
    unmatched: set[int] = set()
    chunks: list[Ints] = []
    ready, blocked = list(rows), dict[int, int]()
    while ready or blocked:
        if not ready:  # the ranks wait in a circle: their collectives were not the same after all
            meeting = next(iter(blocked.values()))
            unmatched.add(meeting)
            ready = [one for one, held in blocked.items() if held == meeting]
            blocked = {one: held for one, held in blocked.items() if held != meeting}
            continue
        one = ready.pop(0)
        mine, stop = rows[one], stops[one]
        if next_stop[one] == len(stop):
            chunks.append(mine[done[one] :])
            continue
        upto = int(stop[next_stop[one]]) + 1
        chunks.append(mine[done[one] : upto])
        done[one], next_stop[one] = upto, next_stop[one] + 1
        meeting = int(spans.meeting[mine[upto - 1]])
        missing[meeting] -= 1
        blocked[one] = meeting
        if missing[meeting] == 0 or meeting in unmatched:
            freed = [other for other, held in blocked.items() if held == meeting]
            ready += freed
            blocked = {other: held for other, held in blocked.items() if held != meeting}
    return _reorder(timeline, np.concatenate(chunks), unmatched)


def _reorder(timeline: Timeline, order: Ints, unmatched: set[int]) -> Timeline:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    spans, links = timeline.spans.take(order), timeline.links
    if unmatched:
        spans = spans.change(meeting=np.where(np.isin(spans.meeting, list(unmatched)), NONE, spans.meeting))
    return timeline.change(spans=spans, links=links.renumbered(spans=place), marks=np.sort(place[timeline.marks]))
