"""Windows: a few turns under PyTorch's profiler, line by line, then everything is let go; and which turns to look at.

Of what the first window has left unexplained the largest comes next: the waits of a loop in which no window was open,
what a kind of rare step takes beyond the others, and what steps take since they have changed for good. All windows
together hold the program up for no more than a hundredth of its run, or those after the first for 0.3 s of a short one:
what is looked for there takes far more of it.
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepbusy.instrument.loop_tree import RECORDED_AT_MOST, BusyLoop, LoopSite
from keepbusy.instrument.patches import Function, Patches
from keepbusy.instrument.processes import at_end_of_thread, deaf_to_signals
from keepbusy.instrument.slow_turns import quantile, slow_from, warm_up
from keepbusy.recording.line_log import Ask, Log, follower
from keepbusy.recording.run_counters import COLLECTOR
from keepbusy.recording.step_clock import Marks
from keepbusy.recording.turn_times import StepLooks, Steps, changed_at, differs, mean, rare_stalls, trimmed
from keepbusy.timeline.files import write_whole
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.timeline.run_facts import DRIFT, LOOP, STALL, RareStall
from keepbusy.traces.kineto_names import DEVICE_ROWS

SETTLING_TURNS, RECORDED_TURNS = 1, 5
"""A turn that shows the recorder settling in is looked at, and not counted; so many are recorded after it."""
SETTLES_WITHIN = 30_000_000
"""In longer turns the recorder settles within a part of the first one: none is lost to it."""
FAR_LONGER = 4.0
"""Recorded turns that take so many times as long as usual ones are others."""
WHOLE_TURNS_AFTER, LONGEST_OPEN = 100_000_000, 300_000_000
"""A window that has been open for so long closes with its second whole turn, and at last wherever a line begins:
closing takes about as long as all that was seen, and holds the program up."""
HELD_UP_AT_ONCE = 300_000_000
"""Once it is known how long closing takes here, a window may be open for as long as that allows, but no longer than:"""
OPEN_AT_MOST = 3_000_000_000
EVENTS_AT_ONCE = 40_000
"""What takes long to close are the events, 6 to 8 µs each on an H200's host; a turn that waits has few of them. With so
many a window closes in the middle of a turn, and with the first turn where a second one would make them as many."""
SLOWED = 2.0
"""A turn that recording has made so many times as long, without an end of it, was slowed by the lines that it told."""
EVENTS_A_TENSOR = 10
"""Of each that is made on the device, on average."""
NEXT_ASK = 50_000_000
DEVICE_PATIENCE = 5_000_000_000
"""Where the device has not come to an end after so long, a window stays open: perhaps a peer waits for this rank."""


TRACE, LINES = "window.json", "lines.npz"
"""What a window leaves in its folder: the profiler's trace, and the lines."""


class Tick(NamedTuple):
    """One of our marks: the profiler noted it between these two readings of the host's clock."""

    number: int
    before: int
    after: int


