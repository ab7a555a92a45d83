"""Say what this machine and its links can do, and what is set on it that makes a GPU wait.

It takes a few seconds, with several ranks up to a minute, in which the GPUs should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import combinations, permutations
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from keepbusy.cli import check_place, whole_number, without_pytorch
from keepbusy.cli.program import DRIVER
from keepbusy.timeline.figures import duration, listing
from keepbusy.timeline.files import BadInput, write_whole
from keepbusy.virtual.costs import device
from keepbusy.virtual.costs.device import CollectiveLaw, crossings

if TYPE_CHECKING:
    from keepbusy.virtual.costs.machine_figures import CollectiveTimes, LinkFigures, MachineFigures


EXAMPLES = """\
examples:
  keepbusy doctor
  keepbusy doctor --ranks 8 --save my-node.toml && keepbusy plan --gpus 8 --on my-node.toml train.py
  torchrun --nnodes 4 --nproc-per-node 8 -m keepbusy doctor --ranks 32 --save my-cluster.toml
"""
_SLOW_HOST = 15_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=whole_number("ranks", 4096),
        metavar="N",
        help="measure the links of so many ranks (default: as many as there are GPUs)",
    )
    parser.add_argument(
        "--save", metavar="GPU.toml", type=Path, help="write a device file, with which other machines can be this one"
    )


def run(options: argparse.Namespace) -> Iterable[str]:
    if options.save:
        if options.save.suffix != ".toml":
            raise BadInput(f"{options.save} is no name for a device file; it ends in .toml.")
        check_place(options.save)
    settings = harms(os.environ, len(os.sched_getaffinity(0)), ask_driver())
    wants_links, missing = bool(options.ranks and options.ranks > 1), _missing()
    if not missing or (wants_links and find_spec("torch") and not DRIVER.exists()):  # gloo needs no GPU
        return _examined(settings, options.ranks, options.save)
    if options.save or wants_links:
        raise BadInput(f"there is nothing to {f'write into {options.save}' if options.save else 'measure'}: {missing}")
    return "\n".join([f"keepbusy doctor · {_software()}", "", missing, "", *_harm_lines(settings), *internals(), ""])


def _missing() -> str:
    """Why no GPU can be measured; "" if one can."""
    if find_spec("torch") is None:
        return without_pytorch("Measuring")
    import torch

    if torch.cuda.is_available():
        return ""
    if not DRIVER.exists():
        return "There is no GPU here. `keepbusy run` takes a virtual one: keepbusy run --on h200 train.py"
    if torch.version.cuda is None:
        return f"There is a GPU, but this PyTorch ({torch.__version__}) was built without CUDA; install one with it."
    return f"There is a GPU, but PyTorch cannot use it: CUDA {torch.version.cuda} may want a newer driver."


def _examined(settings: list[Harm], wanted_ranks: int | None, path: Path | None) -> Iterator[str]:
    """Measure the links first: all ranks of a job do, and only the first one goes on."""
    import torch

    from keepbusy.virtual.costs.machine_figures import measure, measure_as_rank, measure_links

    gpus = torch.cuda.device_count()
    ranks = wanted_ranks or max(gpus, 1)
    _check(ranks, gpus)
    links: LinkFigures | None = None
    if ranks > 1:
        links = measure_as_rank() if "RANK" in os.environ else measure_links(ranks)
        if links is None:  # this is not the first rank of its job
            return
    machine = measure() if gpus else None
    name, over = machine.name if machine else "", f"{len(links.places)} ranks over {links.backend}" if links else ""
    yield f"keepbusy doctor · {' · '.join(filter(None, [name, over, _software()]))}\n"
    if machine:
        yield "\n" + "".join(f"  {name:<26}{value}\n" for name, value in _figures(machine))
        if machine.launch > _SLOW_HOST:
            slow = f"a launch takes {duration(machine.launch)}, three times what is common"
            settings = [
                *settings,
                Harm(slow, "look for other work on this host, a debugger or a power-saving governor"),
            ]
    if links:
        yield from link_tables(links)
        flags_of_rank = set(flags(os.environ))  # `link_harms` names them with the ranks that have them
        settings = [*(harm for harm in settings if harm not in flags_of_rank), *link_harms(links)]
    yield "\n" + "\n".join([*_harm_lines(settings), *internals(), ""])
    if path:
        write_whole(path, device_file(machine, links, gpus))
        plan = f"keepbusy plan --gpus {ranks}" if links else "keepbusy run"
        yield f"\n{path} is this machine: {plan} --on {path} train.py\n"


def _check(ranks: int, gpus: int) -> None:
    """Raise BadInput if this job or host cannot have so many ranks, before anything is started."""
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if "RANK" in os.environ and world != ranks:
        raise BadInput(f"this job has {world} ranks, not {ranks}; say --ranks {world}.")
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if "RANK" in os.environ else ranks
    if gpus and of_host > gpus:
        raise BadInput(f"{of_host} ranks need {of_host} GPUs, and this host has {gpus}; say --ranks {gpus}.")


def _software() -> str:
    versions = [f"Python {platform.python_version()}"]
    if "torch" in sys.modules:
        import torch

        cuda = f" (CUDA {torch.version.cuda})" if torch.version.cuda else " (no CUDA)"
        versions.insert(0, f"PyTorch {torch.__version__.partition('+')[0]}{cuda}")
    with suppress(OSError):  # no driver is loaded
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        if version := re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", driver):
            versions.insert(0, f"driver {version[1]}")
    return " · ".join(versions)


def _figures(machine: MachineFigures) -> Iterator[tuple[str, str]]:
    yield "launching one kernel", f"{duration(machine.launch)} of the host"
    yield ".item() on an idle GPU", duration(machine.read)
    yield "copies, pinned", _both_rates(machine.to_device, machine.to_host)
    yield "copies, pageable", _both_rates(machine.pageable_to_device, machine.pageable_to_host)
    yield "pinning memory", f"{duration(round(machine.pinning * 1_000_000))} a megabyte, the first time"
    yield "memory", f"{rate(machine.bandwidth)}, {machine.memory / 2**30:.1f} GiB"
    yield "memory from the driver", f"{duration(machine.malloc)}, and {duration(machine.free)} to give it back"
    yield "matrix products", " · ".join(f"{dtype} {rate / 1e3:.0f} TFLOP/s" for dtype, rate in machine.products.items())


def _both_rates(to_device: float, to_host: float) -> str:
    return f"{rate(to_device)} to the device, {rate(to_host)} home"


def _harm_lines(settings: list[Harm]) -> list[str]:
    if not settings:
        return ["Nothing is set here that makes a GPU wait."]
    return [f"!  {harm.what}: {harm.remedy}." for harm in settings]


def internals() -> Iterator[str]:
    """Whether this PyTorch and Python have the internals that keepbusy uses, and what is lost where they do not."""
    if find_spec("torch") is None:
        return
    from keepbusy.torch_names import probe_all

    count, findings = probe_all()
    if not findings:
        yield f"PyTorch's internals: {count} names looked up, all as expected."
    else:
        yield f"PyTorch's internals: {count} names looked up, {len(findings)} not as expected."
        yield from (f"!  {finding}." for finding in findings)


# Settings of a machine that make a GPU wait: debug flags, too few cores, lowered clocks


class Harm(NamedTuple):
    """What costs time, and what to do about it."""

    what: str
    remedy: str


def _is_one(value: str) -> bool:
    return value == "1"


def _is_on(value: str) -> bool:
    return value not in ("", "0")


_FLAGS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", _is_on, "makes the host wait for every kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "checks every collective with another one"),
    ("NCCL_DEBUG", lambda value: value.upper() in ("TRACE", "INFO"), "writes a log from every rank"),
    ("NCCL_P2P_DISABLE", _is_one, "keeps GPUs from reaching each other's memory"),
    ("NCCL_P2P_LEVEL", lambda value: value.upper() in ("LOC", "0"), "keeps GPUs from reaching each other's memory"),
    ("NCCL_SHM_DISABLE", _is_one, "sends between processes of one host over the network"),
    ("NCCL_IB_DISABLE", _is_one, "sends between hosts over TCP, although there may be RDMA"),
    ("NCCL_NET", lambda value: value.lower() == "socket", "sends between hosts over TCP, although there may be RDMA"),
    ("NCCL_ALGO", bool, "forces one algorithm, whatever the size"),
    ("NCCL_PROTO", bool, "forces one protocol, whatever the size"),
    ("NCCL_MAX_NCHANNELS", bool, "holds down how many channels NCCL may use"),
    ("NCCL_SOCKET_IFNAME", lambda value: value.lstrip("=").startswith(("lo", "docker")), "names no way to other hosts"),
    ("NCCL_BLOCKING_WAIT", _is_one, "makes the host wait for every collective"),
    ("TORCH_NCCL_BLOCKING_WAIT", _is_one, "makes the host wait for every collective"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_one, "asks the driver for every tensor's memory"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", _is_one, "lets streams wait for one another"),
    ("NVIDIA_TF32_OVERRIDE", lambda value: value == "0", "keeps matrix products in float32 from the tensor cores"),
    ("PYTHONTRACEMALLOC", _is_on, "slows every allocation of Python's"),
    ("PYTHONDEVMODE", _is_on, "makes Python check itself all the time"),
)


def harms(environment: Mapping[str, str], cores: int, driver: str) -> list[Harm]:
    """Harmful settings: variables, too few cores, and what the driver's answer shows."""
    few = f"this process may use {cores} {'core' if cores == 1 else 'cores'} only"
    remedy = "give it a core for the loop, and one for each of the loader's workers"
    return [*flags(environment), *([Harm(few, remedy)] if cores < 4 else []), *_gpus(driver)]


