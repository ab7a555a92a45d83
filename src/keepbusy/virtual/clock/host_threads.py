"""Host threads: how much time passes on each while the program runs, and the rows and frames that show it.

Real time stands still from `pause` to `resume`, while we compute values. What is left is the program's
own, and a little of ours: a kernel in Python leaves cold caches behind, so what PyTorch itself does
then takes longer than it would. Three things keep that out.

- From one operator to the next it takes what dispatching costs the device's host; real time counts
  where it is more.
- A short stretch counts as the shortest of the last passes by that point: noise only ever lengthens.
- While PyTorch is at work by itself, in a backward pass or a step of an optimizer, its time is
  modelled. Only what is far too long for it is somebody else's: a hook that reads a file.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from time import perf_counter_ns
from types import FrameType
from weakref import finalize

from keepbusy.instrument.lines import LIBRARY, PYTHON, USER, kind_of, program_lines, shown
from keepbusy.instrument.processes import UnseenThread
from keepbusy.timeline.model import NONE, FrameKind, Kind, LinkKind
from keepbusy.virtual.clock.rows import Rows

NOISE_LIMIT = 500_000
"""Nanoseconds. A stretch that is longer counts whole."""
HOOK_LIMIT = 5_000_000
"""The same, while PyTorch is at work by itself."""
BACKWARD_PASS = "backward"
"""The annotation within which the autograd engine is at work."""
LIBRARY_FRAMES = (BACKWARD_PASS, "Optimizer.")
"""Begin the names of frames within which PyTorch is at work by itself."""
_LONGEST = 1 << 62
_WORK, _LINE = int(Kind.WORK), int(FrameKind.LINE)


class HostTime:
    """Real time as a thread would have it on a machine of its own: without waiting for a core that others use.

    Nanoseconds of a steady clock of the thread that made it; of two looks the difference counts. Ranks
    that share few cores, or a busy machine, preempt each other for milliseconds. Linux tells each thread
    how long it stood ready and did not run.
    """

    _SHORTEST_WAIT = 100_000
    """No stretch between two looks can hide a longer wait for a core without being longer itself."""

    def __init__(self) -> None:
        self._last_look = perf_counter_ns()
        self._lost = self._lost_before = 0  # now, and at the look before
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another kernel: real time is all there is
            self._file = -1
        self._waited = self._time_without_core()

    def __call__(self) -> int:
        now, self._lost_before = perf_counter_ns(), self._lost
        if now - self._last_look > self._SHORTEST_WAIT:
            waited = self._time_without_core()
            self._lost += waited - self._waited
            self._waited = waited
        self._last_look = now
        return now - self._lost

    def at(self, moment: int) -> int:
        """What it said at a moment between the last two looks. Time lost in between is taken as lost after it."""
        return min(moment - self._lost_before, self._last_look - self._lost)

    def _time_without_core(self) -> int:
        """How long this thread has stood ready without running: the second number."""
        if self._file < 0:
            return 0
        try:
            return int(os.pread(self._file, 64, 0).split()[1])
        except ProcessLookupError:  # it has ended, and another thread goes on where it stood
            return self._waited


class HostThread:
    """A host thread of the timeline: how far it is, which frames are open on it, and the time that no row shows yet.

    What writes rows is called with the clock's lock held.
    """

    __slots__ = (
        "_lines", "_looked_after", "_open_lines", "_outer", "_recent", "_resume_time", "_rows",
        "awaits_batch", "border_time", "chosen_streams", "depth", "frame", "in_backward", "in_library", "innermost",
        "lane", "last", "mark_rows", "marks", "modelled_time", "now", "pauses", "place", "real", "releases",
        "unwritten_time",
    )  # fmt: skip

    def __init__(
        self,
        rows: Rows,
        lane: int,
        now: int = 0,
        real: Callable[[], int] | None = None,
        lines: list[tuple[int, ...]] | None = None,
        mark_rows: dict[str, list[int]] | None = None,
    ) -> None:
        """`real`: nanoseconds of a steady clock, or None where host time is modelled.

        `lines`: of each place its lines, from the outside in. `mark_rows`: of each kind of mark its rows. The clock's
        threads share both.
        """
        self._rows, self.real = rows, real
        self._lines = [()] if lines is None else lines
        self.mark_rows = {} if mark_rows is None else mark_rows
        self.lane, self.now = lane, now
        self.last = NONE  # its last row
        self.releases: list[int] = []  # rows of other threads that its next row waits for
        self.marks: list[str] = []  # what its next row begins

        self.depth = 0  # of operators within operators
        self.frame = NONE  # the innermost open frame
        self.innermost = NONE  # the same, but for lines
        self.place = 0
        self._open_lines: tuple[int, ...] = ()  # the open frames of the place, within `innermost`
        self._outer: list[tuple[int, int, tuple[int, ...], bool, bool]] = []  # what to return to
        self.in_backward = False
        self.in_library = False  # whether PyTorch is at work by itself

        self._recent: dict[object, tuple[int, int]] = {}  # of each point, how long its last two passes took
        self.pauses = 0  # how many calls of ours the thread is in
        self._resume_time = real() if real is not None else 0  # when it went back to the program
        self.unwritten_time = 0  # real time of the program's that no row shows yet
        self.border_time = 0  # the same since the last operator, that a row shows already
        self.modelled_time = 0  # modelled time that no row shows yet
        self.awaits_batch = False
        self.chosen_streams: dict[int, int] = {}  # of each device the one that this thread has chosen
        self._looked_after = NONE  # the row at whose end the program last looked at its clock

    # time

    def pause(self, overhead: int = 0) -> None:
        """The program has called something of ours. Until `resume` real time does not count; nor does `overhead`."""
        if not self.pauses and self.real is not None:
            self.unwritten_time += self.real() - self._resume_time - overhead
        self.pauses += 1

    def resume(self) -> None:
        """Back to the program."""
        self.pauses -= 1
        if not self.pauses and self.real is not None:
            self._resume_time = self.real()

    def pause_length(self) -> int:
        """For how long real time has not counted."""
        return self.real() - self._resume_time if self.real is not None else 0

    def moment(self) -> int:
        """How far it is now, with what no row shows yet, if that is long enough to count whole."""
        written = self.now + self.modelled_time
        if self.real is None or self.pauses:
            return written
        unwritten = self.unwritten_time + self.real() - self._resume_time
        return written + unwritten if unwritten > NOISE_LIMIT else written

    def forget_real_time(self) -> None:
        """What passed until now belongs to somebody else."""
        self._resume_time = self.real() if self.real is not None else 0

    def take_dispatch_time(self, point: object, least: int) -> int:
        """What to write down before an operator whose dispatch takes `least`; `point`: where the program is."""
        least += self.modelled_time - self.border_time
        if self.real is not None:
            real = self.unwritten_time
            if self.in_library:
                real = real if real > HOOK_LIMIT else 0
            elif real <= NOISE_LIMIT:
                earlier, last = self._recent.get(point, (_LONGEST, _LONGEST))
                self._recent[point] = last, real
                real = min(earlier, last, real)
            if real > least:
                least = real
        self.unwritten_time = self.border_time = self.modelled_time = 0
        return max(0, least)  # a border may have taken more than the dispatch does

    def take_border_time(self) -> int:
        """What to write down at a border of the program's own: real time, or all of the modelled one."""
        if self.real is None:
            modelled, self.modelled_time = self.modelled_time, 0
            return modelled
        if not self.pauses:
            self.pause()
            self.resume()
        if self.in_library and self.unwritten_time <= HOOK_LIMIT:
            return 0
        return self._take_real_time(max(0, self.unwritten_time))

    def take_time_until(self, moment: int) -> int:
        """Of the real time since the thread went back to the program, what had passed at a moment of the clock."""
        passed = min(moment - self._resume_time, self.unwritten_time)
        if self.pauses == 0 or self.in_library or passed <= 0:
            return 0
        self._resume_time += passed
        return self._take_real_time(passed)

    def _take_real_time(self, duration: int) -> int:
        self.unwritten_time -= duration
        self.border_time += duration
        return duration

    # rows

    def add(self, kind: int, name: str, end: int, work: int, awaits: int = NONE) -> int:
        """A row from now to its end; returns its number."""
        rows, frame, now = self._rows, self.frame, self.now
        row = rows.add(self.lane, kind, rows.names[name], frame, now, end, work, 0, awaits, NONE, 0, 0, NONE, NONE, 0)
        self.now, self.last = end, row
        if self.releases:
            for source in self.releases:
                rows.link(source, row, LinkKind.HANDOFF)
            self.releases.clear()
        if self.marks:
            for mark in self.marks:
                self.mark_rows.setdefault(mark, []).append(row)
            self.marks.clear()
        return row

    def work(self, duration: int, name: str = "") -> None:
        if duration > 0:
            self.add(_WORK, name, self.now + duration, duration)

    def work_until_border(self) -> None:
        """What the program did since it was last seen, up to a border of its own; nothing within an operator."""
        if not self.depth:
            self.work(self.take_border_time())

    def work_until_look(self) -> None:
        """The same, up to a look at the program's clock. Looks that follow each other lengthen one row."""
        duration, row = self.take_border_time(), self.last
        if duration > 0 and self._looked_after == row and self._rows.lengthen(row, self.frame, duration):
            self.now += duration
        else:
            self.work(duration)
            self._looked_after = self.last
        self.border_time = 0  # the next operator is dispatched after the look

    def work_until_call(self) -> None:
        """The same, up to a call of the device; within an operator only modelled time counts."""
        if not self.depth:
            self.work(self.take_border_time())
        else:
            self.work_modelled_time()

    def work_modelled_time(self) -> None:
        self.work(self.modelled_time)
        self.modelled_time = 0

    # frames

    def open(self, kind: int, name: str) -> None:
        self._outer.append((self.innermost, self.place, self._open_lines, self.in_backward, self.in_library))
        self.innermost = self.frame = self._rows.open(self.lane, kind, self._rows.names[name], self.frame, self.now)
        self.place, self._open_lines = 0, ()
        self.in_backward |= name == BACKWARD_PASS
        self.in_library |= name.startswith(LIBRARY_FRAMES)

    def close(self) -> None:
        """Close the innermost frame, and the lines within it; where none is open, nothing."""
        if not self._outer:
            return
        for frame in (*self._open_lines, self.innermost):
            self._rows.close(frame, self.now)
        in_library = self.in_library
        self.innermost, self.place, self._open_lines, self.in_backward, self.in_library = self._outer.pop()
        if in_library and not self.in_library:
            self.unwritten_time = 0  # PyTorch's own, while it was at work by itself
        self.frame = self._open_lines[-1] if self._open_lines else self.innermost

    def go_to(self, place: int) -> None:
        """Leave the lines that the place is not within, and enter its own."""
        if place == self.place:
            return
        old, new = self._lines[self.place], self._lines[place]
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        for line in self._open_lines[same:]:
            self._rows.close(line, self.now)
        opened = self._open_lines[:same]
        for name in new[same:]:
            parent = opened[-1] if opened else self.innermost
            opened = (*opened, self._rows.open(self.lane, _LINE, name, parent, self.now))
        self._open_lines, self.place = opened, place
        self.frame = opened[-1] if opened else self.innermost


