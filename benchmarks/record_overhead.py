"""What recording costs the program that is recorded: `python record_overhead.py [--switches] [--seconds 170]`.

Four programs: one bound by its launches, a healthy one, one that makes very many short calls in Python, and
one that draws many small batches. Each is measured in two ways, and each way has a control in which nothing is recorded
where something is elsewhere.

Beside: within one process, stretches of the program alone take turns with stretches in which everything runs that runs
from a recorded program's first step to its last (marks, looks, counted turns, the driver's samples), but no window.

Whole: the program in a fresh process, plain, under `keepbusy run`, and plain again. Told are the time from the start of
the process to the program's own end, the rest of it (the report), and a step by the program's own stopwatch.

Switches (with `--switches`, in place of the other two): which part of the recorder costs what. The program runs in
blocks of a fifth of a second. Before each, every part of the recorder is switched on or off by chance, and so is a
switch that nothing hangs on: the control. What a part costs is what blocks take longer in which it was on, all else
being fitted, too; so each block says something of every part. Beside it stands for how long its own code ran, of the
time in which it was on.

Window (with `--window`): what opening and closing one takes, with PyTorch's external correlation and without it, what
a step takes in it, and what a step takes afterwards, against processes in which nothing was opened.

Without a GPU it runs small on the CPU, which shows that it works and no more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
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


def small_batches() -> Step:
    """Four batches a step from a loader without workers: each is counted and timed."""
    from torch.utils.data import DataLoader

    width = 64
    small = training(torch.nn.Linear(width, width, device=DEVICE), torch.randn(8, width, device=DEVICE))
    rows = [torch.randn(8, width)] * 4096

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield from DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    drawn = batches()

    def step() -> None:
        for _ in range(4):
            next(drawn)
        small()

    return step


PROGRAMS = {
    "launch-bound": launch_bound,
    "healthy": healthy,
    "short calls": short_calls,
    "small batches": small_batches,
}


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


# Switches: one part of the recorder at a time.

CONTROL, LOOKS, TURNS, MARKS, PAUSES, DRIVER, THOUGHTS = PARTS = (
    "control", "looks", "turns", "marks", "pauses", "driver", "thoughts",
)  # fmt: skip
WITHIN_LOOKS = (DRIVER, THOUGHTS)
"""Parts that have their turn after a look, and so none while there are no looks."""
SWITCHED, SWITCHED_SETTLING = 0.2, 0.02
"""Seconds of a block, and of what passes before it is timed."""
NEIGHBOURS = 4
"""A block is held against so many before it and after it, for the machine's pace drifts."""
STRANGE = 6.0
"""Blocks that are off by so many usual deviations are left out."""
LEFT_UNMEASURED = 1.0
"""Seconds in which loops are found and looks find their pace."""


