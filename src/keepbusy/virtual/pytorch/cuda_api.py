"""CUDA for Python: `torch.cuda`, `torch.accelerator`, their streams and events, and `torch._C._cuda_*` below them.

Most of `torch.cuda` is Python on top of private functions. It works unchanged once the virtual machine implements
these; private functions that are not implemented refuse by name.
"""

from __future__ import annotations

import functools
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from keepbusy.program.lines import warn_program
from keepbusy.torch_names import dispatcher
from keepbusy.torch_names.pytorch import flatten_tensors, unflatten_tensors
from keepbusy.virtual.clock.captures import BEGINNING
from keepbusy.virtual.cpp_hooks import CUDA_VERSION, CUDNN_VERSION, DEVICE_TYPE
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import refusal
from keepbusy.virtual.pytorch.cuda_graphs import AcceleratorGraph, CUDAGraph, graph_pool_handle
from keepbusy.virtual.pytorch.randomness import DEFAULTS, GeneratorOfAnyDevice
from keepbusy.virtual.pytorch.tensors import host_register, host_unregister

_ANSWERS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cuda_answers.toml").read_text(encoding="utf-8"))

# `torch.cuda.set_sync_debug_mode`: a warning, or an error, before the host waits for the device. As in PyTorch, this
# covers blocking copies, reads and `Stream.synchronize`, but neither events, `torch.cuda.synchronize` nor copies that
# should not block and do.

_IGNORE, _WARN, _RAISE = range(3)


class _SyncDebug:
    mode = _IGNORE
    has_warned = False  # whether the warning that this is a prototype was given


def _set_sync_debug(mode: int) -> None:
    if mode not in (_IGNORE, _WARN, _RAISE):
        raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
    if not _SyncDebug.has_warned:
        _SyncDebug.has_warned = True
        warn_program(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
        )
    _SyncDebug.mode = mode


def announce_sync() -> None:
    """The host is about to wait for the device; nothing is copied yet."""
    if _SyncDebug.mode != _IGNORE:
        text = "called a synchronizing CUDA operation"
        if _SyncDebug.mode == _RAISE:
            raise RuntimeError(text)
        warn_program(text)


_no_shared_events = refusal("has no events that processes share")


class Event:
    """A point in the order of a stream. Waiting for an event that was not recorded takes no time."""

    def __init__(
        self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False,
    ) -> None:  # fmt: skip
        if interprocess:
            _no_shared_events()
        self.moment = BEGINNING
        self.device: torch.device | None = None if device is None else torch.device("cuda", CURRENT.index(device))
        self._has_timing, self._is_external = enable_timing, external
        self._origin = MACHINE.origin_here()

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
        MACHINE.clock.order.note_event(stream.lane, self._origin)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return self.moment is BEGINNING or MACHINE.clock.query(self.moment)

    def synchronize(self) -> None:
        with DeviceCall("cudaEventSynchronize"):
            MACHINE.clock.sync_moment(self.moment)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds."""
        if not (self._has_timing and end_event._has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if BEGINNING in (self.moment, end_event.moment):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return MACHINE.clock.elapsed(self.moment, end_event.moment) / 1e6

    ipc_handle = _no_shared_events

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {'uninitialized' if self.moment is BEGINNING else hex(id(self))}>"


class Stream:
    """An in-order queue of one device; two objects of the same queue are equal."""

    lane: int
    stream_id: int  # PyTorch's name for `lane`
    device_index: int
    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Self:
        index = ids.get("device_index", CURRENT.index(device))
        lane = ids.get("stream_id")
        if lane is None:
            lane = MACHINE.clock.new_stream(index)
            MACHINE.clock.order.stream_origins[lane] = MACHINE.origin_here()
        return cls._of(index, lane, priority)

    @classmethod
    def _of(cls, index: int, lane: int, priority: int = 0) -> Self:
        stream = object.__new__(cls)
        stream.device_index, stream.lane, stream.stream_id, stream.priority = index, lane, lane, priority
        return stream

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return 0 if self.lane == MACHINE.clock.default_stream(self.device_index) else self.lane

    native_handle = cuda_stream
    device_type = DEVICE_TYPE

    def synchronize(self) -> None:
        announce_sync()
        with DeviceCall("cudaStreamSynchronize"):
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
    with DeviceCall("cudaDeviceSynchronize"):
        MACHINE.clock.sync_device(CURRENT.index(device))


# The functions under `torch.nn.DataParallel`, which are C++ in CUDA builds: they move tensors between the devices of
# one process, by copies that do not block.


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[Tensor]:
    """A part for each device, copied on its stream; there may be fewer parts than devices."""
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    results = []
    for part, device, stream in zip(parts, devices, streams or [None] * len(devices), strict=False):
        with nullcontext() if stream is None else StreamContext(stream):
            results.append(part.to(torch.device("cuda", device), non_blocking=True))
    return results


def _scatter_out(tensor: Tensor, out: list[Tensor], dim: int, streams: Any) -> list[Tensor]:
    parts = tensor.split([target.size(dim) for target in out], dim)
    return [target.copy_(part, non_blocking=True) for target, part in zip(out, parts, strict=True)]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """Tensors joined along `dim`, on a device or, for -1, on the host."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    device = torch.device("cpu") if destination == -1 else torch.device("cuda", destination)
    return _gather_out(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=device), dim)


