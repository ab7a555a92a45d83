"""What a device can do. `read` takes it from a file: devices/h200.toml and its siblings, or the user's own.

Times are nanoseconds, sizes bytes, rates and bandwidths operations and bytes a nanosecond. The
defaults are those of the H200 host in devices/h200.toml, so a file of one's own need not say all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from keepbusy.timeline.model import Direction

_RATES: dict[str, float] = {
    "float64": 67_000.0,
    "float32": 67_000.0,
    "tfloat32": 494_000.0,
    "float16": 989_000.0,
    "bfloat16": 989_000.0,
    "float8": 1_979_000.0,
    "int8": 1_979_000.0,
}


@dataclass(frozen=True)
class HostCosts:
    """What calls cost the host."""

    operator: int = 8_000  # an elementwise operator, up to its launch: Python, autograd's notes, an allocation
    backward: int = 8_000  # the same in the backward pass
    view: int = 3_000  # an operator that launches nothing
    launch: int = 6_000
    collective: int = 35_000
    event: int = 5_000
    sync: int = 6_000
    graph: int = 4_000  # launching a CUDA graph, and for each of its commands
    graph_node: int = 2
    graph_made: int = 33_000  # instantiating one at the end of its capture, and for each of its commands
    graph_node_made: int = 7_000


@dataclass(frozen=True)
class HostTensors:
    """What operators on the host's own tensors take there, with as many threads as PyTorch starts by itself."""

    streaming: float = 21.0  # bytes read and written
    draw: float = 6.0  # a random number
    each: float = 1.7  # an element that is chosen, pooled or looked up
    shuffle: float = 21.0
    sort: float = 155.0


@dataclass(frozen=True)
class Queue:
    """A stream as the host sees it."""

    pending: int = 1022  # launches before the next one is held up
    latency: int = 6_000  # from the begin of a launch to the start of its command on an idle stream
    gap: int = 1_000  # between two commands that stood ready
    graph_gap: int = 130  # the same within a CUDA graph


@dataclass(frozen=True)
class Way:
    """How a copy goes."""

    name: str
    pinned: int
    call: int  # what enqueuing costs the host
    work: int
    returns: bool  # whether the call may return before the bytes have moved


@dataclass(frozen=True)
class Copies:
    """Between host and device."""

    latency: int = 1_500
    call: int = 5_000
    pinned: float = 55.0
    to_device: float = 7.5  # from pageable memory
    to_host: float = 11.0  # to pageable memory
    to_fresh: float = 1.4  # to pageable memory that was never touched, as `.cpu()` allocates it
    mapped: int = 32 << 20  # bytes that the C library maps anew each time, and gives back
    staged: int = 65_536  # pageable bytes that the driver takes along at once
    staging: float = 8.0

    def way(self, direction: Direction, size: int, pinned: bool, fresh: int = 0) -> Way:
        """`fresh`: bytes of host memory that were never touched."""
        inbound = direction == Direction.HOST_TO_DEVICE
        memory = "Pinned" if pinned else "Pageable"
        name = f"Memcpy HtoD ({memory} -> Device)" if inbound else f"Memcpy DtoH (Device -> {memory})"
        if pinned:
            return Way(name, 1, self.call, self._work(size, self.pinned), True)
        if inbound and size <= self.staged:
            return Way(name, 0, self.call + round(size / self.staging), self._work(size, self.pinned), True)
        if inbound:
            return Way(name, 0, self.call, self._work(size, self.to_device), False)
        mapping = round(fresh / self.to_fresh - fresh / self.to_host)
        return Way(name, 0, self.call, self._work(size, self.to_host) + mapping, False)

    def _work(self, size: int, bandwidth: float) -> int:
        return self.latency + round(size / bandwidth)


@dataclass(frozen=True)
class Memory:
    """The device's own."""

    size: int = 150 * 10**9
    bandwidth: float = 4_800.0
    malloc: int = 95_000  # cudaMalloc
    free: int = 75_000  # cudaFree, without what it waits for
    host_alloc: float = 0.54  # pinning memory, a byte


@dataclass(frozen=True)
class Wire:
    """Between devices: within a host, and from host to host."""

    latency: int = 21_000
    hop: int = 3_000  # for each rank beyond the first
    bandwidth: float = 350.0  # a device's, each way
    send_latency: int = 80_000
    devices: int = 8  # of one host
    network_latency: int = 25_000
    network: float = 45.0  # a device's share

    def time(self, size: int) -> int:
        """From one device of the host to another."""
        return self.latency + round(size / self.bandwidth)


@dataclass(frozen=True)
class Efficiency:
    """Which share of its peak the device reaches: fitted to kernels of an H200, see benchmarks/virtual_costs.py."""

    matrix: float = 0.87  # of the matrix rate, in a tile's inner loop
    sustained: float = 0.73  # of the matrix rate, once a product is so long that power limits it
    simt: float = 0.78  # the same without tensor cores
    streaming: float = 0.84  # of the memory bandwidth: elementwise, one type, contiguous
    heavy: float = 0.64  # with a function that takes long, like gelu
    mixed: float = 0.52  # with types to convert
    strided: float = 0.65  # of four elements a nanosecond a multiprocessor: with strides or broadcasting
    softmax: float = 0.56
    norm: float = 0.46
    columns: float = 0.65  # sums over rows, with enough columns
    rows: float = 0.75  # sums over the last dimension
    statistics: float = 0.12  # batch norm's, channels last
    foreach: float = 0.72
    gather: float = 0.56
    random: float = 0.32


@dataclass(frozen=True)
class Device:
    """All of it."""

    name: str = "virtual"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    host: HostCosts = field(default_factory=HostCosts)
    host_tensors: HostTensors = field(default_factory=HostTensors)
    queue: Queue = field(default_factory=Queue)
    copies: Copies = field(default_factory=Copies)
    memory: Memory = field(default_factory=Memory)
    wire: Wire = field(default_factory=Wire)
    efficiency: Efficiency = field(default_factory=Efficiency)
    matrix: Mapping[str, float] = field(default_factory=lambda: MappingProxyType(dict(_RATES)))

    def rate(self, dtype: str) -> float:
        """Operations a nanosecond of a matrix product, at its peak."""
        return self.matrix.get(dtype) or self.matrix.get("float32", _RATES["float32"])
