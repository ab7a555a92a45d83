"""Measures the program's loaders: how long it waits for each batch, and how long workers take to prepare one."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keepbusy.program.lines import USER, kind_of, program_lines, shown
from keepbusy.program.patches import Function, Patches
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import LoaderUse

_SLOTS, _SLOT = 4096, struct.Struct("<qqq")
KEPT_ITERATIONS = 512
"""Iterations that are kept one by one; if there are more, neighbours are summed."""


@dataclass
class _Loader:
    """A loader while the program runs; times as in `LoaderUse`."""

    place: str
    workers: int = 0
    prefetch: int = 0
    batches: int = 0
    waited: int = 0
    began: int = 0
    looped: int = 0
    passes: int = 0
    each: int = 1
    sums: list[int] = field(default_factory=list)  # times of `each` iterations in a row, without waiting
    iterations: int = 0

    def add_iteration(self, time: int) -> None:
        """Add an iteration; once there are many, two neighbours become one."""
        if self.iterations % self.each:
            self.sums[-1] += time
        else:
            if len(self.sums) == KEPT_ITERATIONS:
                pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
                self.sums, self.each = [sum(pair) for pair in pairs], 2 * self.each
            self.sums.append(time)
        self.iterations += 1


class Loaders:
    """Measures the loaders of one thread. Workers write their own times into shared memory."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._made: dict[int, str] = {}  # the line where each data set's loader was made
        self._known: dict[int, _Loader] = {}  # by data set
        self._passes: dict[int, int] = {}  # when the last batch of each iterator arrived
        self._patches = Patches()
        self._shared = mmap.mmap(-1, _SLOTS * _SLOT.size)

    def begin(self) -> None:
        from torch.utils.data import dataloader

        from keepbusy.torch_names.hooks import FETCH

        self._patches.wrap(dataloader.DataLoader, "__init__", self._made_here)
        for fetch in FETCH:
            self._patches.wrap(*fetch, self._fetch)

    def end(self) -> None:
        """Undo all patches."""
        self._patches.undo()

    def used(self) -> list[LoaderUse]:
        """The loaders, sorted by how long the program waited for them, the longest first."""
        cores, prepared, uses = len(os.sched_getaffinity(0)), self._prepared(), list[LoaderUse]()
        for dataset, loader in self._known.items():
            busy, count, time_of_workers = prepared.get(dataset, (0, 0, 0))
            in_worker = time_of_workers // count if count else NONE
            counts = loader.place, loader.workers, loader.prefetch, loader.batches
            times = loader.waited, loader.began, in_worker, loader.looped
            means = tuple(total // loader.each for total in loader.sums[: loader.iterations // loader.each])
            busy = min(busy, loader.workers) or NONE
            use = LoaderUse(*counts, *times, cores, passes=loader.passes, turns=means, each=loader.each, busy=busy)
            uses.append(use)
        return sorted(uses, key=lambda use: -use.waited)

    def _prepared(self) -> dict[int, tuple[int, int, int]]:
        """For each data set: how many processes fetched batches, how many batches, and how long that took."""
        totals: dict[int, tuple[int, int, int]] = {}
        for slot in range(_SLOTS):
            dataset, more_batches, more_time = _SLOT.unpack_from(self._shared, slot * _SLOT.size)
            processes, batches, time = totals.get(dataset, (0, 0, 0))
            totals[dataset] = processes + 1, batches + more_batches, time + more_time
        return totals

    def _made_here(self, original: Function, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, dataset, *args, **kwargs)
        users = (line for line in program_lines(sys._getframe(1)) if kind_of(line[0].co_filename) == USER)
        self._made[id(dataset)] = next((f"{shown(code.co_filename)}:{line}" for code, line in users), "")

    def batch_taken(self, iterator: Any, before: int, after: int) -> None:
        """Add a batch, for which the program waited from `before` to `after`."""
        from keepbusy.torch_names import hooks

        dataset = id(hooks.dataset_of(iterator))
        loader = self._known.setdefault(dataset, _Loader(self._made.get(dataset, "")))
        loader.workers = hooks.workers_of(iterator)
        loader.prefetch = getattr(iterator, hooks.PREFETCH_FACTOR, None) or 0
        loader.batches += 1
        loader.waited += after - before
        first = self._passes.get(id(iterator))
        if first is None or hooks.batches_given(iterator) <= 1:  # an earlier iterator may have had the same id
            loader.began += after - before
            loader.passes += 1
        else:
            loader.looped += after - first
            loader.add_iteration(before - first)
        self._passes[id(iterator)] = after

    def _fetch(self, original: Function, fetcher: Any, index: Any) -> Any:
        """Runs in the workers, which were forked with this patch, or in the program if there are none.

        A forked worker knows its data set by the same id. Each worker writes to a slot of its own.
        """
        before = self._clock()
        result = original(fetcher, index)
        with suppress(Exception):
            took, dataset = self._clock() - before, id(fetcher.dataset)
            offset = (31 * os.getpid() + (dataset >> 4)) % _SLOTS * _SLOT.size
            known, count, total = _SLOT.unpack_from(self._shared, offset)
            if known != dataset:
                count = total = 0  # the slot is of an earlier process
            _SLOT.pack_into(self._shared, offset, dataset, count + 1, total + took)
        return result
