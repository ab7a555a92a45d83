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
    found = harms(os.environ, len(os.sched_getaffinity(0)), ask_driver())
    links, missing = bool(options.ranks and options.ranks > 1), _missing()
    if not missing or (links and find_spec("torch") and not DRIVER.exists()):  # gloo's need no GPU
        return _examined(found, options.ranks, options.save)
    if options.save or links:
        raise BadInput(f"there is nothing to {f'write into {options.save}' if options.save else 'measure'}: {missing}")
    return "\n".join([f"keepbusy doctor · {_software()}", "", missing, "", *_told(found), ""])


def _missing() -> str:
    """Why no GPU can be measured here, if so."""
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


def _examined(found: list[Harm], asked: int | None, path: Path | None) -> Iterator[str]:
    """The links first: who is another rank of a job has nothing more to say."""
    import torch

    from keepbusy.virtual.costs.machine_figures import measure, measure_as_rank, measure_links

    gpus = torch.cuda.device_count()
    ranks = asked or max(gpus, 1)
    _check(ranks, gpus)
    links: LinkFigures | None = None
    if ranks > 1:
        links = measure_as_rank() if "RANK" in os.environ else measure_links(ranks)
        if links is None:  # this is not the first rank of its job
            return
    machine = measure() if gpus else None
    gpu, over = machine.name if machine else "", f"{len(links.places)} ranks over {links.backend}" if links else ""
    yield f"keepbusy doctor · {' · '.join(filter(None, [gpu, over, _software()]))}\n"
    if machine:
        yield "\n" + "".join(f"  {name:<26}{value}\n" for name, value in _figures(machine))
        if machine.launch > _SLOW_HOST:
            slow = f"a launch takes {duration(machine.launch)}, three times what is common"
            found = [*found, Harm(slow, "look for other work on this host, a debugger or a power-saving governor")]
    if links:
        yield from link_tables(links)
        own_flags = set(flags(os.environ))  # `link_harms` names them with the ranks that have them
        found = [*(harm for harm in found if harm not in own_flags), *link_harms(links)]
    yield "\n" + "\n".join([*_told(found), ""])
    if path:
        write_whole(path, device_file(machine, links, gpus))
        plan = f"keepbusy plan --gpus {ranks}" if links else "keepbusy run"
        yield f"\n{path} is this machine: {plan} --on {path} train.py\n"


def _check(ranks: int, gpus: int) -> None:
    """Raise BadInput if so many ranks do not fit this job or host, before anything is started."""
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
    yield "copies, pinned", _ways(machine.to_device, machine.to_host)
    yield "copies, pageable", _ways(machine.pageable_to_device, machine.pageable_to_host)
    yield "pinning memory", f"{duration(round(machine.pinning * 1_000_000))} a megabyte, the first time"
    yield "memory", f"{rate(machine.bandwidth)}, {machine.memory / 2**30:.1f} GiB"
    yield "memory from the driver", f"{duration(machine.malloc)}, and {duration(machine.free)} to give it back"
    yield "matrix products", " · ".join(f"{dtype} {rate / 1e3:.0f} TFLOP/s" for dtype, rate in machine.products.items())


def _ways(inward: float, home: float) -> str:
    return f"{rate(inward)} to the device, {rate(home)} home"


def _told(found: list[Harm]) -> list[str]:
    if not found:
        return ["Nothing is set here that makes a GPU wait."]
    return [f"!  {harm.what}: {harm.remedy}." for harm in found]


# What is set on a machine that makes a GPU wait, or that hides it: debug flags, too few cores, clocks held down


class Harm(NamedTuple):
    """What costs time, and what to do."""

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
    """Harmful settings: variables, too few cores, and what `ask_driver` returned."""
    few = f"this process may use {cores} {'core' if cores == 1 else 'cores'} only"
    need = "give it a core for the loop, and one for each of the loader's workers"
    return [*flags(environment), *([Harm(few, need)] if cores < 4 else []), *_gpus(driver)]


def flags(environment: Mapping[str, str]) -> Iterator[Harm]:
    """What variables do; those of ranks are asked for one by one."""
    for name, is_harmful, why in _FLAGS:
        value = environment.get(name)
        if value is not None and is_harmful(value):
            yield Harm(f"{name}={value} {why}", f"unset {name}, unless you are hunting a bug with it")
    order = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(one.strip().isdecimal() for one in order) and [*map(int, order)] != sorted(map(int, order)):
        yield Harm(
            f"CUDA_VISIBLE_DEVICES={','.join(order)} counts the GPUs in another order than the machine, so "
            "ranks run on cores and network cards far from their GPUs",
            f"give them in order: CUDA_VISIBLE_DEVICES={','.join(map(str, sorted(map(int, order))))}",
        )


