"""A loader with workers: what the training process spends in `__next__` is a wait for them, not work.

The workers are processes that no trace shows. When the loop finds no batch ready, the time from one
such batch to the next is what they take to make it; so they become a lane whose spans are batches.
"""

from __future__ import annotations

import numpy as np

from keepbusy.record.events import Trace
from keepbusy.record.frames import Nest
from keepbusy.timeline.model import Ints

_NEXT = "enumerate(DataLoader)#_MultiProcessing"
STARVED = 300_000
"""Taking a batch that is ready costs less than this."""


def starved(trace: Trace, nest: Nest, calls: Ints) -> Ints:
    """Rows of (start, end): when the loop waited for its workers and called nothing else."""
    named = np.array([name.startswith(_NEXT) for name in trace.names], bool)
    mine = np.flatnonzero(named[trace.events.name[nest.event]] & (nest.end - nest.start > STARVED))
    mine = mine[np.searchsorted(calls, nest.end[mine]) == np.searchsorted(calls, nest.start[mine])]
    return np.stack([nest.start[mine], nest.end[mine]], axis=1)


def batches(waits: Ints, begin: int) -> tuple[Ints, Ints]:
    """When the workers began and ended each batch that the loop had to wait for."""
    return np.concatenate([[begin], waits[:-1, 1]])[: len(waits)], waits[:, 1]
