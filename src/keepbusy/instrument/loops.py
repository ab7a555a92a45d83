"""Where a running program is, and the turns of its loops: a thread that looks now and then, and counters.

Looks come often where something new stays, and ever more rarely later. Turns and entries of chosen codes are counted by
`sys.monitoring` (Python 3.12).
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from keepbusy.instrument.lines import (
    HIDDEN,
    OUTSIDE,
    USER,
    at_rest,
    is_importing,
    kind_of,
    line_number,
    shown,
    stacks_of,
)
from keepbusy.instrument.processes import UnseenThread, processor_times
from keepbusy.timeline.model import NONE, Ints, Mask

LOOK_INTERVAL, TIMES_ITS_COST, GROWTH = 20_000_000, 2_000, 1.02
"""From look to look, at first and where something new stays; later more and more rarely, until it is so many times as
long as a look takes. The program waits for each, and for the interpreter to go back and forth: three times as long."""
BESIDE_EVERY = 8
"""Looks to one look at the program's other threads, which takes three times as long."""
KEPT_LOOKS = 200_000
"""Of a longer run every other look goes, and from then on they come half as often."""
LOOKS_IN_ONE_FRAME = 3
"""Looks in a row that find the same frame of a code: it may hold a loop, and is counted from then on."""
LOOKS_WITHOUT_COUNTS = 25
"""The same where entries cannot be counted: before Python 3.12 a new frame may lie where an old one lay."""
ENTRIES_A_SECOND, ENTRIES_IN_A_ROW = 100, 16
"""What is entered more often, so many times in a row, holds no loop of the run: its frames met at one address."""
TURNS_A_SECOND, TURNS_IN_A_ROW = 10_000, 512
"""A loop that turns more often computes in Python: it is counted no further, for counting would slow it down."""
KEPT_TURNS = 1 << 19
"""Turns of one loop whose times are kept."""
DEEPEST = 64
"""Frames of a chain, from the outside in."""
THINKS_AT_MOST = 10.0
"""Seconds, until the looking thread is not waited for any longer."""
IMPORTING = -1


class Line(NamedTuple):
    """A frame at a look: its code, by number, and the line it stood at."""

    code: int
    line: int


@dataclass
class Looks:
    """What was seen of a run, as columns and tables; looks are in the order of time."""

    times: array[int] = field(default_factory=lambda: array("q"))
    chains: array[int] = field(default_factory=lambda: array("l"))
    """Of each look, the number of its chain."""
    known_chains: list[tuple[Line, ...]] = field(default_factory=list)
    """From the outside in, the frames of the program and its libraries, and the first one within PyTorch."""
    longest_stay: dict[int, int] = field(default_factory=dict)
    """Of each code, through how many looks in a row one of its frames was there."""
    stay: int = 0
    """For so long a frame lasts that may hold a loop, where there was a look at each line; else through some looks."""
    codes: list[CodeType] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    """Whose each code is, as `kind_of` has it of its file, or IMPORTING."""
    files: dict[int, str] = field(default_factory=dict)
    """Of each code that was asked for, its file as it is shown."""
    turns: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    """When each turn of a loop ended: of a code, by number, and of the instruction that its turns begin at."""
    uncounted: set[tuple[int, int]] = field(default_factory=set)
    """Loops whose turns were counted no further."""
    entries: dict[int, array[int]] = field(default_factory=dict)
    """When a code was entered, from when on it was counted; of those that were ever counted."""
    passes: dict[Line, array[int]] = field(default_factory=dict)
    """Where turns are not counted: when a line was passed at which a step ended or a batch came."""
    unsure: frozenset[Line] = frozenset()
    """Loops of which turns may have passed unseen, by code and first line: where they turned is told, not how often."""
    holders: frozenset[int] = frozenset()
    """Codes that hold loops of the run, whatever they last: that of its steps, those around it and beside it."""
    fleeting: set[int] = field(default_factory=set)
    """Codes that are entered too often for one of their frames to stay, and are counted no further."""
    beside: dict[Line, int] = field(default_factory=dict)
    """What the processors gave to the program's other threads, by the line of the program at which each was."""
    ran: int = NONE
    """What they gave to the thread that is looked at, from the first look to the end."""
    began: int = 0
    ended: int = 0

    def meet(self, code: CodeType) -> int:
        """One that was not there yet; returns its number."""
        file = code.co_filename
        self.kinds.append(IMPORTING if is_importing(file) else kind_of(file))
        self.codes.append(code)
        return len(self.codes) - 1

    def file(self, code: int) -> str:
        if code not in self.files:
            self.files[code] = shown(self.codes[code].co_filename)
        return self.files[code]

    def is_users(self, line: Line) -> bool:
        return self.kinds[line.code] == USER


