"""Tensors moved between the devices of one process: what `torch.nn.DataParallel` is made of.

PyTorch has this in C++, for CUDA builds only. Copies are asked not to block, as there.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from keepbusy.virtual.clock.streams import BEGINNING
from keepbusy.virtual.current_device import CURRENT
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.cpp_hooks import CUDNN
from keepbusy.virtual.pytorch.cuda_graphs import AcceleratorGraph, CUDAGraph, graph_pool_handle
from keepbusy.virtual.pytorch.randomness import DEFAULTS, GeneratorOfAnyDevice

# `torch.cuda.set_sync_debug_mode`: a warning wherever the host is about to wait for the device, or an error instead.
#
# PyTorch sees copies that block, reads, and `Stream.synchronize`; not events, nor `torch.cuda.synchronize`, nor what the
# driver makes of a copy that was asked not to block. So do we.

DEFAULT, WARN, ERROR = range(3)
_TEXT = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
_OURS = str(Path(__file__).parents[1])
_mode = [DEFAULT]
_said: list[bool] = []


def set_mode(mode: int) -> None:
    if mode not in (DEFAULT, WARN, ERROR):
        raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
    if not _said:
        _said.append(True)
        _warn(_PROTOTYPE)
    _mode[0] = mode


def mode() -> int:
    return _mode[0]


def about_to_wait() -> None:
    """The host will wait for the device; nothing is copied yet."""
    if _mode[0] == ERROR:
        raise RuntimeError(_TEXT)
    if _mode[0] == WARN:
        _warn(_TEXT)


def _warn(text: str) -> None:
    """At the line that called PyTorch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


# `torch.cuda.Stream` and `torch.cuda.Event`, on the virtual clock.

_CUDA = 1  # c10::DeviceType


class Event:
    """A point in the order of a stream. Until it is recorded, nobody waits for it."""

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            raise NotImplementedError("keepbusy's virtual GPU has no events that processes share.")
        self.moment = BEGINNING
        self.device: torch.device | None = None if device is None else torch.device("cuda", CURRENT.index(device))
        self._has_timing, self._is_external = enable_timing, external

    @property
    def cuda_event(self) -> int:
        return id(self)

    event_id = cuda_event

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self.device = stream.device
        if self._is_external and stream.is_capturing():
            raise NotImplementedError("keepbusy's virtual GPU records no external events within CUDA graphs.")
        self.moment = MACHINE.clock.record(stream.lane)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self.moment is BEGINNING or MACHINE.clock.query(self.moment)

    def synchronize(self) -> None:
        with _here("cudaEventSynchronize"):
            MACHINE.clock.sync_moment(self.moment)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        if not (self._has_timing and end_event._has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if BEGINNING in (self.moment, end_event.moment):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return MACHINE.clock.elapsed(self.moment, end_event.moment) / 1e6

    def ipc_handle(self) -> bytes:
        raise NotImplementedError("keepbusy's virtual GPU has no events that processes share.")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'uninitialized' if self.moment is BEGINNING else hex(id(self))}>"


