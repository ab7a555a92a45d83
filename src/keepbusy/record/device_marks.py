"""Marks on the device: events in its current stream, read back once it has passed them. Nobody waits for one.

The two clocks are aligned by what is known of each mark without waiting: the device passes it after the host has set
it and after the host has last seen it pending, and before the host sees it passed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from keepbusy.timeline.model import NONE

RING = 256
"""Events in flight. Should the device ever be further behind, marks go without one."""
READ = 4
"""At most so many are read back at a time: more than are set, so that a backlog shrinks."""


class Device(Protocol):
    """What marks ask of a device."""

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
        event.record(self._cuda.current_stream(self._number))


class _Pending(NamedTuple):
    event: Any
    mark: int
    set: int  # by the host's clock


class DeviceMarks:
    """`times[mark - first]` is when the device passed a mark, by its own clock; NONE where nobody knows."""

    def __init__(self, device: Device, clock: Callable[[], int]) -> None:
        self.first = 0
        self.times = array("q")
        self.earliest = array("q")  # how much the host's clock is ahead of the device's: at least so much
        self.latest = array("q")  # and at most so much
        self._device = device
        self._clock = clock
        self._free: list[Any] = []
        self._made = 0
        self._pending: deque[_Pending] = deque()
        self._seen_pending = 0
        self._last: Any = None
        self._now = 0.0

    def set(self, mark: int, now: int) -> None:
        """The host is here at `now`; when will the device be? Every mark is told, in order."""
        for column in self.columns():
            column.append(NONE)
        if not self._device.ready():
            return
        event = self._event()
        if event is not None:
            self._device.set(event)
            self._pending.append(_Pending(event, mark, now))
        self.read()

    def read(self, most: int = READ) -> None:
        """See which marks the device has passed."""
        for _ in range(most):
            if not self._pending or not self._passed(self._pending[0]):
                return

    def read_all(self) -> None:
        """Once the program has ended; what the device has not done by then stays unknown."""
        if self._device.ready():
            self.read(RING)

    def drop(self, count: int) -> None:
        """Forget the oldest ones."""
        if not count:
            return
        self.first += count
        for column in self.columns():
            del column[:count]

    def columns(self) -> tuple[array[int], array[int], array[int]]:
        """A row a mark."""
        return self.times, self.earliest, self.latest

    def _event(self) -> Any:
        if self._free:
            return self._free.pop()
        if self._made == RING:
            return None
        self._made += 1
        return self._device.new_event()

    def _passed(self, pending: _Pending) -> bool:
        before = self._clock()
        if not pending.event.query():
            self._seen_pending = before
            return False
        self._pending.popleft()
        if self._last is not None:
            self._now += self._last.elapsed_time(pending.event) * 1e6
            self._free.append(self._last)
        self._last = pending.event
        self._note(pending, round(self._now), self._clock())
        return True

    def _note(self, pending: _Pending, time: int, seen: int) -> None:
        row = pending.mark - self.first
        if row >= 0:
            self.times[row] = time
            self.earliest[row] = max(pending.set, self._seen_pending) - time
            self.latest[row] = seen - time
        self._seen_pending = 0
