"""After how many steps a stall comes again, and how surely."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from keepbusy.timeline.model import Ints

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
