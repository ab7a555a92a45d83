"""The device's half of the clock, inside: enqueue, start, end, wait.

These are the rules of `timeline/replay.py`; whoever changes one of them changes the other. All but
the first methods are called with the lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident

from keepbusy.timeline.model import EVERY_LANE, NONE, FrameKind, Kind, Lane, LinkKind
from keepbusy.virtual.batches import Batches
from keepbusy.virtual.device import Device
from keepbusy.virtual.graphs import CODES, INVALIDATED, UNSUPPORTED, CaptureError, Graph
from keepbusy.virtual.host_thread import Host
from keepbusy.virtual.rows import PACKED
from keepbusy.virtual.streams import Stream

_WORK, _LAUNCH, _SYNC, _KERNEL = int(Kind.WORK), int(Kind.LAUNCH), int(Kind.SYNC), int(Kind.KERNEL)
_OPERATOR = int(FrameKind.OPERATOR)
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
