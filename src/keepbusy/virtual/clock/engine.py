"""The virtual device: in-order streams, copy engines, events and syncs on a clock of its own.

Its rules are those of `timeline/replay.py`, applied while the program runs: a launch enqueues a
command and returns; the command starts once its stream is free and whatever it waits for has
ended; a queue that is full holds the next launch up; a sync returns when the device has caught up.
So what it writes down replays to itself. Times are nanoseconds. Streams are known by their number
in the timeline's lanes. Every call is safe from several threads, and none of them sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

from keepbusy.timeline.frame_roles import STEP_MARKS
from keepbusy.timeline.model import EVERY_LANE, NONE, WORKERS, Direction, FrameKind, Kind, Lane, LinkKind, Timeline
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.virtual.clock.captured_graphs import (
    CAPTURED_EVENT,
    CODES,
    ILLEGAL,
    INVALID,
    INVALIDATED,
    ISOLATION,
    UNJOINED,
    UNSUPPORTED,
    CaptureError,
    Graph,
    Node,
)
from keepbusy.virtual.clock.host_time import Passing
from keepbusy.virtual.clock.rows import PACKED, Rows
from keepbusy.virtual.clock.streams import BEGINNING, Moment, Stream
from keepbusy.virtual.costs.device import Device, HostCopy

# A host thread of the timeline: how far it is, and what is open on it.


class Host:
    """A host thread: how far it is, and what is open on it."""

    __slots__ = (
        "around", "backward", "base", "depth", "frame", "lane", "last", "lines", "marks", "now", "passing", "place",
        "released",
    )  # fmt: skip

    def __init__(self, lane: int, now: int, passing: Passing) -> None:
        self.lane = lane
        self.now = now
        self.passing = passing
        self.last = NONE  # its last row
        self.released: list[int] = []  # rows that its next row waits for
        self.marks: list[str] = []  # what its next row begins
        self.depth = 0  # of operators within operators
        self.frame = NONE  # the innermost open frame
        self.base = NONE  # the innermost that is no line
        self.place = 0
        self.lines: tuple[int, ...] = ()  # the open frames of its place, within `base`
        self.around: list[tuple[int, int, tuple[int, ...], bool, bool]] = []  # what to return to
        self.backward = False  # whether the engine of autograd is at work


class _Ending:
    """Lies among a thread's own things, and goes with them."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.does = does

    def __del__(self) -> None:
        self.does()


class _Endings(threading.local):
    def __init__(self) -> None:
        self.all: list[_Ending] = []


_ENDINGS = _Endings()


def at_end_of_thread(does: Callable[[], object]) -> None:
    """Call it when the calling thread ends. A thread that C++ started has no end: Python forgets it after each call."""
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
        _ENDINGS.all.append(_Ending(does))


# The host's half of the clock: threads, the time they take, and what encloses it.
#
# A thread's own time goes on while the program runs, and stands still from `come` to `go`, while we
# compute its values: `passing.py`. From one operator to the next it takes at least what PyTorch's
# dispatches cost the device's host: the device file says how long one takes, `dispatches.py` how many
# there are.

_STEPS = (*STEP_MARKS, "Forward#")
BACKWARD_PASS = "backward"
"""The annotation within which the autograd engine is at work."""
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
        least = self.device.host.dispatch(name, backward=bool(host.backward or host.lane))
        return host.passing.due((host.place, name), least)

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


# Batches of a loader's workers: the host waits for them, and they become a lane whose spans are batches.

STARVED = 300_000
"""Taking a batch that is ready costs less than this."""
_SYNC, _WORK = int(Kind.SYNC), int(Kind.WORK)


