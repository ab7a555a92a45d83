"""Where a program is between two calls of its GPU: a thread samples its stack, more and more rarely."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType

from keepbusy.program.lines import HIDDEN, OUTSIDE, USER, at_rest, line_number, stacks_of
from keepbusy.program.loops.codes import IMPORTING, Chain, Line, ProgramCodes
from keepbusy.program.processes import UnseenThread, processor_times
from keepbusy.timeline.model import NONE
from keepbusy.torch_names.cpython import ForeignThread

SAMPLE_INTERVAL, TIMES_ITS_COST, GROWTH = 20_000_000, 2_000, 1.02
"""From sample to sample, at first; later more and more rarely, until it is so many times as long as a sample takes. The
program waits for each, and for the interpreter to go back and forth: three times as long."""
BESIDE_EVERY = 8
"""Samples to one of the program's other threads, which takes three times as long."""
KEPT_SAMPLES = 200_000
"""Of a longer run every other sample goes, and from then on they come half as often."""
DEEPEST = 64
"""Frames of a chain, from the outside in."""
PATIENCE = 10.0
"""Seconds, until the sampling thread is not waited for any longer."""


@dataclass
class StackSamples:
    """What was seen of a run."""

    codes: ProgramCodes = field(default_factory=ProgramCodes)
    times: array[int] = field(default_factory=lambda: array("q"))
    chains: array[int] = field(default_factory=lambda: array("l"))
    """Of each sample, the number of its chain."""
    known_chains: list[Chain] = field(default_factory=list)
    """The frames of the program and its libraries, and the first one within PyTorch."""
    beside: dict[Line, int] = field(default_factory=dict)
    """What the processors gave to the program's other threads, by the line of the program at which each was."""
    ran: int = NONE
    """What they gave to the thread that is sampled, from begin to end."""
    began: int = 0
    ended: int = 0


class StackSampler:
    """Samples one thread. Nothing of it runs in the program's own thread."""

    def __init__(
        self,
        clock: Callable[[], int] = time.perf_counter_ns,
        frame: Callable[[], FrameType | None] | None = None,
        meanwhile: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Of the thread that makes it, or of wherever `frame` finds.

        `meanwhile` is called in the sampling thread after each sample. It returns after how many nanoseconds the next
        one has to come, if that matters.
        """
        self.samples = StackSamples(began=clock())
        self.fault = ""
        self.meanwhile = meanwhile
        self._clock = clock
        thread = threading.get_ident()
        self._frame = frame or (lambda: sys._current_frames().get(thread))
        self._native = threading.get_native_id() if frame is None else NONE
        self._processor_time: dict[int, int] = {}  # of each thread, by its native number, so far
        self._every = self._pace = SAMPLE_INTERVAL
        self._cost = 0
        self._lines: dict[tuple[int, int], Line] = {}  # of each code, by identity, and instruction
        self._chains: dict[Chain, int] = {}
        self._stop = threading.Lock()  # free once nothing is to be sampled any more; quicker to wait for than an event
        self._stop.acquire()
        self._thread: UnseenThread | None = None

    def begin(self) -> None:
        if self._native != NONE:
            self._more_processor_time(self._native)
        self._thread = UnseenThread(self._sample_on)

    def end(self) -> None:
        self._let_go()
        if self._thread is not None:
            self._thread.join(PATIENCE)  # Python ends a process whose threads go on into its own end
        if self._native in self._processor_time:
            self.samples.ran = self._more_processor_time(self._native)
        self.samples.ended = self._clock()

    def forget(self) -> None:
        """In a child that was forked: what is sampled here is the parent's."""
        self._let_go()
        self._thread = None

    def _let_go(self) -> None:
        if self._stop.locked():
            self._stop.release()

    def _sample_on(self) -> None:
        due = self._clock() + self._every
        while not self._stop.acquire(timeout=max(0, due - self._clock()) / 1e9):
            began, soon = self._clock(), None
            self._pace = min(round(GROWTH * self._pace), TIMES_ITS_COST * self._cost)
            try:
                self.sample(min(due, began))
                took = self._clock() - began
                self._cost = (7 * self._cost + min(took, 2 * self._cost or took)) // 8  # others may have had their turn
                soon = self.meanwhile()
            except Exception as error:  # the next one may see more of a program that is about to begin
                self.fault = f"{type(error).__name__}: {error}"
            rest = max(self._every, self._pace)
            due = self._clock() + (rest if soon is None else min(soon, rest))

    def sample(self, due: int | None = None) -> None:
        """Note where the program is now, and was since the sample was due: it held the interpreter there, as the
        garbage collector does.

        The program waits meanwhile, so a frame's line is asked for once an instruction: finding it takes a walk
        through the code's table.
        """
        now, stack = self._stack()
        codes, chain = self.samples.codes, list[Line]()
        for code, instruction, number in stack:
            line = self._lines.get(instruction)
            if line is None:
                line = self._lines[instruction] = Line(codes.number(code), number)
            kind = codes.kinds[line.code]
            if kind == OUTSIDE:
                break
            if kind == IMPORTING:
                chain.clear()  # what a module does while it is imported is importing, and no loop of the run
            if kind != HIDDEN or not chain:
                chain.append(line)
        samples, outermost = self.samples, tuple(chain[: -DEEPEST - 1 : -1])
        if outermost not in self._chains:
            self._chains[outermost] = len(samples.known_chains)
            samples.known_chains.append(outermost)
        samples.times.append(now if due is None else due)
        samples.chains.append(self._chains[outermost])
        if len(samples.times) > KEPT_SAMPLES:
            del samples.times[1::2]
            del samples.chains[1::2]
            self._every *= 2
        if self._native != NONE and len(samples.times) % BESIDE_EVERY == 1:
            self._sample_other_threads()

    def _stack(self) -> tuple[int, list[tuple[CodeType, tuple[int, int], int]]]:
        """When that is, and from the inside out each frame's code, the place there, and its line if it is new."""
        stack = []
        with at_rest():
            frame, now = self._frame(), self._clock()
            while frame is not None:
                instruction = id(frame.f_code), frame.f_lasti
                stack.append((frame.f_code, instruction, 0 if instruction in self._lines else frame.f_lineno or 0))
                frame = frame.f_back
        return now, stack

    def _sample_other_threads(self) -> None:
        """What the processors gave since the last sample to other threads that run the program's own code: while one
        thread runs Python, no other does."""
        # of those that PyTorch began, as for a backward pass, the program's own thread waits for what it asked for
        others = [thread for thread in threading.enumerate() if not isinstance(thread, ForeignThread)]
        native = {thread.ident or 0: thread.native_id or 0 for thread in others if thread.native_id}
        native = {ident: number for ident, number in native.items() if number != self._native}
        codes, beside = self.samples.codes, self.samples.beside
        for ident, stack in stacks_of(native).items() if native else ():
            place = next((each for each in stack if codes.kinds[codes.number(each[0])] == USER), None)
            if place is not None:
                line = Line(codes.number(place[0]), line_number(*place))
                beside[line] = beside.get(line, 0) + self._more_processor_time(native[ident])

    def _more_processor_time(self, thread: int) -> int:
        """What it was given since this was last asked of it; nothing the first time."""
        times = processor_times(thread)
        now = times[0] if times is not None else self._processor_time.get(thread, 0)
        before, self._processor_time[thread] = self._processor_time.get(thread, now), now
        return max(0, now - before)  # a later thread may be given the number of one that ended
