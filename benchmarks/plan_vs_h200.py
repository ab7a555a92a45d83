"""What `keepbusy plan` says of a layout, and what it takes on real GPUs.

    python benchmarks/plan_vs_h200.py --gpus 2 --out measured.json             # on the GPUs: each layout as it is
    python benchmarks/plan_vs_h200.py --gpus 2 --out rest.json --only tables small
    python benchmarks/plan_vs_h200.py --gpus 2 --against measured.json         # anywhere: planned, beside it

The programs of benchmarks/plans call `spread` and tell a step's seconds and the memory that tensors took at most. Told
are how far the plan is off, and of which pairs of layouts that differ by more than 5% it says rightly which is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

PLANS = Path(__file__).resolve().parent / "plans"
PROGRAMS = {
    "gpt": ("0,1", "3,1", "0,2"),
    "small": ("0,1", "3,1"),
    "llama": ("0,1", "1,1", "0,2"),
    "encoder": ("0,1", "3,1"),
    "vit": ("0,1", "2,1"),
    "resnet": ("0,1", "3,1"),
    "tables": ("0,1", "3,1"),
    "wide": ("0,1", "2,1", "0,2"),
}
"""Each with the layouts that are tried on several GPUs, as `spread` is asked for them: shard and tensor. On one GPU
there is one layout."""
ARGUMENTS = {"small": ("gpt.py", "2", "14", "512", "6")}
"""A program that is another one with arguments."""
LIMIT = 60
WAITING = """
import runpy, sys
import torch._dynamo, torch.distributed.fsdp, keepbusy.runtime.spread.spread_model
sys.stdin.readline()
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A rank that has imported what it needs, and begins when it is told to: the next layout's import while one runs."""


def program(name: str) -> list[str]:
    file, *arguments = ARGUMENTS.get(name, (f"{name}.py",))
    return [str(PLANS / file), *arguments]


class Ranks:
    """Those of one layout."""

    def __init__(self, name: str, layout: str, gpus: int) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        threads = {"OMP_NUM_THREADS": "1"} if gpus > 1 else {}  # as torchrun does
        kinds = {"WORLD_SIZE": str(gpus), "KEEPBUSY_LAYOUT": layout, "PYTHONUNBUFFERED": "1"}
        self.name = f"{name} {layout}"
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(gpus)]  # noqa: SIM115  # closed with the process
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-c", WAITING, *program(name)],
                env={**os.environ, **address, **threads, **kinds, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
            for rank, log in enumerate(self._logs)
        ]

    def figures(self) -> dict | str:
        """What they tell of themselves, or why there is nothing."""
        for one in self._ranks:
            if one.stdin is not None and one.poll() is None:
                one.stdin.write("go\n")
                one.stdin.flush()
        until = time.monotonic() + LIMIT
        while any(one.poll() is None for one in self._ranks) and not any(one.poll() for one in self._ranks):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        failed = [place for place, one in enumerate(self._ranks) if one.poll()]
        self.end()
        said = [self._said(log) for log in self._logs]
        told = [line for line in said[0] if line.startswith("PLANNED ")]
        if told:
            return json.loads(told[-1].removeprefix("PLANNED "))
        lines = [line for place in failed for line in said[place]]
        raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|NotEqual): ", line)]
        return (raised or lines[-1:] or [f"not done after {LIMIT} s"])[0]

    def end(self) -> None:
        for one in self._ranks:
            one.kill()
            one.wait()

    @staticmethod
    def _said(log: Any) -> list[str]:
        log.seek(0)
        return [line for line in log.read().splitlines() if line.strip()]


def measured(gpus: int, only: list[str], until: float) -> Iterator[tuple[str, dict]]:
    """Until the time given; what is left is for another call."""
    asked = [(name, layout) for name in only or PROGRAMS for layout in (PROGRAMS[name] if gpus > 1 else ("0,1",))]
    ahead = [Ranks(*one, gpus) for one in asked[:1]]
    for following in [*asked[1:], None]:
        ranks = ahead.pop()
        ahead += [Ranks(*following, gpus)] if following else []
        told = ranks.figures()
        print(f"{ranks.name}: {told}", flush=True)
        if not isinstance(told, str):
            yield ranks.name, told
        if time.monotonic() > until:
            break
    for ranks in ahead:
        ranks.end()


def planned(gpus: int, real: dict[str, dict]) -> dict[str, dict]:
    found = {}
    for name, layouts in PROGRAMS.items():
        wanted = [one.split(",") for one in layouts if f"{name} {one}" in real]
        if not wanted:
            continue
        asked = ",".join(f"shard={shard}+tensor={tensor}" for shard, tensor in wanted)
        command = [sys.executable, "-m", "keepbusy", "plan", "--gpus", str(gpus), "--layouts", asked, "--json"]
        done = subprocess.run([*command, *program(name)], capture_output=True, text=True, check=False)
        for one in json.loads(done.stdout)["layouts"] if done.returncode == 0 else ():
            found[f"{name} {one['shard']},{one['tensor']}"] = {"step": one["step"] / 1e3, "peak": one["peak"]}
    return found


def compare(real: dict[str, dict], plan: dict[str, dict]) -> None:
    both = [name for name in real if name in plan]
    off = {part: [abs(plan[name][part] / real[name][part] - 1) for name in both] for part in ("step", "peak")}
    for name in both:
        step, memory = (f"{plan[name][part] / real[name][part] - 1:+.0%}" for part in ("step", "peak"))
        told = f"{1e3 * real[name]['step']:8.1f} ms, planned {1e3 * plan[name]['step']:8.1f} ({step})"
        print(
            f"{name:14} {told}; {real[name]['peak'] / 1e9:6.2f} GB, planned {plan[name]['peak'] / 1e9:6.2f} ({memory})"
        )
    for part, far in off.items():
        print(f"{part}: median {statistics.median(far):.1%} off, worst {max(far):.1%}")
    pairs = [(a, b) for a, b in combinations(both, 2) if a.split()[0] == b.split()[0]]
    apart = [(a, b) for a, b in pairs if not 0.95 < real[a]["step"] / real[b]["step"] < 1.05]
    right = [(real[a]["step"] < real[b]["step"]) == (plan[a]["step"] < plan[b]["step"]) for a, b in apart]
    print(f"ranked rightly: {sum(right)} of {len(right)} pairs that differ by more than 5%")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--only", nargs="*", default=[], help="programs")
    arguments.add_argument("--seconds", type=float, default=215.0, help="no program is begun after these")
    arguments.add_argument("--against", type=Path)
    options = arguments.parse_args()
    if options.against:
        real = json.loads(options.against.read_text())
        compare(real, planned(options.gpus, real))
    else:
        found = {}
        for name, told in measured(options.gpus, options.only, time.monotonic() + options.seconds):
            found[name] = told
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