class Batches(Program):
    """What the program waits for that other processes of it make."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], int] | None = None) -> None:
        super().__init__(device, rank, real)
        self._workers, self._batched = NONE, 0  # their lane, and when they had finished their last batch

    def await_batch(self) -> None:
        """A loader's workers are asked for a batch. Until it is taken, real time does not count."""
        self.come().passing.awaits = True

    def take_batch(self, name: str, done: int | None = None) -> None:
        """It has come: what the host waited for it, it waited for them.

        `done`: when they were done with it, by our clock; where nobody knows, it was really waited for.
        """
        host = self.host()
        with self.lock:
            if not host.passing.awaits:
                return
            host.passing.awaits = False
            waited = host.passing.away() if done is None else done - host.now
            if not host.depth and waited >= (STARVED if done is None else 1):
                self._wait_for_workers(host, name, host.now + waited)
            elif done is None:
                host.passing.excuse(-waited)
        self.go(host)

    def _wait_for_workers(self, host: Host, name: str, until: int) -> None:
        if self._workers == NONE:
            self._workers, self._batched = self.rows.lane(Lane(self.rank, None, NONE, WORKERS)), host.now
        begun, self._batched = self._batched, until
        number, work = self.rows.name(name), until - begun
        self.rows.add((self._workers, _WORK, number, NONE, begun, until, work, 0, NONE, NONE, 0, 0, NONE, NONE, 0))
        self._host_row(host, _SYNC, name, host.now, until, 0, self._workers)


# The device's half of the clock, inside: enqueue, start, end, wait.
#
# These are the rules of `timeline/replay.py`; whoever changes one of them changes the other. All but
# the first methods are called with the lock held.

_WORK, _LAUNCH, _SYNC, _KERNEL = int(Kind.WORK), int(Kind.LAUNCH), int(Kind.SYNC), int(Kind.KERNEL)
_FIRST_NUMBER = 7
"""CUDA's tools call the default stream 7."""


