"""Real time and the virtual clock: the program's real time, where it is spent, and the clocks that the program reads.

The virtual clock advances by the real time that a thread would take on a machine of its own (`HostTime`). Between two
calls of ours another thread samples where the program is: a `PlaceSampler` if host time is measured, and if it is
modelled an `UncountedWork`, which reports the time left out. The program's own clocks follow the virtual clock
(`ScriptClocks`), so what a script times by itself agrees with the report.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from threading import get_ident, get_native_id
from time import clock_gettime_ns, perf_counter_ns, pthread_getcpuclockid
from types import CodeType, FrameType

from keepbusy.program.lines import (
    LIBRARY,
    OURS,
    PROGRAM_CODE,
    PYTHON,
    USER,
    at_rest,
    is_importing,
    kind_of,
    line_number,
    shown,
    stacks_of,
)
from keepbusy.program.patches import Function, Patches
from keepbusy.program.processes import UnseenThread, high_copy, processor_times
from keepbusy.virtual.clock.host_thread import HostThread


class HostTime:
    """A steady clock of the thread that made it, in nanoseconds, without its waits for a core.

    Ranks that share few cores, and programs on a busy machine, preempt each other for milliseconds.
    """

    _SHORTEST_WAIT = 100_000
    """Nanoseconds. Between two readings that are closer there can be no longer wait for a core."""

    def __init__(self) -> None:
        self._last_reading = perf_counter_ns()
        self._lost = self._lost_before = 0  # now, and at the previous reading
        self._file, self._waited, self._thread = -1, 0, 0
        with suppress(OSError):  # another kernel: waits for a core are not known
            opened = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._file, self._thread = high_copy(opened), get_native_id()
            os.close(opened)
        self._waited = self.without_core()

    def __call__(self) -> int:
        now, self._lost_before = perf_counter_ns(), self._lost
        if now - self._last_reading > self._SHORTEST_WAIT:
            waited = self.without_core()
            self._lost += waited - self._waited
            self._waited = waited
        self._last_reading = now
        return now - self._lost

    def at(self, moment: int) -> int:
        """Its reading at a moment between the last two readings. Waits in between are taken to be after the moment."""
        return min(moment - self._lost_before, self._last_reading - self._lost)

    def without_core(self) -> int:
        """How long this thread has waited for a core, which is the second number of the file."""
        if self._file >= 0:
            try:
                return int(os.pread(self._file, 64, 0).split()[1])
            except ProcessLookupError:  # the thread has ended, and another one uses its clock
                return self._waited
            except (OSError, ValueError, IndexError):  # the program closed the file and may have another by its number
                self._file = -1
        times = processor_times(self._thread) if self._thread else None
        return times[1] if times is not None else self._waited


# Work between two calls of the device is at lines that do not call PyTorch, so a thread samples the program's stack.

_INTERVAL = 0.001
"""Seconds between two samples: cheap enough not to slow the program, and short enough to find waits that matter."""

_THREAD_SWITCH = 20_000
"""Nanoseconds from one Python thread to another and back."""


class PlaceSampler:
    """`samples` holds where the program was since the last `take`: pairs of steady-clock time and place."""

    def __init__(self, host: HostThread, time: HostTime, place: Callable[[FrameType], int]) -> None:
        """`host` and `time` belong to the calling thread."""
        self.samples: list[tuple[int, int]] = []
        self._cost = self._ran = 0
        self._host, self._time, self._place = host, time, place
        self.thread = get_ident()
        self._processor = pthread_getcpuclockid(self.thread)

    def begin(self) -> None:
        _switch_often()
        UnseenThread(self._run)

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(_INTERVAL):
            self.sample()

    def sample(self) -> None:
        """Note where the program is, and how long the sample delayed it, which on a busy machine may be long."""
        if self._host.pauses:  # in a call of ours, whose time does not count
            return
        moment, ran = perf_counter_ns(), clock_gettime_ns(self._processor)
        with at_rest():  # before anything lets the program run on, as reading a file does
            frame = sys._current_frames().get(self.thread)
            if frame is not None:
                self.samples.append((moment, self._place(frame)))
            del frame  # it would keep the program's variables alive
        if ran - self._ran > _THREAD_SWITCH:  # a sleeping program is not delayed
            ran_meanwhile = clock_gettime_ns(self._processor) - ran
            self._cost += max(0, perf_counter_ns() - moment - ran_meanwhile) + _THREAD_SWITCH
        self._ran = ran

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        """The cost of the samples since the last call, and the samples: of several in a row at one place, the last."""
        samples, cost, self.samples, self._cost = tuple(self.samples), self._cost, [], 0
        pairs = zip_longest(samples, samples[1:])
        return cost, [sample for sample, after in pairs if after is None or sample[1] != after[1]]


def _switch_often() -> None:
    """Let Python switch threads often enough for the sampler. The program still reads the interval that it set."""
    set_interval, interval_shown = sys.setswitchinterval, [sys.getswitchinterval()]

    def setting(plain: Function) -> Function:
        def setswitchinterval(interval: float, /) -> None:
            plain(interval)
            interval_shown[0] = getter()
            set_interval(min(interval_shown[0], _INTERVAL / 4))

        return setswitchinterval

    getter, patches = sys.getswitchinterval, Patches()
    patches.replace(sys, "getswitchinterval", lambda _: lambda: interval_shown[0])
    patches.replace(sys, "setswitchinterval", setting)
    set_interval(_INTERVAL / 4)


_SLOW_INTERVAL = 0.005
"""Seconds between two samples of `UncountedWork`."""
_SAID_FROM, _SAID_SHARE = 200_000_000, 0.1
"""Nanoseconds, and a share of the run, from which on the time left out is reported."""


class UncountedWork:
    """Measures the program's work outside of operators, in Python, NumPy or files. A modelled clock leaves it out, so
    that the timeline is the same in every run."""

    def __init__(self, host: HostThread) -> None:
        """`host`: the calling thread."""
        self.times = Counter[str]()  # nanoseconds of a processor, by the program's own line
        self._host, self._reached, self._watched = host, (0, 0), get_ident()

    def begin(self) -> None:
        UnseenThread(self._look)

    def _look(self) -> None:
        clock, never = pthread_getcpuclockid(self._watched), threading.Event()
        ran = clock_gettime_ns(clock)
        while not never.wait(_SLOW_INTERVAL):
            before, ran = ran, clock_gettime_ns(clock)
            self.see(stacks_of([self._watched])[self._watched], ran - before)

    def see(self, stack: Sequence[tuple[CodeType, int]], ran: int) -> None:
        """Note a sample: the thread's stack, the innermost frame first, and how long it `ran` since the last sample."""
        before, self._reached = self._reached, (self._host.now, self._host.modelled_time)
        if not stack or self._host.pauses or before != self._reached or before == (0, 0):
            return
        files = [code.co_filename for code, _ in stack]
        if kind_of(files[0]) in (USER, LIBRARY, PYTHON) and not any(map(is_importing, files)):
            own = (frame for frame in stack if kind_of(frame[0].co_filename) == USER)
            for code, instruction in islice(own, 1):
                self.times[f"{shown(code.co_filename)}:{line_number(code, instruction)}"] += ran

    def add_batches(self, durations: Sequence[int], workers: int) -> None:
        """Add the time that a loader's workers, in parallel, spent on batches."""
        self.times["the loader's workers"] += sum(durations) // max(1, workers)

    def sentence(self) -> str:
        """A sentence on the time left out, if that is much of the run; else nothing."""
        spent = self.times.total()
        if spent < max(_SAID_FROM, _SAID_SHARE * self._host.now):
            return ""
        longest = [entry for entry in self.times.most_common(2) if entry[1] > 0.1 * spent]
        lines = " and ".join(f"{place} ({duration / 1e9:.1f} s)" for place, duration in longest)
        return (
            f"the CPU's time is modelled, so the report leaves out at least {spent / 1e9:.1f} s that Python, NumPy and "
            f"files took on this machine, chiefly {lines}; --clock measured counts them."
        )


