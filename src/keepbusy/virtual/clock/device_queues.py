"""The devices' side of the clock: in-order streams, copy engines, and the rules by which commands start and end.

The rules are those of `timeline/replay.py`: a command starts once its stream is free and whatever it waits for has
ended. All of it is called with the clock's lock held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from keepbusy.timeline.model import EVERY_LANE, NEVER, NONE, Direction, Kind, Lane, LinkKind
from keepbusy.virtual.clock.captures import Awaited, Node
from keepbusy.virtual.clock.rows import Rows
from keepbusy.virtual.costs.device import Device

_KERNEL, _COLLECTIVE = int(Kind.KERNEL), int(Kind.COLLECTIVE)
_NCCL = "nccl"
"""Prefix of NCCL's kernels, which need multiprocessors; gloo has no kernels."""
_MESSAGES = "SendRecv"
"""Part of the name of NCCL's kernel for messages, which needs few multiprocessors."""
_FIRST_STREAM = 7
"""CUDA's tools call the default stream 7."""


class Launch(NamedTuple):
    """A call that gives a stream commands."""

    row: int
    start: int


class StreamQueue:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "launch", "place", "tail")

    def __init__(self, lane: int, device: int, limit: int) -> None:
        self.lane, self.device = lane, device
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: dict[int, tuple[int, int]] = {}  # what its next command waits for: see `Awaited`
        self.ends = [NEVER] * limit  # ends of the last `limit` launches, as `timeline/replay.py` keeps them
        self.place = 0  # of the next launch in `ends`
        self.launch = NONE  # row of the last launch

    def append(self, launch: int, row: int, end: int) -> None:
        """Add a command. All commands of one launch, as of a graph, take one place in the queue."""
        self.tail, self.last = end, row
        if launch != self.launch:
            self.place, self.launch = (self.place + 1) % len(self.ends), launch
        self.ends[self.place - 1] = end

    def until(self) -> int:
        """When all its commands, and all that it waits for, have ended."""
        return max([self.tail, *(end for _, end in self.awaited.values())]) if self.awaited else self.tail

    def pending(self) -> Awaited:
        """The commands that must have ended by then."""
        if self.last == NONE:
            return dict(self.awaited)
        return {self.lane: (self.last, self.tail), **self.awaited}

    def wait_for(self, awaited: Awaited) -> None:
        """Its next command comes after these. For each lane only the latest counts; its own are in order anyway."""
        for lane, command in awaited.items():
            if lane != self.lane and command > self.awaited.get(lane, (NONE, NEVER)):
                self.awaited[lane] = command


class SharedDevice:
    """A device on which kernels and collectives slow each other down: they share multiprocessors and memory.

    A command is slowed by those that were launched before it. Their times are already fixed, so the delay that they
    should have had is added to the next command of their kind.
    """

    def __init__(self, slowdown_of: Callable[[str], float]) -> None:
        self._slowdown_of, self._collective_loss = slowdown_of, 1 - 1 / slowdown_of("nccl")
        self._collectives: deque[tuple[int, int]] = deque()
        self._kernels: deque[tuple[int, int, float]] = deque(maxlen=1024)  # as many as may stand in a queue
        self._kernels_delay = self._collectives_delay = 0.0

    def kernel_duration(self, name: str, start: int, work: int) -> int:
        """The duration of a kernel from `start` that takes `work` when alone."""
        while self._collectives and self._collectives[0][1] <= start:
            self._collectives.popleft()
        slowdown, remaining, now = self._slowdown_of(name), float(work), float(start)
        if slowdown > 1.0:
            remaining, self._kernels_delay = remaining + self._kernels_delay, 0.0
        for begun, ended in self._collectives:
            if ended > now and remaining > begun - now:
                remaining -= max(0.0, begun - now)
                now = max(begun, now)
                overlap = min(remaining * slowdown, ended - now)
                remaining, now = remaining - overlap / slowdown, now + overlap
                self._collectives_delay += overlap * self._collective_loss
        end = round(now + remaining)
        self._kernels.append((start, end, slowdown))
        return end - start

    def take_collective_delay(self) -> int:
        """The delay of earlier collectives, which the next one takes over."""
        delay, self._collectives_delay = round(self._collectives_delay), 0.0
        return delay

    def add_collective(self, start: int, end: int) -> None:
        """A collective is on the wire from `start` to `end`. Its wait for a late rank is left out, because kernels
        would not change when that wait is replayed."""
        for begun, ended, slowdown in reversed(self._kernels):
            if ended <= start:
                break
            overlap = max(0, min(end, ended) - max(start, begun))
            self._kernels_delay += overlap * (1 - 1 / slowdown)
            self._collectives_delay += overlap * self._collective_loss
        self._collectives.append((start, end))