class LeftOut:
    """Stretches of a run in which its calls left no row. Recorded time passes in all others alone."""

    def __init__(self, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self.begins, self.ends = np.array(begins, np.int64), np.array(ends, np.int64)
        self._upto = np.concatenate([[0], np.cumsum(self.ends - self.begins)])
        """How much was left out before each, and in all."""

    def __len__(self) -> int:
        return len(self.begins)

    def __sub__(self, origin: int) -> LeftOut:
        """With times that count from there."""
        return LeftOut((self.begins - origin).tolist(), (self.ends - origin).tolist())

    @property
    def time(self) -> int:
        return int(self._upto[-1])

    def recorded(self, times: Ints) -> Ints:
        """The recorded time by then."""
        begun = np.searchsorted(self.begins, times, side="right")
        inside = np.append(0, self.ends)[begun] - times
        return times - self._upto[begun] + np.maximum(0, inside)

    def recorded_at(self, time: int) -> int:
        return int(self.recorded(np.array([time]))[0])

    def holds(self, times: Ints) -> Mask:
        """Whether each lies in such a stretch."""
        begun = np.searchsorted(self.begins, times, side="right")
        return np.append(np.int64(np.iinfo(np.int64).min), self.ends)[begun] > times

    def real(self, recorded: Ints) -> Ints:
        """When so much recorded time had passed; of a moment at which a stretch was left out, its end."""
        return recorded + self._upto[np.searchsorted(self.begins - self._upto[:-1], recorded, side="right")]


class LoopWatch:
    """Looks at one thread, and counts the turns of what stays there. Nothing of it runs in the program's own thread,
    but for the callbacks of `sys.monitoring`."""

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        frame: Callable[[], FrameType | None] | None = None,
    ) -> None:
        """Of the thread that makes it, or of wherever `frame` finds."""
        self.looks = Looks(began=clock())
        self.fault = ""
        self.meanwhile: Callable[[], int | None] | None = None
        """Called in the looking thread after each look. It says after how many nanoseconds the next one has to come, if
        that matters."""
        self._clock = clock
        thread = threading.get_ident()
        self._native = threading.get_native_id() if frame is None else NONE
        self._given: dict[int, int] = {}  # of each thread, by its native number, what the processors gave it so far
        self._frame = frame or (lambda: sys._current_frames().get(thread))
        self._every = self._pace = LOOK_INTERVAL
        self._cost = 0
        self._numbers: dict[int, int] = {}  # of codes, by identity: `looks.codes` keeps them alive
        self._lines: dict[tuple[int, int], Line] = {}  # of each code, by identity, and instruction
        self._chains: dict[tuple[Line, ...], int] = {}
        self._last: dict[int, tuple[int, int]] = {}  # of each frame at the last look, its code and how long it stays
        self._stop = (
            threading.Lock()
        )  # free once nothing is to be looked at any more; cheaper to wait for than an event
        self._stop.acquire()
        self._thread: UnseenThread | None = None

    def begin(self) -> None:
        if self._native != NONE:
            self._given_to(self._native)
        self._thread = UnseenThread(self._look_on)

    def end(self) -> None:
        self._let_go()
        if self._thread is not None:
            self._thread.join(THINKS_AT_MOST)  # Python ends a process whose threads go on into its own end
        if self._native in self._given:
            self.looks.ran = self._given_to(self._native)
        self.looks.ended = self._clock()

    def forget(self) -> None:
        """In a child that was forked: what is counted here is the parent's."""
        self._let_go()
        self._thread = None

    def _let_go(self) -> None:
        if self._stop.locked():
            self._stop.release()

    def _look_on(self) -> None:
        due = self._clock() + self._every
        while not self._stop.acquire(timeout=max(0, due - self._clock()) / 1e9):
            began, soon = self._clock(), None
            self._pace = min(round(GROWTH * self._pace), TIMES_ITS_COST * self._cost)
            try:
                self.look(min(due, began))
                took = self._clock() - began
                self._cost = (7 * self._cost + min(took, 2 * self._cost or took)) // 8  # others may have had their turn
                if self.meanwhile is not None:
                    soon = self.meanwhile()
            except Exception as error:  # the next one may see more of a program that is about to begin
                self.fault = f"{type(error).__name__}: {error}"
            rest = max(self._every, self._pace)
            due = self._clock() + (rest if soon is None else min(soon, rest))

    def look(self, due: int | None = None) -> None:
        """Note where the program is now, and was since the look was due: it held the interpreter there, as the garbage
        collector does.

        The program waits meanwhile, so a frame's line is asked for once an instruction: finding it takes a walk
        through the code's table.
        """
        now, stack = self._stack()
        known, before = self._lines, self._last
        chain: list[Line] = []
        stays: dict[int, tuple[int, int]] = {}
        for held, code, at, number in stack:
            line = known.get(at)
            if line is None:
                line = known[at] = Line(self._number_of(code), number)
            kind = self.looks.kinds[line.code]
            if kind == OUTSIDE:
                break
            if kind == IMPORTING:
                chain.clear()  # what a module does while it is imported is importing, and no loop of the run
                stays.clear()
            if kind != HIDDEN or not chain:
                chain.append(line)
                if kind >= 0 and kind != HIDDEN:
                    last = before.get(held)
                    stays[held] = line.code, last[1] + 1 if last is not None and last[0] == line.code else 1
        self._last = stays
        self._note(now if due is None else due, tuple(chain[: -DEEPEST - 1 : -1]), stays)
        if self._native != NONE and len(self.looks.times) % BESIDE_EVERY == 1:
            self._look_beside()

    def _stack(self) -> tuple[int, list[tuple[int, CodeType, tuple[int, int], int]]]:
        """When that is, and from the inside out each frame's identity, its code, the place there, and its line if that
        place is met for the first time."""
        stack = []
        with at_rest():
            frame, now = self._frame(), self._clock()
            while frame is not None:
                at = id(frame.f_code), frame.f_lasti
                stack.append((id(frame), frame.f_code, at, 0 if at in self._lines else frame.f_lineno or 0))
                frame = frame.f_back
        return now, stack

    def _look_beside(self) -> None:
        """What the processors gave since the last look to other threads that run the program's own code: while one
        thread runs Python, no other does."""
        # of those that PyTorch began, as for a backward pass, the program's own thread waits for what it asked for
        others = [one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)]
        threads = {one.ident or 0: one.native_id or 0 for one in others if one.native_id not in (None, self._native)}
        for ident, stack in stacks_of(threads).items() if threads else ():
            place = next((each for each in stack if self._kind_of(each[0]) == USER), None)
            if place is not None:
                line = Line(self._number_of(place[0]), line_number(*place))
                self.looks.beside[line] = self.looks.beside.get(line, 0) + self._given_to(threads[ident])

    def _given_to(self, thread: int) -> int:
        """Since this was last asked of it; nothing the first time."""
        times = processor_times(thread)
        now = times[0] if times is not None else self._given.get(thread, 0)
        before, self._given[thread] = self._given.get(thread, now), now
        return max(0, now - before)  # a later thread may be given the number of one that ended

    def _kind_of(self, code: CodeType) -> int:
        return self.looks.kinds[self._number_of(code)]

    def _note(self, now: int, chain: tuple[Line, ...], stays: Mapping[int, tuple[int, int]]) -> None:
        looks = self.looks
        looks.times.append(now)
        looks.chains.append(self._number_of_chain(chain))
        for code, count in stays.values():
            if count > looks.longest_stay.get(code, 0):
                looks.longest_stay[code] = count
                if count == LOOKS_IN_ONE_FRAME:
                    self._pace = self._every
        if len(looks.times) > KEPT_LOOKS:
            del looks.times[1::2]
            del looks.chains[1::2]
            self._every *= 2

    def _number_of(self, code: CodeType) -> int:
        number = self._numbers.get(id(code))
        if number is None:
            number = self._numbers[id(code)] = self.looks.meet(code)
        return number

    def _number_of_chain(self, chain: tuple[Line, ...]) -> int:
        number = self._chains.get(chain)
        if number is None:
            number = self._chains[chain] = len(self.looks.known_chains)
            self.looks.known_chains.append(chain)
        return number


