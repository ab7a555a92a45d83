"""The run as a tree: its loops, what stands beside them, and where each second went. Plain data.

Times are nanoseconds of wall-clock time. A loop's parts are the loops within it; what its turns do beside those is in
its lines. The parts and lines of the root sum to the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepbusy.timeline.table import NONE

RUN, LOOP, LINE, IMPORTS, FIRST_USE = "run", "loop", "line", "imports", "first use of the GPU"


@dataclass(frozen=True)
class LineTime:
    """A line of the program, how long the host was there, and how long the GPU had nothing to do meanwhile."""

    place: str  # file:line
    time: int
    idle: int = NONE
    call: str = ""  # what the line called into, where it is a library: a function's name


@dataclass(frozen=True)
class SlowTurns:
    """Turns that take far longer than the others: every so many of them, so much longer, on that line."""

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
    slow: SlowTurns | None = None
    lines: tuple[LineTime, ...] = ()  # the longest first
    parts: tuple[Part, ...] = ()  # in the order of the run

    @property
    def waits(self) -> int:
        return NONE if self.busy == NONE else max(0, self.time - self.busy)

    def within(self) -> Iterator[Part]:
        """This part and all that it contains."""
        yield self
        for part in self.parts:
            yield from part.within()
