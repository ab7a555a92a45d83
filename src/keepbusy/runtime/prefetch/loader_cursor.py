"""The loader, one batch at a time, and what it takes to go on from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple

Position = dict[str, Any]
"""What resumes there: how many batches were delivered, and the loader's own state if it keeps one."""


class LoaderItem(NamedTuple):
    """What the loader gave, or raised."""

    batch: Any
    errors: list[Exception]  # at most one; taken out to be raised, so that no frame of its traceback holds it
    position: Position  # that begins with this batch
    duration: int  # nanoseconds


class LoaderCursor:
    """One pass over a loader. It runs ahead of the loop, so it is told what the loop has not had yet."""

    def __init__(self, loader: Any, resume: Position | None = None) -> None:
        self._loader, self.loop_position = loader, resume
        self._delivered = resume["delivered"] if resume else 0
        self._skip = 0 if resume and "loader" in resume else self._delivered
        self._batches: Iterator[Any] | None = None
        self._end: Position | None = None
        self._ended = False

    def position(self) -> Position:
        """What resumes at the batch that the loop gets next."""
        return self.loop_position or self._end or self._loader_position()

    def advance(self) -> LoaderItem | None:
        """The next batch, or the error in its place; None at the end."""
        if self._ended:
            return None
        began = perf_counter_ns()
        if self._batches is None:
            self._batches, self.loop_position = iter(self._loader), None
            while self._skip and not self._ended:
                self._next()
                self._skip -= 1
        position = self._loader_position()
        batch, errors = self._next()
        if self._ended:
            self._end = position  # a loader that was asked once more than the loop may think of its next pass by now
            return None
        self._delivered += 1
        return LoaderItem(batch, errors, position, perf_counter_ns() - began)

    def rewind(self) -> None:
        """The loop had everything: the next pass begins at the beginning."""
        self.close()
        self._delivered, self.loop_position, self._end = 0, None, None

    def close(self) -> None:
        """Let go of the loader's iterator: with it go its workers, and a generator runs its `finally`."""
        self._batches, self._ended = None, True

    def _loader_position(self) -> Position:
        state = {"loader": self._loader.state_dict()} if hasattr(self._loader, "state_dict") else {}
        return {"delivered": self._delivered, **state}

    def _next(self) -> tuple[Any, list[Exception]]:
        if self._batches is None:
            return None, []
        try:
            return next(self._batches), []
        except StopIteration:
            self.close()
        except Exception as error:
            return None, [error]
        return None, []
