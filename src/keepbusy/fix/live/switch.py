"""A fix that can be switched on and off while the program runs, and what it has done so far."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from keepbusy.instrument.lines import HIDDEN, OUTSIDE, USER, kind_of, shown


class FixSwitch:
    """Of one fix. What it does it does the plain way while `on` is false."""

    def __init__(self, name: str, about: str, tolerance: str = "") -> None:
        self.name, self.about, self.tolerance = name, about, tolerance
        self.on = False
        self.done: Counter[str] = Counter()  # by place: how often
        self.left: Counter[str] = Counter()  # why not, where it could not: how often
        self.checked = 0
        """How often it was done both ways and compared."""
        self.off_because = ""

    def count(self, frame: FrameType | None = None) -> None:
        """Once more, at the user's line."""
        self.done[place_of(frame or sys._getframe(1))] += 1

    def leave(self, why: str) -> None:
        self.left[why] += 1

    def stop(self, why: str) -> None:
        """For good."""
        self.on = False
        self.off_because = self.off_because or why


_KINDS: dict[str, int] = {}


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the user's, else of a library's."""
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _KINDS.get(file)
        if kind is None:
            kind = _KINDS[file] = kind_of(file)
        if kind == USER:
            return f"{shown(file)}:{frame.f_lineno}"
        if kind == OUTSIDE:
            break
        if kind != HIDDEN and not library:
            library = f"{shown(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "somewhere in C++"
