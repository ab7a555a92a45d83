"""A file of PyTorch's profiler -> `Trace`: what PyTorch wrote, in Kineto's own terms, before anyone interprets it.

Its rows are turned into columns batch by batch, as they are unpacked, so that neither is ever held whole.
Several files are read at once, each by a process. Last, which rank of a run each of them is.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import compress
from math import prod
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Thread as PythonThread
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import LARGEST_RANK, NONE, Ints, Mask, MemoryUse, Table, column
from keepbusy.traces.json_events import (
    LARGEST_FLOAT_TIME,
    RECORD,
    Arguments,
    Batches,
    Complete,
    EventBatch,
    Instant,
    Naming,
    OnProgress,
)
from keepbusy.traces.kineto_names import CAPABILITY, CATEGORIES, OLD_OPERATOR, RANK, WORLD_SIZE, Category

EachOf: TypeAlias = Callable[[list[str], Callable[[str], Any], OnProgress | None], Iterator[tuple[int, Any]]]
"""How each of many files is read: the names, what is made of one, and who wants to know."""
_Made = TypeVar("_Made")

WORTH_PROCESSES = 200 << 20
"""Bytes of JSON below which starting processes takes longer than they save."""
_USUAL_RATIO = 13
_AUTOGRAD = {"CPU functions", "CUDA functions"}
"""The processes of the autograd profiler."""
_OLD_OPERATOR = len(Category)
_NUMBERS = {name: int(category) for name, category in CATEGORIES.items()} | {OLD_OPERATOR: _OLD_OPERATOR}
_ON_DEVICE = np.isin(
    np.arange(len(Category)), [Category.KERNEL, Category.COPY, Category.FILL, Category.SYNC, Category.RECORD]
)
_CALL = np.isin(np.arange(len(Category)), [Category.RUNTIME, Category.DRIVER])
_LARGEST_TIME = 2.0**52
"""Microseconds beyond which nanoseconds would leave 64 bits."""
_NO_ARGUMENTS = Arguments()
_ONE_CLOCK = 3_600 * 10**9
"""Traces that begin further apart than an hour are of hosts with clocks of their own."""
_IN_NAME = re.compile(r"rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)


def read_trace(path: str | Path, on_progress: OnProgress | None = None) -> Trace:
    """One file, .json or .json.gz, of PyTorch 1.8 and later; raises `BadInput` for anything else."""
    try:
        return _read(os.fspath(path), on_progress)
    except MemoryError:
        raise BadInput(f"{path} needs more memory than this machine has; record fewer steps.") from None


def _read(path: str, on_progress: OnProgress | None) -> Trace:
    collector, batches = _Collector(), Batches(path, on_progress)
    for batch in batches:
        collector.add(batch)
    facts, decoder = batches.facts(), batches.decoder
    skipped = decoder.bad + collector.skipped
    if 2 * skipped > decoder.bad + decoder.read:
        raise BadInput(
            f"{path} has {skipped} events of {decoder.bad + decoder.read} that cannot be read "
            f"({decoder.fault or 'no sound times'}); give a trace as PyTorch's profiler exported it."
        )
    if not collector.count:
        raise _without_events(path, facts, collector.foreign)
    return collector.trace(path, facts, skipped)


def _without_events(path: str, facts: dict[str, Any], kinds: set[tuple[str, str]]) -> BadInput:
    """What a file is that holds none of PyTorch's events. `kinds`: categories and processes of the others."""
    about, categories = facts.get("metadata"), sorted({category for category, _ in kinds if category})
    if {process for _, process in kinds} & _AUTOGRAD:
        what = f"is of the autograd profiler, which does not tell which call launched which kernel; {RECORD}."
    elif isinstance(about, dict) and "highres-ticks" in about:
        what = f"is of the profiler of JAX and TensorFlow; keepbusy reads PyTorch's: {RECORD}."
    elif categories:
        known = ", ".join(categories[:5])
        what = f"is of another profiler (its categories: {known}); keepbusy reads PyTorch's: {RECORD}."
    else:
        what = "holds no complete events (`ph: X`) of PyTorch's kinds; record at least two steps and export again."
    return BadInput(f"{path} {what}")


@dataclass(frozen=True, eq=False)
class Events(Table):
    """One complete event a row, in the order of the file. Times are nanoseconds; what an event does not say is NONE."""

    category: Ints = column(np.int8)
    name: Ints = column(np.int32)
    thread: Ints = column(np.int32)  # an index into Trace.threads
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    correlation: Ints = column(np.int64, NONE)
    sequence: Ints = column(np.int64, NONE)  # args."Sequence number", of operators


