"""Stalls that come only now and then, brought together by what they are and where the program stood."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from keepbusy.record.beats import Stall, by_beat
from keepbusy.record.marked import Steps
from keepbusy.record.pauses import CHECKPOINT, COLLECTOR, INPUT
from keepbusy.record.rhythm import rhythm_of
from keepbusy.record.watch import Seen, leads_to
from keepbusy.timeline.model import Ints, Mask
from keepbusy.timeline.plain_run import RareStall

LEAST_SHARE, LEAST_ODD = 0.005, 0.03
"""Of the run: what takes less is not worth a line."""
MOSTLY = 0.5
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
        yield Stall(mark, longer, int(usual[row]), what if most >= MOSTLY * longer else "", seen.get(mark, Seen()))


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
