"""`keepbusy doctor`: what harms, what the ranks said, and the device file that comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from keepbusy.cli.doctor import harms
from keepbusy.virtual.costs.device import read as read_device

MACHINE = SimpleNamespace(
    name="NVIDIA Test",
    capability=(8, 6),
    multiprocessors=80,
    memory=24 * 2**30,
    launch=8_000,
    view=900,
    read=15_000,
    malloc=90_000,
    free=70_000,
    pinning=0.5,
    to_device=25.0,
    to_host=27.0,
    pageable_to_device=6.0,
    pageable_to_host=8.0,
    bandwidth=700.0,
    products={"bfloat16": 70_000.0, "float16": 71_000.0, "tfloat32": 35_000.0, "float32": 18_000.0},
)


def test_a_healthy_machine_has_nothing_to_hear() -> None:
    assert harms({"CUDA_LAUNCH_BLOCKING": "0", "HOME": "/"}, 16, "Not Active, Not Active, 0, 4\n") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "detail"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")],
)
def test_a_flag_that_harms_is_named_with_its_remedy(name: str, value: str) -> None:
    (found,) = harms({name: value}, 16, "")
    assert f"{name}={value}" in found.what
    assert f"unset {name}" in found.remedy


def test_few_cores_slow_clocks_and_a_busy_gpu_are_seen() -> None:
    found = harms({}, 1, "Not Active, Not Active, 0, 4\nActive, Not Active, 97, 1200\n")
    assert [harm.what for harm in found] == [
        "this process may use 1 core only",
        "GPU 1 has lowered its clocks",
        "GPU 1 is 97% busy with something else (1200 MiB in use)",
    ]


def test_what_a_driver_does_not_know_is_passed_over() -> None:
    assert harms({}, 16, "[N/A], [N/A], [N/A], [N/A]\nNo devices were found\n") == []


def test_a_machine_becomes_a_device_that_reaches_what_was_measured(tmp_path: Path) -> None:
    from keepbusy.cli.doctor import written

    path = tmp_path / "mine.toml"
    path.write_text(written(MACHINE, None), encoding="utf-8")  # type: ignore[arg-type]
    device = read_device(str(path))
    assert (device.name, device.capability, device.multiprocessors) == ("NVIDIA Test", (8, 6), 80)
    assert device.rate("bfloat16") * device.efficiency.sustained == pytest.approx(70_000, rel=0.01)
    assert device.memory.bandwidth * device.efficiency.streaming == pytest.approx(700, rel=0.01)
    assert device.host.operator + device.host.launch == MACHINE.launch
    assert device.copies.pinned == pytest.approx(26)
    assert device.wire == read_device("h200").wire


def test_the_ranks_times_become_a_bandwidth() -> None:
    pytest.importorskip("torch.distributed")  # a folder of tests is called torch, too
    from keepbusy.cli.doctor import written
    from keepbusy.recording.machine_figures import LARGE, read

    said = "W: a warning\n" + json.dumps({"small": 30_000.0, "large": 30_000.0 + 1.5 * LARGE / 350}) + "\n"
    met = read(said, 4, True)
    assert met is not None
    assert met.bandwidth == pytest.approx(350)
    assert 'latency = "21000 ns"' in written(MACHINE, met)  # type: ignore[arg-type]
    assert read("nothing\n", 4, True) is None
