"""Measuring a machine: on a virtual GPU it must find that GPU's own figures."""

from __future__ import annotations

import pytest
import torch

from keepbusy.virtual.costs.machine_figures import Sizes, measure


def test_a_virtual_gpu_measures_as_its_device_file_says(machine) -> None:
    device = machine.device

    def now() -> int:
        machine.clock.spend(0)
        return machine.clock.host().now + machine.clock.host().modelled_time

    found = measure(Sizes(copied=16_000_000, streamed=256_000_000, product=256), now)
    assert found.name == device.name
    assert found.memory == device.memory.size
    assert found.launch == pytest.approx(device.host.operator + device.host.launch, rel=0.3)
    assert found.to_device == pytest.approx(device.copies.pinned, rel=0.1)
    assert found.pageable_to_host == pytest.approx(device.copies.to_host, rel=0.1)
    assert found.bandwidth == pytest.approx(device.memory.bandwidth * device.efficiency.streaming, rel=0.2)
    assert found.malloc >= device.memory.malloc
    assert set(found.products) == {"bfloat16", "float16", "tfloat32", "float32"}


def test_products_have_the_precision_that_the_program_asked_for(machine) -> None:
    square = torch.empty(2048, 2048, device="meta")

    def spent() -> int:
        return machine.kernels("mm", (square, square), (square,))[0][1]

    exact = spent()
    torch.set_float32_matmul_precision("high")
    try:
        assert spent() < exact / 3
    finally:
        torch.set_float32_matmul_precision("highest")
    assert spent() == exact
