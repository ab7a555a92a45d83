"""What is set on a machine that makes a GPU wait, or that hides it: debug flags, too few cores, clocks held down."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple


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
    """All that is found, in what `ask_driver` says too."""
    return [*flags(environment), *_cores(cores), *_gpus(driver)]


def flags(environment: Mapping[str, str]) -> Iterator[Harm]:
    """What variables do; those of ranks are asked for one by one."""
    for name, is_harmful, why in _FLAGS:
        value = environment.get(name)
        if value is not None and is_harmful(value):
            yield Harm(f"{name}={value} {why}", f"unset {name}, unless you are hunting a bug with it")
    order = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(one.strip().isdecimal() for one in order) and [*map(int, order)] != sorted(map(int, order)):
        yield Harm(
            f"CUDA_VISIBLE_DEVICES={','.join(order)} counts the GPUs in another order than the machine, so that ranks "
            "are not bound to the cores and network cards beside their GPUs",
            f"give them in order: CUDA_VISIBLE_DEVICES={','.join(map(str, sorted(map(int, order))))}",
        )


def _cores(count: int) -> Iterator[Harm]:
    if count < 4:
        yield Harm(
            f"this process may use {count} {'core' if count == 1 else 'cores'} only",
            "give it a core for the loop, and one for each of the loader's workers",
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
