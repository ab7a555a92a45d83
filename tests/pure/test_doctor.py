"""`keepbusy doctor`: what harms, what the ranks said, and the device file that comes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from keepbusy.cli.doctor import connections, device_file, distances, harms, law, link_harms
from keepbusy.timeline.files import BadInput
from keepbusy.virtual.costs.device import crossings
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
    assert harms({"CUDA_LAUNCH_BLOCKING": "0", "HOME": "/"}, 16, "Not Active, Not Active, 0, 4, 16, 16\n") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "detail"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")],
)
def test_a_flag_that_harms_is_named_with_its_remedy(name: str, value: str) -> None:
    (found,) = harms({name: value}, 16, "")
    assert f"{name}={value}" in found.what
    assert f"unset {name}" in found.remedy


def test_few_cores_slow_clocks_and_a_busy_gpu_are_seen() -> None:
    found = harms({}, 1, "Not Active, Not Active, 0, 4, 8, 16\nActive, Not Active, 97, 1200, 16, 16\n")
    assert [harm.what for harm in found] == [
        "this process may use 1 core only",
        "GPU 0 has 8 of its 16 PCIe lanes",
        "GPU 1 has lowered its clocks",
        "GPU 1 is 97% busy with something else (1200 MiB in use)",
    ]


def test_what_a_driver_does_not_know_is_passed_over() -> None:
    assert harms({}, 16, "[N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\nNo devices were found\n") == []


def test_a_machine_becomes_a_device_that_reaches_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(device_file(MACHINE, None), encoding="utf-8")  # type: ignore[arg-type]
    device = read_device(str(path))
    assert (device.name, device.capability, device.multiprocessors) == ("NVIDIA Test", (8, 6), 80)
    assert device.rate("bfloat16") * device.efficiency.sustained == pytest.approx(70_000, rel=0.01)
    assert device.memory.bandwidth * device.efficiency.streaming == pytest.approx(700, rel=0.01)
    assert device.host.operator + device.host.launch == MACHINE.launch
    assert device.copies.pinned == pytest.approx(26)
    assert device.wire == read_device("h200").wire


# Links

NCCL = {
    "all_reduce": [(16, 52.3), (1 << 10, 43.9), (1 << 14, 38.9), (1 << 18, 37.3), (1 << 22, 42.5), (1 << 26, 324.1),
                   (1 << 30, 4529.5)],
    "all_gather": [(64, 64.0), (1 << 12, 36.8), (1 << 16, 32.4), (1 << 20, 34.2), (1 << 24, 66.6), (1 << 28, 662.6),
                   (1 << 32, 9402.2)],
    "reduce_scatter": [(64, 43.8), (1 << 12, 37.2), (1 << 16, 178.3), (1 << 20, 37.4), (1 << 24, 64.9),
                       (1 << 28, 662.1), (1 << 32, 9252.8)],
    "broadcast": [(16, 67.8), (1 << 10, 37.3), (1 << 14, 30.6), (1 << 18, 24.3), (1 << 22, 25.3), (1 << 26, 203.7),
                  (1 << 30, 2972.1)],
    "all_to_all": [(16, 95.0), (1 << 10, 188.5), (1 << 14, 55.6), (1 << 18, 57.6), (1 << 22, 62.3), (1 << 26, 189.3),
                   (1 << 30, 2378.2)],
}  # fmt: skip
"""Bytes and microseconds of NCCL on four H200, as measured; one of each kind but all_reduce is an outlier."""


def curves() -> Iterator[SimpleNamespace]:
    for name, rows in NCCL.items():
        sizes, times = zip(*((size, round(took * 1e3)) for size, took in rows), strict=True)
        yield SimpleNamespace(name=name, ranks=4, hosts=1, sizes=sizes, times=times)


@pytest.mark.parametrize("curve", list(curves()), ids=NCCL)
def test_a_law_holds_for_what_nccl_took_on_four_h200(curve: SimpleNamespace) -> None:
    """From 64 MB on; smaller ones scatter among themselves, since a host that is slow sets their pace."""
    found = law(curve)  # type: ignore[arg-type]
    assert 340 < found.bandwidth < 380
    crossed = [size * crossings(curve.name, 4) for size in curve.sizes]
    off = distances(found, list(zip(crossed, map(float, curve.times), strict=True)))
    assert max(off[-2:]) < 0.08
    assert median(off) < 0.25


def rank(number: int, host: str = "one", **given: Any) -> SimpleNamespace:
    address = f"0000:{(0x1B, 0x3D, 0x4F, 0xDE)[number]:02x}:00.0"
    about = {"gpu": "NVIDIA A100", "capability": 8, "address": address, "cpus": (0, 1, 2, 3), "near": (0, 1)}
    return SimpleNamespace(**{**about, "host": host, "rdma": (), "topology": "", "settings": (), **given})


def linked(*places: SimpleNamespace, reached: float = 200.0, **given: Any) -> SimpleNamespace:
    everyone = range(len(places))
    rates = tuple(tuple(0.0 if one == other else reached for other in everyone) for one in everyone)
    about = {"backend": "nccl", "copies": (), "rates": rates, "message": 20_000, "host_time": 35_000}
    return SimpleNamespace(**{
        **about, "places": places, "collectives": tuple(curves()),
        "hosts": list(dict.fromkeys(one.host for one in places)),
        "curve": lambda name, hosts: next(one for one in curves() if one.name == name) if hosts == 1 else None,
        **given,
    })  # fmt: skip


def told_of(links: SimpleNamespace) -> list[str]:
    return [harm.what for harm in link_harms(links)]


def test_measured_links_are_the_laws_of_the_device_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(device_file(MACHINE, linked(*map(rank, range(4))), 4), encoding="utf-8")  # type: ignore[arg-type]
    device = read_device(str(path))
    assert set(device.wire.collectives) == set(NCCL)
    for curve in curves():
        expected = law(curve)  # type: ignore[arg-type]
        assert device.wire.collective(curve.name, 1 << 30, 4) == pytest.approx(
            expected.latency + (1 << 30) * crossings(curve.name, 4) / expected.bandwidth, rel=0.01
        )
    assert (device.wire.devices, device.wire.send_latency, device.host.collective) == (4, 20_000, 35_000)


TABLE = (
    "0, 00000000:1B:00.0\n1, 00000000:3D:00.0\n2, 00000000:4F:00.0\n3, 00000000:DE:00.0\n\n"
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tPIX\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tNODE\tSYS\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tPIX\tNODE\t X \tPHB\tSYS\t0-31\t0\t\tN/A\n"
    "GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)
"""As `nvidia-smi` prints it: tabs, an underlined head, cards among the columns."""


def test_the_drivers_table_says_what_joins_two_gpus() -> None:
    found = connections(TABLE)
    assert found["0000:1b:00.0", "0000:3d:00.0"] == "NV12"
    assert found["0000:de:00.0", "0000:1b:00.0"] == "SYS"
    assert len(found) == 16
    assert connections("") == connections("No devices were found") == {}


def test_a_link_far_below_what_it_carries_is_named() -> None:
    first = rank(0, topology=TABLE)
    assert told_of(linked(first, rank(1))) == []
    (slow,) = told_of(linked(first, rank(1), reached=100.0))
    assert slow == "ranks 0→1 and 1→0 reach 100 GB/s over NVLink ×12, where its link carries 300 GB/s"


def test_gpus_without_nvlink_are_held_against_their_pcie() -> None:
    copies = (SimpleNamespace(alone=(25.0, 26.0), together=(24.0, 25.0)),) * 2
    slow, joined = told_of(linked(rank(0, topology=TABLE), rank(3), reached=5.0, copies=copies))
    assert slow == (
        "ranks 0→1 and 1→0 reach 5.0 GB/s over PCIe and the link between two CPUs, where its link carries 25 GB/s"
    )
    assert joined == "no NVLink joins these GPUs, only PCIe and the link between two CPUs"


def test_copies_that_hold_each_other_up_are_named() -> None:
    copies = (SimpleNamespace(alone=(25.0, 26.0), together=(8.0, 25.0)),) * 2
    (found,) = told_of(linked(rank(0, topology=TABLE), rank(1), copies=copies))
    assert found == "copies to the device reach 8.0 GB/s while all ranks copy, and 25 GB/s alone"


def test_a_node_that_is_set_up_otherwise_is_named_with_its_ranks() -> None:
    odd = rank(1, cpus=(8, 9), settings=("NCCL_ALGO=Tree", "NCCL_P2P_DISABLE=0", "CUDA_VISIBLE_DEVICES=1,0"))
    algorithm, order, away = told_of(linked(rank(0, topology=TABLE), odd))
    assert algorithm == "NCCL_ALGO=Tree forces one algorithm, whatever the size (rank 1)"
    assert order.startswith("CUDA_VISIBLE_DEVICES=1,0 counts the GPUs in another order")
    assert away == "rank 1 may run only on cores of another CPU than the one beside the GPU"


def test_hosts_without_rdma_are_named() -> None:
    fast = {"rdma": (50_000_000_000,)}
    (found,) = told_of(linked(rank(0, "a", **fast), rank(1, "b"), reached=40.0))
    assert found == "b has no RDMA device, so that NCCL goes over TCP to the other hosts"
    (found,) = told_of(linked(rank(0, "a", **fast), rank(1, "b", **fast), reached=10.0))
    assert found == "ranks 0→1 and 1→0 reach 10 GB/s over the network, where its link carries 50 GB/s"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('collectives = "fast"', "where tables like [collectives.all_reduce] belong"),
        ('[collectives.all_together]\nlatency = "1 us"', "sets collectives.all_together, which keepbusy does not know"),
        ('[collectives.all_reduce]\nlatency = "1 us"', 'give it latency = "30 us" and bandwidth'),
        ('[collectives.all_reduce]\nlatency = "1"\nbandwidth = "1 GB/s"', "collectives.all_reduce.latency = '1'"),
    ],
)
def test_a_law_that_cannot_be_is_refused(table: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'name = "X"\n{table}\n' if table[0] == "[" else f'{table}\nname = "X"\n', encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(why)):
        read_device(str(path))
