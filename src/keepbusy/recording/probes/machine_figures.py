"""What a GPU and its host can do, measured in a few seconds: launches, copies, products, memory.

Every figure is the median of several rounds. Host times are read from `now`, device times from events, so that the
virtual GPU can be measured like a real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

ROUNDS = 5
CALLS = 200
"""Launches in a row: fewer than a stream's queue holds, so none of them waits."""
MEGABYTE = 1_000_000
DTYPES = ("bfloat16", "float16", "tfloat32", "float32")


@dataclass(frozen=True)
class MachineFigures:
    """A GPU and its host. Times are nanoseconds, bandwidths bytes and rates operations a nanosecond."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    launch: int  # the host's time for an operator that launches one kernel
    view: int  # the host's time for one that launches none
    read: int  # `.item()` on an idle GPU
    malloc: int  # what asking the driver for memory adds to an allocation
    free: int  # giving it back, on an idle device
    pinning: float  # nanoseconds a byte, of memory that was never pinned before
    to_device: float  # pinned
    to_host: float
    pageable_to_device: float
    pageable_to_host: float
    bandwidth: float  # of the memory: read and written
    products: dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """How large the probes are."""

    copied: int = 256 * MEGABYTE
    streamed: int = 1024 * MEGABYTE
    product: int = 8192


def measure(
    sizes: Sizes | None = None,
    now: Callable[[], int] = time.perf_counter_ns,
    on_progress: Callable[[str], object] = lambda _what: None,
) -> MachineFigures:
    """Measure the current device. It should be idle, and so should its host."""
    sizes = sizes or Sizes()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sizes = _that_fit(sizes, properties.total_memory)
    on_progress("launches")
    one = torch.ones(16, device="cuda")
    launch, view = _host_time(lambda: one.mul_(1), now), _host_time(lambda: one.view(4, 4), now)
    read = _alone(one[0].item, now)
    on_progress("memory")
    malloc, free = _driver_calls(now)
    on_progress("copies")
    pinning = _pinning(sizes.copied, now)
    inward, home = _copies(sizes.copied)
    on_progress("matrix products")
    return MachineFigures(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        memory=properties.total_memory,
        launch=launch,
        view=view,
        read=read,
        malloc=malloc,
        free=free,
        pinning=pinning,
        to_device=inward[0],
        to_host=home[0],
        pageable_to_device=inward[1],
        pageable_to_host=home[1],
        bandwidth=_bandwidth(sizes.streamed),
        products={dtype: _product(dtype, sizes.product) for dtype in DTYPES},
    )


def _that_fit(sizes: Sizes, memory: int) -> Sizes:
    """On a small device smaller ones."""
    share = memory // 10
    return Sizes(min(sizes.copied, share), min(sizes.streamed, share), sizes.product)


def _host_time(call: Callable[[], object], now: Callable[[], int]) -> int:
    """A call's share of a row of calls, while the device is not yet behind."""
    spent = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        begun = now()
        for _ in range(CALLS):
            call()
        spent.append((now() - begun) / CALLS)
    torch.cuda.synchronize()
    return round(median(spent[1:]))


def _alone(call: Callable[[], object], now: Callable[[], int]) -> int:
    """A call on an idle device, until it comes back."""
    spent = []
    for _ in range(4 * ROUNDS):
        torch.cuda.synchronize()
        begun = now()
        call()
        spent.append(now() - begun)
    return round(median(spent[1:]))


def _driver_calls(now: Callable[[], int]) -> tuple[int, int]:
    """What a segment of its own costs, taken from the driver and given back."""
    taken, given = [], []
    for _ in range(ROUNDS + 1):
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        begun = now()
        block = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device="cuda")
        taken.append(now() - begun)
        del block
        begun = now()
        torch.cuda.empty_cache()
        given.append(now() - begun)
    return round(median(taken[1:])), round(median(given[1:]))


def _pinning(size: int, now: Callable[[], int]) -> float:
    """Once: memory that was pinned before comes from a cache."""
    begun = now()
    torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return (now() - begun) / size


def device_time(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Nanoseconds of the device, or of the host where it waits for each call."""
    spent = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e6)
    return max(median(spent[1:]), 1.0)


def _copies(size: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """To the device and home, each pinned and pageable, in bytes a nanosecond."""
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    pageable = torch.zeros(size, dtype=torch.uint8)  # touched, so that no page is mapped on the way
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def both(copy: Callable[[Tensor], object]) -> tuple[float, float]:
        return size / device_time(lambda: copy(pinned)), size / device_time(lambda: copy(pageable))

    return (
        both(lambda host: device.copy_(host, non_blocking=True)),
        both(lambda host: host.copy_(device, non_blocking=True)),
    )


def _bandwidth(size: int) -> float:
    """Bytes read and written a nanosecond, by an operator on more than any cache holds."""
    source = torch.zeros(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / device_time(lambda: torch.mul(source, 2, out=target))


def _product(dtype: str, size: int) -> float:
    """Operations a nanosecond. Float32 is measured as PyTorch computes it by default, without TF32, and with it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    try:
        kind = torch.float32 if dtype.endswith("float32") else getattr(torch, dtype)
        # drawn, not constant: a GPU multiplies zeros with less power, and so faster
        one, other = (torch.randn(size, size, device="cuda").to(kind) for _ in range(2))
        return 2 * size**3 / device_time(lambda: torch.mm(one, other))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
