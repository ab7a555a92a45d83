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
    return int(_limits(took[None])[0, 0])


def stalled(took: Ints) -> tuple[Mask, Ints]:
    """Which steps are stalls, and what usual ones near each take."""
    found, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    blocks = max(1, len(took) // BLOCK)
    each = len(took) // blocks
    longer = len(took) - each * blocks  # so many blocks have one step more
    for begin, count, length in ((0, longer, each + 1), (longer * (each + 1), blocks - longer, each)):
        part = slice(begin, begin + count * length)
        rows = took[part].reshape(count, length)
        if rows.size:
            found[part] = (rows > _limits(rows)).ravel()
            usual[part] = np.repeat(np.median(rows, axis=1), length)
    return found, usual


def _limits(rows: Ints) -> npt.NDArray[np.float64]:
    """Of each row of steps, from which length on one of them is a stall."""
    median = np.median(rows, axis=1, keepdims=True)
    deviation = np.median(np.abs(rows - median), axis=1, keepdims=True)
    return np.asarray(median + np.maximum(SPREADS * deviation, LEAST * median))


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
