"""The loader, one batch at a time, and what it takes to go on from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple

Place = dict[str, Any]
"""What resumes there: how many batches were delivered, and the loader's own state if it keeps one."""


class Pulled(NamedTuple):
    """What the loader gave, or raised."""

    batch: Any
    error: Exception | None
    place: Place  # that begins with this batch
    took: int  # nanoseconds


class Pulls:
    """One pass over a loader. It runs ahead of the loop, so it is told what the loop has not had yet."""

    def __init__(self, loader: Any, resume: Place | None = None) -> None:
        self._loader, self.next_for_loop = loader, resume
        self._count = resume["delivered"] if resume else 0
        self._skip = 0 if resume and "loader" in resume else self._count
        self._batches: Iterator[Any] | None = None
        self._end: Place | None = None
        self.ended = False

    def place(self) -> Place:
        """What resumes at the batch that the loop gets next."""
        return self.next_for_loop or self._end or self._here()

    def pull(self) -> Pulled | None:
        """The next batch, or the error in its place; None at the end."""
        if self.ended:
            return None
        began = perf_counter_ns()
        if self._batches is None:
            self._begin()
        place = self._here()
        batch, error = self._next()
        if self.ended:
            self._end = place  # a loader that was asked once more than the loop may think of its next pass by now
            return None
        self._count += 1
        return Pulled(batch, error, place, perf_counter_ns() - began)

    def finish(self) -> None:
        """The loop had everything: the next pass begins at the beginning."""
        self.close()
        self._count, self.next_for_loop, self._end = 0, None, None

    def close(self) -> None:
        """Let go of the loader's iterator: with it go its workers, and a generator runs its `finally`."""
        self._batches, self.ended = None, True

    def _begin(self) -> None:
        self._batches, self.next_for_loop = iter(self._loader), None
        while self._skip and not self.ended:
            self._next()
            self._skip -= 1

    def _here(self) -> Place:
        state = {"loader": self._loader.state_dict()} if hasattr(self._loader, "state_dict") else {}
        return {"delivered": self._count, **state}

    def _next(self) -> tuple[Any, Exception | None]:
        if self._batches is None:
            return None, None
        try:
            return next(self._batches), None
        except StopIteration:
            self.close()
        except Exception as error:
            return None, error
        return None, None
