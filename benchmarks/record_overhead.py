"""What recording costs the program that is recorded: `python record_overhead.py [--seconds 150]`.

Four programs: one bound by its launches, a healthy one, one that makes very many short calls in Python, and
one that draws many small batches; the first two unless others are named. All that is measured keeps to the same few
cores, those that were quietest, and every figure has a control: the same difference where nothing is recorded.

Beside: all that runs from a recorded program's first step to its last (marks, looks, counted turns, the driver's
samples, planning), but no window. The program runs in blocks of a tenth of a second. Before each the whole recorder is
switched on or off by chance, and so is a switch that nothing hangs on: the control. A block is held against its
neighbours, in three ways: what its steps took on average, what the step in its middle took (which shows what every step
pays, and neither a look nor a thought), and what the program's own thread had of a processor.

Whole: a launch-bound program in a fresh process, plain, under `keepbusy run`, and plain again, in turns: seconds until
its first line, for its imports, until its loop, for a fixed number of steps, and from its last line to the end of the
process; of the recorded one also for how long its window held it up, and when what of its report was done.

Beside alone (with `--beside`): all the time for the first of these.

Switches (with `--switches`, in place of all of these): which part of the recorder costs what. Every part is switched
by itself. What a part costs is what blocks take longer in which it was on, all else being fitted, too; so each block
says something of every part. Beside it stands what its own code took of its thread's processor, of the time in which it
was on.

Window (with `--window`): what opening and closing one takes, with PyTorch's external correlation and without it, what
a step takes in it, and what a step takes afterwards, against processes in which nothing was opened.

Without a GPU it runs small on the CPU, which shows that it works and no more.
"""

# ruff: noqa: E402  # the first line is to be known before anything is imported
from __future__ import annotations

import time

FIRST_LINE = time.time()

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import forked

IMPORTED = time.time()

WARM_UP = 30
SHARE_BESIDE = 0.45
"""Of the time that is given, for the first way."""
CORES = 4
"""For the program, the threads that PyTorch has for it, and ours."""
LOOPED = 2.5
"""Seconds that each whole program trains for, about: the number of steps is the same in each."""
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


MEAN, MIDDLE, PROCESSOR = "a step", "the step in the middle", "its thread's processor"


def timed_steps(step: Step, seconds: float) -> dict[str, float]:
    """Milliseconds of a step, over so many seconds, the device's end of it included."""
    wait_for_device()
    ran, times = time.thread_time(), [time.perf_counter()]
    while times[-1] - times[0] < seconds:
        step()
        step()
        wait_for_device()
        times.append(time.perf_counter())
    took = np.diff(times) / 2 * 1e3
    ran = (time.thread_time() - ran) / (2 * len(took)) * 1e3
    return {MEAN: float(took.mean()), MIDDLE: float(np.median(took)), PROCESSOR: ran}


def milliseconds(step: Step, seconds: float) -> float:
    return timed_steps(step, seconds)[MEAN]


# Beside: in one process, the recorder or one of its parts at a time.

