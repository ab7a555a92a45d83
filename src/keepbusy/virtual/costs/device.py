"""The costs of a device and its host, read from a device file; docs/reference/device-file.md describes the format.

Times are nanoseconds, sizes bytes, rates operations a nanosecond and bandwidths bytes a nanosecond. In a file a value
is a string of a number and its unit, such as "4.8 TB/s" or "5 us", so a bandwidth given for a time is noticed. Values
that a file leaves out are those of devices/h200.toml.

A `Call` is an operator on such a device, for which a law finds the kernels.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from keepbusy.timeline.files import BadInput, parsed
from keepbusy.timeline.model import Direction
from keepbusy.virtual.costs import figures

# A value's type says which units it may have in a file.
Time: TypeAlias = int
FineTime: TypeAlias = float  # of something so short that a nanosecond is too coarse
Size: TypeAlias = int
Bandwidth: TypeAlias = float
Rate: TypeAlias = float
Share: TypeAlias = float
Count: TypeAlias = int

_DISPATCH, _TOGETHER = figures("dispatch"), figures("together")


@dataclass(frozen=True)
class HostCosts:
    """The host's time for calls."""

    operator: Time  # an elementwise operator, up to its launch: Python, autograd, an allocation
    backward: Time  # the same in the backward pass
    view: Time  # an operator that launches nothing
    launch: Time
    collective: Time
    event: Time
    sync: Time
    graph: Time  # launching a CUDA graph, and for each of its commands
    graph_node: Time
    graph_made: Time  # instantiating one at the end of its capture, and for each of its commands
    graph_node_made: Time

    def dispatch(self, name: str, backward: bool) -> int:
        """The time for an operator, by its full name, up to its launch; measured host time is at least this."""
        short = name.removeprefix("aten::")
        if backward:
            return round(_DISPATCH.backward_of.get(short, _DISPATCH.backward) * self.backward)
        return round(_DISPATCH.forward_of.get(short, _DISPATCH.forward) * self.operator)

    def lists(self, arguments: Iterable[object]) -> float:
        """The time that lists among the arguments of a `_foreach_` or `_fused_` operator add."""
        listed = sum(len(argument) for argument in arguments if isinstance(argument, list))
        return float(_DISPATCH.listed * listed * self.operator)

    @cached_property
    def module(self) -> float:
        """The time for calling a module."""
        return float(_DISPATCH.module * self.operator)

    @cached_property
    def backward_pass(self) -> float:
        """The time for handing a backward pass to another thread and back."""
        return float(_DISPATCH.backward_pass * self.backward)


@dataclass(frozen=True)
class HostTensorCosts:
    """Rates of operators on host tensors, with as many threads as PyTorch starts by default."""

    streaming: Bandwidth  # bytes read and written
    draw: FineTime  # a random number
    each: FineTime  # an element that is indexed, pooled or looked up
    shuffle: FineTime
    sort: FineTime


@dataclass(frozen=True)
class QueueLimits:
    """Limits and latencies of a stream."""

    pending: Count  # launches that a stream's queue holds
    latency: Time  # from the beginning of a launch to the start of its command on an idle stream
    gap: Time  # between two commands that are ready
    graph_gap: Time  # the same within a CUDA graph


class HostCopy(NamedTuple):
    """One copy between host and device."""

    name: str
    pinned: int
    call: int  # the host's time for enqueuing
    work: int
    returns: bool  # whether the call may return before the bytes have moved


