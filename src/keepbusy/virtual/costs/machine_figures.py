"""What a machine can do by itself, whatever runs on it: its GPU and host, and the links between ranks.

Of a GPU every figure is the median of several rounds. Host times are read from `now`, device times from events, so that
the virtual GPU can be measured like a real one.

Of links each rank is a process, as in the job: NCCL's where there are GPUs and gloo's where there are none.
`measure_links` starts them here; inside a job that torchrun or another launcher has started, each of its ranks calls
`measure_as_rank`. A rank that dies or hangs is named, and ends the measurement.
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


def measure(sizes: Sizes | None = None, now: Callable[[], int] = time.perf_counter_ns) -> MachineFigures:
    """Measure the current device. It should be idle, and so should its host."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sizes, largest = sizes or Sizes(), properties.total_memory // 10
    copied, streamed = min(sizes.copied, largest), min(sizes.streamed, largest)
    small = torch.ones(16, device="cuda")
    launch, view = _host_time(lambda: small.mul_(1), now), _host_time(lambda: small.view(4, 4), now)
    read = _host_time(small[0].item, now, calls=1, rounds=4 * ROUNDS)
    malloc, free = _driver_calls(now)
    begun = now()
    torch.empty(copied, dtype=torch.uint8, device="cpu", pin_memory=True)  # once: what was pinned before is kept
    pinning = (now() - begun) / copied
    inward, home = _copies(copied)
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
        to_device=inward[0],
        to_host=home[0],
        pageable_to_device=inward[1],
        pageable_to_host=home[1],
        bandwidth=2 * streamed / _device_time(lambda: torch.mul(source, 2, out=target)),
        products={dtype: _product(dtype, sizes.product) for dtype in DTYPES},
    )


def _host_time(call: Callable[[], object], now: Callable[[], int], calls: int = CALLS, rounds: int = ROUNDS + 1) -> int:
    """A call's share of a row of calls, which begins on an idle device and is too short to fill its queue."""
    spent = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = now()
        for _ in range(calls):
            call()
        spent.append((now() - begun) / calls)
    torch.cuda.synchronize()
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


def _device_time(call: Callable[[], object], rounds: int = ROUNDS) -> float:
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
    pageable = torch.zeros(size, dtype=torch.uint8, device="cpu")  # touched, so that no page is mapped on the way
    pinned = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def both(copy: Callable[[Tensor], object]) -> tuple[float, float]:
        return size / _device_time(lambda: copy(pinned)), size / _device_time(lambda: copy(pageable))

    return (
        both(lambda host: device.copy_(host, non_blocking=True)),
        both(lambda host: host.copy_(device, non_blocking=True)),
    )