def _rate(times: array[int], count: int) -> float:
    """How often a second the last of these came."""
    return 1e9 * count / max(1, times[-1] - times[-count])


class Monitor:
    """A tool of `sys.monitoring`, with a callback for each kind of event; it takes a place when it is first needed."""

    def __init__(self, **callbacks: Callable[..., Any]) -> None:
        """By the events' names."""
        self._api: Any = getattr(sys, "monitoring")  # noqa: B009  # unknown to Python 3.11's type checkers
        self.events: Any = self._api.events
        self.disabled = self._api.DISABLE
        self._callbacks = {getattr(self.events, name): act for name, act in callbacks.items()}
        self._tool: int | None = None
        self.codes: dict[int, CodeType] = {}
        """Those that are watched or were, by identity: the same words in two files are equal."""

    def begin(self) -> bool:
        """Whether there is a place, also where it was taken before. Those without a meaning of their own come first."""
        if self._tool is None:
            self._tool = next((one for one in (5, 4, 3, 2, 1, 0) if self._api.get_tool(one) is None), None)
            if self._tool is None:
                return False
            self._api.use_tool_id(self._tool, "keepbusy")
            for event, act in self._callbacks.items():
                self._api.register_callback(self._tool, event, act)
        return True

    def watch(self, code: CodeType, events: int) -> None:
        """From now on these events of the code are told, and no others of it."""
        if self._tool is not None:
            self.codes[id(code)] = code
            self._api.set_local_events(self._tool, code, events)

    def watch_all(self, events: int) -> None:
        """Events of all code; also those that were disabled somewhere."""
        self._api.restart_events()
        self._api.set_events(self._tool, events)

    def end(self) -> None:
        """Leave everything as it was. To do it twice does nothing."""
        if self._tool is None:
            return
        tool, self._tool = self._tool, None
        self._api.set_events(tool, 0)
        for code in list(self.codes.values()):
            self._api.set_local_events(tool, code, 0)
        for event in self._callbacks:
            self._api.register_callback(tool, event, None)
        self._api.free_tool_id(tool)


