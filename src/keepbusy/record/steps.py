"""Where a step begins, as the trace itself says: profiler steps, else optimizer steps."""

from __future__ import annotations

import numpy as np

from keepbusy.record.events import Category, Trace
from keepbusy.timeline.model import Ints

_MARKS = ("keepbusy.step#", "ProfilerStep#", "Optimizer.step#")


def step_marks(trace: Trace, main: int) -> Ints:
    """Times on the main thread at which steps begin; none where the trace does not mark any."""
    events = trace.events
    mine = (events.category == Category.ANNOTATION) & (events.thread == main)
    for prefix in _MARKS:
        named = np.array([name.startswith(prefix) for name in trace.names], bool)
        these = mine & named[events.name]
        marks = np.unique(events.start[these])
        if len(marks) >= 2:
            # a profiler step is a whole one, so the last one's end is a mark, too
            return np.append(marks, events.end[these].max()) if prefix == _MARKS[1] else marks
    return np.zeros(0, np.int64)
