"""A loader's worker processes: each says how long it was at work on a batch, whatever it had to wait for.

They write it into a pipe that all of them inherit. Where they do not, because they were not forked or the
pipe is full, a batch is there when it really is.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.utils.data import _utils, dataloader

from keepbusy.virtual.clock.host_threads import HostTime
from keepbusy.virtual.machine import MACHINE

# When a loader's workers are done with their batches, on the device's machine.
#
# Workers are processes of their own, and run on while our clock stands still: how long the program really
# waits for a batch says nothing. But a worker knows how long it was at work on one, and the rest follows: it
# begins with a batch when it was asked for it and is done with the one before.


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


LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
_SAID = struct.Struct("qqq")
"""A process, a batch, and nanoseconds."""
_PIPE: list[int] = []
_WORKERS: defaultdict[int, Worker] = defaultdict(Worker)
"""By process."""
_work: Callable[..., None] = _utils.worker._worker_loop


def patch() -> None:
    _PIPE[:] = os.pipe()
    for end in _PIPE:
        os.set_blocking(end, False)
    _utils.worker._worker_loop = work
    loader = dataloader._MultiProcessingDataLoaderIter
    ask, give = loader._try_put_index, loader._process_data

    def asked(self: Any) -> None:
        batch = self._send_idx
        ask(self)
        if self._send_idx > batch:
            _worker(self, self._task_info[batch][0]).ask(batch, MACHINE.clock.now())

    def given(self: Any, data: Any, number: int) -> Any:
        _listen()
        done = _worker(self, number).done(self._rcvd_idx - 1) if self._in_order else None
        MACHINE.clock.take_batch(LOADER, done)
        return give(self, data, number)

    loader._try_put_index, loader._process_data = asked, given


def _worker(loader: Any, number: int) -> Worker:
    return _WORKERS[loader._workers[number].pid]


def _listen() -> None:
    with contextlib.suppress(BlockingIOError):
        while said := os.read(_PIPE[0], 1024 * _SAID.size):
            for process, batch, duration in _SAID.iter_unpack(said):
                _WORKERS[process].took(batch, duration)


def work(kind: Any, dataset: Any, asks: Any, gives: Any, *rest: Any) -> None:
    """What runs in a worker's process: PyTorch's own loop, between queues that look at the clock."""
    if _PIPE:
        asks = _Asks(asks)
        gives = _Gives(gives, asks)
    _work(kind, dataset, asks, gives, *rest)


class _Asks:
    """The queue from which a worker takes what it is asked for."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.clock = HostTime()
        self.taken = 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        asked = self._queue.get(*args, **kwargs)
        self.taken = self.clock()
        return asked


class _Gives:
    """The queue into which it puts its batches."""

    def __init__(self, queue: Any, asks: _Asks) -> None:
        self._queue, self._asks = queue, asks

    def put(self, given: tuple[Any, Any]) -> None:
        if isinstance(given[0], int):
            spent = self._asks.clock() - self._asks.taken
            with contextlib.suppress(BlockingIOError):
                os.write(_PIPE[1], _SAID.pack(os.getpid(), given[0], spent))
        self._queue.put(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
