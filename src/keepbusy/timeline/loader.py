"""A loader as a run used it: what it was given, how long its batches took, and how long the program waited for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from keepbusy.timeline.table import NONE

SPARE = 1.15
"""Workers beyond what just keeps up: batches do not all take as long as each other."""


@dataclass(frozen=True)
class LoaderUse:
    """Times are nanoseconds, of the whole run."""

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
