"""Predictions against what fixing really gained on H200: is the cause right, and does the predicted step hold?

    python benchmarks/accuracy.py [--truth DIR]... [--planted FILE] [--markdown]

DIR holds for each case <case>.json (the plain step stalled and fixed, over interleaved pairs) and the stalled run,
<case>.stalled.busy or <case>.stalled.rank*.trace.json.gz; FILE says which causes, fixed together, make the fixed
variant.
The rival of each prediction is the plainest one: that nothing is gained.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import keepbusy
from keepbusy.timeline.model import Timeline

HERE = Path(__file__).resolve().parent
TRUTH = HERE.parent / "tests/gpu/truth"


@dataclass(frozen=True)
class Row:
    """A case: milliseconds a step."""

    case: str
    stalled: float
    fixed: float
    predicted: float
    named: tuple[str, ...]
    planted: tuple[str, ...]

    @property
    def error(self) -> float:
        return abs(self.predicted - self.fixed) / self.stalled

    @property
    def right(self) -> bool:
        """At least half of what was gained was foretold, or silence kept where nothing was."""
        if self.planted:
            return self.stalled - self.predicted >= 0.5 * (self.stalled - self.fixed)
        return self.predicted >= 0.95 * self.stalled


def recorded(path: Path) -> Timeline:
    """The stalled run of a case: saved, or as its profilers wrote it."""
    saved = path.with_suffix(".stalled.busy")
    return (
        keepbusy.load(saved)
        if saved.exists()
        else keepbusy.read(sorted(path.parent.glob(f"{path.stem}.stalled.rank*.trace.json.gz")))
    )


def assess(path: Path, planted: Sequence[str]) -> Row:
    truth = json.loads(path.read_text())
    timeline = recorded(path)
    step = round(truth["stalled_ms"] * 1e6)
    found = keepbusy.explain(timeline, plain_step=step, what_if=tuple(planted))
    if planted:
        predicted = found.predicted.step
    else:  # a null case: what would fixing the worst named line have gained?
        lines = [one.predicted.step for one in found.causes if one.cause not in ("launch_bound", "host_work")]
        predicted = min([step, *lines])
    named = tuple(one.cause for one in found.causes)
    return Row(path.stem, truth["stalled_ms"], truth["fixed_ms"], predicted / 1e6, named, tuple(planted))


def show(rows: Sequence[Row], markdown: bool) -> None:
    line = "| {:28} | {:>8} | {:>8} | {:>9} | {:>6} | {} |" if markdown else "{:28} {:>8} {:>8} {:>9} {:>6}  {}"
    print(line.format("case", "stalled", "fixed", "predicted", "error", "planted"))
    if markdown:
        print("|---|---|---|---|---|---|")
    for row in rows:
        figures = (f"{row.stalled:.2f}", f"{row.fixed:.2f}", f"{row.predicted:.2f}", f"{row.error:.1%}")
        print(line.format(row.case, *figures, ", ".join(row.planted) or "nothing", "" if row.right else "WRONG"))
    errors = sorted(row.error for row in rows)
    nothing = statistics.median(abs(row.stalled - row.fixed) / row.stalled for row in rows)
    print(
        f"\n{len(rows)} cases: {sum(row.right for row in rows)} right; error {statistics.median(errors):.1%} at the "
        f"median, {errors[min(len(errors) - 1, int(0.9 * len(errors)))]:.1%} at the 90th percentile; "
        f"predicting that nothing is gained errs by {nothing:.1%} at the median"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--truth", type=Path, action="append", help="a folder of truth; repeatable")
    arguments.add_argument("--planted", type=Path, default=HERE / "stalls/planted.json")
    arguments.add_argument("--markdown", action="store_true")
    options = arguments.parse_args()
    planted = json.loads(options.planted.read_text())
    folders = options.truth or [TRUTH / "with_stack", TRUTH / "without_stack"]
    paths = sorted(path for folder in folders for path in folder.glob("*.json"))
    show([assess(path, planted[path.stem]) for path in paths], options.markdown)


if __name__ == "__main__":
    main()