CONTROL, LOOKS, TURNS, MARKS, PAUSES, DRIVER, THOUGHTS = PARTS = (
    "control", "looks", "turns", "marks", "pauses", "driver", "thoughts",
)  # fmt: skip
WITHIN_LOOKS = (DRIVER, THOUGHTS)
"""Parts that have their turn after a look, and so none while there are no looks."""
SWITCHED, SWITCHED_SETTLING = 0.1, 0.01
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
        from keepbusy.recording.recorder import _READS_EVERY, Run, RunOptions

        self.run: Any = Run(RunOptions())
        self.on = dict.fromkeys(PARTS, True)
        self.own = dict.fromkeys(PARTS, 0.0)  # seconds of the processor that its code took
        self.for_seconds = dict.fromkeys(PARTS, 0.0)  # for how long it was on
        self._since = time.perf_counter()
        self._gate = threading.Lock()  # held while there are to be no looks
        self._read_driver, self._read_at = self.run.share.read, 0
        run, meanwhile = self.run, self.run._meanwhile
        run.share.read = run._turn = lambda: None  # the former has a switch of its own, and no window is to open
        run._opened = 1  # as after the first window
        run._plan.due = lambda _: setattr(run._plan, "planned", None)

        def after_look() -> None:
            if self.on[DRIVER] and run.clock() >= self._read_at:
                self._read_at = run.clock() + _READS_EVERY
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
            began = time.thread_time()
            done = act(*arguments)
            self.own[part] += time.thread_time() - began
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
        if on[LOOKS] == self._gate.locked():
            self._gate.release() if on[LOOKS] else self._gate.acquire()
        run.marks._running = on[MARKS]
        run.loops.count_turns(on[TURNS])
        pauses = run.marks.pauses
        pauses._thread = threading.get_ident() if on[PAUSES] else 0
        if on[PAUSES] != before[PAUSES]:
            (gc.callbacks.append if on[PAUSES] else gc.callbacks.remove)(pauses._collected)

    def end(self) -> None:
        self.throw(dict.fromkeys(PARTS, True))
        self.run.end()
        shutil.rmtree(self.run.folder.parent)


def switched(make: Callable[[], Step], seconds: float, is_whole: bool) -> dict[str, Any]:
    """`is_whole`: all of it is switched at once."""
    torch.set_num_threads(1)
    chance, step = random.Random(), make()
    columns = (CONTROL, LOOKS) if is_whole else PARTS
    for _ in range(WARM_UP):
        step()
    switches = Switches()
    milliseconds(step, LEFT_UNMEASURED)
    until = time.perf_counter() + seconds
    took, rows, on = list[dict[str, float]](), list[list[float]](), dict.fromkeys(PARTS, True)
    while time.perf_counter() < until:
        if len(rows) % 2:  # what was on is off in the block after it, so that no part has the better half of the run
            on = {part: not was_on for part, was_on in on.items()}
        else:
            on = {part: chance.random() < 0.5 for part in PARTS}
            on |= dict.fromkeys((part for part in PARTS if part != CONTROL), on[LOOKS]) if is_whole else {}
        switches.throw(on)
        milliseconds(step, SWITCHED_SETTLING)
        took.append(timed_steps(step, SWITCHED))
        rows.append([float(on[part] and (part not in WITHIN_LOOKS or on[LOOKS])) for part in columns])
    switches.end()
    ways = {way: fitted(np.log([one[way] for one in took]), np.array(rows)) for way in took[0]}
    cost, errors, kept = ways[MEAN]
    looks, turns = switches.run.loops.looks, switches.run.loops.looks.turns
    return {
        "blocks": len(took),
        "kept": kept,
        "step_ms": statistics.median(one[MEAN] for one in took),
        "looks": len(looks.times),
        "turns": sum(len(ends) for ends in turns.values()),
        "entries": sum(len(times) for times in looks.entries.values()),
        "ways": {
            way: [(100 * one, 100 * error) for one, error in zip(cost, errors, strict=True)]
            for way, (cost, errors, _) in ways.items()
        },
        "own": {part: 100 * own / max(1e-9, switches.for_seconds[LOOKS]) for part, own in switches.own.items() if own},
        "parts": {
            part: {
                "added": 100 * cost[number],
                "error": 100 * errors[number],
                "own": 100 * switches.own[part] / max(1e-9, switches.for_seconds[part]),
            }
            for number, part in enumerate(columns)
        },
    }


