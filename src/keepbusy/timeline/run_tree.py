"""The run as a tree: its loops, what stands beside them, where each second went, and its loaders. Plain data.

Times are nanoseconds of wall-clock time. A loop's parts are the loops within it; what its turns do beside those is in
its lines. The parts and lines of the root sum to the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from keepbusy.timeline.table import NONE

RUN, LOOP, LINE, IMPORTS, FIRST_USE = "run", "loop", "line", "imports", "first use of the GPU"
SIMULATED_TURNS = 4096
"""Turns that the queue of a loader is replayed for; of more, every so many are left out."""
USUAL_PREFETCH = 2
"""Batches that PyTorch lets each worker prepare ahead."""


@dataclass(frozen=True)
class LineTime:
    """A line of the program, how long the host was there, and how long the GPU had nothing to do meanwhile."""

    place: str  # file:line
    time: int
    idle: int = NONE
    call: str = ""  # what the line called into, where it is a library: a function's name
    within: str = ""  # the program's own line in there at which it mostly was: file:line


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
    decides: tuple[str, ...] = ()  # of the run itself: lines that work out what the program chooses by
    beside: tuple[
        LineTime, ...
    ] = ()  # of the run itself: lines at which its other threads had a processor, and how long
    ran: int = NONE  # of the run itself: how long the thread that it is about had one

    @property
    def waits(self) -> int:
        return NONE if self.busy == NONE else max(0, self.time - self.busy)

    @property
    def usual(self) -> int:
        """What a turn takes on average once the loop is warm, but for turns that take longer without any rule."""
        longer = self.warm_up_time + sum(one.total for one in self.kinds if not one.regular)
        return NONE if self.turn == NONE else max(self.low, self.turn - longer // max(1, self.turns))

    def within(self) -> Iterator[Part]:
        """This part and all that it contains."""
        yield self
        for part in self.parts:
            yield from part.within()


@dataclass(frozen=True)
class UnevenLoop:
    """A loop around all others that takes one rank longer than the rest."""

    place: str  # file:line
    rank: int  # whom it takes longest
    turns: int  # of that rank
    longest: int
    mean: int  # of all ranks


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
    passes: int = 1
    turns: tuple[int, ...] = ()  # what the program did besides waiting: the mean of every `each` turns of its loop
    each: int = 1
    busy: int = NONE  # workers that gave any batch; NONE where nobody counted

    @property
    def idle(self) -> int:
        """Workers that had nothing to prepare."""
        return max(0, self.workers - self.busy) if self.busy > 0 else 0

    @property
    def turn(self) -> float:
        """What a turn of its loop typically takes besides waiting for the batch."""
        return max(1.0, float(median(self.turns))) if self.turns else self._mean

    @property
    def _mean(self) -> float:
        return max(1.0, (self.looped - (self.waited - self.began)) / max(1, self.batches))

    def enough(self, shorter: float = 0.0, least: float = 1.0) -> int:
        """The number of workers with which the run waits least, as far as there are cores, were each turn that much
        shorter and none shorter than `least`; what workers take to start is a wait, too."""
        if self.in_worker == NONE:
            return NONE
        costs = dict[int, int]()
        for workers in range(max(1, self.workers), max(self.workers, self.cores - 1, 1) + 1):
            waits = self.waits_with(workers, shorter, least)
            costs[workers] = waits + self.starting(workers - self.workers)
            if not waits:
                break
        return min(costs, key=lambda workers: costs[workers])

    def pace(self, workers: int) -> float:
        """Nanoseconds from one batch to the next, however soon it is asked for."""
        return self.in_worker / workers if self.in_worker != NONE and workers else 0.0

    def starting(self, workers: int) -> int:
        """What it takes to start so many workers for each pass, whose first batch waits for that, too."""
        first = self.began - self.passes * max(0, self.in_worker)
        return round(max(0, first) / self.workers * workers) if self.workers else 0

    def saved_with(self, workers: int, least: int) -> int:
        """What the run would no longer wait with so many, were no turn shorter than `least`."""
        saved = self.waited - self.began - self.waits_with(workers) - self.starting(workers - self.workers)
        return min(saved, self.looped - self.batches * least)

    def waits_with(self, workers: int, shorter: float = 0.0, least: float = 1.0) -> int:
        """How long the program would wait for batches, but the first of each pass.

        Each worker prepares its batches one after the other, and the next one is sent to it when the program takes
        one. A turn that takes long fills the queue and no more, so the turns are gone through one by one.
        """
        if self.in_worker == NONE or not workers:
            return self.waited - self.began
        a_pass = -(-self.batches // max(1, self.passes))
        several = min(self.each, max(1, SIMULATED_TURNS // max(1, len(self.turns))))
        turns = [max(least, one - shorter) for one in self.turns or [self._mean] * min(self.batches, SIMULATED_TURNS)]
        turns = [one for one in turns for _ in range(several)]
        ahead, waited = workers * max(1, self.prefetch or USUAL_PREFETCH), 0.0
        for first in range(0, len(turns), a_pass):
            waited += _waited(turns[first : first + a_pass], self.in_worker, workers, ahead)
        return round(waited * self.batches / max(1, len(turns)))


def _waited(turns: list[float], prepares: float, workers: int, ahead: int) -> float:
    """Of one pass, from its second batch on."""
    free, took, now, waited = [0.0] * workers, list[float](), 0.0, 0.0
    for number, turn in enumerate(turns):
        sent = took[number - ahead] if number >= ahead else 0.0
        ready = free[number % workers] = max(sent, free[number % workers]) + prepares
        waited += max(0.0, ready - now) if number else 0.0
        now = max(now, ready)
        took.append(now)
        now += turn
    return waited
