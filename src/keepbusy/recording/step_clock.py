"""The clock of a program's steps: where each of them ends, and when host and device pass there.

A mark stands at each step's end. It is a look at the host's clock and, where the device may be behind, an event in its
stream. It never waits, so marks are set from the first step to the last. What they cost:
benchmarks/record_overhead.py.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from keepbusy.instrument import ENDED
from keepbusy.instrument.loop_tree import PATIENCE
from keepbusy.instrument.patches import Function, Patches, left_alone
from keepbusy.instrument.slow_turns import quantile, slow_from
from keepbusy.recording.run_counters import CHECKPOINT, COLLECTOR, INPUT, Allocations, Pauses, without_processor
from keepbusy.recording.turn_times import NO_LEAD, StepLooks, Steps, plain_run, plain_step
from keepbusy.timeline.model import NONE, Ints, Mask
from keepbusy.timeline.run_facts import Figures, FiguresFile, PlainRun

GOES_ON, ENDS, BEGINS, UNDER_WATCH = 0, 1, 2, 3
"""What a mark says. A round of optimizers goes on (there is none); it ends, and with it a step; or rounds begin anew
here, and what lies before was no step. Or a step ends that was looked at closely."""
STEPS_AROUND = 256
"""Plain steps on either side of a close look: enough to say what it is to be compared with."""
SETTLING_MARKS = 3
"""On an H200 the third step after a profiler has ended is as long as any."""
STEADY_STEPS, SHOWN_STEPS, LATEST_MARKS = 16, 64, 1024
"""So many of the last steps must be alike, so many are shown live, and so many marks are looked through for them."""


class Marks:
    """From `begin` to `end` each step of the program is marked, and `on_step(count)` is told of each mark.

    Nothing that goes wrong here reaches the program: it ends the marks, and `fault` says what it was.
    """

    def __init__(
        self,
        on_step: Callable[[int], object] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        device: EventClock | None = None,
        live: Path | None = None,
    ) -> None:
        """`live` names a file for those who look on while the program runs."""
        self.fault = ""
        self.table = MarkTable()
        self.pauses = Pauses(clock)
        self.others: Sequence[Ints] = ()
        """Of loops beside the one that trains, when their turns ended: what lies between two marks there is no step."""
        self._live = FiguresFile(live) if live is not None else None
        self._on_step, self._clock, self._device = on_step, clock, device
        self._ends = _StepEnds(self._ended)
        self._allocations = Allocations()
        self._on_device: DeviceMarks | None = None
        self._source = StepSource.NOBODY  # of the last mark
        self.since = 0
        """So many marks at the beginning ended forward passes of a program that has begun to train since."""
        self._thread = self._waited = self._began = NONE
        self._is_closely_watched = False
        self._settling = 0  # so many marks, once nobody looks closely any more
        self._running = False

    def begin(self) -> None:
        """Call it in the program's main thread, once torch can be imported. The device is left asleep."""
        self._on_device = DeviceMarks(self.table, self._device or Cuda(), self._clock)
        self._running = True
        self._ends.begin()
        self.pauses.begin()
        os.register_at_fork(after_in_child=self._forked)

    def end(self) -> None:
        """Leave the program alone from now on; to do it twice does nothing."""
        if not self._running:
            return
        self._running = False
        self._ends.end()
        self.pauses.end()
        if self._on_device is not None and not self.fault:
            try:
                self._on_device.read_all()
            except Exception as error:
                self._fail(error)
        self.leave_figures(over=True)

    def look_closely(self, now: bool) -> None:
        """While somebody looks closely at the program, its steps are counted, but they are not plain ones.

        Neither are the next few once the look has ended: to end it takes a while, and so does CUPTI to let go.
        """
        self._settling = SETTLING_MARKS if self._is_closely_watched and not now else 0
        self._is_closely_watched = now

    @property
    def count(self) -> int:
        """Marks so far: the first one begins a step, each further one ends one, too."""
        return self.table.count

    @property
    def replays_graphs(self) -> bool:
        """Whether the program has replayed a CUDA graph."""
        return self._ends.replayed

    def steps(self, last: int = 0) -> Steps:
        """Whole steps so far, or between so many marks at the end."""
        found = steps_of(self.table, last)
        return found.take(~self._is_beside(found)) if self.others else found

    def beside(self) -> set[int]:
        """Numbers of what lies between two marks and is no step."""
        found = steps_of(self.table)
        return set((found.mark[self._is_beside(found)] + 1).tolist())

    def _is_beside(self, found: Steps) -> Mask:
        turned = np.zeros(len(found), bool)
        for ends in self.others:
            here = np.searchsorted(ends, found.ended) > np.searchsorted(ends, found.ended - found.host)
            if 2 * here.sum() < len(found):  # what comes with most steps is part of them
                turned |= here
        return turned

    def are_steady(self, count: int = STEADY_STEPS) -> bool:
        """Whether none of the last plain steps is slow."""
        steps = self.steps(LATEST_MARKS)
        took = steps.took[steps.plain][-count:]
        return len(took) == count and not (took > slow_from(took)).any()

    def plain_step(self, near: int = NONE, since: int = 0, until: int | None = None) -> int | None:
        """Nanoseconds; of the steps between these two, and of them those around the one that is `near`.

        Without one, around the last close look, where there was one. None if there are too few.
        """
        steps = self.steps()
        closely = steps.mark[~steps.plain]
        near = int(closely[-1]) if near == NONE and len(closely) else near
        steps = steps.take(steps.plain & (steps.mark >= since) & (steps.mark < (until or self.count)))
        if near != NONE:
            nearest = np.argsort(np.abs(steps.mark - near), kind="stable")[: 2 * STEPS_AROUND]
            steps = steps.take(np.sort(nearest))
        return plain_step(steps)

    def run(self, looks: StepLooks | None = None) -> PlainRun:
        """What the marks tell so far; `looks` tell where slow steps were."""
        return plain_run(
            self.steps(),
            marked_by=self._ends.source.name.lower(),
            saves=dict(self.table.saves),
            looks=looks,
            readings=tuple(self._allocations.readings),
            delayed=self.delayed(),
            fault=self.fault,
        )

    def delayed(self) -> float:
        """Share of the run in which the program's thread was ready and had no processor."""
        passed, now = self._clock() - self._began, without_processor(self._thread)
        known = passed > 0 and NONE not in (now, self._waited)
        return min(1.0, (now - self._waited) / passed) if known else 0.0

    def figures(self) -> Figures:
        """How the program is doing: of its last steps."""
        steps = self.steps(LATEST_MARKS)
        took, lead = steps.took[-SHOWN_STEPS:], steps.lead[-SHOWN_STEPS:]
        known = lead[lead != NONE]
        low, step, high = (round(float(quantile(took, share))) if len(took) else 0 for share in (0.1, 0.5, 0.9))
        return Figures(
            steps=self.count,
            step=step,
            low=low,
            high=high,
            lead=round(float(quantile(known))) if len(known) else NONE,
            ended=self.table.last,
            limit=slow_from(took) if len(took) >= STEADY_STEPS else 0,
        )

    def leave_figures(self, over: bool = False) -> None:
        """For whoever looks on; a last time when the program has ended, and no step is overdue any more."""
        if self._live is not None and self.count:
            figures = self.figures()
            self._live.write(figures._replace(limit=0) if over else figures)

    # in the program's thread

    def _ended(self, verdict: int) -> None:
        if self._running:
            try:
                self._mark(verdict)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.fault = f"{type(error).__name__}: {error}"
        self.end()

    def _mark(self, verdict: int) -> None:
        """Python is slow where its caches are cold, and a step leaves them so: each call in here is dear."""
        now = self._clock()
        if self._ends.source is not self._source:
            self._turn_to(self._ends.source, now)
        if self._is_closely_watched or self._settling:
            self._settling -= self._settling > 0
            verdict = verdict if verdict == BEGINS else UNDER_WATCH
        number = self.table.add(now, verdict, self.pauses)
        if self._on_device is not None:
            self._on_device.set(number, now)
        if now >= self._allocations.due:
            self._allocations.read(number, now)
        if self._on_step is not None:
            self._on_step(number + 1)

    def _turn_to(self, source: StepSource, now: int) -> None:
        """At the first mark, and where somebody more credible speaks."""
        if not self.count:
            self._thread, self._began = threading.get_native_id(), now
            self._waited = without_processor(self._thread)
        if source > self._source == StepSource.FORWARD:
            self.table.disown()
            self.since = self.count
        self._source = source

    def _forked(self) -> None:
        """A child of the program's is none of ours."""
        self._running = False
        self._ends.end()
        self.pauses.end()


