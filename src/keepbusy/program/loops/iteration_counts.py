"""How often the loops of a program iterate, counted by Python itself from each loop's first iteration on.

`sys.monitoring` (Python 3.12) reports backward jumps. Before that nothing is counted: iterations are read off the lines
from which the program calls its GPU (`line_iterations`).
"""

from __future__ import annotations

import atexit
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from keepbusy.program.lines import PROGRAM_CODE, holds_loop, kind_of, outwards
from keepbusy.program.loops.codes import CodeObjects, ProgramCodes

COUNTS = "counts.npz"
IS_COUNTED = sys.version_info >= (3, 12)
CALLS_A_SECOND, CALLS_IN_A_ROW = 100, 16
"""A function that is called more often, so many times in a row, holds no loop of the run, and is counted no further."""
LIMIT, VIRTUAL_LIMIT = (10_000, 512), (1_000_000, 1 << 14)
"""Of iterations a second, by a real and a virtual clock: a loop that iterates more often, so many times in a row,
computes in Python, and is counted no further, for counting would slow it down."""
KEPT_ITERATIONS = 1 << 19
"""Iterations of one loop whose times are kept."""

Jump: TypeAlias = tuple[int, int]
"""Of a code, by number, and of the instruction that an iteration begins at."""


class IterationCounts:
    """What was counted in a process. Of each function with a loop the first call is missing."""

    def __init__(self) -> None:
        self.codes = ProgramCodes()
        self.ends: dict[Jump, array[int]] = {}
        """When each iteration of a loop ended."""
        self.calls: dict[int, array[int]] = {}
        """When each function that holds a loop was called, by the number of its code."""
        self.incomplete: set[Jump] = set()
        """Loops that were counted no further."""
        self.fleeting: set[int] = set()
        """Functions that were counted no further."""

    def save(self, folder: Path) -> None:
        names = {
            "codes": [[code.co_filename, code.co_qualname, code.co_firstlineno] for code in self.codes.objects],
            "turns": [[*jump] for jump in self.ends],
            "entries": [*self.calls],
            "uncounted": [[*jump] for jump in self.incomplete],
            "fleeting": [*self.fleeting],
        }
        columns = [np.array(times, np.int64) for times in (*self.ends.values(), *self.calls.values())]
        np.savez(
            folder / COUNTS,
            names=np.frombuffer(json.dumps(names).encode(), np.uint8),
            sizes=np.array([len(column) for column in columns], np.int64),
            times=np.concatenate([*columns, np.zeros(0, np.int64)]),
        )

    @classmethod
    def load(cls, folder: Path, codes: CodeObjects, origin: int) -> IterationCounts | None:
        """With times that count from `origin`; None where nothing was counted."""
        if not (folder / COUNTS).exists():
            return None
        with np.load(folder / COUNTS) as saved:
            names = json.loads(saved["names"].tobytes())
            columns = np.split(saved["times"] - origin, np.cumsum(saved["sizes"])[:-1])
        counts = cls()
        # several codes of that process may be one here, as those of a source that is gone
        numbers = [counts.codes.number(codes.of(file, name, line)) for file, name, line in names["codes"]]
        times = iter(columns)
        for code, target in names["turns"]:
            counts.ends.setdefault((numbers[code], target), array("q")).extend(next(times).tolist())
        for code in names["entries"]:
            counts.calls.setdefault(numbers[code], array("q")).extend(next(times).tolist())
        counts.incomplete = {(numbers[code], target) for code, target in names["uncounted"]}
        counts.fleeting = {numbers[code] for code in names["fleeting"]}
        return counts


class IterationCounter:
    """Counts in this process, in all functions of the program and its libraries that hold a loop."""

    def __init__(self, clock: Callable[[], int], limit: tuple[int, int] = LIMIT) -> None:
        self.counts = IterationCounts()
        self.counted: IterationCounts | None = None
        """The same; None before Python 3.12, and where others have taken all places for tools."""
        self._clock = clock
        self._iterations_a_second, self._in_a_row = limit
        self._api: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._numbers: dict[int, int] = {}  # of codes that are counted, by identity

    def begin(self) -> None:
        """Also in the functions that are running by now."""
        api = self._api
        free = [tool for tool in (5, 4, 3, 2, 1, 0) if api.get_tool(tool) is None] if IS_COUNTED else []
        if not free:
            return
        self.counted, self._tool = self.counts, free[0]  # those without a meaning of their own come first
        api.use_tool_id(self._tool, "keepbusy")
        atexit.register(self.end)  # Python runs functions after it has cleared the modules that callbacks need
        api.register_callback(self._tool, api.events.JUMP, self._jumped)
        api.register_callback(self._tool, api.events.PY_START, self._called)
        for frame in outwards(sys._getframe(1)):
            self._count(frame.f_code)
        api.restart_events()
        api.set_events(self._tool, api.events.PY_START)

    def end(self) -> None:
        """Leave everything as it was. To do it twice does nothing."""
        if self._tool is None:
            return
        tool, self._tool = self._tool, None
        atexit.unregister(self.end)
        self._api.set_events(tool, 0)
        for number in [*self._numbers.values()]:
            self._api.set_local_events(tool, self.counts.codes.objects[number], 0)
        for event in (self._api.events.JUMP, self._api.events.PY_START):
            self._api.register_callback(tool, event, None)
        self._api.free_tool_id(tool)

    def _count(self, code: CodeType) -> bool:
        """Whether there is something to count in it."""
        if kind_of(code.co_filename) not in PROGRAM_CODE or not holds_loop(code):
            return False
        number = self._numbers[id(code)] = self.counts.codes.number(code)  # which keeps it, and so its identity
        self.counts.calls[number] = array("q")
        self._api.set_local_events(self._tool, code, self._api.events.JUMP)
        return True

    def _called(self, code: CodeType, _: int) -> Any:
        number = self._numbers.get(id(code))
        if number is None:
            return None if self._tool is not None and self._count(code) else self._api.DISABLE
        calls = self.counts.calls[number]
        calls.append(self._clock())
        if not len(calls) % CALLS_IN_A_ROW and _rate(calls, CALLS_IN_A_ROW) > CALLS_A_SECOND:
            self.counts.fleeting.add(number)
            if self._tool is not None:
                self._api.set_local_events(self._tool, code, 0)
            return self._api.DISABLE
        return self._api.DISABLE if len(calls) >= KEPT_ITERATIONS else None

    def _jumped(self, code: CodeType, source: int, target: int) -> Any:
        number = self._numbers.get(id(code))
        if target > source or number is None or (number, target) in self.counts.incomplete:
            return self._api.DISABLE
        ends = self.counts.ends.get((number, target))
        if ends is None:
            ends = self.counts.ends.setdefault((number, target), array("q"))
        ends.append(self._clock())
        is_checked = not len(ends) % self._in_a_row
        if is_checked and (len(ends) >= KEPT_ITERATIONS or _rate(ends, self._in_a_row) > self._iterations_a_second):
            self.counts.incomplete.add((number, target))
            return self._api.DISABLE
        return None


def _rate(times: array[int], count: int) -> float:
    """How often a second the last of these came."""
    return 1e9 * count / max(1, times[-1] - times[-count])