def _gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    for part, tensor in zip(out.split([tensor.size(dim) for tensor in tensors], dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(torch.device("cuda", device), non_blocking=True) for device in devices]


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Copies of all tensors on each device, sent in a few large buffers; the first device has the tensors already."""
    results = [list(tensors)]
    for device in devices[1:]:
        copies: list[Tensor] = []
        for group in dispatcher.groups_of_tensors(tensors, buffer_size):
            (buffer,) = _broadcast(flatten_tensors(group), [device])
            copies += [copy.data for copy in unflatten_tensors(buffer, group)]
        results.append(list(dispatcher.reorder_tensors(copies, tensors)))
    return results


# Moving, resizing and loading storages, which PyTorch without CUDA can do for host memory only.

_Storage = torch.UntypedStorage
_resize, _clone = _Storage.resize_, _Storage.clone
_logical_sizes: dict[int, int] = {}
"""Sizes of storages that the program has shrunk. Their bytes are kept, since FSDP grows them again."""


def _storage_to_device(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
    if storage.device.type == "cuda":
        return storage
    flat = Tensor().to(torch.uint8).set_(storage)
    return flat.to(torch.device("cuda", CURRENT.index(device)), non_blocking=non_blocking).untyped_storage()


def _clone_storage(storage: Any) -> Any:
    """Also called by `copy.deepcopy` of a tensor."""
    if storage.device.type != "cuda":
        return _clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def _logical_size_of(storage: Any) -> int:
    return _logical_sizes[storage._cdata] if storage._cdata in _logical_sizes else dispatcher.storage_size(storage)


def _resize_storage(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    full_size = dispatcher.storage_size(storage)
    if size > full_size:
        raise NotImplementedError("keepbusy's virtual GPU cannot grow a storage past its first size.")
    if size != _logical_size_of(storage):
        MACHINE.resize(storage, size)
    if size == full_size:
        _logical_sizes.pop(storage._cdata, None)
    else:
        _logical_sizes[storage._cdata] = size
    return storage


# Whether the program has used a device: device meshes choose a process's device by its rank, unless it has.


class Initialization:
    """`virtual_run` resets it before the program begins."""

    requested = False

    @classmethod
    def request(cls) -> None:
        cls.requested = True

    @classmethod
    def happened(cls) -> bool:
        """Whether the program has asked for a device, launched work on one or allocated memory of one."""
        stats = [MACHINE.memory.stats(device) for device in range(CURRENT.count)]
        return cls.requested or MACHINE.clock.launched or any(of_device["segment.all.allocated"] for of_device in stats)


# Answers of the driver, its runtime and the allocator.


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _numbers(stream: Stream) -> tuple[int, int, int]:
    """A stream as C++ returns it."""
    return stream.lane, stream.device_index, DEVICE_TYPE


_MAJOR, _MINOR = map(int, CUDA_VERSION.split("."))
_native_config = dispatcher.build_settings()
"""PyTorch's description of its build. Later it would ask a library of CUDA that may be missing."""


def _show_config() -> str:
    """The description of the build, with the lines that a build with CUDA adds."""
    runtime = f"  - CUDA Runtime {CUDA_VERSION}\n"
    cudnn = f"  - CuDNN {CUDNN_VERSION // 1000}.{CUDNN_VERSION // 100 % 10}.{CUDNN_VERSION % 100}\n"
    before, settings, after = _native_config.partition("  - Build settings")
    return before + runtime + cudnn + settings + after


def _architecture() -> str:
    return "sm_{}{}".format(*MACHINE.device.capability)


def _set_device(device: int) -> None:
    CURRENT.change(device)


def _by_memory(answer: str) -> Callable[..., Any]:
    """Answer a question about a device's memory by the method of `Memory` of that name."""
    return lambda device=None: getattr(MACHINE.memory, answer)(CURRENT.index(device))


def _empty_cache(device: int | None = None) -> None:
    """The cache of one device, or of all that have been used."""
    with DeviceCall("cudaFree"):
        MACHINE.clock.allocate("emptyCache", MACHINE.device.host.event)  # a row even where nothing is freed
        MACHINE.memory.empty_cache(device)


def _sleep(cycles: int) -> None:
    nanoseconds = int(cycles / 1.98)  # at the clock rate of an H200
    with DeviceCall("_cuda_sleep"):
        MACHINE.clock.launch(MACHINE.stream(CURRENT.device), [("spin_kernel", nanoseconds)])


def _properties(device: Any = None) -> types.SimpleNamespace:
    if CURRENT.index(device) >= CURRENT.count:
        raise AssertionError("Invalid device id")
    device_costs, (major, minor) = MACHINE.device, MACHINE.device.capability
    return types.SimpleNamespace(
        name=device_costs.name, major=major, minor=minor, total_memory=device_costs.memory.size,
        multi_processor_count=device_costs.multiprocessors, **_ANSWERS["properties"],
    )  # fmt: skip


_NATIVE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ANSWERS["nothing"].split(), _constant(None)),
    **{name: _constant(value) for name, value in _ANSWERS["native"].items()},
    "_show_config": _show_config,
    "_cuda_getDeviceCount": lambda: CURRENT.count,
    "_cuda_getCurrentStream": lambda device=-1: _numbers(current_stream(device)),
    "_cuda_getDefaultStream": lambda device=-1: _numbers(default_stream(device)),
    "_cuda_setStream": lambda stream_id, device_index, device_type=None: set_stream(
        Stream._of(device_index, stream_id)
    ),
    "_graph_pool_handle": graph_pool_handle,
    "_cuda_isCurrentStreamCapturing": lambda: current_stream().is_capturing(),
    "_cuda_getCompiledVersion": _constant(1000 * _MAJOR + 10 * _MINOR),
    "_cuda_getArchFlags": _architecture,
    "_cuda_set_sync_debug_mode": _set_sync_debug,
    "_cuda_get_sync_debug_mode": lambda: _SyncDebug.mode,
    "_cuda_sleep": _sleep,
    "_cuda_setMemoryFraction": lambda share, device: MACHINE.memory.limit(share, CURRENT.index(device)),
    "_cuda_getMemoryFraction": lambda device: MACHINE.memory.share(CURRENT.index(device)),
    "_nccl_version_suffix": _constant(b""),
    "_accelerator_getMemoryInfo": _by_memory("info"),
    "_accelerator_getStream": current_stream,
    "_accelerator_setStream": set_stream,
    "_scatter": _scatter,
    "_scatter_out": _scatter_out,
    "_gather": _gather,
    "_gather_out": _gather_out,
    "_broadcast": _broadcast,
    "_broadcast_out": lambda tensor, out: [target.copy_(tensor, non_blocking=True) for target in out],
    "_broadcast_coalesced": _broadcast_coalesced,
    **{
        name: answer
        for names, answer in (
            ("_cuda_synchronize _accelerator_synchronizeDevice", synchronize),
            ("_cuda_getDevice _accelerator_getDeviceIndex", lambda: CURRENT.device),
            ("_cuda_setDevice _accelerator_setDeviceIndex", _set_device),
            ("_cuda_exchangeDevice _accelerator_exchangeDevice", CURRENT.change),
            ("_cuda_maybeExchangeDevice _accelerator_maybeExchangeDevice", CURRENT.change),
            ("_cuda_emptyCache _accelerator_emptyCache", _empty_cache),
            ("_cuda_memoryStats _accelerator_getDeviceStats", _by_memory("stats")),
            ("_cuda_resetPeakMemoryStats _accelerator_resetPeakStats", _by_memory("reset_peak")),
            ("_cuda_resetAccumulatedMemoryStats _accelerator_resetAccumulatedStats", _by_memory("reset_accumulated")),
            ("_get_accelerator _accelerator_getAccelerator", _constant(torch.device("cuda"))),
        )
        for name in names.split()
    },
}
"""In `torch._C`."""
_PYTHON: dict[str, Callable[..., Any]] = {
    **{name: _constant(value) for name, value in _ANSWERS["python"].items()},
    "init": Initialization.request,
    "_lazy_init": Initialization.request,
    "_lazy_call": lambda function, **_: function(),
    "is_initialized": Initialization.happened,
    "_exchange_device": CURRENT.change,
    "_maybe_exchange_device": CURRENT.change,
    "device_count": lambda: CURRENT.count,
    "cudart": _constant(types.SimpleNamespace(cudaHostRegister=host_register, cudaHostUnregister=host_unregister)),
    "get_device_properties": _properties,
    "_get_device_properties": _properties,
    "set_device": lambda device: _set_device(CURRENT.index(device)),
    "get_arch_list": lambda: [_architecture()],
    "mem_get_info": _by_memory("info"),
    "ipc_collect": _constant(None),
    "is_tf32_supported": lambda: MACHINE.device.capability >= (8, 0),
}
"""In `torch.cuda`."""


