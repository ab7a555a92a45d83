"""When to look closely again: as a rare stall comes again, and once steps have changed for good.

Both are seen by the marks. Each further window holds the program up for a moment, so there are few of them, and none
where the marks know all there is to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from keepbusy.recording.interruptions import COLLECTOR
from keepbusy.recording.marks import Marks
from keepbusy.recording.step_clock import Steps
from keepbusy.recording.window import RECORDED, SETTLING
from keepbusy.timeline.model import Ints
from keepbusy.timeline.plain_run import RareStall
from keepbusy.timeline.run_facts import DRIFT, STALL

MOST = {STALL: 2, DRIFT: 1}
"""Windows of a run, beside the first one."""
WORTH = 0.01
"""Of the run: what takes less is not looked at."""
SELDOM, LONGEST = 8, 2_000_000_000
"""What comes more often is seen by the first window; what takes longer would leave a trace too large."""
BEFORE, AFTER = 1, 1
"""Ordinary steps that are recorded around a rare one, since it may come a step early or late."""
TURNS = 8
"""So many of its occurrences ahead are looked through for one at which nothing else happens."""
CHANGED, LASTING, LONG = 0.1, 128, 2_000_000_000
"""Steps have changed for good when so many of them, for so long, take so much more or less than at first."""
DELAYED = 0.05
"""Where other work has had the processors for so much of the run, a change is no change of the program's."""
BACK, SELDOM_ASKED, EVERY = 4096, 200, 16
"""How many marks are looked through, and how rarely: after so many times as long as that takes, and so many steps.

All that they tell is asked only where a look at the host's steps alone shows that there is something to find.
"""


class Occasion(NamedTuple):
    """Why to look closely, from which mark on, and at how many steps."""

    why: str
    opens: int
    steps: int
    about: dict[str, Any]


class Occasions:
    """Asked at each mark once the first window has closed."""

    def __init__(self, marks: Marks, clock: Callable[[], int]) -> None:
        self._marks, self._clock = marks, clock
        self._left = dict(MOST)
        self._looked: list[int] = []
        self._planned: Occasion | None = None
        self._first = 0  # nanoseconds: a plain step, when the first window had closed
        self._longer = 0  # steps on the host that were overdue, when stalls were looked for
        self._ask, self._not_before = EVERY, 0

    def due(self, count: int) -> Occasion | None:
        """The occasion for which a window opens at this mark, if there is one."""
        if count >= self._ask and self._clock() >= self._not_before and any(self._left.values()):
            self._plan(count)
        if self._planned is None or self._planned.opens != count:
            return None
        taken, self._planned = self._planned, None
        self._left[taken.why] -= 1
        if taken.why == STALL:
            self._looked.append(taken.about["step"])
        return taken

    def _plan(self, count: int) -> None:
        began = self._clock()
        self._planned = self._drift(count) or self._stall(count)
        ended = self._clock()
        self._ask, self._not_before = count + EVERY, ended + SELDOM_ASKED * (ended - began)
        if self._planned is not None:
            self._ask = max(self._ask, self._planned.opens + 1)

    def _drift(self, count: int) -> Occasion | None:
        if not self._left[DRIFT] or (self._first and not _beyond(self._marks.recent(LASTING), self._first)):
            return None
        steps = self._marks.lately(BACK)
        steps = steps.take(steps.plain)
        if not self._first:
            self._first = round(float(np.median(steps.took))) if len(steps) >= 2 * EVERY else 0
        elif (began := changed(steps, self._first)) is not None and self._marks.delayed() < DELAYED:
            return Occasion(DRIFT, count + 1, RECORDED, {"began": began, "before": self._first})
        return None

    def _stall(self, count: int) -> Occasion | None:
        longer = int((self._marks.recent(BACK) > self._marks.overdue).sum())
        if not self._left[STALL] or longer < 2 or longer == self._longer:
            return None
        self._longer = longer
        stalls = [one for one in self._marks.run(BACK).stalls if one.punctual]
        worth = [one for one in stalls if is_worth(one) and not any(one.comes_in(step) for step in self._looked)]
        for one in worth:
            others = [other for other in stalls if other is not one]
            step = foreseen(one, count + SETTLING + BEFORE + 1, others)
            opens = step - SETTLING - BEFORE - 1
            return Occasion(STALL, opens, BEFORE + 1 + AFTER, {"step": step, "stall": asdict(one)})
        return None


def is_worth(stall: RareStall) -> bool:
    """Of the collector the marks know all. Any two keep a beat, so without a reason it takes a third."""
    enough = stall.count > 2 or bool(stall.what)
    rare = stall.every >= SELDOM and stall.time <= LONGEST and stall.share >= WORTH
    return enough and rare and stall.what != COLLECTOR


def foreseen(stall: RareStall, earliest: int, others: Sequence[RareStall]) -> int:
    """The step in which it comes again: the first one in which no other does, if there is one soon."""
    every = round(stall.every)
    first = stall.last + max(1, -(-(earliest - stall.last) // every)) * every
    alone = (step for step in _turns(first, every) if not any(other.comes_in(step) for other in others))
    return next(alone, first)


def _turns(first: int, every: int) -> Iterable[int]:
    return range(first, first + TURNS * every, every)


def changed(steps: Steps, first: int) -> int | None:
    """The step in which plain steps began to take lastingly longer, or less long, than at first."""
    passed = np.cumsum(steps.took[::-1])
    lasting = max(LASTING, int(np.searchsorted(passed, LONG)) + 1)
    if len(steps) < lasting:
        return None
    halves = [_beyond(half, first) for half in np.array_split(steps.took[-lasting:], 2)]
    if not halves[0] or halves[0] != halves[1]:
        return None
    rows = np.arange(len(steps) % EVERY, len(steps), EVERY)
    alike = [row for row in rows.tolist() if _beyond(steps.took[row : row + EVERY], first) != halves[0]]
    begins = min(len(steps) - lasting // 2, alike[-1] + EVERY) if alike else 0
    return int(steps.mark[begins]) + 1


def _beyond(took: Ints, first: int) -> int:
    """1 where steps take longer than at first, -1 where they take less long, 0 where they are as they were."""
    ratio = float(np.median(took)) / first
    return int(ratio > 1 + CHANGED) - int(ratio < 1 / (1 + CHANGED))