def _product(dtype: str, size: int) -> float:
    """Operations a nanosecond. Float32 is measured as PyTorch computes it by default, without TF32, and with it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
    try:
        kind = torch.float32 if dtype.endswith("float32") else getattr(torch, dtype)
        # drawn, not constant: a GPU multiplies zeros with less power, and so faster
        matrix, other = (torch.randn(size, size, device="cuda").to(kind) for _ in range(2))
        return 2 * size**3 / _device_time(lambda: torch.mm(matrix, other))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# How ranks reach each other and their hosts: copies, messages between each two, collectives over sizes.

PATIENCE = 20.0
"""Seconds in which each rank must come from one probe to the next. The longest one takes two."""
PATIENCE_OF_PYTORCH = 30
"""Times `PATIENCE`: PyTorch's own limit, which must not strike before `_Deadline` says who is late."""
SLOW_COLLECTIVE = 200_000_000
"""A collective that takes so long is not tried with more bytes."""
LONG_MESSAGE, SMALL_MESSAGE = 64 << 20, 1 << 10
"""Bytes of a long copy or message, and of a small one."""
SLEEP = 20_000_000
"""Cycles in which the GPU sleeps, some ten milliseconds, so that the host is ahead with what is then timed."""
PAIRED_RANKS = 8
"""Up to so many ranks each two are measured while the others rest; of more, pairs that share no rank at once."""
VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "PYTHON", "NVIDIA_")


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, and what is set there."""

    host: str
    gpu: str
    capability: int  # the first number of CUDA's
    address: str  # of its GPU on the PCI bus
    cpus: tuple[int, ...]  # on which it may run
    near: tuple[int, ...]  # those beside its GPU
    rdma: tuple[int, ...]  # of each RDMA port of the host, bytes a second
    topology: str  # what the driver says of the host's GPUs, of a host's first rank
    settings: tuple[str, ...]


@dataclass(frozen=True)
class CopyRates:
    """Pinned copies of one rank, in bytes a nanosecond: to the device and home."""

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
    """All that was measured. Rates are bytes a nanosecond; `rates[one][other]` is from one rank to another."""

    backend: str
    places: tuple[RankPlace, ...]
    copies: tuple[CopyRates, ...]  # none without GPUs
    rates: tuple[tuple[float, ...], ...]
    message: int  # nanoseconds of a small one
    asked: int  # the host's time for a collective; 0 where the host does its work too
    collectives: tuple[CollectiveTimes, ...]

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(place.host for place in self.places))

    def curve(self, name: str, hosts: int) -> CollectiveTimes | None:
        wanted = (name, min(hosts, 2))
        return next((curve for curve in self.collectives if (curve.name, min(curve.hosts, 2)) == wanted), None)


# From outside: the ranks' processes


def measure_links(ranks: int, patience: float = PATIENCE) -> LinkFigures:
    """Start so many processes on this host, and measure between them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, str(patience)]
    with tempfile.TemporaryFile("w+") as said:
        started = [
            subprocess.Popen(
                command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=said, stderr=said
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
            said.seek(0)
            raise BadInput(_why_ended(codes, store, said.read()))
    return typed(LinkFigures, json.loads(store.get("figures")))


def _ended(started: Sequence[subprocess.Popen[bytes]], patience: float) -> list[int]:
    """The exit codes, as far as they are known a moment after the first rank failed."""
    until = time.monotonic() + PATIENCE_OF_PYTORCH * patience
    codes = [process.poll() for process in started]
    while None in codes and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + 1.0)
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    return [code or 0 for code in codes]


def _why_ended(codes: Sequence[int], store: dist.Store, said: str) -> str:
    """Killed ranks come first: what the others say of it is a consequence."""
    for rank, code in enumerate(codes):
        if code < 0:
            return f"rank {rank} was killed ({signal.Signals(-code).name}) while the links were measured."
    if store.check(["why"]):
        return str(store.get("why").decode())
    rank = next((rank for rank, code in enumerate(codes) if code), 0)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), f"exit code {codes[rank]}")
    return f"rank {rank} ended while the links were measured: {last[:300]}"


# From inside: one rank


