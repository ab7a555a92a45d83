"""Where results go: standard output, or a file that appears only once it is whole."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepbusy.timeline import files
from keepbusy.timeline.errors import BadInput

HUNG_UP = 141  # 128 + SIGPIPE: what a shell says of a reader that left


def show(parts: Iterable[str]) -> None:
    """Write to standard output whatever its encoding, and fail at once if nobody takes it."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for part in parts:
            sys.stdout.write(part.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError:
        _close_nothing()
        raise


def _close_nothing() -> None:
    """What could not be written would fail once more when Python closes standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """As `files.replacing`, for a path that the user gave."""
    check_place(path)
    with files.replacing(path) as part:
        yield part


def check_place(path: Path) -> None:
    """Before the work is done that would end there."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise BadInput(f"{path}: this is no place for a file; name a file in a folder that exists.")


@dataclass(frozen=True)
class Screen:
    """What standard output can show."""

    width: int
    colour: bool
    unicode: bool


def screen() -> Screen:
    """The terminal's width, or 100 where there is none; colour only where it is wanted."""
    width = shutil.get_terminal_size((100, 40)).columns
    return Screen(max(40, min(width, 110)), _colour(), _can_show("→–µ·…█▓▒"))


def _colour() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
