"""Marks: where a running program's steps end, on the host's clock and on the device's.

A mark is a look at the host's clock and an event in the device's stream. It never waits, and what it costs is lost in
the noise of the shortest step (benchmarks/record_overhead.py), so marks are set from the first step to the last.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np

from keepbusy.recording.interruptions import Allocations, Pauses, without_processor
from keepbusy.recording.plain_steps import plain_run, plain_step
from keepbusy.recording.step_clock import ASIDE, Cuda, Device, DeviceMarks, Marked, Steps, alike, steps_of
from keepbusy.recording.step_detector import BEGINS, StepEnds
from keepbusy.recording.watch import Watch, main_frame
from keepbusy.timeline.model import NONE, Ints
from keepbusy.timeline.plain_run import Figures, FiguresFile, PlainRun

NEAR = 256
"""Plain steps on either side of a close look: enough to say what it is to be compared with."""
SETTLING = 3
"""On an H200 the third step after a profiler has ended is as long as any."""
RECENT, NOW, FEW = 16, 64, 1024


class Marks:
    """From `begin` to `end` each step of the program is marked, and `on_step(count)` is told of each mark.

    Nothing that goes wrong here reaches the program: it ends the marks, and `fault` says what it was.
    """

    def __init__(
        self,
        on_step: Callable[[int], object] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        device: Device | None = None,
        frame: Callable[[], FrameType | None] = main_frame,
        live: Path | None = None,
    ) -> None:
        """`live` names a file for those who look on while the program runs."""
        self.fault = ""
        self.marked = Marked()
        self._live = FiguresFile(live) if live is not None else None
        self.watch = Watch(self.marked, clock, frame, self._leave_figures if live is not None else None)
        self.pauses = Pauses(clock)
        self._on_step, self._clock, self._device = on_step, clock, device
        self._ends = StepEnds(self._ended)
        self._allocations = Allocations()
        self._on_device: DeviceMarks | None = None
        self._thread = self._waited = self._began = NONE
        self._aside = False
        self._aside_still = 0  # so many marks, once nobody looks closely any more
        self._running = False

    def begin(self, watch: bool = True) -> None:
        """Call it in the program's main thread, once torch can be imported. The device is left asleep."""
        self._on_device = DeviceMarks(self._device or Cuda(), self._clock)
        self._running = True
        self._ends.begin()
        self.pauses.begin()
        os.register_at_fork(after_in_child=self._forked)
        if watch:
            self.watch.begin()

    def end(self) -> None:
        """Leave the program alone from now on; to do it twice does nothing."""
        if not self._running:
            return
        self._running = False
        self._ends.end()
        self.pauses.end()
        self.watch.end()
        if self._on_device is not None and not self.fault:
            self._guarded(self._on_device.read_all)
        self._leave_figures(over=True)

    def look_closely(self, now: bool) -> None:
        """While somebody looks closely at the program, its steps are counted, but they are not plain ones.

        Neither are the next few once the look has ended: to end it takes a while, and so does CUPTI to let go.
        """
        self._aside_still = SETTLING if self._aside and not now else 0
        self._aside = now
        self.watch.paused = now

    @property
    def count(self) -> int:
        """Marks so far: the first one begins a step, each further one ends one, too."""
        return self.marked.count

    def times(self) -> array[int]:
        """When the marks were set, by the host's clock."""
        return self.marked.host

    def steady(self, count: int = RECENT) -> bool:
        """Whether the last plain steps are alike."""
        steps = steps_of(self.marked, self._on_device, FEW)
        took = steps.took[steps.plain][-count:]
        return len(took) == count and alike(took)

    def plain_step(self, near: int = NONE, since: int = 0, until: int | None = None) -> int | None:
        """Nanoseconds; of the steps between these two, and of them those around the one that is `near`.

        Without one, around the last close look, where there was one. None if there are too few.
        """
        steps = self._steps()
        closely = steps.mark[~steps.plain]
        near = int(closely[-1]) if near == NONE and len(closely) else near
        steps = steps.take(steps.plain & (steps.mark >= since) & (steps.mark < (until or self.count)))
        if near != NONE:
            nearest = np.argsort(np.abs(steps.mark - near), kind="stable")[: 2 * NEAR]
            steps = steps.take(np.sort(nearest))
        return plain_step(steps)

    def lately(self, count: int) -> Steps:
        """The steps between the last marks, so many of these."""
        return steps_of(self.marked, self._on_device, count)

    def recent(self, count: int) -> Ints:
        """How long the last plain steps took on the host: that is known at once."""
        return self.marked.recent(count)

    @property
    def overdue(self) -> int:
        """A step that takes longer is a stall; as long as nobody knows, none is."""
        return self.watch.limit or 1 << 62

    @property
    def replays_graphs(self) -> bool:
        """Whether the program has replayed a CUDA graph."""
        return self._ends.replayed

    def run(self, last: int = 0) -> PlainRun:
        """What the marks tell so far, or of so many marks at the end."""
        steps = steps_of(self.marked, self._on_device, last)
        return plain_run(
            steps,
            marked_by=self._ends.source.name.lower(),
            saves=dict(self.marked.saves),
            seen=dict(self.watch.seen),
            loop=self.watch.loop,
            readings=tuple(self._allocations.readings),
            delayed=self.delayed(),
            fault=self.fault or self.watch.fault,
        )

    def delayed(self) -> float:
        """Share of the run in which the program's thread was ready and had no processor."""
        passed, now = self.marked.last - self._began, without_processor(self._thread)
        known = passed > 0 and NONE not in (now, self._waited)
        return min(1.0, (now - self._waited) / passed) if known else 0.0

    def facts(self) -> dict[str, object]:
        """The same, for a timeline's facts."""
        return self.run().as_fact()

    def _steps(self) -> Steps:
        return steps_of(self.marked, self._on_device)

    def figures(self) -> Figures:
        """How the program is doing: of its last steps."""
        steps = steps_of(self.marked, self._on_device, FEW)
        took, lead = steps.took[-NOW:], steps.lead[-NOW:]
        known = lead[lead != NONE]
        low, step, high = np.percentile(took, [10, 50, 90]) if len(took) else (0, 0, 0)
        return Figures(
            steps=self.count,
            step=round(step),
            low=round(low),
            high=round(high),
            lead=round(float(np.median(known))) if len(known) else NONE,
            ended=self.marked.last,
            limit=self.watch.limit,
        )

    def _leave_figures(self, over: bool = False) -> None:
        """In the watch's thread, and a last time when it has ended: no step is overdue any more."""
        if self._live is not None:
            figures = self.figures()
            self._live.write(figures._replace(limit=0) if over else figures)

    # in the program's thread

    def _ended(self, verdict: int) -> None:
        if self._running:
            self._guarded(lambda: self._mark(verdict))

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self.end()

    def _mark(self, verdict: int) -> None:
        marked, now = self.marked, self._clock()
        if not marked.count:
            self._thread, self._began = threading.get_native_id(), now
            self._waited = without_processor(self._thread)
        aside = verdict != BEGINS and (self._aside or self._aside_still > 0)
        self._aside_still -= self._aside_still > 0
        marked.add(now, ASIDE if aside else verdict, self.pauses)
        number = marked.count - 1
        if self._on_device is not None:
            self._on_device.set(number, now)
            self._on_device.drop(marked.halve())
        self._allocations.read(number, now)
        if number == RECENT:
            self.watch.find_loop()
        if self._on_step is not None:
            self._tell(number + 1)

    def _tell(self, count: int) -> None:
        try:
            self._on_step(count)  # type: ignore[misc]  # there is one
        except Exception as error:
            self.fault, self._on_step = f"{type(error).__name__}: {error}", None

    def _forked(self) -> None:
        """A child of the program's is none of ours."""
        self._running = False
        self._ends.end()
        self.pauses.end()