_ASKED = (
    "clocks_throttle_reasons.sw_thermal_slowdown,clocks_throttle_reasons.hw_slowdown,utilization.gpu,memory.used,"
    "pcie.link.width.current,pcie.link.width.max"
)


def ask_driver() -> str:
    """A line a GPU, or nothing where there is no driver to ask."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
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
"""Of more ranks the table is one of hosts."""
_FAULTY = 0.5
"""Below this share of what a link carries, or of what others like it reach, something is wrong with it."""
_NVLINK = 25.0
"""Bytes a nanosecond each way, of an NVLink of the second to the fourth generation; the fifth carries twice that."""
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


# What was measured between ranks, as tables


def link_tables(links: LinkFigures) -> Iterator[str]:
    yield "\n  who reaches whom, GB/s\n"
    yield from _matrix(links)
    yield f"  a small message takes {duration(links.message)}\n"
    if links.copies:
        yield "\n  copies, pinned, GB/s    alone  all at once\n"
        for way, name in enumerate(("to the device", "home")):
            alone, together = ([getattr(one, when)[way] for one in links.copies] for when in ("alone", "together"))
            yield f"  {name:<20}{_range(alone):>9}{_range(together):>13}\n"
    yield from _collectives(links)


def _matrix(links: LinkFigures) -> Iterator[str]:
    if len(links.places) <= _LARGEST_TABLE:
        what, cells = "rank", [["·" if not one else figure(one) for one in row] for row in links.rates]
    else:
        what, cells = "host", [[_between(links, one, other) for other in links.hosts] for one in links.hosts]
    width = max(6, *(len(cell) + 1 for row in cells for cell in row))
    yield f"    {'from to':<9}" + "".join(f"{number:>{width}}" for number in range(len(cells))) + "\n"
    for number, row in enumerate(cells):
        yield f"    {f'{what} {number}':<9}" + "".join(f"{cell:>{width}}" for cell in row) + "\n"


def _between(links: LinkFigures, one: str, other: str) -> str:
    """The median of what ranks of two hosts reach."""
    at = [place.host for place in links.places]
    found = [
        reached
        for here, row in zip(at, links.rates, strict=True)
        for there, reached in zip(at, row, strict=True)
        if (here, there) == (one, other) and reached
    ]
    return figure(median(found)) if found else "·"


def _range(rates: Sequence[float]) -> str:
    low, high = figure(min(rates)), figure(max(rates))
    return low if low == high else f"{low}–{high}"


def _collectives(links: LinkFigures) -> Iterator[str]:
    for ranks, hosts in dict.fromkeys((one.ranks, one.hosts) for one in links.collectives):
        curves = [one for one in links.collectives if (one.ranks, one.hosts) == (ranks, hosts)]
        sizes = max((one.sizes for one in curves), key=len)
        over = f", {hosts} hosts" if hosts > 1 else ""
        yield f"\n  {f'on {ranks} ranks{over}':<26}{''.join(f'{_bytes(size):>9}' for size in sizes)}"
        yield "   begins with, then a link\n"
        for one in curves:
            found = law(one)
            cells = "".join(f"{duration(time):>9}" for time in one.times)
            then = f"{duration(found.latency):>14}  {rate(found.bandwidth)}" if len(one.sizes) > 1 else ""
            yield f"  {one.name:<26}{cells:<{9 * len(sizes)}}{then}".rstrip() + "\n"


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


# What in it is far below what its link carries


def link_harms(links: LinkFigures) -> Iterator[Harm]:
    yield from _settings(links)
    yield from _hosts(links)
    yield from _affinity(links)
    yield from _pairs(links)
    yield from _copying(links)
    yield from _all_together(links)


def _settings(links: LinkFigures) -> Iterator[Harm]:
    """Of all ranks: a node may be set up otherwise than the one that tells."""
    found: dict[Harm, list[int]] = {}
    for rank, place in enumerate(links.places):
        for harm in flags(dict(one.split("=", 1) for one in place.settings)):
            found.setdefault(harm, []).append(rank)
    for harm, ranks in found.items():
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
        here = [place for place in links.places if place.host == host]
        cores = {cpu for place in here for cpu in place.cpus}
        if len(cores) < len(here):
            yield Harm(
                f"{len(here)} ranks share {len(cores)} {'core' if len(cores) == 1 else 'cores'}",
                "give each rank a core of its own, and more for its loader's workers",
            )
    away = [rank for rank, one in enumerate(links.places) if one.near and not set(one.near) & set(one.cpus)]
    if away:
        yield Harm(
            f"{_ranks(away)} may run only on cores of another CPU than the one beside the GPU",
            "bind each rank to the cores that `nvidia-smi topo -m` names for its GPU, or bind none",
        )


def _pairs(links: LinkFigures) -> Iterator[Harm]:
    """Each two, held against what joins them, or against others that are joined alike."""
    slow: dict[tuple[str, str], list[tuple[float, str]]] = {}
    alike: dict[str, list[float]] = {}
    pairs = list(permutations(range(len(links.places)), 2))
    for one, other in pairs:
        alike.setdefault(_join(links, one, other), []).append(links.rates[one][other])
    for one, other in pairs:
        join, reached = _join(links, one, other), links.rates[one][other]
        limit = _limit(links, one, other, join)
        usual = median(alike[join])
        if limit and reached < _FAULTY * limit:
            slow.setdefault((join, f"its link carries {rate(limit)}"), []).append((reached, f"{one}→{other}"))
        elif not limit and len(alike[join]) > 2 and reached < _FAULTY * usual:
            slow.setdefault((join, f"others alike reach {rate(usual)}"), []).append((reached, f"{one}→{other}"))
    for (join, why), found in slow.items():
        first, more = [name for _, name in sorted(found)][:3], len(found) - 3
        named = f"{', '.join(first)} and {more} more" if more > 0 else listing(first)
        over = f" over {join}" if join else ""
        yield Harm(f"ranks {named} reach {_range([one for one, _ in found])} GB/s{over}, where {why}", _remedy(join))
    pcie = sorted(join for join in alike if "PCIe" in join)
    if pcie and not any(join.startswith("NVLink") for join in alike):
        yield Harm(
            f"no NVLink joins these GPUs, only {listing(pcie)}", "keep tensor parallelism to GPUs that NVLink joins"
        )


def _remedy(join: str) -> str:
    if join.startswith("NVLink"):
        return "look at `nvidia-smi nvlink --status`, and at what NCCL says with NCCL_DEBUG=INFO"
    if "PCIe" in join:
        return "look for PCIe ACS in the firmware and for `iommu=pt`, which keep GPUs from reaching each other"
    if "network" in join:
        return "look at which interface NCCL takes (NCCL_DEBUG=INFO), NCCL_IB_HCA and GPUDirect RDMA"
    return "look for other work on those cores"


def _join(links: LinkFigures, one: int, other: int) -> str:
    here, there = links.places[one], links.places[other]
    if here.host != there.host:
        return "the network"
    joined = joins(next((place.topology for place in links.places if place.host == here.host and place.topology), ""))
    word = joined.get((here.address, there.address), "")
    return f"NVLink ×{word[2:]}" if word.startswith("NV") else _JOINED.get(word, "")


@cache
def joins(topology: str) -> dict[tuple[str, str], str]:
    """What joins each two GPUs, by their addresses: `NV18`, `PIX`, `SYS`, … as the driver says."""
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


def _limit(links: LinkFigures, one: int, other: int, join: str) -> float:
    """Bytes a nanosecond that the link can carry, or 0 where nobody knows."""
    if join.startswith("NVLink"):
        return int(join.partition("×")[2]) * _NVLINK * (2 if links.places[one].capability >= 10 else 1)
    if join == "the network":
        ports = [max(links.places[rank].rdma, default=0) / 1e9 for rank in (one, other)]
        return min(ports)
    if "PCIe" in join and links.copies:
        return min(links.copies[one].alone[1], links.copies[other].alone[0])
    return 0.0


def _copying(links: LinkFigures) -> Iterator[Harm]:
    for way, name in enumerate(("to the device", "home")):
        alone, together = (median(getattr(one, when)[way] for one in links.copies) if links.copies else 0.0
                           for when in ("alone", "together"))  # fmt: skip
        if together < _FAULTY * alone:
            yield Harm(
                f"copies {name} reach {rate(together)} while all ranks copy, and {rate(alone)} alone",
                "the GPUs share PCIe lanes or a CPU's memory: copy fewer bytes, as uint8 for example",
            )


def _all_together(links: LinkFigures) -> Iterator[Harm]:
    """An all-reduce uses the same links as messages do."""
    curve = links.curve("all_reduce", len(links.hosts))
    slowest = min((cell for row in links.rates for cell in row if cell), default=0.0)
    if curve and links.backend == "nccl" and len(curve.sizes) > 1 and law(curve).bandwidth < _FAULTY * slowest:
        yield Harm(
            f"an all-reduce moves {rate(law(curve).bandwidth)} over links on which messages reach {rate(slowest)}",
            "look at NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS, and at what NCCL_DEBUG=INFO says",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing([str(one) for one in ranks])}"


# A measured machine as a device file, which the virtual GPU takes and plans are made on

_MEASURED = device.read("h200")
_REACHED = _MEASURED.efficiency
_UNITS = ("ms", 1e6), ("us", 1e3), ("ns", 1.0)
_SHORTEST = 1_000
"""Nanoseconds: no collective and no message begins sooner."""


def device_file(machine: MachineFigures | None, links: LinkFigures | None, gpus: int = 1) -> str:
    """The file's text. `gpus`: of this host, whether or not all of them were ranks."""
    parts = [_machine(machine, links.asked if links else 0)] if machine else [_without_gpu()]
    if links:
        on_one_host = [curve for curve in links.collectives if curve.hosts == 1]
        laws = [_table(f"collectives.{curve.name}", _law_written(curve)) for curve in on_one_host]
        parts += [_wire(links, gpus), *laws]
    return "\n".join(line for part in parts for line in part) + "\n"