class Stream:
    """An in-order queue of one device; two objects of the same queue are equal."""

    lane: int
    device_index: int
    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Self:
        index = given.get("device_index", CURRENT.index(device))
        lane = given.get("stream_id")
        return cls._of(index, MACHINE.clock.new_stream(index) if lane is None else lane, priority)

    @classmethod
    def _of(cls, index: int, lane: int, priority: int = 0) -> Self:
        stream = object.__new__(cls)
        stream.device_index, stream.lane, stream.priority = index, lane, priority
        return stream

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def stream_id(self) -> int:
        return self.lane

    @property
    def cuda_stream(self) -> int:
        return 0 if self.lane == MACHINE.clock.default_stream(self.device_index) else self.lane

    native_handle = cuda_stream
    device_type = _CUDA

    def synchronize(self) -> None:
        about_to_wait()
        with _here("cudaStreamSynchronize"):
            MACHINE.clock.sync_stream(self.lane)

    def wait_event(self, event: Event) -> None:
        MACHINE.clock.wait(self.lane, event.moment)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return MACHINE.clock.idle(self.lane)

    def is_capturing(self) -> bool:
        return MACHINE.clock.capturing(self.lane)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.lane, self.device_index) == (other.lane, other.device_index)

    def __hash__(self) -> int:
        return hash((self.lane, self.device_index))

    def __enter__(self) -> Self:
        self._inside = StreamContext(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class StreamContext:
    """`with torch.cuda.stream(...)`: its stream and device are the current ones inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            MACHINE.clock.spend(MACHINE.device.host.event)
            self._device = CURRENT.change(self.stream.device_index)
            self._before = MACHINE.choose_stream(self.stream.device_index, self.stream.lane)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            MACHINE.clock.spend(MACHINE.device.host.event)
            MACHINE.choose_stream(self.stream.device_index, self._before)
            CURRENT.change(self._device)


def current_stream(device: Any = None) -> Stream:
    index = CURRENT.index(device)
    return Stream._of(index, MACHINE.stream(index))


def default_stream(device: Any = None) -> Stream:
    index = CURRENT.index(device)
    return Stream._of(index, MACHINE.clock.default_stream(index))


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        CURRENT.change(stream.device_index)
        MACHINE.choose_stream(stream.device_index, stream.lane)


def synchronize(device: Any = None) -> None:
    with _here("cudaDeviceSynchronize"):
        MACHINE.clock.sync_device(CURRENT.index(device))


class _here:  # noqa: N801  # reads as a word: with _here("cudaDeviceSynchronize")
    """What happens inside stands at the line that called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        MACHINE.begin(self.name)

    def __exit__(self, *error: object) -> None:
        MACHINE.end()


# PyTorch's private functions for CUDA, `torch._C._cuda_*`: answered by the virtual machine, or refused by name.
#
# Most of `torch.cuda` is Python on top of these, and works unchanged.

CUDA = torch.version.cuda or "13.0"
"""A build that has CUDA keeps its version: packages with code of their own were built for the same and look."""
NCCL_VERSION = 2 << 32 | 27 << 16 | 3
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
    ours |= {name: own(answer, name) for name, answer in (DRIVER_ANSWERS | DATA_PARALLEL_ANSWERS).items()}
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


DRIVER_ANSWERS: dict[str, Callable[..., Any]] = {
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
    "_cuda_synchronize": synchronize,
    "_cuda_getCurrentStream": _current_stream,
    "_cuda_getDefaultStream": _default_stream,
    "_cuda_getCurrentRawStream": constantly(0),
    "_cuda_setStream": _set_stream,
    "_graph_pool_handle": graph_pool_handle,
    "_host_emptyCache": constantly(None),
    "_cuda_isCurrentStreamCapturing": lambda: current_stream().is_capturing(),
    "_cuda_getCurrentBlasHandle": constantly(0),
    "_cuda_clearCublasWorkspaces": constantly(None),
    "_cuda_getCompiledVersion": _compiled_version,
    "_cuda_getArchFlags": lambda: "sm_{}{}".format(*MACHINE.device.capability),
    "_cuda_set_sync_debug_mode": set_mode,
    "_cuda_get_sync_debug_mode": mode,
    "_cuda_endAllocateToPool": constantly(None),  # a capture that ends, well or not, has told the allocator
    "_cuda_releasePool": constantly(None),
    "_cuda_sleep": _sleep,
    "_cuda_emptyCache": empty_cache,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": _reset_peak,
    "_cuda_resetAccumulatedMemoryStats": lambda device: MACHINE.memory.reset_accumulated(CURRENT.index(device)),
    "_cuda_hostMemoryStats": constantly({}),
    "_cuda_resetPeakHostMemoryStats": constantly(None),
    "_cuda_resetAccumulatedHostMemoryStats": constantly(None),
    "_cuda_setMemoryFraction": lambda share, device: MACHINE.memory.limit(share, CURRENT.index(device)),
    "_cuda_getMemoryFraction": lambda device: MACHINE.memory.share(CURRENT.index(device)),
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
    "_accelerator_resetAccumulatedStats": lambda device: MACHINE.memory.reset_accumulated(CURRENT.index(device)),
    "_accelerator_getMemoryInfo": lambda device: MACHINE.memory.info(CURRENT.index(device)),
    "_accelerator_getStream": current_stream,
    "_accelerator_setStream": set_stream,
    "_accelerator_synchronizeDevice": synchronize,
    "_accelerator_setDeviceIndex": _set_device,
    "_accelerator_getDeviceIndex": lambda: CURRENT.device,
    "_accelerator_exchangeDevice": CURRENT.change,
    "_accelerator_maybeExchangeDevice": CURRENT.change,
    "_accelerator_getAccelerator": lambda: torch.device("cuda"),
    "_get_accelerator": lambda _check=None: torch.device("cuda"),
}


# `torch.cuda`, `torch.accelerator` and `torch.backends`, where they must believe in the device.


def patch() -> None:
    """From now on Python finds a GPU."""
    install()
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
    torch.version.cuda = CUDA
    ours = {name: own(does, name) for name, does in _INITIALIZATION.items()}
    replace_copies({id(getattr(cuda, name)): does for name, does in ours.items()})
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
        module.Stream, module.ExternalStream = Stream, Stream
        module.Event = Event
    torch.Stream, torch.Event = Stream, Event
    torch.cuda.StreamContext, torch.cuda.stream = StreamContext, StreamContext
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = CUDAGraph
    if hasattr(torch.accelerator, "Graph"):
        torch.accelerator.Graph = AcceleratorGraph
    torch.Generator = GeneratorOfAnyDevice
    torch.cuda.nccl.is_available = own(
        constantly(False), "is_available"
    )  # its collectives between devices of a process
    # they go through what was replaced already, but slowly, and every training loop with a side stream calls them
    torch.cuda.current_stream, torch.cuda.set_stream = current_stream, set_stream


def _patch_backends() -> None:
    backends = torch.backends
    backends.cuda.is_built = own(constantly(True), "is_built")
    backends.cudnn.is_available = own(constantly(True), "is_available")
    backends.cudnn.version = own(constantly(CUDNN), "version")
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


_HOST = -1


def scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[Tensor]:
    """A part for each device, on the stream given for it; there may be fewer parts than devices."""
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    streams = streams or [None] * len(devices)
    return [_moved(part, device, stream) for part, device, stream in zip(parts, devices, streams, strict=False)]


def _moved(part: Tensor, device: int, stream: Any) -> Tensor:
    with nullcontext() if stream is None else StreamContext(stream):
        return part.to(torch.device("cuda", device), non_blocking=True)


def scatter_out(tensor: Tensor, out: list[Tensor], dim: int, streams: Any) -> list[Tensor]:
    parts = tensor.split([one.size(dim) for one in out], dim)
    for target, part in zip(out, parts, strict=True):
        target.copy_(part, non_blocking=True)
    return out


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """One after the other along `dim`, on a device or, for -1, on the host."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.size(dim) for one in tensors)
    where = torch.device("cpu") if destination == _HOST else torch.device("cuda", destination)
    return gather_out(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=where), dim)


def gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    for part, tensor in zip(out.split([one.size(dim) for one in tensors], dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(torch.device("cuda", device), non_blocking=True) for device in devices]


def broadcast_out(tensor: Tensor, out: list[Tensor]) -> list[Tensor]:
    for one in out:
        one.copy_(tensor, non_blocking=True)
    return out


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Of each device all tensors, sent in a few large buffers; the first device has them already."""
    return [list(tensors), *(_sent(tensors, device, buffer_size) for device in devices[1:])]


def _sent(tensors: Sequence[Tensor], device: int, buffer_size: int) -> list[Tensor]:
    found: list[Tensor] = []
    for group in _take_tensors(tensors, buffer_size):
        (buffer,) = broadcast(_flatten_dense_tensors(group), [device])
        found += [one.data for one in _unflatten_dense_tensors(buffer, group)]
    return list(_reorder_tensors_as(found, tensors))


DATA_PARALLEL_ANSWERS: dict[str, Callable[..., Any]] = {
    "_scatter": scatter,
    "_scatter_out": scatter_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_broadcast": broadcast,
    "_broadcast_out": broadcast_out,
    "_broadcast_coalesced": broadcast_coalesced,
}
