"""How long the GPU was at work over a whole run, from the samples that its driver keeps anyway: nothing is recorded.

The driver (NVML) tells five times a second which share of the time since the last sample a kernel ran. Known shares of
9 to 89% were read within 4 points, down to kernels of 10 µs.
"""

from __future__ import annotations

import ctypes
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import Ints

_UTILIZATION = 1
_SAMPLE_REACH = 1_000_000_000
"""Samples further apart than this say nothing of the time between them."""


class _Sample(ctypes.Structure):
    _fields_ = (("time", ctypes.c_ulonglong), ("share", ctypes.c_ulonglong))  # microseconds since 1970; percent


def is_used() -> bool:
    """Whether the program uses its GPU by now; asked from beside it, which may be while it imports PyTorch."""
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


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
        if not is_used():
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
