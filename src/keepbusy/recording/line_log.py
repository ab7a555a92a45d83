"""A log of the lines that run while a window is open: the program's own and its libraries'.

A profiler names functions; which of their lines called is told by the interpreter itself, by `sys.monitoring` since
Python 3.12 and by `sys.settrace` before it. Lines rather than calls are logged, since `a + b`, `x[mask]` and
`if loss:` are no calls. Of PyTorch's optimizers and the like the functions will do: a step runs thousands of their
lines, and each costs a microsecond.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from keepbusy.instrument.lines import LIBRARY, TORCH, USER, kind_of, outwards, shown
from keepbusy.instrument.loops import Monitor
from keepbusy.timeline.frame_roles import INSTALLED
from keepbusy.timeline.model import Ints

LINE, ENTER, LEAVE = 0, 1, 2
NOTHING, FUNCTIONS, LINES = 0, 1, 2
_DETAIL = {USER: LINES, LIBRARY: LINES, TORCH: FUNCTIONS}
KEPT_ENTRIES = 100_000
"""Of one window, which closes when there are so many: what comes later would have no lines."""
_COLUMNS = 5


class Log:
    """What was seen, in the order in which it was: time, the system's number of the thread, what (LINE, ENTER or
    LEAVE), the number of the code, and the line. Numbers alone, for objects would be the garbage collector's work."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, libraries: bool = True) -> None:
        self.clock = clock
        self._detail_of = _DETAIL if libraries else {**_DETAIL, LIBRARY: NOTHING}
        self.entries = array("q")
        self.codes: list[CodeType] = []
        self._numbers: dict[int, int] = {}  # by identity: the same words in two files are equal
        self._detail: list[int] = []
        self._remembering = threading.Lock()

    def __len__(self) -> int:
        return len(self.entries) // _COLUMNS

    @property
    def is_full(self) -> bool:
        return len(self.entries) >= _COLUMNS * KEPT_ENTRIES

    def number(self, code: CodeType) -> int:
        known = self._numbers.get(id(code))
        return self._remember(code) if known is None else known

    def _remember(self, code: CodeType) -> int:
        """Whichever thread meets it first; the others find it once all is known of it."""
        detail = self._detail_of.get(kind_of(code.co_filename), NOTHING)
        with self._remembering:
            number = self._numbers.get(id(code), len(self.codes))
            if number == len(self.codes):
                self.codes.append(code)
                self._detail.append(detail)
                self._numbers[id(code)] = number
        return number

    def detail(self, code: CodeType) -> int:
        """How closely this code is followed."""
        return self._detail[self.number(code)]

    def add(self, what: int, code: CodeType, line: int = 0) -> int:
        """Returns when that was. A row is written in one call, so that threads do not get into each other's."""
        now = self.clock()
        if not self.is_full:
            self.entries.extend((now, threading.get_native_id(), what, self.number(code), line))
        return now

    def rows(self, since: int = 0) -> Ints:
        """From so many entries on, a row each."""
        return np.array(self.entries[since * _COLUMNS :], np.int64).reshape(-1, _COLUMNS)

    def open_frames(self, only: int | None = None) -> dict[int, list[FrameType]]:
        """Where every thread stands, or only this one, from the outside in; noted as if it had just come there."""
        threads = {one.ident: one.native_id for one in threading.enumerate() if one.native_id}
        threads[threading.get_ident()] = threading.get_native_id()  # a child that was forked has another number
        found = {}
        tops = {**sys._current_frames(), threading.get_ident(): sys._getframe(1)}  # our own would hold itself
        for ident, top in tops.items():
            if only not in (None, ident):
                continue
            found[ident] = [frame for frame in outwards(top) if self.detail(frame.f_code)][::-1]
            for frame in found[ident] if ident in threads else ():
                now, code = self.clock(), self.number(frame.f_code)
                self.entries.extend((now, threads[ident] or 0, ENTER, code, 0))
                if self._detail[code] == LINES:
                    self.entries.extend((now, threads[ident] or 0, LINE, code, frame.f_lineno or 0))
        return found

    def record(self) -> LineRecord:
        """What stands in it by now."""
        codes = tuple((_file(one), one.co_name, self._first_line(one)) for one in self.codes)
        return LineRecord(self.rows().T.copy(), codes, self.clock())

    def _first_line(self, code: CodeType) -> int:
        return 0 if self.detail(code) == LINES else code.co_firstlineno


def _file(code: CodeType) -> str:
    """Of what is installed, so that it is told from the program's own folders: only here is known where it lies."""
    file = shown(code.co_filename)
    return f"{INSTALLED}{file}" if kind_of(code.co_filename) == LIBRARY else file


# The log once it is closed, as it is kept in a file.


