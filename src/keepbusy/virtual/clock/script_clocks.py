"""The program's own clocks follow the virtual one: what a script times by itself agrees with the report.

Without that a launch, whose values we compute, seems to take long, and the synchronize after it nothing.
Who asks decides: the program and its libraries see virtual time; Python's own modules, PyTorch and we go
on with the real one, so timeouts, schedulers and loader workers keep working. What is not a function of
`time` (`datetime`, clocks of native code) and what measures a processor's time stays real, too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from time import perf_counter_ns
from types import CodeType
from typing import TYPE_CHECKING, Any

from keepbusy.instrument.lines import PROGRAM_CODE, kind_of

if TYPE_CHECKING:
    from keepbusy.virtual.machine import Machine

CLOCKS = ("time", "perf_counter", "monotonic")
"""Functions of `time`, each with a sister that ends in `_ns`."""
LOOK = 100
"""Nanoseconds that a look at a clock takes where host time is modelled: no two looks see the same time."""
NOTE = "The program's own clocks (time, timeit) showed the time of this report; datetime and native code the real one."
STANDSTILL = 1_000_000_000
"""For so long a program may look at a clock that stands still. From then on it goes with the real one.

Where host time is modelled, somebody who polls until a deadline would otherwise never get there.
"""
_TIMERS = (f"{sysconfig.get_path('stdlib')}/timeit.py", "/torch/utils/benchmark/", "/keepbusy/fix/")
"""Modules of Python, PyTorch and ours that time things on the program's behalf."""


class _Reading(threading.local):
    """What the calling thread read last, in nanoseconds since the run began."""

    def __init__(self) -> None:
        self.reading = 0
        self.time = -1  # what the virtual clock said then
        self.real = self.moved = perf_counter_ns()  # when that was, and when the virtual clock had moved before that


class ScriptClocks:
    """The clocks of one process, and who sees them."""

    def __init__(self, machine: Machine) -> None:
        self.looks = 0
        self._machine, self._last = machine, _Reading()
        self._ahead = 0  # how far readings are ahead of the virtual clock, where that stood still
        self._followers: dict[CodeType, bool] = {}
        real = {name: getattr(time, f"{name}_ns")() for name in CLOCKS}
        start = self.read()
        for name in CLOCKS:
            for function in (getattr(time, name), getattr(time, f"{name}_ns")):
                setattr(time, function.__name__, ScriptClock(function, self, real[name] - start))
        _hand_to_timeit()
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def follow(self, code: CodeType) -> bool:
        """Whether a caller sees virtual time."""
        known = self._followers.get(code)
        if known is None:
            file = code.co_filename
            program = kind_of(file) in PROGRAM_CODE or file.startswith("<")  # what it compiled itself
            known = self._followers[code] = program or any(timer in file for timer in _TIMERS)
        return known

    def read(self) -> int:
        """Nanoseconds since the run began, as the calling thread has them.

        A thread that has nothing to do with the device goes with the real clock, and is never behind the program.
        """
        moment, is_known = self._machine.look_at_clock()
        last, real = self._last, perf_counter_ns()
        if not is_known:
            last.reading = max(last.reading + real - last.real, moment + self._ahead)
        else:
            if moment != last.time:
                last.time, last.moved = moment, real
            else:
                self._ahead += LOOK if real - last.moved < STANDSTILL else real - last.real
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
        function.__defaults__ = tuple(time.perf_counter if one is before else one for one in function.__defaults__)


class ScriptClock:
    """Stands for a function of `time`. No function itself: as an attribute of a class it must not become a method."""

    def __init__(self, native: Any, clocks: ScriptClocks, base: int) -> None:
        self._native, self._clocks, self._base = native, clocks, base
        self.__name__ = self.__qualname__ = native.__name__
        self.__module__, self.__doc__ = "time", native.__doc__
        self._in_seconds = not native.__name__.endswith("_ns")

    def __call__(self) -> Any:
        if not self._clocks.follow(sys._getframe(1).f_code):
            return self._native()
        self._clocks.looks += 1
        moment = self._base + self._clocks.read()
        return moment / 1e9 if self._in_seconds else moment

    def __repr__(self) -> str:
        return repr(self._native)

    def __reduce__(self) -> str:
        return self.__name__