@dataclass(frozen=True, eq=False)
class DeviceEvents(Table):
    """What the events of a device say besides, which are a fifth of all or fewer; in the order of the file, too."""

    event: Ints = column(np.int32)  # its row among all events
    device: Ints = column(np.int32, NONE)
    stream: Ints = column(np.int64, NONE)
    size: Ints = column(np.int64, NONE)  # args.bytes
    blocks: Ints = column(np.int32)  # args.grid
    collective: Ints = column(np.int32, NONE)  # an index into Trace.collectives
    awaited_stream: Ints = column(np.int64, NONE)  # args.wait_on_stream
    awaited_record: Ints = column(np.int64, NONE)  # args.wait_on_cuda_event_record_corr_id


class Thread(NamedTuple):
    """Where an event stood: a host thread, or a stream of a device."""

    process: str
    number: str
    name: str


class Collective(NamedTuple):
    """What an NCCL kernel says of itself."""

    name: str
    elements_in: int
    elements_out: int
    dtype: str
    group: str  # "Process Group Name"
    group_size: int
    ranks: tuple[int, ...]  # of the group, empty where the trace abbreviates them
    peer: int = NONE  # of a send or recv: the other rank


class TracedDevice(NamedTuple):
    """What a trace says of a device."""

    name: str
    capability: int  # the major number of CUDA's; 0 where nobody knows


@dataclass(frozen=True, eq=False)
class Trace:
    """One file."""

    path: str
    events: Events
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[Collective, ...]
    rank: int | None = None
    """Which one of its run it says it is."""
    world: int | None = None
    """How many ranks the run has, of which some may not be given."""
    devices: tuple[TracedDevice, ...] = ()
    """That its program saw."""
    stacks: bool = False
    """Whether it tells of Python's frames."""
    skipped: int = 0
    """Events that could not be read."""
    device_events: DeviceEvents = field(default_factory=lambda: DeviceEvents.of(0))
    memory: MemoryUse = field(default_factory=lambda: MemoryUse.of(0))
    """Its lanes are indices into `threads`."""

    def named(self, fits: Callable[[str], object]) -> Mask:
        """Which events have a name that fits."""
        return np.array([bool(fits(name)) for name in self.names], bool)[self.events.name]

    def begins(self, *beginnings: str) -> Mask:
        """Which events have a name that begins with one of these."""
        return self.named(lambda name: name.startswith(beginnings))

    @property
    def is_call(self) -> Mask:
        """Which events are calls of CUDA or its like."""
        return (self.events.category == Category.RUNTIME) | (self.events.category == Category.DRIVER)


