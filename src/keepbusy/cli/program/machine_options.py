"""A program and on what it runs: what the verbs that run one are all asked, and what another run is told of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from keepbusy.cli.console.values import whole_number
from keepbusy.instrument.script import find

MOST_RANKS = 64
"""That are started on one machine."""


def add_program(parser: argparse.ArgumentParser, what: str, metavar: str = "SCRIPT") -> None:
    parser.add_argument("-m", dest="module", action="store_true", help="what follows names a module, not a script")
    parser.add_argument("program", metavar=metavar, nargs=argparse.PARSER, help=what)


def program_in(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The script, which is there, and its own arguments; `--` may part both from ours."""
    script, *arguments = options.program[1:] if options.program[0] == "--" else options.program
    if not options.module:
        find(script)
    return script, arguments


def add_devices(parser: argparse.ArgumentParser, on: str) -> None:
    """`on`: the device where none is named."""
    parser.add_argument(
        "--on",
        metavar="DEVICE",
        default=on,
        help="a virtual GPU: h200, h100, a100, b200, l4, rtx4090, or a .toml file "
        f"(default: {'the real GPU where there is one, else h200' if on == 'auto' else on})",
    )
    parser.add_argument(
        "--gpus", type=whole_number("GPUs", MOST_RANKS), metavar="N", default=1, help="how many of them (default 1)"
    )
    parser.add_argument(
        "--ranks",
        type=whole_number("GPUs", 1 << 20),
        metavar="N",
        default=1,
        help="run N ranks, a GPU each, through torchrun",
    )


def add_clocks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clock",
        choices=("measured", "modelled"),
        default="measured",
        help="whether the host takes the time it really takes, or a modelled one that is the same in every run",
    )
    parser.add_argument(
        "--clocks",
        choices=("virtual", "real"),
        default="virtual",
        help="what the program's own clocks (time.time, perf_counter, timeit) show on a virtual GPU: "
        "the time of the report, or the real one",
    )


def handed_on(
    options: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None], names: Iterable[str]
) -> list[str]:
    """What was asked beyond the usual, for another `keepbusy run`."""
    usual, given = argparse.ArgumentParser(), list[str]()
    add_arguments(usual)
    for name in names:
        value = getattr(options, name)
        if value != usual.get_default(name):
            text = [] if value is True else [",".join(value) if isinstance(value, tuple) else str(value)]
            given += [f"--{name.replace('_', '-')}", *text]
    return given
