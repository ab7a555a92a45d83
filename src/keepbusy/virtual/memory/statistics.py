"""What the allocator counts, under PyTorch's names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_POOLS = ("small_pool", "large_pool", "all")
_COUNTED = ("current", "peak", "allocated", "freed")
_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


class Totals:
    """What is counted of one pool or of both: blocks, their bytes, and the bytes asked for.

    Freed ones follow from what was allocated and what is left, so only one side is counted.
    """

    def __init__(self) -> None:
        self.now, self.peak, self.ever, self._base = np.zeros((4, 3), np.int64)

    def change(self, changes: npt.ArrayLike) -> None:
        """What came and went, a row a time, negative where it went."""
        rows = np.asarray(changes)
        if len(rows):
            course = self.now + np.cumsum(rows, axis=0)
            self.now, self.peak = course[-1], np.maximum(self.peak, course.max(axis=0))
            self.ever = self.ever + np.maximum(rows, 0).sum(axis=0)

    def add(self, size: int, asked: int) -> None:
        self.change([(1, size, asked)])

    def remove(self, size: int, asked: int) -> None:
        self.change([(-1, -size, -asked)])

    def reset_peak(self) -> None:
        self.peak = self.now

    def reset_accumulated(self) -> None:
        """Count what comes and goes from now on."""
        self.ever, self._base = np.zeros(3, np.int64), self.now

    def shown(self) -> list[list[int]]:
        """Current, peak, allocated and freed: of blocks, of bytes and of bytes asked for."""
        rows: list[list[int]] = np.array([self.now, self.peak, self.ever, self._base + self.ever - self.now]).T.tolist()
        return rows

    @property
    def bytes(self) -> int:
        """Those in use."""
        return int(self.now[1])


class Tally:
    """One device's figures. Each is kept for the small pool, the large one, and both together."""

    def __init__(self) -> None:
        self.journal: list[tuple[bool, int, int, int]] = []
        """Of blocks that came into use or went out of it: whether of the small pool, and what `Totals` counts."""
        self._used = [Totals(), Totals(), Totals()]
        self.segments = [Totals(), Totals(), Totals()]
        self.waiting = [Totals(), Totals(), Totals()]  # freed, and still in use by another stream
        self.fragments = [Totals(), Totals(), Totals()]  # free parts of segments that are in use: fragmentation
        self.retries = self.failures = 0

    @property
    def used(self) -> list[Totals]:
        """With what the journal says, which is read where somebody asks: to write it down takes less at each call."""
        if self.journal:
            rows = np.array(self.journal, np.int64)
            self.journal.clear()
            small = rows[:, 0] == 1
            for figures, mine in zip(self._used, (rows[small], rows[~small], rows), strict=True):
                figures.change(mine[:, 1:])
        return self._used

    def all(self) -> list[Totals]:
        return [*self.used, *self.segments, *self.waiting, *self.fragments]

    def reset_peak(self) -> None:
        for figures in self.all():
            figures.reset_peak()

    def reset_accumulated(self) -> None:
        for figures in self.all():
            figures.reset_accumulated()
        self.retries = self.failures = 0

    def set_fragments(self, sizes: list[list[int]]) -> None:
        """Fragmentation is looked up where somebody asks, or a segment is needed: its peak is that of these moments."""
        for figures, mine in zip(self.fragments, (*sizes, sizes[0] + sizes[1]), strict=True):
            figures.now = figures.ever = np.array([len(mine), sum(mine), 0])
            figures.peak = np.maximum(figures.peak, figures.now)


def flat_stats(tally: Tally) -> dict[str, int]:
    """As `torch.cuda.memory_stats` has them."""
    stats: dict[str, int] = {}
    for index, pool in enumerate(_POOLS):
        blocks, sizes, asked = tally.used[index].shown()
        _put(stats, "allocation", pool, blocks)
        _put(stats, "allocated_bytes", pool, sizes)
        _put(stats, "requested_bytes", pool, asked)
        waiting = tally.waiting[index].shown()
        _put(stats, "active", pool, _active(blocks, waiting[0]))
        _put(stats, "active_bytes", pool, _active(sizes, waiting[1]))
        for kind, figures in (("segment", tally.segments[index]), ("inactive_split", tally.fragments[index])):
            counted, summed, _ = figures.shown()
            _put(stats, kind, pool, counted)
            _put(stats, "reserved_bytes" if kind == "segment" else "inactive_split_bytes", pool, summed)
    for kind in ("oversize_allocations", "oversize_segments"):
        stats |= {f"{kind}.{what}": 0 for what in _COUNTED}
    return stats | {
        "num_alloc_retries": tally.retries,
        "num_ooms": tally.failures,
        "num_sync_all_streams": tally.retries,
        "num_device_alloc": stats["segment.all.allocated"],
        "num_device_free": stats["segment.all.freed"],
        "max_split_size": -1,
    }


def _put(stats: dict[str, int], kind: str, pool: str, values: list[int]) -> None:
    for what, value in zip(_COUNTED, values, strict=True):
        stats[f"{kind}.{pool}.{what}"] = value


def _active(used: list[int], waiting: list[int]) -> list[int]:
    """Active is what is allocated, and what is freed but still in use elsewhere."""
    current = used[0] + waiting[0]
    return [current, max(used[1], current), used[2], used[3] - waiting[0]]


def out_of_memory_text(device: int, wanted: int, size: int, free: int, tally: Tally, allowed: int | None) -> str:
    """As PyTorch words it."""
    limit = "" if allowed is None else f"{_bytes(allowed)} allowed; "
    allocated, reserved = tally.used[2].bytes, tally.segments[2].bytes
    return (
        f"CUDA out of memory. Tried to allocate {_bytes(wanted)}. GPU {device} has a total capacity of {_bytes(size)} "
        f"of which {_bytes(free)} is free. Including non-PyTorch memory, this process has {_bytes(size - free)} memory "
        f"in use. {limit}Of the allocated memory {_bytes(allocated)} is allocated by PyTorch, and "
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
