"""Count how often Python waits for the GPU in a step, on a machine without one, and fail where that is too often.

With --races: find uses of the same memory that no order of streams, events or syncs separates, and fail on them.

Every place counts, also one that costs nothing today. PROGRAM is a script, run on a virtual GPU with a modelled
clock, so that two checks say the same; or a saved run.busy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepbusy.cli import (
    SAVED,
    add_machine,
    add_program,
    check_place,
    handed_on,
    hint_at_own_options,
    need_pytorch,
    print_parts,
    program_in,
    whole_number,
)
from keepbusy.program.processes import make_folder
from keepbusy.timeline.files import BadInput, write_whole

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline

EXAMPLES = """\
examples:
  keepbusy check train.py --steps 20
  keepbusy check --max-syncs 1 --max-blocking-copies 0 train.py --steps 20
  keepbusy check --allow "train.py:42: read once an epoch" train.py
  keepbusy check --races train.py
  keepbusy check --junit keepbusy.xml --github train.py
  keepbusy check --sarif keepbusy.sarif train.py
  keepbusy check run.busy

exit codes: 0 within the limits, 1 too many, 2 it could not be decided, 3 a bug of keepbusy
"""
LIMIT_EXCEEDED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    times = whole_number("times", 1 << 31, least=0)
    parser.add_argument(
        "--max-syncs", type=times, metavar="N", help="so many reads and synchronisations may be in a step"
    )
    parser.add_argument(
        "--max-blocking-copies", type=times, metavar="N", help="so many copies that Python waits for may be in a step"
    )
    parser.add_argument("--races", action="store_true", help="fail on data races between streams, too")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="'PLACE: REASON'",
        help="a place that does not count: 'train.py:42: why', 'metrics.py: why' or 'log(): why'; may come again",
    )
    parser.add_argument("--junit", metavar="FILE.xml", type=Path, help="write the verdict as a JUnit file, too")
    parser.add_argument("--sarif", metavar="FILE", type=Path, help="write it as SARIF, too, for editors")
    parser.add_argument("--github", action="store_true", help="print GitHub's annotations, a line each, too")
    add_machine(parser, "h200", clock="modelled")
    add_program(parser, "a script with its own arguments, or a saved run", "PROGRAM")


def run(options: argparse.Namespace) -> Sequence[str]:
    """Ends with exit code 1 where there are too many."""
    from keepbusy.fix.gate import BLOCKING_COPY, SYNC, AllowList, tally

    files = {tally.junit: options.junit, tally.sarif: options.sarif}
    for path in filter(None, files.values()):
        check_place(path)
    AllowList(options.allow)  # its errors are reported before the program runs
    limits = (options.max_syncs, options.max_blocking_copies)
    syncs, copies = (0, 0) if limits == (None, None) and not options.races else limits
    timeline = _timeline(options)
    if options.races and not timeline.facts.virtual:
        raise BadInput(
            f"{options.program[0]} was recorded on a real GPU, which does not say who uses which memory; "
            "--races needs a run on a virtual one."
        )
    counts = tally.tally(timeline, options.allow)
    verdict = tally.GateVerdict(counts, {SYNC: syncs, BLOCKING_COPY: copies}, options.races)
    for render, path in files.items():
        if path:
            write_whole(path, render(verdict))
    text = [tally.text(verdict), "\n"]
    if options.github and (lines := tally.github(verdict)):
        text += [lines, "\n"]
    if not verdict.over:
        return text
    print_parts(text)
    sys.exit(LIMIT_EXCEEDED)


def _timeline(options: argparse.Namespace) -> Timeline:
    from keepbusy.timeline.busy_file import load

    saved, *rest = options.program
    if saved.endswith(SAVED):
        if rest:
            raise BadInput(
                f"{saved} is a saved run and takes no arguments, but {rest[0]} follows it; name options first."
            )
        return load(Path(saved))
    need_pytorch("`keepbusy check`")
    script, arguments = program_in(options)
    hint_at_own_options(options, add_arguments)
    path = make_folder() / f"run{SAVED}"
    command = [sys.executable, "-m", "keepbusy", "run", "--on", options.on, "--clock", options.clock]
    command += ["--save", str(path), "--quiet"]
    command += handed_on(options, add_arguments, ("gpus", "ranks", "clocks", "values"))
    command += [*(["-m"] if options.module else []), script, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "KEEPBUSY_SPAWNED"}
    if code := subprocess.run(command, check=False, env=environment).returncode:
        raise BadInput(f"{script} ended with exit code {code}, so nothing can be said of it.")
    if not path.exists():
        raise BadInput(f"{script} left no run that could be counted.")
    return load(path)
