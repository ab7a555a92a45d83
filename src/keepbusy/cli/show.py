"""Draw a run on a page: one file that opens in a browser, and that can be sent."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keepbusy
from keepbusy.cli import (
    READ,
    SAVED,
    add_plain_step,
    add_workers,
    check_place,
    expand,
    open_timeline,
    part,
    progress,
    write_comparison,
    write_page,
)
from keepbusy.timeline import last_run
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis

EXAMPLES = """\
examples:
  keepbusy show                                the last run of `keepbusy run`
  keepbusy show run.busy
  keepbusy show before.busy after.busy
  keepbusy show rank*.trace.json.gz --plain-step 25.0 -o run.html --no-open
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="the traces of all ranks, a folder of them, a saved run.busy, or two of these: before and after "
        "(default: the last run of `keepbusy run`)",
    )
    add_plain_step(parser)
    add_workers(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT.html", type=Path, help="the page to write (default: beside the run, *.html)"
    )
    parser.add_argument("--no-open", action="store_true", help="write the page and do not open it")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Write the page, and open it if there is a screen."""
    files = expand(options.files) if options.files else [last_run.path()]
    are_two_runs = len(files) == 2 and all(file.suffix == SAVED for file in files)
    first = files[0]
    name = "-to-".join(file.name.split(".")[0] for file in files) if are_two_runs else first.name.split(".")[0]
    path = options.output or (first.with_name(f"{name}.html") if options.files else Path("keepbusy.html"))
    check_place(path)
    if are_two_runs:
        if options.plain_step is not None:
            raise BadInput("--plain-step is the time of one run, and two were given; save each with its own.")
        from keepbusy.explain.comparison import compare

        write_comparison(compare(*(_diagnosis(options, [file]) for file in files)), path, *map(str, files))
    else:
        write_page(_diagnosis(options, files), path, first.name if len(options.files) == 1 else "")
    opened = not options.no_open and _has_a_screen() and webbrowser.open(path.resolve().as_uri())
    return (f"{path}{' (opened)' if opened else ''}\n",)


def _diagnosis(options: argparse.Namespace, files: Sequence[Path]) -> Diagnosis:
    with progress(options.quiet) as on_progress:
        timeline = open_timeline(files, part(on_progress, 0.0, READ))
        return keepbusy.explain(
            timeline, options.plain_step, workers=options.workers, on_progress=part(on_progress, READ, 1.0), turns=True
        )


def _has_a_screen() -> bool:
    """A browser that runs in the terminal itself would take it over."""
    return sys.stdout.isatty() and (sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()))
