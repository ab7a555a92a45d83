"""A log of the lines that run while a window is open: the program's own and its libraries'.

A profiler names functions; which of their lines called is told by the interpreter itself: see
`monitored.py` and `traced.py`. Lines rather than calls are logged, since `a + b`, `x[mask]` and
`if loss:` are no calls. Of PyTorch's optimizers and the like the functions will do: a step runs
thousands of their lines, and each costs a microsecond.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Protocol, TypeAlias

from keepbusy.script.lines import LIBRARY, TORCH, USER, kind_of

LINE, ENTER, LEAVE = 0, 1, 2
MOST = 2_000_000
"""Entries of one window; what comes later has no lines."""
NOTHING, FUNCTIONS, LINES = 0, 1, 2
_DETAIL = {USER: LINES, LIBRARY: LINES, TORCH: FUNCTIONS}

Entry: TypeAlias = "tuple[int, int, int, CodeType, int]"
"""When, in which thread, what (LINE, ENTER or LEAVE), of which code, and the line."""


class Follower(Protocol):
    """What writes the log."""

    def begin(self) -> str:
        """Returns why not, if it cannot."""

    def end(self) -> None: ...


class Log:
    """What was seen, in the order in which it was."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.entries: list[Entry] = []
        self.threads: dict[int, int] = {}
        """The system's number of each thread, by Python's own."""
        self._detail: dict[int, tuple[int, CodeType]] = {}  # by identity: the same words in two files are equal

    def detail(self, code: CodeType) -> int:
        """How closely this code is followed."""
        known = self._detail.get(id(code))
        if known is None:
            known = self._detail[id(code)] = _DETAIL.get(kind_of(code.co_filename), NOTHING), code
        return known[0]

    def add(self, what: int, code: CodeType, line: int = 0) -> None:
        self.entries.append((self.clock(), threading.get_ident(), what, code, line))

    def meet(self) -> None:
        """Remember the calling thread's number."""
        ident = threading.get_ident()
        if ident not in self.threads:
            self.threads[ident] = threading.get_native_id()

    def open_frames(self) -> dict[int, list[FrameType]]:
        """Where every thread stands, from the outside in; noted as if it had just come there."""
        self.threads.update({one.ident: one.native_id for one in threading.enumerate() if one.ident and one.native_id})
        self.threads[threading.get_ident()] = threading.get_native_id()  # a child that was forked has another number
        found = {thread: self._followed_of(top) for thread, top in sys._current_frames().items()}
        for thread, frames in found.items():
            for frame in frames:
                now = self.clock()
                self.entries.append((now, thread, ENTER, frame.f_code, 0))
                if self.detail(frame.f_code) == LINES:
                    self.entries.append((now, thread, LINE, frame.f_code, frame.f_lineno or 0))
        return found

    def _followed_of(self, top: FrameType) -> list[FrameType]:
        return [frame for frame in outwards(top) if self.detail(frame.f_code)][::-1]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def follower(log: Log) -> Follower:
    """The way that this Python offers."""
    if sys.version_info >= (3, 12):
        from keepbusy.record.monitored import Monitored

        return Monitored(log)
    from keepbusy.record.traced import Traced

    return Traced(log)
