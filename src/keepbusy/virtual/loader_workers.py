"""A loader's worker processes: each says how long it was at work on a batch, whatever it had to wait for.

They run on while our clock stands still: how long the program really waits for a batch says nothing. But a worker
knows how long it was at work on one, and the rest follows: it begins with a batch when it was asked for it and is done
with the one before. It writes that into a pipe that all workers inherit. Where it does not, because it was not forked
or the pipe is full, a batch is there when it really is. A modelled clock takes none of it, and says what it leaves out.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import _utils, dataloader

from keepbusy.instrument.patches import Patches
from keepbusy.virtual.clock.real_time import HostTime
from keepbusy.virtual.machine import MACHINE


class Worker:
    """One worker, in nanoseconds of the program's clock. Batches bear the loader's numbers."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._durations: dict[int, int] = {}
        self._idle_from = 0

    def ask(self, batch: int, now: int) -> None:
        self._asked[batch] = now

    def note_duration(self, batch: int, duration: int) -> None:
        """What it says itself."""
        self._durations[batch] = duration

    def done(self, batch: int) -> int | None:
        """When the next batch of its own is there; None where it did not say how long it took."""
        duration, asked = self._durations.pop(batch, None), self._asked.pop(batch, self._idle_from)
        if duration is None:
            return None
        self._idle_from = max(asked, self._idle_from) + duration
        return self._idle_from


_NEXT_BATCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
_DURATION = struct.Struct("qqq")
"""A process, a batch, and nanoseconds."""
_PIPE: list[int] = []
_WORKERS: defaultdict[int, Worker] = defaultdict(Worker)
"""By process."""
_native_loop: Callable[..., None] = _utils.worker._worker_loop


def patch(patches: Patches, measured: bool) -> None:
    _PIPE[:] = os.pipe()
    for end in _PIPE:
        os.set_blocking(end, False)
    _utils.worker._worker_loop = run_worker  # no wrapper: workers that are spawned find it by its name
    loader = dataloader._MultiProcessingDataLoaderIter
    patches.wrap(loader, "_process_data", _give if measured else _leave_out)
    if measured:
        patches.wrap(loader, "_try_put_index", _ask)


def _ask(native: Callable[..., Any], loader: Any) -> None:
    batch = loader._send_idx
    native(loader)
    if loader._send_idx > batch:
        _worker(loader, loader._task_info[batch][0]).ask(batch, MACHINE.clock.now())


def _give(native: Callable[..., Any], loader: Any, data: Any, number: int) -> Any:
    for process, batch, duration in _durations():
        _WORKERS[process].note_duration(batch, duration)
    done = _worker(loader, number).done(loader._rcvd_idx - 1) if loader._in_order else None
    MACHINE.clock.take_batch(_NEXT_BATCH, done)
    return native(loader, data, number)


def _leave_out(native: Callable[..., Any], loader: Any, data: Any, number: int) -> Any:
    if MACHINE.uncounted is not None:
        MACHINE.uncounted.add_batches([duration for _, _, duration in _durations()], loader._num_workers)
    return native(loader, data, number)


def _durations() -> Iterator[tuple[int, int, int]]:
    """What workers have said since the last time: a process, a batch, and how long it was at work on it."""
    with contextlib.suppress(BlockingIOError):
        while rows := os.read(_PIPE[0], 1024 * _DURATION.size):
            yield from _DURATION.iter_unpack(rows)


def _worker(loader: Any, number: int) -> Worker:
    return _WORKERS[loader._workers[number].pid]


def run_worker(kind: Any, dataset: Any, asks: Any, gives: Any, *rest: Any) -> None:
    """What runs in a worker's process: PyTorch's own loop, between queues that look at the clock."""
    if _PIPE:
        asks = _Requests(asks)
        gives = _Results(gives, asks)
    _native_loop(kind, dataset, asks, gives, *rest)


class _Requests:
    """The queue from which a worker takes what it is asked for."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.clock, self.taken = queue, HostTime(), 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        asked = self._queue.get(*args, **kwargs)
        self.taken = self.clock()
        return asked


class _Results:
    """The queue into which it puts its batches."""

    def __init__(self, queue: Any, asks: _Requests) -> None:
        self._queue, self._asks = queue, asks

    def put(self, given: tuple[Any, Any]) -> None:
        if isinstance(given[0], int):
            spent = self._asks.clock() - self._asks.taken
            with contextlib.suppress(BlockingIOError):
                os.write(_PIPE[1], _DURATION.pack(os.getpid(), given[0], spent))
        self._queue.put(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
