"""A host thread of the timeline: how far it is, and what is open on it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepbusy.timeline.model import NONE
from keepbusy.virtual.passing import Passing


class Host:
    """A host thread: how far it is, and what is open on it."""

    __slots__ = (
        "around", "backward", "base", "depth", "frame", "lane", "last", "lines", "marks", "now", "passing", "place",
        "released",
    )  # fmt: skip

    def __init__(self, lane: int, now: int, passing: Passing) -> None:
        self.lane = lane
        self.now = now
        self.passing = passing
        self.last = NONE  # its last row
        self.released: list[int] = []  # rows that its next row waits for
        self.marks: list[str] = []  # what its next row begins
        self.depth = 0  # of operators within operators
        self.frame = NONE  # the innermost open frame
        self.base = NONE  # the innermost that is no line
        self.place = 0
        self.lines: tuple[int, ...] = ()  # the open frames of its place, within `base`
        self.around: list[tuple[int, int, tuple[int, ...], bool, bool]] = []  # what to return to
        self.backward = False  # whether the engine of autograd is at work


class _Ending:
    """Lies among a thread's own things, and goes with them."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.does = does

    def __del__(self) -> None:
        self.does()


class _Endings(threading.local):
    def __init__(self) -> None:
        self.all: list[_Ending] = []


_ENDINGS = _Endings()


def at_end_of_thread(does: Callable[[], object]) -> None:
    """Call it when the calling thread ends. A thread that C++ started has no end: Python forgets it after each call."""
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
        _ENDINGS.all.append(_Ending(does))
