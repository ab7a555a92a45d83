"""The host's side of the clock: its threads, what encloses their calls, work that no call shows, loaders' batches."""

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
"""Nanoseconds. Taking a batch that is ready costs less than this."""


class HostClock:
    """The threads of one process."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], Callable[[], int]] | None = None) -> None:
        """`real`: gives a thread its steady clock, in nanoseconds; None for modelled host time."""
        self.device, self.rank = device, rank
        self.rows = Rows(device.host.launch, device.queue.gap, device.queue.latency)
        self.lock = threading.RLock()
        self.captures = Captures()
        self.threads: dict[int, HostThread] = {}  # by Python's number; `host` adds those that are missing
        self._real = real
        self._ended_threads: dict[int, HostThread] = {}
        self._thread_count = 0
        self._places: dict[tuple[str, ...], int] = {(): 0}
        self._workers: HostThread | None = None  # those of loaders together: what they did are their batches
        self._dispatch_cost = cache(device.host.dispatch)
        self.host()

    # host threads

    def host(self) -> HostThread:
        """The calling thread. One that was never seen begins where the first one is now."""
        return self.threads.get(get_ident()) or self._new_thread()

    def _new_thread(self) -> HostThread:
        number = get_ident()
        with self.lock:
            first = self.first_thread if self.threads else None
            same = self._ended_threads.pop(number, None)
            if same is None:
                known = known_thread()
                name = known.name if known is not None else f"thread {self._thread_count}"
                lane = self.rows.lane(Lane(self.rank, None, self._thread_count, name))
                self._thread_count += 1
                now = first.now if first else 0
                real = self._real() if self._real is not None else None
                self.threads[number] = HostThread(self.rows, lane, now, real)
            else:  # Python gave the number of a thread that has ended: this one goes on in its lane, not at its time
                self.threads[number] = same
                same.chosen_streams.clear()
                if first is not None:
                    self.hand_over(first)
        at_end_of_thread(lambda: self._ended_threads.update({number: self.threads.pop(number)}))
        return self.threads[number]

    def hand_over(self, other: HostThread) -> None:
        """The calling thread goes on once `other` has done what it did so far: a backward pass, begun or ended."""
        host = self.host()
        with self.lock:
            if other is not host:
                host.take_over(other)

    def pause(self) -> HostThread:
        """The program has called us: see `HostThread.pause`. Its `resume` goes back to the program."""
        host = self.host()
        host.pause()
        return host

    @property
    def first_thread(self) -> HostThread:
        """The one that began the run."""
        return next(iter(self.threads.values()))

    def read(self, place: int) -> int:
        """The program looks at its clock: how far the calling thread is, with all that it did until now."""
        host = self.host()
        with self.lock:
            if not host.depth and host.pauses == 1:
                host.go_to(place)
                host.work_until_look()
            return host.now + host.modelled_time

    def now(self) -> int:
        """How far the calling thread is, without the time that is not written down yet."""
        return self.host().now

    def place(self, *lines: str) -> int:
        """A number for a place in the program: its lines from the outside in, each like `train.py(41): main`."""
        number = self._places.get(lines)
        if number is None:
            with self.lock:
                number = self._places[lines] = len(self.rows.lines)
                self.rows.lines.append(tuple(self.rows.names[line] for line in lines))
        return number

    # what encloses the program's calls

    def begin(self, name: str, place: int = 0) -> None:
        """An operator of the device begins. Until `end`, real time is ours."""
        host = self.pause()
        with self.lock:
            host.work(self._dispatch(host, name, place))
            host.depth += 1
            host.open(_OPERATOR, name)

    def end(self) -> None:
        """The operator is done, and the program goes on."""
        host = self.threads[get_ident()]
        with self.lock:
            host.close()
            host.depth -= 1
        host.resume()

    def enter(self, kind: FrameKind, name: str, place: int = 0) -> None:
        """Something of the program's own begins, whose time counts: an annotation, a loader, an operator on the host.
        Names in `MARKS` begin the run's steps."""
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
        """Host work that the clock cannot see, or should not measure: a sleep, an operator of known cost."""
        host = self.host()
        with self.lock:
            if not host.depth:
                host.go_to(place)
            host.work_until_border()
            host.work(duration, name)

    def attribute(self, place: int, until: int) -> bool:
        """Write down that the program was at `place` until a time of the real clock; whether it did anything there."""
        host = self.host()
        with self.lock:
            duration = host.take_time_until(until) if not host.depth else 0
            if duration > 0:
                host.go_to(place)
                host.work(duration)
            return duration > 0

    def spend(self, duration: float) -> None:
        """A little modelled host time that deserves no row of its own: a view, a module called."""
        self.host().modelled_time += round(duration)

    def spend_on_view(self, host: HostThread) -> None:
        """An operator that launches nothing: a view, memory alone. In the backward pass it is a node of its own."""
        host.modelled_time += self.device.host.backward if host.in_backward else self.device.host.view

    def _dispatch(self, host: HostThread, name: str, place: int) -> int:
        """How long the program was at work before an operator of the device: at least what its dispatch costs on the
        device's host, however quick this machine is."""
        if host.depth:
            return 0
        if host.sampled_places:
            host.work_where_seen()
        if place != host.place:
            host.go_to(place)
        return host.take_dispatch_time((place, name), self._dispatch_cost(name, host.in_backward or host.lane > 0))

    def await_others(self, name: str, last_arrival: Callable[[int], int]) -> None:
        """The host waits for other processes. `last_arrival`: given when this one arrived, it returns when all had."""
        with self.host() as host:
            host.work_until_border()
            later = last_arrival(host.now) - host.now
            with self.lock:
                host.work(later, name)

    # batches of a loader's workers: the host waits for them, and they become a lane whose spans are batches

    def await_batch(self) -> None:
        """A loader's workers are asked for a batch. Until it is taken, real time does not count."""
        self.pause().awaits_batch = True

    def take_batch(self, name: str, done: int | None = None) -> None:
        """The host has waited for the workers until now. `done`: when the batch was there, by our clock; where nobody
        knows, the real wait counts."""
        host = self.host()
        with self.lock:
            if not host.awaits_batch:
                return
            host.awaits_batch = False
            waited = host.pause_length() if done is None else done - host.now
            if not host.depth and waited >= (_STARVATION if done is None else 1):
                until = host.now + waited
                if self._workers is None:
                    lane = self.rows.lane(Lane(self.rank, None, NONE, WORKERS))
                    self._workers = HostThread(self.rows, lane, host.now)
                self._workers.work(until - self._workers.now, name)
                host.add(_SYNC, name, until, 0, self._workers.lane)
            elif done is None:
                host.unwritten_time += waited
        host.resume()