class Window:
    """Opens at a turn's end and closes some turns later, or within a long one; what it saw lies in the folder then."""

    def __init__(
        self,
        folder: Path,
        turns: int = RECORDED_TURNS,
        clock: Callable[[], int] = time.perf_counter_ns,
        brief: bool = False,
        closed: Callable[[], object] | None = None,
        memory: bool = False,
        libraries: bool = True,
        guarded: Callable[[Callable[[], object]], object] = lambda act: act(),
    ) -> None:
        """`brief`: two whole turns are enough where they take long, as one is like the other. `closed` is called where
        it has closed within a turn. `memory`: what is taken of the device's, and given back, is noted, too.
        `libraries`: their lines are followed as the program's own. `guarded` calls what is done at a line of the
        program, which no fault of ours may reach."""
        self.folder, self.clock = folder, clock
        self.is_brief = brief
        self.usual = 0
        """What a turn takes when nobody looks, where that is known."""
        self.longest, self.at_most = LONGEST_OPEN, OPEN_AT_MOST
        self.is_open = self._is_closing = False
        self.ticks: list[Tick] = []
        self.beside: set[int] = set()
        """Of a loop: what ended with these of its turns was more than one turn."""
        self.is_cut = self.is_part = False
        """Whether it has seen one turn alone, and whether of that a part."""
        self.is_blind = False
        """Whether it saw nothing of a device that was at work."""
        self.cost = 0
        """Nanoseconds for which opening and closing held up the program."""
        self.was_open = 0
        """For how long, beside that."""
        self.no_lines = ""
        self._turns = turns
        self._settling = 0
        self._log = Log(clock, libraries)
        self._ask = Ask(1 << 62, self._is_asked)
        self._follower = follower(self._log, self._ask)
        self._closed, self._guarded, self._memory = closed, guarded, memory
        self._profile: Any = None
        self._opened = self._thread = self._count = self._worked = self._allocated = self._of_a_turn = 0

    def open(self, count: int = 0) -> None:
        """`count` turns have ended."""
        import torch
        from torch.autograd import profiler

        began = self.clock()
        self._thread, self._count = threading.get_native_id(), count
        self._settling = SETTLING_TURNS if self.usual < SETTLES_WITHIN else 0
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = profiler.profile(use_cpu=True, use_device=device, use_kineto=True, profile_memory=self._memory)
        with deaf_to_signals():
            self._profile.__enter__()
        self.is_open = True
        at_end_of_thread(self._end_with_thread)
        self.no_lines = self._follower.begin()
        if not self._settling:
            self.ticks.append(_tick(count, self.clock))
        self._allocated, self._worked = allocations_so_far(), time.thread_time_ns()
        self._opened = self.clock()
        self.cost += self._opened - began
        self._ask.at = began + self.longest  # no sooner: lines begin within what is called here, too

    def step(self, count: int) -> None:
        """A turn has ended: the `count`-th. In another thread it is none of the window's."""
        if threading.get_native_id() != self._thread:
            return
        self._count = count
        if self._settling:
            self._settling -= 1
        if not self._settling:
            self.ticks.append(_tick(count, self.clock))
            self._of_a_turn = self._of_a_turn or self._events() * (len(self.ticks) == 2)
        if len(self.ticks) > self._turns or self._has_seen_enough():
            self.close()

    def _has_seen_enough(self) -> bool:
        """Two whole turns, and no rare ones."""
        if not self.is_brief or len(self.ticks) < 3 or self.clock() - self._opened < WHOLE_TURNS_AFTER:
            return False
        first, _, last = self.ticks[-3:]
        return not self.usual or last.after - first.after < 2 * FAR_LONGER * self.usual

    @property
    def saw_others(self) -> bool:
        """Whether each of its turns took far longer than usual ones."""
        took = [last.after - first.after for first, last in pairwise(self.ticks)]
        return bool(self.usual and took) and min(took) > FAR_LONGER * self.usual

    def _is_asked(self) -> None:
        """Where a line begins, and the window has been open for long or has seen as much as it can keep."""
        if not self.is_open or threading.get_native_id() != self._thread:
            return
        if len(self.ticks) < 3 and not self._has_much_to_close():
            self._ask.at = self.clock() + NEXT_ASK
            return
        self._ask.at = self.clock() + NEXT_ASK
        self._guarded(self._cut_and_tell)

    def _end_with_thread(self) -> None:
        """One that ends before its window would take the process down: PyTorch's profiler is the thread's."""
        with suppress(Exception):
            if self.is_open:
                self._cut_and_tell()

    def _cut_and_tell(self) -> None:
        self.cut()
        if self._closed is not None and not self.is_open:
            self._closed()

    def cut(self) -> None:
        """Close it within a turn. Where it has not even settled, turns have ceased to come, and it leaves nothing."""
        if self._may_close():
            self.is_cut, self.is_part = len(self.ticks) < 3, len(self.ticks) < 2
            if len(self.ticks) == 1:
                self.ticks.append(_tick(self._count + 1, self.clock))
            self._close()

    def _has_much_to_close(self) -> bool:
        if self._log.is_full or self.clock() - self._opened > self.at_most:
            return True
        worked, has_a_turn, events = time.thread_time_ns() - self._worked, len(self.ticks) > 1, self._events()
        if events >= EVENTS_AT_ONCE or (len(self.ticks) == 2 and 2 * self._of_a_turn >= EVENTS_AT_ONCE):
            return True
        return worked >= LONGEST_OPEN and (not self._allocated or (has_a_turn and worked >= 2 * LONGEST_OPEN))

    def _events(self) -> int:
        """So far, as the device's tensors tell."""
        return EVENTS_A_TENSOR * (allocations_so_far() - self._allocated)

    @property
    def is_slow(self) -> bool:
        """Whether a usual turn would have been over long before: the lines of a library that computes in Python."""
        return self.is_part and self.was_open > SLOWED * self.usual > 0

    def close(self) -> None:
        """Stop looking, and leave what was seen in the folder."""
        if self._may_close():
            self._close()

    def _may_close(self) -> bool:
        """What is called meanwhile may begin lines that ask the same. PyTorch's profiler must end where it began: in
        another thread it takes the process down."""
        if not self.is_open or self._is_closing or threading.get_native_id() != self._thread:
            return False
        self._is_closing = True
        self._is_closing = self._device_comes_to_an_end()
        return self._is_closing

    def _close(self) -> None:
        import torch

        self.is_open = False
        self._follower.end()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # as the profiler would; what the device has yet to do holds nothing up
        began = self.clock()
        self.was_open = began - self._opened
        self._profile.__exit__(None, None, None)
        results, self._profile = self._profile.kineto_results, None
        if self.ticks:
            written = self.folder / f"{TRACE}.written"  # Kineto writes another file and renames it, so no lock holds
            results.save(str(written))
            self._log.record().save(self.folder / LINES)
            written.replace(self.folder / TRACE)
            self.is_blind = allocations_so_far() > self._allocated and not _tells_of_the_device(self.folder / TRACE)
        self._log = Log(self.clock)  # what was in it is no longer needed
        self.cost += self.clock() - began

    def _device_comes_to_an_end(self) -> bool:
        """With what it has been given. Where a peer has died it never does, and the program must end without us."""
        import torch

        if not torch.cuda.is_initialized():
            return True
        last, until = torch.cuda.Event(), self.clock() + DEVICE_PATIENCE
        last.record()
        while not last.query() and self.clock() < until:
            time.sleep(0.001)
        return last.query()

    def open_for(self) -> int:
        """For how long the next window may be open, after what closing this one took."""
        allowed = HELD_UP_AT_ONCE * self.was_open / max(1, self.cost)
        return max(WHOLE_TURNS_AFTER, min(OPEN_AT_MOST, round(allowed)))

    def forget(self) -> None:
        """As in a child that was forked while the window was open: it is the parent's."""
        if self.is_open:
            self.is_open = False
            self._follower.end()


