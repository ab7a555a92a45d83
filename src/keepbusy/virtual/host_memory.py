"""Pinned memory of the host, as PyTorch's caching allocator keeps it."""

from __future__ import annotations

from keepbusy.timeline.model import NONE
from keepbusy.virtual.clock import Clock


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