class Switches:
    """A recorder beside a program; its parts go on and off while it runs."""

    def __init__(self) -> None:
        from keepbusy.recording.recorder import Run, RunOptions

        self.run: Any = Run(RunOptions(after=1 << 30))
        self.on = dict.fromkeys(PARTS, True)
        self.own = dict.fromkeys(PARTS, 0.0)  # seconds for which its code ran
        self.for_seconds = dict.fromkeys(PARTS, 0.0)  # for how long it was on
        self._since = time.perf_counter()
        self._gate = threading.Lock()  # held while there are to be no looks
        self._read_driver, self._read_at = self.run.share.read, 0
        run, meanwhile = self.run, self.run._meanwhile
        run.share.read = run._turn = lambda: None  # the former has a switch of its own, and no window is to open

        def after_look() -> None:
            if self.on[DRIVER] and run.clock() >= self._read_at:
                self._read_at = run.clock() + 1_000_000_000
                self._timed(DRIVER, self._read_driver)()
            if self.on[THOUGHTS]:
                self._timed(THOUGHTS, meanwhile)()
            with self._gate:
                pass

        run.loops.look = self._timed(LOOKS, run.loops.look)
        run.marks._mark = self._timed(MARKS, run.marks._mark)
        run._meanwhile = after_look
        run.begin()

    def _timed(self, part: str, act: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            began = time.perf_counter()
            done = act(*arguments)
            self.own[part] += time.perf_counter() - began
            return done

        return timed

    def throw(self, on: dict[str, bool]) -> None:
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        run, before, self.on = self.run, self.on, on
        for part in PARTS:
            was_on = before[part] and (part not in WITHIN_LOOKS or before[LOOKS])
            self.for_seconds[part] += passed * was_on
            if not was_on:  # what would have been due meanwhile comes later by as much
                late = round(passed * 1e9)
                if part == DRIVER:
                    self._read_at += late
                elif part == THOUGHTS:
                    run._think_at, run._write_at = run._think_at + late, run._write_at + late
                    run._plan.not_before += late
        if on[LOOKS] == self._gate.locked():
            self._gate.release() if on[LOOKS] else self._gate.acquire()
        run.marks._running = on[MARKS]
        self._count_turns(on[TURNS])
        pauses = run.marks.pauses
        pauses._thread = threading.get_ident() if on[PAUSES] else 0
        if on[PAUSES] != before[PAUSES]:
            (gc.callbacks.append if on[PAUSES] else gc.callbacks.remove)(pauses._collected)

    def _count_turns(self, on: bool) -> None:
        counters = self.run.loops._counters
        if counters is None or counters._tool is None:
            return
        events = counters._api.events
        for number, code in list(counters._counted.values()):
            counted = on and number not in self.run.loops.looks.fleeting
            counters._api.set_local_events(counters._tool, code, (events.JUMP | events.PY_START) if counted else 0)

    def end(self) -> None:
        self.throw(dict.fromkeys(PARTS, True))
        self.run.end()
        shutil.rmtree(self.run.folder.parent)


def switched(make: Callable[[], Step], seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance, step = random.Random(1), make()
    for _ in range(WARM_UP):
        step()
    switches = Switches()
    milliseconds(step, LEFT_UNMEASURED)
    until = time.perf_counter() + seconds
    took, rows = list[float](), list[list[float]]()
    while time.perf_counter() < until:
        on = {part: chance.random() < 0.5 for part in PARTS}
        switches.throw(on)
        milliseconds(step, SWITCHED_SETTLING)
        took.append(milliseconds(step, SWITCHED))
        rows.append([float(on[part] and (part not in WITHIN_LOOKS or on[LOOKS])) for part in PARTS])
    switches.end()
    cost, errors, kept = fitted(np.log(took), np.array(rows))
    looks, turns = switches.run.loops.looks, switches.run.loops.looks.turns
    return {
        "blocks": len(took),
        "kept": kept,
        "step_ms": statistics.median(took),
        "looks": len(looks.times),
        "turns": sum(len(ends) for ends in turns.values()),
        "entries": sum(len(times) for times in looks.entries.values()),
        "parts": {
            part: {
                "added": 100 * cost[number],
                "error": 100 * errors[number],
                "own": 100 * switches.own[part] / max(1e-9, switches.for_seconds[part]),
            }
            for number, part in enumerate(PARTS)
        },
    }


def calls_of_a_mark() -> dict[str, float]:
    """Microseconds of what a mark asks of the driver, each between two pieces of other work, as in a program."""
    work, stream, took = small_batches(), torch.cuda.current_stream(), dict[str, list[float]]()

    def timed(name: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        took.setdefault(name, []).append(1e6 * (time.perf_counter() - began))

    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(300):
        work()
        timed("capturing?", torch.cuda.is_current_stream_capturing)
        timed("stream", torch.cuda.current_stream)
        timed("record", lambda: first.record(stream))
        timed("query, pending", first.query)
        second.record(stream)
        wait_for_device()
        work()
        timed("query, passed", first.query)
        timed("elapsed", lambda: first.elapsed_time(second))
        timed("nothing", lambda: None)
    return {name: statistics.median(times) for name, times in took.items()}


def fitted(values: Any, rows: Any) -> tuple[Any, Any, int]:
    """What each column adds, how surely, and of how many rows; each row is held against those around it."""
    values, rows = (without_drift(one) for one in (values, rows))
    kept = np.ones(len(values), bool)
    for _ in range(3):
        cost, *_ = np.linalg.lstsq(rows[kept], values[kept], rcond=None)
        off = values - rows @ cost
        deviation = 1.4826 * np.median(np.abs(off[kept]))
        kept = np.abs(off) <= STRANGE * deviation
    spread = np.linalg.pinv(rows[kept].T @ rows[kept])
    return cost, np.sqrt(np.diag(spread)) * off[kept].std(), int(kept.sum())


def without_drift(values: Any) -> Any:
    near = [
        np.concatenate([values[max(0, row - NEIGHBOURS) : row], values[row + 1 : row + 1 + NEIGHBOURS]]).mean(axis=0)
        for row in range(len(values))
    ]
    return values - np.array(near)


def show_switched(name: str, row: dict[str, Any]) -> None:
    counted = f"{row['looks']} looks, {row['turns']} turns and {row['entries']} entries counted"
    print(f"{name}: a step {row['step_ms']:.3f} ms, {row['kept']} of {row['blocks']} blocks, {counted}")
    for part, found in row["parts"].items():
        print(f"  {part:10s}{found['added']:+6.2f}% (± {found['error']:.2f})   its own code {found['own']:.2f}%")
    whole = sum(found["added"] for part, found in row["parts"].items() if part != CONTROL)
    print(f"  {'together':10s}{whole:+6.2f}%", flush=True)


# Window: a fresh process each.

WINDOW_WAYS = ("as it is", "uncorrelated", "control")


def windowed(make: Callable[[], Step], way: str) -> dict[str, float]:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import profiler

    torch.set_num_threads(1)
    step = make()
    for _ in range(WARM_UP):
        step()
    before = milliseconds(step, 1.0)
    found = dict.fromkeys(("open", "close", "save", "within", "events"), 0.0)
    if way != "control":
        config = _ExperimentalConfig(disable_external_correlation=way == "uncorrelated")
        times = [time.perf_counter()]
        profile = profiler.profile(
            use_cpu=True, use_device="cuda" if ON_GPU else None, use_kineto=True, experimental_config=config
        )
        profile.__enter__()
        times.append(time.perf_counter())
        for _ in range(6):
            step()
        wait_for_device()
        times.append(time.perf_counter())
        profile.__exit__(None, None, None)
        times.append(time.perf_counter())
        file = Path(f"window-{os.getpid()}.json")
        profile.kineto_results.save(str(file))
        times.append(time.perf_counter())
        del profile
        text = file.read_text(encoding="utf-8")
        file.unlink()
        opened, within, closed, saved = np.diff(times) * 1e3
        found = {
            "open": opened,
            "close": closed,
            "save": saved,
            "within": within / 6,
            "events": text.count('"ph": "X"'),
        }
    milliseconds(step, 0.5)
    return {"before": before, **found, "after": milliseconds(step, 2.0)}


def show_windowed(name: str, rows: dict[str, list[dict[str, float]]]) -> None:
    for way, found in rows.items():
        if found:
            middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
            after = [100 * (one["after"] / one["before"] - 1) for one in found]
            print(
                f"{name:14s}{way:14s}x{len(found)}  opens {middle['open']:6.1f} ms, closes {middle['close']:6.1f}, "
                f"saves {middle['save']:6.1f}, {middle['events']:.0f} events; a step {middle['before']:7.3f} ms, "
                f"in it {middle['within']:7.3f}, afterwards {statistics.median(after):+.1f}% "
                f"({min(after):+.1f} to {max(after):+.1f})",
                flush=True,
            )


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


def in_turns(trials: list[tuple[str, str]], seconds: float) -> Iterator[tuple[str, str]]:
    """One after the other and again from the start, as long as another one has time."""
    until, longest = time.monotonic() + seconds, 0.0
    for trial in cycle(trials):
        began = time.monotonic()
        if began + longest > until:
            return
        yield trial
        longest = max(longest, time.monotonic() - began)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=170)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--switches", action="store_true", help="which part of the recorder costs what")
    arguments.add_argument("--window", action="store_true", help="what a window costs")
    arguments.add_argument("--only", choices=PROGRAMS, nargs="+", default=list(PROGRAMS), help="these programs")
    arguments.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.program:
        be_program(options.program)
        return
    if options.switches:
        found = {}
        for name in options.only:
            part = options.seconds / len(options.only) - 5
            found[name] = forked(lambda name=name, part=part: switched(PROGRAMS[name], part))
            show_switched(name, found[name])
        if ON_GPU:
            calls = forked(calls_of_a_mark)
            print("a mark's calls, µs: " + ", ".join(f"{name} {took:.1f}" for name, took in calls.items()))
        if options.out:
            options.out.write_text(json.dumps(described() | {"switches": found}, indent=1))
        return
    if options.window:
        trials = {name: {way: list[dict[str, float]]() for way in WINDOW_WAYS} for name in options.only}
        for name, way in in_turns([(name, way) for name in options.only for way in WINDOW_WAYS], options.seconds):
            trials[name][way].append(forked(lambda name=name, way=way: windowed(PROGRAMS[name], way)))
        for name, ways in trials.items():
            show_windowed(name, ways)
        return
    found, rows = measured(options.only, options.seconds)
    if options.out:
        options.out.write_text(json.dumps(described() | {"beside": found, "whole": rows}, indent=1))


def described() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name() if ON_GPU else "none", "torch": torch.__version__}


def measured(names: list[str], seconds: float) -> tuple[dict[str, object], object]:
    """Both ways, for as long as that."""
    until = time.monotonic() + seconds
    found: dict[str, object] = {}
    for name in names:
        row = forked(lambda name=name: beside(PROGRAMS[name], SHARE_BESIDE * seconds / len(names) - 3))
        found[name] = row
        recorder = f"with the recorder {row['added']:+.2f}% (± {row['added_error']:.2f})"
        control = f"control {row['control']:+.2f}% (± {row['control_error']:.2f})"
        print(
            f"{name:14s}beside    x{row['pairs']:<3d} a step {row['plain_ms']:8.3f} ms, {recorder}; {control}",
            flush=True,
        )
    rows: dict[str, dict[str, list[dict[str, float]]]] = {name: {way: [] for way in WAYS} for name in names}
    for name, way in in_turns([(name, way) for name in names for way in WAYS], until - time.monotonic()):
        rows[name][way].append(whole(name, WAYS[way]))
    for name in names:
        show_whole(name, rows[name])
    return found, rows


if __name__ == "__main__":
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    main()
