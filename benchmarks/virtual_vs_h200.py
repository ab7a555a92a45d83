"""Claim: a step on the virtual H200 takes what it took on a real one, within 20% for half of the cases.

    python benchmarks/virtual_vs_h200.py STALLBENCH [case...] [--clock modelled] [--steps 12] [--values none]
    python benchmarks/virtual_vs_h200.py --own benchmarks/stalls/cases --truth tests/gpu/truth/with_stack ... [case...]

STALLBENCH holds `cases/`, `truth/*/<case>.json` and `score.py`, which says what is planted where. Every case
runs at full size, unchanged, stalled and fixed, each as a program of its own; its step is held against the
plain one that was measured, and its worst cause against the one that was planted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from keepbusy.timeline.busy_file import load
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.steps import commands_between, whole_steps

VARIANT = Path(__file__).parent / "variant.py"
NOISE, SILENT, BESIDE = 0.03, 0.05, 0.10
"""Of the step: what counts as noise; for how much a line may be blamed where nothing is planted, and where it is beside
what is planted. These, and what is blame at all, are `score.py`'s."""
WORKERS, ENOUGH = "num_workers", 40
"""Where workers fetch ahead, a run must be long enough to empty what they fetched at first: as long as the truth's."""
BLAMES = {
    "host_sync", "blocking_copy", "copy_not_overlapped", "input_late", "made_on_host", "allocator", "peer_late",
    "exposed_collective",
}  # fmt: skip


class Truth(NamedTuple):
    case: str
    world: int
    stalled: float
    fixed: float
    noise: float
    planted: list[str]

    @property
    def name(self) -> str:
        return f"{self.case} x{self.world}" if self.world > 1 else self.case


class Row(NamedTuple):
    """What a run said: the step in milliseconds, what fixing each cause gains, and all planted ones together."""

    step: float
    gains: dict[str, float]
    planted: float
    seconds: float

    def first(self) -> set[str]:
        """The causes that gain most, within the noise of a prediction."""
        least = max(self.gains.values(), default=0.0) - NOISE * self.step
        return {cause for cause, gain in self.gains.items() if gain >= least}


class Result(NamedTuple):
    off: float | None
    right: bool | None = None
    first: bool | None = None


def truths(folders: list[Path], planted: Mapping[str, list[str]], wanted: list[str]) -> list[Truth]:
    """A case that was measured several times counts by the median; one for each number of ranks."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        one = json.loads(path.read_text())
        if path.stem in planted and (not wanted or path.stem in wanted):
            found.setdefault((path.stem, one["world"]), []).append(one)
    return [
        Truth(
            case,
            world,
            median(one["stalled_ms"] for one in runs),
            median(one["fixed_ms"] for one in runs),
            max(NOISE, *((one["gain_high"] - one["gain_low"]) / 2 for one in runs)),
            planted[case],
        )
        for (case, world), runs in sorted(found.items())
    ]


def run(cases: Path, truth: Truth, variant: str, options: argparse.Namespace) -> Row | str:
    """One variant of a case, or why it did not run."""
    ahead = WORKERS in (cases / f"{truth.case}.py").read_text()
    steps = max(options.steps, ENOUGH) if ahead else options.steps
    folders = [str(cases.parent), os.environ.get("PYTHONPATH", "")]
    environment = {"STALLBENCH_STEPS": str(steps), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "run.busy"
        command = [*_command(truth, variant, options), "--save", str(saved)]
        try:
            done = subprocess.run(
                [*command, str(VARIANT), f"{cases.name}/{truth.case}.py", variant],
                cwd=cases.parent,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=options.timeout,
                check=False,
            )
            said: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return f"not done within {options.timeout} s"
        except ValueError:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:90]
        if done.returncode:
            return f"exit code {done.returncode}"
        ticks = _ticks_a_step(load(saved))
    gains = {one["cause"]: (said["plain_step"] - one["predicted_step"]) / ticks for one in said["causes"]}
    planted = (said["plain_step"] - said["predicted_step"]) / ticks
    return Row(said["plain_step"] / ticks, gains, planted, time.perf_counter() - begun)


def _command(truth: Truth, variant: str, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "keepbusy", "run", "--json", "--on", options.on, "--clock", options.clock]
    command += ["--values", options.values] if options.values else []
    command += ["--ranks", str(truth.world)] if truth.world > 1 else []
    return command + (["--what-if", ",".join(truth.planted)] if truth.planted and variant == "stalled" else [])


def _ticks_a_step(timeline: Timeline) -> int:
    """Where something happens every fourth tick only, four of them are the step that is reported."""
    whole, rank = whole_steps(timeline), timeline.ranks[0]
    ticks = commands_between(timeline, timeline.marks_of(rank))
    commands = np.count_nonzero(whole.on_device & (whole.rank_of_rows == rank)) / len(whole.marks_of(rank))
    return max(1, round(commands / ticks[len(ticks) // 2 :].mean()))


def right(truth: Truth, row: Row) -> bool:
    """By `score.py`'s rule: what is planted gains half of what it gained or more, and no other line is blamed for much.

    That a step is launch-bound, or the host busy, is no line's fault, and may be said wherever it is so.
    """
    blamed = max((gain for cause, gain in row.gains.items() if cause in BLAMES.difference(truth.planted)), default=0.0)
    invented = blamed > max(BESIDE if truth.planted else SILENT, truth.noise) * row.step
    found = not truth.planted or row.planted / row.step >= 0.5 * (1 - truth.fixed / truth.stalled)
    return found and not invented


def judged(cases: Path, truth: Truth, options: argparse.Namespace) -> Iterator[Result]:
    """Of each variant how far off its step is, and whether the stalled one's causes are right."""
    for variant, measured in (("stalled", truth.stalled), ("fixed", truth.fixed)):
        if variant not in options.variants:
            continue
        row = run(cases, truth, variant, options)
        if isinstance(row, str):
            print(f"{truth.name:26s} {variant:8s} FAILED  {row}", flush=True)
            yield Result(None, False if variant == "stalled" else None)
            continue
        off, word, verdict = row.step / measured - 1, "", None
        if variant == "stalled":
            verdict = right(truth, row)
            word = "right" if verdict else "WRONG"
        said = ", ".join(f"{cause} {gain / row.step:.0%}" for cause, gain in list(row.gains.items())[:3]) or "silent"
        print(
            f"{truth.name:26s} {variant:8s} measured {measured:6.1f} ms  virtual {row.step:6.1f} ms  {off:+5.0%}  "
            f"{word:5s}  {said}  ({row.seconds:.0f} s)",
            flush=True,
        )
        first = bool(row.first() & set(truth.planted)) if truth.planted and variant == "stalled" else None
        yield Result(abs(off), verdict, first)


