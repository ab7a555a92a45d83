"""What recording costs the program that is recorded: `python record_overhead.py [--out FILE]` (a GPU, three minutes).

Marks: in one process short blocks of steps alternate, left alone, with marks, left alone … on a step that is bound by
its launches and on a healthy one. Each block is held against its neighbours, for the host of a virtual machine drifts.

The window, and PyTorch's own profilers beside it: what they leave behind can't be taken out of a process again, so each
gets fresh ones, and in turn with them processes in which nothing is recorded between the steps before and those after.
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
from forked import forked
from models import TextClassifier, resnet

from keepbusy.recording.marks import Marks
from keepbusy.recording.recorder import Run, RunOptions

WARM, LOOKED_AT = 3, 12
"""Steps before the window opens, and so many more that it has closed and CUPTI has let go."""
SETTLING, BLOCK, PAIRS = 2, 8, 80
"""Steps before a block, in which marks find out what a step is; steps in it; and pairs of blocks."""
AROUND, UNDER = 60, 12
"""Steps before and after what is recorded in a fresh process, and steps that a profiler records."""
CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA


Step = Callable[[], None]
Found = dict[str, float]


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


CASES = {"launch-bound": (launch_bound, 4), "healthy": (healthy, 2)}
"""How the step is made, and processes for each way to record it."""


def milliseconds(step: Step, count: int) -> float:
    """A step of a block, the device's end of it included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


# marks, in one process


def marks(make: Callable[[], Step]) -> Found:
    step = make()
    milliseconds(step, AROUND)
    plain, marked = [block(step)], []
    for _ in range(PAIRS):
        marked.append(with_marks(step))
        plain.append(block(step))
    added = [2 * took / (a + b) - 1 for took, (a, b) in zip(marked, pairwise(plain), strict=True)]
    idle = [2 * took / (a + b) - 1 for a, took, b in zip(plain, plain[1:], plain[2:], strict=False)]
    return {
        "plain_ms": statistics.median(plain),
        "recorded_ms": statistics.median(marked),
        "added": 100 * statistics.median(added),
        "error": 100 * error(added),
        "idle": 100 * statistics.median(idle),
        "idle_error": 100 * error(idle),
    }


def with_marks(step: Step) -> float:
    marks = Marks()
    marks.begin()
    try:
        return block(step)
    finally:
        marks.end()


def block(step: Step) -> float:
    milliseconds(step, SETTLING)
    return milliseconds(step, BLOCK)


def error(values: list[float]) -> float:
    """Of their median: between which values two of three such medians lie, halved."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 1.25 * (high - low) / 1.349 / len(values) ** 0.5


# everything else, in fresh processes


def window(step: Step) -> Found:
    run = Run(RunOptions(after=WARM))
    run.begin()
    try:
        milliseconds(step, WARM + LOOKED_AT)
        recorded = [(later.before - earlier.before) / 1e6 for earlier, later in pairwise(run.window.ticks)]
        after = milliseconds(step, AROUND)  # with marks, as it goes on
    finally:
        run.end()
        shutil.rmtree(run.folder.parent)
    return {"recorded_ms": statistics.median(recorded), "held_up_ms": run.window.cost / 1e6, "after_ms": after}


def profiler(**options: object) -> Callable[[Step], Found]:
    def recorded(step: Step) -> Found:
        with profile(**options):
            took = milliseconds(step, UNDER)
        gc.collect()
        milliseconds(step, LOOKED_AT)
        return {"recorded_ms": took, "after_ms": milliseconds(step, AROUND)}

    return recorded


def nothing(step: Step) -> Found:
    took = milliseconds(step, WARM + LOOKED_AT)
    return {"recorded_ms": took, "after_ms": milliseconds(step, AROUND)}


RECORDERS = {
    "nothing": (nothing, 1),
    "window": (window, 1),
    "Kineto, CPU and CUDA": (profiler(activities=[CPU, CUDA]), 2),
    "Kineto, with stacks": (profiler(activities=[CPU, CUDA], with_stack=True), 2),
}
"""What records, and in how many times fewer processes."""


def trial(make: Callable[[], Step], recorder: Callable[[Step], Found]) -> Found:
    step = make()
    milliseconds(step, AROUND)
    plain = milliseconds(step, AROUND)
    return {"plain_ms": plain, **recorder(step)}


def trials(make: Callable[[], Step], count: int) -> dict[str, Found]:
    found: dict[str, list[Found]] = {name: [] for name in RECORDERS}
    for number in range(count):
        for name, (recorder, fewer) in RECORDERS.items():
            if number % fewer == 0:
                found[name].append(forked(lambda recorder=recorder: trial(make, recorder)))
    return {name: summed_up(rows) for name, rows in found.items()}


def summed_up(rows: list[Found]) -> Found:
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    added = [100 * (row["recorded_ms"] / row["plain_ms"] - 1) for row in rows]
    after = [100 * (row["after_ms"] / row["plain_ms"] - 1) for row in rows]
    return middle | {
        "added": statistics.median(added),
        "after": statistics.median(after),
        "after_low": min(after),
        "after_high": max(after),
    }


def show(name: str, case: dict[str, Found]) -> None:
    for recorder, row in case.items():
        times = f"{name:14s}{row['plain_ms']:7.2f} ms{row['recorded_ms']:9.2f} ms"
        print(f"{times}{row['added']:+8.1f}%   {recorder}: {more(row)}", flush=True)


def more(row: Found) -> str:
    """How sure that is; and what is left once the recorder has ended."""
    if "idle" in row:
        return f"± {row['error']:.1f}; without marks, likewise: {row['idle']:+.1f} ± {row['idle_error']:.1f}"
    held = f", held up {row['held_up_ms']:.0f} ms once" if "held_up_ms" in row else ""
    return f"after it {row['after']:+.1f}% ({row['after_low']:+.1f} to {row['after_high']:+.1f}%){held}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    found: dict[str, dict[str, Found]] = {}
    print(f"{'':14s}{'plain':>10s}{'recorded':>12s}{'added':>9s}")
    for name, (make, count) in CASES.items():
        found[name] = {"marks": forked(lambda make=make: marks(make)), **trials(make, count)}
        show(name, found[name])
    if options.out:
        said = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": found}
        options.out.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
