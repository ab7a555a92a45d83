"""From marks to the plain run: what a step usually takes, what comes only now and then, and how the run went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from keepbusy.recording.interruptions import CHECKPOINT, COLLECTOR, INPUT, Reading
from keepbusy.recording.step_clock import Steps, mean, stalled, warm_up
from keepbusy.recording.watch import Seen, leads_to
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.plain_run import Course, PlainRun, RareStall

# After how many steps a stall comes again, and how surely.

REGULAR, MOSTLY = 0.1, 0.75
"""Most of the distances differ by no more than this share of the usual one."""
THROUGHOUT = 0.25
"""Of the steps from the first one on, a rhythm goes on for so many at least: else it was but a burst."""
CLOSEST, MISSED = 4, 3
"""A punctual one comes every fourth step or less often, and two times in a row it may have counted as another stall."""


class Rhythm(NamedTuple):
    """Steps from one to the next, typically; whether nearly always so many, and whether exactly so many."""

    every: float = 0.0
    regular: bool = False
    punctual: bool = False


def rhythm_of(came: Ints, known: Ints) -> Rhythm:
    """Of marks, sorted. Where not all steps between two are known, since somebody looked, another may have come."""
    if len(came) < 2:
        return Rhythm()
    distances = np.diff(came)
    whole = np.diff(np.searchsorted(known, came)) == distances
    every = float(np.median(distances[whole] if whole.any() else distances))
    off = np.abs((distances[whole] if whole.any() else distances) - every)
    throughout = came[-1] - came[0] + every >= THROUGHOUT * (known[-1] - came[0])
    steady = (off <= max(1.0, REGULAR * every)).mean() >= MOSTLY and distances.mean() <= 2 * every
    punctual = bool(throughout and _is_punctual(distances, every))
    return Rhythm(every, punctual or bool(steady and throughout), punctual)


def _is_punctual(distances: Ints, every: float) -> bool:
    turns = np.maximum(1.0, np.round(distances / max(every, 1.0)))
    exact = (np.abs(distances - turns * every) <= 1).all()
    return bool(every >= CLOSEST and exact and turns.max() <= MISSED and np.median(turns) < 2)


# Stalls that keep a beat: what is seen at several lines is one, and where two beats meet neither loses its own.
#
# A function that is called every fiftieth step is seen now at this line of it, now at that one. And every two hundredth
# step both what comes every fortieth and what comes every fiftieth holds up the program.

ENOUGH = 3
"""So often something has come before it is said to keep a beat."""
ALIKE_BEATS = 1.5
"""Stalls of one kind take up to so many times as long as each other."""
BOTH = 0.5
"""One that takes less than this share of two kinds together is not both."""


class Stall(NamedTuple):
    """One step that took far longer than those around it."""

    mark: int
    longer: int
    usual: int
    what: str
    seen: Seen


Group: TypeAlias = "list[Stall]"
Told: TypeAlias = "Callable[[Group], RareStall]"
"""What is told of stalls that are one."""


class Beat(NamedTuple):
    """Stalls that come after so many steps exactly."""

    stalls: Group
    told: RareStall

    def has(self, stall: Stall) -> bool:
        """Whether that is its step, or one beside it; the step after it may be slow for itself."""
        alone = all(abs(one.mark - stall.mark) > 1 for one in self.stalls)
        return alone and self.told.comes_in(stall.mark + 1)


def by_beat(groups: Iterable[Group], told: Told, loop: tuple[str, ...]) -> list[Group]:
    """The groups, with single stalls given to the beats that they belong to."""
    joined = _joined(groups, told, loop)
    beats = _beats(joined, told)
    others = [group for group in joined if not any(group == beat.stalls for beat in beats)]
    left = [_given(group, beats, loop) for group in others]
    return [*(beat.stalls for beat in beats), *filter(None, left)]


def _joined(groups: Iterable[Group], told: Told, loop: tuple[str, ...]) -> list[Group]:
    """What leaves the loop at the same line, and keeps a beat together."""
    alike: defaultdict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in groups:
        alike[group[0].what, _leaves_at(told(group).lines, loop)].append(group)
    return [one for (_, line), several in alike.items() for one in (_as_one(several, told) if line else several)]


def _as_one(groups: list[Group], told: Told) -> list[Group]:
    whole = [stall for group in groups for stall in group]
    times = [told(group).time for group in groups]
    return [whole] if max(times) <= ALIKE_BEATS * min(times) and told(whole).punctual else groups


def _leaves_at(lines: tuple[str, ...], loop: tuple[str, ...]) -> str:
    """The line of the loop that led there; nothing where the loop is not known, or where the line is its own."""
    shared = sum(1 for _ in _shared(lines, loop))
    return lines[shared] if loop and shared < len(lines) else ""


def _shared(lines: tuple[str, ...], loop: tuple[str, ...]) -> Iterator[str]:
    for mine, its in zip(lines, loop, strict=False):
        if mine != its:
            return
        yield mine


def _beats(groups: Iterable[Group], told: Told) -> list[Beat]:
    """But for those which are nothing but others that meet."""
    found: list[Beat] = []
    candidates = [Beat([*group], told(group)) for group in groups if len(group) >= ENOUGH]
    for one in sorted((one for one in candidates if one.told.punctual), key=lambda one: one.told.every):
        if not all(_is_both(stall, [beat for beat in found if beat.has(stall)]) for stall in one.stalls):
            found.append(one)
    return found


def _is_both(stall: Stall, beats: list[Beat]) -> bool:
    return len(beats) > 1 and stall.longer >= BOTH * sum(beat.told.time for beat in beats)


def _given(group: Group, beats: list[Beat], loop: tuple[str, ...]) -> Group:
    """Give away what comes with a beat and has no place or reason of its own, or is two beats that meet."""
    left = []
    for stall in group:
        homes = [beat for beat in beats if beat.has(stall)]
        nowhere = not stall.what and (not stall.seen.lines or leads_to(stall.seen.lines, loop))
        if _is_both(stall, homes):
            for beat in homes:
                beat.stalls.append(stall._replace(longer=beat.told.time, seen=Seen()))
        elif homes and nowhere:
            homes[0].stalls.append(stall._replace(seen=Seen()))
        else:
            left.append(stall)
    return left


# Stalls that come only now and then, brought together by what they are and where the program stood.

LEAST_SHARE, LEAST_ODD = 0.005, 0.03
"""Of the run: what takes less is not worth a line."""
MOSTLY_THERE = 0.5
"""A pause that makes up so much of what a stall is longer is its reason."""
HERE = 0.25
"""Where so many of the stalls below a line stood at that line itself, the line is their place."""


def rare_stalls(
    steps: Steps,
    rare: Mask,
    usual: Ints,
    saves: Mapping[int, int],
    seen: Mapping[int, Seen],
    loop: tuple[str, ...] = (),
) -> list[RareStall]:
    """The largest share first. `rare` tells which steps are stalls, `usual` what their neighbours take.

    `saves`: what checkpoints took, `seen`: where the program stood, both by the number of the mark that ends the step.
    """
    whole = int(steps.took.sum())

    def told(group: Sequence[Stall]) -> RareStall:
        return _told(group, whole, loop, steps.mark)

    groups = by_beat(_groups(_stalls(steps, rare, usual, saves, seen), loop), told, loop)
    found = [told(group) for group in groups]
    return sorted((one for one in found if _worth_a_line(one)), key=lambda one: -one.total)


def _worth_a_line(stall: RareStall) -> bool:
    """What has no rhythm and no reason may be a whim of the machine, unless there is a lot of it."""
    return stall.share >= (LEAST_SHARE if stall.what or stall.regular else LEAST_ODD)


def _stalls(
    steps: Steps, rare: Mask, usual: Ints, saves: Mapping[int, int], seen: Mapping[int, Seen]
) -> Iterator[Stall]:
    for row in np.flatnonzero(rare).tolist():
        mark, longer = int(steps.mark[row]), int(steps.took[row] - usual[row])
        kinds = {
            INPUT: int(steps.input[row]),
            COLLECTOR: int(steps.collector[row]),
            CHECKPOINT: saves.get(mark, 0),
        }
        what, most = max(kinds.items(), key=lambda one: one[1])
        yield Stall(
            mark, longer, int(usual[row]), what if most >= MOSTLY_THERE * longer else "", seen.get(mark, Seen())
        )


def _groups(stalls: Iterable[Stall], loop: tuple[str, ...]) -> Iterator[list[Stall]]:
    """What is alike. The collector comes wherever memory is asked for, so its place says nothing."""
    kinds: defaultdict[str, list[Stall]] = defaultdict(list)
    for one in stalls:
        kinds[one.what].append(one)
    for what, alike in kinds.items():
        if what == COLLECTOR:
            yield alike
        else:
            yield from _by_place(alike, (), loop)


def _by_place(stalls: list[Stall], lines: tuple[str, ...], loop: tuple[str, ...]) -> Iterator[list[Stall]]:
    """Stalls that have these outer lines in common, apart where they go different ways further in."""
    depth = len(lines)
    here = [one for one in stalls if len(one.seen.lines) <= depth]
    if depth and len(here) >= HERE * len(stalls) and not leads_to(lines, loop):
        yield stalls
        return
    further: defaultdict[str, list[Stall]] = defaultdict(list)
    for one in stalls:
        if len(one.seen.lines) > depth:
            further[one.seen.lines[depth]].append(one)
    if here and further and depth and not leads_to(lines, loop):  # a look or two that saw no further
        max(further.values(), key=len).extend(here)
    elif here:
        yield here
    for line, alike in further.items():
        yield from _by_place(alike, (*lines, line), loop)


def _told(group: Sequence[Stall], whole: int, loop: tuple[str, ...], known: Ints) -> RareStall:
    longer = [one.longer for one in group]
    came = np.sort(np.array([one.mark for one in group], np.int64))
    rhythm = rhythm_of(came, known)
    lines = _agreed([one.seen.lines for one in group])
    libraries = {one.seen.library for one in group}
    return RareStall(
        what=group[0].what,
        count=len(group),
        every=rhythm.every,
        regular=rhythm.regular,
        time=round(float(np.median(longer))),
        total=sum(longer),
        share=sum(longer) / max(1, whole),
        lines=lines,
        library=libraries.pop() if len(libraries) == 1 else "",
        loop=min(len(_common([lines, loop])), len(loop) - 1, len(lines) - 1),
        last=int(came[-1]) + 1,
        punctual=rhythm.punctual,
    )


def _agreed(chains: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What they share, but for a few that saw less far than the others."""
    chains = [chain for chain in chains if chain] or chains
    least = sorted(map(len, chains))[int(HERE * len(chains))]
    return _common([chain for chain in chains if len(chain) >= least])


