"""How long a thread was ready to go on and had no processor. Linux counts it; elsewhere nobody knows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keepbusy.instrument.children import when_imported
from keepbusy.instrument.patches import Function, Patches
from keepbusy.timeline.model import NONE

# What holds up the host between two marks, seen without a profiler: input, the garbage collector, checkpoints.

INPUT, COLLECTOR, CHECKPOINT = "input", "garbage collection", "checkpoint"


class Pauses:
    """`now` holds what each kind of pause took since the last mark."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.now = {INPUT: 0, COLLECTOR: 0, CHECKPOINT: 0}
        self._clock = clock
        self._thread = 0
        self._open: set[str] = set()
        self._collecting = 0
        self._patches = Patches()

    def begin(self) -> None:
        """From the thread whose pauses are meant; the pauses of others hold up nobody."""
        self._thread = threading.get_ident()
        import torch
        from torch.utils.data import dataloader

        self._patches.replace(torch, "save", self._timed(CHECKPOINT))
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._timed(INPUT))
        self._patches.replace(dataloader.DataLoader, "__iter__", self._timed(INPUT))
        when_imported("torch.distributed.checkpoint", self._time_distributed)
        gc.callbacks.append(self._collected)
        self._patches.later(lambda: gc.callbacks.remove(self._collected))

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()

    def take(self, what: str) -> int:
        """How long these pauses took since this was last asked."""
        time, self.now[what] = self.now[what], 0
        return time

    def _time_distributed(self) -> None:
        import torch.distributed.checkpoint as distributed

        for name in ("save", "async_save"):
            self._patches.replace(distributed, name, self._timed(CHECKPOINT))

    def _timed(self, what: str) -> Callable[[Function], Function]:
        """Stands in for a function, and notes how long it took, within another of its kind or not."""

        def made(original: Function) -> Function:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread or what in self._open:
                    return original(*args, **kwargs)
                self._open.add(what)
                began = self._clock()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.now[what] += self._clock() - began
                    self._open.discard(what)

            return timed

        return made

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        """The collector stops all threads, whichever it runs in."""
        if phase == "start":
            self._collecting = self._clock()
        elif self._collecting:
            self.now[COLLECTOR] += self._clock() - self._collecting
            self._collecting = 0


# How often PyTorch asked the driver for device memory: read once a second, for reading it takes tens of µs.
#
# In the steady state an allocator asks for nothing more. Where it does, each request (`cudaMalloc`) holds up the host,
# and a retry (memory was full, all that is cached was given back first) holds up the device as well.

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


def without_processor(thread: int) -> int:
    """Nanoseconds so far of the thread of this process with that native number; NONE where nobody knows."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return NONE
