"""Measures a machine: its GPU and host, and the links between ranks.

Each figure of a GPU is the median of several repetitions. Host times are read from `now`, device times from events, so
that the virtual GPU can be measured like a real one.

For links each rank is a process, as in a job, and uses NCCL if there are GPUs, else gloo. `measure_links` starts the
ranks on this host. In a job that torchrun or another launcher has started, each rank calls `measure_as_rank`. A rank
that dies or hangs is named, and the measurement ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepbusy.timeline.files import BadInput, typed
from keepbusy.torch_names.pytorch import spin

REPETITIONS = 5
CALLS = 200
"""Launches in a row: fewer than a stream's queue holds, so none waits."""
MEGABYTE = 1_000_000
DTYPES = ("bfloat16", "float16", "tfloat32", "float32")


@dataclass(frozen=True)
class MachineFigures:
    """A GPU and its host. Times are nanoseconds, bandwidths bytes and rates operations a nanosecond."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    launch: int  # the host's time for an operator with one kernel
    view: int  # the host's time for an operator without a kernel
    read: int  # `.item()` on an idle GPU
    malloc: int  # an allocation that gets memory from the driver
    free: int  # giving memory back to the driver, on an idle device
    pinning: float  # nanoseconds a byte, for memory that was never pinned
    to_device: float  # pinned
    to_host: float
    pageable_to_device: float
    pageable_to_host: float
    bandwidth: float  # of the memory, for bytes read and written
    products: dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the probes."""

    copied: int = 256 * MEGABYTE
    streamed: int = 1024 * MEGABYTE
    product: int = 8192


def measure(sizes: Sizes | None = None, now: Callable[[], int] = time.perf_counter_ns) -> MachineFigures:
    """Measure the current device. It should be idle, and so should its host."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sizes, largest = sizes or Sizes(), properties.total_memory // 10
    copied, streamed = min(sizes.copied, largest), min(sizes.streamed, largest)
    small = torch.ones(16, device="cuda")
    launch, view = _host_time(lambda: small.mul_(1), now), _host_time(lambda: small.view(4, 4), now)
    read = _host_time(small[0].item, now, calls=1, count=4 * REPETITIONS - 1)
    malloc, free = _driver_calls(now)
    begun = now()
    torch.empty(copied, dtype=torch.uint8, device="cpu", pin_memory=True)  # once: PyTorch keeps pinned memory
    pinning = (now() - begun) / copied
    to_device, to_host = _copies(copied)
    source = torch.zeros(streamed // 4, device="cuda")  # more than any cache holds
    target = torch.empty_like(source)
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
        to_device=to_device[0],
        to_host=to_host[0],
        pageable_to_device=to_device[1],
        pageable_to_host=to_host[1],
        bandwidth=2 * streamed / _device_time(lambda: torch.mul(source, 2, out=target)),
        products={dtype: _product(dtype, sizes.product) for dtype in DTYPES},
    )


def _host_time(call: Callable[[], object], now: Callable[[], int], calls: int = CALLS, count: int = REPETITIONS) -> int:
    """The host's time for a call, in a row of calls that begins on an idle device and does not fill its queue."""
    spent = []
    for _ in range(count + 1):
        torch.cuda.synchronize()
        begun = now()
        for _ in range(calls):
            call()
        spent.append((now() - begun) / calls)
    torch.cuda.synchronize()
    return round(median(spent[1:]))


def _driver_calls(now: Callable[[], int]) -> tuple[int, int]:
    """The time for a segment, allocated by the driver and given back."""
    allocated, freed = [], []
    for _ in range(REPETITIONS + 1):
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        begun = now()
        block = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device="cuda")
        allocated.append(now() - begun)
        del block
        begun = now()
        torch.cuda.empty_cache()
        freed.append(now() - begun)
    return round(median(allocated[1:])), round(median(freed[1:]))


