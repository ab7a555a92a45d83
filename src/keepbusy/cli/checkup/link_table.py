"""What was measured between ranks as tables, and what in it is far below what its link carries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import permutations
from statistics import median
from typing import TYPE_CHECKING

from keepbusy.cli.checkup.device_file import law
from keepbusy.cli.checkup.settings import Harm, flags
from keepbusy.report.words import duration, listing

if TYPE_CHECKING:
    from keepbusy.recording.machine_figures import LinkFigures

LARGEST = 16
"""Of more ranks the table is one of hosts."""
FAULTY_SHARE = 0.5
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


# The tables


def told(links: LinkFigures) -> Iterator[str]:
    yield "\n  who reaches whom, GB/s\n"
    yield from _matrix(links)
    yield f"  a small message takes {duration(links.message)}\n"
    yield from _copies(links)
    yield from _collectives(links)


def _matrix(links: LinkFigures) -> Iterator[str]:
    if len(links.places) <= LARGEST:
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


def _copies(links: LinkFigures) -> Iterator[str]:
    if not links.copies:
        return
    yield "\n  copies, pinned, GB/s    alone  all at once\n"
    for way, name in enumerate(("to the device", "home")):
        alone, together = ([getattr(one, when)[way] for one in links.copies] for when in ("alone", "together"))
        yield f"  {name:<20}{_range(alone):>9}{_range(together):>13}\n"


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


# What is wrong


def harms(links: LinkFigures) -> Iterator[Harm]:
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
        if limit and reached < FAULTY_SHARE * limit:
            slow.setdefault((join, f"its link carries {rate(limit)}"), []).append((reached, f"{one}→{other}"))
        elif not limit and len(alike[join]) > 2 and reached < FAULTY_SHARE * usual:
            slow.setdefault((join, f"others alike reach {rate(usual)}"), []).append((reached, f"{one}→{other}"))
    for (join, why), found in slow.items():
        first, more = [name for _, name in sorted(found)][:3], len(found) - 3
        named = f"{', '.join(first)} and {more} more" if more > 0 else listing(first)
        over = f" over {join}" if join else ""
        yield Harm(f"ranks {named} reach {_range([one for one, _ in found])} GB/s{over}, where {why}", _remedy(join))
    yield from _only_pcie(alike)


def _only_pcie(joins: Iterable[str]) -> Iterator[Harm]:
    pcie = sorted({one for one in joins if "PCIe" in one})
    if pcie and not any(one.startswith("NVLink") for one in joins):
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
        if together < FAULTY_SHARE * alone:
            yield Harm(
                f"copies {name} reach {rate(together)} while all ranks copy, and {rate(alone)} alone",
                "the GPUs share PCIe lanes or a CPU's memory: copy fewer bytes, as uint8 for example",
            )


def _all_together(links: LinkFigures) -> Iterator[Harm]:
    """An all-reduce uses the same links as messages do."""
    curve = links.curve("all_reduce", len(links.hosts))
    slowest = min((cell for row in links.rates for cell in row if cell), default=0.0)
    if curve and links.backend == "nccl" and len(curve.sizes) > 1 and law(curve).bandwidth < FAULTY_SHARE * slowest:
        yield Harm(
            f"an all-reduce moves {rate(law(curve).bandwidth)} over links on which messages reach {rate(slowest)}",
            "look at NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS, and at what NCCL_DEBUG=INFO says",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing([str(one) for one in ranks])}"