def measure_as_rank(patience: float = PATIENCE) -> LinkFigures | None:
    """This process is one of a job's ranks: the first one has the figures, the others nothing."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=patience)))[0]
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            taken = f"port {os.environ.get('MASTER_PORT')} is taken; give the job another MASTER_PORT."
            raise BadInput(taken) from None
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
    """Ends this process where it has not come from one step to the next in time, and says which rank is late."""

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
        """All ranks take the same steps."""
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
        def said(what: str) -> list[str]:
            keys = [f"{what}{rank}" for rank in range(self._world)]
            return [store.get(key).decode() if store.check([key]) else "0" for key in keys]

        at, waited, now = said("at"), f"{self.patience:.0f} s", time.time()
        silent = [rank for rank, alive in enumerate(said("alive")) if now - float(alive) > self.patience / 2]
        late = [rank for rank, step in enumerate(at) if step < max(at)]
        if silent:
            return f"{_named(silent)} gave no sign of life for {waited}, while the others waited in {self.step}."
        if late:
            return f"{_named(late)} did not come on from {min(at)[7:]}, for which the others have waited {waited}."
        return f"no rank came back from {self.step} within {waited}; NCCL_DEBUG=INFO shows what NCCL waits for."


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class _Rank:
    """What one rank does. All do the same in the same order."""

    def __init__(self, store: dist.Store, rank: int, world: int, deadline: _Deadline) -> None:
        self.store, self.rank, self.world, self.deadline = store, rank, world, deadline
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local) if self.cuda else torch.device("cpu")
        self.asked: list[int] = []

    def measured(self) -> LinkFigures | None:
        if self.cuda:
            torch.cuda.set_device(self.device)
        limit = timedelta(seconds=PATIENCE_OF_PYTORCH * self.deadline.patience)
        backend = "nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=limit)
        places = [typed(RankPlace, place) for place in self._of_all(asdict(_place(self.device)))]
        copies = [typed(CopyRates, rates) for rates in self._of_all(asdict(self._copies(places)))] if self.cuda else []
        rates, message = self._pairs()
        curves = list(self._collectives(places))
        found = LinkFigures(
            backend, tuple(places), tuple(copies), rates, message,
            round(median(self.asked)) if self.asked else 0, tuple(curves),
        )  # fmt: skip
        self.deadline.reach("the end")
        if self.rank:
            return None
        self.store.set("figures", json.dumps(asdict(found)))
        return found

    def _of_all(self, value: Any) -> list[Any]:
        """What each rank says, in order."""
        self.deadline.reach("telling the others where it runs")
        number = self.deadline.count
        self.store.set(f"said{number}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"said{number}/{rank}")) for rank in range(self.world)]

    # copies

    def _copies(self, places: Sequence[RankPlace]) -> CopyRates:
        """Those of one host take turns; then all copy."""
        device = torch.zeros(LONG_MESSAGE, dtype=torch.uint8, device=self.device)
        pinned = torch.zeros(LONG_MESSAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        ways = (lambda: device.copy_(pinned, non_blocking=True)), (lambda: pinned.copy_(device, non_blocking=True))
        alone: tuple[float, ...] = ()
        turn = sum(place.host == places[self.rank].host for place in places[: self.rank])
        most_on_a_host = max(Counter(place.host for place in places).values())
        for number in range(most_on_a_host):
            self._meet("copies alone")
            if number == turn:
                alone = tuple(LONG_MESSAGE / _device_time(copy) for copy in ways)
        together = []
        for copy in ways:
            self._meet("copies of all ranks at once")
            together.append(LONG_MESSAGE / _device_time(copy, 10))
        return CopyRates(alone, tuple(together))

    def _meet(self, step: str) -> None:
        self.deadline.reach(step)
        dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()

    # each two

    def _pairs(self) -> tuple[tuple[tuple[float, ...], ...], int]:
        size = 4 * LONG_MESSAGE if self.cuda else LONG_MESSAGE // 16
        known = {pair: times for received in self._of_all(self._received(size)) for pair, times in received.items()}
        everyone = range(self.world)
        rates = tuple(
            tuple(size / known[f"{source} {other}"][0] if source != other else 0.0 for other in everyone)
            for source in everyone
        )
        return rates, round(median(small for _, small in known.values()))

    def _received(self, size: int) -> dict[str, tuple[float, float]]:
        """What messages to this rank took, large ones and small ones: one ends with its last byte there."""
        large, small = (torch.zeros(many, dtype=torch.uint8, device=self.device) for many in (size, SMALL_MESSAGE))
        took: dict[str, tuple[float, float]] = {}
        for meeting in _meetings(self.world):
            self._meet("messages between two ranks")
            for sender, other in (pair for two in meeting for pair in (two, two[::-1])):
                if self.rank in (sender, other):
                    times = self._message(sender, other, large), self._message(sender, other, small)
                    took |= {f"{sender} {other}": times} if self.rank == other else {}
        return took

    def _message(self, sender: int, other: int, data: Tensor) -> float:
        """Nanoseconds from one rank to another, in the best of three rounds: what the link can do."""
        act, peer = (dist.isend, other) if self.rank == sender else (dist.irecv, sender)

        def pass_on() -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(act, data, peer)]):
                work.wait()

        return min(self._spent(pass_on, 4 if len(data) > SMALL_MESSAGE else 20)[0] for _ in range(3))

    # collectives

    def _collectives(self, places: Sequence[RankPlace]) -> Iterator[CollectiveTimes]:
        """Among all ranks, and with several hosts also among the ranks of the first one."""
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
            known = sizes[: len(times)] if name != "barrier" else [0]
            yield CollectiveTimes(name, len(members), hosts, tuple(known), tuple(times))

    def _collective(self, name: str, size: int, group: Any, members: Sequence[int]) -> int:
        """The median of three rounds on the slowest rank; ranks outside of the group learn it too."""
        took = 0.0
        if self.rank in members:
            data = torch.ones(max(size // 4 // len(members), 1) * len(members), device=self.device)
            call = collective_calls(data, group, len(members))[name]
            turns = max(3, min(20, (1 << 30 if self.cuda else 16 << 20) // size))
            rounds = [self._spent(call, turns) for _ in range(3)]
            took = median(spent for spent, _ in rounds)
            self.asked += [round(median(asked for _, asked in rounds))] if self.cuda and size <= 1 << 16 else []
        slowest = torch.tensor(took, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(float(slowest))

    def _spent(self, call: Callable[[], Any], turns: int) -> tuple[float, float]:
        """Nanoseconds of one of several calls after a first, at which the ranks meet; and the host's for asking."""
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP)
        call()
        if self.cuda:
            begin.record()
        begun = time.perf_counter_ns()
        for _ in range(turns):
            call()
        asked = (time.perf_counter_ns() - begun) / turns
        if not self.cuda:
            return asked, 0.0
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e6 / turns, asked


