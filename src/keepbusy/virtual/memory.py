"""Device memory: PyTorch's caching allocator, modelled.

Memory comes from the driver in segments, is cut into blocks, and goes back to a pool when its
tensor dies; only what no free block can serve costs a `cudaMalloc`. Sizes and rules are those of
c10/cuda/CUDACachingAllocator.cpp with its default settings. A tensor may die anywhere, also within
a call of ours, so `free` only queues, and the next call does the work.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque

from keepbusy.timeline.model import NONE
from keepbusy.virtual.clock import Clock, Moment
from keepbusy.virtual.memory_stats import Tally, flat_stats, out_of_memory_text

__all__ = ["Block", "Memory", "OutOfMemory", "PinnedMemory"]

LEAST = 512
SMALL = 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
LEAST_LARGE = 10 << 20
ROUNDED = 2 << 20
CONTEXT = 600 << 20
"""What the driver and its libraries take for themselves; an H200's process has about this much."""


class OutOfMemory(RuntimeError):  # noqa: N818 -- torch's own name
    """The device is full; the text is PyTorch's."""


class Block:
    """A part of a segment. Free ones lie in their pool's list."""

    __slots__ = ("address", "after", "before", "device", "free", "requested", "size", "small", "stream", "users")

    def __init__(self, device: int, stream: int, address: int, size: int, small: bool) -> None:
        self.device, self.stream, self.address, self.size, self.small = device, stream, address, size, small
        self.requested = 0
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None
        self.users: set[int] = set()  # other streams that use it

    def __lt__(self, other: Block) -> bool:
        return self.address < other.address

    @property
    def split(self) -> bool:
        return self.before is not None or self.after is not None


class _Pool:
    """Free blocks, of a stream each, by size and address."""

    def __init__(self) -> None:
        self.free: dict[int, list[tuple[int, int, Block]]] = {}

    def take(self, stream: int, size: int) -> Block | None:
        """The smallest that is large enough."""
        blocks = self.free.get(stream)
        if not blocks:
            return None
        place = bisect_left(blocks, (size,))
        return blocks.pop(place)[2] if place < len(blocks) else None

    def add(self, block: Block) -> None:
        insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def whole_segments(self) -> list[Block]:
        return [block for blocks in self.free.values() for _, _, block in blocks if not block.split]