class Queues(Batches):
    """Streams, and how commands get into and out of them."""

    raises: Callable[[str, int], Exception] = CaptureError
    """Makes what is raised where CUDA would return an error of this text and number."""

    def __init__(
        self,
        device: Device,
        rank: int = 0,
        devices: int = 1,
        real: Callable[[], int] | None = None,
    ) -> None:
        """`real`: nanoseconds of a steady clock, or None for modelled host time."""
        super().__init__(device, rank, real)
        self.devices = devices
        self.groups: dict[int, int] = {}
        self._streams: dict[int, Stream] = {}
        self._defaults: dict[int, int] = {}
        self._engines: dict[tuple[int, int], tuple[int, int, int]] = {}  # lane, row and end of its last copy
        self._captures: dict[int, Graph] = {}
        self._beside: dict[tuple[int, int], int] = {}  # of a stream, the lanes of the branches of its graphs

    # streams

    @property
    def launched(self) -> bool:
        """Whether a device was ever given anything to do."""
        return any(one.last != NONE for one in self._streams.values())

    def default_stream(self, device: int = 0) -> int:
        """The stream that a device's work goes to unless told otherwise."""
        lane = self._defaults.get(device)
        return self._defaults.setdefault(device, self.new_stream(device)) if lane is None else lane

    def new_stream(self, device: int = 0) -> int:
        with self.lock:
            number = sum(one.device == device for one in self._streams.values()) + _FIRST_NUMBER
            lane = self.rows.lane(Lane(self.rank, device, number, f"stream {number}"))
            self._streams[lane] = Stream(lane, device, number, self.device.queue.pending)
            return lane

    def number(self, stream: int) -> int:
        """What the device's tools call it."""
        return self._streams[stream].number

    def operator(self, name: str, place: int, stream: int, kernels: Sequence[tuple[str, int]]) -> None:
        """`begin`, `launch_all` and `end` at once, for an operator that only launches kernels: the usual one.

        Called when its values are computed, between `come` and `go`.
        """
        host, line = self._hosts[get_ident()], self._streams[stream]
        with self.lock:
            if not host.depth and place != host.place:
                self._go_to(host, place)
            if line.awaited or host.released or host.marks or stream in self._captures:
                self._launch_carefully(host, name, stream, kernels)
            else:
                self._launch_plainly(host, line, name, kernels, 0 if host.depth else self._since(host, name))

    # with the lock held

    def _launch_carefully(self, host: Host, name: str, stream: int, kernels: Sequence[tuple[str, int]]) -> None:
        if not host.depth:
            self._work(host, self._since(host, name), "")
        self._open(host, _OPERATOR, name)
        host.depth += 1
        try:
            self._arrive()
            for kernel, work in kernels:
                self._enqueue(host, stream, _KERNEL, kernel, work)
        finally:  # a capture that has failed refuses them
            host.depth -= 1
            self._close(host)

    def _launch_plainly(
        self, host: Host, line: Stream, name: str, kernels: Sequence[tuple[str, int]], spent: int
    ) -> None:
        """The same in one loop for its speed, where nothing holds the kernels up but the queue."""
        rows, queue, ends, cost = self.rows, self.device.queue, line.ends, self.device.host.launch
        spans, names, latency, gap = rows.spans, rows.names, queue.latency, queue.gap
        if len(spans.fresh) + 2 * len(kernels) + 1 > PACKED:
            spans.pack()
        fresh, before, lane, now, tail = spans.fresh, spans.before, host.lane, host.now, line.tail
        if spent > 0:
            fresh.append((lane, _WORK, 0, host.frame, now, now + spent, spent, 0, NONE, NONE, 0, 0, NONE, NONE, 0))
            now, host.last = now + spent, before + len(fresh) - 1
        frame = rows.open(lane, _OPERATOR, rows.name(name), host.frame, now)
        called = rows.name("cudaLaunchKernel") if kernels else 0
        for kernel, work in kernels:
            oldest = ends[line.place]
            end = (oldest if oldest > now else now) + cost
            host.last = row = before + len(fresh)
            fresh.append((lane, _LAUNCH, called, frame, now, end, cost, 0, NONE, NONE, 0, 0, NONE, NONE, 0))
            start = now + latency if now + latency > tail + gap else tail + gap
            tail, number = start + work, names.get(kernel)
            number = rows.name(kernel) if number is None else number
            fresh.append(
                (line.lane, _KERNEL, number, NONE, start, tail, work, gap, NONE, NONE, 0, 0, NONE, row, latency)
            )
            ends[line.place] = tail
            line.place = line.place + 1 if line.place + 1 < len(ends) else 0
            now = end
        host.now = rows.frame_ends[frame] = now
        if kernels:
            line.tail, line.last = tail, before + len(fresh) - 1

    def _arrive(self) -> Host:
        """The calling thread, with its own time written down."""
        host = self.host()
        if not host.depth:
            self._flush(host)
        elif host.passing.spent:
            self._work(host, host.passing.spent, "")
            host.passing.spent = 0
        return host

    def _enqueue(
        self, host: Host, stream: int, kind: int, name: str, work: int, size: int = 0, call: str = "cudaLaunchKernel"
    ) -> int:
        line = self._streams[stream]
        if stream in self._captures:
            self._captured(stream).add(stream, kind, name, work, size)
            self._work(host, self.device.host.launch, "")
            return NONE
        launch = self._call(host, line, call, self.device.host.launch)
        return self._command(line, launch, kind, name, self._ready(line, launch), work, size)

    def _call(self, host: Host, line: Stream, name: str, work: int, size: int = 0) -> tuple[int, int]:
        """A launch: its row, and when it began. A full queue holds it up."""
        start = host.now
        oldest = line.ends[line.place]
        end = (oldest if oldest > start else start) + work
        return self._host_row(host, _LAUNCH, name, start, end, work, NONE, size), start

    def _ready(self, line: Stream, call: tuple[int, int], gap: int | None = None) -> int:
        """When a command launched so may start."""
        start = call[1] + self.device.queue.latency
        free = line.tail + (self.device.queue.gap if gap is None else gap)
        if free > start:
            start = free
        for _, end in line.awaited:
            start = max(start, end + self.device.queue.gap)
        return start

    def _command(
        self,
        line: Stream,
        call: tuple[int, int],
        kind: int,
        name: str,
        start: int,
        work: int,
        size: int = 0,
        direction: int = 0,
        pinned: int = NONE,
        group: int = NONE,
        gap: int | None = None,
    ) -> int:
        rows, queue, end = self.rows, self.device.queue, start + work
        gap = queue.gap if gap is None else gap
        row = rows.add(
            (
                line.lane, kind, rows.name(name), NONE, start, end, work, gap, NONE, group, size, direction,
                pinned, call[0], queue.latency,
            )
        )  # fmt: skip
        if line.awaited:
            for source, _ in line.awaited:
                rows.link(source, row, LinkKind.ORDER, queue.gap)
            line.awaited.clear()
        line.append(row, end, call[0])
        return row

    def _sync(
        self,
        host: Host,
        name: str,
        awaits: int,
        until: int,
        rows: Sequence[int],
        kind: int = _SYNC,
        work: int | None = None,
    ) -> None:
        own = self.device.host.sync if work is None else work
        if host.released:
            self._host_row(host, _WORK, "", host.now, host.now, 0)  # a sync begins at once, whatever it waits for
        start = host.now
        row = self._host_row(host, kind, name, start, max(start, until) + own, own, awaits)
        for source in rows:
            self.rows.link(source, row, LinkKind.ORDER)

    def _whole(self, device: int) -> tuple[int, int, list[int]]:
        """All lanes of a device: whom a sync awaits, until when, and by which links."""
        streams = [one for one in self._streams.values() if one.device == device]
        until = max((one.until() for one in streams), default=0)
        waited = [row for one in streams for row, _ in one.awaited]
        if len({one.device for one in self._streams.values()}) < 2:
            return EVERY_LANE, until, waited
        return NONE, until, waited + [one.last for one in streams if one.last != NONE]

    def _await_engine(self, line: Stream, direction: int) -> None:
        """A device has one engine for each direction, and all streams share it."""
        lane, row, end = self._engines.get((line.device, direction), (line.lane, NONE, 0))
        if lane != line.lane and end > line.tail:
            line.awaited.append((row, end))

    def _captured(self, stream: int) -> Graph:
        """The capture that a stream takes part in; after an error it takes nothing more."""
        graph = self._captures[stream]
        if graph.failed:
            raise self._error(INVALIDATED)
        return graph

    def _refuse(self, call: str, *graphs: Graph | None, unsafe: bool = True) -> None:
        """Refuse a call that touches these captures, or that a capture forbids anywhere: then it is `unsafe`."""
        if not self._captures:
            return
        broken = {one for one in graphs if one is not None}
        if unsafe:
            broken |= {one for one in self._captures.values() if one.forbids(get_ident())}
        for one in broken:
            one.failed = True
        if broken:
            raise self._error(UNSUPPORTED, call)

    def _error(self, text: str, call: str = "") -> Exception:
        return self.raises(f"{text}\nThe call was {call}." if call else text, CODES[text])


