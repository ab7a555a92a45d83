"""How much time passes on a host thread while the program runs: real time where it counts, modelled time at least.

Real time stands still from `come` to `go`, while we compute values. What is left is the program's
own, and a little of ours: a kernel in Python leaves cold caches behind, so what PyTorch itself does
then takes longer than it would. Three things keep that out.

- From one operator to the next it takes what dispatching costs the device's host; real time counts
  where it is more.
- A short stretch counts as the shortest of the last passes by that point: noise only ever lengthens.
- While PyTorch is at work by itself, in a backward pass or a step of an optimizer, its time is
  modelled. Only what is far too long for it is somebody else's: a hook that reads a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

# Real time as the program would have it on a machine of its own: without waiting for a core that others use.
#
# Ranks that share few cores, or a busy machine, preempt each other for milliseconds. Linux tells each
# thread how long it stood ready and did not run.

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


SHORT = 500_000
"""Nanoseconds. A stretch that is longer counts whole."""
HOOK = 5_000_000
"""The same, while PyTorch is at work by itself."""
_LONG = 1 << 62


class Passing:
    """The time of one host thread that no row of the timeline shows yet."""

    __slots__ = ("_last", "_real", "alone", "awaits", "inside", "left", "shown", "spent", "unseen")

    def __init__(self, real: Callable[[], int] | None) -> None:
        """`real`: nanoseconds of a steady clock, or None where host time is modelled."""
        self._real = real
        self._last: dict[object, tuple[int, int]] = {}
        self.inside = 0  # how many calls of ours the thread is in
        self.left = real() if real is not None else 0  # when it went back to the program
        self.unseen = 0  # real time of the program's that no row shows yet
        self.shown = 0  # the same since the last operator, that a row shows already
        self.spent = 0  # modelled time that no row shows yet
        self.alone = False  # whether PyTorch is at work by itself
        self.awaits = False  # whether it waits for a batch

    def come(self, overhead: int = 0) -> None:
        """The program has called something of ours. Until `go`, real time does not count; nor does our `overhead`."""
        if self._real is not None and not self.inside:
            self.unseen += self._real() - self.left - overhead
        self.inside += 1

    def go(self) -> None:
        """Back to the program."""
        self.inside -= 1
        if self._real is not None and not self.inside:
            self.left = self._real()

    def away(self) -> int:
        """For how long real time has not counted."""
        return self._real() - self.left if self._real is not None else 0

    def skip(self) -> None:
        """What passed until now belongs to somebody else."""
        self.left = self._real() if self._real is not None else 0

    def excuse(self, duration: int) -> None:
        """So much of the program's real time was ours."""
        self.unseen -= duration

    def due(self, point: object, least: int) -> int:
        """What to write down before an operator whose dispatch takes `least`; `point`: where the program is."""
        least += self.spent - self.shown
        spent = least if self._real is None else max(least, self._counted(point))
        self.unseen = self.shown = self.spent = 0
        return spent

    def at_border(self) -> int:
        """What to write down at a border of the program's own: real time, or all of the modelled one."""
        if self._real is None:
            spent, self.spent = self.spent, 0
            return spent
        if not self.inside:
            self.come()
            self.go()
        return self.show(max(0, self.unseen)) if not self.alone or self.unseen > HOOK else 0

    def show(self, duration: int) -> int:
        """So much of the real time is written down now."""
        self.unseen -= duration
        self.shown += duration
        return duration

    def ends_alone(self) -> None:
        """PyTorch goes back to the program."""
        self.unseen = 0

    def until(self, moment: int) -> int:
        """Of the real time since the thread went back to the program, how much had passed at a moment of the clock."""
        passed = min(moment - self.left, self.unseen)
        if self.inside == 0 or self.alone or passed <= 0:
            return 0
        self.left += passed
        return passed

    def _counted(self, point: object) -> int:
        if self.alone:
            return self.unseen if self.unseen > HOOK else 0
        if self.unseen > SHORT:
            return self.unseen
        before, last = self._last.get(point, (_LONG, _LONG))
        self._last[point] = last, self.unseen
        return min(before, last, self.unseen)