def _device_time(call: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Nanoseconds of the device, or of the host if it waits for each call."""
    spent = []
    for _ in range(repetitions + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) * 1e6)
    return max(median(spent[1:]), 1.0)


def _copies(size: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Rates to the device and to the host, each pinned and pageable, in bytes a nanosecond."""
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    pageable = torch.zeros(size, dtype=torch.uint8, device="cpu")  # written, so that no page is mapped during the copy
    pinned = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def rates_of(copy: Callable[[Tensor], object]) -> tuple[float, float]:
        return size / _device_time(lambda: copy(pinned)), size / _device_time(lambda: copy(pageable))

    return (
        rates_of(lambda host: device.copy_(host, non_blocking=True)),
        rates_of(lambda host: host.copy_(device, non_blocking=True)),
    )


def _product(dtype: str, size: int) -> float:
    """Operations a nanosecond of a matrix product. TF32 is allowed only for `tfloat32`."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    try:
        kind = torch.float32 if dtype.endswith("float32") else getattr(torch, dtype)
        # random numbers: a GPU multiplies zeros with less power, and so faster
        matrix, other = (torch.randn(size, size, device="cuda").to(kind) for _ in range(2))
        return 2 * size**3 / _device_time(lambda: torch.mm(matrix, other))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Links: copies between a rank and its host, messages between each two ranks, and collectives of several sizes.

PATIENCE = 20.0
"""Seconds that a rank may take from one probe to the next. The longest probe takes two."""
PATIENCE_OF_PYTORCH = 30
"""Times `PATIENCE`: PyTorch's own timeout, which must come after `_Deadline` has named the late rank."""
SLOW_COLLECTIVE = 200_000_000
"""Nanoseconds. A collective that takes longer is not measured with more bytes."""
LONG_MESSAGE, SMALL_MESSAGE = 64 << 20, 1 << 10
"""Bytes of a long copy or message, and of a small one."""
SLEEP = 20_000_000
"""Cycles for which the GPU sleeps, some ten milliseconds, so that the host is ahead during the timed calls."""
PAIRED_RANKS = 8
"""Up to so many ranks pairs are measured one by one; of more, pairs that share no rank are measured together."""
VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "PYTHON", "NVIDIA_")


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and its environment variables."""

    host: str
    gpu: str
    capability: int  # the major number
    address: str  # of its GPU on the PCI bus
    cpus: tuple[int, ...]  # on which it may run
    near: tuple[int, ...]  # CPUs beside its GPU
    rdma: tuple[int, ...]  # bytes a second of each RDMA port of the host
    topology: str  # the driver's tables of the host's GPUs; only from a host's first rank
    settings: tuple[str, ...]


@dataclass(frozen=True)
class CopyRates:
    """Pinned copies of one rank, in bytes a nanosecond: to the device and to the host."""

    alone: tuple[float, ...]
    together: tuple[float, ...]  # while all ranks copy


@dataclass(frozen=True)
class CollectiveTimes:
    """Nanoseconds of the slowest rank; sizes are bytes of a rank's larger tensor."""

    name: str
    ranks: int
    hosts: int
    sizes: tuple[int, ...]
    times: tuple[int, ...]


@dataclass(frozen=True)
class LinkFigures:
    """All measurements of links. Rates are bytes a nanosecond; `rates[source][target]` is from rank to rank."""

    backend: str
    places: tuple[RankPlace, ...]
    copies: tuple[CopyRates, ...]  # none without GPUs
    rates: tuple[tuple[float, ...], ...]
    message: int  # nanoseconds of a small message
    host_time: int  # for a collective; 0 if the host also does the work
    collectives: tuple[CollectiveTimes, ...]

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(place.host for place in self.places))

    def curve(self, name: str, hosts: int) -> CollectiveTimes | None:
        key = (name, min(hosts, 2))
        return next((curve for curve in self.collectives if (curve.name, min(curve.hosts, 2)) == key), None)


# The process that starts the ranks