# The clock's CUDA graphs: what is launched on a capturing stream is kept, and runs at each replay.

_WORK_OF_COPY = int(Kind.COPY)


class Captures(Queues):
    """Beginning, joining and ending a capture, and running what came of it."""

    def capture(self, stream: int, mode: str = "global") -> None:
        """From now on what is launched on the stream is kept, not run."""
        with self.lock:
            self._refuse("cudaStreamBeginCapture", self._captures.get(stream), unsafe=False)
            if self._captures:
                raise NotImplementedError("keepbusy's virtual GPU captures one CUDA graph at a time.")
            self._captures[stream] = Graph(stream, mode, get_ident())

    def capturing(self, stream: int) -> bool:
        return stream in self._captures

    def end_capture(self, stream: int) -> Graph:
        """Also of the streams that joined. Raises if the capture is not whole, and it has ended all the same."""
        with self.lock:
            if stream not in self._captures:
                raise self._error(ILLEGAL, "cudaStreamEndCapture")
            graph = self._captures[stream]
            for one in [lane for lane, held in self._captures.items() if held is graph]:
                del self._captures[one]
            if graph.failed:
                raise self._error(INVALIDATED)
            if not graph.joined:
                raise self._error(UNJOINED)
            return graph

    def instantiate(self, graph: Graph) -> None:
        """Make it ready to be launched."""
        with self.lock:
            costs = self.device.host
            self._work(self._arrive(), costs.graph_made + costs.graph_node_made * len(graph.nodes), "")

    def replay(self, graph: Graph, stream: int) -> None:
        """One launch, all commands of the graph: each branch in its order, beside the others."""
        with self.lock:
            host, line, costs = self._arrive(), self._streams[stream], self.device.host
            self._refuse("cudaGraphLaunch", self._captures.get(stream), unsafe=False)
            if not graph.nodes:
                return
            self._marks.setdefault(graph.mark, [])
            host.marks.append(graph.mark)
            call = self._call(host, line, "cudaGraphLaunch", costs.graph + costs.graph_node * len(graph.nodes))
            lines, before = self._branches(graph, line), [(row, line.until()) for row in line.before()]
        ends: dict[int, list[tuple[int, int]]] = {one: [] for one in lines}
        for number, node in enumerate(graph.nodes):
            self._run(node, lines[node.stream], call, ends, before if number else [])
        with self.lock:
            line.awaited += [ends[one][-1] for one in graph.loose()]

    def _run(
        self,
        node: Node,
        line: Stream,
        call: tuple[int, int],
        ends: dict[int, list[tuple[int, int]]],
        before: list[tuple[int, int]],
    ) -> None:
        """A command of a graph. `ends`: rows and ends so far; `before`: what a branch's beginning waits for."""
        mine, queue = ends[node.stream], self.device.queue
        gap = queue.graph_gap if mine else queue.gap
        with self.lock:
            line.awaited += [ends[other][count - 1] for other, count in node.after] or ([] if mine else before)
            start = self._ready(line, call, gap)
        last = start if node.meet is None else max(start, node.meet(start))  # other ranks are asked without the lock
        work = last + node.work - start
        with self.lock:
            row = self._command(line, call, node.kind, node.name, start, work, node.size, group=node.group, gap=gap)
        mine.append((row, start + work))

    # with the lock held

    def _branches(self, graph: Graph, line: Stream) -> dict[int, Stream]:
        """Where the commands of each captured stream run: the first ones on `line`, others on lanes beside it."""
        first, *others = graph.streams()
        found = {first: line}
        for number, one in enumerate(others):
            if (line.lane, number) not in self._beside:
                self._beside[line.lane, number] = self.new_stream(line.device)
            found[one] = self._streams[self._beside[line.lane, number]]
        return found

    def _capture_copy(self, host: Host, stream: int, way: HostCopy, size: int, non_blocking: bool) -> None:
        graph = self._captured(stream)
        if not (non_blocking and way.returns):
            self._refuse("cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize", graph)
        graph.add(stream, _WORK_OF_COPY, way.name, way.work, size)
        self._work(host, way.call, "")

    def _touch(self, call: str, moment: Moment, unsafe: bool = True) -> None:
        """An event of a capture may not be asked for, and after the capture it may not be used at all."""
        if moment.graph is not None and moment.graph not in self._captures.values():
            raise self._error(INVALID, call)
        if unsafe and moment.graph is not None:
            moment.graph.failed = True
            raise self._error(CAPTURED_EVENT, call)
        if unsafe:
            self._refuse(call)

    def _join(self, stream: int, moment: Moment) -> None:
        """The stream takes part in the capture that the moment belongs to; nothing else may be waited for in one."""
        self._touch("cudaStreamWaitEvent", moment, unsafe=False)
        mine = self._captures.get(stream)
        if moment.graph is None or mine not in (None, moment.graph):
            if mine is not None:
                mine.failed = True
            raise self._error(ISOLATION)
        self._captures[stream] = moment.graph
        moment.graph.join(stream, moment.reached)


