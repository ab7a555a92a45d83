"""What is set on this machine that makes a GPU wait, or that hides it: debug flags, too few cores, clocks held down."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple


class Harm(NamedTuple):
    """A setting that costs time, and what to do."""

    what: str
    remedy: str


_FLAGS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", lambda value: value not in ("", "0"), "makes the host wait for every kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "checks every collective with another one"),
    ("NCCL_DEBUG", lambda value: value.upper() in ("TRACE", "INFO"), "writes a log from every rank"),
    ("NCCL_P2P_DISABLE", lambda value: value == "1", "keeps GPUs from reaching each other's memory"),
    ("NCCL_BLOCKING_WAIT", lambda value: value == "1", "makes the host wait for every collective"),
    ("TORCH_NCCL_BLOCKING_WAIT", lambda value: value == "1", "makes the host wait for every collective"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", lambda value: value == "1", "asks the driver for every tensor's memory"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", lambda value: value == "1", "lets streams wait for one another"),
    ("NVIDIA_TF32_OVERRIDE", lambda value: value == "0", "keeps matrix products in float32 from the tensor cores"),
    ("PYTHONTRACEMALLOC", lambda value: value not in ("", "0"), "slows every allocation of Python's"),
    ("PYTHONDEVMODE", lambda value: value not in ("", "0"), "makes Python check itself all the time"),
)


def harms(environment: Mapping[str, str], cores: int, driver: str) -> list[Harm]:
    """All that is found, in what `ask_driver` says too."""
    return [*_flags(environment), *_cores(cores), *_clocks(driver)]


def _flags(environment: Mapping[str, str]) -> Iterator[Harm]:
    for name, is_harmful, why in _FLAGS:
        value = environment.get(name)
        if value is not None and is_harmful(value):
            yield Harm(f"{name}={value} {why}", f"unset {name}, unless you are hunting a bug with it")


def _cores(count: int) -> Iterator[Harm]:
    if count < 4:
        yield Harm(
            f"this process may use {count} {'core' if count == 1 else 'cores'} only",
            "give it a core for the loop, and one for each of the loader's workers",
        )


_ASKED = "clocks_throttle_reasons.sw_thermal_slowdown,clocks_throttle_reasons.hw_slowdown,utilization.gpu,memory.used"


def ask_driver() -> str:
    """A line a GPU, or nothing where there is no driver to ask."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _clocks(answer: str) -> Iterator[Harm]:
    for number, line in enumerate(answer.splitlines()):
        words = [word.strip() for word in line.split(",")]
        if len(words) != 4:
            continue
        hot, slowed, busy, used = words
        if "Active" in (hot, slowed):
            yield Harm(f"GPU {number} has lowered its clocks", "look after its cooling and power")
        if busy.isdecimal() and int(busy) > 5:
            yield Harm(
                f"GPU {number} is {busy}% busy with something else ({used} MiB in use)",
                "stop that, or read the figures below with it in mind",
            )
