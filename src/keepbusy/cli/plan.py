"""Which layout of a model over many GPUs is fastest and fits, before any of them is rented."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from keepbusy.cli import add_program, complain, hint_at_own_options, need_pytorch, program_in, progress, whole_number
from keepbusy.program.processes import make_folder
from keepbusy.timeline.figures import duration, listing, share
from keepbusy.timeline.files import BadInput
from keepbusy.virtual import IMPORTED

EXAMPLES = """\
examples:
  keepbusy plan --gpus 8 train.py
  keepbusy plan --gpus 512 --on h100 --price 2.5 train.py --batch 64
  keepbusy plan --gpus 16 --layouts shard=3,shard=2+tensor=8 -m package.train

The program calls keepbusy.spread(model, optimizer, loader, example=batch) and takes a few steps; each layout runs on a
virtual GPU, without values, one rank standing for all. No GPU is needed.
"""
LAYOUT, FOUND = "KEEPBUSY_LAYOUT", "KEEPBUSY_LAYOUT_FOUND"
"""The layout for `spread`, and the file into which it writes how it applied it."""
ENDLESS = "4096 GiB"
"""Enough memory for every layout, so that a trial measures how much its layout needs."""


@dataclass(frozen=True)
class SpreadLayout:
    """A layout for `spread`."""

    shard: int
    tensor: int

    def __str__(self) -> str:
        return f"shard={self.shard}" + (f" tensor={self.tensor}" if self.tensor > 1 else "")


@dataclass(frozen=True)
class Trial:
    """A layout that was run. Times are nanoseconds, sizes bytes."""

    layout: SpreadLayout
    step: int
    ledger: Mapping[str, int]
    peak: int  # reserved by PyTorch
    held: int  # allocated by tensors
    batches: int  # of the program's size, which all ranks together take in a step

    @property
    def pace(self) -> float:
        """Nanoseconds per batch."""
        return self.step / self.batches

    @property
    def exposed(self) -> int:
        """Communication without computing at the same time."""
        return self.ledger.get("collective", 0) + self.ledger.get("exposed_collective", 0)

    @property
    def computing(self) -> int:
        return self.ledger.get("computing", 0)

    @property
    def waits(self) -> int:
        return self.step - self.exposed - self.computing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=whole_number("GPUs", 1 << 20),
        required=True,
        metavar="N",
        help="how many, on as many hosts as they need",
    )
    parser.add_argument("--on", metavar="DEVICE", default="h200", help="a virtual GPU, or a .toml file (default h200)")
    parser.add_argument("--layouts", metavar="LAYOUTS", help="only these: shard=3,shard=2+tensor=8")
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of a GPU-hour: what a million batches cost")
    parser.add_argument(
        "--jobs",
        type=whole_number("trials", 1024),
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help="trials at a time",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_program(parser, "the program, and its own arguments")


def run(options: argparse.Namespace) -> Sequence[str]:
    need_pytorch("`keepbusy plan`")
    from keepbusy.virtual.costs.device import read
    from keepbusy.virtual.device_memory import CONTEXT

    script, _ = program_in(options)
    hint_at_own_options(options, add_arguments)
    device = read(options.on)
    gpus, of_host = options.gpus, device.wire.devices
    layouts = list(_parsed(options.layouts, gpus) if options.layouts else _layouts(gpus, of_host))
    folder = make_folder()
    outcomes = _run_all(layouts, options, _with_memory(options.on, folder), folder)
    trials = [outcome for outcome in outcomes if isinstance(outcome, Trial)]
    if not trials:
        raise BadInput(f"none of {len(layouts)} layouts could be run; the first said: {outcomes[0]}")
    for layout, outcome in zip(layouts, outcomes, strict=True):
        if not isinstance(outcome, Trial):
            complain(f"{layout}: {outcome}")
    plan = LayoutPlan(trials, device.memory.size - CONTEXT, options.price, options.gpus)
    if options.json:
        return (json.dumps(plan.as_json(), indent=1), "\n")
    head = f"keepbusy plan · {Path(script).name} on {options.gpus} × {device.name}"
    hosts = -(-gpus // of_host)
    return (f"{head}{f', {hosts} hosts of {of_host}' if hosts > 1 else ''}\n\n", *plan.table())


def _layouts(gpus: int, of_host: int) -> Iterator[SpreadLayout]:
    """All layouts of `spread`. Parts of a layer stay within a host, because each layer waits for them."""
    parts = [count for count in (1, 2, 4, 8, 16) if count <= min(gpus, of_host) and gpus % count == 0]
    for tensor in parts:
        for shard in (0, 1, 2, 3) if tensor < gpus else (0,):
            if tensor == 1 or shard != 1:
                yield SpreadLayout(shard, tensor)


def _parsed(text: str, gpus: int) -> Iterator[SpreadLayout]:
    for word in text.split(","):
        match = re.fullmatch(r"shard=([0-3])(?:\+tensor=([0-9]{1,9}))?", word)
        if not match or not int(match[2] or 1) or gpus % int(match[2] or 1):
            raise BadInput(f"{word!r} is no layout of {gpus} GPUs; give shard=0 to 3, and +tensor= what divides them.")
        yield SpreadLayout(int(match[1]), int(match[2] or 1))


def _with_memory(name: str, folder: Path) -> Path:
    """The same device with more memory than any layout needs."""
    from keepbusy.virtual.costs.device import path_of

    text = path_of(name).read_text(encoding="utf-8")
    roomy = folder / "device.toml"
    roomy.write_text(re.sub(r'(?m)^(size\s*=\s*)"[^"]*"', rf'\1"{ENDLESS}"', text, count=1), encoding="utf-8")
    return roomy


def _run_all(
    layouts: Sequence[SpreadLayout], options: argparse.Namespace, device: Path, folder: Path
) -> list[Trial | str]:
    """For each layout its trial, or why it failed. All run in forks of one process that has imported PyTorch."""
    code = f"from {__name__} import serve; serve({options.jobs})"
    tasks = [_task(layout, options, device, folder) for layout in layouts]
    outcomes: dict[int, Trial | str] = {}
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with server, progress() as on_progress:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(tasks))
        server.stdin.close()
        show = on_progress or (lambda _what, _share: None)
        show(f"0 of {len(layouts)} layouts have run", 0.0)
        for line in server.stdout:
            index, exit_code = json.loads(line)
            outcomes[index] = _outcome(layouts[index], exit_code, folder)
            show(f"{len(outcomes)} of {len(layouts)} layouts have run", len(outcomes) / len(layouts))
    return [outcomes.get(index, "its process ended before it could be run") for index in range(len(layouts))]


def _task(layout: SpreadLayout, options: argparse.Namespace, device: Path, folder: Path) -> dict[str, Any]:
    command = ["run", "--on", str(device), "--values", "none", "--clock", "modelled"]
    command += ["--ranks", str(options.gpus), "--alike"] if options.gpus > 1 else []
    command += ["--quiet", "--save", str(folder / f"{layout}.busy"), *(["-m"] if options.module else [])]
    return {
        "command": [*command, *options.program],
        "environment": {LAYOUT: f"{layout.shard},{layout.tensor}", FOUND: str(folder / f"{layout}.json")},
        "errors": str(folder / f"{layout}.txt"),
    }


def serve(jobs: int) -> None:
    """Run the tasks of standard input, so many at a time, and print the exit code of each. If a program never calls
    `spread`, the others are stopped."""
    for module in ("keepbusy.cli.run", *IMPORTED):  # once, instead of some seconds in each trial
        import_module(module)
    import_module("keepbusy.virtual.pytorch.operators").prepare()
    gc.freeze()
    waiting, running = list(enumerate(json.load(sys.stdin))), dict[int, tuple[int, Mapping[str, Any]]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            index, task = waiting.pop(0)
            child = os.fork()
            if not child:
                _become(task)
            running[child] = index, task
        child, status = os.wait()
        index, task = running.pop(child)
        sys.stdout.write(json.dumps([index, os.waitstatus_to_exitcode(status)]) + "\n")
        sys.stdout.flush()
        if not status and not Path(task["environment"][FOUND]).exists():
            for other in running:
                os.kill(other, signal.SIGKILL)
            return


def _become(task: Mapping[str, Any]) -> NoReturn:
    """Run the task's command as from a shell, with standard error in the task's file."""
    for number, path in enumerate((os.devnull, os.devnull, task["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ |= task["environment"]
    sys.argv = ["keepbusy", *task["command"]]
    sys.exit(import_module("keepbusy.cli").main(task["command"]))


def _outcome(layout: SpreadLayout, exit_code: int, folder: Path) -> Trial | str:
    saved, applied = folder / f"{layout}.busy", folder / f"{layout}.json"
    if exit_code or not saved.exists():
        lines = (folder / f"{layout}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.strip() and not line.startswith("keepbusy: 1 ")]
        return errors[-1].removeprefix("[rank0]: ") if errors else f"it ended with exit code {exit_code}"
    if not applied.exists():
        raise BadInput(
            "the program does not call keepbusy.spread, whose layouts are tried; put this before its loop: "
            "model, optimizer, loader = keepbusy.spread(model, optimizer, loader, example=batch)"
        )
    from keepbusy.explain import explain
    from keepbusy.timeline.busy_file import load

    spread, timeline = json.loads(applied.read_text(encoding="utf-8")), load(saved)
    diagnosis, memory = explain(timeline), timeline.memory
    peak, held = (int(sizes.max(initial=0)) for sizes in (memory.reserved, memory.allocated))
    batches = 1 if spread["shared"] else spread["data"]
    return Trial(layout, diagnosis.plain_step, diagnosis.ledger, peak, held, batches)


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that were tried, for devices with so much memory."""

    trials: Sequence[Trial]
    memory: int
    price: float | None
    gpus: int

    @property
    def ordered(self) -> list[Trial]:
        """Layouts that fit, the fastest first, then those that do not fit."""
        return sorted(self.trials, key=lambda trial: (not self.fits(trial), trial.pace))

    def fits(self, trial: Trial) -> bool:
        return trial.held <= self.memory

    def cost(self, trial: Trial) -> float | None:
        """Dollars for a million batches."""
        return None if self.price is None else self.price * self.gpus * trial.pace * 1e6 / 3.6e12

    def table(self) -> Iterator[str]:
        several = any(trial.batches > 1 for trial in self.trials)
        heads = ["layout", "a step", "computes", "exposed", "waits", "memory", *(["batches"] if several else [])]
        heads += ["batches/s", *(["$ a million"] if self.price is not None else []), ""]
        rows = [heads, *(self._row(trial, several) for trial in self.ordered)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
        for row in rows:
            first, *rest = (f"{cell:{'<' if not place else '>'}{widths[place]}}" for place, cell in enumerate(row[:-1]))
            yield f"{'  '.join([first, *rest])}  {row[-1]}".rstrip() + "\n"
        best = self.ordered[0]
        if not self.fits(best):
            yield f"\nNone fits into {self.memory / 1e9:.0f} GB: more GPUs, a larger tensor=, or a smaller batch.\n"
            return
        given = f"shard={best.layout.shard}" + (f", tensor={best.layout.tensor}" if best.layout.tensor > 1 else "")
        yield f"\nwrite   keepbusy.spread(model, optimizer, loader, {given}, example=batch)\n"
        yield "note    Modelled, without a GPU: all ranks do the same, none is late, and the network between hosts\n"
        yield "        is as the device file says.\n"

    def _row(self, trial: Trial, several: bool) -> list[str]:
        cost, parts = self.cost(trial), (trial.step, trial.computing, trial.exposed, trial.waits)
        times = [duration(time, trial.step) for time in parts]
        return [
            str(trial.layout), *times, f"{trial.held / 1e9:.1f} GB", *([str(trial.batches)] if several else []),
            f"{1e9 / trial.pace:.4g}", *([f"{cost:.2f}"] if cost is not None else []), self._why(trial),
        ]  # fmt: skip

    def _why(self, trial: Trial) -> str:
        """Why it is slower than the fastest."""
        best = self.ordered[0]
        if not self.fits(trial):
            return f"does not fit: {(trial.held - self.memory) / 1e9:.0f} GB too much"
        if trial is best:
            return "the fastest" if len(self.trials) > 1 else ""
        parts = ("communication", "exposed"), ("computing", "computing"), ("waiting", "waits")
        more = {name: getattr(trial, part) / trial.batches - getattr(best, part) / best.batches for name, part in parts}
        worst = [name for name, time in more.items() if time > 0.25 * max(more.values())]
        return f"{share(round(trial.pace - best.pace), round(best.pace))} slower: more {listing(worst)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "gpus": self.gpus,
            "layouts": [
                {
                    "shard": trial.layout.shard,
                    "tensor": trial.layout.tensor,
                    "step": round(trial.step / 1e6, 6),
                    "exposed": round(trial.exposed / 1e6, 6),
                    "peak": trial.held,
                    "reserved": trial.peak,
                    "batches": trial.batches,
                    "batches_per_second": 1e9 / trial.pace,
                    "cost": self.cost(trial),
                    "fits": self.fits(trial),
                }
                for trial in self.ordered
            ],
        }
