"""More workers for a loader that its loop waits for.

A loader is watched as it runs. If its loop waits for batches, so many workers prepare them as it takes, and hand them
on in the program's order. Whether a sample is the same in whichever process it is prepared is seen each time: it is if
preparing it drew no random number and changed nothing that the data set can reach. The first batch of which that is not
true, and all after it, are prepared as the program has it: nothing of it was handed on yet.
"""

from __future__ import annotations

import dis
import enum
import math
import multiprocessing
import os
import pathlib
import random
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import _utils as loading
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from keepbusy.fix.live.switch import FixSwitch, makes_on_host, same_bits
from keepbusy.instrument.lines import USER, kind_of
from keepbusy.instrument.patches import Function, Patches
from keepbusy.timeline.figures import duration

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
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, re.Pattern, pathlib.PurePath, range, slice)
_TORCH = (torch.dtype, torch.device, torch.Size, torch.memory_format)
_CODE = (types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType)
_DEPTH, _PARTS, _NODES = 8, 64, 4000
"""So deep, so many parts of one container, so many things in all are looked at."""
_WHOLE = 4096
"""Bytes of an array that are compared; of a larger one every so many-th."""


class CheckedBatches(Dataset[Any]):  # type: ignore[misc]
    """In a worker: batches by their indices, and whether making them left everything as it was."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._fetcher = loading.fetch._MapDatasetFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last)
        self._roots = loader.dataset, loader.collate_fn
        self._alone = loader.num_workers == 0

    def begin(self, _worker: int) -> None:
        """What a sample could ask about its worker is what it would hear from the program's own, or an error."""
        loading.worker._worker_info = None if self._alone else _Unknown()

    def __getitem__(self, indices: list[int]) -> tuple[Any, bool]:
        before = _random_states(), _reached(*self._roots)
        batch = self._fetcher.fetch(indices)
        return batch, before == (_random_states(), _reached(*self._roots))


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
        """Nobody waits for workers that have nothing to hand in. One may have held a lock that it shares with us when
        it was ended, so their loader is not to say good-bye to them once it is collected: it would wait for ever."""
        workers, self._workers = self.__dict__.get("_workers"), None
        if workers is not None and not workers._shutdown:
            workers._shutdown = True
            loading.signal_handling._remove_worker_pids(id(workers))
            workers._worker_pids_set = False
            for one in workers._workers:
                one.terminate()
            if hasattr(workers, "_pin_memory_thread"):
                workers._pin_memory_thread_done_event.set()
            for queue in (workers._worker_result_queue, *workers._index_queues):
                queue.cancel_join_thread()

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
        before = _random_states()
        batch = next(self._own)
        self._clean = self._clean and before == _random_states()
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
            self._seen = self._reached()
        except _Unshared as reason:
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

    def _reached(self) -> list[Any]:
        return _reached(self._loader.dataset, self._loader.collate_fn)

    def _from_workers(self) -> Any:
        if not self._loader.num_workers and self._reached() != self._seen:
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
        self.switch.about = f"batches prepared by {workers} workers instead of {before or 'the program itself'}"
        self.switch.count(sys._getframe(3))

    def hired(self, loader: DataLoader[Any], count: int) -> None:
        self.known[id(loader)] = count
        self._begin_again()

    def judge(self, loader: DataLoader[Any], before: float, after: float) -> None:
        self.switch.notes.append(
            f"an iteration took {duration(round(before))} before and {duration(round(after))} since"
        )
        if after > (1 - _WORTH_KEEPING) * before:
            self.leave(loader, "more workers saved nothing, so the next epoch uses the program's own")
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
        and makes_on_host()  # or the device draws its seeds
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


class _Unshared(Exception):  # noqa: N818 -- it is a finding, and always caught
    """Why another process cannot stand in, as the end of a sentence."""


def _reached(*roots: Any) -> list[Any]:
    """The state of all that they can reach: equal as long as nothing of it changed. Raises _Unshared.

    That is what hangs on a data set and on the functions that work on it: their attributes, what they close over, and
    the names of their modules that they use. Numbers, texts, arrays, tensors of the host and containers of them can be
    looked at and compared; an open file, a lock or a tensor of the GPU cannot be shared with another process.
    """
    walk = _Walk()
    return [one for root in roots for one in walk.of(root, 0)]