class DeviceQueues:
    """The streams of all devices, known by their number in the timeline's lanes."""

    def __init__(self, device: Device, rank: int, rows: Rows) -> None:
        self.streams: dict[int, StreamQueue] = {}
        self.wires: dict[int, int] = {}  # time on the wire, by a collective's row
        self._device, self._rank, self._rows, self._limits = device, rank, rows, device.queue
        self._default_streams: dict[int, int] = {}
        self._branch_streams: dict[tuple[int, int], int] = {}  # by stream and n: the lane of its graphs' nth branch
        self._last_copies: dict[tuple[int, int], tuple[int, int, int]] = {}  # by copy engine: lane, row and end
        self.shared: dict[int, SharedDevice] = {}  # devices on which collectives ran

    def default_stream(self, device: int) -> int:
        lane = self._default_streams.get(device)
        return self._default_streams.setdefault(device, self.add_stream(device)) if lane is None else lane

    def add_stream(self, device: int) -> int:
        number = sum(queue.device == device for queue in self.streams.values()) + _FIRST_STREAM
        lane = self._rows.lane(Lane(self._rank, device, number, f"stream {number}"))
        self.streams[lane] = StreamQueue(lane, device, self._limits.pending)
        return lane

    def branch(self, queue: StreamQueue, number: int) -> StreamQueue:
        """The stream for a graph's commands that were captured on its nth stream."""
        if number == 0:
            return queue
        lane = self._branch_streams.get((queue.lane, number))
        if lane is None:
            lane = self._branch_streams[queue.lane, number] = self.add_stream(queue.device)
        return self.streams[lane]

    def earliest_start(self, queue: StreamQueue, called: int, gap: int) -> int:
        """When a command launched at `called` may start: its stream is free, and what it waits for has ended."""
        start = max(called + self._limits.latency, queue.tail + gap)
        for _, end in queue.awaited.values():
            start = max(start, end + self._limits.gap)
        return start

    def kernel_duration(self, queue: StreamQueue, name: str, start: int, work: int) -> int:
        """With the slowdown by a collective beside it."""
        shared = self.shared.get(queue.device) if self.shared else None
        return work if shared is None else shared.kernel_duration(name, start, work)

    def add(self, queue: StreamQueue, launch: Launch, node: Node, gap: int | None = None) -> int:
        """Add a command, which starts as early as it may; returns its row."""
        rows, limits = self._rows, self._limits
        lag = limits.gap if gap is None else gap
        name = rows.names[node.name]
        start, work = self.earliest_start(queue, launch.start, lag), node.work
        if node.kind == _KERNEL:
            work = self.kernel_duration(queue, node.name, start, work)
        row = rows.add(
            queue.lane, node.kind, name, NONE, start, start + work, work, lag, NONE, node.group, node.size,
            node.direction, node.pinned, launch.row, limits.latency,
        )  # fmt: skip
        for source, _ in queue.awaited.values():
            rows.link(source, row, LinkKind.ORDER, limits.gap)
        queue.awaited.clear()
        queue.append(launch.row, row, start + work)
        return row

    def copy(self, queue: StreamQueue, launch: Launch, node: Node, direction: Direction, pinned: int) -> None:
        """Add a copy. All streams of a device share one engine for each direction."""
        engine = (queue.device, int(direction))
        lane, row, end = self._last_copies.get(engine, (queue.lane, NONE, 0))
        if end > queue.tail:
            queue.wait_for({lane: (row, end)})
        row = self.add(queue, launch, node._replace(direction=int(direction), pinned=pinned))
        self._last_copies[engine] = (queue.lane, row, queue.tail)

    def shared_with_kernels(self, queue: StreamQueue, node: Node) -> SharedDevice | None:
        """The device whose kernels a collective of NCCL's slows down."""
        if node.kind != _COLLECTIVE or not node.name.startswith(_NCCL) or _MESSAGES in node.name:
            return None
        return self.shared.setdefault(queue.device, SharedDevice(self._device.slower_together))

    def sync_targets(self, device: int) -> tuple[int, int, Awaited]:
        """What a sync of the device waits for: lanes, until when, and rows by links."""
        queues = [queue for queue in self.streams.values() if queue.device == device]
        until = max((queue.until() for queue in queues), default=0)
        awaited_together = StreamQueue(NONE, device, 0)
        is_only_device = len(queues) == len(self.streams)
        for queue in queues:
            awaited_together.wait_for(queue.awaited if is_only_device else queue.pending())
        return EVERY_LANE if is_only_device else NONE, until, awaited_together.awaited