def _machine(machine: MachineFigures, asked: int) -> Iterator[str]:
    """The GPU and its host: peaks follow from what was reached, by the shares that an H200 reaches of its own."""
    yield f"# {machine.name}, as `keepbusy doctor` measured it. Rates and bandwidth are peaks: what was reached,"
    yield "# divided by the share that an H200 reaches of its own. What is not here is as on that H200."
    yield f'name = "{machine.name}"'
    yield f'capability = "{machine.capability[0]}.{machine.capability[1]}"'
    yield f"multiprocessors = {machine.multiprocessors}"
    peaks = {}
    for dtype, rate in machine.products.items():  # the measured product is long: it runs at the sustained share
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
    half = _time_written(machine.launch // 2)  # of an operator that launches: for dispatching, and for launching
    host = {"operator": half, "backward": half, "view": _time_written(machine.view), "launch": half}
    yield from _table("host", host | ({"collective": _time_written(asked)} if asked else {}))
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


# The links in it: a latency and a bandwidth a kind of collective


def law(curve: CollectiveTimes) -> CollectiveLaw:
    """The line through two of the sizes that is off least, each size counting alike."""
    crossed = [size * crossings(curve.name, curve.ranks) for size in curve.sizes]
    points = sorted(zip(crossed, map(float, curve.times), strict=True))
    lines = [_line(*two) for two in combinations(points, 2) if two[0][0] < two[1][0] and two[0][1] < two[1][1]]
    rising = [one for one in lines if one.latency > 0]
    if not rising:  # a barrier has no bytes
        return CollectiveLaw(min(curve.times), _MEASURED.wire.bandwidth)
    return min(rising, key=lambda one: mean(distances(one, points)))


def _line(small: tuple[float, float], large: tuple[float, float]) -> CollectiveLaw:
    bandwidth = (large[0] - small[0]) / (large[1] - small[1])
    return CollectiveLaw(round(small[1] - small[0] / bandwidth), bandwidth)


def distances(one: CollectiveLaw, points: Sequence[tuple[float, float]]) -> list[float]:
    """How far the law is off, as a share of what each took."""
    return [abs((one.latency + crossed / one.bandwidth) / took - 1) for crossed, took in points]


def _wire(links: LinkFigures, gpus: int) -> Iterator[str]:
    """What goes for kinds of collectives that have no law of their own, and across hosts."""
    beside, across = links.curve("all_reduce", 1), links.curve("all_reduce", 2)
    values = _law_written(beside) if beside else {}
    values["send_latency"] = _time_written(max(links.message, _SHORTEST))
    values["devices"] = str(gpus or max(Counter(place.host for place in links.places).values()))
    if across:
        levels = (across.hosts - 1).bit_length()
        inside = law(beside).latency if beside else _MEASURED.wire.latency
        values["network_latency"] = _time_written(max(law(across).latency - inside, _SHORTEST) // levels)
        values["network"] = _rate_written(law(across).bandwidth)
    yield from _table("wire", values)


def _law_written(curve: CollectiveTimes) -> dict[str, str]:
    """The law for two ranks: a device file counts a hop for each rank beyond the first."""
    found = law(curve)
    latency = max(found.latency - _MEASURED.wire.hop * (curve.ranks - 1), _SHORTEST)
    return {"latency": _time_written(latency), "bandwidth": _rate_written(found.bandwidth)}


def _rate_written(bytes_a_nanosecond: float) -> str:
    return f"{bytes_a_nanosecond:.3g} GB/s" if bytes_a_nanosecond >= 1 else f"{bytes_a_nanosecond * 1e3:.3g} MB/s"


def _time_written(nanoseconds: int) -> str:
    """In four digits, which is more than is known."""
    unit, size = next((one for one in _UNITS if nanoseconds >= one[1]), _UNITS[-1])
    return f"{max(nanoseconds, 1) / size:.4g} {unit}"