def planted_in(folder: Path) -> Mapping[str, list[str]]:
    """By `score.py`, or by a `planted.json` beside the cases or above them."""
    for path in (folder / "planted.json", folder.parent / "planted.json"):
        if path.exists():
            return json.loads(path.read_text())
    spec = importlib.util.spec_from_file_location("score", folder.parent / "score.py")
    assert spec is not None
    assert spec.loader is not None
    score = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score)
    return score.PLANTED


def device(given: str) -> str:
    """What `--on` takes; each case runs in its own folder, so a file goes there by its whole path."""
    return str(Path(given).resolve()) if given.endswith(".toml") else given


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stallbench", type=Path, nargs="?", help="a folder of cases/ and truth/")
    parser.add_argument("only", nargs="*", metavar="case")
    parser.add_argument("--own", type=Path, metavar="CASES", help="a folder of cases elsewhere, with --truth")
    parser.add_argument("--truth", type=Path, action="append", default=[])
    parser.add_argument("--variants", default="stalled,fixed")
    parser.add_argument("--on", default="h200", type=device, help="a device, or a .toml file")
    parser.add_argument("--clock", default="measured")
    parser.add_argument("--values", default="none", help="empty for a keepbusy run of its own choice")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=int, default=600)
    return parser.parse_args()


def main() -> int:
    options = options_given()
    if options.own:
        cases, folders, only = options.own, options.truth, [str(options.stallbench or ""), *options.only]
    else:
        cases, folders, only = options.stallbench / "cases", sorted(options.stallbench.glob("truth/*")), options.only
    cases, only = cases.resolve(), [one for one in only if one]
    found = [one for truth in truths(folders, planted_in(cases), only) for one in judged(cases, truth, options)]
    errors = [one.off for one in found if one.off is not None]
    verdicts, first = ([one for one in column if one is not None] for column in list(zip(*found, strict=True))[1:])
    if not errors:
        return 1
    print(f"{len(errors)} steps: median {median(errors):.0%} off, {sum(off <= 0.2 for off in errors)} within 20%")
    print(
        f"causes right in {sum(verdicts)} of {len(verdicts)}; of {len(first)} planted, {sum(first)} come first of all"
    )
    return int(median(errors) > 0.2 or sum(verdicts) < 0.9 * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