_LONG, _LOOKS = 10.0, 100
"""Seconds after which a run is long, and samples in that time."""


def suggest_skipping_values(host: HostThread, say: Callable[[str], object], over: threading.Event) -> None:
    """In a long run that mostly computes values, suggest `--values none` once. `host`: the thread that trains; `over`:
    set when the program ends."""

    def watch() -> None:
        paused = 0
        for _ in range(_LOOKS):
            if over.wait(_LONG / _LOOKS):
                return
            paused += bool(host.pauses)
        if paused > _LOOKS // 2:
            say(
                "most of the time goes into computing on the CPU what the GPU would compute; "
                "`--values none` skips that, and then values are zeros."
            )

    UnseenThread(watch)


# The program's own clocks. By real time a launch would seem long, since its values are computed, and the synchronize
# after it short. The caller decides: the program and its libraries see virtual time; Python's own modules, PyTorch and
# keepbusy see real time, so timeouts, schedulers and loader workers keep working. Clocks that are no functions of
# `time` (`datetime`, native code) and clocks of processor time stay real, too.

_CLOCKS = ("time", "perf_counter", "monotonic")
"""Functions of `time`, each with a variant that ends in `_ns`."""
_READING_COST = 100
"""Nanoseconds for reading a clock if host time is modelled, so that no two readings are equal."""
NOTE = "The program's own clocks (time, timeit) showed the time of this report; datetime and native code the real one."
_STANDSTILL = 1_000_000_000
"""Nanoseconds of real time for which a clock that the program reads may stand still. Then it follows the real clock,
or a program that polls until a deadline would never reach it on a modelled clock."""
_TIMERS = (
    f"{sysconfig.get_path('stdlib')}/timeit.py",
    "/torch/utils/benchmark/",
    "/keepbusy/fix/",
    "/keepbusy/runtime/",
)
"""Modules of Python, PyTorch and keepbusy that time things for the program."""


