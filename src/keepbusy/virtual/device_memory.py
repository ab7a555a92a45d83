"""Device memory: a model of PyTorch's caching allocator.

Memory comes from the driver in segments, is cut into blocks, and returns to a pool when its tensor is freed. Only a
request that no free block can serve costs a `cudaMalloc`. Sizes and rules are those of
c10/cuda/CUDACachingAllocator.cpp with its default settings. A tensor may be freed anywhere, even within a call of ours,
so `free` only queues, and the next call does the work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TypeAlias

import numpy as np

from keepbusy.timeline.model import Ints
from keepbusy.virtual.accesses import Accesses
from keepbusy.virtual.clock.captures import Moment
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.clock.host_thread import HostThread
from keepbusy.virtual.memory_blocks import Block, Pools

BLOCK_UNIT, SEGMENT_UNIT = 512, 2 << 20
"""Sizes are rounded up to these."""
SMALL_LIMIT, LARGE_SEGMENT_LIMIT = 1 << 20, 10 << 20
"""Largest block that lies in a small segment, and in a large one; a larger block has a segment of its own. Bytes."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
CONTEXT = 600 << 20
"""Bytes of a device that CUDA, its libraries and NCCL take, and PyTorch does not count: about this much on an H200."""
PoolId: TypeAlias = tuple[int, int]
"""PyTorch's name of a pool of CUDA graphs."""


class OutOfMemory(RuntimeError):  # noqa: N818 -- torch's own name
    """The device is full; the text is PyTorch's."""


_IN_POOLS = np.array([(0, 1, 1), (1, 0, 1)])
"""Which totals count a large block, and which a small one: small pool, large pool, both pools."""


class Totals:
    """Totals of one kind, with a row for each pool: blocks, their bytes, and the bytes requested."""

    def __init__(self) -> None:
        self.now, self.peak, self.ever, self._base = np.zeros((4, 3, 3), np.int64)

    def change(self, small: Ints, changes: Ints) -> None:
        """Add changes in order of time, a row each; negative for memory that is given back."""
        if len(changes):
            rows = _IN_POOLS[small][:, :, None] * changes[:, None]
            running_totals = self.now + np.cumsum(rows, axis=0)
            self.now, self.peak = running_totals[-1], np.maximum(self.peak, running_totals.max(axis=0))
            self.ever = self.ever + np.maximum(rows, 0).sum(axis=0)

    def count(self, small: bool, sign: int, size: int, requested: int) -> None:
        """`sign`: 1 for a new block, -1 for one that is given back."""
        self.change(np.array([int(small)]), np.array([(sign, sign * size, sign * requested)]))

    def reset_accumulated(self) -> None:
        """Start counting allocations and frees from zero."""
        self.ever, self._base = np.zeros_like(self.now), self.now

    def shown(self) -> list[list[list[int]]]:
        """By pool, for blocks, bytes and bytes requested: current, peak, allocated and freed."""
        freed = self._base + self.ever - self.now
        by_pool: list[list[list[int]]] = np.stack([self.now, self.peak, self.ever, freed], axis=-1).tolist()
        return by_pool


class Tally:
    """One device's figures."""

    def __init__(self) -> None:
        self.used, self.segments, self.waiting, self.fragments = (Totals() for _ in range(4))
        # waiting: freed, and still in use by another stream; fragments: free parts of segments in use
        self.retries = self.failures = 0

    def all(self) -> list[Totals]:
        return [self.used, self.segments, self.waiting, self.fragments]


