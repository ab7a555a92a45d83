"""What recording costs the program that is recorded: `python record_overhead.py [--seconds 170] [--out FILE]`.

Three programs: one bound by its launches, a healthy one, and one that makes very many short calls in Python. Each is
measured in two ways, and each way has a control in which nothing is recorded where something is elsewhere.

Beside: within one process, stretches of the program alone take turns with stretches in which everything runs that runs
from a recorded program's first step to its last (marks, looks, counted turns, the driver's samples), but no window.

Whole: the program in a fresh process, plain, under `keepbusy run`, and plain again. Told are the time from the start of
the process to the program's own end, the rest of it (the report), and a step by the program's own stopwatch.

Without a GPU it runs small on the CPU, which shows that it works and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from forked import forked

BLOCK, SETTLING = 0.4, 0.15
"""Seconds of a stretch that is timed, and before it: loops are noticed in a tenth of a second."""
WARM_UP = 30
SHARE_BESIDE = 0.35
"""Of the time that is given, for the first way."""
LOOPED = 4.0
"""Seconds that each whole program trains for."""
ON_GPU = Path("/dev/nvidiactl").exists()  # asking PyTorch would wake the driver, which does not outlive a fork
DEVICE = "cuda" if ON_GPU else "cpu"

Step = Callable[[], None]


def launch_bound() -> Step:
    """Many small kernels: the GPU waits for the host all the time."""
    width, layers = (256, 6) if ON_GPU else (32, 2)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, device=DEVICE)
    return training(torch.nn.TransformerEncoder(layer, layers), torch.randn(16, 64, width, device=DEVICE))


def healthy() -> Step:
    """The GPU is what sets the pace."""
    width = 8192 if ON_GPU else 256
    layers = [torch.nn.Linear(width, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    return training(torch.nn.Sequential(*layers), torch.randn(4096 if ON_GPU else 64, width, device=DEVICE).bfloat16())


def short_calls() -> Step:
    """Little to launch, and a host that calls small functions of its own thirty thousand times a step."""
    small = training(torch.nn.Linear(64, 64, device=DEVICE), torch.randn(8, 64, device=DEVICE))

    def add(one: int, other: int) -> int:
        return one + other

    def step() -> None:
        total = 0
        for number in range(30_000):
            total = add(total, number)
        small()

    return step


PROGRAMS = {"launch-bound": launch_bound, "healthy": healthy, "short calls": short_calls}


def training(model: torch.nn.Module, x: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().pow(2).mean().backward()
        optimizer.step()

    return step


def wait_for_device() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def milliseconds(step: Step, seconds: float) -> float:
    """A step, over so many seconds, the device's end of it included."""
    wait_for_device()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(4):
            step()
        wait_for_device()
        count += 4
    return (time.perf_counter() - start) / count * 1e3


# Beside: in one process.


def beside(make: Callable[[], Step], seconds: float) -> dict[str, float]:
    torch.set_num_threads(1)
    step = make()
    for _ in range(WARM_UP):
        step()
    until = time.perf_counter() + seconds
    plain, recorded = [stretch(step)], list[float]()
    while time.perf_counter() < until:
        recorded.append(stretch_with_recorder(step))
        plain.append(stretch(step))
    added = [2 * took / (a + b) - 1 for took, (a, b) in zip(recorded, pairwise(plain), strict=True)]
    control = [2 * b / (a + c) - 1 for a, b, c in zip(plain, plain[1:], plain[2:], strict=False)]
    return {
        "pairs": len(added),
        "plain_ms": statistics.median(plain),
        "added": 100 * statistics.median(added),
        "added_error": 100 * error(added),
        "control": 100 * statistics.median(control),
        "control_error": 100 * error(control),
    }


def stretch(step: Step) -> float:
    milliseconds(step, SETTLING)
    return milliseconds(step, BLOCK)


def stretch_with_recorder(step: Step) -> float:
    from keepbusy.recording.recorder import Run, RunOptions

    run = Run(RunOptions(after=1 << 30))
    run.begin()
    try:
        return stretch(step)
    finally:
        run.end()
        shutil.rmtree(run.folder.parent)


def error(values: list[float]) -> float:
    """Of their median: between which values two of three such medians lie, halved."""
    if len(values) < 3:
        return float("nan")
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 1.25 * (high - low) / 1.349 / len(values) ** 0.5


# Whole: a fresh process each.


def be_program(name: str) -> None:
    torch.set_num_threads(1)
    step = PROGRAMS[name]()
    took = list[float]()
    until = time.perf_counter() + LOOPED
    while time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(8):
            step()
        wait_for_device()
        took.append((time.perf_counter() - began) / 8 * 1e3)
    mean, middle = statistics.fmean(took[4:]), statistics.median(took[4:])
    print(json.dumps({"mean_ms": mean, "median_ms": middle, "steps": 8 * len(took), "ended": time.time()}), flush=True)


def whole(name: str, recorded: bool) -> dict[str, float]:
    before = ["-m", "keepbusy", "run"] if recorded else []
    began = time.time()
    command = [sys.executable, *before, __file__, "--program", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = time.time() - began
    told = next((line for line in done.stdout.splitlines() if line.startswith('{"mean_ms"')), None)
    if told is None:
        raise RuntimeError(f"{name} did not end well:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    said = json.loads(told)
    program = said["ended"] - began - LOOPED  # all but the loop, which is as long in each
    return {
        "mean_ms": said["mean_ms"],
        "median_ms": said["median_ms"],
        "around": program,
        "after": took - program - LOOPED,
    }


WAYS = {"plain": False, "recorded": True, "control": False}


def show_whole(name: str, rows: dict[str, list[dict[str, float]]]) -> None:
    for way, found in rows.items():
        if not found:
            continue
        middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
        plain = statistics.median(one["median_ms"] for one in rows["plain"])
        more = 100 * (middle["median_ms"] / plain - 1)
        steps = f"a step {middle['median_ms']:8.3f} ms ({more:+5.1f}%), mean {middle['mean_ms']:8.3f}"
        rest = f"beside its loop {middle['around']:6.2f} s, after its end {middle['after']:5.2f} s"
        print(f"{name:14s}{way:10s}x{len(found)}  {steps};  {rest}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=170)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.program:
        be_program(options.program)
        return
    until = time.monotonic() + options.seconds
    found: dict[str, object] = {}
    for name, make in PROGRAMS.items():
        row = forked(lambda make=make: beside(make, SHARE_BESIDE * options.seconds / len(PROGRAMS) - 3))
        found[name] = row
        recorder = f"with the recorder {row['added']:+.2f}% (± {row['added_error']:.2f})"
        control = f"control {row['control']:+.2f}% (± {row['control_error']:.2f})"
        print(
            f"{name:14s}beside    x{row['pairs']:<3d} a step {row['plain_ms']:8.3f} ms, {recorder}; {control}",
            flush=True,
        )
    rows: dict[str, dict[str, list[dict[str, float]]]] = {name: {way: [] for way in WAYS} for name in PROGRAMS}
    longest, trials = 0.0, [(name, way) for name in PROGRAMS for way in WAYS]
    while time.monotonic() + longest < until:
        name, way = trials[0]
        trials = [*trials[1:], trials[0]]
        began = time.monotonic()
        rows[name][way].append(whole(name, WAYS[way]))
        longest = max(longest, time.monotonic() - began)
    for name in PROGRAMS:
        show_whole(name, rows[name])
    if options.out:
        gpu = torch.cuda.get_device_name() if ON_GPU else "none"
        said = {"gpu": gpu, "torch": torch.__version__, "beside": found, "whole": rows}
        options.out.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    main()