class _Reading(threading.local):
    """The calling thread's last reading, in nanoseconds since the run began."""

    def __init__(self) -> None:
        self.reading = 0
        self.time = -1  # the virtual clock then
        self.real = self.moved = perf_counter_ns()  # real time then, and when the virtual clock last moved


class ScriptClocks:
    """Replaces the functions of `time` in one process."""

    def __init__(self, read_clock: Callable[[], tuple[int, bool]]) -> None:
        """`read_clock`: see `Machine.read_clock`."""
        self.readings = 0
        self._read_clock, self._last = read_clock, _Reading()
        self._ahead = 0  # how far readings are ahead of the virtual clock
        self._followers: dict[CodeType, bool] = {}
        real = {name: getattr(time, f"{name}_ns")() for name in _CLOCKS}
        start, patches = self.read(), Patches()
        for name in _CLOCKS:
            for function in (name, f"{name}_ns"):
                patches.replace(time, function, partial(self._clock, real[name] - start))
        _hand_to_timeit()
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def _clock(self, base: int, original: Function) -> Function:
        """The function that replaces one of `time`."""
        in_seconds = not original.__name__.endswith("_ns")

        def clock() -> int | float:
            code = sys._getframe(1).f_code
            if not self.follow(code):
                return original()
            self.readings += not code.co_filename.startswith(OURS)
            moment = base + self.read()
            return moment / 1e9 if in_seconds else moment

        return clock

    def follow(self, code: CodeType) -> bool:
        """Whether a caller sees virtual time."""
        follows = self._followers.get(code)
        if follows is None:
            file = code.co_filename
            program = kind_of(file) in PROGRAM_CODE or file.startswith("<")  # what it compiled itself
            follows = self._followers[code] = program or any(timer in file for timer in _TIMERS)
        return follows

    def read(self) -> int:
        """Nanoseconds since the run began. In a thread that the virtual clock does not know they follow the real clock,
        and are never behind the program."""
        moment, is_known = self._read_clock()
        last, real = self._last, perf_counter_ns()
        if not is_known:
            last.reading = max(last.reading + real - last.real, moment + self._ahead)
        else:
            if moment != last.time:
                last.time, last.moved = moment, real
            else:
                self._ahead += _READING_COST if real - last.moved < _STANDSTILL else real - last.real
            last.reading = max(last.reading, moment + self._ahead)
        last.real = real
        return last.reading

    def _before_fork(self) -> None:
        self._at_fork = self.read()

    def _after_fork(self) -> None:
        """The child's virtual clock starts at zero, but its readings continue."""
        self._last = _Reading()
        self._ahead = self._at_fork


def _hand_to_timeit() -> None:
    """Replace the timer in `timeit`, if that was imported before."""
    module = sys.modules.get("timeit")
    if module is None:
        return
    before = vars(module)["default_timer"]
    vars(module)["default_timer"] = time.perf_counter
    for function in (module.Timer.__init__, module.timeit, module.repeat):
        function.__defaults__ = tuple(
            time.perf_counter if default is before else default for default in function.__defaults__
        )
