"""Claim: a latency and a rate say how long NCCL takes, whatever the size and the number of ranks.

    torchrun --nproc-per-node 4 benchmarks/collectives.py [--out FILE] [--device h200]

Each collective is timed over sizes in groups of two, four and eight ranks, as many as there are; the others wait. Its
law is fitted to the smallest and the largest size, and the device file's is set beside what was measured. It takes a
minute. The rows of FILE are collective, ranks, bytes of a rank's larger tensor, and microseconds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from keepbusy.virtual.costs.device import Wire, read
from keepbusy.virtual.costs.machine_figures import collective_calls

CUDA = torch.cuda.is_available()
SIZES = [1 << power for power in range(10, 31 if CUDA else 19, 2)]
Row = tuple[str, int, int, float]


def ring(data: Tensor, group: Any, ranks: int) -> None:
    """Each sends to the next what it was sent by the one before."""
    rank = dist.get_rank()
    there, back = (rank + 1) % ranks, (rank - 1) % ranks
    ends = [dist.P2POp(dist.isend, data, there, group), dist.P2POp(dist.irecv, torch.empty_like(data), back, group)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def calls(data: Tensor, group: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    found = collective_calls(data, group, ranks)
    del found["barrier"]
    return {**found, "send": lambda: ring(data, group, ranks)}


def timed(call: Callable[[], Any], group: Any, size: int) -> float:
    """Microseconds, of the slowest rank: the median of three rounds of as many calls as fill some milliseconds."""
    turns = max(4, min(50, (64 << 20) // size))
    found = []
    for turn in range(4):
        dist.barrier(group)
        began = time.perf_counter()
        for _ in range(turns):
            call()
        if CUDA:
            torch.cuda.synchronize()
        if turn:  # the first one connects
            found.append((time.perf_counter() - began) / turns * 1e6)
    slowest = torch.tensor(statistics.median(found), device="cuda" if CUDA else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def measured(ranks: int) -> list[Row]:
    group = dist.new_group(list(range(ranks)))
    rows: list[Row] = []
    if dist.get_rank() < ranks:
        for size in SIZES:
            data = torch.ones(size // 4, device="cuda" if CUDA else "cpu")
            for name, call in calls(data, group, ranks).items():
                rows.append((name, ranks, size, timed(call, group, size)))
    dist.barrier()
    return rows


def told(rows: list[Row], wire: Wire) -> None:
    """Latency and rate of each, as measured and as the device file has them; how far its law is off."""
    for name in dict.fromkeys(name for name, *_ in rows):
        for ranks in sorted({ranks for other, ranks, *_ in rows if other == name}):
            times = {size: took for other, many, size, took in rows if (other, many) == (name, ranks)}
            small, large = times[min(times)], times[max(times)]
            rate = max(times) / max(large - small, 1e-3) / 1e3
            law = {size: wire.collective(name, size, ranks) / 1e3 for size in times}
            off = [abs(law[size] / took - 1) for size, took in times.items()]
            big = [abs(law[size] / took - 1) for size, took in times.items() if size >= 1 << 22]
            print(
                f"{name:15} {ranks} ranks: {small:6.1f} us, {rate:6.1f} GB/s of its tensor; the device file's law "
                f"{law[min(times)]:6.1f} us, off by {statistics.median(off):4.0%} at the median"
                + (f", from 4 MB on by {statistics.median(big):4.0%}" if big else ""),
                flush=True,
            )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--device", default="h200", help="whose law is set beside it")
    options = arguments.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    rows = [row for ranks in (2, 4, 8) if ranks <= dist.get_world_size() for row in measured(ranks)]
    if dist.get_rank() == 0:
        told(rows, read(options.device).wire)
        if options.out:
            name = torch.cuda.get_device_name() if CUDA else "gloo"
            found = {"machine": f"{dist.get_world_size()} x {name}, PyTorch {torch.__version__}", "rows": rows}
            options.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
