"""PyTorch's private functions for CUDA, `torch._C._cuda_*`: answered by the virtual machine, or refused by name.

Most of `torch.cuda` is Python on top of these, and works unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from keepbusy.virtual import cuda_streams, data_parallel, sync_debug
from keepbusy.virtual.cuda_graphs import graph_pool_handle
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.hooks import CUDNN
from keepbusy.virtual.machine import MACHINE

CUDA = torch.version.cuda or "13.0"
"""A build that has CUDA keeps its version: packages with code of their own were built for the same and look."""
NCCL_VERSION = 2 << 32 | 27 << 16 | 3
_CUDA = 1
_BUILD = torch._C._show_config()
"""What PyTorch says of itself. Once it believes in CUDA it asks a library that need not be there."""
_KEPT = (
    "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", "_cuda_get_conv_benchmark_empty_cache",
    "_cuda_tunableop", "_cuda_record_untuned", "_cuda_CUDAAllocator", "_cuda_getAllocatorBackend",
)  # fmt: skip
"""They only read or write settings."""


def install() -> None:
    """Put our answers in place; whatever else would touch a driver refuses."""
    inside = torch._C
    natives = [name for name in dir(inside) if name.startswith(("_cuda_", "_nccl_")) and not name.startswith(_KEPT)]
    ours = {name: _refusal(name) for name in natives}
    ours |= {name: own(answer, name) for name, answer in (ANSWERS | data_parallel.ANSWERS).items()}
    before = {name: getattr(inside, name) for name in ours if hasattr(inside, name)}
    for name, answer in ours.items():
        setattr(inside, name, answer)
    replace_copies({id(native): ours[name] for name, native in before.items()})


def replace_copies(ours: Mapping[int, Callable[..., Any]]) -> None:
    """Modules of PyTorch that imported a function by its name hold on to the native one."""
    for module in [one for name, one in sys.modules.items() if name.startswith("torch.")]:
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                setattr(module, name, ours[id(value)])


def own(does: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function object of its own: the compiler's tables refuse two names for one object."""

    @functools.wraps(does)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return does(*args, **kwargs)

    answer.__name__ = name
    return answer


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"keepbusy's virtual GPU does not know torch._C.{name}.")

    refuse.__name__ = name
    return refuse


