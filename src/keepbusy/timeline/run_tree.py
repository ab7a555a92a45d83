"""The run as a tree: its loops, what stands beside them, where each second went, and its loaders. Plain data.

Times are nanoseconds of wall-clock time. A loop's parts are the loops within it; what its turns do beside those is in
its lines. The parts and lines of the root sum to the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from keepbusy.timeline.table import NONE

RUN, LOOP, LINE, IMPORTS, FIRST_USE = "run", "loop", "line", "imports", "first use of the GPU"
SPARE = 1.15
"""Workers beyond what just keeps up: batches do not all take as long as each other."""


@dataclass(frozen=True)
class LineTime:
    """A line of the program, how long the host was there, and how long the GPU had nothing to do meanwhile."""

    place: str  # file:line
    time: int
    idle: int = NONE
    call: str = ""  # what the line called into, where it is a library: a function's name


@dataclass(frozen=True)
class SlowTurns:
    """A kind of turn that takes far longer than the others: every so many of them, so much longer, on that line."""

    count: int
    every: float
    regular: bool
    longer: int  # typically
    total: int  # of all of them
    place: str = ""


@dataclass(frozen=True)
class Part:
    """A loop of the run, or a line beside its loops, and what it contains."""

    kind: str
    place: str = ""  # file:line
    source: str = ""  # the line's text
    function: str = ""
    began: int = 0  # since the run's first moment
    time: int = 0
    busy: int = NONE  # of that time the GPU was at work
    turns: int = 0  # 0 where nobody counted them
    at_least: bool = False  # the turns before the loop was noticed, or beyond what is counted, are missing
    turn: int = NONE  # the mean
    low: int = NONE  # of ten turns, the second fastest and the second slowest
    high: int = NONE
    warm_up: int = 0  # turns at the beginning that are not like those that follow
    warm_up_time: int = 0
    kinds: tuple[SlowTurns, ...] = ()  # of turns that take far longer than the others, the largest first
    lines: tuple[LineTime, ...] = ()  # the longest first
    parts: tuple[Part, ...] = ()  # in the order of the run
    clock: int = NONE  # of the run itself: its first moment, on the clock by which its steps are timed
    shares: tuple[int, ...] = ()  # of the run itself: percent of each equal stretch in which the GPU was at work

    @property
    def waits(self) -> int:
        return NONE if self.busy == NONE else max(0, self.time - self.busy)

    def within(self) -> Iterator[Part]:
        """This part and all that it contains."""
        yield self
        for part in self.parts:
            yield from part.within()


@dataclass(frozen=True)
class LoaderUse:
    """A loader as the run used it: what it was given, how long batches took, how long the program waited for them."""

    place: str  # where the program made it, file:line
    workers: int
    prefetch: int  # batches that each worker prepares ahead
    batches: int
    waited: int  # the program, for its batches
    began: int = 0  # of that, for the first batch of each pass: workers start then
    in_worker: int = NONE  # what one batch takes a worker, or the program where it has none
    looped: int = 0  # from the first batch of each pass to its last one
    cores: int = 0
    rank: int = 0

    @property
    def turn(self) -> float:
        """What a turn of its loop takes besides waiting for the batch."""
        return max(1.0, (self.looped - (self.waited - self.began)) / max(1, self.batches))

    @property
    def enough(self) -> int:
        """The smallest number of workers that keeps up, as far as there are cores; NONE where nobody knows."""
        return self.enough_for(self.turn)

    def enough_for(self, turn: float) -> int:
        """The same, were the rest of a turn that short."""
        if self.in_worker == NONE:
            return NONE
        wanted = ceil(SPARE * self.in_worker / max(1.0, turn))
        return max(self.workers, min(wanted, max(1, self.cores - 1)))

    def pace(self, workers: int) -> float:
        """Nanoseconds from one batch to the next, however soon it is asked for."""
        return self.in_worker / workers if self.in_worker != NONE and workers else 0.0

    def waits_with(self, workers: int) -> int:
        """How long the program would wait for batches: a queue whose slowest part sets the pace."""
        if self.in_worker == NONE or not workers:
            return self.waited - self.began
        return round(max(0.0, self.pace(workers) - self.turn) * self.batches)
