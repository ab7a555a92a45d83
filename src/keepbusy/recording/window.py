"""The window: a few turns under PyTorch's profiler, line by line; then everything is let go."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from keepbusy.instrument.patches import Function, Patches
from keepbusy.recording.line_log import Ask, Log, follower
from keepbusy.timeline.files import replacing
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.traces.kineto_names import DEVICE_ROWS

# The program's own use of PyTorch's profiler: there is room for one at a time, and it goes first.


class OtherProfilers:
    """Knows whether the program profiles itself, and says so before it begins."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._ours = False
        self._patches = Patches()
        self.at_work = False
        self.seen = False

    def begin(self) -> None:
        from torch.autograd import profiler

        for name, tell in (("_prepare", self._begins), ("_enable", self._begins), ("_disable", self._ends)):
            self._patches.wrap(profiler, f"{name}_profiler", self._telling(tell))

    def end(self) -> None:
        self._patches.undo()

    @contextmanager
    def ourselves(self) -> Iterator[None]:
        """What happens meanwhile we do."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _telling(self, tell: Callable[[], None]) -> Function:
        def told(function: Function, *arguments: Any, **options: Any) -> Any:
            if not self._ours:
                tell()
            return function(*arguments, **options)

        return told

    def _begins(self) -> None:
        self.at_work = self.seen = True
        self._give_way()

    def _ends(self) -> None:
        self.at_work = False


SETTLING_TURNS, RECORDED_TURNS = 1, 5
"""A turn that shows the recorder settling in is looked at, and not counted; so many are recorded after it."""
SETTLES_WITHIN = 30_000_000
"""In longer turns the recorder settles within a part of the first one: none is lost to it."""
FAR_LONGER = 4.0
"""Recorded turns that take so many times as long as usual ones are others."""
WHOLE_TURNS_AFTER, LONGEST_OPEN = 100_000_000, 300_000_000
"""A window that has been open for so long closes with its second whole turn, and at last wherever a line begins:
closing takes about as long as all that was seen, and holds the program up."""
HELD_UP_AT_ONCE = 300_000_000
"""Once it is known how long closing takes here, a window may be open for as long as that allows, but no longer than:"""
OPEN_AT_MOST = 3_000_000_000
EVENTS_AT_ONCE = 40_000
"""What takes long to close are the events, 6 to 8 µs each on an H200's host; a turn that waits has few of them. With so
many a window closes in the middle of a turn, and with the first turn where a second one would make them as many."""
SLOWED = 2.0
"""A turn that recording has made so many times as long, without an end of it, was slowed by the lines that it told."""
EVENTS_A_TENSOR = 10
"""Of each that is made on the device, on average."""
NEXT_ASK = 50_000_000
DEVICE_PATIENCE = 5_000_000_000
"""Where the device has not come to an end after so long, a window stays open: perhaps a peer waits for this rank."""


TRACE, LINES = "window.json", "lines.npz"
"""What a window leaves in its folder: the profiler's trace, and the lines."""


class Tick(NamedTuple):
    """One of our marks: the profiler noted it between these two readings of the host's clock."""

    number: int
    before: int
    after: int


class Window:
    """Opens at a turn's end and closes some turns later, or within a long one; what it saw lies in the folder then."""

    def __init__(
        self,
        folder: Path,
        turns: int = RECORDED_TURNS,
        clock: Callable[[], int] = time.perf_counter_ns,
        brief: bool = False,
        closed: Callable[[], object] | None = None,
        memory: bool = False,
        libraries: bool = True,
    ) -> None:
        """`brief`: two whole turns are enough where they take long, as one is like the other. `closed` is called where
        it has closed within a turn. `memory`: what is taken of the device's, and given back, is noted, too.
        `libraries`: their lines are followed as the program's own."""
        self.folder, self.clock = folder, clock
        self.is_brief = brief
        self.usual = 0
        """What a turn takes when nobody looks, where that is known."""
        self.longest, self.at_most = LONGEST_OPEN, OPEN_AT_MOST
        self.is_open = self._is_closing = False
        self.ticks: list[Tick] = []
        self.beside: set[int] = set()
        """Of a loop: what ended with these of its turns was more than one turn."""
        self.is_cut = self.is_part = False
        """Whether it has seen one turn alone, and whether of that a part."""
        self.is_blind = False
        """Whether it saw nothing of a device that was at work."""
        self.cost = 0
        """Nanoseconds for which opening and closing held up the program."""
        self.was_open = 0
        """For how long, beside that."""
        self.no_lines = ""
        self._turns = turns
        self._settling = 0
        self._log = Log(clock, libraries)
        self._ask = Ask(1 << 62, self._is_asked)
        self._follower = follower(self._log, self._ask)
        self._closed, self._memory = closed, memory
        self._profile: Any = None
        self._opened = self._thread = self._count = self._worked = self._allocated = self._of_a_turn = 0

    def open(self, count: int = 0) -> None:
        """`count` turns have ended."""
        import torch
        from torch.autograd import profiler

        began = self.clock()
        self._thread, self._count = threading.get_ident(), count
        self._settling = SETTLING_TURNS if self.usual < SETTLES_WITHIN else 0
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = profiler.profile(use_cpu=True, use_device=device, use_kineto=True, profile_memory=self._memory)
        self._profile.__enter__()
        self.is_open = True
        self.no_lines = self._follower.begin()
        if not self._settling:
            self.ticks.append(_tick(count, self.clock))
        self._allocated, self._worked = allocations_so_far(), time.thread_time_ns()
        self._opened = self.clock()
        self.cost += self._opened - began
        self._ask.at = began + self.longest  # no sooner: lines begin within what is called here, too

    def step(self, count: int) -> None:
        """A turn has ended: the `count`-th."""
        self._count = count
        if self._settling:
            self._settling -= 1
        if not self._settling:
            self.ticks.append(_tick(count, self.clock))
            self._of_a_turn = self._of_a_turn or self._events() * (len(self.ticks) == 2)
        if len(self.ticks) > self._turns or self._has_seen_enough():
            self.close()

    def _has_seen_enough(self) -> bool:
        """Two whole turns, and no rare ones."""
        if not self.is_brief or len(self.ticks) < 3 or self.clock() - self._opened < WHOLE_TURNS_AFTER:
            return False
        first, _, last = self.ticks[-3:]
        return not self.usual or last.after - first.after < 2 * FAR_LONGER * self.usual

    @property
    def saw_others(self) -> bool:
        """Whether each of its turns took far longer than usual ones."""
        took = [last.after - first.after for first, last in pairwise(self.ticks)]
        return bool(self.usual and took) and min(took) > FAR_LONGER * self.usual

    def _is_asked(self) -> None:
        """Where a line begins, and the window has been open for long or has seen as much as it can keep."""
        if not self.is_open or threading.get_ident() != self._thread:
            return
        if len(self.ticks) < 3 and not self._has_much_to_close():
            self._ask.at = self.clock() + NEXT_ASK
            return
        self.cut()
        self._ask.at = self.clock() + NEXT_ASK
        if self._closed is not None and not self.is_open:
            self._closed()

    def cut(self) -> None:
        """Close it within a turn. Where it has not even settled, turns have ceased to come, and it leaves nothing."""
        if self._may_close():
            self.is_cut, self.is_part = len(self.ticks) < 3, len(self.ticks) < 2
            if len(self.ticks) == 1:
                self.ticks.append(_tick(self._count + 1, self.clock))
            self._close()

    def _has_much_to_close(self) -> bool:
        if self._log.is_full or self.clock() - self._opened > self.at_most:
            return True
        worked, has_a_turn, events = time.thread_time_ns() - self._worked, len(self.ticks) > 1, self._events()
        if events >= EVENTS_AT_ONCE or (len(self.ticks) == 2 and 2 * self._of_a_turn >= EVENTS_AT_ONCE):
            return True
        return worked >= LONGEST_OPEN and (not self._allocated or (has_a_turn and worked >= 2 * LONGEST_OPEN))

    def _events(self) -> int:
        """So far, as the device's tensors tell."""
        return EVENTS_A_TENSOR * (allocations_so_far() - self._allocated)

    @property
    def is_slow(self) -> bool:
        """Whether a usual turn would have been over long before: the lines of a library that computes in Python."""
        return self.is_part and self.was_open > SLOWED * self.usual > 0

    def close(self) -> None:
        """Stop looking, and leave what was seen in the folder."""
        if self._may_close():
            self._close()

    def _may_close(self) -> bool:
        """What is called meanwhile may begin lines that ask the same."""
        if not self.is_open or self._is_closing:
            return False
        self._is_closing = True
        self._is_closing = self._device_comes_to_an_end()
        return self._is_closing

    def _close(self) -> None:
        import torch

        self.is_open = False
        self._follower.end()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # as the profiler would; what the device has yet to do holds nothing up
        began = self.clock()
        self.was_open = began - self._opened
        self._profile.__exit__(None, None, None)
        results, self._profile = self._profile.kineto_results, None
        if self.ticks:
            with replacing(self.folder / TRACE, durable=False) as part:
                results.save(str(part))
                self._log.record().save(self.folder / LINES)
            self.is_blind = allocations_so_far() > self._allocated and not _tells_of_the_device(self.folder / TRACE)
        self._log = Log(self.clock)  # what was in it is no longer needed
        self.cost += self.clock() - began

    def _device_comes_to_an_end(self) -> bool:
        """With what it has been given. Where a peer has died it never does, and the program must end without us."""
        import torch

        if not torch.cuda.is_initialized():
            return True
        last, until = torch.cuda.Event(), self.clock() + DEVICE_PATIENCE
        last.record()
        while not last.query() and self.clock() < until:
            time.sleep(0.001)
        return last.query()

    def open_for(self) -> int:
        """For how long the next window may be open, after what closing this one took."""
        allowed = HELD_UP_AT_ONCE * self.was_open / max(1, self.cost)
        return max(WHOLE_TURNS_AFTER, min(OPEN_AT_MOST, round(allowed)))

    def forget(self) -> None:
        """As in a child that was forked while the window was open: it is the parent's."""
        if self.is_open:
            self.is_open = False
            self._follower.end()


def _tells_of_the_device(trace: Path) -> bool:
    with trace.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return any(text.find(row) >= 0 for row in DEVICE_ROWS)


def allocations_so_far() -> int:
    """Tensors that were made on the device; 0 where that is not known."""
    import torch

    counted: Any = torch.cuda.memory_stats_as_nested_dict()
    return int(counted.get("allocation", {}).get("all", {}).get("allocated", 0))


def _tick(count: int, clock: Callable[[], int]) -> Tick:
    from torch._C._profiler import _RecordFunctionFast

    mark = _RecordFunctionFast(f"{OWN_STEP}{count}")
    before = clock()
    mark.__enter__()
    after = clock()
    mark.__exit__(None, None, None)
    return Tick(count, before, after)