def constantly(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _current_stream(device: int = -1) -> tuple[int, int, int]:
    index = CURRENT.index(device)
    return MACHINE.stream(index), index, _CUDA


def _default_stream(device: int = -1) -> tuple[int, int, int]:
    index = CURRENT.index(device)
    return MACHINE.clock.default_stream(index), index, _CUDA


def _set_stream(stream_id: int, device_index: int, device_type: int = _CUDA) -> None:
    CURRENT.change(device_index)
    MACHINE.choose_stream(device_index, stream_id)


def _show_config() -> str:
    """The build's own words, and in between those of a build with CUDA, which divides versions so."""
    runtime = f"  - CUDA Runtime {CUDA}\n"
    before, settings, after = _BUILD.partition("  - Build settings")
    cudnn = f"  - CuDNN {CUDNN // 1000}.{CUDNN // 100 % 10}.{CUDNN % 100}\n"
    return before + runtime + cudnn + settings + after


def _compiled_version() -> int:
    major, minor = CUDA.split(".")
    return 1000 * int(major) + 10 * int(minor)


def _set_device(device: int) -> None:
    CURRENT.change(device)


def _memory_stats(device: int) -> dict[str, Any]:
    return MACHINE.memory.stats(CURRENT.index(device))


def _reset_peak(device: int) -> None:
    MACHINE.memory.reset_peak(CURRENT.index(device))


def empty_cache(device: int | None = None) -> None:
    """Of one device, or of all that have been used."""
    MACHINE.begin("cudaFree")
    try:
        MACHINE.clock.allocate("emptyCache", MACHINE.device.host.event)  # a row even where nothing is freed
        for one in range(CURRENT.count) if device is None else (device,):
            MACHINE.memory.empty_cache(one)
    finally:
        MACHINE.end()


def _snapshot(*_args: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}


def _sleep(cycles: int) -> None:
    nanoseconds = int(cycles / 1.98)  # at the clock rate of an H200
    MACHINE.clock.launch_all(MACHINE.stream(CURRENT.device), [("spin_kernel", nanoseconds)])


ANSWERS: dict[str, Callable[..., Any]] = {
    "_show_config": _show_config,
    "_cuda_init": constantly(None),
    "_cuda_isInBadFork": constantly(False),
    "_cuda_getDeviceCount": lambda: CURRENT.count,
    "_cuda_getDevice": lambda: CURRENT.device,
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": CURRENT.change,
    "_cuda_maybeExchangeDevice": CURRENT.change,
    "_cuda_hasPrimaryContext": constantly(True),
    "_cuda_canDeviceAccessPeer": constantly(True),
    "_cuda_synchronize": cuda_streams.synchronize,
    "_cuda_getCurrentStream": _current_stream,
    "_cuda_getDefaultStream": _default_stream,
    "_cuda_getCurrentRawStream": constantly(0),
    "_cuda_setStream": _set_stream,
    "_graph_pool_handle": graph_pool_handle,
    "_host_emptyCache": constantly(None),
    "_cuda_isCurrentStreamCapturing": lambda: cuda_streams.current_stream().is_capturing(),
    "_cuda_getCurrentBlasHandle": constantly(0),
    "_cuda_clearCublasWorkspaces": constantly(None),
    "_cuda_getCompiledVersion": _compiled_version,
    "_cuda_getArchFlags": lambda: "sm_{}{}".format(*MACHINE.device.capability),
    "_cuda_set_sync_debug_mode": sync_debug.set_mode,
    "_cuda_get_sync_debug_mode": sync_debug.mode,
    "_cuda_endAllocateToPool": constantly(None),  # a capture that ends, well or not, has told the allocator
    "_cuda_releasePool": constantly(None),
    "_cuda_sleep": _sleep,
    "_cuda_emptyCache": empty_cache,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": _reset_peak,
    "_cuda_resetAccumulatedMemoryStats": constantly(None),
    "_cuda_hostMemoryStats": constantly({}),
    "_cuda_resetPeakHostMemoryStats": constantly(None),
    "_cuda_resetAccumulatedHostMemoryStats": constantly(None),
    "_cuda_setMemoryFraction": constantly(None),
    "_cuda_memorySnapshot": _snapshot,
    "_cuda_record_memory_history": constantly(None),
    "_cuda_record_memory_history_legacy": constantly(None),
    "_cuda_isHistoryEnabled": constantly(False),
    "_cuda_ipc_collect": constantly(None),
    "_nccl_version": constantly(NCCL_VERSION),
    "_nccl_version_suffix": constantly(b""),
    "_accelerator_isAllocatorInitialized": constantly(True),
    "_accelerator_emptyCache": empty_cache,
    "_accelerator_emptyHostCache": constantly(None),
    "_accelerator_getDeviceStats": _memory_stats,
    "_accelerator_resetPeakStats": _reset_peak,
    "_accelerator_resetAccumulatedStats": constantly(None),
    "_accelerator_getMemoryInfo": lambda device: MACHINE.memory.info(CURRENT.index(device)),
    "_accelerator_getStream": cuda_streams.current_stream,
    "_accelerator_setStream": cuda_streams.set_stream,
    "_accelerator_synchronizeDevice": cuda_streams.synchronize,
    "_accelerator_setDeviceIndex": _set_device,
    "_accelerator_getDeviceIndex": lambda: CURRENT.device,
    "_accelerator_exchangeDevice": CURRENT.change,
    "_accelerator_maybeExchangeDevice": CURRENT.change,
    "_accelerator_getAccelerator": lambda: torch.device("cuda"),
    "_get_accelerator": lambda _check=None: torch.device("cuda"),
}

__all__ = ["ANSWERS", "CUDA", "CUDNN", "constantly", "empty_cache", "install", "own", "replace_copies"]
