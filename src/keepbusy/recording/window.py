"""The window: a few steps under PyTorch's profiler, line by line; then everything is let go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepbusy.recording.line_log import Log, Seen, Tick, follower
from keepbusy.recording.recorded_run import LINES, TRACE
from keepbusy.timeline.files import replacing
from keepbusy.timeline.frame_roles import OWN_STEP

# The program's own use of PyTorch's profiler: there is room for one at a time, and it goes first.


class Others:
    """Knows whether the program profiles itself, and says so before it begins."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._ours = False
        self._before: dict[str, Any] = {}
        self.at_work = False
        self.seen = False

    def begin(self) -> None:
        from torch.autograd import profiler

        self._wrap(profiler, "_prepare_profiler", self._begins)
        self._wrap(profiler, "_enable_profiler", self._begins)
        self._wrap(profiler, "_disable_profiler", self._ends)

    def end(self) -> None:
        from torch.autograd import profiler

        for name, function in self._before.items():
            setattr(profiler, name, function)
        self._before.clear()

    @contextmanager
    def ourselves(self) -> Iterator[None]:
        """What happens meanwhile we do."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _wrap(self, profiler: Any, name: str, tell: Callable[[], None]) -> None:
        function = self._before[name] = getattr(profiler, name)

        def told(*arguments: Any, **options: Any) -> Any:
            if not self._ours:
                tell()
            return function(*arguments, **options)

        setattr(profiler, name, told)

    def _begins(self) -> None:
        self.at_work = self.seen = True
        self._give_way()

    def _ends(self) -> None:
        self.at_work = False


SETTLING = 1
"""A step that shows the recorder settling in: it is looked at, and not counted."""
RECORDED = 5
MOST_DISTORTED = 4.0
"""Recorded steps that take so many times as long as usual ones are others."""
SPENT = 100_000_000
"""A window that has been open for so long closes with the second whole step: closing takes several times as long."""


class Window:
    """Opens at a step's end and closes some steps later; what it saw lies in the folder then."""

    def __init__(
        self,
        folder: Path,
        steps: int = RECORDED,
        clock: Callable[[], int] = time.perf_counter_ns,
        brief: bool = False,
    ) -> None:
        """`brief`: two whole steps are enough where they take long, as one is like the other."""
        self.folder, self.clock = folder, clock
        self.brief = brief
        self.usual = 0
        """What a step takes when nobody looks, where that is known."""
        self.is_open = False
        self.ticks: list[Tick] = []
        self.cost = 0
        """Nanoseconds for which opening and closing held up the program."""
        self.no_lines = ""
        self._left = SETTLING + steps
        self._settling = SETTLING
        self._log = Log(clock)
        self._follower = follower(self._log)
        self._profile: Any = None
        self._opened = 0

    def open(self) -> None:
        import torch
        from torch.autograd import profiler

        began = self._opened = self.clock()
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = profiler.profile(use_cpu=True, use_device=device, use_kineto=True)
        self._profile.__enter__()
        self.is_open = True
        self.no_lines = self._follower.begin()
        self.cost += self.clock() - began

    def step(self, count: int) -> None:
        """A step has ended: the `count`-th of the program."""
        if self._settling:
            self._settling -= 1
        if not self._settling:
            self.ticks.append(_tick(count, self.clock))
        self._left -= 1
        if not self._left or self._has_seen_enough():
            self.close()

    def _has_seen_enough(self) -> bool:
        """Two whole steps, and no rare ones."""
        if not self.brief or len(self.ticks) < 3 or self.clock() - self._opened < SPENT:
            return False
        first, _, last = self.ticks[-3:]
        return not self.usual or last.after - first.after < 2 * MOST_DISTORTED * self.usual

    def close(self) -> None:
        """Stop looking, and leave what was seen in the folder."""
        began = self.clock()
        self.is_open = False
        self._follower.end()
        self._profile.__exit__(None, None, None)
        results, self._profile = self._profile.kineto_results, None
        with replacing(self.folder / TRACE, durable=False) as part:
            results.save(str(part))
            Seen.of(self._log).save(self.folder / LINES)
            self._log = Log(self.clock)
        self.cost += self.clock() - began

    def forget(self) -> None:
        """In a child that was forked while the window was open: it is the parent's."""
        if self.is_open:
            self.is_open = False
            self._follower.end()


def _tick(count: int, clock: Callable[[], int]) -> Tick:
    from torch._C._profiler import _RecordFunctionFast

    mark = _RecordFunctionFast(f"{OWN_STEP}{count}")
    before = clock()
    mark.__enter__()
    after = clock()
    mark.__exit__(None, None, None)
    return Tick(count, before, after)
