"""What the program's loaders do: how long it waits for each batch, and how long a batch takes where it is prepared."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from keepbusy.instrument.lines import USER, kind_of, shown
from keepbusy.instrument.patches import Function, Patches
from keepbusy.timeline.loader import LoaderUse
from keepbusy.timeline.model import NONE

_SLOTS, _SLOT = 1024, struct.Struct("<qq")


@dataclass
class _Loader:
    """One loader while the program runs; times as in `LoaderUse`."""

    place: str
    workers: int = 0
    prefetch: int = 0
    batches: int = 0
    waited: int = 0
    began: int = 0
    looped: int = 0


class Loaders:
    """Watches the loaders of one thread. What workers take they write down themselves, in memory that they share."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._made: dict[int, str] = {}  # where each data set's loader was made
        self._known: dict[int, _Loader] = {}  # by data set
        self._passes: dict[int, int] = {}  # of each iterator, when its first batch came
        self._patches = Patches()
        self._shared = mmap.mmap(-1, _SLOTS * _SLOT.size)

    def begin(self) -> None:
        from torch.utils.data import dataloader
        from torch.utils.data._utils import fetch

        self._patches.replace(dataloader.DataLoader, "__init__", self._noting_where)
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._waiting)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._patches.replace(kind, "fetch", self._fetching)

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()

    def used(self) -> list[LoaderUse]:
        """The one that was waited for longest comes first."""
        prepared = [_SLOT.unpack_from(self._shared, slot * _SLOT.size) for slot in range(_SLOTS)]
        count, took = sum(one[0] for one in prepared), sum(one[1] for one in prepared)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = len([one for one in self._known.values() if one.batches]) == 1  # else it is not known whose they were
        return sorted(
            (
                LoaderUse(
                    one.place, one.workers, one.prefetch, one.batches, one.waited, one.began,
                    took // count if count and alone else NONE, one.looped, cores,
                )
                for one in self._known.values()
                if one.batches
            ),
            key=lambda one: -one.waited,
        )  # fmt: skip

    def _noting_where(self, original: Function) -> Function:
        def made(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, dataset, *args, **kwargs)
            self._made[id(dataset)] = _user_line(sys._getframe(1))

        return made

    def _waiting(self, original: Function) -> Function:
        def waiting(iterator: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(iterator)
            before = self._clock()
            batch = original(iterator)
            self._note(iterator, before, self._clock())
            return batch

        return waiting

    def _note(self, iterator: Any, before: int, after: int) -> None:
        dataset = id(iterator._dataset)
        one = self._known.get(dataset)
        if one is None:
            one = self._known[dataset] = _Loader(self._made.get(dataset, ""))
        one.workers, one.prefetch = iterator._num_workers, iterator._prefetch_factor or 0
        one.batches += 1
        one.waited += after - before
        first = self._passes.get(id(iterator))
        if first is None or iterator._num_yielded <= 1:  # an earlier pass's iterator may have lain there
            one.began += after - before
        else:
            one.looped += after - first
        self._passes[id(iterator)] = after

    def _fetching(self, original: Function) -> Function:
        """Runs in the workers, which were forked with it; in the program itself where there are none."""

        def fetching(fetcher: Any, index: Any) -> Any:
            before = self._clock()
            result = original(fetcher, index)
            at = os.getpid() % _SLOTS * _SLOT.size
            count, took = _SLOT.unpack_from(self._shared, at)
            _SLOT.pack_into(self._shared, at, count + 1, took + self._clock() - before)
            return result

        return fetching


def _user_line(frame: FrameType | None) -> str:
    while frame is not None:
        if kind_of(frame.f_code.co_filename) == USER:
            return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