@dataclass(frozen=True)
class CopyCosts:
    """Copies between host and device."""

    latency: Time
    call: Time
    pinned: Bandwidth
    to_device: Bandwidth  # from pageable memory
    to_host: Bandwidth  # to pageable memory
    to_fresh: Bandwidth  # to pageable memory that was never touched, as `.cpu()` allocates it
    mapped: Size  # size from which the C library maps new pages for each allocation
    staged: Size  # largest pageable copy that the driver stages, so that the call returns at once
    staging: Bandwidth

    def copy(self, direction: Direction, size: int, pinned: bool, fresh: int = 0) -> HostCopy:
        """`fresh`: bytes of host memory that were never touched."""
        inbound = direction == Direction.HOST_TO_DEVICE
        memory = "Pinned" if pinned else "Pageable"
        name = f"Memcpy HtoD ({memory} -> Device)" if inbound else f"Memcpy DtoH (Device -> {memory})"
        if pinned:
            return HostCopy(name, 1, self.call, self._work(size, self.pinned), True)
        if inbound and size <= self.staged:
            return HostCopy(name, 0, self.call + round(size / self.staging), self._work(size, self.pinned), True)
        if inbound:
            return HostCopy(name, 0, self.call, self._work(size, self.to_device), False)
        mapping = round(fresh / self.to_fresh - fresh / self.to_host)
        return HostCopy(name, 0, self.call, self._work(size, self.to_host) + mapping, False)

    def _work(self, size: int, bandwidth: float) -> int:
        return self.latency + round(size / bandwidth)


@dataclass(frozen=True)
class DeviceMemory:
    """The device's memory."""

    size: Size
    bandwidth: Bandwidth
    malloc: Time  # cudaMalloc
    free: Time  # cudaFree, without its wait


@dataclass(frozen=True)
class CollectiveLaw:
    """A kind of collective among the devices of a host that was measured by itself."""

    latency: Time  # with two ranks, less a hop
    bandwidth: Bandwidth  # of a device's link