def collective_calls(data: Tensor, group: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    """Each collective, such that `data` is a rank's larger tensor."""
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
    """Each two once: pair by pair, or of many ranks in rounds in which each has one partner."""
    if ranks <= PAIRED_RANKS:
        return [[(first, other)] for first in range(ranks) for other in range(first + 1, ranks)]
    seats = [*range(ranks), *([-1] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        halves = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(two), max(two)) for two in halves if -1 not in two])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


# Where a rank runs


def _place(device: torch.device) -> RankPlace:
    about = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    bus = [getattr(about, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    address = f"{bus[0]:04x}:{bus[1]:02x}:{bus[2]:02x}.0" if min(bus) >= 0 else ""
    near = _read(f"/sys/bus/pci/devices/{address}/local_cpulist") if address else ""  # `0-3,8` as the kernel writes it
    ends = [part.partition("-") for part in near.split(",") if part]
    # `400 Gb/sec (4X NDR)` as the kernel writes it
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    rates = [_read(port).partition(" ")[0] for port in ports]
    return RankPlace(
        host=f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip(),
        gpu=about.name if about else "",
        capability=about.major if about else 0,
        address=address,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        near=tuple(cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)),
        rdma=tuple(round(float(rate) * 1e9 / 8) for rate in rates if rate.replace(".", "", 1).isdigit()),
        topology=_topology() if about and os.environ.get("LOCAL_RANK", "0") == "0" else "",
        settings=tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES))),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _topology() -> str:
    """Addresses of the GPUs as the driver counts them, and its table of how they are joined."""
    asked = (["--query-gpu=index,pci.bus_id", "--format=csv,noheader"], ["topo", "-m"])
    try:
        answers = [
            subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=10, check=False).stdout
            for query in asked
        ]
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "\n".join(answers)


if __name__ == "__main__":
    try:
        measure_as_rank(float(sys.argv[1]))
    except BadInput as error:
        sys.exit(f"keepbusy: {error}")
