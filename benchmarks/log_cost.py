"""What the log costs the program that is logged: `python benchmarks/log_cost.py [--rounds 60]`, on a GPU, 5 minutes.

Three programs in one process, once their kernels are known and no window opens any more: steps of 1 and 8 ms that are
bound by their launches, and a healthy one. Four blocks of 0.3 s make a round: one with the log, one
with its rows alone and without the thread that looks on, and two without both, of which one is the control, in an order
that chance gives. Said is how much longer a step takes than in the other block without, by the median of the rounds,
with the error of that. Under torchrun each rank does so on its own GPU, with DDP.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from keepbusy.log import hostlog
from keepbusy.log.program_log import ProgramLog, start
from keepbusy.program.loops.stack_samples import StackSampler

PROGRAMS = {"1ms": (64, 8, 8), "8ms": (64, 60, 8), "healthy": (4096, 8, 8192)}
"""Width, layers, batch."""
BLOCK = 0.3
PACE: list[tuple[int, int]] = []
SETTLES = 5.0
"""Seconds in which each program's windows open and close."""


def step_of(width: int, layers: int, batch: int) -> Callable[[], None]:
    import torch
    from torch import nn

    model: nn.Module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]).cuda()
    if "RANK" in os.environ:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, foreach=False)
    x = torch.randn(batch, width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def median(ratios: Sequence[float]) -> str:
    """With its error, in per cent."""
    drawn = [statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(500)]
    return f"{100 * (statistics.median(ratios) - 1):+.2f}% ±{100 * statistics.stdev(drawn):.2f}"


def switch(log: ProgramLog, rows: bool, samples: bool) -> None:
    """Samples come as often as before they were switched off."""
    hostlog.pause(not rows)
    sampler = log._sampler
    if samples != (sampler.meanwhile is not nothing):
        if samples:
            sampler._pace, sampler._cost = PACE[-1]
        else:
            PACE.append((sampler._pace, sampler._cost))
    sampler.meanwhile = log._meanwhile if samples else nothing
    sampler.sample = StackSampler.sample.__get__(sampler) if samples else lambda _: None  # type: ignore[method-assign]


def nothing() -> None:
    """In place of what is done between two samples."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", default=[*PROGRAMS], choices=PROGRAMS)
    arguments.add_argument("--rounds", type=int, default=60)
    options = arguments.parse_args()
    rounds = options.rounds
    log, why = start(Path(tempfile.mkdtemp()))
    if log is None:
        raise SystemExit(why)
    import torch

    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
    for name in options.only:
        step = step_of(*PROGRAMS[name])
        timed(step, 5)
        count = torch.tensor(max(2, round(BLOCK / timed(step, 20))), device="cuda")
        if "RANK" in os.environ:
            torch.distributed.broadcast(count, 0)
        count, chance = int(count), random.Random(0)
        for _ in range(round(SETTLES / BLOCK)):
            timed(step, count)
        found = list[dict[str, float]]()
        for _ in range(rounds):
            order, took = ["log", "rows", "control", "off"], dict[str, float]()
            chance.shuffle(order)
            for kind in order:
                switch(log, kind in ("log", "rows"), kind == "log")
                timed(step, 1)
                took[kind] = timed(step, count)
            found.append(took)
        switch(log, True, True)
        said = [f"{kind} {median([one[kind] / one['off'] for one in found])}" for kind in ("log", "rows", "control")]
        usual = statistics.median(one["off"] for one in found)
        print(f"{name:8} {1e3 * usual:7.3f} ms   {'   '.join(said)}", flush=True)
    log.end()


if __name__ == "__main__":
    main()