class _Collector:
    """Takes the rows of one trace, and makes its columns of them."""

    def __init__(self) -> None:
        self.names, self.threads = _KeyNumbers(), _ThreadNumbers()
        self.collectives, self.blocks = _KeyNumbers(), _GridSizes()
        self.skipped = 0
        self.foreign: set[tuple[str, str]] = set()  # categories and processes of a few events that are not PyTorch's
        self.count = 0
        self._memory = [MemoryUse.of(0)]
        self._events: list[Events] = []
        self._device_events: list[DeviceEvents] = []

    def add(self, batch: EventBatch) -> None:
        self.threads.label(batch.naming)
        if batch.memory:
            self._memory.append(_memory(batch.memory, self.threads))
        complete, category = _telling(batch.complete)
        if not complete:
            self.foreign.update((row.cat[:40], str(row.pid)[:40]) for row in batch.complete[:8])
        start, end, sound = _times(complete)
        if not sound.all():
            self.skipped += int((~sound).sum())
            complete, category = list(compress(complete, sound)), category[sound]
            start, end = start[sound], end[sound]
        if complete:
            names, threads = self.names, self.threads
            on_device = _ON_DEVICE[category]
            self._events.append(
                Events(
                    category=category,
                    name=np.array([names[row.name] for row in complete], np.int32),
                    thread=np.array([threads[row.pid, row.tid] for row in complete], np.int32),
                    start=start,
                    end=end,
                    correlation=_said(complete, _CALL[category] | on_device, "correlation"),
                    sequence=_said(complete, category == Category.OPERATOR, "sequence"),
                )
            )
            self._device_events.append(self._on_device(complete, np.flatnonzero(on_device), category))
            self.count += len(complete)

    def trace(self, path: str, facts: Mapping[str, Any], skipped: int) -> Trace:
        """Of all rows so far, of which there are some."""
        said, devices = facts.get("distributedInfo"), facts.get("deviceProperties")
        place = said if isinstance(said, dict) else {}
        return Trace(
            path=path,
            events=Events.concatenate(self._events),
            device_events=DeviceEvents.concatenate(self._device_events),
            memory=MemoryUse.concatenate(self._memory),
            names=tuple(self.names),
            threads=self.threads.table(),
            collectives=tuple(self.collectives),
            rank=_below(LARGEST_RANK, place.get(RANK)),
            world=_below(LARGEST_RANK + 1, place.get(WORLD_SIZE)) or None,
            devices=tuple(map(_device, devices if isinstance(devices, list) else ())),
            stacks=bool(facts.get("with_stack")),
            skipped=skipped,
        )

    def _on_device(self, complete: list[Complete], rows: Ints, category: Ints) -> DeviceEvents:
        """What these rows of the batch say besides."""
        complete, category = [complete[row] for row in rows.tolist()], category[rows]
        arguments, command = [row.args or _NO_ARGUMENTS for row in complete], category <= Category.FILL
        device = _either([one.device for one in arguments], [row.pid for row in complete], command)
        collectives = [
            self.collectives[_collective(one)] if is_kernel and isinstance(one.collective, str) else NONE
            for is_kernel, one in zip((category == Category.KERNEL).tolist(), arguments, strict=True)
        ]
        return DeviceEvents(
            event=self.count + rows,
            device=np.where(np.abs(device) < 1 << 31, device, NONE),
            stream=_either([one.stream for one in arguments], [row.tid for row in complete], command),
            size=_integers([one.size for one in arguments]),
            blocks=np.array([self.blocks[bytes(one.grid)] for one in arguments], np.int32),
            collective=np.array(collectives, np.int64),
            awaited_stream=_integers([one.awaited_stream for one in arguments]),
            awaited_record=_integers([one.awaited_record for one in arguments]),
        )


def _below(limit: int, said: Any) -> int | None:
    return said if isinstance(said, int) and 0 <= said < limit else None


def _device(said: Any) -> TracedDevice:
    about = said if isinstance(said, dict) else {}
    capability = about.get(CAPABILITY)
    return TracedDevice(str(about.get("name", "")), capability if isinstance(capability, int) else 0)