def _random_states() -> list[Any]:
    """Of Python, NumPy and PyTorch."""
    numpy = sys.modules.get("numpy")
    of_numpy = _comparable(numpy.random.get_state()) if numpy else ()
    return [random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()]


def _comparable(state: Any) -> tuple[Any, ...]:
    return state[0], state[1].tobytes(), *state[2:]


class _Walk:
    """Meets each thing once."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}

    def of(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, _PLAIN):
            yield value
            return
        if isinstance(value, (*_TORCH, *_CODE)) or id(value) in self._met or depth > _DEPTH:
            return
        self._met[id(value)] = value
        if len(self._met) > _NODES:
            raise _Unshared("it holds too much to be looked at")
        yield type(value)
        yield from self._parts(value, depth + 1)

    def _parts(self, value: Any, depth: int) -> Iterator[Any]:
        generator = _generator_state(value)
        if generator is not None:
            yield generator
        elif isinstance(value, torch.Tensor):
            yield from _of_tensor(value)
        elif hasattr(value, "__array_interface__"):
            yield from _of_array(value)
        elif isinstance(value, list | tuple | set | frozenset | dict):
            yield from self._of_container(value, depth)
        elif isinstance(value, types.FunctionType | types.MethodType):
            yield from self._of_function(value, depth)
        elif isinstance(value, type):
            yield from self._of_class(value, depth)
        else:
            yield from self._of_object(value, depth)

    def _of_container(self, value: Any, depth: int) -> Iterator[Any]:
        yield len(value)
        parts = iter(value.items()) if isinstance(value, dict) else iter(value)
        for _, one in zip(range(_PARTS), parts, strict=False):
            yield from self.of(one, depth)

    def _of_function(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, types.MethodType):
            yield from self.of(value.__self__, depth)
            value = value.__func__
        if not isinstance(value, types.FunctionType):
            return
        for cell in value.__closure__ or ():
            yield from self.of(cell.cell_contents, depth)
        yield from self.of(value.__defaults__, depth)
        if kind_of(value.__code__.co_filename) == USER:
            for name in _globals_of(value.__code__):
                if name in value.__globals__:
                    yield from self.of(value.__globals__[name], depth)

    def _of_class(self, value: type, depth: int) -> Iterator[Any]:
        if kind_of(getattr(sys.modules.get(value.__module__), "__file__", None) or "") == USER:
            for name, one in vars(value).items():
                if isinstance(one, types.FunctionType) or not name.startswith(("__", "_abc_")):
                    yield from self.of(one, depth)

    def _of_object(self, value: Any, depth: int) -> Iterator[Any]:
        held = getattr(value, "__dict__", None)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        if held is None and not slots and not isinstance(value, staticmethod | classmethod | property):
            raise _Unshared(f"it holds a {type(value).__name__}, which another process may not share")
        yield from self.of(type(value), depth)
        yield from self.of(held or {}, depth)
        for name in slots:
            yield from self.of(getattr(value, name, None), depth)


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of its module that a function uses, and that the functions within it use."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _globals_of(one)]
    own = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *inner]))


def _generator_state(value: Any) -> Any:
    """Of a generator of random numbers."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value).__module__.startswith("numpy.random"):
        source = getattr(value, "bit_generator", None)
        return repr(source.state if source is not None else value.get_state())
    return None


def _of_tensor(value: torch.Tensor) -> Iterator[Any]:
    if value.device.type != "cpu":
        raise _Unshared("it holds a tensor of the GPU")
    if value.is_inference():
        raise _Unshared("it holds a tensor of inference mode, whose changes nobody counts")
    yield value._version
    yield value.shape
    if value.layout is torch.strided:
        yield value.data_ptr()


def _of_array(value: Any) -> Iterator[Any]:
    yield value.__array_interface__["data"][0]
    yield value.shape
    if value.dtype != object:
        flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()[:_WHOLE]
        yield flat[:: max(1, flat.nbytes // _WHOLE)].tobytes()
