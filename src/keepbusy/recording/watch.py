"""Where a step is that takes far longer than usual: a thread that sleeps until one is overdue, and only then looks.

While steps come as usual it wakes now and then to see that they do. Once a step is overdue it looks at the stack of the
program's thread; the innermost line that most looks agree on is where the step stalls.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NamedTuple

from keepbusy.instrument.lines import Places
from keepbusy.recording.step_clock import Marked, limit

ENOUGH, RECENT = 16, 64
"""Steps from which on something can be said of what is usual, and so many that it is said of."""
REST = 30_000_000
"""The shortest sleep: a stall that is over by then is seen when it comes again, or has no line."""
LOOK, LONGEST_LOOK, SLOWER = 5_000_000, 250_000_000, 1.5
"""From one look to the next, at first and at last, and how fast they become rarer."""
TELL = 200_000_000
AGREE = 0.6
"""Of the time so much must have been seen at a line for the stall to stand there."""
MOST = 4096
"""Stalls whose lines are kept."""


class Seen(NamedTuple):
    """Where a step stood: the program's lines from the outside in, and the library's that the last of them called."""

    lines: tuple[str, ...] = ()
    library: str = ""


class Watch:
    """`seen` tells where an overdue step stood, by the number of the mark that ended it."""

    def __init__(
        self,
        marked: Marked,
        clock: Callable[[], int],
        frame: Callable[[], FrameType | None],
        tell: Callable[[], object] | None = None,
    ) -> None:
        """`tell` is called a few times a second while steps end, for whoever looks on."""
        self.seen: dict[int, Seen] = {}
        self.limit = 0
        self.fault = ""
        self.paused = False
        self._marked, self._clock, self._frame = marked, clock, frame
        self._chains: list[tuple[str, ...]] = []
        self._places = Places(self._number)
        self._count = self._asked = 0
        self._looks: Counter[int] = Counter()  # nanoseconds by where the program stood
        self._last_look = (0, 0)  # where, and when
        self._tell, self._told = tell, 0
        self._pause = LOOK
        self.loop: tuple[str, ...] = ()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Watch from a thread of our own."""
        self._thread = threading.Thread(target=self._watch, name="keepbusy", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
        self._next_step(self._marked.count)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self.turn() / 1e9):
                pass
        except Exception as error:  # it would be told on the program's standard error
            self.fault = f"{type(error).__name__}: {error}"

    def find_loop(self) -> None:
        """Called where a step ends: the program's lines there run through its loop."""
        self.loop = self._chains[self._places.here(sys._getframe(1))]

    def turn(self) -> int:
        """See whether a step is overdue, and look at it if it is; returns how long to sleep."""
        count, last = self._marked.count, self._marked.last
        if count != self._count:
            self._next_step(count)
            self._tell_now_and_then()
        if self.paused or not self.limit:
            return REST
        left = last + self.limit - self._clock()
        return self._rest(left) if left > 0 else self._look()

    def _next_step(self, count: int) -> None:
        if self._last_look[1]:
            self._see(self._ended())
            if len(self.seen) < MOST:
                self.seen[self._count] = self._agreed()
        self._looks.clear()
        self._last_look = (0, 0)
        self._count, self._pause = count, LOOK
        if count - self._asked > ENOUGH:
            took = self._marked.recent(RECENT)
            self.limit, self._asked = limit(took) if len(took) >= ENOUGH else 0, count

    def _rest(self, left: int) -> int:
        return max(left if self._tell is None else min(left, TELL), REST)

    def _tell_now_and_then(self) -> None:
        if self._tell is not None and self._clock() - self._told > TELL:
            self._tell()
            self._told = self._clock()

    def _ended(self) -> int:
        """When the step did that was looked at; now, if it has not."""
        row = self._count - self._marked.first
        return self._marked.host[row] if 0 <= row < len(self._marked.host) else self._clock()

    def _see(self, until: int) -> None:
        """Where the program stood at the last look it was until now, or until its step ended.

        Looks come late where the program holds the interpreter, and then see what follows the stall.
        """
        place, since = self._last_look
        self._looks[place] += max(1, until - since)

    def _look(self) -> int:
        frame, now = self._frame(), self._clock()
        if frame is not None:
            if self._last_look[1]:
                self._see(now)
            self._last_look = (self._places.here(frame), now)
        del frame  # it would keep the program's variables alive
        pause, self._pause = self._pause, min(round(self._pause * SLOWER), LONGEST_LOOK)
        return pause

    def _number(self, *lines: str) -> int:
        self._chains.append(lines)
        return len(self._chains) - 1

    def _agreed(self) -> Seen:
        """From the outside in, as far as most of the looks go together."""
        looks = {number: weight for number, weight in self._looks.items() if self._chains[number]}
        lines = agreed({self._chains[number]: weight for number, weight in looks.items()}, self.loop)
        whole = next((number for number in looks if self._chains[number] == lines), None)
        inside = whole is not None and whole in self._places.in_library
        return Seen(lines[:-1], lines[-1]) if inside else Seen(lines)


def agreed(looks: Mapping[tuple[str, ...], int], loop: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest beginning that most of the chains share; but in the loop itself, the line that was seen most.

    A function that is called from the loop works at many lines, and the call is its place. The loop is no such place.
    """
    most = AGREE * sum(looks.values())
    found: tuple[str, ...] = ()
    while True:
        longer: Counter[tuple[str, ...]] = Counter()
        for chain, weight in looks.items():
            if len(chain) > len(found) and chain[: len(found)] == found:
                longer[chain[: len(found) + 1]] += weight
        best, weight = max(longer.items(), key=lambda one: one[1], default=(found, 0))
        if not weight or (weight < most and not leads_to(found, loop)):
            return found
        found = best


def leads_to(lines: tuple[str, ...], loop: tuple[str, ...]) -> bool:
    """Whether what these lines call is still the loop, or what it stands in."""
    return len(lines) < len(loop) and lines == loop[: len(lines)]


def main_frame() -> FrameType | None:
    """Where the main thread is now."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
