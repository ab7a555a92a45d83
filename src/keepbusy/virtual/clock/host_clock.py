"""The host's side of the clock: threads, the frames around their calls, work between calls, and loaders' batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from threading import get_ident

from keepbusy.program.processes import at_end_of_thread, known_thread
from keepbusy.timeline.model import NONE, WORKERS, FrameKind, Kind, Lane
from keepbusy.virtual.clock.captures import Captures
from keepbusy.virtual.clock.host_thread import HostThread
from keepbusy.virtual.clock.rows import MARKS, Rows
from keepbusy.virtual.costs.device import Device

_SYNC, _OPERATOR = int(Kind.SYNC), int(FrameKind.OPERATOR)
_STARVATION = 300_000
"""Nanoseconds. Taking a batch that is ready takes less."""


class HostClock:
    """The threads of one process."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], Callable[[], int]] | None = None) -> None:
        """`real`: makes a thread's steady clock, in nanoseconds; None for modelled host time."""
        self.device, self.rank = device, rank
        self.rows = Rows(device.host.launch, device.queue.gap, device.queue.latency)
        self.lock = threading.RLock()
        self.captures = Captures()
        self.threads: dict[int, HostThread] = {}  # by Python's number; `host` adds new ones
        self._real = real
        self._ended_threads: dict[int, HostThread] = {}
        self._thread_count = 0
        self._places: dict[tuple[str, ...], int] = {(): 0}
        self._workers: HostThread | None = None  # the workers of all loaders, whose spans are batches
        self._dispatch_cost = cache(device.host.dispatch)
        self.host()

    # host threads

    def host(self) -> HostThread:
        """The calling thread. A new one begins at the present time of the first thread."""
        return self.threads.get(get_ident()) or self._new_thread()

    def _new_thread(self) -> HostThread:
        number = get_ident()
        with self.lock:
            first = self.first_thread if self.threads else None
            earlier = self._ended_threads.pop(number, None)
            if earlier is None:
                python_thread = known_thread()
                name = python_thread.name if python_thread is not None else f"thread {self._thread_count}"
                lane = self.rows.lane(Lane(self.rank, None, self._thread_count, name))
                self._thread_count += 1
                now = first.now if first else 0
                real = self._real() if self._real is not None else None
                self.threads[number] = HostThread(self.rows, lane, now, real)
            else:  # Python reuses the number of a thread that has ended: keep its lane, but not its time
                self.threads[number] = earlier
                earlier.chosen_streams.clear()
                if first is not None:
                    self.hand_over(first)
        at_end_of_thread(lambda: self._ended_threads.update({number: self.threads.pop(number)}))
        return self.threads[number]

    def hand_over(self, other: HostThread) -> None:
        """The calling thread continues after what `other` has done so far, as when a backward pass begins or ends."""
        host = self.host()
        with self.lock:
            if other is not host:
                host.take_over(other)

    def pause(self) -> HostThread:
        """The program has called us: see `HostThread.pause`. `resume` returns to the program."""
        host = self.host()
        host.pause()
        return host

    @property
    def first_thread(self) -> HostThread:
        """The one that began the run."""
        return next(iter(self.threads.values()))

    def read(self, place: int) -> int:
        """The program reads its clock: the calling thread's time, with all its work until now."""
        host = self.host()
        with self.lock:
            if not host.depth and host.pauses == 1:
                host.go_to(place)
                host.work_until_clock_read()
            return host.now + host.modelled_time

    def now(self) -> int:
        """The calling thread's time, without time that no row shows yet."""
        return self.host().now

    def place(self, *lines: str) -> int:
        """The number of a place in the program. `lines`: the outermost first, each like `train.py(41): main`."""
        number = self._places.get(lines)
        if number is None:
            with self.lock:
                number = self._places[lines] = len(self.rows.lines)
                self.rows.lines.append(tuple(self.rows.names[line] for line in lines))
        return number

    # frames around the program's calls

    def begin(self, name: str, place: int = 0) -> None:
        """A device operator begins. Until `end`, real time does not count."""
        host = self.pause()
        with self.lock:
            host.work(self._dispatch(host, name, place))
            host.depth += 1
            host.open(_OPERATOR, name)

    def end(self) -> None:
        """The operator ends, and the program continues."""
        host = self.threads[get_ident()]
        with self.lock:
            host.close()
            host.depth -= 1
        host.resume()

    def enter(self, kind: FrameKind, name: str, place: int = 0) -> None:
        """A frame begins whose time counts: an annotation, a loader, an operator on the host. Names in `MARKS` begin
        the run's steps."""
        with self.host() as host, self.lock:
            host.work_where_seen()
            host.go_to(place)
            host.work_until_border()
            host.open(int(kind), name)
            marks = [mark for mark in MARKS if name.startswith(mark)]
            host.marks += marks
            for graph in self.captures.values() if marks else ():
                graph.marks += marks

    def leave(self) -> None:
        """The innermost frame that `enter` opened ends."""
        with self.host() as host, self.lock:
            host.work_until_border()
            host.close()

    def work(self, duration: int, name: str = "", place: int = 0) -> None:
        """Host work of a known duration, such as a sleep or an operator on the host."""
        host = self.host()
        with self.lock:
            if not host.depth:
                host.go_to(place)
            host.work_until_border()
            host.work(duration, name)

    def attribute(self, place: int, until: int) -> bool:
        """Write down that the program was at `place` until a real time; returns whether any time passed."""
        host = self.host()
        with self.lock:
            duration = host.take_time_until(until) if not host.depth else 0
            if duration > 0:
                host.go_to(place)
                host.work(duration)
            return duration > 0

    def spend(self, duration: float) -> None:
        """Modelled host time too short for a row of its own, as for a view or a module's call."""
        self.host().modelled_time += round(duration)

    def spend_on_view(self, host: HostThread) -> None:
        """The time of an operator that launches nothing, as a view; in the backward pass it is a node of its own."""
        host.modelled_time += self.device.host.backward if host.in_backward else self.device.host.view

    def _dispatch(self, host: HostThread, name: str, place: int) -> int:
        """The program's work before a device operator: at least the cost of its dispatch on the device's host."""
        if host.depth:
            return 0
        if host.sampled_places:
            host.work_where_seen()
        if place != host.place:
            host.go_to(place)
        return host.take_dispatch_time((place, name), self._dispatch_cost(name, host.in_backward or host.lane > 0))

    def await_others(self, name: str, last_arrival: Callable[[int], int]) -> None:
        """The host waits for other processes. `last_arrival`: given when this one arrived, returns when all had."""
        with self.host() as host:
            host.work_until_border()
            later = last_arrival(host.now) - host.now
            with self.lock:
                host.work(later, name)

    # batches of loaders' workers: the host waits for them, and they are spans of a lane of their own

    def await_batch(self) -> None:
        """The program asks a loader's workers for a batch. Until it is taken, real time does not count."""
        self.pause().awaits_batch = True

    def take_batch(self, name: str, ready: int | None = None) -> None:
        """The host has waited for the workers until now. `ready`: when the batch was ready, by our clock; if that is
        not known, the real wait counts."""
        host = self.host()
        with self.lock:
            if not host.awaits_batch:
                return
            host.awaits_batch = False
            waited = host.pause_length() if ready is None else ready - host.now
            if not host.depth and waited >= (_STARVATION if ready is None else 1):
                until = host.now + waited
                if self._workers is None:
                    lane = self.rows.lane(Lane(self.rank, None, NONE, WORKERS))
                    self._workers = HostThread(self.rows, lane, host.now)
                self._workers.work(until - self._workers.now, name)
                host.add(_SYNC, name, until, 0, self._workers.lane)
            elif ready is None:
                host.unwritten_time += waited
        host.resume()
