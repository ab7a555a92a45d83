"""What is counted over a whole run and needs no profiler: what holds the program up (its input, the garbage collector,
checkpoints, the allocator, other work on its processor), and how long its GPU is at work."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keepbusy.instrument.patches import Function, Patches, when_imported
from keepbusy.instrument.processes import processor_times, uses_gpu
from keepbusy.timeline.model import NONE, Ints

INPUT, COLLECTOR, CHECKPOINT = "input", "garbage collection", "checkpoint"


class Pauses:
    """`now` holds what each kind of pause took since the last mark."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.now = {INPUT: 0, COLLECTOR: 0, CHECKPOINT: 0}
        self.came: Callable[[Any, int, int], object] = lambda *_: None
        """Told of each batch: its iterator, since when it was waited for, and until when."""
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
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._waiting)
        self._patches.replace(dataloader.DataLoader, "__iter__", self._timed(INPUT))
        when_imported("torch.distributed.checkpoint", self._time_distributed)
        gc.callbacks.append(self._collected)
        self._patches.later(lambda: gc.callbacks.remove(self._collected))

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()

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

    def _waiting(self, original: Function) -> Function:
        """A loader may draw from another: that is one wait, and a batch of each."""

        def waiting(iterator: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(iterator)
            before, is_outer = self._clock(), INPUT not in self._open
            self._open.add(INPUT)
            try:
                batch = original(iterator)
            finally:
                after = self._clock()
                if is_outer:
                    self.now[INPUT] += after - before
                    self._open.discard(INPUT)
            with suppress(Exception):  # whatever goes wrong here is ours, and no business of the program's
                self.came(iterator, before, after)
            return batch

        return waiting

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

BETWEEN_READINGS = 1_000_000_000
KEPT_READINGS = 2048
"""Readings that are kept; of more, every other one goes."""


class AllocatorReading(NamedTuple):
    """What the allocator had counted by the mark of this number."""

    mark: int
    requests: int  # cudaMalloc
    retries: int


class Allocations:
    """Readings of the allocator's counters, the oldest first."""

    def __init__(self, counters: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.readings: list[AllocatorReading] = []
        self.due = 0
        self._counters = counters or _of_cuda

    def read(self, mark: int, now: int) -> None:
        """At the first mark after it was due."""
        self.due = now + BETWEEN_READINGS
        counted = self._counters()
        if "num_alloc_retries" in counted:
            self.readings.append(
                AllocatorReading(mark, counted.get("num_device_alloc", 0), counted["num_alloc_retries"])
            )
        if len(self.readings) > KEPT_READINGS:
            del self.readings[1::2]


def _of_cuda() -> Mapping[str, Any]:
    """PyTorch's own, not flattened, which is the cheaper half. Empty before the device is used."""
    import torch

    return torch.cuda.memory_stats_as_nested_dict()


def without_processor(thread: int) -> int:
    """Nanoseconds so far of the thread of this process with that native number; NONE where nobody knows."""
    times = processor_times(thread)
    return NONE if times is None else times[1]


# How long the GPU was at work over a whole run, from the samples that its driver keeps anyway: nothing is recorded.
#
# The driver (NVML) tells five times a second which share of the time since the last sample a kernel ran. Known shares
# of 9 to 89% were read within 4 points, down to kernels of 10 µs.

_UTILIZATION = 1
_SAMPLE_REACH = 1_000_000_000
"""Samples further apart than this say nothing of the time between them."""


class _Sample(ctypes.Structure):
    _fields_ = (("time", ctypes.c_ulonglong), ("share", ctypes.c_ulonglong))  # microseconds since 1970; percent


class GpuShare:
    """Samples of the GPU that this process uses, once it uses one."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.times = array("q")
        self.shares = array("d")
        self._clock = clock
        self._to_clock = clock() - time.time_ns()
        self._began = time.time_ns() // 1000
        self._library: Any = None
        self._device: Any = None
        self._last = self._began
        self.fault = ""

    def read(self) -> None:
        """What has come since the last time. Its keeper holds some twenty seconds of samples."""
        if self.fault or not (self._device or self._find()):
            return
        count, kind = ctypes.c_uint(0), ctypes.c_int(0)
        sought = (self._device, _UTILIZATION, ctypes.c_ulonglong(self._last), ctypes.byref(kind), ctypes.byref(count))
        if self._library.nvmlDeviceGetSamples(*sought, None) or not count.value:
            return
        samples = (_Sample * count.value)()
        if self._library.nvmlDeviceGetSamples(*sought, samples):
            return
        for sample in samples[: count.value]:
            if sample.time > self._last:
                self._last = sample.time
                self.times.append(sample.time * 1000 + self._to_clock)
                self.shares.append((sample.share & 0xFFFFFFFF) / 100)

    def busy_until(self, moments: Ints) -> npt.NDArray[np.float64]:
        """How long the GPU was at work until each of these moments; before the first sample it was not."""
        times, shares = np.array(self.times, np.int64), np.array(self.shares)
        order = np.argsort(times, kind="stable")
        times, shares = times[order], shares[order]
        apart = np.diff(times, prepend=times[:1] - 200_000_000)
        worked = np.concatenate([[0.0], np.cumsum(shares * np.minimum(apart, _SAMPLE_REACH))])
        edges = np.concatenate([times[:1] - 200_000_000, times])
        return np.interp(moments, edges, worked)

    def __bool__(self) -> bool:
        return len(self.times) > 1

    def _find(self) -> bool:
        """The device that PyTorch works on in this process; nobody is waked for it."""
        if not uses_gpu():
            return False
        import torch

        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            device = ctypes.c_void_p()
            number = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(
                number.encode(), ctypes.byref(device)
            ):
                self.fault = "the driver does not know the GPU by its number"
                return False
            self._device = device
        except (OSError, AttributeError, RuntimeError) as error:
            self.fault = f"{type(error).__name__}: {error}"
        return self._device is not None
