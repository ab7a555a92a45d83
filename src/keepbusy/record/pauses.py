"""What holds up the host between two marks, seen without a profiler: input, the garbage collector, checkpoints."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from keepbusy.record.patches import Function, Patches
from keepbusy.script.imports import when_imported

INPUT, COLLECTOR, CHECKPOINT = "input", "garbage collection", "checkpoint"


class Pauses:
    """`now` holds what each kind of pause took since the last mark."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.now = {INPUT: 0, COLLECTOR: 0, CHECKPOINT: 0}
        self._clock = clock
        self._thread = 0
        self._open: set[str] = set()
        self._collecting = 0
        self._patches = Patches()

    def begin(self) -> None:
        """From the thread whose pauses are meant; the pauses of others hold up nobody."""
        self._thread = threading.get_ident()
        import torch
        from torch.utils.data import dataloader

        self._patches.replace(torch, "save", self._timed(CHECKPOINT))
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._timed(INPUT))
        self._patches.replace(dataloader.DataLoader, "__iter__", self._timed(INPUT))
        when_imported("torch.distributed.checkpoint", self._time_distributed)
        gc.callbacks.append(self._collected)
        self._patches.later(lambda: gc.callbacks.remove(self._collected))

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()

    def take(self, what: str) -> int:
        """How long these pauses took since this was last asked."""
        time, self.now[what] = self.now[what], 0
        return time

    def _time_distributed(self) -> None:
        import torch.distributed.checkpoint as distributed

        for name in ("save", "async_save"):
            self._patches.replace(distributed, name, self._timed(CHECKPOINT))

    def _timed(self, what: str) -> Callable[[Function], Function]:
        """Stands in for a function, and notes how long it took, within another of its kind or not."""

        def made(original: Function) -> Function:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread or what in self._open:
                    return original(*args, **kwargs)
                self._open.add(what)
                began = self._clock()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.now[what] += self._clock() - began
                    self._open.discard(what)

            return timed

        return made

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        """The collector stops all threads, whichever it runs in."""
        if phase == "start":
            self._collecting = self._clock()
        elif self._collecting:
            self.now[COLLECTOR] += self._clock() - self._collecting
            self._collecting = 0
