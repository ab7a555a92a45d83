"""More workers for a loader that its loop waits for.

A loader is watched as it runs. If its loop waits for batches, so many workers prepare them as it takes, and hand them
on in the program's order. Whether a sample is the same in whichever process it is prepared is seen each time: it is if
preparing it drew no random number and changed nothing that the data set can reach. The first batch of which that is not
true, and all after it, are prepared as the program has it: nothing of it was handed on yet.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import _utils as loading
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from keepbusy.fix.live.switch import FixSwitch, same_bits
from keepbusy.fix.loaders.reach import Reach, Unshared, random_states
from keepbusy.instrument.patches import Function, Patches
from keepbusy.report.words import duration

_WATCHED = 4
"""Batches that say how long the loop waits, once the first are over."""
_WAITS = 0.1
"""Of the loop's time: who waits less has workers enough."""
_COMPARED = 2
"""Batches that are prepared both here and by a worker."""
_ROOM = 3
"""Batches in shared memory for each worker."""
_WORTH_KEEPING = 0.02
"""Of a turn: workers that save less are let go."""


class CheckedBatches(Dataset[Any]):  # type: ignore[misc]
    """In a worker: batches by their indices, and whether making them left everything as it was."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._fetcher = loading.fetch._MapDatasetFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last)
        self._reach = Reach(loader.dataset, loader.collate_fn)
        self._alone = loader.num_workers == 0

    def begin(self, _worker: int) -> None:
        """What a sample could ask about its worker is what it would hear from the program's own, or an error."""
        loading.worker._worker_info = None if self._alone else _Unknown()

    def __getitem__(self, indices: list[int]) -> tuple[Any, bool]:
        before = random_states(), self._reach.state()
        batch = self._fetcher.fetch(indices)
        return batch, before == (random_states(), self._reach.state())


class _Unknown:
    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"a sample asks for its worker's {name}")


