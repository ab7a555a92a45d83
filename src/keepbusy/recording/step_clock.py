"""The marks of a run so far, in columns: a million steps take forty megabytes."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from keepbusy.recording.interruptions import CHECKPOINT, COLLECTOR, INPUT, Pauses
from keepbusy.recording.step_detector import ENDS
from keepbusy.timeline.model import NONE, Ints, Mask

# What is usual among steps: how long they take, and from which length on one is a stall.

SPREADS = 8.0
"""A step further from the median than so many times the usual deviation is no whim of the machine."""
LEAST = 0.5
"""And none is a stall that takes less than so much longer than a usual step."""
BLOCK = 256
"""Steps may change over a run, so what is usual is asked of so many at a time."""
ALIKE = 0.15


def limit(took: Ints) -> int:
    """A step that takes longer than this is a stall."""
    return int(_limits(took[None])[0, 0])


def stalled(took: Ints) -> tuple[Mask, Ints]:
    """Which steps are stalls, and what usual ones near each take."""
    found, usual = np.zeros(len(took), bool), np.zeros(len(took), np.int64)
    blocks = max(1, len(took) // BLOCK)
    each = len(took) // blocks
    longer = len(took) - each * blocks  # so many blocks have one step more
    for begin, count, length in ((0, longer, each + 1), (longer * (each + 1), blocks - longer, each)):
        part = slice(begin, begin + count * length)
        rows = took[part].reshape(count, length)
        if rows.size:
            found[part] = (rows > _limits(rows)).ravel()
            usual[part] = np.repeat(np.median(rows, axis=1), length)
    return found, usual


def _limits(rows: Ints) -> npt.NDArray[np.float64]:
    """Of each row of steps, from which length on one of them is a stall."""
    median = np.median(rows, axis=1, keepdims=True)
    deviation = np.median(np.abs(rows - median), axis=1, keepdims=True)
    return np.asarray(median + np.maximum(SPREADS * deviation, LEAST * median))


def warm_up(took: Ints) -> int:
    """How many steps at the beginning are not like those that follow: memory, tuning and compiling take their time."""
    if len(took) < 4:
        return 0
    half = took[len(took) // 2 :]
    usual = took <= min(limit(half), int(2 * np.median(half)))
    settled = np.flatnonzero(usual[:-2] & usual[1:-1] & usual[2:])
    if not len(settled):  # as where every third step is slow: also later ones are no steadier
        settled = np.flatnonzero(usual)
    return int(min(settled[0], len(took) // 2)) if len(settled) else len(took) // 2


def alike(took: Ints) -> bool:
    """Whether these steps are steady: no stall among them, and no drift from the first half to the second."""
    half = len(took) // 2
    if half < 2 or (took > limit(took)).any():
        return False
    first, second = np.median(took[:half]), np.median(took[half:])
    return bool(abs(first - second) <= ALIKE * max(first, second))


def mean(took: npt.NDArray[np.int64]) -> int:
    return round(float(took.mean())) if len(took) else 0


# The lead: how far the host is ahead of the device at each mark, from two clocks that know nothing of each other.
#
# Of each mark it is known how much the host's clock is ahead of the device's: at least so much, and at most so much.
# Where the device waits for the host, the first of these is exact to the few microseconds of a launch: the device
# passes the mark as soon as it is set. The clocks drift apart by some microseconds a second, so what one mark says of
# another holds the less, the further apart they are.

DRIFT = 5e-6
"""The clocks of one machine do not drift apart faster than this; on an H200's host it was 0.85 µs a second."""