class _One:
    """One device's memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.small, self.large = _Pool(), _Pool()
        self.pools = (self.large, self.small)
        self.reserved = 0
        self.address = 0x7F00_0000_0000
        self.tally = Tally()
        self.busy: deque[tuple[Block, list[Moment]]] = deque()  # freed, and still in use by other streams


class Memory:
    """All devices' memory, on the clock."""

    def __init__(self, clock: Clock, devices: int = 1) -> None:
        self.clock = clock
        self.size = clock.device.memory.size
        self._devices = [_One(self.size - CONTEXT) for _ in range(devices)]
        self._freed: deque[Block] = deque()
        self._lock = threading.RLock()

    def allocate(self, device: int, size: int, stream: int) -> Block | None:
        """A block for so many bytes; None for none at all. Raises `OutOfMemory`."""
        if size <= 0:
            return None
        with self._lock:
            one = self._devices[device]
            if self._freed:
                self._free_queued()
            if one.busy:
                self._return_unused(one)
            rounded = (size + LEAST - 1) & -LEAST
            small = rounded <= SMALL
            pool = one.small if small else one.large
            block = pool.take(stream, rounded)
            if block is None:
                block = self._segment(device, one, rounded, stream, small)
            elif block.split:
                one.tally.used(small, block.size)
            if block.size - rounded >= (LEAST if small else SMALL + 1):
                self._split(one, pool, block, rounded)
            block.free = False
            block.requested = size
            one.tally.allocated(small, block.size, size)
            return block

    def free(self, block: Block | None) -> None:
        """Safe anywhere, also in a finalizer."""
        if block is not None:
            self._freed.append(block)

    def record_stream(self, block: Block | None, stream: int) -> None:
        """Its memory is not used again before what stands in that stream, once it is freed, has ended."""
        if block is not None and stream != block.stream:
            block.users.add(stream)

    def empty_cache(self, device: int | None = None) -> None:
        """Give whole free segments back to the driver."""
        with self._lock:
            self._free_queued()
            for number, one in enumerate(self._devices):
                if device in (None, number):
                    self._return_unused(one)
                    self._release(number, one)

    def info(self, device: int = 0) -> tuple[int, int]:
        """Free and total bytes, as `torch.cuda.mem_get_info` has them."""
        return self.size - CONTEXT - self._devices[device].reserved, self.size

    def stats(self, device: int = 0) -> dict[str, int]:
        """By the names of `torch.cuda.memory_stats`."""
        with self._lock:
            self._free_queued()
            return flat_stats(self._devices[device].tally)

    def reset_peak(self, device: int = 0) -> None:
        with self._lock:
            self._free_queued()
            self._devices[device].tally.reset_peak()

    def reset_accumulated(self, device: int = 0) -> None:
        with self._lock:
            self._free_queued()
            self._devices[device].tally.reset_accumulated()

    def limit(self, share: float, device: int = 0) -> None:
        """`torch.cuda.set_per_process_memory_fraction`."""
        self._devices[device].limit = min(int(share * self.size), self.size - CONTEXT)

    # with the lock held

    def _segment(self, device: int, one: _One, size: int, stream: int, small: bool) -> Block:
        """From the driver; if it has no more, after giving back what is free."""
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LEAST_LARGE else -(-size // ROUNDED) * ROUNDED
        if one.reserved + wanted > one.limit:
            one.tally.retries += 1
            self._wait_for_users(one)
            self._release(device, one)
        if one.reserved + wanted > one.limit:
            one.tally.failures += 1
            raise OutOfMemory(
                out_of_memory_text(device, size, self.size, self.size - CONTEXT - one.reserved, one.tally)
            )
        self.clock.allocate("cudaMalloc", self.clock.device.memory.malloc)
        block = Block(device, stream, one.address, wanted, small)
        one.address += -(-wanted // ROUNDED) * ROUNDED
        one.reserved += wanted
        one.tally.reserve(small, wanted)
        return block

    def _split(self, one: _One, pool: _Pool, block: Block, size: int) -> None:
        rest = Block(block.device, block.stream, block.address + size, block.size - size, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        pool.add(rest)
        one.tally.idle(block.small, rest.size)

    def _free_queued(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            one = self._devices[block.device]
            one.tally.freed(block.small, block.size, block.requested, bool(block.users))
            if block.users:
                one.busy.append((block, [self.clock.record(stream) for stream in sorted(block.users)]))
                block.users = set()
            else:
                self._return(one, block)

    def _return_unused(self, one: _One) -> None:
        """Blocks whose other streams are done with them."""
        for _ in range(len(one.busy)):
            block, moments = one.busy.popleft()
            if all(map(self.clock.passed, moments)):
                one.tally.inactive(block.small, block.size)
                self._return(one, block)
            else:
                one.busy.append((block, moments))

    def _wait_for_users(self, one: _One) -> None:
        for block, moments in one.busy:
            for moment in moments:
                self.clock.sync_moment(moment)
            one.tally.inactive(block.small, block.size)
            self._return(one, block)
        one.busy.clear()

    def _return(self, one: _One, block: Block) -> None:
        """To its pool, together with its free neighbours."""
        pool = one.small if block.small else one.large
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool.remove(other)
                one.tally.used(block.small, other.size)
                block = _merged(block, other)
        pool.add(block)
        if block.split:
            one.tally.idle(block.small, block.size)

    def _release(self, device: int, one: _One) -> None:
        for pool in one.pools:
            for block in pool.whole_segments():
                pool.remove(block)
                self.clock.release("cudaFree", self.clock.device.memory.free, device)
                one.reserved -= block.size
                one.tally.give_back(block.small, block.size)


def _merged(block: Block, other: Block) -> Block:
    """One block of two neighbours: the first of them, grown."""
    first, second = (other, block) if other.address < block.address else (block, other)
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    first.free = True
    return first


class PinnedMemory:
    """PyTorch's caching allocator of pinned host memory: powers of two, kept for the next one of that size."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._free: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """What to give back to `free`. The first use of a size pays for pinning it."""
        rounded = 1 << max(size - 1, 0).bit_length()
        if size <= 0:
            return NONE
        if self._free.get(rounded, 0):
            self._free[rounded] -= 1
        else:
            self.clock.allocate("cudaHostAlloc", round(rounded * self.clock.device.memory.host_alloc))
        return rounded

    def free(self, size: int) -> None:
        if size != NONE:
            self._free[size] = self._free.get(size, 0) + 1
