"""How long turns take: what is usual, the warm-up, and kinds of turn that take far longer than the others.

Nothing here looks for a pattern. Turns that stick out are brought together by the pause that made them long, or by the
line at which looks at the program found it for longer than in an ordinary turn. How often each kind comes, and whether
it keeps a beat, is read off afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import NONE, Ints, Mask


def quantile(values: npt.NDArray[np.integer | np.floating], share: float = 0.5) -> npt.NDArray[np.float64]:
    """Along the last axis. NumPy's own imports its masked arrays first, and the program would wait for that."""
    place = share * (values.shape[-1] - 1)
    low, high = math.floor(place), math.ceil(place)
    part = np.partition(values, (low, high), axis=-1)
    return np.asarray(part[..., low] + (place - low) * (part[..., high] - part[..., low]))


# What is usual among turns, and from which length on one is slow.

SLOW_DEVIATIONS, SLOW_SHARE = 8.0, 0.5
"""A turn is slow when it takes longer than the median by so many usual deviations, and by so much of the median."""
COMPARED_TURNS = 256
"""Turns may change over a run, so what is usual is asked of so many at a time."""


def slow_from(took: Ints) -> int:
    """A turn that takes longer than this is slow."""
    return int(_slow_from(took[None])[0, 0])


def _slow_from(rows: Ints) -> npt.NDArray[np.float64]:
    median = quantile(rows)[:, None]
    deviation = quantile(np.abs(rows - median))[:, None]
    return np.asarray(median + np.maximum(SLOW_DEVIATIONS * deviation, SLOW_SHARE * median))


