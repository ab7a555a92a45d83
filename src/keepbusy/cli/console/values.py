"""What may stand behind a flag."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_UNITS = {"": 1e6, "ms": 1e6, "s": 1e9, "us": 1e3, "µs": 1e3, "ns": 1.0}
_LONGEST = 24 * 3600 * 1e9
_DURATION = re.compile(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)", re.IGNORECASE)


def duration(text: str) -> int:
    """Nanoseconds: `25.0` is milliseconds, `25ms` and `0.025s` say so themselves."""
    match = _DURATION.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    time = _number(match[1]) * unit if match and unit else math.nan
    if not 1 <= time <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the time of a step; give milliseconds above 0, as in 25.0, or a unit: 25ms, 0.025s"
        )
    return round(time)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_plain_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain-step",
        type=duration,
        metavar="MS",
        help="how long a step takes without the profiler: milliseconds, or with a unit, as in 0.025s",
    )


def fixable() -> list[str]:
    """The causes that can be fixed."""
    from keepbusy.explain.diagnosis import CAUSES, UNFIXABLE

    return [cause for cause in CAUSES if cause not in UNFIXABLE]


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


def causes(text: str) -> tuple[str, ...]:
    """Such as can be fixed."""
    known, asked = fixable(), listed(text)
    for one in asked:
        if one not in known:
            raise argparse.ArgumentTypeError(f"{one!r} is no cause that can be fixed; there are {', '.join(known)}")
    if not asked:
        raise argparse.ArgumentTypeError(f"no cause was named; there are {', '.join(known)}")
    return tuple(dict.fromkeys(asked))


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """`--mend` is its old name, kept for commands that were written down."""
    parser.add_argument(
        "--what-if", type=causes, metavar="CAUSES", default=(), help="predict the step with these fixed"
    )
    parser.add_argument("--mend", dest="what_if", type=causes, default=(), help=argparse.SUPPRESS)


WORKERS = 8
"""That a prediction counts on unless it is told otherwise."""


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=whole_number("workers", 1024),
        metavar="N",
        default=WORKERS,
        help=f"loader workers that a prediction may count on (default {WORKERS})",
    )


def whole_number(of_what: str, most: int, least: int = 1) -> Callable[[str], int]:
    """How such a one is read."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no number of {of_what}; give a whole number from {least} to {most:,}"
            )
        return int(text)

    return read


def amount(text: str) -> float:
    """Of hours or money: a number above 0."""
    number = _number(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; give one, as in 48 or 2.50")
    return number
