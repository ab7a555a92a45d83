"""`torch.cuda`, `torch.accelerator` and `torch.backends`, where they must believe in the device."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from keepbusy.virtual import cuda_streams, driver
from keepbusy.virtual.cuda_graphs import AcceleratorGraph, CUDAGraph
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.driver import constantly, own
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.randomness import DEFAULTS, Generator


def patch() -> None:
    """From now on Python finds a GPU."""
    driver.install()
    _patch_initialization()
    _patch_classes()
    _patch_backends()
    for name, does in _FUNCTIONS.items():
        for module in (torch.cuda, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, own(does, name))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, own(constantly(0), name))


def _patch_initialization() -> None:
    cuda = torch.cuda
    torch.version.cuda = driver.CUDA
    ours = {name: own(does, name) for name, does in _INITIALIZATION.items()}
    driver.replace_copies({id(getattr(cuda, name)): does for name, does in ours.items()})
    for name, does in ours.items():
        setattr(cuda, name, does)
    cuda._is_compiled = own(constantly(True), "_is_compiled")
    cuda._exchange_device, cuda._maybe_exchange_device = own(CURRENT.change, "exchange"), own(CURRENT.change, "maybe")
    cuda.default_generators = DEFAULTS.all()


_asked: list[bool] = []


def _ask() -> None:
    if not _asked:
        _asked.append(True)


def not_asked_yet() -> None:
    """What came before was ours: as far as the program knows, nobody has touched a device."""
    _asked.clear()


def _is_initialized() -> bool:
    """Whether the program has asked for a device, had work done by one or holds memory of one."""
    stats = [MACHINE.memory.stats(device) for device in range(CURRENT.count)]
    return bool(_asked) or MACHINE.clock.launched or any(one["segment.all.allocated"] for one in stats)


_INITIALIZATION: dict[str, Callable[..., Any]] = {
    "init": _ask,
    "_lazy_init": _ask,
    "_lazy_call": lambda does, **_: does(),
    "is_initialized": _is_initialized,
}
"""Device meshes choose a process's device by its rank, unless the program has touched one."""


def _patch_classes() -> None:
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.ExternalStream = cuda_streams.Stream, cuda_streams.Stream
        module.Event = cuda_streams.Event
    torch.Stream, torch.Event = cuda_streams.Stream, cuda_streams.Event
    torch.cuda.StreamContext, torch.cuda.stream = cuda_streams.StreamContext, cuda_streams.StreamContext
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CUDAGraph
    if hasattr(torch.accelerator, "Graph"):
        torch.accelerator.Graph = AcceleratorGraph
    torch.Generator = Generator
    torch.cuda.nccl.is_available = own(
        constantly(False), "is_available"
    )  # its collectives between devices of a process
    # they go through what was replaced already, but slowly, and every training loop with a side stream calls them
    torch.cuda.current_stream, torch.cuda.set_stream = cuda_streams.current_stream, cuda_streams.set_stream


def _patch_backends() -> None:
    backends = torch.backends
    backends.cuda.is_built = own(constantly(True), "is_built")
    backends.cudnn.is_available = own(constantly(True), "is_available")
    backends.cudnn.version = own(constantly(driver.CUDNN), "version")
    # nothing may be laid out for cuDNN: recurrent networks would flatten their weights through native code
    backends.cudnn.is_acceptable = own(constantly(False), "is_acceptable")


def _properties(device: Any = None) -> types.SimpleNamespace:
    about = MACHINE.device
    if CURRENT.index(device) >= CURRENT.count:
        raise AssertionError("Invalid device id")
    major, minor = about.capability
    return types.SimpleNamespace(
        name=about.name,
        major=major,
        minor=minor,
        total_memory=about.memory.size,
        multi_processor_count=about.multiprocessors,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="0",
    )


def _use_device(device: Any) -> None:
    CURRENT.change(CURRENT.index(device))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": constantly(True),
    "device_count": lambda: CURRENT.count,
    "get_device_properties": _properties,
    "_get_device_properties": _properties,
    "set_device": _use_device,
    "get_arch_list": lambda: ["sm_{}{}".format(*MACHINE.device.capability)],
    "mem_get_info": lambda device=None: MACHINE.memory.info(CURRENT.index(device)),
    "ipc_collect": constantly(None),
    "utilization": constantly(0),
    "is_tf32_supported": lambda: MACHINE.device.capability >= (8, 0),
    "memory_summary": lambda device=None, abbreviated=False: _summary(CURRENT.index(device)),
}


def _summary(device: int) -> str:
    stats = MACHINE.memory.stats(device)
    rows = [
        f"{name:>40}  {value:>16,}" for name, value in sorted(stats.items()) if name.endswith((".current", ".peak"))
    ]
    return "\n".join([f"virtual {MACHINE.device.name}, device {device}", *rows])
