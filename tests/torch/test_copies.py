"""Copies between host and device that hide in other operators."""

from __future__ import annotations

import torch

from keepbusy.timeline.model import Direction, Kind

HOST, LONG = torch.arange(6.0), torch.arange(4_000.0)


def commands(machine, begun: int) -> list[tuple[str, str]]:
    """What the device did since then: kind, and direction of a copy."""
    spans = machine.clock.timeline().spans
    return [
        (Kind(kind).name.lower(), Direction(direction).name.lower() if kind == Kind.COPY else "")
        for kind, direction in list(zip(spans.kind.tolist(), spans.direction.tolist(), strict=True))[begun:]
        if kind in (Kind.KERNEL, Kind.COPY)
    ]


def written(machine) -> int:
    return len(machine.clock.timeline())


def test_lists_from_the_host_are_copied_one_by_one(machine) -> None:
    here = [torch.zeros(6, device="cuda"), torch.zeros(4_000, device="cuda")]
    begun = written(machine)
    torch._foreach_copy_(here, [HOST, LONG])
    assert commands(machine, begun) == [("copy", "host_to_device")] * 2
    assert [one.tolist() for one in here] == [HOST.tolist(), LONG.tolist()]


def test_and_lists_that_come_home(machine) -> None:
    here, there = [torch.zeros(6), torch.zeros(4_000)], [HOST.cuda(), LONG.cuda()]
    begun = written(machine)
    torch._foreach_copy_(here, there)
    assert commands(machine, begun) == [("copy", "device_to_host")] * 2
    assert [one.tolist() for one in here] == [HOST.tolist(), LONG.tolist()]


def test_on_the_device_they_go_in_one_kernel_where_they_lie_alike(machine) -> None:
    sources = [HOST.cuda(), HOST.cuda() + 1]
    alike, unlike = [torch.empty_like(one) for one in sources], [torch.zeros(6, 2, device="cuda") for _ in sources]
    begun = written(machine)
    torch._foreach_copy_(alike, sources)
    assert commands(machine, begun) == [("kernel", "")]
    begun = written(machine)
    torch._foreach_copy_([one[:, 0] for one in unlike], sources)
    assert commands(machine, begun) == [("kernel", "")] * 2
    assert (
        [one.tolist() for one in alike] == [one[:, 0].tolist() for one in unlike] == [one.tolist() for one in sources]
    )
