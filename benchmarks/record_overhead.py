"""What recording costs the program that is recorded: `python record_overhead.py [--out FILE]` (a GPU, two minutes).

In one process, blocks of steps alternate: left alone, with marks, left alone, with marks … on a step that is bound by
its launches and on a healthy one. Then a window is opened and closed, and blocks follow while marks go on. Last come
PyTorch's own profilers, for comparison, and what they leave behind.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

os.environ["TEARDOWN_CUPTI"] = "1"  # read when a profiler ends: CUPTI lets go of the process

import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent / "stalls"))
from models import TextClassifier, resnet

from keepbusy.record.marks import Marks
from keepbusy.record.run import Options, Run

WARM, LOOKED_AT = 3, 12
"""Steps before the window opens, and so many more that it has closed and CUPTI has let go."""
CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA


Step = Callable[[], None]
Block = Callable[[], float]


def launch_bound() -> Step:
    """Many small kernels: the GPU waits for the host all the time."""
    model = TextClassifier(width=256, layers=6, heads=4).cuda()
    return training(model, torch.randint(0, 8192, (16, 128), device="cuda"))


def healthy() -> Step:
    """The GPU is what sets the pace."""
    images = torch.randn(256, 3, 176, 176, device="cuda").to(memory_format=torch.channels_last)
    return training(resnet(96), images)


def training(model: torch.nn.Module, x: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    y = torch.randint(0, 20, (len(x),), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


CASES = {"launch-bound": (launch_bound, 40, 32), "healthy": (healthy, 24, 16)}
"""How the step is made, steps a block, and pairs of blocks: the host of a virtual machine is noisy."""


def milliseconds(step: Step, count: int) -> float:
    """A step of a block, the device's end of it included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def compared(step: Step, count: int, pairs: int, recorded: Callable[[Block], float]) -> dict:
    """Blocks in turn: one left alone, one recorded, one left alone … Each is measured against its neighbours."""
    before = [milliseconds(step, count) for _ in range(3)]
    plain, during = before[-1:], []
    for _ in range(pairs):
        during.append(recorded(lambda: milliseconds(step, count)))
        plain.append(milliseconds(step, count))
    return {
        "plain_ms": statistics.median(plain),
        "recorded_ms": statistics.median(during),
        "added": spread([2 * took / (a + b) for took, (a, b) in zip(during, pairwise(plain), strict=True)]),
        "after": spread([one / statistics.median(before) for one in plain[1:]]),
    }


def with_window(step: Step, count: int, pairs: int) -> dict:
    """A few steps under keepbusy's own window; after it the marks go on."""
    before = [milliseconds(step, count) for _ in range(pairs)]
    usual, run = statistics.median(before), Run(Options(after=WARM))
    run.begin()
    try:
        milliseconds(step, WARM + LOOKED_AT)
        after = [milliseconds(step, count) for _ in range(pairs)]
    finally:
        run.end()
        shutil.rmtree(run.folder.parent)
    recorded = [(later.before - earlier.before) / 1e6 for earlier, later in pairwise(run.window.ticks)]
    return {
        "plain_ms": usual,
        "recorded_ms": statistics.median(recorded),
        "held_up_ms": run.window.cost / 1e6,
        "added": spread([took / usual for took in recorded]),
        "after": spread([took / usual for took in after]),
    }


def spread(ratios: list[float]) -> dict:
    """In percent more than one: the median, and between what eight in ten lie."""
    percent = [100 * (ratio - 1) for ratio in ratios]
    tenths = statistics.quantiles(percent, n=10, method="inclusive")
    return {"median": statistics.median(percent), "low": tenths[0], "high": tenths[-1]}


def with_marks(block: Block) -> float:
    marks = Marks()
    marks.begin()
    try:
        return block()
    finally:
        marks.end()


def with_profiler(**options: object) -> Callable[[Block], float]:
    def recorded(block: Block) -> float:
        with profile(**options):
            took = block()
        gc.collect()
        return took

    return recorded


RECORDERS = {
    "marks": (with_marks, 1, 1),
    "Kineto, CPU and CUDA": (with_profiler(activities=[CPU, CUDA]), 4, 8),
    "Kineto, with stacks": (with_profiler(activities=[CPU, CUDA], with_stack=True), 4, 8),
}
"""What records, a block how many times shorter, and how many times fewer of them."""


def measured() -> dict:
    steps = {name: make() for name, (make, _, _) in CASES.items()}
    found: dict = {name: {} for name in CASES}
    for recorder, (recorded, shorter, fewer) in RECORDERS.items():
        for name, (_, count, pairs) in CASES.items():
            milliseconds(steps[name], count)
            found[name][recorder] = compared(steps[name], count // shorter, pairs // fewer, recorded)
            if recorder == "marks":
                found[name]["window"] = with_window(steps[name], count, pairs // 4)
    return found


def table(found: dict) -> str:
    lines = [f"{'':14s}{'plain':>10s}{'recorded':>10s}{'added':>9s}"]
    for name, case in found.items():
        for recorder, row in case.items():
            times = f"{name:14s}{row['plain_ms']:7.2f} ms{row['recorded_ms']:7.2f} ms"
            lines.append(f"{times}{row['added']['median']:+8.1f}%   {recorder}: {more(row)}")
    return "\n".join(lines)


def more(row: dict) -> str:
    """Between what nine in ten lie, and what is left once the recorder has ended."""
    added, after = row["added"], row["after"]
    return (
        f"{added['low']:+.1f} to {added['high']:+.1f}%; after it {after['median']:+.1f}% "
        f"({after['low']:+.1f} to {after['high']:+.1f}%)"
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": measured()}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    print(table(result["cases"]))
