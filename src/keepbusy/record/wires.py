"""What an all-reduce among the GPUs of this host takes: a process a GPU, started by torchrun's own agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from keepbusy.record.machine import device_time

SMALL, LARGE = 1_000, 256_000_000
"""Bytes: one is all latency, the other all bandwidth."""
ROUNDS = 20
PATIENCE = 120.0


@dataclass(frozen=True)
class Wires:
    """Among `ranks` GPUs: nanoseconds of a small all-reduce, and the bytes a nanosecond on each GPU's links."""

    ranks: int
    small: int
    bandwidth: float
    peers: bool  # whether each reaches every other's memory


def measure(ranks: int) -> Wires | None:
    """Nothing where the ranks could not meet."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        ran = subprocess.run(
            [*agent, "-m", __name__], capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return None
    return read(ran.stdout, ranks, _all_reach(ranks)) if ran.returncode == 0 else None


def read(said: str, ranks: int, peers: bool) -> Wires | None:
    """What the first rank said of the two times."""
    found = next((line for line in said.splitlines() if line.startswith("{")), None)
    if found is None:
        return None
    times: dict[str, Any] = json.loads(found)
    travelled = 2 * (ranks - 1) / ranks * LARGE
    return Wires(ranks, round(times["small"]), travelled / max(times["large"] - times["small"], 1.0), peers)


def _all_reach(ranks: int) -> bool:
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


def be_rank() -> None:
    """One of the processes: the first one says what it found."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = {}
    for name, size in (("small", SMALL), ("large", LARGE)):
        data = torch.ones(size // 4, device="cuda")
        found[name] = device_time(lambda data=data: dist.all_reduce(data), ROUNDS)  # type: ignore[misc]
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    be_rank()