def flags(environment: Mapping[str, str]) -> Iterator[Harm]:
    """Harmful environment variables of one rank."""
    for name, is_harmful, why in _FLAGS:
        value = environment.get(name)
        if value is not None and is_harmful(value):
            yield Harm(f"{name}={value} {why}", f"unset {name}, unless you are hunting a bug with it")
    order = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.strip().isdecimal() for number in order) and [*map(int, order)] != sorted(map(int, order)):
        yield Harm(
            f"CUDA_VISIBLE_DEVICES={','.join(order)} counts the GPUs in another order than the machine, so "
            "ranks run on cores and network cards far from their GPUs",
            f"give them in order: CUDA_VISIBLE_DEVICES={','.join(map(str, sorted(map(int, order))))}",
        )


_DRIVER_FIELDS = (
    "clocks_throttle_reasons.sw_thermal_slowdown,clocks_throttle_reasons.hw_slowdown,utilization.gpu,memory.used,"
    "pcie.link.width.current,pcie.link.width.max"
)


def ask_driver() -> str:
    """The driver's answer, with one line per GPU; "" without a driver."""
    command = ["nvidia-smi", f"--query-gpu={_DRIVER_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _gpus(answer: str) -> Iterator[Harm]:
    for number, line in enumerate(answer.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != 6:
            continue
        hot, slowed, busy, used, lanes, all_lanes = words
        if "Active" in (hot, slowed):
            yield Harm(f"GPU {number} has lowered its clocks", "look after its cooling and power")
        if busy.isdecimal() and int(busy) > 5:
            yield Harm(
                f"GPU {number} is {busy}% busy with something else ({used} MiB in use)",
                "stop that, or read the figures with it in mind",
            )
        if lanes.isdecimal() and all_lanes.isdecimal() and int(lanes) < int(all_lanes):
            yield Harm(f"GPU {number} has {lanes} of its {all_lanes} PCIe lanes", "look at its slot and riser")


_LARGEST_TABLE = 16
"""With more ranks the table has hosts instead."""
_FAULTY = 0.5
"""A link is faulty below this share of what it can carry, or of what similar links reach."""
_NVLINK = 25.0
"""Bytes per nanosecond and direction, for an NVLink of generations 2 to 4; generation 5 carries twice that."""
_JOINED = {
    "PIX": "a PCIe switch", "PXB": "several PCIe switches", "PHB": "PCIe and a CPU", "NODE": "PCIe and a CPU",
    "SYS": "PCIe and the link between two CPUs",
}  # fmt: skip


def rate(bytes_a_nanosecond: float) -> str:
    if bytes_a_nanosecond >= 1_000:
        return f"{bytes_a_nanosecond / 1e3:.1f} TB/s"
    return f"{figure(bytes_a_nanosecond)} GB/s"


def figure(bytes_a_nanosecond: float) -> str:
    digits = 0 if bytes_a_nanosecond >= 10 else 1 if bytes_a_nanosecond >= 1 else 2
    return f"{bytes_a_nanosecond:.{digits}f}"


# The measured links as tables


def link_tables(links: LinkFigures) -> Iterator[str]:
    yield "\n  who reaches whom, GB/s\n"
    yield from _matrix(links)
    yield f"  a small message takes {duration(links.message)}\n"
    if links.copies:
        yield "\n  copies, pinned, GB/s    alone  all at once\n"
        for direction, name in enumerate(("to the device", "home")):
            alone = [rates.alone[direction] for rates in links.copies]
            together = [rates.together[direction] for rates in links.copies]
            yield f"  {name:<20}{_range(alone):>9}{_range(together):>13}\n"
    yield from _collectives(links)


def _matrix(links: LinkFigures) -> Iterator[str]:
    if len(links.places) <= _LARGEST_TABLE:
        name, cells = "rank", [[figure(reached) if reached else "·" for reached in row] for row in links.rates]
    else:
        name, cells = "host", [[_between(links, host, other) for other in links.hosts] for host in links.hosts]
    width = max(6, *(len(cell) + 1 for row in cells for cell in row))
    yield f"    {'from to':<9}" + "".join(f"{number:>{width}}" for number in range(len(cells))) + "\n"
    for number, row in enumerate(cells):
        yield f"    {f'{name} {number}':<9}" + "".join(f"{cell:>{width}}" for cell in row) + "\n"


def _between(links: LinkFigures, host: str, other: str) -> str:
    """The median rate between ranks of two hosts."""
    hosts = [place.host for place in links.places]
    rates = [
        reached
        for sending, row in zip(hosts, links.rates, strict=True)
        for receiving, reached in zip(hosts, row, strict=True)
        if (sending, receiving) == (host, other) and reached
    ]
    return figure(median(rates)) if rates else "·"


def _range(rates: Sequence[float]) -> str:
    low, high = figure(min(rates)), figure(max(rates))
    return low if low == high else f"{low}–{high}"


def _collectives(links: LinkFigures) -> Iterator[str]:
    for ranks, hosts in dict.fromkeys((curve.ranks, curve.hosts) for curve in links.collectives):
        curves = [curve for curve in links.collectives if (curve.ranks, curve.hosts) == (ranks, hosts)]
        sizes = max((curve.sizes for curve in curves), key=len)
        over = f", {hosts} hosts" if hosts > 1 else ""
        yield f"\n  {f'on {ranks} ranks{over}':<26}{''.join(f'{_bytes(size):>9}' for size in sizes)}"
        yield "   begins with, then a link\n"
        for curve in curves:
            line = law(curve)
            cells = "".join(f"{duration(time):>9}" for time in curve.times)
            fitted = f"{duration(line.latency):>14}  {rate(line.bandwidth)}" if len(curve.sizes) > 1 else ""
            yield f"  {curve.name:<26}{cells:<{9 * len(sizes)}}{fitted}".rstrip() + "\n"


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


# Links that are far below what they can carry


def link_harms(links: LinkFigures) -> Iterator[Harm]:
    yield from _settings(links)
    yield from _hosts(links)
    yield from _affinity(links)
    yield from _pairs(links)
    yield from _copying(links)
    yield from _all_together(links)


def _settings(links: LinkFigures) -> Iterator[Harm]:
    """Harmful variables of all ranks, since their hosts may have different ones."""
    ranks_of_harm: dict[Harm, list[int]] = {}
    for rank, place in enumerate(links.places):
        for harm in flags(dict(setting.split("=", 1) for setting in place.settings)):
            ranks_of_harm.setdefault(harm, []).append(rank)
    for harm, ranks in ranks_of_harm.items():
        where = "" if len(ranks) == len(links.places) else f" ({_ranks(ranks)})"
        yield Harm(harm.what + where, harm.remedy)


def _hosts(links: LinkFigures) -> Iterator[Harm]:
    if len(links.hosts) > 1 and links.backend == "nccl":
        for host in links.hosts:
            if not any(place.rdma for place in links.places if place.host == host):
                yield Harm(
                    f"{host} has no RDMA device, so that NCCL goes over TCP to the other hosts",
                    "pass InfiniBand or RoCE into the container (/dev/infiniband), or install its driver",
                )


def _affinity(links: LinkFigures) -> Iterator[Harm]:
    for host in links.hosts:
        places = [place for place in links.places if place.host == host]
        cores = {cpu for place in places for cpu in place.cpus}
        if len(cores) < len(places):
            yield Harm(
                f"{len(places)} ranks share {len(cores)} {'core' if len(cores) == 1 else 'cores'}",
                "give each rank a core of its own, and more for its loader's workers",
            )
    away = [rank for rank, place in enumerate(links.places) if place.near and not set(place.near) & set(place.cpus)]
    if away:
        yield Harm(
            f"{_ranks(away)} may run only on cores of another CPU than the one beside the GPU",
            "bind each rank to the cores that `nvidia-smi topo -m` names for its GPU, or bind none",
        )


def _pairs(links: LinkFigures) -> Iterator[Harm]:
    """Pairs of ranks that are slow for their connection, or slower than others with the same one."""
    slow: dict[tuple[str, str], list[tuple[float, str]]] = {}
    rates: dict[str, list[float]] = {}
    pairs = {pair: _connection(links, *pair) for pair in permutations(range(len(links.places)), 2)}
    for (source, other), connection in pairs.items():
        rates.setdefault(connection, []).append(links.rates[source][other])
    for (source, other), connection in pairs.items():
        reached, usual = links.rates[source][other], median(rates[connection])
        limit, why = _limit(links, source, other, connection), ""
        if limit and reached < _FAULTY * limit:
            why = f"its link carries {rate(limit)}"
        elif not limit and len(rates[connection]) > 2 and reached < _FAULTY * usual:
            why = f"others alike reach {rate(usual)}"
        if why:
            slow.setdefault((connection, why), []).append((reached, f"{source}→{other}"))
    for (connection, why), slow_pairs in slow.items():
        first, more = [name for _, name in sorted(slow_pairs)][:3], len(slow_pairs) - 3
        names = f"{', '.join(first)} and {more} more" if more > 0 else listing(first)
        reach = f"reach {_range([reached for reached, _ in slow_pairs])} GB/s"
        over = f" over {connection}" if connection else ""
        yield Harm(f"ranks {names} {reach}{over}, where {why}", _remedy(connection))
    pcie = sorted(connection for connection in rates if "PCIe" in connection)
    if pcie and not any(connection.startswith("NVLink") for connection in rates):
        yield Harm(
            f"no NVLink joins these GPUs, only {listing(pcie)}", "keep tensor parallelism to GPUs that NVLink joins"
        )


def _remedy(connection: str) -> str:
    if connection.startswith("NVLink"):
        return "look at `nvidia-smi nvlink --status`, and at what NCCL says with NCCL_DEBUG=INFO"
    if "PCIe" in connection:
        return "look for PCIe ACS in the firmware and for `iommu=pt`, which keep GPUs from reaching each other"
    if "network" in connection:
        return "look at which interface NCCL takes (NCCL_DEBUG=INFO), NCCL_IB_HCA and GPUDirect RDMA"
    return "look for other work on those cores"


def _connection(links: LinkFigures, source: int, other: int) -> str:
    sending, receiving = links.places[source], links.places[other]
    if sending.host != receiving.host:
        return "the network"
    topologies = (place.topology for place in links.places if place.host == sending.host and place.topology)
    word = connections(next(topologies, "")).get((sending.address, receiving.address), "")
    return f"NVLink ×{word[2:]}" if word.startswith("NV") else _JOINED.get(word, "")


@cache
def connections(topology: str) -> dict[tuple[str, str], str]:
    """The connection of each pair of GPUs by their addresses, as the driver names it: `NV18`, `PIX`, `SYS`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    address = {f"GPU{number}": place for number, place in re.findall(r"^(\d+), 0*(\w{4}:\S+)$", plain.lower(), re.M)}
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    heads = [word for word in rows[0] if re.fullmatch(r"GPU\d+", word)] if rows else []
    return {
        (address[row[0]], address[other]): word
        for row in rows[1:]
        for other, word in zip(heads, row[1:], strict=False)
        if row[0] in address and other in address
    }


def _limit(links: LinkFigures, source: int, other: int, connection: str) -> float:
    """Bytes per nanosecond that the link can carry, or 0 if unknown."""
    if connection.startswith("NVLink"):
        return int(connection.partition("×")[2]) * _NVLINK * (2 if links.places[source].capability >= 10 else 1)
    if connection == "the network":
        return min(max(links.places[rank].rdma, default=0) / 1e9 for rank in (source, other))
    if "PCIe" in connection and links.copies:
        return min(links.copies[source].alone[1], links.copies[other].alone[0])
    return 0.0


def _copying(links: LinkFigures) -> Iterator[Harm]:
    for direction, name in enumerate(("to the device", "home")) if links.copies else ():
        alone = median(rates.alone[direction] for rates in links.copies)
        together = median(rates.together[direction] for rates in links.copies)
        if together < _FAULTY * alone:
            yield Harm(
                f"copies {name} reach {rate(together)} while all ranks copy, and {rate(alone)} alone",
                "the GPUs share PCIe lanes or a CPU's memory: copy fewer bytes, as uint8 for example",
            )


def _all_together(links: LinkFigures) -> Iterator[Harm]:
    """An all-reduce that is far slower than messages over the same links."""
    curve = links.curve("all_reduce", len(links.hosts))
    slowest = min((cell for row in links.rates for cell in row if cell), default=0.0)
    if curve and links.backend == "nccl" and len(curve.sizes) > 1 and law(curve).bandwidth < _FAULTY * slowest:
        yield Harm(
            f"an all-reduce moves {rate(law(curve).bandwidth)} over links on which messages reach {rate(slowest)}",
            "look at NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS, and at what NCCL_DEBUG=INFO says",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing([str(rank) for rank in ranks])}"


# A measured machine as a device file, for the virtual GPU and for plans

_MEASURED = device.read("h200")
_REACHED = _MEASURED.efficiency
_UNITS = ("ms", 1e6), ("us", 1e3), ("ns", 1.0)
_SHORTEST = 1_000
"""The least latency of a collective or a message, in nanoseconds."""


def device_file(machine: MachineFigures | None, links: LinkFigures | None, gpus: int = 1) -> str:
    """The file's text. `gpus` counts those of this host, even if not all of them were ranks."""
    parts = [_machine(machine, links.host_time if links else 0)] if machine else [_without_gpu()]
    if links:
        on_one_host = [curve for curve in links.collectives if curve.hosts == 1]
        laws = [_table(f"collectives.{curve.name}", _law_written(curve)) for curve in on_one_host]
        parts += [_wire(links, gpus), *laws]
    return "\n".join(line for part in parts for line in part) + "\n"


def _machine(machine: MachineFigures, collective_call: int) -> Iterator[str]:
    """The GPU and its host. A peak is the reached rate divided by the share of its peak that an H200 reaches."""
    yield f"# {machine.name}, as `keepbusy doctor` measured it. Rates and bandwidth are peaks: what was reached,"
    yield "# divided by the share that an H200 reaches of its own. What is not here is as on that H200."
    yield f'name = "{machine.name}"'
    yield f'capability = "{machine.capability[0]}.{machine.capability[1]}"'
    yield f"multiprocessors = {machine.multiprocessors}"
    peaks = {}
    for dtype, rate in machine.products.items():  # the measured products are long, so they run at the sustained share
        share = _REACHED.simt if dtype == "float32" else _REACHED.sustained
        peaks[dtype] = f"{rate / share / 1e3:.3g} TFLOP/s"
    yield from _table("matrix", peaks)
    memory = {
        "size": f"{machine.memory / 2**30:.1f} GiB",
        "bandwidth": f"{machine.bandwidth / _REACHED.streaming:.4g} GB/s",
        "malloc": _time_written(machine.malloc),
        "free": _time_written(machine.free),
    }
    yield from _table("memory", memory)
    half = _time_written(machine.launch // 2)  # the measured time is that of an operator: dispatch and launch
    host = {"operator": half, "backward": half, "view": _time_written(machine.view), "launch": half}
    yield from _table("host", host | ({"collective": _time_written(collective_call)} if collective_call else {}))
    copies = {
        "pinned": f"{(machine.to_device + machine.to_host) / 2:.3g} GB/s",
        "to_device": f"{machine.pageable_to_device:.3g} GB/s",
        "to_host": f"{machine.pageable_to_host:.3g} GB/s",
    }
    yield from _table("copies", copies)


def _without_gpu() -> Iterator[str]:
    yield "# Links of gloo between processes of a host without GPUs, as `keepbusy doctor` measured them. All else is as"
    yield "# on an H200."
    yield f'name = "{_MEASURED.name}, linked by gloo"'


def _table(name: str, values: dict[str, str]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from (f"{key} = {value}" if value.isdecimal() else f'{key} = "{value}"' for key, value in values.items())


# The links of a device file: a latency and a bandwidth for each kind of collective


def law(curve: CollectiveTimes) -> CollectiveLaw:
    """The line through two of the measured points with the least mean relative error."""
    crossed = [size * crossings(curve.name, curve.ranks) for size in curve.sizes]
    points = sorted(zip(crossed, map(float, curve.times), strict=True))
    lines = [_line(*two) for two in combinations(points, 2) if two[0][0] < two[1][0] and two[0][1] < two[1][1]]
    rising = [line for line in lines if line.latency > 0]
    if not rising:  # a barrier has no bytes
        return CollectiveLaw(min(curve.times), _MEASURED.wire.bandwidth)
    return min(rising, key=lambda line: mean(distances(line, points)))


def _line(small: tuple[float, float], large: tuple[float, float]) -> CollectiveLaw:
    bandwidth = (large[0] - small[0]) / (large[1] - small[1])
    return CollectiveLaw(round(small[1] - small[0] / bandwidth), bandwidth)


def distances(line: CollectiveLaw, points: Sequence[tuple[float, float]]) -> list[float]:
    """The relative error of the law at each point."""
    return [abs((line.latency + crossed / line.bandwidth) / time - 1) for crossed, time in points]


def _wire(links: LinkFigures, gpus: int) -> Iterator[str]:
    """The law for collectives that have none of their own, and for those across hosts."""
    within, across = links.curve("all_reduce", 1), links.curve("all_reduce", 2)
    values = _law_written(within) if within else {}
    values["send_latency"] = _time_written(max(links.message, _SHORTEST))
    values["devices"] = str(gpus or max(Counter(place.host for place in links.places).values()))
    if across:
        levels = (across.hosts - 1).bit_length()
        latency = law(within).latency if within else _MEASURED.wire.latency
        values["network_latency"] = _time_written(max(law(across).latency - latency, _SHORTEST) // levels)
        values["network"] = _rate_written(law(across).bandwidth)
    yield from _table("wire", values)


def _law_written(curve: CollectiveTimes) -> dict[str, str]:
    """The law for two ranks: a device file counts a hop for each rank beyond the first."""
    line = law(curve)
    latency = max(line.latency - _MEASURED.wire.hop * (curve.ranks - 1), _SHORTEST)
    return {"latency": _time_written(latency), "bandwidth": _rate_written(line.bandwidth)}


def _rate_written(bytes_a_nanosecond: float) -> str:
    return f"{bytes_a_nanosecond:.3g} GB/s" if bytes_a_nanosecond >= 1 else f"{bytes_a_nanosecond * 1e3:.3g} MB/s"


def _time_written(nanoseconds: int) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if nanoseconds >= size), _UNITS[-1])
    return f"{max(nanoseconds, 1) / size:.4g} {unit}"