class Stretch(NamedTuple):
    """A thread was at a line, or in what it called, from `start` to `end`; 0 is no line: somewhere in the function."""

    thread: int
    code: int
    line: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class LineRecord:
    """What a log held. Threads bear the system's numbers; a code is an index into `codes`."""

    columns: Ints  # time, thread, what, code, line: a row each
    codes: tuple[tuple[str, str, int], ...]  # file, function and first line, or 0 where each line is told
    until: int = 0  # when the profiler had stopped: what was open then, was so until then

    @staticmethod
    def nothing() -> LineRecord:
        return LineRecord(np.zeros((_COLUMNS, 0), np.int64), ())

    def save(self, path: Path) -> None:
        names = np.frombuffer(json.dumps(self.codes).encode(), np.uint8)
        np.savez(path, columns=self.columns, codes=names, until=self.until)

    @staticmethod
    def load(path: Path) -> LineRecord:
        """Holds no pickle, so nothing in the file is ever executed."""
        with np.load(path, allow_pickle=False) as kept:
            codes = json.loads(kept["codes"].tobytes())
            return LineRecord(
                kept["columns"], tuple((file, function, first) for file, function, first in codes), int(kept["until"])
            )

    def written(self, code: int, line: int) -> str:
        """A line as a timeline's frames name it."""
        file, function, first = self.codes[code]
        return f"{file}({line or first}): {function}"

    def stretches(self) -> Iterator[Stretch]:
        """How long each thread was at each line."""
        threads = self.columns[1]
        for thread in np.unique(threads).tolist():
            mine = self.columns[:, threads == thread]
            for one in _stretches(thread, mine.T.tolist(), self.until):
                if one.end > one.start and (one.line or self.codes[one.code][2]):
                    yield one


class _OpenFunction(NamedTuple):
    """A function that runs: which, at which line, since when; 0 before its first line."""

    code: int
    line: int
    since: int


def _stretches(thread: int, entries: list[list[int]], last: int) -> Iterator[Stretch]:
    """Functions stand within functions. One that an exception ended is closed by the next line outside of it."""
    stack: list[_OpenFunction] = []
    for at, _, what, code, line in entries:
        if what == ENTER:
            stack.append(_OpenFunction(code, 0, at))
            continue
        for _ in range(_ended(stack, code)):
            yield Stretch(thread, *stack.pop(), at)
        if what != LEAVE:
            stack.append(_OpenFunction(code, line, at))
    for one in stack:
        yield Stretch(thread, *one, last)


def _ended(stack: list[_OpenFunction], code: int) -> int:
    """How many of the innermost functions end, or change their line, when this code speaks."""
    for depth, one in enumerate(reversed(stack)):
        if one.code == code:
            return depth + 1
    return 0


def _time_of_an_entry(count: int = 256) -> float:
    """Nanoseconds of the processor's, which differ by a factor of three from host to host."""
    log, code = Log(), _time_of_an_entry.__code__
    began = time.thread_time_ns()
    for _ in range(count):
        log.add(LINE, code)
    return (time.thread_time_ns() - began) / count


# Lines by `sys.monitoring`, since Python 3.12: events of the code that is followed, and none elsewhere.

CHUNK, HOT_IN_CHUNK = 1024, 32
"""What is seen so often within so many entries is in a loop."""
LAUNCHES_NOTHING = 2.25
"""Times what it takes to write an entry: where they follow each other as quickly on average, nothing is launched."""
PRESSED_FROM, PRESSED_CHUNK = KEPT_ENTRIES // 8, 8192
"""With so many entries loops fall silent at any pace, and longer ones, for else a batch that is made line by line would
fill the log."""


@dataclass
class Ask:
    """When a line begins at that time or later, the program's window is asked whether it closes there."""

    at: int
    whether: Callable[[], object]