_ALLOCATE = int(Kind.ALLOCATE)
_KERNEL, _COLLECTIVE, _FILL, _COPY = int(Kind.KERNEL), int(Kind.COLLECTIVE), int(Kind.FILL), int(Kind.COPY)
_DEVICE = int(Direction.DEVICE_TO_DEVICE)
_PEERS = "Memcpy PtoP (Device -> Device)"


class Clock(Captures):
    """One process's view of its devices. What encloses the calls (`begin`, `enter`, …) is in `Program`."""

    # commands

    def launch(self, stream: int, name: str, work: int, size: int = 0) -> int:
        """A kernel that runs for `work` once nothing holds it up. Returns its row, or NONE during a capture."""
        with self.lock:
            return self._enqueue(self._arrive(), stream, _KERNEL, name, work, size)

    def launch_all(self, stream: int, kernels: Iterable[tuple[str, int]]) -> None:
        """What an operator launches: kernels by name and work, a launch each."""
        with self.lock:
            host = self._arrive()
            for name, work in kernels:
                self._enqueue(host, stream, _KERNEL, name, work)

    def fill(self, stream: int, size: int, work: int) -> int:
        with self.lock:
            return self._enqueue(self._arrive(), stream, _FILL, "Memset (Device)", work, size, "cudaMemsetAsync")

    def collective(
        self,
        stream: int,
        name: str,
        wire: int,
        size: int,
        group: int,
        members: int,
        meet: Callable[[int], int] | None = None,
    ) -> int:
        """This rank's part of a collective: it ends `wire` after the last rank has arrived.

        `meet` is given when this part could begin and returns when the last of all parts could; it
        may ask the other ranks. `group` is a number for its group of `members` ranks.
        """
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            self.groups[group] = members
            if stream in self._captures:
                self._captured(stream).add(stream, _COLLECTIVE, name, wire, size, group, meet)
                self._work(host, self.device.host.collective, "")
                return NONE
            call = self._call(host, line, "cudaLaunchKernelExC", self.device.host.collective)
            start = self._ready(line, call)
        last = start if meet is None else max(start, meet(start))
        with self.lock:
            return self._command(line, call, _COLLECTIVE, name, start, last + wire - start, size, group=group)

    # copies

    def copy(
        self,
        stream: int,
        direction: Direction,
        size: int,
        pinned: bool = False,
        non_blocking: bool = False,
        fresh: int = 0,
    ) -> None:
        """Bytes between host and device; `pinned` and `non_blocking` as the program asked for them.

        Without `non_blocking` the host waits for the stream; from or to pageable memory it waits
        anyway, unless the driver can stage the bytes. `fresh`: so many of them go to memory of the host
        that was never touched.
        """
        with self.lock:
            host, way = self._arrive(), self.device.copies.copy(direction, size, pinned, fresh)
            if stream in self._captures:
                self._capture_copy(host, stream, way, size, non_blocking)
                return
            if not (non_blocking and way.returns):
                self._refuse("cudaStreamSynchronize")
            line = self._streams[stream]
            call = self._call(host, line, "cudaMemcpyAsync", way.call)
            self._await_engine(line, direction)
            row = self._command(
                line, call, _COPY, way.name, self._ready(line, call), way.work, size, direction, way.pinned
            )
            self._engines[line.device, direction] = (line.lane, row, line.tail)
            if not (non_blocking and way.returns):
                self._sync(
                    host, "cudaMemcpyAsync" if non_blocking else "cudaStreamSynchronize", line.lane, line.tail, ()
                )

    def copy_to_peer(self, source: int, target: int, size: int, non_blocking: bool = True) -> None:
        """From one device to another: in the order of both streams."""
        with self.lock:
            host, line, other = self._arrive(), self._streams[source], self._streams[target]
            if source in self._captures:
                self._captured(source).add(source, _COPY, _PEERS, self.device.wire.time(size), size)
                return
            call = self._call(host, line, "cudaMemcpyPeerAsync", self.device.host.launch)
            line.awaited += [(row, other.until()) for row in other.before()]
            work = self.device.wire.time(size)
            self._command(line, call, _COPY, _PEERS, self._ready(line, call), work, size, _DEVICE)
            other.awaited.append((line.last, line.tail))
            if not non_blocking:
                self._sync(host, "cudaStreamSynchronize", line.lane, line.tail, ())

    # events and waits

    def record(self, stream: int) -> Moment:
        """Where the stream is now: what an event holds once it is recorded."""
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            host.passing.spent += self.device.host.event
            until = line.until()
            reached = max(until, host.now + host.passing.spent + self.device.queue.latency)
            graph = self._captured(stream) if stream in self._captures else None
            return Moment(reached, until, line.before(), graph, graph.reached(stream) if graph else {})

    def wait(self, stream: int, moment: Moment) -> None:
        """What comes next in the stream starts after the moment. A stream that waits for a capture joins it."""
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            host.passing.spent += self.device.host.event
            if moment.graph is not None or (stream in self._captures and moment is not BEGINNING):
                self._join(stream, moment)
                return
            own = line.last
            line.awaited += [(row, moment.until) for row in moment.rows if row != own]

    def query(self, moment: Moment) -> bool:
        """Whether the device has passed it."""
        with self.lock:
            host = self._arrive()
            self._touch("cudaEventQuery", moment)
            host.passing.spent += self.device.host.event
            return moment.time <= host.now + host.passing.spent

    def passed(self, moment: Moment) -> bool:
        """The same, when nobody asks: it costs no time."""
        return moment.time <= self.host().now

    def idle(self, stream: int) -> bool:
        """Whether everything in the stream is done: `Stream.query`."""
        with self.lock:
            host = self._arrive()
            self._refuse("cudaStreamQuery", self._captures.get(stream))
            host.passing.spent += self.device.host.event
            return self._streams[stream].until() <= host.now + host.passing.spent

    def elapsed(self, first: Moment, second: Moment) -> int:
        for moment in (first, second):
            self._touch("cudaEventElapsedTime", moment)
        return second.time - first.time

    # syncs: the host waits for the device

    def sync_moment(self, moment: Moment, name: str = "cudaEventSynchronize") -> None:
        with self.lock:
            host = self._arrive()
            self._touch(name, moment)
            self._sync(host, name, NONE, moment.until, moment.rows)

    def sync_stream(self, stream: int, name: str = "cudaStreamSynchronize") -> None:
        with self.lock:
            host, line = self._arrive(), self._streams[stream]
            self._refuse(name, self._captures.get(stream))
            self._sync(host, name, line.lane, line.until(), [row for row, _ in line.awaited])

    def sync_device(self, device: int = 0, name: str = "cudaDeviceSynchronize") -> None:
        with self.lock:
            host = self._arrive()
            self._refuse(name, *self._captures.values())
            awaits, until, rows = self._whole(device)
            self._sync(host, name, awaits, until, rows)

    def allocate(self, name: str, work: int) -> None:
        """A call of the driver for memory: `cudaMalloc`, `cudaHostAlloc`."""
        with self.lock:
            host = self._arrive()
            self._host_row(host, _ALLOCATE, name, host.now, host.now + work, work)

    def release(self, name: str, work: int, device: int = 0) -> None:
        """A call that gives memory back: it waits for the whole device first, as `cudaFree` does."""
        with self.lock:
            host = self._arrive()
            awaits, until, rows = self._whole(device)
            if awaits == NONE:  # of several devices one: only a sync waits for links
                self._sync(host, name, NONE, until, rows, work=0)
                self._host_row(host, _ALLOCATE, name, host.now, host.now + work, work)
            else:
                self._sync(host, name, awaits, until, rows, _ALLOCATE, work)

    # the timeline

    def timeline(self, **facts: Any) -> Timeline:
        """The run so far. `facts` join those that the clock knows: `source`, the script, is one to give."""
        with self.lock:
            hosts = [*self._hosts.values(), *self._ended.values()]
            for host in hosts:
                self._work(host, host.passing.spent, "")
                host.passing.spent = 0
            self.rows.marks = self.steps()
            known = {
                "device": self.device.name,
                "virtual": True,
                "pending_limit": self.device.queue.pending,
                "groups": dict(sorted(self.groups.items())),
            }
            return self.rows.timeline({host.lane: host.now for host in hosts}, RunFacts(**{**known, **facts}))
