"""Say which line makes the GPU wait, and what fixing it saves."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import keepbusy
from keepbusy.cli import (
    READ,
    add_plain_step,
    add_timeline,
    add_what_if,
    add_workers,
    amount,
    check_name,
    expand,
    fixing,
    flight_dumps,
    matches,
    no_garbage_search,
    open_timeline,
    part,
    progress,
    rendered,
    save,
)
from keepbusy.timeline import figures, last_run
from keepbusy.timeline.files import BadInput

if TYPE_CHECKING:
    from keepbusy.explain.diagnosis import Diagnosis
    from keepbusy.report.verdict import Commands
    from keepbusy.traces.trace_file import EachOf

EXAMPLES = """\
examples:
  keepbusy explain rank*.trace.json.gz --plain-step 25.0
  keepbusy explain traces/ --plain-step 25ms --save run.busy
  keepbusy explain run.busy --what-if host_sync,blocking_copy
  keepbusy explain --full                       all of the last run of `keepbusy run`
  keepbusy explain run.busy --json
  keepbusy explain run.busy --hours 48 --price 2.50
  keepbusy explain /tmp/nccl_trace_rank_*       who waits for whom in a job that hangs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="the traces of all ranks, a folder of them, a saved run.busy, or a flight recorder's dumps "
        "(default: the last run of `keepbusy run`)",
    )
    add_plain_step(parser)
    add_what_if(parser)
    add_workers(parser)
    parser.add_argument("--full", action="store_true", help="print the whole report, not only its first ten lines")
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    add_timeline(parser)
    parser.add_argument("--hours", type=amount, metavar="H", help="what the plan saves of a run of so many hours")
    parser.add_argument(
        "--price", type=amount, metavar="P", default=0.0, help="of an hour of one GPU, to say what that is worth"
    )
    parser.add_argument("--save", metavar="RUN.busy", type=Path, help="keep the run, to explain it without its traces")
    parser.add_argument(
        "--ray", action="store_true", help="read very many ranks on the Ray cluster there is, which sees the same files"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Explain first and write afterwards, so that a run that cannot be explained leaves no file."""
    paths = expand(options.files) if options.files else [last_run.path()]
    dumps = flight_dumps(paths)
    if dumps:
        return _hang(options, dumps, len(paths) - len(dumps))
    if options.save:
        check_name(options.save)
    each: EachOf | None = None
    if options.ray:
        try:
            from keepbusy.integrations.ray import each_on_ray as each
        except ModuleNotFoundError as error:
            raise BadInput(f"--ray needs {error.name}; install it: pip install 'keepbusy[ray]'") from None
    with progress(options.quiet) as on_progress, no_garbage_search():
        timeline = open_timeline(paths, part(on_progress, 0.0, READ), each)
        explaining = part(on_progress, READ, 1.0)
        diagnosis = keepbusy.explain(
            timeline, options.plain_step, options.what_if, options.workers, explaining, options.timeline
        )
    text = rendered(diagnosis, options, _commands(options, diagnosis))
    if options.save:
        save(timeline, options.plain_step, options.save)
    if options.hours and not options.json:
        from keepbusy.report.run_report import of_a_long_run

        text = f"{text}\n\n{of_a_long_run(diagnosis, options.hours, options.price)}"
    return (text, "\n")


def _hang(options: argparse.Namespace, dumps: Sequence[Path], others: int) -> Sequence[str]:
    """Explain a job that hangs from the flight recorder's dumps, which hold no timeline."""
    from keepbusy.hang.flight_recorder import read_dumps
    from keepbusy.hang.waiting_ranks import as_json, explain_hang, hang_report

    if others:
        raise BadInput(f"{dumps[0]} is a flight recorder's dump, and {others} of the other files are none.")
    if options.save or options.what_if or options.plain_step is not None or options.timeline or options.hours:
        raise BadInput(f"{dumps[0]} is a flight recorder's dump: who waits for whom, without times; only --json goes.")
    verdict = explain_hang(read_dumps(dumps))
    return (json.dumps(as_json(verdict), indent=2), "\n") if options.json else list(hang_report(verdict))


def _commands(options: argparse.Namespace, diagnosis: Diagnosis) -> Commands:
    """The next commands: a run of `keepbusy run` can be repeated, a trace can only be shown."""
    from keepbusy.report.verdict import Commands

    plain = [] if options.plain_step is None else ["--plain-step", figures.option(options.plain_step)]
    files = [str(options.save)] if options.save else [*_folded(options.files), *plain]
    return Commands(
        fix_now=fixing("run --fix", diagnosis),
        write_fix=fixing("fix", diagnosis),
        page=shlex.join(["keepbusy", "show", *files]),
        full="add --full",
    )


def _folded(files: list[str]) -> list[str]:
    """Many files as one pattern, if it matches exactly these."""
    pattern = f"{_beginning(files)}*{_beginning([name[::-1] for name in files])[::-1]}"
    return [pattern] if len(files) > 2 and matches(pattern) == sorted(map(Path, files)) else files


def _beginning(names: Sequence[str]) -> str:
    """The longest common beginning."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same)
