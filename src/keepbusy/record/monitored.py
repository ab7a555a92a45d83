"""Lines by `sys.monitoring`, since Python 3.12: events of the code that is followed, and none elsewhere."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import CodeType
from typing import Any

from keepbusy.record.lines import ENTER, LEAVE, LINE, LINES, MOST, Log

_TOOLS = (4, 3, 5, 2, 1, 0)
"""Places for tools; the ones without a meaning of their own first."""
CHUNK = 1024
_HOT = 32
"""What is seen so often within a chunk is in a loop."""
QUICK = 1_800
"""Nanoseconds between entries on average; where they follow each other as quickly, nothing is launched."""


class Monitored:
    """Follows all threads. A loop in pure Python falls silent soon: following it would cost more than it tells.

    Each line of such a loop is then told once, and not again before the program has left the loop. A
    function or generator that is called as often is no longer told apart from the line that calls it.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._api: Any = getattr(sys, "monitoring")  # noqa: B009  # unknown to Python 3.11's type checkers
        self._tool: int | None = None
        self._codes: dict[int, CodeType] = {}  # by identity: the same words in two files are equal
        self._hot: set[tuple[int, int]] = set()
        self._silent: set[int] = set()
        self._left_out: set[int] = set()
        self._looked = 0

    def begin(self) -> str:
        """Returns why not, if it cannot."""
        self._tool = next((one for one in _TOOLS if self._api.get_tool(one) is None), None)
        if self._tool is None:
            return "other tools hold all places of sys.monitoring"
        self._api.use_tool_id(self._tool, "keepbusy")
        for event, callback in self._callbacks().items():
            self._api.register_callback(self._tool, event, callback)
        for frames in self.log.open_frames().values():
            for frame in frames:
                self._follow(frame.f_code)
        self._looked = len(self.log.entries)
        self._api.restart_events()  # what an earlier window disabled
        self._api.set_events(self._tool, self._api.events.PY_START | self._api.events.PY_RESUME)
        return ""

    def end(self) -> None:
        if self._tool is None:
            return
        tool, self._tool = self._tool, None
        self._api.set_events(tool, 0)
        for code in self._codes.values():
            self._api.set_local_events(tool, code, 0)
        for event in self._callbacks():
            self._api.register_callback(tool, event, None)
        self._api.free_tool_id(tool)

    def _callbacks(self) -> dict[int, Any]:
        events = self._api.events
        return {
            events.LINE: self._line,
            events.PY_START: self._enter,
            events.PY_RESUME: self._enter,
            events.PY_RETURN: self._leave,
            events.PY_YIELD: self._leave,
        }

    def _follow(self, code: CodeType) -> None:
        events = self._api.events
        self._codes[id(code)] = code
        lines = events.LINE if self.log.detail(code) == LINES else 0
        self._api.set_local_events(self._tool, code, lines | events.PY_RETURN | events.PY_YIELD)

    def _enter(self, code: CodeType, _: int) -> Any:
        if not self.log.detail(code) or id(code) in self._left_out:
            return self._api.DISABLE
        if id(code) not in self._codes and self._tool is not None:
            self._follow(code)
        self.log.meet()
        self._add(ENTER, code, 0)
        return None

    def _leave(self, code: CodeType, _: int, __: object) -> None:
        self._add(LEAVE, code, 0)

    def _line(self, code: CodeType, line: int) -> Any:
        self._add(LINE, code, line)
        if not self._hot:
            return None
        if (id(code), line) in self._hot:
            self._silent.add(id(code))
            return self._api.DISABLE
        if id(code) in self._silent:
            self._wake(code)
        return None

    def _add(self, what: int, code: CodeType, line: int) -> None:
        entries = self.log.entries
        entries.append((self.log.clock(), threading.get_ident(), what, code, line))
        if len(entries) - self._looked >= CHUNK:
            self._look()

    def _look(self) -> None:
        """Find the loops among what came last."""
        last = self.log.entries[self._looked :]
        self._looked = len(self.log.entries)
        if self._looked > MOST:
            self.end()
        elif last[-1][0] - last[0][0] < QUICK * len(last):
            counts = Counter((id(code), what, line) for _, _, what, code, line in last)
            often = [place for place, count in counts.items() if count > _HOT]
            self._hot |= {(code, line) for code, what, line in often if what == LINE}
            self._leave_out({code for code, what, _ in often if what == ENTER})

    def _leave_out(self, codes: set[int]) -> None:
        self._left_out |= codes
        for code in codes:
            self._api.set_local_events(self._tool, self._codes[code], 0)

    def _wake(self, code: CodeType) -> None:
        """Another line of it runs, so the program has left the loop."""
        self._silent.discard(id(code))
        if self._tool is not None:
            self._api.set_local_events(self._tool, code, 0)
            self._follow(code)
