"""Where results go: standard output, or a file that appears only once it is whole."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from keepbusy import __version__
from keepbusy.timeline import files
from keepbusy.timeline.files import BadInput

ISSUES = "the issue tracker of keepbusy"
HUNG_UP = 141  # 128 + SIGPIPE: what a shell says of a reader that left


class StandardStreams:
    """Standard output and error as they were before a program ran in this process: it may replace or close them."""

    def __init__(self) -> None:
        self.screen = screen()
        self.complains_to_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._kept = {number: KeptDescriptor.of(number) for number in (1, 2)}
        self.until: Callable[[], object] = lambda: None
        """Waited for before anything is written: the program may have something to say until then."""
        self._encodings = {1: getattr(sys.stdout, "encoding", None), 2: getattr(sys.stderr, "encoding", None)}

    def show(self, *parts: str) -> None:
        """To standard output."""
        self._write(1, "".join(parts))

    def complain(self, sentence: str) -> None:
        """To standard error, as one line."""
        self._write(2, line_of(sentence))

    def _write(self, number: int, text: str) -> None:
        """What nobody takes any more is nobody's loss: the exit code is the program's own."""
        self.until()
        kept = self._kept[number]
        descriptor = kept.descriptor() if kept else None
        if descriptor is None:
            return
        rest = memoryview(text.encode(self._encodings[number] or "utf-8", "replace"))
        with suppress(OSError):
            while rest:
                rest = rest[os.write(descriptor, rest) :]


@dataclass(frozen=True)
class KeptDescriptor:
    """A copy of a descriptor, and which file it was: programs close numbers that they never opened."""

    copy: int
    number: int
    file: tuple[int, int]

    @classmethod
    def of(cls, number: int) -> KeptDescriptor | None:
        """A high number, so that what the program opens has the numbers that it would have. None if it is closed."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        for lowest in (min(limit, 1024) - 8, 3):
            with suppress(OSError, ValueError):
                made = cls(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest), number, _file(number))
                os.register_at_fork(after_in_child=made.close)
                return made
        return None

    def close(self) -> None:
        """A child that outlives the program is not to hold a pipe open."""
        with suppress(OSError):
            if _file(self.copy) == self.file:
                os.close(self.copy)

    def descriptor(self) -> int | None:
        """The copy, or if that was closed the stream itself, unless it leads elsewhere by now."""
        for one in (self.copy, self.number):
            with suppress(OSError):
                if _file(one) == self.file:
                    return one
        return None


def _file(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def line_of(sentence: str) -> str:
    """One line on stderr, whatever stands in the sentence."""
    line = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(sentence.split())
    )
    return f"keepbusy: {line}\n"


def sentence_of(error: Exception) -> str:
    """What the user is told of it. No user should have to read a traceback."""
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, OSError):
        what = error.strerror or type(error).__name__
        return f"{error.filename}: {what}." if error.filename else f"{what}."
    if os.environ.get("KEEPBUSY_DEBUG") == "1":
        traceback.print_exception(error)
    return (
        f"this is a bug of keepbusy {__version__}, not of your input ({f'{type(error).__name__}: {error}'[:200]}). "
        f"Please report it at {ISSUES}; KEEPBUSY_DEBUG=1 shows the traceback to put into the report."
    )


def need_pytorch(what: str) -> None:
    if find_spec("torch") is None:
        raise BadInput(without_pytorch(what))


def without_pytorch(what: str) -> str:
    """The sentence for whoever has not installed it."""
    return (
        f"{what} needs PyTorch, which {sys.executable} does not have; install it with "
        f"`{sys.executable} -m pip install 'torch>=2.9'`. Traces are explained without it."
    )


def complain(sentence: str) -> None:
    """The sentence on standard error, if there is one."""
    if sys.stderr is not None:
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(line_of(sentence).encode(encoding, "replace").decode(encoding))


def show(parts: Iterable[str]) -> None:
    """Write to standard output whatever its encoding, and fail at once if nobody takes it."""
    if sys.stdout is None:
        return
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
    is_terminal: bool


def screen() -> Screen:
    """The terminal's width, or 100 where there is none; colour only where it is wanted."""
    width = shutil.get_terminal_size((100, 40)).columns
    return Screen(
        max(40, min(width, 110)), _colour(), _can_show_signs(), sys.stdout is not None and sys.stdout.isatty()
    )


def _colour() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (
        sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    )


def _can_show_signs() -> bool:
    try:
        "→–µ·…█▓▒".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
