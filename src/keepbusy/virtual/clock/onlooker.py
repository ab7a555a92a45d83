"""Where the program is while it does nothing that we see: a thread that looks at its stack now and then.

What a program does between two calls of the device stands at lines that call nothing of PyTorch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

INTERVAL = 0.001
"""Seconds between two looks: cheap enough to go unnoticed, and a wait that is shorter is hardly worth a line."""

SWITCH = 20_000
"""Nanoseconds from one Python thread to another and back."""


class Onlooker:
    """`seen` holds what was seen since it was last emptied: when, on the steady clock, and at which place."""

    def __init__(self, place: Callable[[FrameType], int]) -> None:
        self.seen: list[tuple[int, int]] = []
        self._spent = 0
        self._place = place
        self._watched = threading.main_thread().ident
        self._stop = threading.Event()
        threading.Thread(target=self._look, name="keepbusy", daemon=True).start()

    def _look(self) -> None:
        while not self._stop.wait(INTERVAL):
            begun = time.perf_counter_ns()
            frame = sys._current_frames().get(self._watched or 0)
            if frame is not None:
                self.seen.append((begun, self._place(frame)))
            del frame  # it would keep the program's variables alive
            self._spent += time.perf_counter_ns() - begun + SWITCH

    def cost(self) -> int:
        """What the looks since the last question took, while Python stood still for the program."""
        spent, self._spent = self._spent, 0
        return spent

    def take(self) -> list[tuple[int, int]]:
        """What was seen, place by place: of looks in a row at the same place the last one."""
        seen, self.seen = self.seen, []
        following = [place for _, place in seen[1:]] + [-1]
        return [look for look, after in zip(seen, following, strict=True) if look[1] != after]