def _tells_of_the_device(trace: Path) -> bool:
    with trace.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return any(text.find(row) >= 0 for row in DEVICE_ROWS)


def allocations_so_far() -> int:
    """Tensors that were made on the device; 0 where that is not known."""
    import torch

    counted: Any = torch.cuda.memory_stats_as_nested_dict()
    return int(counted.get("allocation", {}).get("all", {}).get("allocated", 0))


def _tick(count: int, clock: Callable[[], int]) -> Tick:
    from torch._C._profiler import _RecordFunctionFast

    mark = _RecordFunctionFast(f"{OWN_STEP}{count}")
    before = clock()
    mark.__enter__()
    after = clock()
    mark.__exit__(None, None, None)
    return Tick(count, before, after)


# The program's own use of PyTorch's profiler: there is room for one at a time, and it goes first.


class OtherProfilers:
    """Knows whether the program profiles itself, and says so before it begins."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._ours = False
        self._patches = Patches()
        self.at_work = False
        self.seen = False

    def begin(self) -> None:
        from torch.autograd import profiler

        for name, tell in (("_prepare", self._begins), ("_enable", self._begins), ("_disable", self._ends)):
            self._patches.wrap(profiler, f"{name}_profiler", self._telling(tell))

    def end(self) -> None:
        self._patches.undo()

    @contextmanager
    def ourselves(self) -> Iterator[None]:
        """What happens meanwhile we do."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _telling(self, tell: Callable[[], None]) -> Function:
        def told(function: Function, *arguments: Any, **options: Any) -> Any:
            if not self._ours:
                tell()
            return function(*arguments, **options)

        return told

    def _begins(self) -> None:
        self.at_work = self.seen = True
        self._give_way()

    def _ends(self) -> None:
        self.at_work = False


# Which turns to look at closely once the first window has closed.

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
        with suppress(OSError):
            shifted = self._shifted(told, time.time_ns() - self._clock())
            write_whole(self._file, json.dumps(shifted), durable=False)
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
            if _is_worth_a_window(one, longest) and not any(one.comes_in(step) for step in looked_at):
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


def _is_worth_a_window(stall: RareStall, longest: int) -> bool:
    """What comes more often the first window has seen, and of the collector the marks know all. Any two keep a beat, so
    without a reason it takes a third."""
    known = stall.is_foreseen and (stall.count > 2 or bool(stall.what))
    rare = stall.every > RECORDED_TURNS and stall.time <= longest and stall.share >= STALL_IS_WORTH
    return known and rare and stall.what != COLLECTOR


def foreseen(stall: RareStall, earliest: int) -> int:
    """The step in which it comes again."""
    every = round(stall.every)
    return stall.last + max(1, -(-(earliest - stall.last) // every)) * every
