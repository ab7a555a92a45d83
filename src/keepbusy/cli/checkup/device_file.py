"""A measured machine as a device file, which the virtual GPU takes and plans are made on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean
from typing import TYPE_CHECKING

from keepbusy.virtual.costs import device
from keepbusy.virtual.costs.device import CollectiveLaw, crossings

if TYPE_CHECKING:
    from keepbusy.recording.machine_figures import CollectiveTimes, LinkFigures, MachineFigures

_MEASURED = device.read("h200")
_REACHED = _MEASURED.efficiency
_UNITS = ("ms", 1e6), ("us", 1e3), ("ns", 1.0)
_SHORTEST = 1_000
"""Nanoseconds: no collective and no message begins sooner."""


def written(machine: MachineFigures | None, links: LinkFigures | None, gpus: int = 1) -> str:
    """The file's text. `gpus`: of this host, whether or not all of them were ranks."""
    parts = [_machine(machine, links.asked if links else 0)] if machine else [_without_gpu()]
    if links:
        parts += [_wire(links, gpus), _laws(links)]
    return "\n".join(line for part in parts for line in part) + "\n"


# The GPU and its host: peaks follow from what was reached, by the shares that an H200 reaches of its own


def _machine(machine: MachineFigures, asked: int) -> Iterator[str]:
    yield f"# {machine.name}, as `keepbusy doctor` measured it. Rates and bandwidth are peaks: what was reached,"
    yield "# divided by the share that an H200 reaches of its own. What is not here is as on that H200."
    yield f'name = "{machine.name}"'
    yield f'capability = "{machine.capability[0]}.{machine.capability[1]}"'
    yield f"multiprocessors = {machine.multiprocessors}"
    yield from _table("matrix", {dtype: _peak(dtype, rate) for dtype, rate in machine.products.items()})
    yield from _table("memory", _memory(machine))
    yield from _table("host", _host(machine) | ({"collective": _time(asked)} if asked else {}))
    yield from _table("copies", _copies(machine))


def _without_gpu() -> Iterator[str]:
    yield "# Links of gloo between processes of a host without GPUs, as `keepbusy doctor` measured them. All else is as"
    yield "# on an H200."
    yield f'name = "{_MEASURED.name}, linked by gloo"'


def _table(name: str, values: dict[str, str]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from (f"{key} = {value}" if value.isdecimal() else f'{key} = "{value}"' for key, value in values.items())


def _peak(dtype: str, rate: float) -> str:
    """A product as long as the one that was measured runs at the sustained share of the peak."""
    share = _REACHED.simt if dtype == "float32" else _REACHED.sustained
    return f"{rate / share / 1e3:.3g} TFLOP/s"


def _memory(machine: MachineFigures) -> dict[str, str]:
    return {
        "size": f"{machine.memory / 2**30:.1f} GiB",
        "bandwidth": f"{machine.bandwidth / _REACHED.streaming:.4g} GB/s",
        "malloc": _time(machine.malloc),
        "free": _time(machine.free),
    }


def _host(machine: MachineFigures) -> dict[str, str]:
    """An operator that launches is dispatched and launched; each takes half of what both took."""
    half = _time(machine.launch // 2)
    return {"operator": half, "backward": half, "view": _time(machine.view), "launch": half}


def _copies(machine: MachineFigures) -> dict[str, str]:
    return {
        "pinned": f"{(machine.to_device + machine.to_host) / 2:.3g} GB/s",
        "to_device": f"{machine.pageable_to_device:.3g} GB/s",
        "to_host": f"{machine.pageable_to_host:.3g} GB/s",
    }


# The links: a latency and a bandwidth a kind of collective


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
    values = _two(_of_two_ranks(beside)) if beside else {}
    values["send_latency"] = _time(max(links.message, _SHORTEST))
    values["devices"] = str(gpus or max(Counter(place.host for place in links.places).values()))
    if across:
        levels = (across.hosts - 1).bit_length()
        inside = law(beside).latency if beside else _MEASURED.wire.latency
        values["network_latency"] = _time(max(law(across).latency - inside, _SHORTEST) // levels)
        values["network"] = _rate(law(across).bandwidth)
    yield from _table("wire", values)


def _laws(links: LinkFigures) -> Iterator[str]:
    for curve in links.collectives:
        if curve.hosts == 1:
            yield from _table(f"collectives.{curve.name}", _two(_of_two_ranks(curve)))


def _of_two_ranks(curve: CollectiveTimes) -> CollectiveLaw:
    """A device file counts a hop for each rank beyond the first."""
    found = law(curve)
    return replace(found, latency=max(found.latency - _MEASURED.wire.hop * (curve.ranks - 1), _SHORTEST))


def _two(found: CollectiveLaw) -> dict[str, str]:
    return {"latency": _time(found.latency), "bandwidth": _rate(found.bandwidth)}


def _rate(bytes_a_nanosecond: float) -> str:
    return f"{bytes_a_nanosecond:.3g} GB/s" if bytes_a_nanosecond >= 1 else f"{bytes_a_nanosecond * 1e3:.3g} MB/s"


def _time(nanoseconds: int) -> str:
    """In four digits, which is more than is known."""
    unit, size = next((one for one in _UNITS if nanoseconds >= one[1]), _UNITS[-1])
    return f"{max(nanoseconds, 1) / size:.4g} {unit}"
