"""How a running program is doing: a few numbers that it leaves in a file for whoever looks on."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from keepbusy.timeline.files import typed
from keepbusy.timeline.table import NONE


@dataclass(frozen=True)
class RareStall:
    """What makes a step far longer than its neighbours, now and then, always at the same place."""

    what: str  # "checkpoint", "garbage collection", "input", or "" where only the place is known
    count: int
    every: float  # steps from one to the next, typically; 0 where there was only one
    regular: bool  # whether it comes after the same number of steps each time
    time: int  # how much longer such a step takes than its neighbours, typically
    total: int  # of all of them
    share: float  # of the time of all plain steps
    lines: tuple[str, ...] = ()  # of the program, from the outside in, as in "train.py(41): main"
    library: str = ""  # the library's line that the innermost of them called
    loop: int = NONE  # which of the lines is the loop's own, where that is known
    last: int = NONE  # the step in which it came last, the run's first one being 1

    @property
    def is_foreseen(self) -> bool:
        """Whether it is known in which steps it comes, and beside which. Of what comes every third step all are."""
        return self.regular and round(self.every) > 3

    def comes_in(self, step: int) -> bool:
        """Whether one that is foreseen comes in this step, or in one beside it."""
        every = max(1, round(self.every))
        apart = (step - self.last) % every
        return min(apart, every - apart) <= 1


@dataclass(frozen=True)
class Course:
    """How steps went over the run, a row for every `each` of them in a row."""

    each: int = 1
    step: tuple[int, ...] = ()  # the median
    longest: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()  # the median, NONE where nobody knows
    ended: tuple[int, ...] = ()  # when the last of them did, on the host's clock


@dataclass(frozen=True)
class PlainRun:
    """What marks alone tell of a rank's whole run, most of which nobody looked at closely.

    Times are nanoseconds; NONE where the device's part is not known.
    """

    marked_by: str  # "step", "optimizer", "forward" or "graph"; "nobody" where no step was announced
    steps: int  # plain ones, without those of the warm-up
    step: int  # what one takes, stalls left out
    low: int  # nine in ten take longer
    high: int  # one in ten takes longer
    warm_up: int = 0  # steps at the beginning that are not like the others
    warm_up_time: int = 0
    host: int = NONE  # what a step takes of a host that nothing holds up, where that does not set the pace
    lead: int = NONE  # of the host at the end of a step, typically
    no_lead: float = 0.0  # share of the steps at whose end the host had none
    input: int = 0  # what a step waits for its input
    collector: int = 0  # what the garbage collector takes of a step
    requests: float = 0.0  # for memory from the driver, a step, after the warm-up
    retries: int = 0  # of allocations that found the memory full, after the warm-up
    delayed: float = 0.0  # share of the run in which the program's thread was ready and had no processor
    stalls: tuple[RareStall, ...] = ()  # by share, the largest first
    course: Course = Course()
    fault: str = ""  # why marks ended before the run did

    def as_fact(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_fact(cls, fact: object) -> PlainRun | None:
        """What `as_fact` gave, also from a file; none for whatever else stands there."""
        try:
            return typed(cls, fact)
        except ValueError:
            return None


_FORM = struct.Struct("<8s7q")
_MAGIC = b"busylive"


class Figures(NamedTuple):
    """Of the last steps. Times are nanoseconds; the last two are on the machine's steady clock."""

    steps: int  # so far
    step: int  # the median
    low: int
    high: int
    lead: int = NONE  # of the host, where the device is known
    ended: int = 0  # when the last step did
    limit: int = 0  # a step is overdue when it takes longer; 0 where nobody knows


class FiguresFile:
    """One small file that always holds the latest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, figures: Figures) -> None:
        """A single write of a few bytes, so that no reader finds half of them."""
        with self._path.open("r+b" if self._path.exists() else "wb", buffering=0) as file:
            file.write(_FORM.pack(_MAGIC, *figures))

    def read(self) -> Figures | None:
        """None before there are any."""
        try:
            magic, *figures = _FORM.unpack(self._path.read_bytes())
        except (OSError, struct.error):
            return None
        return Figures(*figures) if magic == _MAGIC else None