class Remaining:
    """Indices of the batches that are still to come, and those given out whose batch has not arrived."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices
        self.given: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        for one in self._indices:
            self.given.append(one)
            yield one

    def all(self) -> Iterator[list[int]]:
        return chain(self.given, self._indices)


class FedLoop:
    """What a loop goes through in place of the loader's own iterator."""

    def __init__(self, fix: MoreWorkers, loader: DataLoader[Any], plain: Callable[[], Any]) -> None:
        self._fix, self._loader, self._begin = fix, loader, plain
        self._given = 0
        self._states = [(one, one.get_state()) for one in (torch.default_generator, loader.generator) if one]
        self._own: Any = plain()
        self._workers: Any = None
        self._remaining = Remaining(iter(()))
        self._watch: Watch | None = Watch(2 + 3 * loader.num_workers)
        self._turn, self._clean = 0.0, True

    def __iter__(self) -> FedLoop:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Nobody waits for workers that have nothing to hand in."""
        workers, self._workers = self.__dict__.get("_workers"), None
        if workers is not None and not workers._shutdown:
            loading.signal_handling._remove_worker_pids(id(workers))
            workers._worker_pids_set = False
            for one in workers._workers:
                one.terminate()

    def __next__(self) -> Any:
        if not self._given and not self._loader.num_workers and id(self._loader) in self._fix.known:
            self._employ(self._fix.known[id(self._loader)], None)
            self._watch = None
        watch = self._watch
        with watch or nullcontext():
            batch = self._next()
        if watch is not None and watch is self._watch and watch.over:
            self._decide(watch, batch)
        self._given += 1
        return batch

    def _next(self) -> Any:
        if self._workers is None:
            return self._plainly()
        if self._own is not None and self._loader.num_workers:  # those that its own workers were asked for
            try:
                return next(self._own)
            except StopIteration:
                self._own = None
        return self._from_workers()

    def _plainly(self) -> Any:
        """And where the program has no workers, whether a sample leaves everything as it was."""
        if self._watch is None or self._loader.num_workers or not self._given:  # the first one asks for a seed
            return next(self._own)
        before = random_states()
        batch = next(self._own)
        self._clean = self._clean and before == random_states()
        return batch

    def _decide(self, watch: Watch, batch: Any) -> None:
        """Once it is steady: how many workers it takes; and later, what came of them."""
        self._watch, before = None, self._loader.num_workers
        if self._workers is not None:
            self._fix.judge(self._loader, self._turn, watch.turn)
            return
        if watch.wait < _WAITS * watch.turn:
            return
        making = watch.turn * before if before else watch.wait
        count = min(self._fix.cores - 1, math.ceil(making / max(watch.turn - watch.wait, 1)) + 1)
        if count > before:
            self._turn = watch.turn
            self._employ(count, batch)
            self._watch = Watch(2 * count + 3 * before) if self._workers is not None else None

    def _employ(self, count: int, batch: Any) -> None:
        why = "" if self._clean else "its samples draw random numbers"
        room = _room_in_shared_memory() // (2 * _ROOM * max(1, _size(batch)))
        try:
            self._reach = Reach(self._loader.dataset, self._loader.collate_fn)
            self._seen = self._reach.state()
        except Unshared as reason:
            why = str(reason)
        if count > room:
            why = "there is no room in shared memory"
        if why:
            self._fix.leave(self._loader, f"no more workers: {why}")
            return
        rest = Remaining(self._own._sampler_iter)
        if self._loader.num_workers:
            self._own._sampler_iter = iter(())
        checked = CheckedBatches(self._loader)
        self._remaining, self._count = rest, count
        self._fix.hired(self._loader, count)
        self._workers = iter(
            DataLoader(
                checked,
                batch_size=None,
                sampler=rest,
                num_workers=count,
                collate_fn=_as_it_is,
                pin_memory=self._loader.pin_memory,
                worker_init_fn=checked.begin,
                generator=torch.Generator(),
            )
        )

    def _from_workers(self) -> Any:
        if not self._loader.num_workers and self._reach.state() != self._seen:
            return self._give_back("the loop changes its data set")
        try:
            batch, clean = next(self._workers)
        except StopIteration:
            if self._remaining.given:
                return self._give_back("a worker ended early")
            raise
        except Exception as error:
            return self._give_back(f"a worker failed: {type(error).__name__}")
        if not clean:
            return self._give_back("preparing a sample draws random numbers, or changes its data set")
        if not self._loader.num_workers and self._fix.switch.checked < _COMPARED:
            self._fix.switch.checked += 1
            again = self._own._dataset_fetcher.fetch(self._remaining.given[0])
            if not same_bits(batch, again):
                return self._give_back("a worker's sample came out different")
        del self._remaining.given[0]
        self._fix.count(self._count, self._loader.num_workers)
        return batch

    def _give_back(self, why: str) -> Any:
        """As the program has it, from this batch on."""
        self._fix.leave(self._loader, f"back to the program's own workers: {why}")
        self._watch = None
        self._let_go()
        if not self._loader.num_workers:
            self._own._sampler_iter = self._remaining.all()
            return next(self._own)
        now = [(one, one.get_state()) for one, _ in self._states]
        for one, state in self._states:
            one.set_state(state)
        self._own = self._begin()
        for _ in range(self._given):
            next(self._own)
        for one, state in now:
            one.set_state(state)
        return next(self._own)


class Watch:
    """Times of a loop once it is steady: how long it waits for a batch, and how long a turn takes."""

    def __init__(self, warm: int) -> None:
        self._to_come = warm + _WATCHED
        self._waits: list[int] = []
        self._turns: list[int] = []
        self._came = self._left = 0

    def __enter__(self) -> None:
        self._came = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter_ns()
        self._to_come -= 1
        if self._to_come < _WATCHED and self._left:
            self._waits.append(now - self._came)
            self._turns.append(now - self._left)
        self._left = now

    @property
    def over(self) -> bool:
        return self._to_come <= 0

    @property
    def wait(self) -> float:
        return sum(self._waits) / len(self._waits)

    @property
    def turn(self) -> float:
        return sum(self._turns) / len(self._turns)


class MoreWorkers:
    """`DataLoader` of PyTorch, as far as its order of samples is known beforehand."""

    def __init__(self, begin_again: Callable[[], None]) -> None:
        """`begin_again`: the trial of other fixes, when the loop has become another."""
        self.switch = FixSwitch("workers", "batches prepared by more workers")
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.known: dict[int, int] = {}
        """Of loaders without workers: how many they are to have from their first batch on."""
        self._left: set[int] = set()
        self._begin_again = begin_again

    def patch(self, patches: Patches) -> None:
        patches.replace(DataLoader, "__iter__", self._iterating)

    def count(self, workers: int, before: int) -> None:
        self.switch.about = f"batches prepared by {workers} workers in place of {before or 'the program itself'}"
        self.switch.count(sys._getframe(3))

    def hired(self, loader: DataLoader[Any], count: int) -> None:
        self.known[id(loader)] = count
        self._begin_again()

    def judge(self, loader: DataLoader[Any], before: float, after: float) -> None:
        self.switch.notes.append(f"a turn took {duration(round(before))} before, and {duration(round(after))} since")
        if after > (1 - _WORTH_KEEPING) * before:
            self.leave(loader, "from the next epoch on the program's own workers: more of them gained nothing")
        self._begin_again()

    def leave(self, loader: DataLoader[Any], why: str) -> None:
        self._left.add(id(loader))
        self.known.pop(id(loader), None)
        self.switch.notes.append(why)

    def _iterating(self, plain: Function) -> Function:
        def iterate(loader: DataLoader[Any]) -> Any:
            if not self.switch.on or id(loader) in self._left or not _is_foreseeable(loader):
                return plain(loader)
            return FedLoop(self, loader, lambda: plain(loader))

        return iterate


def _is_foreseeable(loader: DataLoader[Any]) -> bool:
    """Whether what it asks its data set for is settled when an epoch begins."""
    sampler = loader.sampler
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and (type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement))
        and getattr(sampler, "generator", None) is None  # it would be drawn from once all samples are asked for
        and loader.worker_init_fn is None
        and loader.multiprocessing_context is None
        and not loader.timeout
        and not loader.persistent_workers
        and multiprocessing.get_start_method() == "fork"
        and multiprocessing.parent_process() is None
        and not torch.utils.data.get_worker_info()
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _size(batch: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(batch) if isinstance(one, torch.Tensor))


def _room_in_shared_memory() -> int:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize
