"""What real time has to do with the virtual clock: what the program took, what it did meanwhile, what it reads.

The clock runs by the real time that a thread would have on a machine of its own (`HostTime`). Threads see where the
program is between two calls of ours: a `PlaceSampler` where that time is measured, and where it is modelled one that
says what is left out (`UncountedWork`). And the program's own clocks follow the virtual one (`ScriptClocks`): what a
script times by itself agrees with the report.
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
    """A steady clock of the thread that made it, in nanoseconds, without the time in which it waited for a core.

    Ranks that share few cores, or a busy machine, preempt each other for milliseconds.
    """

    _SHORTEST_WAIT = 100_000
    """No stretch between two looks can hide a longer wait for a core without being longer itself."""

    def __init__(self) -> None:
        self._last_look = perf_counter_ns()
        self._lost = self._lost_before = 0  # now, and at the look before
        self._file, self._waited, self._thread = -1, 0, 0
        with suppress(OSError):  # another kernel: real time is all there is
            opened = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._file, self._thread = high_copy(opened), get_native_id()
            os.close(opened)
        self._waited = self.without_core()

    def __call__(self) -> int:
        now, self._lost_before = perf_counter_ns(), self._lost
        if now - self._last_look > self._SHORTEST_WAIT:
            waited = self.without_core()
            self._lost += waited - self._waited
            self._waited = waited
        self._last_look = now
        return now - self._lost

    def at(self, moment: int) -> int:
        """What it said at a moment between the last two looks. Time lost in between is taken as lost after it."""
        return min(moment - self._lost_before, self._last_look - self._lost)

    def without_core(self) -> int:
        """How long this thread has stood ready without running: the second number."""
        if self._file >= 0:
            try:
                return int(os.pread(self._file, 64, 0).split()[1])
            except ProcessLookupError:  # it has ended, and another thread goes on where it stood
                return self._waited
            except (OSError, ValueError, IndexError):  # the program has closed it, and has a file of its own there
                self._file = -1
        times = processor_times(self._thread) if self._thread else None
        return times[1] if times is not None else self._waited


# Where the program is while it does nothing that we see: what it does between two calls of the device stands at lines
# that call nothing of PyTorch, so a thread looks at its stack now and then.

_INTERVAL = 0.001
"""Seconds between two looks: cheap enough to go unnoticed, and a wait that is shorter is hardly worth a line."""

_THREAD_SWITCH = 20_000
"""Nanoseconds from one Python thread to another and back."""


class PlaceSampler:
    """`samples` holds where the program was, since it was last emptied: when, on the steady clock, and the place."""

    def __init__(self, host: HostThread, time: HostTime, place: Callable[[FrameType], int]) -> None:
        """`host`, with its time: of the thread that calls this."""
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
        """Note where the program is, and for how long the sample held it up, which on a busy machine may be long."""
        if self._host.pauses:  # in a call of ours, whose time does not count, and which is no line of the program's
            return
        ran_before, self._ran = self._ran, clock_gettime_ns(self._processor)
        at_work = self._at_work()
        moment = perf_counter_ns()
        with at_rest():
            frame = sys._current_frames().get(self.thread)
            if frame is not None:
                self.samples.append((moment, self._place(frame)))
            del frame  # it would keep the program's variables alive
        if self._ran - ran_before > _THREAD_SWITCH:  # a program that sleeps is not held up
            # read from within: where another process has the core between two readings, none of that counts
            duration = perf_counter_ns() - moment
            self._cost += max(0, duration - (self._at_work() - at_work)) + _THREAD_SWITCH

    def _at_work(self) -> int:
        """For how long in all the program has run or waited for a core."""
        return clock_gettime_ns(self._processor) + self._time.without_core()

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        """What the samples since the last time cost, and the samples: of several in a row at one place the last."""
        samples, cost, self.samples, self._cost = tuple(self.samples), self._cost, [], 0
        pairs = zip_longest(samples, samples[1:])
        return cost, [sample for sample, after in pairs if after is None or sample[1] != after[1]]


def _switch_often() -> None:
    """Let Python switch threads often enough for the sampler. The program still reads the interval that it has set."""
    real, interval_shown = sys.setswitchinterval, [sys.getswitchinterval()]

    def setting(plain: Function) -> Function:
        def setswitchinterval(interval: float, /) -> None:
            plain(interval)
            interval_shown[0] = asked()
            real(min(interval_shown[0], _INTERVAL / 4))

        return setswitchinterval

    asked, patches = sys.getswitchinterval, Patches()
    patches.replace(sys, "getswitchinterval", lambda _: lambda: interval_shown[0])
    patches.replace(sys, "setswitchinterval", setting)
    real(_INTERVAL / 4)


_SLOW_INTERVAL = 0.005
"""Seconds between two looks that only ask whether anything is left out."""
_SAID_FROM, _SAID_SHARE = 200_000_000, 0.1
"""Nanoseconds, and a share of the run: from both on what is left out is worth a sentence."""


class UncountedWork:
    """Measures where the program is at work without an operator, in Python, NumPy or files. A modelled clock leaves
    that out, so that the timeline is the same in every run."""

    def __init__(self, host: HostThread) -> None:
        """`host`: of the thread that calls this."""
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
        """The thread is there, from the inside out, and had a processor for so long since the look before."""
        before, self._reached = self._reached, (self._host.now, self._host.modelled_time)
        if not stack or self._host.pauses or before != self._reached or before == (0, 0):
            return
        files = [code.co_filename for code, _ in stack]
        if kind_of(files[0]) in (USER, LIBRARY, PYTHON) and not any(map(is_importing, files)):
            own = (frame for frame in stack if kind_of(frame[0].co_filename) == USER)
            for code, instruction in islice(own, 1):
                self.times[f"{shown(code.co_filename)}:{line_number(code, instruction)}"] += ran

    def add_batches(self, durations: Sequence[int], workers: int) -> None:
        """What so many workers of a loader, side by side, spent on batches."""
        self.times["the loader's workers"] += sum(durations) // max(1, workers)

    def sentence(self) -> str:
        """What the report leaves out, where that is much of the run; else nothing."""
        spent = self.times.total()
        if spent < max(_SAID_FROM, _SAID_SHARE * self._host.now):
            return ""
        most = [entry for entry in self.times.most_common(2) if entry[1] > 0.1 * spent]
        lines = " and ".join(f"{place} ({each / 1e9:.1f} s)" for place, each in most)
        return (
            f"the CPU's time is modelled, so the report leaves out at least {spent / 1e9:.1f} s that Python, NumPy and "
            f"files took on this machine, chiefly {lines}; --clock measured counts them."
        )


_LONG, _LOOKS = 10.0, 100
"""Seconds after which a run is long, and looks in that time."""


def tell_slow_values(host: HostThread, say: Callable[[str], object], over: threading.Event) -> None:
    """Say once, in a long run whose time goes into our own calls, what makes it shorter. `host`: the thread that
    trains; `over`: set once the program has ended."""

    def look() -> None:
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

    UnseenThread(look)


# The program's own clocks. With real ones a launch, whose values we compute, seems to take long, and the synchronize
# after it nothing. Who asks decides: the program and its libraries see virtual time; Python's own modules, PyTorch and
# we go on with the real one, so timeouts, schedulers and loader workers keep working. What is not a function of `time`
# (`datetime`, clocks of native code) and what measures a processor's time stays real, too.

_CLOCKS = ("time", "perf_counter", "monotonic")
"""Functions of `time`, each with a sister that ends in `_ns`."""
_LOOK = 100
"""Nanoseconds that a look at a clock takes where host time is modelled: no two looks see the same time."""
NOTE = "The program's own clocks (time, timeit) showed the time of this report; datetime and native code the real one."
_STANDSTILL = 1_000_000_000
"""Nanoseconds for which a clock may stand still that a program looks at. Then it goes with the real one: a program
that polls until a deadline would never get there on a modelled clock."""
_TIMERS = (
    f"{sysconfig.get_path('stdlib')}/timeit.py",
    "/torch/utils/benchmark/",
    "/keepbusy/fix/",
    "/keepbusy/runtime/",
)
"""Modules of Python, PyTorch and ours that time things on the program's behalf."""


class _Reading(threading.local):
    """What the calling thread read last, in nanoseconds since the run began."""

    def __init__(self) -> None:
        self.reading = 0
        self.time = -1  # what the virtual clock said then
        self.real = self.moved = perf_counter_ns()  # when that was, and when the virtual clock had moved before that


class ScriptClocks:
    """The clocks of one process, and who sees them."""

    def __init__(self, read_clock: Callable[[], tuple[int, bool]]) -> None:
        """`read_clock`: see `Machine.read_clock`."""
        self.readings = 0
        self._read_clock, self._last = read_clock, _Reading()
        self._ahead = 0  # how far readings are ahead of the virtual clock, where that stood still
        self._followers: dict[CodeType, bool] = {}
        real = {name: getattr(time, f"{name}_ns")() for name in _CLOCKS}
        start, patches = self.read(), Patches()
        for name in _CLOCKS:
            for function in (name, f"{name}_ns"):
                patches.replace(time, function, partial(self._clock, real[name] - start))
        _hand_to_timeit()
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def _clock(self, base: int, native: Function) -> Function:
        """What stands for a function of `time`."""
        in_seconds = not native.__name__.endswith("_ns")

        def clock() -> int | float:
            code = sys._getframe(1).f_code
            if not self.follow(code):
                return native()
            self.readings += not code.co_filename.startswith(OURS)
            moment = base + self.read()
            return moment / 1e9 if in_seconds else moment

        return clock

    def follow(self, code: CodeType) -> bool:
        """Whether a caller sees virtual time."""
        known = self._followers.get(code)
        if known is None:
            file = code.co_filename
            program = kind_of(file) in PROGRAM_CODE or file.startswith("<")  # what it compiled itself
            known = self._followers[code] = program or any(timer in file for timer in _TIMERS)
        return known

    def read(self) -> int:
        """Nanoseconds since the run began. For a thread that the virtual clock does not know they go with the real
        clock, and are never behind the program."""
        moment, is_known = self._read_clock()
        last, real = self._last, perf_counter_ns()
        if not is_known:
            last.reading = max(last.reading + real - last.real, moment + self._ahead)
        else:
            if moment != last.time:
                last.time, last.moved = moment, real
            else:
                self._ahead += _LOOK if real - last.moved < _STANDSTILL else real - last.real
            last.reading = max(last.reading, moment + self._ahead)
        last.real = real
        return last.reading

    def _before_fork(self) -> None:
        self._at_fork = self.read()

    def _after_fork(self) -> None:
        """The child's virtual clock begins anew, and what it reads goes on."""
        self._last = _Reading()
        self._ahead = self._at_fork


def _hand_to_timeit() -> None:
    """It keeps a timer of its own, where it was imported before."""
    module = sys.modules.get("timeit")
    if module is None:
        return
    before = vars(module)["default_timer"]
    vars(module)["default_timer"] = time.perf_counter
    for function in (module.Timer.__init__, module.timeit, module.repeat):
        function.__defaults__ = tuple(
            time.perf_counter if default is before else default for default in function.__defaults__
        )
