"""One pass over a loader: batches in turn, or some of them ahead of the loop."""

from __future__ import annotations

import sys
from collections import deque
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn, Self

import torch

from keepbusy.runtime.copies import Apart, Copies, Staged, Then, timed
from keepbusy.runtime.overlap import Handover, Overlap
from keepbusy.runtime.pulls import Place, Pulls


class InTurn:
    """Where there is no device: a plain iterator."""

    def __init__(self, pulls: Pulls, then: Then | None) -> None:
        self._pulls, self._then = pulls, then

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        pulled = self._pulls.pull()
        if pulled is None:
            self._pulls.finish()
            raise StopIteration
        if pulled.error is not None:
            _raise([pulled.error])
        return pulled.batch if self._then is None else self._then(pulled.batch)

    def close(self) -> None:
        self._pulls.close()

    def __del__(self) -> None:
        self.close()


class _Packing(NamedTuple):
    """A batch that is being packed, or the error in its place."""

    place: Place
    apart: Apart | None
    error: Exception | None


class _Waiting(NamedTuple):
    """A batch whose copies are issued and whose turn has not come, or the error in its place."""

    place: Place
    staged: Staged | None
    error: Exception | None


class Ahead:
    """On a device: `depth` batches that the loop has not had yet are there or on their way, and one is being packed."""

    def __init__(self, pulls: Pulls, copies: Copies, depth: int, overlap: Overlap) -> None:
        self._pulls, self._copies, self._depth, self._overlap = pulls, copies, depth, overlap
        self._packing: _Packing | None = None
        self._waiting: deque[_Waiting] = deque()
        self._loading = 0
        overlap.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        stream, began = torch.cuda.current_stream(self._copies.device), perf_counter_ns()
        entered = timed(stream)
        self._fill()
        if not self._waiting:
            self._pulls.finish()
            self.close()
            raise StopIteration
        staged, error = self._first()
        if staged is None:
            _raise(error)
        packing = perf_counter_ns() - began - self._loading
        self._overlap.note(Handover(entered, timed(stream), self._loading, packing, staged.trip))
        staged.admit(stream)
        return staged.batch

    def close(self) -> None:
        """Let the loader go, and the pinned memory. Batches on their way arrive before their memory is used again."""
        self._pulls.close()
        self._copies.close()
        for waiting in self._waiting:
            if waiting.staged is not None:
                waiting.staged.admit(waiting.staged.home)
        self._waiting.clear()
        self._packing = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _fill(self) -> None:
        """Send what was packed meanwhile, and pack the next. Twice at most: the lead grows while the loop works."""
        self._loading = 0
        for _ in range(2):
            if len(self._waiting) > self._depth:
                break
            if self._packing is None:
                self._packing = self._pull()
            if self._packing is not None:
                self._waiting.append(self._send(self._packing))
                self._packing = self._pull()

    def _pull(self) -> _Packing | None:
        """All that the loader gave before is packed or on its way: it may use its own memory again."""
        pulled = self._pulls.pull()
        if pulled is None:
            return None
        self._loading += pulled.took
        if pulled.error is not None:
            return _Packing(pulled.place, None, pulled.error)
        try:
            return _Packing(pulled.place, self._copies.pack(pulled.batch), None)
        except Exception as error:
            return _Packing(pulled.place, None, error)

    def _send(self, packing: _Packing) -> _Waiting:
        if packing.apart is None:
            return _Waiting(packing.place, None, packing.error)
        try:
            return _Waiting(packing.place, self._copies.send(packing.apart), None)
        except Exception as error:
            return _Waiting(packing.place, None, error)

    def _first(self) -> tuple[Staged | None, list[Exception]]:
        _, staged, error = self._waiting.popleft()
        after = self._waiting[0] if self._waiting else self._packing
        self._pulls.next_for_loop = after.place if after is not None else None
        return staged, [error] if error is not None else []


def _raise(error: list[Exception]) -> NoReturn:
    """Taken out of the list, no frame of its traceback holds the error: it goes when it was dealt with."""
    raise error.pop()
