"""One pass over a loader: batches in turn, or some of them ahead of the loop."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, NamedTuple, NoReturn, Self

import torch

from keepbusy.runtime.copies import Copies, Staged, Then, timed
from keepbusy.runtime.overlap import Handover, Overlap
from keepbusy.runtime.pulls import Place, Pulled, Pulls


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


class _Waiting(NamedTuple):
    """A batch whose turn has not come, or the error in its place."""

    place: Place
    loading: int  # nanoseconds that the host waited for the loader
    staged: Staged | None
    error: Exception | None


class Ahead:
    """On a device, with batches staged that the loop has not had yet."""

    def __init__(self, pulls: Pulls, copies: Copies, depth: int, overlap: Overlap) -> None:
        self._pulls, self._copies, self._depth, self._overlap = pulls, copies, depth, overlap
        self._waiting: deque[_Waiting] = deque()
        overlap.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        stream = torch.cuda.current_stream(self._copies.device)
        entered = timed(stream)
        added = self._fill()
        if not self._waiting:
            self._pulls.finish()
            self.close()
            raise StopIteration
        staged, error = self._first()
        if staged is None:
            _raise(error)
        self._hand_over(staged, stream, entered, added)
        return staged.batch

    def close(self) -> None:
        """Let the loader and the pinned memory go. Batches on their way arrive before their memory is used again."""
        self._pulls.close()
        for waiting in self._waiting:
            if waiting.staged is not None:
                waiting.staged.admit(waiting.staged.home)
        self._waiting.clear()
        self._copies.release()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _fill(self) -> list[_Waiting]:
        """Stage what is missing, two batches at most: the first step begins while the lead still grows."""
        added: list[_Waiting] = []
        while len(self._waiting) <= self._depth and len(added) < 2:
            pulled = self._pulls.pull()
            if pulled is None:
                break
            added.append(self._stage(pulled))
            self._waiting.append(added[-1])
        return added

    def _stage(self, pulled: Pulled) -> _Waiting:
        if pulled.error is not None:
            return _Waiting(pulled.place, pulled.took, None, pulled.error)
        try:
            return _Waiting(pulled.place, pulled.took, self._copies.stage(pulled.batch), None)
        except Exception as error:
            return _Waiting(pulled.place, pulled.took, None, error)

    def _first(self) -> tuple[Staged | None, list[Exception]]:
        _, _, staged, error = self._waiting.popleft()
        self._pulls.next_for_loop = self._waiting[0].place if self._waiting else None
        return staged, [error] if error is not None else []

    def _hand_over(self, staged: Staged, stream: Any, entered: Any, added: list[_Waiting]) -> None:
        asked = timed(stream)
        staged.admit(stream)
        loading = sum(one.loading for one in added)
        packing = sum(one.staged.trip.took for one in added if one.staged is not None)
        self._overlap.note(Handover(entered, asked, loading, packing, staged.trip))


def _raise(error: list[Exception]) -> NoReturn:
    """Taken out of the list, no frame of its traceback holds the error: it goes when it was dealt with."""
    raise error.pop()
