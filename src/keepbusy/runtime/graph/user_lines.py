"""Lines of the user's own program, as messages name them: `train.py:31 (loss.item())`."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

OURS = str(Path(__file__).parents[2])
TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_GENERATED = ("<frozen", "<eval")


@cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: not PyTorch's, not ours, not an installed library's."""
    return not file.startswith((OURS, TORCH, *_LIBRARIES, *_GENERATED))


def line_of(error: BaseException) -> str:
    """Where the user's program was when the error came, or the library that it had called."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [place for place in places if is_users(place[0])]
    known = own or [place for place in places if not place[0].startswith((OURS, TORCH))]
    return line_text(*known[-1]) if known else ""


def depth_of_user() -> int:
    """For a warning: how many frames up the user's program called us."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    return depth


def line_text(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    place = f"{Path(file).name}:{line}"
    return f"{place} ({source[:80]})" if source else place


class LineTracer:
    """Runs a step and finds the line after which `probe` says something else than before. Slow: for one call."""

    def __init__(self, probe: Callable[[], Any]) -> None:
        self.found = ""
        self._probe = probe
        self._last: tuple[str, int] | None = None

    def run(self, step: Callable[[], Any]) -> Any:
        self._before = self._probe()
        outer = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return step()
        finally:
            sys.settrace(outer)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        is_named_tuple = str(frame.f_globals.get("__name__", "")).startswith("namedtuple_")  # whose code Python makes
        return self._line if is_users(frame.f_code.co_filename) and not is_named_tuple else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if self._last and not self.found and self._probe() != self._before:
            self.found = line_text(*self._last)
        if event == "line":
            self._last = (frame.f_code.co_filename, frame.f_lineno)
        return self._line