def _flat_stats(tally: Tally) -> dict[str, int]:
    """By the names of `torch.cuda.memory_stats`."""
    values_by_name: dict[str, list[int]] = {"oversize_allocations": [0] * 4, "oversize_segments": [0] * 4}
    pools = zip(("small_pool", "large_pool", "all"), *(totals.shown() for totals in tally.all()), strict=True)
    for pool, (blocks, sizes, requested), segments, waiting, fragments in pools:
        values_by_name |= {
            f"allocation.{pool}": blocks,
            f"allocated_bytes.{pool}": sizes,
            f"requested_bytes.{pool}": requested,
            f"active.{pool}": _active(blocks, waiting[0]),
            f"active_bytes.{pool}": _active(sizes, waiting[1]),
            f"segment.{pool}": segments[0],
            f"reserved_bytes.{pool}": segments[1],
            f"inactive_split.{pool}": fragments[0],
            f"inactive_split_bytes.{pool}": fragments[1],
        }
    stats: dict[str, int] = {}
    for name, (current, peak, allocated, freed) in values_by_name.items():
        stats |= {f"{name}.current": current, f"{name}.peak": peak}
        stats |= {f"{name}.allocated": allocated, f"{name}.freed": freed}
    return stats | {
        "num_alloc_retries": tally.retries,
        "num_ooms": tally.failures,
        "num_sync_all_streams": tally.retries,
        "num_device_alloc": stats["segment.all.allocated"],
        "num_device_free": stats["segment.all.freed"],
        "max_split_size": -1,
    }


def _active(used: list[int], waiting: list[int]) -> list[int]:
    """Active memory is allocated, or freed but still in use by another stream."""
    current = used[0] + waiting[0]
    return [current, max(used[1], current), used[2], used[3] - waiting[0]]


def _out_of_memory(device: int, needed: int, size: int, free: int, tally: Tally, allowed: int | None) -> str:
    """PyTorch's message."""
    limit = "" if allowed is None else f"{_bytes(allowed)} allowed; "
    allocated, reserved = int(tally.used.now[2, 1]), int(tally.segments.now[2, 1])
    return (
        f"CUDA out of memory. Tried to allocate {_bytes(needed)}. GPU {device} has a total capacity of {_bytes(size)} "
        f"of which {_bytes(free)} is free. Including non-PyTorch memory, this process has {_bytes(size - free)} memory "
        f"in use. {limit}Of the allocated memory {_bytes(allocated)} is allocated by PyTorch, and "
        f"{_bytes(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _bytes(size: int) -> str:
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1024:.2f} KiB"