# Where a step ends in a program that says nothing of steps.
#
# The program's own word (`keepbusy.step()`) counts for more than its optimizers, and these for more than forward passes
# (inference) and replays of a captured graph. Whoever counts most and is heard marks the steps; one who falls silent
# while another goes on gives way to it: a step that was captured whole shows no optimizer any more.

SILENT_AFTER = 64
"""So often another one is heard before who has fallen silent gives way."""


class StepSource(IntEnum):
    """Who says that a step has ended, from the least to the most credible."""

    NOBODY = 0
    GRAPH = 1
    FORWARD = 2
    OPTIMIZER = 3
    STEP = 4


class _StepEnds:
    """Calls `ended(verdict)` in the program's thread, with one of the verdicts of `Rounds`."""

    def __init__(self, ended: Callable[[int], object]) -> None:
        self.source = StepSource.NOBODY
        self.replayed = False
        """Whether a captured graph was."""
        self._ended = ended
        self._rounds = Rounds()
        self._passed_over = 0
        self._optimizer_steps = 0
        self._optimizers: set[int] = set()
        self._patches = Patches()
        self._forward = _ForwardPasses(lambda module: self._heard(StepSource.FORWARD, id(module)))

    def begin(self) -> None:
        """Listen to whatever may end a step."""
        import torch
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        for ours in (_StepEnds._announced, _StepEnds._stepped):
            left_alone(ours)  # not where it is written: that would import PyTorch before the program does
        ENDED.append(self._announced)
        self._patches.later(lambda: ENDED.remove(self._announced))
        self._patches.later(register_optimizer_step_post_hook(self._stepped).remove)
        self._patches.replace(torch.amp.GradScaler, "step", self._scaler_step)
        self._patches.replace(torch.cuda.CUDAGraph, "replay", self._replay)
        self._patches.replace(Optimizer, "__init__", self._made)
        self._forward.begin()

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()
        self._forward.end()

    def _heard(self, source: StepSource, who: int) -> None:
        if source is not self.source and not self._turn_to(source):
            return
        self._passed_over = 0
        verdict = self._rounds.ended(who)
        if verdict != GOES_ON:
            self._ended(verdict)

    def _turn_to(self, source: StepSource) -> bool:
        self._passed_over += source < self.source
        if source < self.source and self._passed_over < SILENT_AFTER:
            return False
        self.source, self._rounds = source, Rounds()
        if source >= StepSource.OPTIMIZER:
            self._forward.end()
        return True

    def _announced(self) -> None:
        self._heard(StepSource.STEP, 0)

    def _stepped(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        self._optimizer_steps += 1
        if id(optimizer) not in self._optimizers:  # one that is made anew for each fit goes with it
            self._optimizers.add(id(optimizer))
            weakref.finalize(optimizer, self._is_gone, id(optimizer)).atexit = False
        self._heard(StepSource.OPTIMIZER, id(optimizer))

    def _is_gone(self, optimizer: int) -> None:
        self._optimizers.discard(optimizer)
        self._rounds.forget(optimizer)

    def _scaler_step(self, original: Function) -> Function:
        """A scaler that meets an infinity lets no optimizer step. The program's step has ended all the same."""

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._optimizer_steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._optimizer_steps == before:
                self._stepped(optimizer, (), {})
            return result

        return step

    def _replay(self, original: Function) -> Function:
        def replay(graph: Any) -> None:
            original(graph)
            self.replayed = True
            self._heard(StepSource.GRAPH, id(graph))

        return replay

    def _made(self, original: Function) -> Function:
        """Who makes an optimizer is going to train, and its forward passes end no steps."""

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._forward.end()
            original(optimizer, *args, **kwargs)

        return made


# Several optimizers make one step: the round in which each of them has stepped.


class Rounds:
    """Whoever steps is told by number, which may be that of any object.

    Who has not been heard of while another one stepped `PATIENCE` times is no part of its round, as an optimizer of
    averages that steps after every tenth batch: a step ends without it. Should only that one go on, it has the rounds.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._stepped: dict[int, int] = {}  # since the last round ended
        self._of_gone = 0  # what those stepped that are no more: a program may make another one for each step
        self._rare: set[int] = set()
        self._only: int | None = None
        self._fresh = True

    def ended(self, who: int) -> int:
        """Whether a round ends as this one has stepped: GOES_ON, ENDS or BEGINS."""
        if who == self._only and not self._stepped:  # most programs have a single one
            return ENDS
        verdict = self._among(who)
        self._only = next(iter(self._known)) if len(self._known) == 1 else None
        return verdict

    def _among(self, who: int) -> int:
        self._stepped[who] = self._stepped.get(who, 0) + 1
        if who not in self._rare:
            self._known.add(who)
            if self._known <= self._stepped.keys():
                return self._next(BEGINS if self._fresh else ENDS)
        if self._stepped[who] + self._of_gone > PATIENCE:
            self._rare |= self._known - self._stepped.keys()
            self._known = {one for one in self._stepped if one == who or one not in self._rare}
            self._rare -= self._known
            return self._next(BEGINS)
        return GOES_ON

    def forget(self, who: int) -> None:
        """It is no more: the next one may well have its number."""
        self._known.discard(who)
        self._rare.discard(who)
        self._of_gone += self._stepped.pop(who, 0)
        self._only = None

    def _next(self, verdict: int) -> int:
        self._stepped.clear()
        self._of_gone = 0
        self._fresh = False
        return verdict


# Forward passes: the calls of modules that stand in no other module's call.
#
# PyTorch's own global hook would make every module slower that the program has. A wrapper around `__call__` is cheaper,
# and it stays around the outermost modules only, once they are known.

PASSES_TO_LEARN = 64
"""After so many forward passes it is known which kinds of modules stand outermost."""


class _ForwardPasses:
    """Calls `passed(module)` after each of them."""

    def __init__(self, passed: Callable[[Any], object]) -> None:
        self._passed = passed
        self._inside = False
        self._outermost: set[type] = set()
        self._patches = Patches()

    def begin(self) -> None:
        from torch.nn import Module

        self._left = PASSES_TO_LEARN
        self._wrap(Module)

    def end(self) -> None:
        self._patches.undo()

    def _wrap(self, kind: type) -> None:
        self._patches.replace(kind, "__call__", self._called)

    def _called(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        passes = self

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:  # PyTorch's profiler looks for a module of this name
            if is_compiling() or passes._inside:  # the compiler sees nothing but the call itself
                return original(self, *args, **kwargs)
            passes._inside = True
            try:
                result = original(self, *args, **kwargs)
            finally:
                passes._inside = False
            passes._ended(self)
            return result

        return called

    def _ended(self, module: Any) -> None:
        if self._left:
            self._learn(type(module))
        self._passed(module)

    def _learn(self, kind: type) -> None:
        self._outermost.add(kind)
        self._left -= 1
        if not self._left:
            self._patches.undo()
            for kind in self._outermost:
                self._wrap(kind)


# What is known of each mark.

KEPT_MARKS = 1 << 20
"""Marks that are kept; of a longer run the older half goes."""
_COLUMNS = 8


class MarkTable:
    """A row a mark: its number, when the host set it, what it says of the step before it, that step's input and
    collector; when the device passed it, by its own clock, and how much the host's clock is ahead of that one, at least
    and at most. NONE where nobody knows.

    A row is written in one call: other threads find whole ones, and what lies close together is soon at hand.
    """

    def __init__(self) -> None:
        self.saves: dict[int, int] = {}  # what checkpoints took, by mark: they are rare
        self._rows = array("q")
        self._first = 0

    @property
    def count(self) -> int:
        """Marks so far, with those that are not kept any more."""
        return self._first + len(self._rows) // _COLUMNS

    @property
    def last(self) -> int:
        """When it was set."""
        return self._rows[1 - _COLUMNS] if self._rows else 0

    def add(self, now: int, says: int, pauses: Pauses) -> int:
        """Returns its number."""
        took, number = pauses.now, self.count
        if took[CHECKPOINT]:
            self.saves[number] = took[CHECKPOINT]
        if len(self._rows) == KEPT_MARKS * _COLUMNS:
            del self._rows[: KEPT_MARKS // 2 * _COLUMNS]
            self._first += KEPT_MARKS // 2
        self._rows.extend((number, now, says, took[INPUT], took[COLLECTOR], NONE, NONE, NONE))
        took[CHECKPOINT] = took[INPUT] = took[COLLECTOR] = 0
        return number

    def passed(self, mark: int, time: int, earliest: int, latest: int) -> None:
        """The device did."""
        end = (mark - self._first + 1) * _COLUMNS
        if end > 0:
            self._rows[end - 3 : end] = array("q", (time, earliest, latest))

    def disown(self) -> None:
        """None of the marks so far ended a step."""
        self._rows[2::_COLUMNS] = array("q", [BEGINS]) * (len(self._rows) // _COLUMNS)

    def columns(self, last: int = 0) -> Ints:
        """Copies; `last`: of so many marks at the end."""
        return np.array(self._rows[-last * _COLUMNS :], np.int64).reshape(-1, _COLUMNS).T

    def host(self, last: int = 0) -> Ints:
        """When marks were set."""
        return self.columns(last)[1]


def where_it_keeps_up(host: Ints, times: Ints, lead: Ints) -> tuple[Ints, Ints]:
    """Times and leads with those of the few marks without an event after one at which the device was not behind its
    host, nor is at the next one that is known: it passes them as they are set."""
    known, unknown = np.flatnonzero(times != NONE), np.flatnonzero(times == NONE)
    if not len(known):
        return times, lead
    after = np.searchsorted(known, unknown)
    first, last = known[np.maximum(after - 1, 0)], known[np.minimum(after, len(known) - 1)]
    little = np.maximum(NO_LEAD, KEEPS_UP_WITHIN * (host[last] - host[first]) / np.maximum(1, last - first))
    keeps_up = np.maximum(lead[first], lead[last]) < little
    rows, end = unknown[(unknown > first) & (unknown < first + EVENT_EVERY) & keeps_up], known[-1]
    moments, times, lead = np.append(host[known], host[-1]), times.copy(), lead.copy()
    for column, at_last in ((times, times[end] + host[-1] - host[end]), (lead, lead[end])):
        column[rows] = np.interp(host[rows], moments, np.append(column[known], at_last))
    return times, lead


KNOWN_ON_DEVICE = 0.8
"""Where so many of the steps that are over are known on the device, those that are not are passed over."""


def steps_of(marked: MarkTable, last: int = 0) -> Steps:
    """Whole steps: what ends with a mark that says so. `last`: only of so many marks at the end."""
    mark, host, says, waited, collector, times, earliest, latest = marked.columns(last)
    times, lead = where_it_keeps_up(host, times, leads(host, times, earliest, latest))
    rows = np.flatnonzero((says == ENDS) | (says == UNDER_WATCH))
    rows = rows[rows > 0]
    known = rows[(times[rows] != NONE) & (times[rows - 1] != NONE)]
    over = np.count_nonzero(rows <= known[-1]) if len(known) else 0  # the device is still busy with those after it
    passed, rows = (times, known) if over and len(known) >= KNOWN_ON_DEVICE * over else (host, rows)
    return Steps(
        mark=mark[rows],
        took=passed[rows] - passed[rows - 1],
        plain=says[rows] == ENDS,
        input=waited[rows],
        collector=collector[rows],
        lead=lead[rows],
        host=host[rows] - host[rows - 1],
        ended=host[rows],
    )


# The lead: how far the host is ahead of the device at each mark, from two clocks that know nothing of each other.
#
# Of each mark it is known how much the host's clock is ahead of the device's: at least so much, and at most so much.
# Where the device waits for the host, the first of these is exact to the few microseconds of a launch: the device
# passes the mark as soon as it is set. The clocks drift apart by some microseconds a second, so what one mark says of
# another holds the less, the further apart they are.

CLOCK_DRIFT = 5e-6
"""The clocks of one machine do not drift apart faster than this; on an H200's host it was 0.85 µs a second."""


def _clock_offset(times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """How much the host's clock is ahead of the device's at each of these times: the most that any mark demands.

    What a mark demands decays with the distance, and no mark may contradict that the host has seen it passed.
    """
    decay = CLOCK_DRIFT * (times - times[0])
    after = np.maximum.accumulate(earliest + decay) - decay
    before = np.maximum.accumulate((earliest - decay)[::-1])[::-1] + decay
    return np.minimum(np.maximum(after, before), latest).astype(np.int64)


def leads(host: Ints, times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """At each mark, how long after the host the device passes it; NONE where nobody knows when it did."""
    lead = np.full(len(host), NONE, np.int64)
    known = np.flatnonzero(times != NONE)
    if len(known):
        ahead = _clock_offset(times[known], earliest[known], latest[known])
        lead[known] = np.maximum(0, times[known] + ahead - host[known])
    return lead


# Marks on the device: events in its current stream, read back once it has passed them. Nobody waits for one.
#
# The two clocks are aligned by what is known of each mark without waiting: the device passes it after the host has set
# it and after the host has last seen it pending, and before the host sees it passed.

EVENTS_IN_FLIGHT = 256
"""Events in flight. Should the device ever be further behind, marks go without one."""
KEEPS_UP_FOR, EVENT_EVERY, KEEPS_UP_WITHIN = 32, 8, 0.05
"""A device that has passed so many marks in a row within so much of a step waits for its host, of whose time an event
takes more than all else of a mark. From then on one mark in so many has one, until the device falls behind."""
READ_AT_A_TIME = 4
"""More than are set, so that a backlog shrinks."""


class EventClock(Protocol):
    """What marks ask of the device that the program uses."""

    def ready(self) -> bool:
        """Whether an event may be set or asked for now."""

    def new_event(self) -> Any:
        """One that can tell time: `query()`, `elapsed_time(later)` in milliseconds."""

    def set(self, event: Any) -> None:
        """Put it behind what has been launched so far."""


class Cuda:
    """The device that the program uses by the time of its first mark. It is never the marks that wake it."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._streams: dict[int, Any] = {}
        self._number: int | None = None

    def ready(self) -> bool:
        """While a graph is captured, nothing of ours may get into it."""
        if self._number is None:
            if not self._cuda.is_initialized():
                return False
            self._number = self._cuda.current_device()
        return not self._cuda.is_current_stream_capturing()

    def new_event(self) -> Any:
        return self._cuda.Event(enable_timing=True)

    def set(self, event: Any) -> None:
        event.record(self._current_stream())

    def _current_stream(self) -> Any:
        """PyTorch makes the object anew each time, which takes as long as all else of a mark."""
        if self._raw_stream is None:
            return self._cuda.current_stream(self._number)
        raw = self._raw_stream(self._number)
        if raw not in self._streams:
            self._streams[raw] = self._cuda.current_stream(self._number)
        return self._streams[raw]


class DeviceMarks:
    """Notes in the table when the device has passed each mark."""

    def __init__(self, table: MarkTable, device: EventClock, clock: Callable[[], int]) -> None:
        self._table, self._device, self._clock = table, device, clock
        self._free: list[Any] = []
        self._made = 0
        self._pending: deque[tuple[Any, int, int]] = deque()  # an event, its mark, and when the host set it
        self._seen_pending = 0
        self._last: Any = None
        self._now = 0.0
        self._ahead = -math.inf  # the host's clock, of the device's
        self._passed = 0  # the last mark that it has passed
        self._kept_up = 0  # at so many marks in a row
        self._left_out = 0  # so many marks to come need no event

    def set(self, mark: int, now: int) -> None:
        """The host is here at `now`; when will the device be?"""
        if self._left_out:
            self._left_out -= 1
            if self._pending and self._device.ready():
                self.read()
        elif self._device.ready():
            event = self._free.pop() if self._free else self._new_event()
            if event is not None:
                self._device.set(event)
                self._pending.append((event, mark, now))
                self._left_out = EVENT_EVERY - 1 if self._kept_up >= KEEPS_UP_FOR else 0
            self.read(but=1)

    def read(self, most: int = READ_AT_A_TIME, but: int = 0) -> None:
        """See which marks the device has passed, `but` the last ones: what was set just now it has not."""
        for _ in range(most):
            if len(self._pending) <= but:
                return
            event, mark, was_set = self._pending[0]
            before = self._clock()
            if not event.query():
                self._seen_pending = before
                self._kept_up = self._left_out = 0
                return
            self._pending.popleft()
            took = 0.0
            if self._last is not None:
                took = self._last.elapsed_time(event) * 1e6
                self._now += took
                self._free.append(self._last)
            self._last, time = event, round(self._now)
            earliest = max(was_set, self._seen_pending) - time
            self._table.passed(mark, time, earliest, self._clock() - time)
            self._seen_pending = 0
            self._ahead = max(self._ahead - CLOCK_DRIFT * took, earliest)
            steps, self._passed = max(1, mark - self._passed), mark
            if time + self._ahead - was_set < max(NO_LEAD, KEEPS_UP_WITHIN * took / steps):
                self._kept_up += 1
            else:
                self._kept_up = self._left_out = 0

    def read_all(self) -> None:
        """Once the program has ended; what the device has not done by then stays unknown."""
        if self._device.ready():
            self.read(EVENTS_IN_FLIGHT)

    def _new_event(self) -> Any:
        self._made += 1
        return self._device.new_event() if self._made <= EVENTS_IN_FLIGHT else None
