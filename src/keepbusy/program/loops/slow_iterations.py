"""How long iterations take: what is usual, the warm-up, and kinds of iteration that take far longer than the others.

Slow iterations are grouped by the line at which the program was for longer than in a usual one. How often each kind
comes, and whether it keeps a beat, is read off afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from keepbusy.timeline.model import NONE, Ints, Mask

SLOW_DEVIATIONS, SLOW_SHARE = 8.0, 0.5
"""A slow iteration takes longer than the median by so many usual deviations, and by so much of the median."""
COMPARED_ITERATIONS = 256
"""Iterations may change over a run, so what is usual is asked of so many at a time."""
BEAT_SHARE = 0.75
"""Of the distances of a beat, so many are the usual one, or several of it: others may be slow at its line, too."""
BEAT_LASTS = 0.25
"""Of the iterations from the first one on, a beat goes on for so many at least: else it was but a burst."""


def slow_from(took: Ints) -> float:
    """An iteration that takes longer than this is slow."""
    median = float(np.median(took))
    return median + max(SLOW_DEVIATIONS * float(np.median(np.abs(took - median))), SLOW_SHARE * median)


def warm_up(took: Ints) -> int:
    """How many iterations at the beginning are not like those that follow: memory, tuning and compiling take time."""
    half = took[len(took) // 2 :]
    usual = took <= min(int(slow_from(half)), int(2 * np.median(half)))
    settled = np.flatnonzero(usual[:-2] & usual[1:-1] & usual[2:])
    if not len(settled):  # as where every third iteration is slow: also later ones are no steadier
        settled = np.flatnonzero(usual)
    return int(min(settled[0], len(took) // 2)) if len(settled) else len(took) // 2


def beat_of(slow: Ints, known: Ints) -> float | None:
    """From one slow iteration to the next, typically; None if they keep no beat. Both are numbers of iterations, in
    order: where not all between two slow ones are known, another may have come."""
    if len(slow) < 2:
        return None
    distances = np.diff(slow)
    whole = np.diff(np.searchsorted(known, slow)) == distances
    every = float(np.median(distances[whole] if whole.any() else distances))
    beats = np.maximum(1.0, np.round(distances / every))
    exact = (np.abs(distances - beats * every) <= 1).mean() >= BEAT_SHARE and beats.mean() < 2
    throughout = slow[-1] - slow[0] + every >= BEAT_LASTS * (known[-1] - slow[0])
    return every if exact and throughout else None


class SlowKind(NamedTuple):
    """Slow iterations that are alike: their rows, how much longer each took, and a place; NONE where it is unknown."""

    rows: Ints
    longer: Ints
    place: int

    @property
    def total(self) -> int:
        return int(self.longer.sum())


class PlacesInTime(NamedTuple):
    """Where a program was, a row each: from when on, for how long, and the number of the place."""

    start: Ints
    length: Ints
    place: Ints


def slow_kinds(began: Ints, ended: Ints, where: PlacesInTime) -> list[SlowKind]:
    """The largest first."""
    took = ended - began
    slow, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    for block in np.array_split(np.arange(len(took)), max(1, len(took) // COMPARED_ITERATIONS)):
        slow[block] = took[block] > slow_from(took[block])
        usual[block] = np.median(took[block])
    rows = np.flatnonzero(slow)
    longer, place = took[rows] - usual[rows], _longest_at(slow, began, ended, where)
    groups = (np.flatnonzero(place == number) for number in np.unique(place))
    kinds = [SlowKind(rows[group], longer[group], int(place[group[0]])) for group in groups]
    return sorted(kinds, key=lambda kind: -kind.total)


def _longest_at(slow: Mask, began: Ints, ended: Ints, where: PlacesInTime) -> Ints:
    """Of each slow iteration, the place at which it was longest beyond a usual one; NONE where nothing is known."""
    found = np.full(int(slow.sum()), NONE, np.int64)
    iteration = np.searchsorted(ended, where.start)
    inside = iteration < len(ended)
    inside[inside] &= where.start[inside] >= began[iteration[inside]]
    if not len(found) or not inside.any():
        return found
    iteration, place = iteration[inside], where.place[inside]
    length = np.minimum(where.length[inside], ended[iteration] - where.start[inside])
    places, place = np.unique(place, return_inverse=True)
    is_usual = ~slow[iteration]
    usual = np.bincount(place[is_usual], length[is_usual], len(places)) / max(1, int((~slow).sum()))
    spent = np.zeros((len(found), len(places)))
    number = np.cumsum(slow) - 1
    np.add.at(spent, (number[iteration[~is_usual]], place[~is_usual]), length[~is_usual])
    seen = spent.any(axis=1)
    found[seen] = places[np.argmax(spent[seen] - usual, axis=1)]
    return found
