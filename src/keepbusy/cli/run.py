"""Run a PyTorch program, on the GPU there is or on a virtual one, and say which line makes it wait."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from keepbusy.cli import launch, recorded, values
from keepbusy.cli.explain import check_name, explained, rendered, save
from keepbusy.cli.output import show
from keepbusy.timeline.errors import BadInput

if TYPE_CHECKING:
    from keepbusy.timeline.model import Timeline


SUMMARY = "run a program and explain the run: on the GPU there is, or else on a virtual one"
EXAMPLES = """\
examples:
  keepbusy run train.py --epochs 1
  keepbusy run --on a100 --save run.busy train.py
  keepbusy run --clock modelled -m package.train --steps 20
  keepbusy run --ranks 4 train.py

The program runs as it is: its arguments, its output and its exit code are its own.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_of_the_machine(parser)
    _add_of_the_report(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="what follows names a module, not a script")
    parser.add_argument("script", metavar="SCRIPT", help="the program to run, unchanged")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the program's own arguments")


def _add_of_the_machine(parser: argparse.ArgumentParser) -> None:
    """On what the program runs."""
    parser.add_argument(
        "--on",
        metavar="DEVICE",
        default="auto",
        help="a virtual GPU: h200, h100, a100, b200, l4, rtx4090, or a .toml file "
        "(default: the real GPU where there is one, else h200)",
    )
    parser.add_argument("--gpus", type=_count, metavar="N", default=1, help="how many of them (default 1)")
    parser.add_argument(
        "--ranks", type=_count, metavar="N", default=1, help="run N ranks, a GPU each, through torchrun"
    )
    parser.add_argument(
        "--values",
        choices=("real", "none"),
        default="real",
        help="none: compute nothing and touch no memory, so that large models run too; what is read is zero",
    )
    parser.add_argument(
        "--clock",
        choices=("measured", "modelled"),
        default="measured",
        help="whether the host takes the time it really takes, or a modelled one that is the same in every run",
    )


def _add_of_the_report(parser: argparse.ArgumentParser) -> None:
    """What is looked at, and what is told of it."""
    parser.add_argument(
        "--after", type=_steps, metavar="N", help="record after N steps (default: after 8, once they are steady)"
    )
    values.add_what_if(parser)
    parser.add_argument(
        "--workers", type=values.workers, metavar="N", default=8, help="loader workers to count on (default 8)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead; what the program prints goes to stderr then"
    )
    parser.add_argument("--save", metavar="RUN.busy", type=Path, help="keep the run, to explain it again or compare it")
    parser.add_argument(
        "--live", action="store_true", help="on a real GPU: show the step, the lead and the worst line while it runs"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs; give 1 to 64")
    return int(text)


def _steps(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; give 1 or more")
    return int(text)


def run(options: argparse.Namespace) -> Sequence[str]:
    """Ends with the program's own exit code, so it does not come back when that is not 0."""
    from keepbusy.instrument import script

    if options.save:
        check_name(options.save)
    path = None if options.module else script.find(options.script)
    real = options.on == "auto" and recorded.is_possible()
    if options.live and not real:
        raise BadInput(
            "--live shows what a real GPU does while it does it, and this run has a virtual one; leave it out."
        )
    if options.ranks > 1:
        sys.exit(launch.launch(options.ranks, _command(options)))
    if real:
        recorded.run(
            options,
            lambda: _program(options, path),
            lambda timeline: _report(timeline, options),
            lambda timeline: explained(timeline, None, options.what_if, options.workers),
        )
    return _virtual(options, path)


def _program(options: argparse.Namespace, path: Path | None) -> int:
    from keepbusy.instrument import script

    with _program_output(options.json):
        if path is None:
            return script.run_module(options.script, options.arguments)
        return script.run_file(path, options.arguments)


def _virtual(options: argparse.Namespace, path: Path | None) -> NoReturn:
    from keepbusy.virtual.virtual_run import Options, start, steady

    device = "h200" if options.on == "auto" else options.on
    asked = Options(device, launch.devices(options.gpus), options.clock == "measured", options.values == "real")
    timeline = start(asked, launch.rank())
    process = os.getpid()
    code = _program(options, path)
    if os.getpid() != process:  # a child that the program forked and let return has nothing to tell
        os._exit(code)
    whole = launch.gathered(timeline(source=options.script))
    if whole is not None:
        _report(steady(whole), options)
    sys.exit(code)


def _command(options: argparse.Namespace) -> list[str]:
    """What each rank is started with: the same, without `--ranks`."""
    given = [] if options.on == "auto" else ["--on", options.on]
    given += [] if options.after is None else ["--after", str(options.after)]
    given += [] if options.clock == "measured" else ["--clock", options.clock]
    given += [] if options.values == "real" else ["--values", options.values]
    given += ["--what-if", ",".join(options.what_if)] if options.what_if else []
    given += [] if options.workers == 8 else ["--workers", str(options.workers)]
    given += ["--json"] if options.json else []
    given += ["--live"] if options.live else []
    given += ["--save", str(options.save)] if options.save else []
    given += ["-m"] if options.module else []
    return [*given, options.script, *options.arguments]


class _program_output:  # noqa: N801  # reads as a word: with _program_output(...)
    """Where the result is JSON, standard output is the result's alone, also for children and native code."""

    def __init__(self, elsewhere: bool) -> None:
        self.elsewhere = elsewhere

    def __enter__(self) -> None:
        if self.elsewhere:
            sys.stdout.flush()
            self._before = os.dup(1)
            os.dup2(2, 1)

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()
        if self.elsewhere:
            os.dup2(self._before, 1)


def _report(timeline: Timeline, options: argparse.Namespace) -> None:
    """What the run so far says. A program that did nothing on its GPU has had its say already."""
    if options.save:
        save(timeline, None, options.save)
    try:
        if not timeline.on_device.any():
            raise BadInput(f"{options.script} ran nothing on the GPU.")
        diagnosis = explained(timeline, None, options.what_if, options.workers)
    except BadInput as error:
        sys.stderr.write(f"keepbusy: {error}\n")
        return
    show(("" if options.json else "\n", rendered(diagnosis, options.json, _again(options)), "\n"))


def _again(options: argparse.Namespace) -> str:
    """The command that shows the report again: without the run, where it was kept."""
    if options.save:
        return shlex.join(["keepbusy", "explain", str(options.save)])
    several = ["--ranks", str(launch.world())] if launch.world() > 1 else []
    return shlex.join(["keepbusy", "run", *several, *_command(options)])
