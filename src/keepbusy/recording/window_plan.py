"""Which turns to look at closely once the first window has closed.

What is left unexplained is ranked by its time: the waits of a loop in which no window was open, what a kind of rare
step takes beyond the others, and what steps take since they have changed for good. The largest comes first, as long as
all windows together hold the program up for no more than a hundredth of its run, or those after the first for 0.3 s of
a short one: what is looked for there takes far more of it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepbusy.instrument.loop_tree import RECORDED_AT_MOST, BusyLoop, LoopSite
from keepbusy.instrument.slow_turns import quantile, slow_from, warm_up
from keepbusy.recording.marks import Marks
from keepbusy.recording.run_counters import COLLECTOR
from keepbusy.recording.turn_times import StepLooks, Steps, changed_at, differs, mean, rare_stalls, trimmed
from keepbusy.recording.window import LONGEST_OPEN, RECORDED_TURNS, SETTLING_TURNS, WHOLE_TURNS_AFTER
from keepbusy.timeline.files import replacing
from keepbusy.timeline.run_facts import DRIFT, LOOP, STALL, RareStall

WINDOWS_SHARE, WINDOWS_ALLOWANCE = 0.01, 300_000_000
"""Of the run so far: for so long windows may hold it up; further ones for the latter also where a run is short, for
else its second loop would never be seen."""
KEPT_WINDOWS = 6
"""Beside the first one: each goes with the run as a timeline of its own."""
STALL_IS_WORTH = 0.01
"""Of the run: what takes less is not looked at."""
TURNS_BEFORE, TURNS_AFTER = 1, 1
"""Ordinary steps that are recorded around a rare one, since it may come a step early or late."""
PLANNING_TIME = 200_000_000
"""Until a plan is made the program has gone on for so long."""
STEPS_KNOWN, MARKS_CONSIDERED = 32, 4096
"""So many steps are known before any is foreseen; what was before so many is known by then."""
THINKING_SHARE, THINKING_ALLOWANCE, THINKING_AGAIN = 0.001, 50_000_000, 1.25
"""To find out takes time, too: so much of the run. Of loops, which are read and built first, at least the second; where
none of them is worth a look, they are thought of again once the run is so many times as long."""
DELAYED_SHARE = 0.05
"""Where other work has had the processors for so much of the run, a change is no change of the program's."""
TURNS_KNOWN, LONGEST_TURN = 8, 10_000_000_000
"""So many turns of a loop are known before it is looked at, and none takes too long to wait for."""
STEPS_AROUND_FIRST = 16
"""What the first window stands for are so many plain steps around it."""
TOLD_AHEAD = 3_000_000_000
"""Several ranks open a window so long after the first of them has planned it: they look for word once a second."""


class Occasion(NamedTuple):
    """Why to look closely, from when on and at how many turns: of the steps, or of a loop."""

    why: str
    time: int
    """What it takes of the run, which says what to look at first."""
    turns: int
    about: dict[str, Any]
    opens: int = 0
    """From which mark on; 0 is at once, and of a loop."""
    not_before: int = 0
    """Of a loop of ranks that know no number of their collectives: from when on, by the host's clock."""
    loop: LoopSite | None = None
    usual: int = 0
    """What a turn of that loop takes."""
    meets: int = 0
    """From which collective on, else."""


class SharedWindows:
    """What the first rank of several plans, told to the others through a folder that they share.

    Nobody waits for anybody: a rank that hears of a window too late, or shares no folder, goes without.
    """

    def __init__(self, folder: Path, clock: Callable[[], int], collectives: Callable[[], int] = int) -> None:
        """`collectives`: how many there have been so far."""
        self._file, self._clock, self.collectives = folder / "windows.json", clock, collectives
        self._last = _now()  # what was told before is of another run that met here
        self._counted: deque[tuple[int, int]] = deque(maxlen=3)

    def collective_ahead(self) -> int | None:
        """The one with which a loop's window opens: hosts are not equally far ahead of their GPUs, so at one time they
        are in turns that never meet. Asked at each thought, for at first hosts gain their lead: None until it is known
        how quickly collectives come; 0 where they do not."""
        self._counted.append((self._clock(), self.collectives()))
        first, last = self._counted[0][1], self._counted[-1][1]
        if last and (len(self._counted) < 3 or not first):
            return None
        paces = ((b - a) / max(1, then - now) for (now, a), (then, b) in pairwise(self._counted))
        ahead = round(TOLD_AHEAD * min(paces, default=0))
        return ahead and last + ahead

    def tell(self, occasion: Occasion) -> Occasion:
        """Returns it with the number by which the ranks' windows are brought together: that of no other run."""
        told = occasion._replace(about={**occasion.about, "number": _now()})
        with suppress(OSError), replacing(self._file, durable=False) as part:
            part.write_text(json.dumps(self._shifted(told, time.time_ns() - self._clock())), encoding="utf-8")
        return told

    def heard(self) -> Occasion | None:
        """What has been told since this was asked last."""
        with suppress(OSError, ValueError, TypeError, LookupError):  # there is none, or somebody else's
            told = Occasion(*json.loads(self._file.read_text(encoding="utf-8")))
            if told.about["number"] > self._last:
                self._last = told.about["number"]
                if 0 < told.meets <= self.collectives():
                    return None
                told = told._replace(loop=told.loop and LoopSite(*told.loop))
                return self._shifted(told, self._clock() - time.time_ns())
        return None

    @staticmethod
    def _shifted(occasion: Occasion, by: int) -> Occasion:
        """Hosts agree on the time of day; their clocks since they were switched on have nothing in common."""
        return occasion._replace(not_before=occasion.not_before and occasion.not_before + by)


