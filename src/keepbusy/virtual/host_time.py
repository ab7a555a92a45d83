"""Real time as the program would have it on a machine of its own: without waiting for a core that others use.

Ranks that share few cores, or a busy machine, preempt each other for milliseconds. Linux tells each
thread how long it stood ready and did not run.
"""

from __future__ import annotations

import os
import threading
import time

_SHORTEST = 100_000
"""Nanoseconds. No stretch between two looks can hide a longer wait for a core without being longer itself."""
_WAITED = "/proc/thread-self/schedstat"


class HostTime(threading.local):
    """Nanoseconds of a steady clock of the calling thread; of two looks the difference counts."""

    def __init__(self) -> None:
        self._looked = time.perf_counter_ns()
        self._lost = 0
        try:
            self._file = os.open(_WAITED, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another kernel: real time is all there is
            self._file = -1
        self._before = self._waited()

    def __call__(self) -> int:
        now = time.perf_counter_ns()
        if now - self._looked > _SHORTEST:
            waited = self._waited()
            self._lost += waited - self._before
            self._before = waited
        self._looked = now
        return now - self._lost

    def at(self, moment: int) -> int:
        """What it said at a moment of the steady clock, not long ago."""
        return moment - self._lost

    def _waited(self) -> int:
        """How long this thread has stood ready without running: the second number."""
        if self._file < 0:
            return 0
        return int(os.pread(self._file, 64, 0).split()[1])
