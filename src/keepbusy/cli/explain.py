"""Say which line makes the GPU wait, and what fixing it gains."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.cli import values
from keepbusy.cli.output import Screen, check_place, screen
from keepbusy.cli.sources import SAVED, Progress, matches, open_timeline, progress
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis


WORKERS = 8
SUMMARY = "which line makes the GPU wait, and what fixing it gains"
EXAMPLES = """\
examples:
  keepbusy explain rank*.trace.json.gz --plain-step 25.0
  keepbusy explain traces/ --plain-step 25ms --save run.busy
  keepbusy explain run.busy --what-if host_sync,blocking_copy
  keepbusy explain run.busy --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="the traces of all ranks, a folder of them, or a saved run.busy"
    )
    add_plain_step(parser)
    values.add_what_if(parser)
    parser.add_argument(
        "--workers",
        type=values.workers,
        metavar="N",
        default=WORKERS,
        help=f"loader workers that a prediction may count on (default {WORKERS})",
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--save", metavar="RUN.busy", type=Path, help="keep the run, to explain it without its traces")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_plain_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain-step",
        type=values.duration,
        metavar="MS",
        help="how long a step takes without the profiler: milliseconds, or with a unit, as in 0.025s",
    )


def run(options: argparse.Namespace) -> Sequence[str]:
    """Explain first, write afterwards: a run that cannot be explained leaves nothing behind."""
    if options.save:
        check_name(options.save)
    with progress(options.quiet) as on_progress:
        timeline = open_timeline(options.files, on_progress)
        diagnosis = explained(timeline, options.plain_step, options.what_if, options.workers, on_progress)
    text = rendered(diagnosis, options.json, _again(options))
    if options.save:
        save(timeline, options.plain_step, options.save)
    return (text, "\n")


def check_name(path: Path) -> None:
    if path.suffix != SAVED:
        raise BadInput(f"--save {path}: a saved run is named *{SAVED}, so that it is known again.")
    check_place(path)


def explained(
    timeline: Timeline,
    plain_step: int | None = None,
    what_if: Sequence[str] = (),
    workers: int = 8,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """The room is imported when it is needed, so that the command begins at once."""
    from keepbusy.explain import explain

    return explain(timeline, plain_step=plain_step, what_if=what_if, workers=workers, on_progress=on_progress)


def rendered(diagnosis: Diagnosis, json: bool, again: str, shape: Screen | None = None) -> str:
    if json:
        from keepbusy.report import as_json

        return as_json.render(diagnosis)
    from keepbusy.report import terminal

    shape = shape or screen()
    return terminal.render(
        diagnosis, shape.width, colour=shape.colour, unicode=shape.unicode, again=again, wrap=shape.is_terminal
    )


def _again(options: argparse.Namespace) -> str:
    """The command that shows this report again."""
    asked = ["--what-if", ",".join(options.what_if)] if options.what_if else []
    asked += ["--workers", str(options.workers)] if options.workers != WORKERS else []
    if options.save:
        return shlex.join(["keepbusy", "explain", str(options.save), *asked])
    plain = [] if options.plain_step is None else ["--plain-step", f"{options.plain_step / 1e6:g}"]
    return shlex.join(["keepbusy", "explain", *_folded(options.files), *plain, *asked])


def _folded(files: list[str]) -> list[str]:
    """Many ranks as one pattern, where it means exactly these files."""
    pattern = f"{_beginning(files)}*{_beginning([name[::-1] for name in files])[::-1]}"
    return [pattern] if len(files) > 2 and matches(pattern) == sorted(map(Path, files)) else files


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)


def save(timeline: Timeline, plain_step: int | None, path: Path) -> None:
    from keepbusy.timeline import busy_file

    if plain_step is not None:
        timeline = timeline.change_facts(plain_step=plain_step)
    busy_file.save(timeline, path)
