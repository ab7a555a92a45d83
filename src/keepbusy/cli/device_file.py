"""A measured machine as a device file, which the virtual GPU takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from keepbusy.virtual.device import Efficiency, Wire

if TYPE_CHECKING:
    from keepbusy.record.machine import Machine
    from keepbusy.record.wires import Wires

_REACHED = Efficiency()


def written(machine: Machine, met: Wires | None) -> str:
    """The file's text. Peaks follow from what was reached, by the shares that an H200 reaches of its own."""
    return "\n".join(_lines(machine, met)) + "\n"


def _lines(machine: Machine, met: Wires | None) -> Iterator[str]:
    yield f"# {machine.name}, as `keepbusy doctor` measured it. Rates and bandwidth are peaks: what was reached,"
    yield "# divided by the share that an H200 reaches of its own. What is not here is as on that H200."
    yield f'name = "{machine.name}"'
    yield f'capability = "{machine.capability[0]}.{machine.capability[1]}"'
    yield f"multiprocessors = {machine.multiprocessors}"
    yield from _table("matrix", {dtype: _peak(dtype, rate) for dtype, rate in machine.products.items()})
    yield from _table("memory", _memory(machine))
    yield from _table("host", _host(machine))
    yield from _table("copies", _copies(machine))
    if met is not None:
        yield from _table("wire", _wire(met))


def _table(name: str, values: dict[str, str]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from (f'{key} = "{value}"' for key, value in values.items())


def _peak(dtype: str, rate: float) -> str:
    """A product as long as the one that was measured runs at the sustained share of the peak."""
    share = _REACHED.simt if dtype == "float32" else _REACHED.sustained
    return f"{rate / share / 1e3:.3g} TFLOP/s"


def _memory(machine: Machine) -> dict[str, str]:
    return {
        "size": f"{machine.memory / 2**30:.1f} GiB",
        "bandwidth": f"{machine.bandwidth / _REACHED.streaming:.4g} GB/s",
        "malloc": _time(machine.malloc),
        "free": _time(machine.free),
        "host_alloc": f"{machine.pinning:.3g} ns/B",
    }


def _host(machine: Machine) -> dict[str, str]:
    """An operator that launches is dispatched and launched; each takes half of what both took."""
    half = _time(machine.launch // 2)
    return {"operator": half, "backward": half, "view": _time(machine.view), "launch": half}


def _copies(machine: Machine) -> dict[str, str]:
    return {
        "pinned": f"{(machine.to_device + machine.to_host) / 2:.3g} GB/s",
        "to_device": f"{machine.pageable_to_device:.3g} GB/s",
        "to_host": f"{machine.pageable_to_host:.3g} GB/s",
    }


def _wire(met: Wires) -> dict[str, str]:
    latency = max(met.small - Wire().hop * (met.ranks - 1), 1_000)
    return {"latency": _time(latency), "bandwidth": f"{met.bandwidth:.3g} GB/s"}


def _time(nanoseconds: int) -> str:
    return f"{max(nanoseconds, 1)} ns"