# Where the program is while it does nothing that we see: what it does between two calls of the device stands at lines
# that call nothing of PyTorch, so a thread looks at its stack now and then.

INTERVAL = 0.001
"""Seconds between two looks: cheap enough to go unnoticed, and a wait that is shorter is hardly worth a line."""

THREAD_SWITCH = 20_000
"""Nanoseconds from one Python thread to another and back."""


class Onlooker:
    """`looks` holds what was seen since it was last emptied: when, on the steady clock, and at which place."""

    def __init__(self, place: Callable[[FrameType], int]) -> None:
        self.looks: list[tuple[int, int]] = []
        self._cost = 0
        self._place = place
        self._watched = threading.main_thread().ident
        # else it has its turn only once the program has been at work for 5 ms, or at the next line, which calls PyTorch
        sys.setswitchinterval(INTERVAL / 4)
        UnseenThread(self._look)

    def _look(self) -> None:
        clock, ran, never = time.pthread_getcpuclockid(self._watched or 0), 0, threading.Event()
        while not never.wait(INTERVAL):
            begun, ran_before, ran = perf_counter_ns(), ran, time.clock_gettime_ns(clock)
            frame = sys._current_frames().get(self._watched or 0)
            if frame is not None:
                self.looks.append((begun, self._place(frame)))
            del frame  # it would keep the program's variables alive
            if ran - ran_before > THREAD_SWITCH:  # a program that sleeps is not held up
                self._cost += perf_counter_ns() - begun + THREAD_SWITCH

    def watches_caller(self) -> bool:
        return threading.get_ident() == self._watched

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        """What the looks since the last time took, while Python stood still for the program, and what was seen.

        Of looks in a row at the same place the last one.
        """
        looks, cost, self.looks, self._cost = tuple(self.looks), self._cost, [], 0
        return cost, [look for look, after in zip_longest(looks, looks[1:]) if after is None or look[1] != after[1]]