class _KeyNumbers(dict[Any, int]):
    """Numbers its keys in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = index = len(self)
        return index


class _GridSizes(dict[bytes, int]):
    """How many there are in a grid, by its text."""

    def __missing__(self, text: bytes) -> int:
        self[text] = 0
        with suppress(ValueError, RecursionError):  # some other tool's, or none
            count = prod(msgspec.json.decode(text, type=list[int]))
            self[text] = count if 0 < count < 1 << 31 else 0
        return self[text]


class _ThreadNumbers(dict[tuple[Any, Any], int]):
    """The same for threads, which may call themselves 7 or "7"."""

    def __init__(self) -> None:
        self.spelled = _KeyNumbers()
        self.labels: dict[int, str] = {}

    def __missing__(self, key: tuple[Any, Any]) -> int:
        self[key] = index = self.spelled[str(key[0]), str(key[1])]
        return index

    def label(self, naming: list[Naming]) -> None:
        for row in naming:
            if row.name == "thread_name" and row.args and isinstance(row.args.name, str):
                self.labels[self[row.pid, row.tid]] = row.args.name

    def table(self) -> tuple[Thread, ...]:
        return tuple(Thread(process, number, self.labels.get(i, "")) for (process, number), i in self.spelled.items())


def _memory(rows: list[Instant], threads: _ThreadNumbers) -> MemoryUse:
    time = np.nan_to_num(np.clip([row.ts for row in rows], -_LARGEST_TIME, _LARGEST_TIME))
    held = [row.args for row in rows if row.args is not None]
    numbers = {
        name: _integers([getattr(one, name) for one in held])
        for name in ("device", "block", "size", "allocated", "reserved")
    }
    lane = np.array([threads[row.pid, row.tid] for row in rows], np.int64)
    return MemoryUse.of(len(rows), lane=lane, time=np.rint(1000 * time).astype(np.int64), **numbers)


def _telling(complete: list[Complete]) -> tuple[list[Complete], Ints]:
    """The events that say something about who waits for whom, and their categories."""
    category: Ints = np.array([_NUMBERS.get(row.cat, NONE) for row in complete], np.int8)
    for row in np.flatnonzero(category == _OLD_OPERATOR).tolist():
        category[row] = Category.ANNOTATION if "#" in complete[row].name else Category.OPERATOR
    telling = category != NONE
    return (complete, category) if telling.all() else (list(compress(complete, telling)), category[telling])


def _said(complete: list[Complete], telling: Mask, what: str) -> Ints:
    """What the arguments of these events say, and NONE for the others."""
    said, rows = np.full(len(complete), NONE, np.int64), np.flatnonzero(telling)
    arguments = [complete[row].args or _NO_ARGUMENTS for row in rows.tolist()]
    said[rows] = _integers(list(map(attrgetter(what), arguments)))
    return said


def _times(complete: list[Complete]) -> tuple[Ints, Ints, Mask]:
    """Start and end in nanoseconds, and which of them are sound.

    The fractions are added before they are rounded, so an event that ends with its parent in the
    file still does.
    """
    ts, dur = [row.ts for row in complete], [row.dur for row in complete]
    start, length = np.array(ts, np.float64), np.array(dur, np.float64)
    sound = (np.abs(start) < _LARGEST_TIME) & (length >= 0) & (length < _LARGEST_TIME)
    if len(start) and start[sound].max(initial=0) > LARGEST_FLOAT_TIME and isinstance(ts[0], Decimal):
        return _exact(ts, sound), _exact([a + b for a, b in zip(ts, dur, strict=True)], sound), sound
    start, length = np.where(sound, start, 0), np.where(sound, length, 0)
    whole, whole_length = np.floor(start), np.floor(length)
    fraction = start - whole
    base = whole.astype(np.int64) * 1000
    end = base + whole_length.astype(np.int64) * 1000 + _rounded(fraction + (length - whole_length))
    return base + _rounded(fraction), end, sound


def _rounded(microseconds: npt.NDArray[np.float64]) -> Ints:
    return np.rint(microseconds * 1000).astype(np.int64)


def _exact(times: list[Any], sound: Mask) -> Ints:
    return np.array([round(time * 1000) if ok else 0 for time, ok in zip(times, sound.tolist(), strict=True)], np.int64)


def _integers(values: list[Any]) -> Ints:
    """What is no integer of 64 bits is not known."""
    try:
        numbers = np.array(values, np.int64)
        if numbers.ndim == 1:
            return numbers
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([one if isinstance(one, int) and -(1 << 63) <= one < 1 << 63 else NONE for one in values], np.int64)


def _either(said: list[Any], stood: list[Any], wanted: Mask) -> Ints:
    """What the arguments say, else, of a command, where its row stood."""
    numbers = _integers(said)
    unknown = (numbers == NONE) & wanted
    return np.where(unknown, _integers(stood), numbers) if unknown.any() else numbers


def _collective(one: Arguments) -> Collective:
    peer = _number(one.from_rank) if _number(one.from_rank) != NONE else _number(one.to_rank)
    return Collective(
        str(one.collective),
        _number(one.elements_in),
        _number(one.elements_out),
        str(one.dtype),
        str(one.group),
        _number(one.group_size),
        _ranks(one.ranks),
        peer,
    )


def _number(value: Any) -> int:
    return int(_integers([value])[0])


def _ranks(said: Any) -> tuple[int, ...]:
    """Either a list or one in a string, which ends with `...` when it is long."""
    if isinstance(said, list):
        return tuple(one for one in said if isinstance(one, int))
    if not isinstance(said, str) or "." in said:
        return ()
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", said))


def read_traces(paths: Sequence[str | Path], on_progress: OnProgress | None = None) -> list[Trace]:
    """All these files in their order, by a process for each core where that pays."""
    names = [os.fspath(path) for path in paths]
    if len(names) == 1:
        return [read_trace(names[0], on_progress)]
    traces = dict[int, Trace]()
    for index, answer in each_of(names, read_trace, on_progress):
        if isinstance(answer, BadInput):
            raise answer
        traces[index] = answer
    return [traces[index] for index in range(len(names))]


def each_of(
    names: list[str], made: Callable[[str], _Made], on_progress: OnProgress | None = None
) -> Iterator[tuple[int, _Made | BadInput]]:
    """What is made of each file, as it comes, by a process for each core where that pays. None of them is kept here.

    `made`: a function of a module, which the processes import.
    """
    sizes, done = [_size(name) for name in names], 0
    hands = deal(sizes, len(os.sched_getaffinity(0))) if sum(sizes) >= WORTH_PROCESSES and sys.executable else []
    nobody: Iterator[tuple[int, _Made | BadInput | None]] = ((index, None) for index in range(len(names)))
    for index, answer in _elsewhere(names, hands, made) if len(hands) > 1 else nobody:
        yield index, tried(names[index], made) if answer is None else answer
        done += sizes[index]
        if on_progress:
            on_progress(f"reading {len(names)} traces", done / max(sum(sizes), 1))


def tried(name: str, made: Callable[[str], _Made]) -> _Made | BadInput:
    try:
        return made(name)
    except BadInput as error:
        return error


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size * (_USUAL_RATIO if name.endswith(".gz") else 1)
    except (OSError, ValueError):
        return 0


def deal(sizes: list[int], processes: int) -> list[list[int]]:
    """Which files each process reads: the largest first, always to the one with the least to do."""
    hands: list[list[int]] = [[] for _ in range(min(processes, len(sizes)))]
    loads = [0] * len(hands)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        hands[least].append(index)
        loads[least] += sizes[index]
    return hands


def _elsewhere(
    names: list[str], hands: list[list[int]], made: Callable[[str], _Made]
) -> Iterator[tuple[int, _Made | BadInput | None]]:
    """Answers as they come. None stands for whatever a process failed to say: that file is to be read here."""
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for hand in hands:
        PythonThread(target=_listen, args=(names, hand, made, answers), daemon=True).start()
    for _ in names:
        yield answers.get()


def _listen(
    names: list[str], hand: list[int], made: Callable[[str], _Made], answers: SimpleQueue[tuple[int, Any]]
) -> None:
    """A plain Python command reads these files: a multiprocessing pool would run the user's script once more."""
    left = list(hand)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from {__name__} import serve; from {made.__module__} import {made.__name__} as made; serve(made)"
    call = [sys.executable, "-c", code, *[names[index] for index in hand]]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(call, env=environment, **pipes) as process:  # type: ignore[call-overload]
            while left:
                answer = pickle.load(process.stdout)  # from our own child, never from a file
                answers.put((left.pop(0), answer))
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        for index in left:
            answers.put((index, None))


