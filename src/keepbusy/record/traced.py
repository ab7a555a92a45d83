"""Lines by `sys.settrace`, before Python 3.12: of the thread that takes the steps alone, and dearer."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

from keepbusy.record.lines import ENTER, LEAVE, LINE, LINES, MOST, Log

OFTEN = 2_000
"""Calls of one function, or turns of a generator, beyond which it is no longer told apart from who calls it."""


class Traced:
    """Follows the thread in which it began."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._frames: list[FrameType] = []
        self._follows = False
        self._calls: Counter[int] = Counter()

    def begin(self) -> str:
        """Returns why not, if it cannot."""
        if sys.gettrace() is not None:
            return "a debugger or a coverage tool traces the program"
        self._frames = self.log.open_frames().get(threading.get_ident(), [])
        for frame in self._frames:
            frame.f_trace = self._within
            frame.f_trace_lines = self.log.detail(frame.f_code) == LINES
        self._follows = True
        sys.settrace(self._entered)
        return ""

    def end(self) -> None:
        if self._follows:
            sys.settrace(None)
        self._follows = False
        for frame in self._frames:
            frame.f_trace = None
            frame.f_trace_lines = True
        self._frames = []

    def _entered(self, frame: FrameType, _: str, __: object) -> Any:
        if not self._follows or len(self.log.entries) > MOST or not self.log.detail(frame.f_code):
            return None
        self._calls[id(frame.f_code)] += 1
        if self._calls[id(frame.f_code)] > OFTEN:
            return None
        self.log.add(ENTER, frame.f_code)
        frame.f_trace_lines = self.log.detail(frame.f_code) == LINES
        return self._within

    def _within(self, frame: FrameType, event: str, _: object) -> Any:
        if self._calls[id(frame.f_code)] > OFTEN:
            return self._within
        if event == "line":
            self.log.add(LINE, frame.f_code, frame.f_lineno)
        elif event == "return":
            self.log.add(LEAVE, frame.f_code)
        return self._within
