"""Write a run for another program.

perfetto   the timeline, for ui.perfetto.dev or chrome://tracing
json       the explanation, as JSON
csv        the timeline's spans, one a line
sarif      the lines to blame with what they cost, for editors and code scanners
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import keepbusy
from keepbusy.cli import check_place, expand, open_timeline, progress, where_it_ran
from keepbusy.timeline.files import BadInput, replacing

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.timeline.model import Timeline

EXAMPLES = """\
examples:
  keepbusy export run.busy --to perfetto -o run.json.gz
  keepbusy export rank*.trace.json.gz --to csv > spans.csv
  keepbusy export run.busy --to sarif -o keepbusy.sarif
"""
KINDS = ("perfetto", "json", "csv", "sarif")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="the traces of all ranks, a folder of them, or a saved run.busy"
    )
    parser.add_argument("--to", required=True, choices=KINDS, help="for which program")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        help="the file to write, compressed when it ends in .gz (else standard output)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> Iterable[str]:
    """Stream the run to the file or to standard output."""
    if options.output:
        check_place(options.output)
    with progress(options.quiet) as on_progress:
        parts = _parts(open_timeline(expand(options.files), on_progress), options.to)
    if options.output is None:
        return parts
    with replacing(options.output) as output:
        is_packed = options.output.suffix == ".gz"
        with gzip.GzipFile(options.output.name, "wb", fileobj=output) if is_packed else nullcontext(output) as file:
            file.writelines(part.encode() for part in parts)
    return ()


def _parts(timeline: Timeline, kind: str) -> Iterable[str]:
    from keepbusy.report import as_json, exports

    if kind == "perfetto":
        explained: Diagnosis | None = None
        with suppress(BadInput):  # the timeline alone is worth exporting
            explained = keepbusy.explain(timeline, turns=True)
        return exports.perfetto(timeline, explained)
    if kind == "csv":
        return exports.csv_table(timeline)
    diagnosis = keepbusy.explain(timeline)
    with where_it_ran(diagnosis):
        return (exports.sarif(diagnosis),) if kind == "sarif" else (as_json.render(diagnosis), "\n")