def measure_links(ranks: int, patience: float = PATIENCE) -> LinkFigures:
    """Start so many processes on this host, and measure between them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, str(patience)]
    with tempfile.TemporaryFile("w+") as output:
        started = [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=output, stderr=output
            )
            for rank in range(ranks)
        ]
        try:
            codes = _ended(started, patience)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes) or not store.check(["figures"]):
            output.seek(0)
            raise BadInput(_why_ended(codes, store, output.read()))
    return typed(LinkFigures, json.loads(store.get("figures")))


def _ended(started: Sequence[subprocess.Popen[bytes]], patience: float) -> list[int]:
    """The exit codes, as known a second after the first rank failed."""
    until = time.monotonic() + PATIENCE_OF_PYTORCH * patience
    codes = [process.poll() for process in started]
    while None in codes and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + 1.0)
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    return [code or 0 for code in codes]


def _why_ended(codes: Sequence[int], store: dist.Store, output: str) -> str:
    """Why the measurement ended. A killed rank is named first, since it makes the others fail."""
    for rank, code in enumerate(codes):
        if code < 0:
            return f"rank {rank} was killed ({signal.Signals(-code).name}) while the links were measured."
    if store.check(["why"]):
        return str(store.get("why").decode())
    rank = next((rank for rank, code in enumerate(codes) if code), 0)
    last = next((line for line in reversed(output.splitlines()) if line.strip()), f"exit code {codes[rank]}")
    return f"rank {rank} ended while the links were measured: {last[:300]}"


# A rank's process


def measure_as_rank(patience: float = PATIENCE) -> LinkFigures | None:
    """Measure as one of a job's ranks. The first rank returns the figures, the others None."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=patience)))[0]
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            message = f"port {os.environ.get('MASTER_PORT')} is taken; give the job another MASTER_PORT."
            raise BadInput(message) from None
        raise BadInput(f"rank {rank} could not meet the others: {_first_line(error)}") from None
    store.set_timeout(timedelta(seconds=PATIENCE_OF_PYTORCH * patience))
    with _Deadline(store, rank, world, patience) as deadline, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return _Rank(store, rank, world, deadline).measured()
        except RuntimeError as error:
            raise BadInput(f"rank {rank} ended in {deadline.step}: {_first_line(error)}") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