@dataclass(frozen=True)
class Wire:
    """Links between devices: within a host, and between hosts."""

    latency: Time
    hop: Time  # for each rank beyond the first
    bandwidth: Bandwidth  # a device's, each way
    send_latency: Time
    devices: Count  # of one host
    network_latency: Time
    network: Bandwidth  # a device's share
    collectives: Mapping[str, CollectiveLaw] = field(default_factory=dict)

    def time(self, size: int) -> int:
        """The time of a copy from one device of the host to another."""
        return self.latency + round(size / self.bandwidth)

    def collective(self, name: str, size: int, ranks: int, hosts: int = 1) -> int:
        """The time of a collective on the wire, after all ranks have arrived, by NCCL's rings.

        `size`: bytes of a rank's larger tensor, not of a shard. Latencies and bandwidths were measured on four H200
        (NVLink). For other numbers of ranks the formula is NCCL's; the costs of a hop, and of each level of the
        network's tree over the hosts, are estimates.
        """
        if name in ("send", "recv"):
            return self.send_latency + round(size / self.bandwidth)
        hosts = max(hosts, -(-ranks // self.devices))
        law = self.collectives.get(name) or CollectiveLaw(self.latency, self.bandwidth)
        bandwidth = min(law.bandwidth, self.network) if hosts > 1 else law.bandwidth
        levels = (hosts - 1).bit_length()
        latency = law.latency + self.hop * (-(-ranks // hosts) - 1) + self.network_latency * levels
        return latency + round(size * crossings(name, ranks) / bandwidth)


def crossings(name: str, ranks: int) -> float:
    """How often each byte of a collective crosses a device's link."""
    share = (ranks - 1) / ranks
    by_name = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return by_name.get(name, 1.0 if ranks > 1 and name != "barrier" else 0.0)


@dataclass(frozen=True)
class Efficiency:
    """Shares of the device's peak, fitted to kernels of an H200: see benchmarks/virtual_costs.py."""

    matrix: Share  # of the matrix rate, in a tile's inner loop
    sustained: Share  # of the matrix rate, once a product is so long that power limits it
    simt: Share  # the same without tensor cores
    streaming: Share  # of the memory bandwidth: elementwise, one type, contiguous
    heavy: Share  # with a function that takes long, like gelu
    mixed: Share  # with types to convert
    strided: Share  # of four elements a nanosecond a multiprocessor: with strides or broadcasting
    softmax: Share
    norm: Share
    columns: Share  # sums over rows, with enough columns
    rows: Share  # sums over the last dimension
    statistics: Share  # batch norm's, channels last
    foreach: Share
    random: Share


@dataclass(frozen=True)
class Device:
    """A device and its host."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    matrix: Mapping[str, Rate]
    host: HostCosts
    host_tensors: HostTensorCosts
    queue: QueueLimits
    copies: CopyCosts
    memory: DeviceMemory
    wire: Wire
    efficiency: Efficiency

    def rate(self, dtype: str) -> float:
        """Peak operations a nanosecond of a matrix product."""
        return self.matrix.get(dtype) or self.matrix["float32"]

    def slower_together(self, name: str) -> float:
        """The factor by which a kernel is slower beside a collective, or a collective ("nccl") beside kernels."""
        return next((times for prefix, times in _TOGETHER.slower.items() if name.startswith(prefix)), 1.0)


# A call of an operator: its tensors, and the time of bytes and elements on its device.

Shape: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[Shape, str, Shape]
"""The fields of an `Array` as a plain tuple, which is quicker to make."""
Kernel: TypeAlias = tuple[str, int]
"""A kernel's name and duration."""

SHORTEST: int = figures("kernel").shortest
"""Nanoseconds of the shortest kernel."""
_SIZES = {
    "float64": 8, "int64": 8, "complex64": 8, "uint64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "complex32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


class Array(NamedTuple):
    """A tensor's shape, the name of its type ("bfloat16") and its strides. Hashable."""

    shape: Shape
    dtype: str
    strides: Shape

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def item_size(self) -> int:
        """Bytes of an element; one for types that are not listed."""
        return _SIZES.get(self.dtype, 1)

    @property
    def size(self) -> int:
        """Bytes that a kernel touches; an expanded dimension counts once."""
        return prod(length for length, stride in zip(self.shape, self.strides, strict=True) if stride) * self.item_size

    @property
    def rows(self) -> float:
        return self.elements / max(1, self.shape[-1]) if self.shape else 1.0

    @property
    def dense(self) -> bool:
        """Whether its elements fill their memory, in any order of dimensions."""
        pairs = zip(self.strides, self.shape, strict=True)
        return _fills(sorted((stride, length) for stride, length in pairs if length != 1))

    @property
    def contiguous(self) -> bool:
        """Whether its elements fill their memory in the order of its dimensions."""
        return _fills((stride, length) for length, stride in zip(self.shape[::-1], self.strides[::-1], strict=True))

    @property
    def channels_last(self) -> bool:
        return len(self.shape) >= 4 and self.strides[1] == 1 and self.shape[1] > 1

    def lies_as(self, other: Array) -> bool:
        """Whether two tensors have the same shape and order in memory."""
        pairs = zip(self.shape, self.strides, other.strides, strict=True)
        return self.shape == other.shape and all(first == second for length, first, second in pairs if length != 1)


def _fills(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions, given as stride and length from the innermost one on, leave no gaps."""
    expected = 1
    for stride, length in dimensions:
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def total(operands: Iterable[Array]) -> int:
    return sum(array.size for array in operands)


def largest(operands: Iterable[Array]) -> Array:
    return max(operands, key=lambda array: array.elements)


def lasts(start: float, *limits: float) -> int:
    """A kernel's duration: its fixed part, and the longest of the times that limit it."""
    return round(start + max(limits))


class NoLaw(Exception):  # noqa: N818  # it names what is missing
    """The operator's law does not cover such tensors; the elementwise law is used instead."""


@dataclass(frozen=True)
class Call:
    """An operator, its tensors in the schema's order, and the arguments that its law asks for."""

    device: Device
    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    arguments: Mapping[str, Any]
    tf32: bool = False

    @property
    def result(self) -> Array:
        """The first output; of an in-place operator, the first input."""
        return (self.outputs or self.inputs)[0]

    def dtype(self, convolution: bool = False) -> str:
        """The type for the matrix units. cuDNN uses TF32 by default, cuBLAS only if it is allowed."""
        dtype = (self.inputs or self.outputs)[0].dtype
        if dtype == "float32" and (self.tf32 or convolution):
            return "tfloat32"
        return "float8" if dtype.startswith("float8") else "float32" if dtype.startswith("complex") else dtype

    def moved(self) -> int:
        """Bytes read and written; an operator in place writes its first input."""
        in_place = () if self.outputs or not self.name.endswith("_") else self.inputs[:1]
        return total(self.inputs) + total(self.outputs) + total(in_place)

    def streaming(self, moved: float, share: float) -> float:
        """The time of `moved` bytes at a share of the memory bandwidth."""
        return moved / (self.device.memory.bandwidth * share)

    def streamed(self, moved: float, share: float, start: float = SHORTEST) -> int:
        """The duration of a kernel that moves `moved` bytes."""
        return lasts(start, self.streaming(moved, share))

    def each(self, count: float, rate: float) -> float:
        """The time of `count` elements, at `rate` elements a nanosecond on each multiprocessor."""
        return count / (self.device.multiprocessors * rate)

    def strided(self, count: float) -> int:
        """The duration of a kernel that accesses `count` elements one by one."""
        return lasts(SHORTEST, self.each(count, 4.0 * self.device.efficiency.strided))


# Device files

_FILES = Path(__file__).parents[1] / "devices"
_LARGEST_FILE = 16 << 10
"""Bytes, four times our longest file. The memory that a long name takes grows with the square of its length."""
_MEASURED = "h200"
"""The device whose values replace those that other files leave out."""
_SECTIONS: dict[str, type] = {
    "host": HostCosts,
    "host_tensors": HostTensorCosts,
    "queue": QueueLimits,
    "copies": CopyCosts,
    "memory": DeviceMemory,
    "wire": Wire,
    "efficiency": Efficiency,
}
_COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
)  # fmt: skip
"""Those that may have a law of their own, in a table [collectives.NAME]."""
_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_TOO_MANY = 1 << 31
_QUANTITY = re.compile(r"^\s*([0-9.eE+-]+)\s*(\S+)\s*$")
_TIMES = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_UNITS: dict[str, dict[str, float]] = {
    "Time": _TIMES,
    "FineTime": _TIMES,
    "Size": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3},
    "Bandwidth": {"MB/s": 1e-3, "GB/s": 1.0, "TB/s": 1e3},
    "Rate": {"GFLOP/s": 1.0, "TFLOP/s": 1e3, "PFLOP/s": 1e6},
}


def names() -> list[str]:
    """Names of the devices that come with keepbusy."""
    return sorted(path.stem for path in _FILES.glob("*.toml"))


def read(name: str) -> Device:
    """A device by its name, or from a file of the user's; raises `BadInput` for anything else."""
    path = path_of(name)
    return _device(_table(path), str(path))


def path_of(name: str) -> Path:
    """The file of a device; raises `BadInput` for an unknown name."""
    if name in names():
        return _FILES / f"{name}.toml"
    if not name.endswith(".toml"):
        raise BadInput(f"{name!r} is no device; the devices are {', '.join(names())}, or give a .toml file.")
    return Path(name)


def _table(path: Path) -> dict[str, Any]:
    def parse(text: str) -> dict[str, Any]:
        table = tomllib.loads(text)
        repr(table)  # fails here if it is nested too deep to be shown
        return table

    return parsed(path, "a device file", parse, _LARGEST_FILE)


def _device(table: Mapping[str, Any], path: str) -> Device:
    measured = _table(_FILES / f"{_MEASURED}.toml")
    _refuse_unknown(table, {*measured, "collectives"}, path)
    if not isinstance(table.get("name"), str):
        raise BadInput(f'{path} does not give the device a name; add a line like name = "NVIDIA H200".')
    for section in (*_SECTIONS, "matrix"):
        values = table.get(section, {})
        if not isinstance(values, dict):
            raise BadInput(f"{path} has {section} = {values!r}, where a table [{section}] belongs.")
        if section in _SECTIONS:  # the types in [matrix] may be any
            _refuse_unknown(values, set(measured[section]), path, f"{section}.")
        measured[section] |= values
    merged = {**measured, **{name: value for name, value in table.items() if not isinstance(value, dict)}}
    sections = {name: _section(kind, merged[name], name, path) for name, kind in _SECTIONS.items()}
    sections["wire"] = replace(sections["wire"], collectives=_laws(table.get("collectives", {}), path))
    rates = {dtype: _value("Rate", rate, f"matrix.{dtype}", path) for dtype, rate in merged["matrix"].items()}
    multiprocessors = _value("Count", merged["multiprocessors"], "multiprocessors", path)
    capability = _capability(merged["capability"], path)
    return Device(merged["name"], capability, multiprocessors, MappingProxyType(rates), **sections)


def _section(kind: Any, values: Mapping[str, Any], section: str, path: str) -> Any:
    types = {entry.name: str(entry.type) for entry in fields(kind) if entry.name in values}
    return kind(
        **{name: _value(type_name, values[name], f"{section}.{name}", path) for name, type_name in types.items()}
    )


def _laws(tables: Any, path: str) -> Mapping[str, CollectiveLaw]:
    """The tables [collectives.NAME], each with a latency and a bandwidth."""
    if not isinstance(tables, dict):
        raise BadInput(f"{path} has collectives = {tables!r}, where tables like [collectives.all_reduce] belong.")
    _refuse_unknown(tables, set(_COLLECTIVES), path, "collectives.")
    for name, law in tables.items():
        where = f"collectives.{name}"
        if not isinstance(law, dict) or not {"latency", "bandwidth"} <= set(law):
            raise BadInput(f'{path} has {where} = {law!r}; give it latency = "30 us" and bandwidth = "350 GB/s".')
        _refuse_unknown(law, {"latency", "bandwidth"}, path, f"{where}.")
    laws = {name: _section(CollectiveLaw, law, f"collectives.{name}", path) for name, law in tables.items()}
    return MappingProxyType(laws)


def _value(kind: str, value: Any, key: str, path: str) -> Any:
    read, expected = _READERS[kind]
    try:
        return read(value)
    except (ValueError, TypeError, KeyError):
        raise BadInput(f"{path} has {key} = {value!r}; give {expected}.") from None


def _share(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise ValueError
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value < _TOO_MANY:
        raise ValueError
    return value


def _quantity(kind: str, value: Any) -> float:
    match, units = _QUANTITY.match(value), _UNITS[kind]
    quantity = float(match[1]) * units[match[2]] if match else -1.0
    if not 0 < quantity < 1e18 and not (quantity == 0 and units is _TIMES):
        raise ValueError
    return round(quantity) if kind in ("Time", "Size") else quantity


_READERS: dict[str, tuple[Callable[[Any], float], str]] = {
    "Share": (_share, "a share of the peak, above 0 and at most 1"),
    "Count": (_count, f"a whole number, at least 1 and below {_TOO_MANY}"),
    **{unit: (partial(_quantity, unit), f"a number and a unit, one of {', '.join(_UNITS[unit])}") for unit in _UNITS},
}


def _capability(value: Any, path: str) -> tuple[int, int]:
    match = _CAPABILITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BadInput(f'{path} has capability = {value!r}; give CUDA\'s compute capability, like "9.0".')
    return int(match[1]), int(match[2])


def _refuse_unknown(table: Mapping[str, Any], accepted_keys: set[str], path: str, prefix: str = "") -> None:
    for name in [name for name in table if name not in accepted_keys]:
        accepted = ", ".join(sorted(accepted_keys))
        raise BadInput(f"{path} sets {prefix}{name}, which keepbusy does not know; it knows {accepted}.")
