"""What the allocator counts, under PyTorch's names."""

from __future__ import annotations

_KINDS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_POOLS = ("small_pool", "large_pool", "all")
_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


class Count:
    """A figure that rises and falls: of the small pool, the large one, and both; what was removed follows."""

    __slots__ = ("added", "base", "current", "peak")

    def __init__(self) -> None:
        self.current, self.peak = [0, 0, 0], [0, 0, 0]
        self.added, self.base = [0, 0, 0], [0, 0, 0]

    def rise(self, pool: int, by: int) -> None:
        current, peak, added = self.current, self.peak, self.added
        now = current[pool] = current[pool] + by
        if now > peak[pool]:
            peak[pool] = now
        now = current[2] = current[2] + by
        if now > peak[2]:
            peak[2] = now
        added[pool] += by
        added[2] += by

    def fall(self, pool: int, by: int) -> None:
        self.current[pool] -= by
        self.current[2] -= by

    def removed(self, pool: int) -> int:
        return self.base[pool] + self.added[pool] - self.current[pool]

    def forget(self) -> None:
        """Count what is added and removed from now on."""
        self.added, self.base = [0, 0, 0], list(self.current)


class Tally:
    """All figures of one device. What is active is allocated, or freed and still in use by another stream."""

    def __init__(self) -> None:
        self.counts = {kind: Count() for kind in _KINDS}
        self.retries = self.failures = 0
        self._allocations, self._segments = self.counts["allocation"], self.counts["segment"]
        self._active, self._idle = self.counts["active"], self.counts["inactive_split"]
        self._bytes, self._reserved = self.counts["allocated_bytes"], self.counts["reserved_bytes"]
        self._active_bytes, self._idle_bytes = self.counts["active_bytes"], self.counts["inactive_split_bytes"]
        self._requested = self.counts["requested_bytes"]

    def allocated(self, small: bool, size: int, requested: int) -> None:
        pool = 0 if small else 1
        self._allocations.rise(pool, 1)
        self._bytes.rise(pool, size)
        self._active.rise(pool, 1)
        self._active_bytes.rise(pool, size)
        self._requested.rise(pool, requested)

    def freed(self, small: bool, size: int, requested: int, in_use: bool) -> None:
        pool = 0 if small else 1
        self._allocations.fall(pool, 1)
        self._bytes.fall(pool, size)
        self._requested.fall(pool, requested)
        if not in_use:
            self.inactive(small, size)

    def inactive(self, small: bool, size: int) -> None:
        pool = 0 if small else 1
        self._active.fall(pool, 1)
        self._active_bytes.fall(pool, size)

    def idle(self, small: bool, size: int) -> None:
        """A free part of a segment that is in use: fragmentation."""
        pool = 0 if small else 1
        self._idle.rise(pool, 1)
        self._idle_bytes.rise(pool, size)

    def used(self, small: bool, size: int) -> None:
        """Such a part found a use, or became a part of another."""
        pool = 0 if small else 1
        self._idle.fall(pool, 1)
        self._idle_bytes.fall(pool, size)

    def reserve(self, small: bool, size: int) -> None:
        self._segments.rise(0 if small else 1, 1)
        self._reserved.rise(0 if small else 1, size)

    def give_back(self, small: bool, size: int) -> None:
        self._segments.fall(0 if small else 1, 1)
        self._reserved.fall(0 if small else 1, size)

    def reset_peak(self) -> None:
        for count in self.counts.values():
            count.peak = list(count.current)

    def reset_accumulated(self) -> None:
        for count in self.counts.values():
            count.forget()
        self.retries = self.failures = 0


def flat_stats(tally: Tally) -> dict[str, int]:
    stats: dict[str, int] = {}
    for kind, count in tally.counts.items():
        for index, pool in enumerate(_POOLS):
            stats[f"{kind}.{pool}.current"] = count.current[index]
            stats[f"{kind}.{pool}.peak"] = count.peak[index]
            stats[f"{kind}.{pool}.allocated"] = count.added[index]
            stats[f"{kind}.{pool}.freed"] = count.removed(index)
    segments = tally.counts["segment"]
    for kind in ("oversize_allocations", "oversize_segments"):
        stats |= {f"{kind}.{what}": 0 for what in ("current", "peak", "allocated", "freed")}
    return stats | {
        "num_alloc_retries": tally.retries,
        "num_ooms": tally.failures,
        "num_sync_all_streams": tally.retries,
        "num_device_alloc": segments.added[2],
        "num_device_free": segments.removed(2),
        "max_split_size": -1,
    }


def out_of_memory_text(device: int, wanted: int, size: int, free: int, tally: Tally) -> str:
    """As PyTorch words it."""
    allocated, reserved = tally.counts["allocated_bytes"].current[2], tally.counts["reserved_bytes"].current[2]
    return (
        f"CUDA out of memory. Tried to allocate {_bytes(wanted)}. GPU {device} has a total capacity of {_bytes(size)} "
        f"of which {_bytes(free)} is free. Including non-PyTorch memory, this process has {_bytes(size - free)} memory "
        f"in use. Of the allocated memory {_bytes(allocated)} is allocated by PyTorch, and "
        f"{_bytes(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _bytes(size: int) -> str:
    if size <= _KIB:
        return f"{size} bytes"
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / _KIB:.2f} KiB"