class _DeviceBlocks:
    """One device's memory."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.allowed: int | None = None  # bytes, if the program has set a limit
        self.ordinary = Pools()
        self.graphs: dict[PoolId, Pools] = {}
        self.routes: dict[PoolId, Callable[[int], bool]] = {}  # which streams each pool under capture serves
        self.reserved = 0
        self.address = 0x7F00_0000_0000 + (device << 44)
        self.tally = Tally()
        self.in_use_elsewhere: deque[tuple[Block, list[Moment]]] = deque()  # freed, and still in use by other streams

    def pools(self, stream: int) -> Pools:
        """The pools that serve a stream."""
        return next((self.graphs[name] for name, covers in self.routes.items() if covers(stream)), self.ordinary)

    def look_up_fragments(self) -> None:
        """Count the free parts of segments in use: when the program reads the statistics and when a segment is needed.
        The peak is that of these moments."""
        totals, all_pools = self.tally.fragments, (self.ordinary, *self.graphs.values())
        small = [block.size for pools in all_pools for block in pools.small.blocks(split=True)]
        large = [block.size for pools in all_pools for block in pools.large.blocks(split=True)]
        totals.now = totals.ever = np.array([(len(sizes), sum(sizes), 0) for sizes in (small, large, small + large)])
        totals.peak = np.maximum(totals.peak, totals.now)


class Memory:
    """All devices' memory, on the clock."""

    def __init__(self, clock: Clock, devices: int = 1) -> None:
        self.clock = clock
        self.accesses = Accesses(clock.order)
        self.size = clock.device.memory.size
        self._devices = [_DeviceBlocks(device) for device in range(devices)]
        self._freed: deque[Block] = deque()
        self._counted = 0  # rows that the totals include so far
        self._lock = threading.RLock()

    def allocate(self, device: int, size: int, stream: int) -> Block | None:
        """A block of at least `size` bytes; None for a size of zero. Raises `OutOfMemory`."""
        if size <= 0:
            return None
        with self._lock:
            blocks, host = self._devices[device], self.clock.threads.get(get_ident()) or self.clock.host()
            if self._freed:
                self._free_queued(host)
            if blocks.in_use_elsewhere:
                self._return_unused(blocks)
            rounded = (size + BLOCK_UNIT - 1) & -BLOCK_UNIT
            small = rounded <= SMALL_LIMIT
            pools = blocks.pools(stream) if blocks.routes else blocks.ordinary
            block = (pools.small if small else pools.large).take(stream, rounded)
            if block is None:
                block = self._segment(blocks, rounded, stream, pools)
            if block.size - rounded >= (BLOCK_UNIT if small else SMALL_LIMIT + 1):  # the rest goes to its pool
                rest = Block(device, block.stream, block.address + rounded, block.size - rounded, block.pool)
                rest.before, rest.after = block, block.after
                if rest.after is not None:
                    rest.after.before = rest
                block.after, block.size = rest, rounded
                block.pool.add(rest)
            block.free = False
            block.requested = size
            self.accesses.take(block)
            self._note(host, block, 1)
            return block

    def free(self, block: Block | None) -> None:
        """Safe anywhere, also in a finalizer."""
        if block is not None:
            self._freed.append(block)

    def record_stream(self, block: Block | None, stream: int) -> None:
        """Once the block is freed, it is reused only after the work then in that stream has ended."""
        if block is not None and stream != block.stream:
            block.users = (block.users or set()) | {stream}

    def empty_cache(self, device: int | None = None) -> None:
        """Give whole free segments back to the driver."""
        with self._lock:
            self._free_queued()
            for blocks in self._devices if device is None else [self._devices[device]]:
                if not blocks.routes:  # never during a capture
                    self._return_unused(blocks)
                    self._release(blocks)

    def capture(self, device: int, pool: PoolId, covers: Callable[[int], bool]) -> None:
        """From now on streams for which `covers` is true take their memory from a graph's pool, which may be new."""
        with self._lock:
            blocks = self._devices[device]
            blocks.graphs.setdefault(pool, Pools()).graphs += 1
            blocks.routes[pool] = covers

    def end_capture(self, device: int, pool: PoolId) -> None:
        """The pool is kept for the graph's replays."""
        self._devices[device].routes.pop(pool, None)

    def forget(self, device: int, pool: PoolId) -> None:
        """One of the pool's graphs is deleted. After the last one, free segments may go back to the driver."""
        self._devices[device].graphs[pool].graphs -= 1

    def info(self, device: int = 0) -> tuple[int, int]:
        """Free and total bytes, as `torch.cuda.mem_get_info` has them."""
        return self.size - CONTEXT - self._devices[device].reserved, self.size

    def stats(self, device: int = 0) -> dict[str, int]:
        """By the names of `torch.cuda.memory_stats`."""
        with self._lock:
            tally = self._tally(device)
            self._devices[device].look_up_fragments()
            return _flat_stats(tally)

    def reset_peak(self, device: int = 0) -> None:
        with self._lock:
            for totals in self._tally(device).all():
                totals.peak = totals.now

    def reset_accumulated(self, device: int = 0) -> None:
        with self._lock:
            tally = self._tally(device)
            tally.retries = tally.failures = 0
            for totals in tally.all():
                totals.reset_accumulated()

    def limit(self, share: float, device: int = 0) -> None:
        """`torch.cuda.set_per_process_memory_fraction`: a share of the whole device."""
        self._devices[device].allowed = int(share * self.size)

    def share(self, device: int = 0) -> float:
        """`torch.cuda.get_per_process_memory_fraction`."""
        allowed = self._devices[device].allowed
        return 1.0 if allowed is None else allowed / self.size

    # with the lock held

    def _note(self, host: HostThread, block: Block, sign: int) -> None:
        """Write a row: the block is allocated (1) or given back (-1) now."""
        device = block.device
        self.clock.rows.memory.add(
            host.lane, device, host.now, block.address, sign * block.size, self._devices[device].reserved,
            sign * block.requested, block.pool.small,
        )  # fmt: skip

    def _tally(self, device: int) -> Tally:
        """The device's totals up to now, which are summed from the rows only when they are read."""
        self._free_queued()
        rows = self.clock.rows.memory.columns(self._counted)
        self._counted += rows.shape[1]
        for blocks in self._devices:
            size, _, requested, small = rows[4:, rows[1] == blocks.device]
            blocks.tally.used.change(small, np.stack([np.sign(size), size, requested], axis=1))
        return self._devices[device].tally

    def _segment(self, blocks: _DeviceBlocks, size: int, stream: int, pools: Pools) -> Block:
        """A new segment from the driver. If none is left, free segments are given back first."""
        small = size <= SMALL_LIMIT
        segment_size = -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
        if size < LARGE_SEGMENT_LIMIT:
            segment_size = SMALL_SEGMENT if small else LARGE_SEGMENT
        limit = min(self.size - CONTEXT, self.size if blocks.allowed is None else blocks.allowed)
        if blocks.reserved + segment_size > limit and not blocks.routes:  # nothing may be freed during a capture
            blocks.tally.retries += 1
            for _, moments in blocks.in_use_elsewhere:
                for moment in moments:
                    self.clock.sync_moment(moment)
            self._return_unused(blocks, at_once=True)
            self._release(blocks)
        if blocks.reserved + segment_size > limit:
            blocks.tally.failures += 1
            free = self.size - CONTEXT - blocks.reserved
            raise OutOfMemory(
                _out_of_memory(blocks.device, size, self.size, free, self._tally(blocks.device), blocks.allowed)
            )
        self.clock.allocate("cudaMalloc", self.clock.device.memory.malloc)
        block = Block(blocks.device, stream, blocks.address, segment_size, pools.small if small else pools.large)
        pools.segments += 1
        blocks.address += -(-segment_size // SEGMENT_UNIT) * SEGMENT_UNIT
        blocks.reserved += segment_size
        blocks.tally.segments.count(small, 1, segment_size, segment_size)
        blocks.look_up_fragments()
        return block

    def _free_queued(self, host: HostThread | None = None) -> None:
        host = host or self.clock.host()
        while self._freed:
            block = self._freed.popleft()
            blocks = self._devices[block.device]
            self._note(host, block, -1)
            if block.users:
                block.uses = [use for use in block.uses if use.command.stream not in block.users]
                blocks.tally.waiting.count(block.pool.small, 1, block.size, 0)
                moments = [self.clock.record(stream)._replace(graph=None) for stream in sorted(block.users)]
                blocks.in_use_elsewhere.append((block, moments))
                block.users = None
            else:
                self._return(block)

    def _return_unused(self, blocks: _DeviceBlocks, at_once: bool = False) -> None:
        """Return blocks that other streams are done with; `at_once`: all of them, after a wait."""
        for _ in range(len(blocks.in_use_elsewhere)):
            block, moments = blocks.in_use_elsewhere.popleft()
            if at_once or all(map(self.clock.passed, moments)):
                blocks.tally.waiting.count(block.pool.small, -1, block.size, 0)
                self._return(block)
            else:
                blocks.in_use_elsewhere.append((block, moments))

    def _return(self, block: Block) -> None:
        """Return the block to its pool, joined with its free neighbours."""
        self.accesses.free(block)
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                block.pool.remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if first.after is not None:
                    first.after.before = first
                block = first
        block.pool.add(block)

    def _release(self, blocks: _DeviceBlocks) -> None:
        for pools in (blocks.ordinary, *(unused for unused in blocks.graphs.values() if not unused.graphs)):
            for pool in (pools.large, pools.small):
                for block in pool.blocks(split=False):
                    self.clock.release("cudaFree", self.clock.device.memory.free, blocks.device)
                    pool.remove(block)
                    pools.segments -= 1
                    blocks.reserved -= block.size
                    blocks.tally.segments.count(pool.small, -1, block.size, block.size)
        blocks.graphs = {name: pools for name, pools in blocks.graphs.items() if pools.graphs or pools.segments}
