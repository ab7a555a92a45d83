"""What is usual among steps: how long they take, and from which length on one is a stall."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import Ints, Mask

SPREADS = 8.0
"""A step further from the median than so many times the usual deviation is no whim of the machine."""
LEAST = 0.5
"""And none is a stall that takes less than so much longer than a usual step."""
BLOCK = 256
"""Steps may change over a run, so what is usual is asked of so many at a time."""
ALIKE = 0.15


def limit(took: Ints) -> int:
    """A step that takes longer than this is a stall."""
    median = float(np.median(took))
    deviation = float(np.median(np.abs(took - median)))
    return round(median + max(SPREADS * deviation, LEAST * median))


def stalled(took: Ints) -> tuple[Mask, Ints]:
    """Which steps are stalls, and what usual ones near each take."""
    found, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    blocks = max(1, len(took) // BLOCK)
    for block in np.array_split(np.arange(len(took)), blocks):
        mine = took[block]
        found[block] = mine > limit(mine) if len(mine) else False
        usual[block] = np.median(mine) if len(mine) else 0
    return found, usual


def warm_up(took: Ints) -> int:
    """How many steps at the beginning are not like those that follow: memory, tuning and compiling take their time."""
    if len(took) < 4:
        return 0
    half = took[len(took) // 2 :]
    usual = took <= min(limit(half), int(2 * np.median(half)))
    settled = np.flatnonzero(usual[:-2] & usual[1:-1] & usual[2:])
    return int(min(settled[0], len(took) // 2)) if len(settled) else len(took) // 2


def alike(took: Ints) -> bool:
    """Whether these steps are steady: no stall among them, and no drift from the first half to the second."""
    half = len(took) // 2
    if half < 2 or (took > limit(took)).any():
        return False
    first, second = np.median(took[:half]), np.median(took[half:])
    return bool(abs(first - second) <= ALIKE * max(first, second))


def mean(took: npt.NDArray[np.int64]) -> int:
    return round(float(took.mean())) if len(took) else 0
