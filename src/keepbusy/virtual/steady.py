"""A virtual run begins with the program. Its first steps make memory, buckets and states, and no later step does."""

from __future__ import annotations

import numpy as np

from keepbusy.timeline.model import Ints, Kind, Timeline
from keepbusy.timeline.steps import commands_between

SEARCHED = 0.5
"""Of the steps at most so many are taken for a beginning."""


def steady(timeline: Timeline) -> Timeline:
    """Without the marks of steps that are not like those that follow: what explains a run begins at its first mark."""
    marks = {one: timeline.marks_of(one) for one in timeline.ranks}
    if min((len(one) for one in marks.values()), default=0) < 4:
        return timeline
    first = max(_first_usual(timeline, one) for one in marks.values())
    return timeline.change(marks=np.sort(np.concatenate([one[first:] for one in marks.values()])))


def _first_usual(timeline: Timeline, marks: Ints) -> int:
    """How many steps at the beginning launch more or less than later ones, or ask the driver for more memory."""
    launched, made = commands_between(timeline, marks), _allocations(timeline, marks)
    half = len(launched) - int(SEARCHED * len(launched))
    usual = set(launched[half:].tolist())
    for step in range(int(SEARCHED * len(launched))):
        if launched[step] in usual and made[step] <= made[half:].max():
            return step
    return int(SEARCHED * len(launched))


def _allocations(timeline: Timeline, marks: Ints) -> Ints:
    before = np.concatenate([[0], np.cumsum(timeline.spans.kind == Kind.ALLOCATE)])
    return np.diff(before[marks])