def patch() -> None:
    """From now on Python finds a GPU."""
    cuda, backends = torch.cuda, torch.backends
    settings = tuple(_ANSWERS["settings"].split())
    native = [name for name in dir(torch._C) if name.startswith(("_cuda_", "_nccl_")) and not name.startswith(settings)]
    native += [name for name in _ANSWERS["compiler"].split() if not hasattr(torch._C, name)]
    replace_everywhere(torch._C, {**{name: refusal(f"does not know torch._C.{name}") for name in native}, **_NATIVE})
    # else the profiler would try to record native events, and warn about each
    owner, name = dispatcher.SUPPORTED_ACTIVITIES
    recorded = getattr(owner, name)() | {torch.profiler.ProfilerActivity.CUDA}
    replace_everywhere(owner, {name: _constant(recorded)})
    replace_everywhere(cuda, _PYTHON)
    for module, name, value in (
        *((cuda.nvtx, name, 0) for name in ("range_push", "range_pop", "mark", "range_start", "range_end")),
        (cuda.nccl, "is_available", False),  # for collectives between the devices of a process
        (backends.cuda, "is_built", True),
        (backends.cudnn, "is_available", True),
        (backends.cudnn, "version", CUDNN_VERSION),
        # else recurrent networks would flatten their weights for cuDNN by native code
        (backends.cudnn, "is_acceptable", False),
    ):
        setattr(module, name, _function_named(name, _constant(value)))

    torch.version.cuda = CUDA_VERSION
    setattr(*dispatcher.HAS_BEGUN, True)  # else checkpointing does not restore the devices' random states
    cuda.default_generators = DEFAULTS.all()
    torch.Generator = GeneratorOfAnyDevice
    torch.Stream, torch.Event = Stream, Event
    for module in (cuda, cuda.streams):
        module.Stream = module.ExternalStream = Stream
        module.Event = Event
    cuda.StreamContext = cuda.stream = StreamContext
    # PyTorch's own ones would work, too, but slowly, and each training loop with a side stream calls them
    cuda.current_stream, cuda.set_stream = current_stream, set_stream
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    if hasattr(torch.accelerator, "Graph"):
        torch.accelerator.Graph = AcceleratorGraph
    _Storage.cuda, _Storage.resize_, _Storage.clone = _storage_to_device, _resize_storage, _clone_storage
    _Storage.size = _Storage.nbytes = _logical_size_of
    # for `torch.load` of tensors that were saved from a device, or are mapped to one
    torch.serialization.register_package(
        5,
        lambda _storage: None,
        lambda storage, place: _storage_to_device(storage, torch.device(place)) if place.startswith("cuda") else None,
    )


def replace_everywhere(owner: Any, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Replace functions in their module, and in PyTorch's modules that imported them by name."""
    functions = {name: _function_named(name, answer) for name, answer in answers.items()}
    native = {name: getattr(owner, name) for name in functions if hasattr(owner, name)}
    for name, answer in functions.items():
        setattr(owner, name, answer)
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.")]:
        names = vars(module)
        for name in native.keys() & names.keys():
            if names[name] is native[name]:
                setattr(module, name, functions[name])


def _function_named(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A new function object for each name, since the compiler's tables refuse two names for the same object."""

    @functools.wraps(answer)
    def function(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    function.__name__ = name
    return function
