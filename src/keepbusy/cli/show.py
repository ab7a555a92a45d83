"""Draw a run on a page: one file that opens in a browser, and that can be sent."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from keepbusy.cli.console import values
from keepbusy.cli.console.explanation import explained, write_page
from keepbusy.cli.console.output import check_place
from keepbusy.cli.console.sources import READ, expand, open_timeline, part, progress
from keepbusy.cli.explain import WORKERS, add_plain_step

EXAMPLES = """\
examples:
  keepbusy show run.busy
  keepbusy show rank*.trace.json.gz --plain-step 25.0 -o run.html --no-open
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="the traces of all ranks, a folder of them, or a saved run.busy"
    )
    add_plain_step(parser)
    parser.add_argument(
        "--workers",
        type=values.workers,
        metavar="N",
        default=WORKERS,
        help=f"loader workers that a prediction may count on (default {WORKERS})",
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT.html", type=Path, help="the page to write (default: beside the run, *.html)"
    )
    parser.add_argument("--no-open", action="store_true", help="write the page and do not open it")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Opened where somebody sits before a screen."""
    first = expand(options.files)[0]
    path = options.output or first.with_name(f"{first.name.split('.')[0]}.html")
    check_place(path)
    with progress(options.quiet) as on_progress:
        timeline = open_timeline(options.files, part(on_progress, 0.0, READ))
        diagnosis = explained(
            timeline, options.plain_step, workers=options.workers, on_progress=part(on_progress, READ, 1.0), turns=True
        )
    write_page(diagnosis, path, first.name if len(options.files) == 1 else "")
    opened = not options.no_open and _has_a_screen() and webbrowser.open(path.resolve().as_uri())
    return (f"{path}{' (opened)' if opened else ''}\n",)


def _has_a_screen() -> bool:
    """A browser that runs in the terminal itself would take it over."""
    return sys.stdout.isatty() and (sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()))
