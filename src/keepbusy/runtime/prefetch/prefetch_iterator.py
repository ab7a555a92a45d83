"""`prefetch`: batches on the device before the loop asks for them, copied beside its compute."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import torch

from keepbusy.runtime.prefetch.batch_transfer import BatchTransfer, Transform, timed_event
from keepbusy.runtime.prefetch.overlap import Handover, Overlap, PrefetchReport
from keepbusy.runtime.prefetch.worker_batches import with_packing_workers

Position = dict[str, Any]
"""What resumes there: how many batches were delivered, and the loader's own state if it keeps one."""


def prefetch(loader: Any, depth: int = 2, device: Any = None, then: Transform | None = None) -> Prefetch:
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

    def __init__(self, loader: Any, depth: int, device: torch.device | None, then: Transform | None) -> None:
        self._loader, self._depth, self._device, self._then = loader, depth, device, then
        self._overlap = Overlap(depth)
        self._copy_streams: dict[torch.device, Any] = {}
        self._cursor = LoaderCursor(loader)
        self._packing: Any = None  # what is iterated in its place on a device
        self._resume: Position | None = None

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if not torch.cuda.is_available():
            self._cursor = LoaderCursor(self._loader, resume)
            return PlainIterator(self._cursor, self._then)
        if not getattr(self._packing, "persistent_workers", False):
            self._packing = with_packing_workers(self._loader)
        self._cursor = LoaderCursor(self._packing, resume)
        device = self._device
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        # one stream for all passes: memory that `then` takes from one stream is of no use to another
        if device not in self._copy_streams:
            self._copy_streams[device] = torch.cuda.Stream(device)
        transfer = BatchTransfer(device, self._copy_streams[device], self._depth, self._then)
        return PrefetchIterator(self._cursor, transfer, self._depth, self._overlap)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # asked for while this is not made yet, as by `copy`
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> Position:
        """What resumes at the first batch that the loop has not had, whatever was fetched ahead."""
        return self._cursor.position() if self._resume is None else self._resume

    def load_state_dict(self, state: Position) -> None:
        """The next pass begins there: by the loader's own state if it keeps one, else what came before is skipped."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])
        self._resume = state

    def report(self) -> PrefetchReport:
        """How much of the copies was hidden so far, and why the rest was not."""
        return self._overlap.report()


class LoaderItem(NamedTuple):
    """What the loader gave, or what was made of it since, or the error in its place."""

    batch: Any
    errors: list[Exception]  # at most one; taken out to be raised, so that no frame of its traceback holds it
    position: Position  # that begins with this batch
    duration: int  # nanoseconds that the loader took

    def become(self, made: Callable[[Any], Any]) -> LoaderItem:
        """The same with what is made of the batch."""
        if self.errors:
            return self
        try:
            return self._replace(batch=made(self.batch))
        except Exception as error:
            return self._replace(batch=None, errors=[error])


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


class PlainIterator:
    """Where there is no device."""

    def __init__(self, cursor: LoaderCursor, then: Transform | None) -> None:
        self._cursor, self._then = cursor, then

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._cursor.advance()
        if item is None:
            self._cursor.rewind()
            raise StopIteration
        if item.errors:
            raise item.errors.pop()
        return item.batch if self._then is None else self._then(item.batch)

    def close(self) -> None:
        self._cursor.close()

    def __del__(self) -> None:
        self.close()


class PrefetchIterator:
    """On a device: `depth` batches that the loop has not had yet are there or on their way, and one is being packed."""

    def __init__(self, cursor: LoaderCursor, transfer: BatchTransfer, depth: int, overlap: Overlap) -> None:
        self._cursor, self._transfer, self._depth, self._overlap = cursor, transfer, depth, overlap
        self._packing: LoaderItem | None = None
        self._waiting: deque[LoaderItem] = deque()
        self._loading = 0
        overlap.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        stream, began = torch.cuda.current_stream(self._transfer.device), perf_counter_ns()
        entered = timed_event(stream)
        self._loading = 0
        for _ in range(2):  # twice at most: the lead grows while the loop works
            if len(self._waiting) > self._depth:
                break
            packing, self._packing = self._packing or self._pack_next(), None
            if packing is None:
                break
            packed = packing.become(self._transfer.read)
            try:
                self._packing = self._pack_next()  # which is packed while this one is sent
            finally:  # also when the user interrupts the loader
                self._waiting.append(packed.become(self._transfer.send))
        if not self._waiting:
            self._cursor.rewind()
            self.close()
            raise StopIteration
        batch, errors, _, _ = self._waiting.popleft()
        following = self._waiting[0] if self._waiting else self._packing
        self._cursor.loop_position = following.position if following is not None else None
        if errors:
            raise errors.pop()
        packing_time = perf_counter_ns() - began - self._loading
        self._overlap.add(Handover(entered, batch.admit(stream), self._loading, packing_time, batch.events))
        return batch.batch

    def close(self) -> None:
        """Let the loader go, and the pinned memory. Batches on their way arrive before their memory is used again."""
        self._transfer.wait()
        self._cursor.close()
        self._transfer.close()
        for item in self._waiting:
            if not item.errors:
                item.batch.admit(item.batch.loop_stream)
        self._waiting.clear()
        self._packing = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _pack_next(self) -> LoaderItem | None:
        """All that the loader gave before is packed or on its way: it may use its own memory again."""
        item = self._cursor.advance()
        if item is None:
            return None
        self._loading += item.duration
        return item.become(self._transfer.pack)