class TurnCounters:
    """Turns and entries of chosen codes, by `sys.monitoring`. What turns or is entered too often is let go of."""

    def __init__(
        self,
        looks: Looks,
        clock: Callable[[], int],
        turns_a_second: int = TURNS_A_SECOND,
        in_a_row: int = TURNS_IN_A_ROW,
    ) -> None:
        self._looks, self._clock = looks, clock
        self._turns_a_second, self._in_a_row = turns_a_second, in_a_row
        self._monitor = Monitor(JUMP=self._jumped, PY_START=self._entered)
        self._counted: dict[int, tuple[int, CodeType]] = {}  # by identity

    def count(self, number: int, code: CodeType) -> None:
        if id(code) in self._counted or not self._monitor.begin():
            return
        self._counted[id(code)] = number, code
        self._looks.entries[number] = array("q")
        self._monitor.watch(code, int(self._monitor.events.JUMP | self._monitor.events.PY_START))

    def _jumped(self, code: CodeType, source: int, target: int) -> Any:
        if target > source:
            return self._monitor.disabled
        loop = self._counted[id(code)][0], target
        turns = self._looks.turns.get(loop)
        if turns is None:
            turns = self._looks.turns.setdefault(loop, array("q"))
        if loop in self._looks.uncounted:
            return self._monitor.disabled
        turns.append(self._clock())
        if not len(turns) % self._in_a_row and (
            _rate(turns, self._in_a_row) > self._turns_a_second or len(turns) >= KEPT_TURNS
        ):
            self._looks.uncounted.add(loop)
            return self._monitor.disabled
        return None

    def _entered(self, code: CodeType, _: int) -> Any:
        number = self._counted[id(code)][0]
        entries = self._looks.entries[number]
        entries.append(self._clock())
        if len(entries) % ENTRIES_IN_A_ROW:
            return None
        if _rate(entries, ENTRIES_IN_A_ROW) > ENTRIES_A_SECOND:
            self._looks.fleeting.add(number)
            self._monitor.watch(code, 0)
        return self._monitor.disabled if len(entries) >= KEPT_TURNS else None

    def end(self) -> None:
        self._monitor.end()