def _now() -> int:
    """Microseconds, which stay exact in JSON."""
    return time.time_ns() // 1000


@dataclass
class WindowPlan:
    """Asked in a thread of its own now and then; the program's own thread finds the next occasion in `planned`."""

    marks: Marks
    clock: Callable[[], int]
    looks: Callable[[], StepLooks]
    loops: Callable[[], Sequence[BusyLoop]]
    """Those that are worth a look, the innermost, with what the GPU waits in each."""
    planned: Occasion | None = None
    taken: list[Occasion] = field(default_factory=list)
    """Those for which a window was opened."""
    first: int = 0
    """What a plain step takes around the first window."""
    thought: int = 0
    """For how long it has been thought of loops so far."""
    loops_again: float = 0.0
    """From which length of the run on loops may be thought of again."""
    not_before: int = 0
    """When steps may be thought of next."""
    worked: Callable[[], int] = time.thread_time_ns
    """What thinking takes of its thread; the program may have its turn meanwhile, and that is no matter."""
    shared: SharedWindows | None = None
    """Of the first rank of several."""

    def think(self, passed: int, spent: int, expected: int, longest: int = LONGEST_OPEN, loops: bool = True) -> None:
        """The run has gone on for `passed`; windows have held it up for `spent`, the first one for `expected`, and the
        next one may be open for `longest`."""
        if not self._has_room() or not is_granted(passed, spent, expected):
            return
        found, worked = list[Occasion](), self.worked()
        if loops and passed >= self.loops_again and self.thought <= max(THINKING_ALLOWANCE, THINKING_SHARE * passed):
            found += self._loops()
            if not found and self.shared is None:
                self.loops_again = THINKING_AGAIN * passed
        known = self.worked()
        self.thought += known - worked
        if self.marks.count and self.clock() >= self.not_before:
            steps = self.marks.steps(MARKS_CONSIDERED)
            found += [*self._stalls(steps, longest), *self._change(steps)]
            self.not_before = self.clock() + round((self.worked() - known) / THINKING_SHARE)
        planned = max(found, key=lambda one: one.time, default=None)
        self.planned = self.shared.tell(planned) if planned is not None and self.shared is not None else planned

    def follow(self, told: Occasion) -> None:
        """What the first rank plans, where it is still to come."""
        is_to_come = self.marks.count < told.opens if told.opens else self.clock() < told.not_before
        if self._has_room() and is_to_come:
            self.planned = told

    def _has_room(self) -> bool:
        return self.planned is None and len(self.taken) < KEPT_WINDOWS

    def due(self, count: int) -> Occasion | None:
        """The occasion for which a window opens at this mark, if there is one."""
        planned = self.planned
        if planned is None or planned.loop is not None or planned.opens > count:
            return None
        self.planned = None
        if 0 < planned.opens < count:  # it was planned too late
            return None
        self.taken.append(planned)
        return planned

    def take_loop(self) -> Occasion | None:
        """The occasion of a loop; its turns are followed from now on."""
        planned = self.planned
        if planned is None or planned.loop is None:
            return None
        self.planned = None
        self.taken.append(planned)
        return planned

    def _marks_ahead(self) -> int:
        """So many marks have never come while word goes from the first rank to the others."""
        if self.shared is None:
            return 0
        host = self.marks.table.host(MARKS_CONSIDERED)
        known = min(TOLD_AHEAD, int(np.ptp(host))) if len(host) else 0
        came = np.searchsorted(host, host + known) - np.arange(len(host))
        return 2 + int(came.max(initial=0) * TOLD_AHEAD // max(1, known))

    def _loops(self) -> Iterator[Occasion]:
        known = {one.about.get("place") for one in self.taken}
        meets = self.shared.collective_ahead() if self.shared is not None else 0
        if meets is None:
            return
        not_before = self.clock() + 2 * TOLD_AHEAD if self.shared is not None else 0
        for one in self.loops():
            if len(one.ends) < TURNS_KNOWN or one.place in known:
                continue
            turn = int(quantile(np.diff(one.ends[-TURNS_KNOWN:])))
            if turn <= LONGEST_TURN:
                turns = max(RECORDED_TURNS, min(RECORDED_AT_MOST, WHOLE_TURNS_AFTER // max(1, turn)))
                about, usual = {"place": one.place}, mean(trimmed(one.turns))
                yield Occasion(LOOP, one.waits, turns, about, 0, not_before, one.site, usual, meets)

    def _stalls(self, steps: Steps, longest: int) -> Iterator[Occasion]:
        took = steps.took[steps.plain]
        if len(took) < STEPS_KNOWN or not (took > slow_from(took)).any():
            return
        looked_at = [one.about["step"] for one in self.taken if one.why == STALL]
        for one in rare_stalls(steps.take(steps.plain), dict(self.marks.table.saves), self.looks()):
            if is_worth_a_window(one, longest) and not any(one.comes_in(step) for step in looked_at):
                soon = max(2 + round(PLANNING_TIME / max(1.0, float(quantile(took)))), self._marks_ahead())
                step = foreseen(one, self.marks.count + soon + SETTLING_TURNS + TURNS_BEFORE + 1)
                opens = step - SETTLING_TURNS - TURNS_BEFORE - 1
                about = {"step": step, "stall": asdict(one)}
                yield Occasion(STALL, one.total, TURNS_BEFORE + 1 + TURNS_AFTER, about, opens)

    def _change(self, steps: Steps) -> Iterator[Occasion]:
        """Steps are for good no longer what they were around the first window, and no window has seen them since."""
        closely, rest = steps.mark[~steps.plain], steps.take(steps.plain)
        if not len(closely) and len(rest) < STEPS_KNOWN:
            return
        if not self.first:
            rest = rest.take(np.arange(len(rest)) >= warm_up(rest.took))
            near = np.argsort(np.abs(rest.mark - (closely[0] if len(closely) else 0)), kind="stable")
            self.first = mean(trimmed(rest.took[near[:STEPS_AROUND_FIRST]])) if len(rest) else 0
        elif not any(one.why == DRIFT for one in self.taken) and self.marks.delayed() < DELAYED_SHARE:
            row = changed_at(rest.took, self.first)
            if row is not None:
                about = {"began": int(rest.mark[row]) + 1, "before": self.first}
                usual = mean(trimmed(rest.took[row:]))
                more = abs(usual - self.first) * (len(rest) - row)
                opens = self.marks.count + self._marks_ahead() if self.shared is not None else 0
                yield Occasion(DRIFT, more, RECORDED_TURNS, about, opens, usual=usual)

    def share_since(self, change: Occasion) -> float:
        """Of the steps' time, what has passed since they changed; nothing where they are again what they were."""
        steps = self.marks.steps()
        took, since = steps.took[steps.plain], steps.mark[steps.plain] >= change.about["began"]
        lasts = not since.any() or differs(took[since], change.about["before"]) != 0
        return float(took[since].sum() / max(1, took.sum())) if lasts else 0.0


def whole_step(loops: Sequence[BusyLoop]) -> BusyLoop | None:
    """Where nothing announces a step it is a turn of the loop in which the GPU works; and of the loops around that, of
    the outermost whose turns a window holds: pieces of a batch are no steps. None until that is known: in its first
    turn a loop may import, compile and find its peers."""
    busiest = max(loops, key=lambda one: (one.time - one.waits, one.time), default=None)
    known = {one.nest[-1]: one for one in loops}
    for key in busiest.nest if busiest is not None else ():
        around = known.get(key)
        if around is not None and len(around.turns) >= TURNS_KNOWN:
            if mean(trimmed(around.turns)) <= LONGEST_OPEN // 2:
                return around
        elif busiest is not None and busiest.turns.sum() < TURNS_KNOWN * LONGEST_OPEN // 2:
            return None  # later it has turned so often, or its turns are longer
    return busiest


def is_granted(passed: int, spent: int, first: int) -> bool:
    """Whether one more may hold the run up. The first one began to use the profiler, which takes longer than to go on,
    so that one more is granted though it took much of what is allowed."""
    if spent + first <= WINDOWS_SHARE * passed:
        return True
    return first <= 2 * WINDOWS_ALLOWANCE and spent - first + min(first, WINDOWS_ALLOWANCE) <= WINDOWS_ALLOWANCE


def is_worth_a_window(stall: RareStall, longest: int) -> bool:
    """What comes more often the first window has seen, and of the collector the marks know all. Any two keep a beat, so
    without a reason it takes a third."""
    known = stall.is_foreseen and (stall.count > 2 or bool(stall.what))
    rare = stall.every > RECORDED_TURNS and stall.time <= longest and stall.share >= STALL_IS_WORTH
    return known and rare and stall.what != COLLECTOR


def foreseen(stall: RareStall, earliest: int) -> int:
    """The step in which it comes again."""
    every = round(stall.every)
    return stall.last + max(1, -(-(earliest - stall.last) // every)) * every
