"""Where the program is while it does nothing that we see: a thread that looks at its stack now and then.

What a program does between two calls of the device stands at lines that call nothing of PyTorch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import zip_longest
from time import perf_counter_ns
from types import FrameType

from keepbusy.instrument.unseen_thread import UnseenThread

INTERVAL = 0.001
"""Seconds between two looks: cheap enough to go unnoticed, and a wait that is shorter is hardly worth a line."""

THREAD_SWITCH = 20_000
"""Nanoseconds from one Python thread to another and back."""


class Onlooker:
    """`looks` holds what was seen since it was last emptied: when, on the steady clock, and at which place."""

    def __init__(self, place: Callable[[FrameType], int]) -> None:
        self.looks: list[tuple[int, int]] = []
        self._cost = 0
        self._place = place
        self._watched = threading.main_thread().ident
        self._stop = threading.Event()
        # else it has its turn only once the program has been at work for 5 ms, or at the next line, which calls PyTorch
        sys.setswitchinterval(INTERVAL / 4)
        UnseenThread(self._look)

    def _look(self) -> None:
        clock, ran = time.pthread_getcpuclockid(self._watched or 0), 0
        while not self._stop.wait(INTERVAL):
            begun, ran_before, ran = perf_counter_ns(), ran, time.clock_gettime_ns(clock)
            frame = sys._current_frames().get(self._watched or 0)
            if frame is not None:
                self.looks.append((begun, self._place(frame)))
            del frame  # it would keep the program's variables alive
            if ran - ran_before > THREAD_SWITCH:  # a program that sleeps is not held up
                self._cost += perf_counter_ns() - begun + THREAD_SWITCH

    def watches_caller(self) -> bool:
        return threading.get_ident() == self._watched

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        """What the looks since the last time took, while Python stood still for the program, and what was seen.

        Of looks in a row at the same place the last one.
        """
        looks, cost, self.looks, self._cost = tuple(self.looks), self._cost, [], 0
        return cost, [look for look, after in zip_longest(looks, looks[1:]) if after is None or look[1] != after[1]]