def serve(made: Callable[[str], object]) -> None:
    """What such a process does: reads the files it was given and writes to its parent what it made of each."""
    for name in sys.argv[1:]:
        pickle.dump(tried(name, made), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


def ranks_of(traces: Sequence[Trace]) -> list[int]:
    """By `distributedInfo`, else by the file's name, else by the order given; refused if they are not of one run."""
    ranks = _ranks_told(traces)
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks) or len(set(known)) < len(known):
        raise BadInput(
            f"{traces[0].path} and {traces[-1].path} are not the ranks of one run: {len(traces)} traces name "
            f"{len(set(known))} different ranks; give the traces of one run, each rank's once."
        )
    if len(traces) > 1:  # one file alone may be any rank of any run
        _refuse_other_runs(traces)
    return known


def _ranks_told(traces: Sequence[Trace]) -> list[int | None]:
    stated = [trace.rank for trace in traces]
    if None not in stated and len(set(stated)) == len(stated):
        return stated
    found = [_IN_NAME.search(Path(trace.path).name) for trace in traces]
    named = [int(one[1]) if one else None for one in found]
    if None not in named and len(set(named)) == len(named):
        return named
    return list(range(len(traces))) if set(stated) == {None} else stated


def _refuse_other_runs(traces: Sequence[Trace]) -> None:
    sizes = {trace.world for trace in traces}
    if len(sizes) > 1:
        raise BadInput(
            f"{traces[0].path} and the other traces are of runs with {sorted(map(str, sizes))} ranks; "
            "give the traces of one run."
        )
    starts = [int(trace.events.start.min()) for trace in traces]
    ends = [int(trace.events.end.max()) for trace in traces]
    if max(starts) > min(ends) and max(starts) - min(starts) < _ONE_CLOCK:
        raise BadInput(
            f"{traces[0].path} and the other traces do not overlap in time; give the traces that one run's ranks "
            "recorded together."
        )
