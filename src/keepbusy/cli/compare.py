"""Say what changed between two runs, cause by cause.

A and B are each a saved run.busy, a trace, a folder of traces or a quoted pattern ('before/rank*.json.gz').
Several of them have commas between them. Several saved runs are runs of the same program: their differences
are noise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keepbusy
from keepbusy.cli import (
    SAVED,
    check_place,
    complain,
    expand,
    listed,
    open_timeline,
    print_parts,
    progress,
    rendered_comparison,
    write_comparison,
)
from keepbusy.timeline.figures import duration

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline


EXAMPLES = """\
examples:
  keepbusy compare before.busy after.busy
  keepbusy compare before1.busy,before2.busy after1.busy,after2.busy
  keepbusy compare before/ after/ --json
  keepbusy compare before.busy after.busy --page changed.html
  keepbusy compare before.busy after.busy --fail-on slower,new-sync
  keepbusy compare a0.trace.json.gz,a1.trace.json.gz 'b/rank*.trace.json.gz'
"""
FAILURES, FAILED = ("slower", "new-sync"), 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="the run before")
    parser.add_argument("after", metavar="B", help="the run after")
    parser.add_argument(
        "--fail-on",
        type=_verdicts,
        metavar="WHAT",
        default=(),
        help="end with exit code 1 if B is slower than noise, or waits in more places: slower,new-sync",
    )
    parser.add_argument(
        "--page", metavar="OUT.html", type=Path, help="also write a page with the iterations of both runs"
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _verdicts(text: str) -> tuple[str, ...]:
    given = listed(text)
    if not given or not set(given) <= set(FAILURES):
        raise argparse.ArgumentTypeError(f"{text!r} is nothing to fail on; give {' or '.join(FAILURES)}")
    return given


def run(options: argparse.Namespace) -> Sequence[str]:
    """Explain both runs and compare them. Exits with code 1 if `--fail-on` finds something."""
    from keepbusy.explain.comparison import compare

    if options.page:
        check_place(options.page)
    runs = [_runs(argument, options.quiet) for argument in (options.before, options.after)]
    comparison = compare(
        *([keepbusy.explain(timeline, turns=bool(options.page)) for timeline in same] for same in runs)
    )
    if options.page:
        write_comparison(comparison, options.page, options.before, options.after)
    text, step = rendered_comparison(comparison, options.json), comparison.step
    failures = []
    if "slower" in options.fail_on and step.significant and step.difference > 0:
        failures.append(f"slower: a step took {duration(step.before)} and takes {duration(step.after)}.")
    if "new-sync" in options.fail_on:
        from keepbusy.fix.gate.tally import new_waits, tally

        failures += [f"new-sync: {wait}." for wait in new_waits(tally(runs[0][0]), tally(runs[1][0]))]
    if not failures:
        return (text, "\n")
    print_parts((text, "\n"))
    for sentence in failures:
        complain(sentence)
    sys.exit(FAILED)


def _runs(argument: str, quiet: bool) -> list[Timeline]:
    """Each saved run is a run; traces are the ranks of one run."""
    paths = expand(listed(argument))
    runs = [[path] for path in paths] if all(path.suffix == SAVED for path in paths) else [paths]
    with progress(quiet) as on_progress:
        return [open_timeline(files, on_progress) for files in runs]