def calls_of_a_mark() -> dict[str, float]:
    """Microseconds of what a mark asks of the driver, each between two pieces of other work, as in a program."""
    from keepbusy.recording.step_clock import Cuda

    work, device, took = small_batches(), Cuda(), dict[str, list[float]]()

    def timed(name: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        took.setdefault(name, []).append(1e6 * (time.perf_counter() - began))

    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(300):
        work()
        timed("capturing?", device.ready)
        timed("set", lambda: device.set(first))
        timed("query, pending", first.query)
        device.set(second)
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
    if len(row["parts"]) == 2:
        for way, ((control, its_error), (whole, error)) in row["ways"].items():
            print(f"  {way:24s}{whole:+.2f}% (± {error:.2f}), control {control:+.2f}% (± {its_error:.2f})")
        print("  its own code " + ", ".join(f"{part} {share:.2f}%" for part, share in row["own"].items()), flush=True)
        return
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

TELLING = """\
import sys, time
sys.path[:0] = PATHS
from keepbusy.instrument.patches import when_imported

def telling(owner, original, what):
    def told(*arguments, **options):
        result = original(*arguments, **options)
        sys.stderr.write(f"AT {what} {time.time()}\\n")
        return result
    setattr(owner, original.__name__, told)

def about_the_process():
    from keepbusy.cli import program
    process = program.ProgramProcess
    telling(process, process.hear, "over")
    telling(process, process.wait, "gone")
    telling(program, program._whole, "read")
    if not ON_GPU:
        program.is_possible = lambda: True

def about_the_report():
    from keepbusy import cli
    telling(cli, cli.rendered, "rendered")

when_imported("keepbusy.cli.program", about_the_process)
when_imported("keepbusy.cli", about_the_report)
"""
"""What tells when the parts of a report are done: Python imports it before anything else."""
PHASES = ("first line", "imports", "to the loop", "loop", "end", "whole")
REPORT = ("over", "read", "gone", "rendered")


def be_program(name: str, steps: int) -> None:
    torch.set_num_threads(1)
    step = PROGRAMS[name]()
    for _ in range(WARM_UP):
        step()
    wait_for_device()
    looped, began = time.time(), time.perf_counter()
    if not steps:
        while time.perf_counter() - began < LOOPED:
            step()
            steps += 1
    else:
        for _ in range(steps):
            step()
    wait_for_device()
    over = time.time()
    times = [FIRST_LINE, IMPORTED, looped, over]
    print("TIMES " + json.dumps({"steps": steps, "times": times, "ended": time.time()}), flush=True)


def whole(name: str, recorded: bool, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        told = TELLING.replace("PATHS", repr(paths)).replace("ON_GPU", repr(ON_GPU))
        (Path(folder) / "sitecustomize.py").write_text(told)
        path = os.pathsep.join([folder, *paths]) if recorded else os.pathsep.join(paths)
        command = [sys.executable, *(["-m", "keepbusy", "run"] if recorded else []), __file__]
        began = time.time()
        done = subprocess.run(
            [*command, "--program", name, "--steps", str(steps)],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        ended = time.time()
    line = next((line for line in done.stdout.splitlines() if line.startswith("TIMES ")), None)
    if line is None:
        raise RuntimeError(f"{name} did not end well:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    said = json.loads(line.removeprefix("TIMES "))
    first, imported, looped, over = said["times"]
    took = (first - began, imported - first, looped - imported, over - looped, ended - said["ended"], ended - began)
    found = {"steps": said["steps"], **dict(zip(PHASES, took, strict=True))}
    for part in (line.split() for line in done.stderr.splitlines() if line.startswith("AT ")):
        found.setdefault(part[1], float(part[2]) - said["ended"])
    held = [words[words.index("up") + 2] for line in done.stdout.splitlines() if "held the program up" in line
            if "up" in (words := line.split())]  # fmt: skip
    return found | ({"held up": float(held[0])} if held else {})


WAYS = {"plain": False, "recorded": True, "control": False}


def show_whole(name: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Seconds; of each way the median, and from which to which."""

    def shown(values: list[float]) -> str:
        return f"{statistics.median(values):6.2f} ({min(values):.2f}–{max(values):.2f})"

    print(f"{name}, whole processes, {rows['plain'][0]['steps']:.0f} steps, seconds")
    for way, found in rows.items():
        phases = ", ".join(f"{phase} {shown([one[phase] for one in found])}" for phase in PHASES if found)
        print(f"  {way:9s}x{len(found)} {phases}", flush=True)
    plain, recorded, control = (
        {phase: statistics.median(one[phase] for one in found) for phase in PHASES if found} for found in rows.values()
    )
    for way, found in (("recorded", recorded), ("control", control)):
        if found:
            more = ", ".join(f"{phase} {found[phase] - plain[phase]:+.2f}" for phase in PHASES)
            print(f"  {way} − plain: {more} s; the loop {100 * (found['loop'] / plain['loop'] - 1):+.1f}%")
    for what in (*REPORT, "held up"):
        known = [one[what] for one in rows["recorded"] if what in one]
        if known:
            print(f"  {what:9s} {shown(known)}" + ("" if what == "held up" else " s after its last line"))


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
    arguments.add_argument("--seconds", type=float, default=150)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--switches", action="store_true", help="which part of the recorder costs what")
    arguments.add_argument("--beside", action="store_true", help="what all of it costs beside a program, and no more")
    arguments.add_argument("--window", action="store_true", help="what a window costs")
    usual = ["launch-bound", "healthy"]
    arguments.add_argument("--only", choices=PROGRAMS, nargs="+", default=usual, help="these programs")
    arguments.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.program:
        be_program(options.program, options.steps)
        return
    print(f"on the cores {keep_to_quiet_cores()}; {described()}", flush=True)
    found: dict[str, Any] = {}
    if options.window:
        trials = {name: {way: list[dict[str, float]]() for way in WINDOW_WAYS} for name in options.only}
        for name, way in in_turns([(name, way) for name in options.only for way in WINDOW_WAYS], options.seconds):
            trials[name][way].append(forked(lambda name=name, way=way: windowed(PROGRAMS[name], way)))
        for name, ways in trials.items():
            show_windowed(name, ways)
        return
    until = time.monotonic() + options.seconds
    is_alone = options.switches or options.beside
    share = (1.0 if is_alone else SHARE_BESIDE) * options.seconds / len(options.only) - 5
    for name in options.only:
        found[name] = forked(lambda name=name: switched(PROGRAMS[name], share, not options.switches))
        show_switched(name, found[name])
    if ON_GPU:
        calls = forked(calls_of_a_mark)
        print("a mark's calls, µs: " + ", ".join(f"{name} {took:.1f}" for name, took in calls.items()), flush=True)
    if not is_alone:
        found["whole"] = whole_processes(options.only[0], until - time.monotonic())
    if options.out:
        options.out.write_text(json.dumps({"gpu": described(), "found": found}, indent=1))


def whole_processes(name: str, seconds: float) -> dict[str, list[dict[str, float]]]:
    """The first one finds the files in no cache, and says how many steps all take."""
    until = time.monotonic() + seconds
    steps = int(whole(name, True, 0)["steps"])
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _, way in in_turns([(name, way) for way in WAYS], until - time.monotonic()):
        rows[way].append(whole(name, WAYS[way], steps))
    show_whole(name, rows)
    return rows


def keep_to_quiet_cores() -> list[int]:
    """Those in a row that had least to do for a second; of this process and all that it starts."""

    def busy() -> dict[int, int]:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        return {int(row[0][3:]): sum(map(int, row[1:4])) for row in rows if row[0] != "cpu"}

    mine, before = sorted(os.sched_getaffinity(0)), busy()
    time.sleep(1.0)
    after = busy()
    rows = [mine[at : at + CORES] for at in range(max(1, len(mine) - CORES + 1))]
    quiet = min(rows, key=lambda row: sum(after.get(one, 0) - before.get(one, 0) for one in row))
    os.sched_setaffinity(0, quiet)
    return quiet


def described() -> str:
    """Asked in a process of its own: CUDA does not outlive a fork."""
    return f"{forked(torch.cuda.get_device_name) if ON_GPU else 'no GPU'}, PyTorch {torch.__version__}"


if __name__ == "__main__":
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    main()