class _MonitoringFollower:
    """Follows all threads. A loop in pure Python falls silent soon: following it would cost more than it tells.

    Each line of such a loop is then told once, and not again before the program has left the loop. A
    function or generator that is called as often is no longer told apart from the line that calls it.
    """

    def __init__(self, log: Log, ask: Ask) -> None:
        self.log, self.ask = log, ask
        enter, leave = self._enter, self._leave
        self._monitor = Monitor(LINE=self._line, PY_START=enter, PY_RESUME=enter, PY_RETURN=leave, PY_YIELD=leave)
        self._hot: set[tuple[int, int]] = set()
        self._silent: set[int] = set()
        self._left_out: set[int] = set()
        self._looked = self._quick = 0
        self._chunk = CHUNK

    def begin(self) -> str:
        """Returns why not, if it cannot."""
        self._quick = round(LAUNCHES_NOTHING * _time_of_an_entry())
        if not self._monitor.begin():
            return "other tools hold all places of sys.monitoring"
        for frames in self.log.open_frames().values():
            for frame in frames:
                self._follow(frame.f_code)
        self._looked = len(self.log)
        self._monitor.watch_all(self._monitor.events.PY_START | self._monitor.events.PY_RESUME)
        return ""

    def end(self) -> None:
        self._monitor.end()

    def _follow(self, code: CodeType) -> None:
        events = self._monitor.events
        lines = events.LINE if self.log.detail(code) == LINES else 0
        self._monitor.watch(code, lines | events.PY_RETURN | events.PY_YIELD)

    def _enter(self, code: CodeType, _: int) -> Any:
        if not self.log.detail(code) or id(code) in self._left_out:
            return self._monitor.disabled
        if id(code) not in self._monitor.codes:
            self._follow(code)
        self._add(ENTER, code, 0)
        return None

    def _leave(self, code: CodeType, _: int, __: object) -> None:
        self._add(LEAVE, code, 0)

    def _add(self, what: int, code: CodeType, line: int) -> int:
        now = self.log.add(what, code, line)
        if len(self.log) - self._looked >= self._chunk:
            self._look()
        return now

    def _line(self, code: CodeType, line: int) -> Any:
        now = self._add(LINE, code, line)
        if now >= self.ask.at or self.log.is_full:
            self.ask.whether()
        if not self._hot:
            return None
        if (id(code), line) in self._hot:
            self._silent.add(id(code))
            return self._monitor.disabled
        if id(code) in self._silent:
            self._wake(code)
        return None

    def _look(self) -> None:
        """Find the loops among what came last."""
        last = self.log.rows(self._looked)
        self._looked = len(self.log)
        is_pressed = self._looked >= PRESSED_FROM
        self._chunk = PRESSED_CHUNK if is_pressed else CHUNK
        if is_pressed or last[-1, 0] - last[0, 0] < self._quick * len(last):
            places, counts = np.unique(last[:, 2:], axis=0, return_counts=True)
            often = [
                (what, id(self.log.codes[code]), line) for what, code, line in places[counts > HOT_IN_CHUNK].tolist()
            ]
            self._hot |= {(code, line) for what, code, line in often if what == LINE}
            self._leave_out({code for what, code, _ in often if what == ENTER})

    def _leave_out(self, codes: set[int]) -> None:
        self._left_out |= codes
        for code in codes & self._monitor.codes.keys():
            self._monitor.watch(self._monitor.codes[code], 0)

    def _wake(self, code: CodeType) -> None:
        """Another line of it runs, so the program has left the loop."""
        self._silent.discard(id(code))
        self._monitor.watch(code, 0)
        self._follow(code)


# Lines by `sys.settrace`, before Python 3.12: of the thread that takes the steps alone, and dearer.

CALLS_TOLD_APART = 2_000
"""Calls of one function, or turns of a generator, beyond which it is no longer told apart from who calls it."""


class _TraceFollower:
    """Follows the thread in which it began."""

    def __init__(self, log: Log, ask: Ask) -> None:
        self.log, self.ask = log, ask
        self._frames: list[FrameType] = []
        self._follows = False
        self._calls: Counter[int] = Counter()

    def begin(self) -> str:
        """Returns why not, if it cannot."""
        if sys.gettrace() is not None:
            return "a debugger or a coverage tool traces the program"
        mine = threading.get_ident()
        self._frames = self.log.open_frames(mine)[mine]
        for frame in self._frames:
            frame.f_trace = self._within
            frame.f_trace_lines = self.log.detail(frame.f_code) == LINES
        self._follows = True
        sys.settrace(self._entered)
        return ""

    def end(self) -> None:
        if self._follows and sys.gettrace() == self._entered:  # else the program traces itself by now
            sys.settrace(None)
        self._follows = False
        for frame in self._frames:
            frame.f_trace = None
            frame.f_trace_lines = True
        self._frames = []

    def _entered(self, frame: FrameType, _: str, __: object) -> Any:
        if not self._follows or not self.log.detail(frame.f_code):
            return None
        self._calls[id(frame.f_code)] += 1
        if self._calls[id(frame.f_code)] > CALLS_TOLD_APART:
            return None
        self.log.add(ENTER, frame.f_code)
        frame.f_trace_lines = self.log.detail(frame.f_code) == LINES
        return self._within

    def _within(self, frame: FrameType, event: str, _: object) -> Any:
        if self._calls[id(frame.f_code)] > CALLS_TOLD_APART:
            return self._within
        if event == "line":
            if self.log.add(LINE, frame.f_code, frame.f_lineno) >= self.ask.at or self.log.is_full:
                self.ask.whether()
        elif event == "return":
            self.log.add(LEAVE, frame.f_code)
            if self._frames and frame is self._frames[-1]:
                self._frames.pop()  # else what it holds would last as long as the window
        return self._within if self._follows else None


def follower(log: Log, ask: Ask | None = None) -> _MonitoringFollower | _TraceFollower:
    """The way that this Python offers."""
    ask = ask or Ask(1 << 62, lambda: None)
    return _MonitoringFollower(log, ask) if sys.version_info >= (3, 12) else _TraceFollower(log, ask)