def _common(chains: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The beginning that all of them share."""
    shared = []
    for lines in zip(*chains, strict=False):
        if len(set(lines)) > 1:
            break
        shared.append(lines[0])
    return tuple(shared)


NO_LEAD = 100_000
"""Below this the host has no lead: a mark takes some microseconds to reach the device, and clocks align no better."""
ROWS = 512
"""Of the course of a run."""
AHEAD, FREE = 0.5, 0.25
"""A host that is usually half a step ahead does not set the pace. In a step in which it gains a quarter of it on the
device nothing holds it up: that is how the queue fills, at first and after each sync."""


def plain_run(
    steps: Steps,
    marked_by: str,
    saves: Mapping[int, int] | None = None,
    seen: Mapping[int, Seen] | None = None,
    loop: tuple[str, ...] = (),
    readings: Sequence[Reading] = (),
    delayed: float = 0.0,
    fault: str = "",
) -> PlainRun:
    """`saves`: what checkpoints took, `seen`: where overdue steps stood, by mark; `loop`: the lines where steps end."""
    plain = steps.take(steps.plain)
    begun = warm_up(plain.took)
    rest = plain.take(np.arange(len(plain)) >= begun)
    rare, usual = stalled(rest.took)
    ordinary = rest.take(~rare)
    low, high = np.percentile(ordinary.took, [10, 90]) if len(ordinary) else (0, 0)
    lead = ordinary.lead[ordinary.lead != NONE]
    steady = [one for one in readings if len(rest) and one.mark >= rest.mark[0]]
    stalls = rare_stalls(rest, rare, usual, saves or {}, seen or {}, loop)
    return PlainRun(
        marked_by=marked_by,
        steps=len(rest),
        step=mean(ordinary.took),
        low=round(low),
        high=round(high),
        warm_up=begun,
        warm_up_time=int(plain.took[:begun].sum()),
        host=_host_alone(ordinary),
        lead=_median(lead),
        no_lead=float((lead < NO_LEAD).mean()) if len(lead) else 0.0,
        input=mean(ordinary.input),
        collector=mean(ordinary.collector),
        requests=_a_step(steady, lambda one: one.requests),
        retries=steady[-1].retries - steady[0].retries if steady else 0,
        delayed=delayed,
        stalls=tuple(one for one in stalls if _is_its_own(one, delayed)),
        course=_course(plain),
        fault=fault,
    )


def _host_alone(steps: Steps) -> int:
    known = steps.lead != NONE
    if not known.any() or np.median(steps.lead[known]) < AHEAD * np.median(steps.took):
        return NONE
    return _median(steps.host[steps.host < (1 - FREE) * steps.took])


def _is_its_own(stall: RareStall, delayed: float) -> bool:
    """The program's. What has no rhythm and no reason may as well be the processor that others took."""
    return bool(stall.what) or stall.regular or stall.share > delayed


def plain_step(steps: Steps) -> int | None:
    """What a stopwatch over many plain steps shows, the warm-up and rare stalls left out; None if there are too few."""
    run = plain_run(steps, "")
    return run.step if run.steps >= 3 else None


def _a_step(readings: Sequence[Reading], counted: Callable[[Reading], int]) -> float:
    if len(readings) < 2:
        return 0.0
    first, last = readings[0], readings[-1]
    return (counted(last) - counted(first)) / max(1, last.mark - first.mark)


def _course(steps: Steps) -> Course:
    each = max(1, -(-len(steps) // ROWS))
    parts = [np.arange(first, min(first + each, len(steps))) for first in range(0, len(steps), each)]
    return Course(
        each=each,
        step=tuple(_median(steps.took[part]) for part in parts),
        longest=tuple(int(steps.took[part].max()) for part in parts),
        lead=tuple(_median(steps.lead[part][steps.lead[part] != NONE]) for part in parts),
    )


def _median(values: Ints) -> int:
    return round(float(np.median(values))) if len(values) else NONE
