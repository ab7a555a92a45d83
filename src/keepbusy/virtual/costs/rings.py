"""How long a collective takes on the wire, once all of its ranks are there: rings.

Latency and bandwidth were measured on four H200 (NVLink). That the ring's formulas hold for other
numbers of ranks is NCCL's own account; that a hop costs what the device file says is an estimate.
"""

from __future__ import annotations

from keepbusy.virtual.costs.device import Device


def wire_time(device: Device, name: str, size: int, ranks: int) -> int:
    """`size`: bytes of one rank's larger tensor: the whole one of a gather or scatter, not a shard.

    `name`: all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all, barrier, send.
    """
    wire = device.wire
    far = ranks > wire.devices
    bandwidth = min(wire.bandwidth, wire.network) if far else wire.bandwidth
    if name in ("send", "recv"):
        return wire.send_latency + round(size / wire.bandwidth)
    latency = wire.latency + wire.hop * (ranks - 1) + (wire.network_latency if far else 0)
    return latency + round(size * _share(name, ranks) / bandwidth)


def _share(name: str, ranks: int) -> float:
    """How often each byte crosses a device's link."""
    around = (ranks - 1) / ranks
    if name == "all_reduce":
        return 2 * around
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return around
    return 1.0 if ranks > 1 and name != "barrier" else 0.0
