"""Claim: a step on the virtual H200 takes what it took on a real one, within 20% for half of the cases.

    python benchmarks/virtual_vs_h200.py STALLBENCH [case...] [--clock modelled] [--steps 12] [--values none]

STALLBENCH holds `cases/` and `truth/*/<case>.json`. Every case runs at full size, unchanged, as a
program of its own; its step is held against the plain one that was measured, stalled and fixed, and its
worst cause against the one that was planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HARMLESS = 0.10
"""A planted stall whose mending gained less than this, measured, asks for silence: no line may be blamed first."""
NOISE = 0.03
BLAMES = {
    "host_sync", "blocking_copy", "copy_not_overlapped", "input_late", "made_on_host", "allocator", "peer_late",
    "exposed_collective",
}  # fmt: skip
TOGETHER = {"made_on_host": {"made_on_host", "blocking_copy"}, "host_sync": {"host_sync", "blocking_copy", "host_work"}}
"""A planted cause, and what else its mending takes: either may be the worse one."""


class Truth(NamedTuple):
    case: str
    world: int
    stalled: float
    fixed: float


class Row(NamedTuple):
    """What a run said: the step in milliseconds, what mending each cause gains, worst first, and how long it took."""

    step: float
    gains: dict[str, float]
    seconds: float

    def worst(self) -> set[str]:
        """The cause that gains most, and those that gain as much within the noise of a prediction."""
        least = max(self.gains.values(), default=0.0) - NOISE * self.step
        return {cause for cause, gain in self.gains.items() if gain >= least}


def truths(folder: Path, wanted: list[str]) -> list[Truth]:
    """A case that was measured several times counts by the median; one for each number of ranks."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("truth/*/*.json")):
        one = json.loads(path.read_text())
        if not wanted or one["case"] in wanted:
            found.setdefault((one["case"], one["world"]), []).append((one["stalled_ms"], one["fixed_ms"]))
    return [
        Truth(case, world, median(one[0] for one in steps), median(one[1] for one in steps))
        for (case, world), steps in sorted(found.items())
    ]


def run(folder: Path, truth: Truth, options: argparse.Namespace) -> Row | str:
    """One case, or why it did not run."""
    command = [sys.executable, "-m", "keepbusy", "run", "--json", "--on", options.on, "--clock", options.clock]
    command += ["--values", options.values] if options.values else []
    command += ["--ranks", str(truth.world)] if truth.world > 1 else []
    environment = {**os.environ, "STALLBENCH_STEPS": str(options.steps), "PYTHONPATH": _path(folder)}
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, f"cases/{truth.case}.py"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {options.timeout} s"
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:90]
    step = said["plain_step"]
    gains = {one["cause"]: step - one["predicted_step"] for one in said["causes"]}
    return Row(step, gains, time.perf_counter() - begun)


def _path(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def right(truth: Truth, row: Row, source: str) -> bool:
    """Whether the worst cause is the planted one; where its mending gained nothing, whether nothing is blamed first."""
    planted = set(re.findall(r"# STALL: (\w+)", source))
    if not planted or truth.stalled - truth.fixed < HARMLESS * truth.stalled:
        return not row.worst() or not row.worst() <= BLAMES
    allowed = planted.union(*(TOGETHER.get(cause, set()) for cause in planted))
    return bool(row.worst() & allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stallbench", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--on", default="h200")
    parser.add_argument("--clock", default="measured")
    parser.add_argument("--values", default="none", help="empty for a keepbusy run of its own choice")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=int, default=600)
    options = parser.parse_args()
    folder = options.stallbench.resolve()
    errors, verdicts = [], []
    for truth in truths(folder, options.cases):
        row = run(folder, truth, options)
        name = f"{truth.case} x{truth.world}" if truth.world > 1 else truth.case
        if isinstance(row, str):
            print(f"{name:28s} FAILED  {row}", flush=True)
            verdicts.append(False)
            continue
        errors.append(abs(row.step - truth.stalled) / truth.stalled)
        verdicts.append(right(truth, row, (folder / "cases" / f"{truth.case}.py").read_text()))
        said = ", ".join(f"{cause} {gain / row.step:.0%}" for cause, gain in list(row.gains.items())[:3]) or "silent"
        print(
            f"{name:28s} measured {truth.stalled:7.1f} ms  virtual {row.step:7.1f} ms  {errors[-1]:4.0%} off  "
            f"{'right' if verdicts[-1] else 'WRONG'}: {said}  ({row.seconds:.0f} s)",
            flush=True,
        )
    if not errors:
        return 1
    print(f"median error {median(errors):.0%}, worst cause right in {sum(verdicts)} of {len(verdicts)}")
    return int(median(errors) > 0.2 or sum(verdicts) < 0.9 * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
