"""Say what changed between two runs, cause by cause.

A and B are each a saved run.busy, a trace, a folder of traces, a quoted pattern ('before/rank*.json.gz'),
or several of these with commas between them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepbusy.cli.console.explanation import explained
from keepbusy.cli.console.output import screen
from keepbusy.cli.console.sources import open_timeline, progress

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis


EXAMPLES = """\
examples:
  keepbusy compare before.busy after.busy
  keepbusy compare before/ after/ --json
  keepbusy compare a0.trace.json.gz,a1.trace.json.gz 'b/rank*.trace.json.gz'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="the run before")
    parser.add_argument("after", metavar="B", help="the run after")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Explain both, and hold them against each other."""
    from keepbusy.explain.comparison import compare
    from keepbusy.report import compared

    done = compare(_side(options.before, options.quiet), _side(options.after, options.quiet))
    if options.json:
        return (compared.render_json(done), "\n")
    shape = screen()
    wrap = sys.stdout.isatty()
    return (compared.render(done, shape.width, colour=shape.colour, unicode=shape.unicode, wrap=wrap), "\n")


def _side(argument: str, quiet: bool) -> Diagnosis:
    with progress(quiet) as on_progress:
        timeline = open_timeline([part for part in argument.split(",") if part], on_progress)
        return explained(timeline, on_progress=on_progress)
