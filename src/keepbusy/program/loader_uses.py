"""What the program's loaders do: how long it waits for each batch, and how long a batch takes where it is prepared."""

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
KEPT_TURNS = 512
"""Turns that are remembered one by one; of more, the means of neighbours."""


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
    passes: int = 0
    each: int = 1
    sums: list[int] = field(default_factory=list)  # of so many turns in a row, what they took besides waiting
    turns: int = 0

    def turned(self, took: int) -> None:
        """Another turn; once there are many, two neighbours become one."""
        if self.turns % self.each:
            self.sums[-1] += took
        else:
            if len(self.sums) == KEPT_TURNS:
                pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
                self.sums, self.each = [sum(pair) for pair in pairs], 2 * self.each
            self.sums.append(took)
        self.turns += 1


class Loaders:
    """Knows the loaders of one thread, whose waits `Pauses` tells. What workers take they write down themselves, in
    memory that they share."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._made: dict[int, str] = {}  # where each data set's loader was made
        self._known: dict[int, _Loader] = {}  # by data set
        self._passes: dict[int, int] = {}  # of each iterator, when its first batch came
        self._patches = Patches()
        self._shared = mmap.mmap(-1, _SLOTS * _SLOT.size)

    def begin(self) -> None:
        from torch.utils.data import dataloader

        from keepbusy.torch_names.hooks import FETCH

        self._patches.wrap(dataloader.DataLoader, "__init__", self._made_here)
        for fetch in FETCH:
            self._patches.wrap(*fetch, self._fetch)

    def end(self) -> None:
        """Leave everything as it was."""
        self._patches.undo()

    def used(self) -> list[LoaderUse]:
        """The one that was waited for longest comes first."""
        cores, prepared, found = len(os.sched_getaffinity(0)), self._prepared(), list[LoaderUse]()
        for dataset, its in self._known.items():
            busy, count, took = prepared.get(dataset, (0, 0, 0))
            in_worker = took // count if count else NONE
            seen = (its.place, its.workers, its.prefetch, its.batches, its.waited, its.began, in_worker, its.looped)
            means = tuple(total // its.each for total in its.sums[: its.turns // its.each])
            busy = min(busy, its.workers) or NONE
            found.append(LoaderUse(*seen, cores, passes=its.passes, turns=means, each=its.each, busy=busy))
        return sorted(found, key=lambda use: -use.waited)

    def _prepared(self) -> dict[int, tuple[int, int, int]]:
        """Of each data set, how many processes fetched batches, how many these were and how long that took."""
        found: dict[int, tuple[int, int, int]] = {}
        for slot in range(_SLOTS):
            dataset, *more = _SLOT.unpack_from(self._shared, slot * _SLOT.size)
            processes, count, took = found.get(dataset, (0, 0, 0))
            found[dataset] = processes + 1, count + more[0], took + more[1]
        return found

    def _made_here(self, original: Function, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, dataset, *args, **kwargs)
        users = (line for line in program_lines(sys._getframe(1)) if kind_of(line[0].co_filename) == USER)
        self._made[id(dataset)] = next((f"{shown(code.co_filename)}:{line}" for code, line in users), "")

    def batch_taken(self, iterator: Any, before: int, after: int) -> None:
        """From when to when the program waited for it."""
        from keepbusy.torch_names import hooks

        dataset = id(hooks.dataset_of(iterator))
        its = self._known.setdefault(dataset, _Loader(self._made.get(dataset, "")))
        its.workers, its.prefetch = hooks.workers_of(iterator), getattr(iterator, hooks.PREFETCH_FACTOR, None) or 0
        its.batches += 1
        its.waited += after - before
        first = self._passes.get(id(iterator))
        if first is None or hooks.batches_given(iterator) <= 1:  # an earlier pass's iterator may have lain there
            its.began += after - before
            its.passes += 1
        else:
            its.looped += after - first
            its.turned(before - first)
        self._passes[id(iterator)] = after

    def _fetch(self, original: Function, fetcher: Any, index: Any) -> Any:
        """Runs in the workers, which were forked with it; in the program itself where there are none.

        A worker that was forked knows its data set by the same number; each writes to a row of its own.
        """
        before = self._clock()
        result = original(fetcher, index)
        with suppress(Exception):
            took, dataset = self._clock() - before, id(fetcher.dataset)
            at = (31 * os.getpid() + (dataset >> 4)) % _SLOTS * _SLOT.size
            known, count, total = _SLOT.unpack_from(self._shared, at)
            if known != dataset:
                count = total = 0  # of a process that is gone, and that had the same place
            _SLOT.pack_into(self._shared, at, dataset, count + 1, total + took)
        return result
