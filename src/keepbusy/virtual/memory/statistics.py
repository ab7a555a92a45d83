"""What the allocator counts, under PyTorch's names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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

    def reset_accumulated(self) -> None:
        """Count what comes and goes from now on."""
        self.ever, self._base = np.zeros(3, np.int64), self.now

    def shown(self) -> list[list[int]]:
        """Current, peak, allocated and freed: of blocks, of bytes and of bytes asked for."""
        rows: list[list[int]] = np.array([self.now, self.peak, self.ever, self._base + self.ever - self.now]).T.tolist()
        return rows


class Tally:
    """One device's figures. Each is kept for the small pool, the large one, and both together."""

    def __init__(self) -> None:
        self.journal: list[tuple[bool, int, int, int]] = []
        """Of blocks that came into use or went out of it: whether of the small pool, and what `Totals` counts."""
        self._used, self.segments, self.waiting, self.fragments = ([Totals(), Totals(), Totals()] for _ in range(4))
        # waiting: freed, and still in use by another stream; fragments: free parts of segments that are in use
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

    def set_fragments(self, sizes: list[list[int]]) -> None:
        """Fragmentation is looked up where somebody asks, or a segment is needed: its peak is that of these moments."""
        for figures, mine in zip(self.fragments, (*sizes, sizes[0] + sizes[1]), strict=True):
            figures.now = figures.ever = np.array([len(mine), sum(mine), 0])
            figures.peak = np.maximum(figures.peak, figures.now)


def count(kind: list[Totals], small: bool, change: int, size: int, asked: int) -> None:
    """A block that came (1) or went (-1)."""
    for figures in (kind[0 if small else 1], kind[2]):
        figures.change([(change, change * size, change * asked)])


def flat_stats(tally: Tally) -> dict[str, int]:
    """As `torch.cuda.memory_stats` has them."""
    shown: dict[str, list[int]] = {"oversize_allocations": [0] * 4, "oversize_segments": [0] * 4}
    for index, pool in enumerate(("small_pool", "large_pool", "all")):
        kinds = (tally.used, tally.segments, tally.waiting, tally.fragments)
        (blocks, sizes, asked), segments, waiting, fragments = (kind[index].shown() for kind in kinds)
        shown |= {
            f"allocation.{pool}": blocks,
            f"allocated_bytes.{pool}": sizes,
            f"requested_bytes.{pool}": asked,
            f"active.{pool}": _active(blocks, waiting[0]),
            f"active_bytes.{pool}": _active(sizes, waiting[1]),
            f"segment.{pool}": segments[0],
            f"reserved_bytes.{pool}": segments[1],
            f"inactive_split.{pool}": fragments[0],
            f"inactive_split_bytes.{pool}": fragments[1],
        }
    counted = ("current", "peak", "allocated", "freed")
    stats = {f"{kind}.{what}": one for kind, values in shown.items() for what, one in zip(counted, values, strict=True)}
    return stats | {
        "num_alloc_retries": tally.retries,
        "num_ooms": tally.failures,
        "num_sync_all_streams": tally.retries,
        "num_device_alloc": stats["segment.all.allocated"],
        "num_device_free": stats["segment.all.freed"],
        "max_split_size": -1,
    }


def _active(used: list[int], waiting: list[int]) -> list[int]:
    """Active is what is allocated, and what is freed but still in use elsewhere."""
    current = used[0] + waiting[0]
    return [current, max(used[1], current), used[2], used[3] - waiting[0]]


def out_of_memory_text(device: int, wanted: int, size: int, free: int, tally: Tally, allowed: int | None) -> str:
    """As PyTorch words it."""
    limit = "" if allowed is None else f"{_bytes(allowed)} allowed; "
    allocated, reserved = int(tally.used[2].now[1]), int(tally.segments[2].now[1])
    return (
        f"CUDA out of memory. Tried to allocate {_bytes(wanted)}. GPU {device} has a total capacity of {_bytes(size)} "
        f"of which {_bytes(free)} is free. Including non-PyTorch memory, this process has {_bytes(size - free)} memory "
        f"in use. {limit}Of the allocated memory {_bytes(allocated)} is allocated by PyTorch, and "
        f"{_bytes(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _bytes(size: int) -> str:
    if size <= 1 << 10:
        return f"{size} bytes"
    unit, name = next(((1 << at, name) for at, name in ((30, "GiB"), (20, "MiB")) if size > 1 << at), (1 << 10, "KiB"))
    return f"{size / unit:.2f} {name}"
