"""When a loader's workers are done with their batches, on the device's machine.

Workers are processes of their own, and run on while our clock stands still: how long the program really
waits for a batch says nothing. But a worker knows how long it was at work on one, and the rest follows: it
begins with a batch when it was asked for it and is done with the one before.
"""

from __future__ import annotations


class Worker:
    """One worker, in nanoseconds of the program's clock. Batches bear the loader's numbers."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._took: dict[int, int] = {}
        self._free = 0

    def ask(self, batch: int, now: int) -> None:
        self._asked[batch] = now

    def took(self, batch: int, duration: int) -> None:
        """What it says itself."""
        self._took[batch] = duration

    def done(self, batch: int) -> int | None:
        """When the next batch of its own is there; None where it did not say how long it took."""
        duration, asked = self._took.pop(batch, None), self._asked.pop(batch, self._free)
        if duration is None:
            return None
        self._free = max(asked, self._free) + duration
        return self._free
