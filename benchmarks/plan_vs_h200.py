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
import statistics
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

PLANS = Path(__file__).resolve().parent / "plans"
PROGRAMS = {
    "gpt": ("0,1", "3,1", "0,2"),
    "wide": ("0,1", "2,1", "0,2"),
    "llama": ("0,1", "1,1", "0,2"),
    "encoder": ("0,1", "3,1"),
    "vit": ("0,1", "2,1"),
    "resnet": ("0,1", "3,1"),
    "tables": ("0,1", "3,1"),
    "small": ("0,1", "3,1"),
}
"""Each with the layouts that are tried on several GPUs, as `spread` is asked for them: shard and tensor. On one GPU
there is one layout, so all eight take two minutes there; the nineteen on two GPUs may take two calls."""
ARGUMENTS = {"small": ("gpt.py", "2", "14", "512", "6")}
"""A program that is another one with arguments."""
LIMIT = 60


def program(name: str) -> list[str]:
    file, *arguments = ARGUMENTS.get(name, (f"{name}.py",))
    return [str(PLANS / file), *arguments]


def measured(gpus: int, only: list[str], until: float) -> dict[str, dict]:
    """Until the time given; what is left is for another call."""
    found = {}
    for name, layouts in PROGRAMS.items():
        for layout in layouts if gpus > 1 else ("0,1",):
            if (only and name not in only) or time.monotonic() > until:
                continue
            agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
            command = [*agent, *program(name)]
            done = subprocess.run(
                command,
                env={**os.environ, "KEEPBUSY_LAYOUT": layout},
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            told = [line for line in done.stdout.splitlines() if line.startswith("PLANNED ")]
            if told:
                found[f"{name} {layout}"] = json.loads(told[-1].removeprefix("PLANNED "))
            print(f"{name} {layout}: {told[-1] if told else done.stderr[-400:]}", flush=True)
    return found


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
        found = measured(options.gpus, options.only, time.monotonic() + options.seconds)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