def offset(times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """How much the host's clock is ahead of the device's at each of these times: the most that any mark demands.

    What a mark demands decays with the distance, and no mark may contradict that the host has seen it passed.
    """
    decay = DRIFT * (times - times[0])
    after = np.maximum.accumulate(earliest + decay) - decay
    before = np.maximum.accumulate((earliest - decay)[::-1])[::-1] + decay
    return np.minimum(np.maximum(after, before), latest).astype(np.int64)


def leads(host: Ints, times: Ints, earliest: Ints, latest: Ints) -> Ints:
    """At each mark, how long after the host the device passes it; NONE where nobody knows when it did."""
    lead = np.full(len(host), NONE, np.int64)
    known = np.flatnonzero(times != NONE)
    if len(known):
        ahead = offset(times[known], earliest[known], latest[known])
        lead[known] = np.maximum(0, times[known] + ahead - host[known])
    return lead


# Marks on the device: events in its current stream, read back once it has passed them. Nobody waits for one.
#
# The two clocks are aligned by what is known of each mark without waiting: the device passes it after the host has set
# it and after the host has last seen it pending, and before the host sees it passed.

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


MOST = 1 << 20
"""Marks that are kept; of a longer run the older half goes."""
MOSTLY = 0.8
"""Where so many of the steps that are over are known on the device, those that are not are passed over."""
ASIDE = 3
"""What a mark says beside the verdicts of `Rounds`: a step ends that was looked at closely."""


class Marked:
    """Row by row: when the host set a mark, what it says of the step before it, and that step's pauses."""

    def __init__(self) -> None:
        self.first = 0
        self.host = array("q")
        self.says = array("b")
        self.input = array("q")
        self.collector = array("q")
        self.saves: dict[int, int] = {}  # what checkpoints took, by mark: they are rare

    @property
    def count(self) -> int:
        """Marks so far, with those that are not kept any more."""
        return self.first + len(self.host)

    @property
    def last(self) -> int:
        return self.host[-1] if self.host else 0

    def add(self, now: int, says: int, pauses: Pauses) -> None:
        saved = pauses.take(CHECKPOINT)
        if saved:
            self.saves[self.count] = saved
        self.says.append(says)
        self.input.append(pauses.take(INPUT))
        self.collector.append(pauses.take(COLLECTOR))
        self.host.append(now)

    def columns(self) -> tuple[array[int], ...]:
        """A row a mark: when it was set, what it says, the input and the collector before it."""
        return self.host, self.says, self.input, self.collector

    def halve(self) -> int:
        """Forget the older half, once there are too many; returns how many."""
        if len(self.host) < MOST:
            return 0
        count = MOST // 2
        for column in self.columns():
            del column[:count]
        self.first += count
        return count

    def recent(self, count: int) -> Ints:
        """How long the last plain steps took, the newest last. Any thread may ask: only copies are looked at."""
        host, says = array("q", self.host[-count - 1 :]), array("b", self.says[-count - 1 :])
        rows = min(len(host), len(says))
        took = np.diff(np.array(host[len(host) - rows :], np.int64))
        return took[np.array(says[len(says) - rows :], np.int8)[1:] == ENDS]


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a run, a row each; it ends with the mark of that number.

    A step takes what passes between its marks on the device, for there a host that is ahead loses nothing by a pause;
    where the device's marks are not known, it takes what passes on the host. The two are never mixed: while
    the device's queue fills, the host's steps are much too short.
    """

    mark: Ints
    took: Ints
    plain: Mask  # else somebody looked closely
    input: Ints
    collector: Ints
    lead: Ints  # at its end, NONE where nobody knows
    host: Ints  # what passes between its marks on the host

    def __len__(self) -> int:
        return len(self.mark)

    def take(self, rows: Ints | Mask) -> Steps:
        return Steps(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def steps_of(marked: Marked, device: DeviceMarks | None, last: int = 0) -> Steps:
    """Whole steps: what ends with a mark that says so. `last`: only of so many marks at the end.

    Any thread may ask: only copies are looked at, and a mark that is being set meanwhile is left out.
    """
    on_device = device.columns() if device is not None else ()
    end = min(len(column) for column in (*marked.columns(), *on_device))
    part = slice(max(0, end - last) if last else 0, end)
    host, says, waited, collector = (np.array(column[part], np.int64) for column in marked.columns())
    times = lead = np.full(len(host), NONE, np.int64)
    if on_device:
        times, earliest, latest = (np.array(column[part], np.int64) for column in on_device)
        lead = leads(host, times, earliest, latest)
    rows = np.flatnonzero((says == ENDS) | (says == ASIDE))
    rows = rows[rows > 0]
    known = rows[(times[rows] != NONE) & (times[rows - 1] != NONE)]
    over = np.count_nonzero(rows <= known[-1]) if len(known) else 0  # the device is still busy with those after it
    passed, rows = (times, known) if over and len(known) >= MOSTLY * over else (host, rows)
    return Steps(
        mark=rows + marked.first + part.start,
        took=passed[rows] - passed[rows - 1],
        plain=says[rows] == ENDS,
        input=waited[rows],
        collector=collector[rows],
        lead=lead[rows],
        host=host[rows] - host[rows - 1],
    )