def slow_turns(took: Ints) -> tuple[Mask, Ints]:
    """Which turns are slow, and what usual ones near each take."""
    found, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    blocks = max(1, len(took) // COMPARED_TURNS)
    each = len(took) // blocks
    longer = len(took) - each * blocks  # so many blocks have one turn more
    for begin, count, length in ((0, longer, each + 1), (longer * (each + 1), blocks - longer, each)):
        part = slice(begin, begin + count * length)
        rows = took[part].reshape(count, length)
        if rows.size:
            found[part] = (rows > _slow_from(rows)).ravel()
            usual[part] = np.repeat(quantile(rows), length)
    return found, usual


def warm_up(took: Ints) -> int:
    """How many turns at the beginning are not like those that follow: memory, tuning and compiling take their time."""
    if len(took) < 4:
        return 0
    half = took[len(took) // 2 :]
    usual = took <= min(slow_from(half), int(2 * quantile(half)))
    settled = np.flatnonzero(usual[:-2] & usual[1:-1] & usual[2:])
    if not len(settled):  # as where every third turn is slow: also later ones are no steadier
        settled = np.flatnonzero(usual)
    return int(min(settled[0], len(took) // 2)) if len(settled) else len(took) // 2


# After how many turns something comes again, and how surely.

BEAT_SHARE = 0.75
"""Of the distances of a beat, so many are the usual one, or several of it: now and then it comes unnoticed, or another
turn was slow at its line."""
BEAT_LASTS = 0.25
"""Of the turns from the first one on, a beat goes on for so many at least: else it was but a burst."""


class Beat(NamedTuple):
    """Turns from one to the next, typically, and whether always so many."""

    every: float = 0.0
    regular: bool = False


def beat_of(came: Ints, known: Ints) -> Beat:
    """Of turns by their numbers, sorted. Where not all between two are known, another may have come."""
    if len(came) < 2:
        return Beat()
    distances = np.diff(came)
    whole = np.diff(np.searchsorted(known, came)) == distances
    every = float(quantile(distances[whole] if whole.any() else distances))
    beats = np.maximum(1.0, np.round(distances / every))
    exact = (np.abs(distances - beats * every) <= 1).mean() >= BEAT_SHARE and beats.mean() < 2
    throughout = came[-1] - came[0] + every >= BEAT_LASTS * (known[-1] - came[0])
    return Beat(every, bool(exact and throughout))


# Kinds of slow turn.

REASON_SHARE = 0.5
"""A pause that makes up so much of what a turn is longer is its reason."""
ALIKE_LENGTHS = 3.0
"""Slow turns that no look has met go to the kind whose turns are as long as they are, within so many times."""


@dataclass(frozen=True, eq=False)
class LookTable:
    """Looks at the program, a row each: when, for how long it counts, and a number for where the program stood."""

    times: Ints
    weight: Ints
    place: Ints


@dataclass(frozen=True, eq=False)
class SlowKind:
    """Slow turns that are alike: their rows, how much longer each took, a reason, and a place; NONE where unknown."""

    rows: Ints
    longer: Ints
    reason: str
    place: int

    @property
    def total(self) -> int:
        return int(self.longer.sum())


def slow_kinds(
    took: Ints,
    began: Ints,
    over: Ints,
    looks: LookTable,
    pauses: Mapping[str, Ints] | None = None,
    without_place: str = "",
) -> list[SlowKind]:
    """The largest first. `began` and `over`: when each turn did, by the looks' clock; `pauses`: what held it up, of
    which one may come anywhere."""
    slow, usual = slow_turns(took)
    rows = np.flatnonzero(slow)
    longer = took[rows] - usual[rows]
    place = _longest_at(slow, began, over, looks)
    reasons = [""] * len(rows)
    for name, times in (pauses or {}).items():
        for one in np.flatnonzero(times[rows] >= REASON_SHARE * longer).tolist():
            reasons[one] = name
            if name == without_place:
                place[one] = NONE
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for one, reason in enumerate(reasons):
        groups[reason, int(place[one])].append(one)
    _join_those_without_reason(groups)
    _give_away_unseen(groups, longer)
    kinds = [SlowKind(rows[sorted(ones)], longer[sorted(ones)], *key) for key, ones in groups.items()]
    return sorted(kinds, key=lambda kind: -kind.total)


def _longest_at(slow: Mask, began: Ints, over: Ints, looks: LookTable) -> Ints:
    """Of each slow turn, the place at which it was longest beyond an ordinary turn; NONE where no look has met it."""
    place = np.full(int(slow.sum()), NONE, np.int64)
    turn = np.searchsorted(over, looks.times)
    inside = turn < len(over)
    inside[inside] &= looks.times[inside] >= began[turn[inside]]
    if not len(place) or not inside.any():
        return place
    turn, where = turn[inside], looks.place[inside]
    weight = np.minimum(looks.weight[inside], over[turn] - looks.times[inside])
    places, where = np.unique(where, return_inverse=True)
    ordinary = ~slow[turn]
    usual = np.bincount(where[ordinary], weight[ordinary], len(places)) / max(1, int((~slow).sum()))
    spent = np.zeros((len(place), len(places)))
    number = np.cumsum(slow) - 1
    np.add.at(spent, (number[turn[~ordinary]], where[~ordinary]), weight[~ordinary])
    met = spent.any(axis=1)
    place[met] = places[np.argmax(spent[met] - usual, axis=1)]
    return place


def _join_those_without_reason(groups: defaultdict[tuple[str, int], list[int]]) -> None:
    """As where two kinds meet in one turn, and the pause makes up the smaller part of it."""
    for reason, place in [key for key in groups if not key[0] and key[1] != NONE]:
        others = [key for key in groups if key[0] and key[1] == place]
        if len(others) == 1:
            groups[others[0]] += groups.pop((reason, place))


def _give_away_unseen(groups: defaultdict[tuple[str, int], list[int]], longer: Ints) -> None:
    """Turns that no look has met, to the kind with the same reason whose turns are most nearly as long."""
    for reason, place in [key for key in groups if key[1] == NONE]:
        others = {
            key: float(quantile(longer[ones])) for key, ones in groups.items() if key[0] == reason and key[1] >= 0
        }
        for one in groups[reason, place] if others else ():
            key = min(others, key=lambda other: abs(np.log(longer[one] / others[other])))
            if 1 / ALIKE_LENGTHS <= longer[one] / others[key] <= ALIKE_LENGTHS:
                groups[key].append(one)
                groups[reason, place] = [left for left in groups[reason, place] if left != one]
        if not groups[reason, place]:
            del groups[reason, place]
