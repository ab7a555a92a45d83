"""The host's half of the clock: threads, the time they take, and what encloses it.

A thread's own time goes on while the program runs, and stands still from `come` to `go`, while we
compute its values: `passing.py`. From one operator to the next it takes at least what PyTorch's
dispatches cost the device's host: the device file says how long one takes, `dispatches.py` how many
there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepbusy.timeline.model import NONE, FrameKind, Kind, Lane, LinkKind
from keepbusy.virtual.device import Device
from keepbusy.virtual.dispatches import BACKWARD, BACKWARD_PASS, FORWARD, USUAL_BACKWARD, USUAL_FORWARD
from keepbusy.virtual.host_thread import Host, at_end_of_thread
from keepbusy.virtual.passing import Passing
from keepbusy.virtual.rows import Rows

_STEPS = ("keepbusy.step#", "ProfilerStep#", "Optimizer.step#", "Forward#")
_ALONE = (BACKWARD_PASS, "Optimizer.")
_WORK, _LINE, _OPERATOR = int(Kind.WORK), int(FrameKind.LINE), int(FrameKind.OPERATOR)


class Program:
    """Host threads and their frames."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], int] | None = None) -> None:
        """`real`: nanoseconds of a steady clock, or None for modelled host time."""
        self.device, self.rank = device, rank
        self.rows = Rows()
        self.lock = threading.RLock()
        self._real = real
        self._hosts: dict[int, Host] = {}
        self._ended: dict[int, Host] = {}
        self._numbers = 0
        self._places: dict[tuple[str, ...], int] = {(): 0}
        self._lines: list[tuple[int, ...]] = [()]
        self._marks: dict[str, list[int]] = {prefix: [] for prefix in _STEPS}
        self.host()

    # threads

    def host(self) -> Host:
        """The calling thread. One that was never seen begins where the first one is now."""
        host = self._hosts.get(threading.get_ident())
        return host if host is not None else self._new_host()

    def _new_host(self) -> Host:
        number = threading.get_ident()
        with self.lock:
            first, before = next(iter(self._hosts.values()), None), self._ended.pop(number, None)
            if before is None:
                lane = self.rows.lane(Lane(self.rank, None, self._numbers, threading.current_thread().name))
                self._numbers += 1
            self._hosts[number] = before or Host(lane, first.now if first else 0, Passing(self._real))
            if before is not None and first is not None:
                self.follow(first)
        at_end_of_thread(lambda: self._end_thread(number))
        return self._hosts[number]

    def _end_thread(self, number: int) -> None:
        """Python gives its number to another thread, which goes on in its lane, but not at its time."""
        self._ended[number] = self._hosts.pop(number)

    def follow(self, other: Host) -> None:
        """The calling thread goes on once `other` has done what it did so far: a backward pass, handed over or back."""
        host = self.host()
        with self.lock:
            if other is host:
                return
            if other.last != NONE:
                host.released.append(other.last)
            host.now = max(host.now, other.now)
            host.passing.skip()

    # time

    def come(self, overhead: int = 0) -> Host:
        """The program has called something of ours. Until `go`, real time does not count; nor does our `overhead`."""
        host = self._hosts.get(threading.get_ident()) or self._new_host()
        host.passing.come(overhead)
        return host

    def go(self, host: Host) -> None:
        """Back to the program."""
        host.passing.go()

    def excuse(self, duration: int) -> None:
        """So much of the program's real time was ours, if it is the program that runs now."""
        host = self._hosts.get(threading.get_ident())
        if host is not None and not host.passing.inside:
            host.passing.excuse(duration)

    def begin(self, name: str, place: int = 0) -> None:
        """An operator of the device begins. Until `end`, real time is ours."""
        host = self.come()
        with self.lock:
            if not host.depth:
                if place != host.place:
                    self._go_to(host, place)
                self._work(host, self._since(host, name), "")
            host.depth += 1
            self._open(host, _OPERATOR, name)

    def end(self) -> None:
        """The operator is done, and the program goes on."""
        host = self._hosts[threading.get_ident()]
        with self.lock:
            self._close(host)
            host.depth -= 1
        self.go(host)

    def enter(self, kind: FrameKind, name: str, place: int = 0) -> None:
        """Something of the program's own begins, whose time counts: an annotation, a loader, an operator on the host.

        Steps that the program announces, optimizer steps and profiler steps, named as PyTorch names them, are the marks
        of the run's steps.
        """
        host = self.come()
        with self.lock:
            if place != host.place:
                self._go_to(host, place)
            if not host.depth:
                self._flush(host)
            self._open(host, int(kind), name)
            host.backward |= name == BACKWARD_PASS
            host.passing.alone |= name.startswith(_ALONE)
            host.marks += [prefix for prefix in _STEPS if name.startswith(prefix)]
        self.go(host)

    def leave(self) -> None:
        """The innermost frame that `enter` opened ends."""
        host = self.come()
        with self.lock:
            if not host.depth:
                self._flush(host)
            if host.around:
                self._close(host)
        self.go(host)

    def work(self, duration: int, name: str = "", place: int = 0) -> None:
        """Host work that the clock cannot see, or should not measure: a sleep, an operator of known cost."""
        host = self.host()
        with self.lock:
            if place != host.place and not host.depth:
                self._go_to(host, place)
            if not host.depth:
                self._flush(host)
            self._work(host, duration, name)

    def pass_by(self, place: int, until: int) -> None:
        """At this time, by the real clock, the program was seen at `place`: what it did until then, it did there."""
        host = self.host()
        with self.lock:
            passed = host.passing.until(until) if not host.depth else 0
            if passed > 0:
                if place != host.place:
                    self._go_to(host, place)
                self._work(host, host.passing.show(passed), "")

    def spend(self, duration: float) -> None:
        """A little modelled host time that deserves no row of its own: a view, a module called."""
        host = self.host()
        with self.lock:
            host.passing.spent += round(duration)

    def glance(self) -> None:
        """An operator that launches nothing: a view, memory alone. In the backward pass it is a node of its own."""
        host, costs = self.host(), self.device.host
        host.passing.spent += costs.backward if host.backward else costs.view

    def reached(self) -> int:
        """How far the calling thread is, without the time that is not written down yet."""
        return self.host().now

    def steps(self) -> list[int]:
        """The rows that begin the run's steps.

        Of the first kind of mark that there is, unless it was only a warm-up: another kind came after
        it, at least as often. So are steps marked that a graph replays whole.
        """
        known = [marks for marks in self._marks.values() if len(marks) > 1]
        return next((one for one in known if not any(_overtakes(other, one) for other in known)), [])

    # places

    def place(self, *lines: str) -> int:
        """A number for a place in the program, for use with `begin`: its lines from the outside in.

        Each is written like `train.py(41): main`, as Kineto writes functions, but with the line of the call.
        """
        number = self._places.get(lines)
        if number is None:
            with self.lock:
                number = self._places[lines] = len(self._lines)
                self._lines.append(tuple(self.rows.name(line) for line in lines))
        return number

    # rows and frames, with the lock held

    def _since(self, host: Host, name: str) -> int:
        """What the program did since it was last seen, up to an operator of the device.

        From the operator before, at least what dispatching this one costs the device's own host, however
        quick this machine is.
        """
        if host.backward or host.lane:
            least = BACKWARD.get(name, USUAL_BACKWARD) * self.device.host.backward
        else:
            least = FORWARD.get(name, USUAL_FORWARD) * self.device.host.operator
        return host.passing.due((host.place, name), round(least))

    def _flush(self, host: Host) -> None:
        """What the program did since it was last seen, up to a border of its own."""
        self._work(host, host.passing.at_border(), "")

    def _work(self, host: Host, duration: int, name: str) -> None:
        if duration > 0:
            self._host_row(host, _WORK, name, host.now, host.now + duration, duration)

    def _host_row(
        self, host: Host, kind: int, name: str, start: int, end: int, work: int, awaits: int = NONE, size: int = 0
    ) -> int:
        rows = self.rows
        row = rows.add(
            (host.lane, kind, rows.name(name), host.frame, start, end, work, 0, awaits, NONE, size, 0, NONE, NONE, 0)
        )
        host.now, host.last = end, row
        if host.released:
            for source in host.released:
                rows.link(source, row, LinkKind.HANDOFF)
            host.released.clear()
        if host.marks:
            for prefix in host.marks:
                self._marks[prefix].append(row)
            host.marks.clear()
        return row

    def _open(self, host: Host, kind: int, name: str) -> None:
        host.around.append((host.base, host.place, host.lines, host.backward, host.passing.alone))
        host.base = host.frame = self.rows.open(host.lane, kind, self.rows.name(name), host.frame, host.now)
        host.place, host.lines = 0, ()

    def _close(self, host: Host) -> None:
        """Close the innermost frame, and the lines within it."""
        for frame in (*host.lines, host.base):
            self.rows.close(frame, host.now)
        alone = host.passing.alone
        host.base, host.place, host.lines, host.backward, host.passing.alone = host.around.pop()
        if alone and not host.passing.alone:
            host.passing.ends_alone()
        host.frame = host.lines[-1] if host.lines else host.base

    def _go_to(self, host: Host, place: int) -> None:
        """Leave the lines that the new place is not within, and enter its own."""
        old, new = self._lines[host.place], self._lines[place]
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        for line in host.lines[same:]:
            self.rows.close(line, host.now)
        lines = host.lines[:same]
        for name in new[same:]:
            parent = lines[-1] if lines else host.base
            lines = (*lines, self.rows.open(host.lane, _LINE, name, parent, host.now))
        host.lines, host.place = lines, place
        host.frame = lines[-1] if lines else host.base


def _overtakes(other: list[int], one: list[int]) -> bool:
    return other[0] > one[-1] and len(other) >= len(one)