SLOW_INTERVAL = 0.005
"""Seconds between two looks that only ask whether anything is left out."""
SAID_FROM, SAID_SHARE = 200_000_000, 0.1
"""Nanoseconds, and a share of the run: from both on what is left out is worth a sentence."""


class UncountedWork:
    """Where the program is at work while a modelled clock stands still: in Python, NumPy or files, without an operator.

    It is measured, so none of it goes into the timeline, which is the same in every run.
    """

    def __init__(self, host: HostThread) -> None:
        """`host`: of the thread that calls this."""
        self.times = Counter[str]()  # nanoseconds of a processor, by the program's own line
        self._host, self._reached, self._watched = host, (0, 0), threading.get_ident()

    def begin(self) -> None:
        UnseenThread(self._look)

    def _look(self) -> None:
        clock, never = time.pthread_getcpuclockid(self._watched), threading.Event()
        ran = time.clock_gettime_ns(clock)
        while not never.wait(SLOW_INTERVAL):
            before, ran = ran, time.clock_gettime_ns(clock)
            self.see(sys._current_frames().get(self._watched), ran - before)

    def see(self, frame: FrameType | None, ran: int) -> None:
        """The thread is at this frame, and had a processor for so long since the look before."""
        before, self._reached = self._reached, (self._host.now, self._host.modelled_time)
        if frame is None or self._host.pauses or before != self._reached or before == (0, 0):
            return
        if kind_of(frame.f_code.co_filename) in (USER, LIBRARY, PYTHON) and not _imports(frame):
            own = (one for one in program_lines(frame) if kind_of(one[0].co_filename) == USER)
            for code, line in islice(own, 1):
                self.times[f"{shown(code.co_filename)}:{line}"] += ran

    def add_batches(self, durations: Sequence[int], workers: int) -> None:
        """What so many workers of a loader, side by side, spent on batches."""
        self.times["the loader's workers"] += sum(durations) // max(1, workers)

    def sentence(self) -> str:
        """What the report leaves out, where that is much of the run; else nothing."""
        spent = self.times.total()
        if spent < max(SAID_FROM, SAID_SHARE * self._host.now):
            return ""
        most = [one for one in self.times.most_common(2) if one[1] > 0.1 * spent]
        lines = " and ".join(f"{place} ({each / 1e9:.1f} s)" for place, each in most)
        return (
            f"the CPU's time is modelled, so the report leaves out at least {spent / 1e9:.1f} s that Python, NumPy and "
            f"files took on this machine, chiefly {lines}; --clock measured counts them."
        )


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


_ending = threading.local()


def at_end_of_thread(does: Callable[[], object]) -> None:
    """Call it when the calling thread ends. A thread that C++ started has no end: Python forgets it after each call."""
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread):
        its_own: set[object] = _ending.__dict__.setdefault("its_own", set())  # it goes with the thread
        finalize(its_own, does).atexit = False
