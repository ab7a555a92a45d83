"""`prefetch`: batches on the device before the loop asks for them, copied beside its compute."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn, Self

import torch

from keepbusy.runtime.prefetch.batch_packing import Apart, Copies, Staged, Then, timed
from keepbusy.runtime.prefetch.loader_cursor import Place, Pulls
from keepbusy.runtime.prefetch.overlap import Handover, Overlap, Report

# One pass over a loader: batches in turn, or some of them ahead of the loop.


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


def prefetch(loader: Any, depth: int = 2, device: Any = None, then: Then | None = None) -> Prefetch:
    """The loader's batches, on the device, each copied while the loop computes on those before it.

        for batch in keepbusy.prefetch(loader, then=normalise):
            loss = step(batch)

    `loader` is any iterable. Its batches may be tensors, dicts, tuples, named tuples and dataclasses of them,
    trees that PyTorch knows, and objects with a `to`; what else stands in them is left as it is.
    `depth` batches are kept ahead, so `depth + 2` are on the device at once. `then` runs on the device,
    on the stream of the copies, and returns the batch that the loop gets. The current stream may read a batch
    as any tensor of its own. Without CUDA this is a plain iterator over the loader, with `then`.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch got depth={depth!r} but needs at least one batch ahead: give depth=1 or more.")
    chosen = None if device is None else torch.device(device)
    if torch.cuda.is_available() and chosen is not None and chosen.type != "cuda":
        raise ValueError(f"prefetch got device={str(device)!r} but copies to CUDA devices: give device='cuda' or none.")
    return Prefetch(loader, depth, chosen, then)


class Prefetch:
    """A loader whose batches are fetched ahead. What it does not have itself it has from the loader."""

    def __init__(self, loader: Any, depth: int, device: torch.device | None, then: Then | None) -> None:
        self._loader, self._depth, self._device, self._then = loader, depth, device, then
        self._overlap = Overlap(depth)
        self._sides: dict[torch.device, Any] = {}
        self._pulls = Pulls(loader)
        self._resume: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        self._pulls, self._resume = Pulls(self._loader, self._resume), None
        if not torch.cuda.is_available():
            return InTurn(self._pulls, self._then)
        device = self._current_device()
        copies = Copies(device, self._side(device), self._depth, self._then)
        return Ahead(self._pulls, copies, self._depth, self._overlap)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # asked for while this is not made yet, as by `copy`
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> Place:
        """What resumes at the first batch that the loop has not had, whatever was fetched ahead."""
        return self._pulls.place() if self._resume is None else self._resume

    def load_state_dict(self, state: Place) -> None:
        """The next pass begins there: by the loader's own state if it keeps one, else what came before is skipped."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._resume = state

    def report(self) -> Report:
        """How much of the copies was hidden so far, and why the rest was not."""
        return self._overlap.report()

    def _current_device(self) -> torch.device:
        if self._device is None or self._device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return self._device

    def _side(self, device: torch.device) -> Any:
        """One stream for all passes: memory that `then` takes from one stream is of no use to another."""
        if device not in self._sides:
            self._sides[device] = torch.cuda.Stream(device)
        return self._sides[device]