class _Deadline:
    """Ends this process if it has not reached the next step in time, and says which rank is late."""

    def __init__(self, store: dist.Store, rank: int, world: int, patience: float) -> None:
        self.step, self.count, self.patience = "their first meeting", 0, patience
        self._store, self._rank, self._world, self._since = store, rank, world, time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> _Deadline:
        self.reach(self.step)
        threading.Thread(target=self._watch, args=(self._store.clone(),), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def reach(self, step: str) -> None:
        """Begin a step. All ranks take the same steps."""
        self.count += 1
        self.step, self._since = step, time.monotonic()
        self._store.set(f"at{self._rank}", f"{self.count:06} {step}")

    def _watch(self, store: dist.Store) -> None:
        while not self._over.wait(min(1.0, self.patience / 4)):
            store.set(f"alive{self._rank}", str(time.time()))
            if time.monotonic() - self._since > self.patience:
                why = self._who_is_late(store)
                store.set("why", why)
                sys.stderr.write(f"keepbusy: {why}\n")
                sys.stderr.flush()
                os._exit(2)

    def _who_is_late(self, store: dist.Store) -> str:
        def values(key: str) -> list[str]:
            keys = [f"{key}{rank}" for rank in range(self._world)]
            return [store.get(name).decode() if store.check([name]) else "0" for name in keys]

        steps, patience, now = values("at"), f"{self.patience:.0f} s", time.time()
        silent = [rank for rank, alive in enumerate(values("alive")) if now - float(alive) > self.patience / 2]
        late = [rank for rank, step in enumerate(steps) if step < max(steps)]
        if silent:
            return f"{_named(silent)} gave no sign of life for {patience}, while the others waited in {self.step}."
        if late:
            return f"{_named(late)} did not come on from {min(steps)[7:]}, for which the others have waited {patience}."
        return f"no rank came back from {self.step} within {patience}; NCCL_DEBUG=INFO shows what NCCL waits for."


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class _Rank:
    """The measurements of one rank; all ranks do the same in the same order."""

    def __init__(self, store: dist.Store, rank: int, world: int, deadline: _Deadline) -> None:
        self.store, self.rank, self.world, self.deadline = store, rank, world, deadline
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")
        self.host_times: list[int] = []

    def measured(self) -> LinkFigures | None:
        if self.cuda:
            torch.cuda.set_device(self.device)
        limit = timedelta(seconds=PATIENCE_OF_PYTORCH * self.deadline.patience)
        backend = "nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=limit)
        places = [typed(RankPlace, place) for place in self._from_all(asdict(_place(self.device)))]
        copies = [typed(CopyRates, own) for own in self._from_all(asdict(self._copies(places)))] if self.cuda else []
        rates, message = self._pairs()
        curves = list(self._collectives(places))
        figures = LinkFigures(
            backend, tuple(places), tuple(copies), rates, message,
            round(median(self.host_times)) if self.host_times else 0, tuple(curves),
        )  # fmt: skip
        self.deadline.reach("the end")
        if self.rank:
            return None
        self.store.set("figures", json.dumps(asdict(figures)))
        return figures

    def _from_all(self, value: Any) -> list[Any]:
        """The value of each rank, in order."""
        self.deadline.reach("telling the others where it runs")
        number = self.deadline.count
        self.store.set(f"said{number}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"said{number}/{rank}")) for rank in range(self.world)]

    # copies

    def _copies(self, places: Sequence[RankPlace]) -> CopyRates:
        """The ranks of a host copy one after the other; then all ranks copy."""
        device = torch.zeros(LONG_MESSAGE, dtype=torch.uint8, device=self.device)
        pinned = torch.zeros(LONG_MESSAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        copies = (lambda: device.copy_(pinned, non_blocking=True)), (lambda: pinned.copy_(device, non_blocking=True))
        alone: tuple[float, ...] = ()
        place_on_host = sum(place.host == places[self.rank].host for place in places[: self.rank])
        most_on_a_host = max(Counter(place.host for place in places).values())
        for number in range(most_on_a_host):
            self._meet("copies alone")
            if number == place_on_host:
                alone = tuple(LONG_MESSAGE / _device_time(copy) for copy in copies)
        together = []
        for copy in copies:
            self._meet("copies of all ranks at once")
            together.append(LONG_MESSAGE / _device_time(copy, 10))
        return CopyRates(alone, tuple(together))

    def _meet(self, step: str) -> None:
        self.deadline.reach(step)
        dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()

    # pairs of ranks

    def _pairs(self) -> tuple[tuple[tuple[float, ...], ...], int]:
        size = 4 * LONG_MESSAGE if self.cuda else LONG_MESSAGE // 16
        times_by_pair = {pair: times for rank in self._from_all(self._received(size)) for pair, times in rank.items()}
        everyone = range(self.world)
        rates = tuple(
            tuple(size / times_by_pair[f"{source} {other}"][0] if source != other else 0.0 for other in everyone)
            for source in everyone
        )
        return rates, round(median(small for _, small in times_by_pair.values()))

    def _received(self, size: int) -> dict[str, tuple[float, float]]:
        """The times of large and small messages to this rank, by pair; a message ends when its last byte arrives."""
        large, small = (torch.zeros(length, dtype=torch.uint8, device=self.device) for length in (size, SMALL_MESSAGE))
        times_by_pair: dict[str, tuple[float, float]] = {}
        for meeting in _meetings(self.world):
            self._meet("messages between two ranks")
            for sender, other in (pair for two in meeting for pair in (two, two[::-1])):
                if self.rank in (sender, other):
                    times = self._message(sender, other, large), self._message(sender, other, small)
                    times_by_pair |= {f"{sender} {other}": times} if self.rank == other else {}
        return times_by_pair

    def _message(self, sender: int, other: int, data: Tensor) -> float:
        """Nanoseconds from one rank to another, the best of three repetitions: what the link can do."""
        act, peer = (dist.isend, other) if self.rank == sender else (dist.irecv, sender)

        def pass_on() -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(act, data, peer)]):
                work.wait()

        return min(self._spent(pass_on, 4 if len(data) > SMALL_MESSAGE else 20)[0] for _ in range(3))

    # collectives

    def _collectives(self, places: Sequence[RankPlace]) -> Iterator[CollectiveTimes]:
        """Collectives among all ranks, and with several hosts also among the ranks of the first host."""
        hosts = len({place.host for place in places})
        yield from self._curves(dist.group.WORLD, range(self.world), hosts)
        beside = [rank for rank, place in enumerate(places) if place.host == places[0].host]
        if hosts > 1 and len(beside) > 1:
            yield from self._curves(dist.new_group(beside), beside, 1)

    def _curves(self, group: Any, members: Sequence[int], hosts: int) -> Iterator[CollectiveTimes]:
        sizes = [1 << power for power in range(10, 29 if self.cuda else 25, 3)]
        for name in collective_calls(torch.empty(len(members)), group, len(members)):
            times: list[int] = []
            for size in sizes if name != "barrier" else sizes[:1]:
                self.deadline.reach(f"{name} of {size} bytes")
                times.append(self._collective(name, size, group, members))
                if times[-1] > SLOW_COLLECTIVE:
                    break
            known_sizes = sizes[: len(times)] if name != "barrier" else [0]
            yield CollectiveTimes(name, len(members), hosts, tuple(known_sizes), tuple(times))

    def _collective(self, name: str, size: int, group: Any, members: Sequence[int]) -> int:
        """The median of three repetitions on the slowest rank; ranks outside of the group get it, too."""
        duration = 0.0
        if self.rank in members:
            data = torch.ones(max(size // 4 // len(members), 1) * len(members), device=self.device)
            call = collective_calls(data, group, len(members))[name]
            calls = max(3, min(20, (1 << 30 if self.cuda else 16 << 20) // size))
            repetitions = [self._spent(call, calls) for _ in range(3)]
            duration = median(spent for spent, _ in repetitions)
            if self.cuda and size <= 1 << 16:
                self.host_times.append(round(median(host_time for _, host_time in repetitions)))
        slowest = torch.tensor(duration, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(float(slowest))

    def _spent(self, call: Callable[[], Any], calls: int) -> tuple[float, float]:
        """Nanoseconds of a call, and of the host for it, without a first call, in which ranks wait for each other."""
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            spin(SLEEP)
        call()
        if self.cuda:
            begin.record()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            call()
        host_time = (time.perf_counter_ns() - begun) / calls
        if not self.cuda:
            return host_time, 0.0
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e6 / calls, host_time


def collective_calls(data: Tensor, group: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    """Calls of each collective; `data` is a rank's larger tensor."""
    part, other = torch.empty_like(data[: len(data) // ranks]), torch.empty_like(data)
    return {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, data, group=group),
        "broadcast": lambda: dist.broadcast(data, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, data, group=group),
        "barrier": lambda: dist.barrier(group),
    }


def _meetings(ranks: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks: one by one, or of many ranks in groups in which each rank has one partner."""
    if ranks <= PAIRED_RANKS:
        return [[(first, other)] for first in range(ranks) for other in range(first + 1, ranks)]
    seats = [*range(ranks), *([-1] if ranks % 2 else [])]
    meetings = []
    for _ in range(len(seats) - 1):
        halves = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        meetings.append([(min(two), max(two)) for two in halves if -1 not in two])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return meetings


# Where a rank runs


def _place(device: torch.device) -> RankPlace:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    bus = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    address = f"{bus[0]:04x}:{bus[1]:02x}:{bus[2]:02x}.0" if min(bus) >= 0 else ""
    near = _read(f"/sys/bus/pci/devices/{address}/local_cpulist") if address else ""  # `0-3,8` as the kernel writes it
    ends = [part.partition("-") for part in near.split(",") if part]
    # `400 Gb/sec (4X NDR)` as the kernel writes it
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    rates = [_read(port).partition(" ")[0] for port in ports]
    return RankPlace(
        host=f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip(),
        gpu=properties.name if properties else "",
        capability=properties.major if properties else 0,
        address=address,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        near=tuple(cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)),
        rdma=tuple(round(float(rate) * 1e9 / 8) for rate in rates if rate.replace(".", "", 1).isdigit()),
        topology=_topology() if properties and os.environ.get("LOCAL_RANK", "0") == "0" else "",
        settings=tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES))),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _topology() -> str:
    """The driver's list of GPUs with their addresses, and its table of the links between them."""
    queries = (["--query-gpu=index,pci.bus_id", "--format=csv,noheader"], ["topo", "-m"])
    try:
        answers = [
            subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=10, check=False).stdout
            for query in queries
        ]
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "\n".join(answers)


if __name__ == "__main__":
    try:
        measure_as_rank(float(sys.argv[1]))
    except BadInput as error:
        sys.exit(f"keepbusy: {error}")
