"""How often PyTorch asked the driver for device memory: read once a second, for reading it takes tens of µs.

In the steady state an allocator asks for nothing more. Where it does, each request (`cudaMalloc`) holds up the host,
and a retry (memory was full, all that is cached was given back first) holds up the device as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

INTERVAL = 1_000_000_000
MOST = 2048
"""Readings that are kept; of more, every other one goes."""


class Reading(NamedTuple):
    """What the allocator had counted by the mark of this number."""

    mark: int
    requests: int  # cudaMalloc
    retries: int


class Allocations:
    """Readings of the allocator's counters, the oldest first."""

    def __init__(self, counters: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.readings: list[Reading] = []
        self._counters = counters or _of_cuda
        self._next = 0

    def read(self, mark: int, now: int) -> None:
        """At a mark. Most of them come too early to read anything."""
        if now < self._next:
            return
        self._next = now + INTERVAL
        counted = self._counters()
        if "num_alloc_retries" in counted:
            self.readings.append(Reading(mark, counted.get("num_device_alloc", 0), counted["num_alloc_retries"]))
        if len(self.readings) > MOST:
            del self.readings[1::2]


def _of_cuda() -> Mapping[str, Any]:
    """PyTorch's own, not flattened, which is the cheaper half. Empty before the device is used."""
    import torch

    return torch.cuda.memory_stats_as_nested_dict()
