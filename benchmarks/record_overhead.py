"""What recording costs the program that is recorded: `python record_overhead.py [--out FILE]` (a GPU, two minutes).

In one process, blocks of steps alternate: left alone, with marks, left alone, with marks … on a step that is bound by
its launches and on a healthy one. After them come PyTorch's own profilers, for comparison, and what they leave behind.
"""

import argparse
import gc
import json
import os
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

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
PROFILERS = {
    "Kineto, CPU and CUDA": {"activities": [CPU, CUDA]},
    "Kineto, with stacks": {"activities": [CPU, CUDA], "with_stack": True},
}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def launch_bound() -> Callable[[], None]:
    """Many small kernels: the GPU waits for the host all the time."""
    model = TextClassifier(width=256, layers=6, heads=4).to(DEVICE)
    return training(model, torch.randint(0, 8192, (16, 128), device=DEVICE))


def healthy() -> Callable[[], None]:
    """The GPU is what sets the pace."""
    model = resnet(96).to(DEVICE)
    size = 176 if ON_GPU else 32
    images = torch.randn(256 if ON_GPU else 8, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    return training(model, images)


def training(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    y = torch.randint(0, 20, (len(x),), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


CASES = {"launch-bound": (launch_bound, 40), "healthy": (healthy, 20)}


def milliseconds(step: Callable[[], None], count: int) -> float:
    """A step of a block, the device's end of it included."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count * 1e3


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def marked(step: Callable[[], None], count: int) -> tuple[float, dict]:
    marks = Marks()
    marks.begin()
    try:
        took = milliseconds(step, count)
    finally:
        marks.end()
    facts = marks.facts()
    facts.pop("course")
    return took, facts


def compared(step: Callable[[], None], count: int, pairs: int) -> dict:
    """Alternating, each with marks against the mean of its neighbours without."""
    plain, with_marks, facts = [milliseconds(step, count)], [], {}
    for _ in range(pairs):
        took, facts = marked(step, count)
        with_marks.append(took)
        plain.append(milliseconds(step, count))
    around = [(before + after) / 2 for before, after in pairwise(plain)]
    ratios = [took / usual - 1 for took, usual in zip(with_marks, around, strict=True)]
    alone = [after / before - 1 for before, after in pairwise(plain)]
    return {
        "plain_ms": statistics.median(plain),
        "marked_ms": statistics.median(with_marks),
        "added": spread(ratios),
        "noise": spread(alone),
        "told": facts,
    }


def spread(values: list[float]) -> dict:
    """In percent: the median, and between what nine and one in ten lie."""
    tenths = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    return {"median": 100 * statistics.median(values), "low": 100 * tenths[0], "high": 100 * tenths[-1]}


def profiled(step: Callable[[], None], count: int, options: dict) -> dict:
    """PyTorch's profiler over one block, and a block after it has ended."""
    before = [milliseconds(step, count) for _ in range(3)]
    with profile(**options):
        step()
        during = milliseconds(step, count)
    gc.collect()
    after = [milliseconds(step, count) for _ in range(3)]
    plain = statistics.median(before)
    return {
        "plain_ms": plain,
        "recorded_ms": during,
        "added": 100 * (during / plain - 1),
        "after": 100 * (statistics.median(after) / plain - 1),
    }


def measured(pairs: int) -> dict:
    cases = {name: (make(), count) for name, (make, count) in CASES.items()}
    found: dict = {}
    for name, (step, count) in cases.items():
        milliseconds(step, count)
        found[name] = {"marks": compared(step, count, pairs)}
    for recorder, options in PROFILERS.items():
        for name, (step, count) in cases.items():
            found[name][recorder] = profiled(step, max(4, count // 4), options)
    return found


def table(found: dict) -> str:
    lines = [f"{'':14s}{'plain':>10s}{'recorded':>10s}{'added':>9s}   range / after it"]
    for name, case in found.items():
        for recorder, row in case.items():
            recorded = row.get("marked_ms", row.get("recorded_ms"))
            added = row["added"]
            more = (
                f"{added['median']:+8.1f}%   {added['low']:+.1f} to {added['high']:+.1f}%; "
                f"noise {row['noise']['low']:+.1f} to {row['noise']['high']:+.1f}%; lead {row['told']['lead'] / 1e6:.2f} ms"
                if isinstance(added, dict)
                else f"{added:+8.1f}%   after it {row['after']:+.1f}%"
            )
            lines.append(f"{name:14s}{row['plain_ms']:7.2f} ms{recorded:7.2f} ms{more}   {recorder}")
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--pairs", type=int, default=12)
    options = arguments.parse_args()
    with nullcontext():
        result = {
            "gpu": torch.cuda.get_device_name() if ON_GPU else "none",
            "torch": torch.__version__,
            "cases": measured(options.pairs),
        }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))
    print(table(result["cases"]))
