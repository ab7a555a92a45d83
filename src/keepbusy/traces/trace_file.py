"""A file of PyTorch's profiler -> `Trace`: what PyTorch wrote, in Kineto's own terms, before any interpretation.

Rows become columns batch by batch, as they are unpacked, so that neither text nor rows are ever in memory completely.
Several files are read in parallel by processes. At the end: which rank of a run each file is.
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
"""Applies a function to many files: their names, the function, and a receiver of progress."""
_Made = TypeVar("_Made")

WORTH_PROCESSES = 200 << 20
"""Bytes of JSON. For less, starting processes takes longer than they save."""
_USUAL_RATIO = 13
_AUTOGRAD = {"CPU functions", "CUDA functions"}
"""The names of processes in traces of the autograd profiler."""
_OLD_OPERATOR = len(Category)
_NUMBERS = {name: int(category) for name, category in CATEGORIES.items()} | {OLD_OPERATOR: _OLD_OPERATOR}
_ON_DEVICE = np.isin(
    np.arange(len(Category)), [Category.KERNEL, Category.COPY, Category.FILL, Category.SYNC, Category.RECORD]
)
_CALL = np.isin(np.arange(len(Category)), [Category.RUNTIME, Category.DRIVER])
_LARGEST_TIME = 2.0**52
"""Microseconds. Larger times in nanoseconds would not fit into 64 bits."""
_NO_ARGUMENTS = Arguments()
_ONE_CLOCK = 3_600 * 10**9
"""Traces that begin more than an hour apart are of hosts with different clocks."""
_IN_NAME = re.compile(r"rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)


def read_trace(path: str | Path, on_progress: OnProgress | None = None) -> Trace:
    """Reads one .json or .json.gz file of PyTorch 1.8 or later; raises `BadInput` for anything else."""
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
    """The error for a file without PyTorch's events. `kinds`: categories and processes of the events in it."""
    metadata, categories = facts.get("metadata"), sorted({category for category, _ in kinds if category})
    if {process for _, process in kinds} & _AUTOGRAD:
        problem = f"is of the autograd profiler, which does not tell which call launched which kernel; {RECORD}."
    elif isinstance(metadata, dict) and "highres-ticks" in metadata:
        problem = f"is of the profiler of JAX and TensorFlow; keepbusy reads PyTorch's: {RECORD}."
    elif categories:
        listed = ", ".join(categories[:5])
        problem = f"is of another profiler (its categories: {listed}); keepbusy reads PyTorch's: {RECORD}."
    else:
        problem = "holds no complete events (`ph: X`) of PyTorch's kinds; record at least two steps and export again."
    return BadInput(f"{path} {problem}")


@dataclass(frozen=True, eq=False)
class Events(Table):
    """A row per complete event, in the order of the file. Times are nanoseconds; missing values are NONE."""

    category: Ints = column(np.int8)
    name: Ints = column(np.int32)
    thread: Ints = column(np.int32)  # an index into Trace.threads
    start: Ints = column(np.int64)
    end: Ints = column(np.int64)
    correlation: Ints = column(np.int64, NONE)
    sequence: Ints = column(np.int64, NONE)  # args."Sequence number", of operators


@dataclass(frozen=True, eq=False)
class DeviceEvents(Table):
    """More columns for the events of a device, which are a fifth of all or fewer, in the order of the file."""

    event: Ints = column(np.int32)  # its row among all events
    device: Ints = column(np.int32, NONE)
    stream: Ints = column(np.int64, NONE)
    size: Ints = column(np.int64, NONE)  # args.bytes
    blocks: Ints = column(np.int32)  # args.grid
    collective: Ints = column(np.int32, NONE)  # an index into Trace.collectives
    awaited_stream: Ints = column(np.int64, NONE)  # args.wait_on_stream
    awaited_record: Ints = column(np.int64, NONE)  # args.wait_on_cuda_event_record_corr_id


class Thread(NamedTuple):
    """The thread of an event: a host thread, or a stream of a device."""

    process: str
    number: str
    name: str


class Collective(NamedTuple):
    """The collective of an NCCL kernel, by its arguments."""

    name: str
    elements_in: int
    elements_out: int
    dtype: str
    group: str  # "Process Group Name"
    group_size: int
    ranks: tuple[int, ...]  # of the group, empty if the trace abbreviates them
    peer: int = NONE  # for a send or recv: the other rank


class TracedDevice(NamedTuple):
    """A device, as a trace describes it."""

    name: str
    capability: int  # the major number of its CUDA capability; 0 if unknown


@dataclass(frozen=True, eq=False)
class Trace:
    """One file."""

    path: str
    events: Events
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[Collective, ...]
    rank: int | None = None
    """The rank of this trace, if it has one."""
    world: int | None = None
    """How many ranks the run has, of which some traces may be missing."""
    devices: tuple[TracedDevice, ...] = ()
    """Those that its program saw."""
    stacks: bool = False
    """Whether it has Python's frames."""
    skipped: int = 0
    """Events that could not be read."""
    device_events: DeviceEvents = field(default_factory=lambda: DeviceEvents.of(0))
    memory: MemoryUse = field(default_factory=lambda: MemoryUse.of(0))
    """Its lanes are indices into `threads`."""

    def named(self, matches: Callable[[str], object]) -> Mask:
        """Which events have a name that matches."""
        return np.array([bool(matches(name)) for name in self.names], bool)[self.events.name]

    def begins(self, *beginnings: str) -> Mask:
        """Which events have a name that begins with one of these."""
        return self.named(lambda name: name.startswith(beginnings))

    @property
    def is_call(self) -> Mask:
        """Which events are calls of CUDA or its like."""
        return (self.events.category == Category.RUNTIME) | (self.events.category == Category.DRIVER)


class _Collector:
    """Turns the rows of one trace into columns."""

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
        complete, category = _with_known_category(batch.complete)
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
                    correlation=_argument_of(complete, _CALL[category] | on_device, "correlation"),
                    sequence=_argument_of(complete, category == Category.OPERATOR, "sequence"),
                )
            )
            self._device_events.append(self._on_device(complete, np.flatnonzero(on_device), category))
            self.count += len(complete)

    def trace(self, path: str, facts: Mapping[str, Any], skipped: int) -> Trace:
        """The trace with all rows so far. There must be at least one."""
        distributed, devices = facts.get("distributedInfo"), facts.get("deviceProperties")
        run_facts = distributed if isinstance(distributed, dict) else {}
        return Trace(
            path=path,
            events=Events.concatenate(self._events),
            device_events=DeviceEvents.concatenate(self._device_events),
            memory=MemoryUse.concatenate(self._memory),
            names=tuple(self.names),
            threads=self.threads.table(),
            collectives=tuple(self.collectives),
            rank=_below(LARGEST_RANK, run_facts.get(RANK)),
            world=_below(LARGEST_RANK + 1, run_facts.get(WORLD_SIZE)) or None,
            devices=tuple(map(_device, devices if isinstance(devices, list) else ())),
            stacks=bool(facts.get("with_stack")),
            skipped=skipped,
        )

    def _on_device(self, complete: list[Complete], rows: Ints, category: Ints) -> DeviceEvents:
        """The columns of DeviceEvents for these rows of the batch."""
        complete, category = [complete[row] for row in rows.tolist()], category[rows]
        arguments, command = [row.args or _NO_ARGUMENTS for row in complete], category <= Category.FILL
        device = _either([argument.device for argument in arguments], [row.pid for row in complete], command)
        collectives = [
            self.collectives[_collective(argument)] if is_kernel and isinstance(argument.collective, str) else NONE
            for is_kernel, argument in zip((category == Category.KERNEL).tolist(), arguments, strict=True)
        ]
        return DeviceEvents(
            event=self.count + rows,
            device=np.where(np.abs(device) < 1 << 31, device, NONE),
            stream=_either([argument.stream for argument in arguments], [row.tid for row in complete], command),
            size=_integers([argument.size for argument in arguments]),
            blocks=np.array([self.blocks[bytes(argument.grid)] for argument in arguments], np.int32),
            collective=np.array(collectives, np.int64),
            awaited_stream=_integers([argument.awaited_stream for argument in arguments]),
            awaited_record=_integers([argument.awaited_record for argument in arguments]),
        )


def _below(limit: int, value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < limit else None


def _device(value: Any) -> TracedDevice:
    properties = value if isinstance(value, dict) else {}
    capability = properties.get(CAPABILITY)
    return TracedDevice(str(properties.get("name", "")), capability if isinstance(capability, int) else 0)


class _KeyNumbers(dict[Any, int]):
    """Numbers its keys in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = index = len(self)
        return index


class _GridSizes(dict[bytes, int]):
    """The number of blocks in a grid, by its JSON text."""

    def __missing__(self, text: bytes) -> int:
        self[text] = 0
        with suppress(ValueError, RecursionError):  # another tool's format, or no grid
            count = prod(msgspec.json.decode(text, type=list[int]))
            self[text] = count if 0 < count < 1 << 31 else 0
        return self[text]


class _ThreadNumbers(dict[tuple[Any, Any], int]):
    """Numbers threads in the order of their first use. A thread can be called 7 or "7"."""

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
    arguments = [row.args for row in rows if row.args is not None]
    numbers = {
        name: _integers([getattr(entry, name) for entry in arguments])
        for name in ("device", "block", "size", "allocated", "reserved")
    }
    lane = np.array([threads[row.pid, row.tid] for row in rows], np.int64)
    return MemoryUse.of(len(rows), lane=lane, time=np.rint(1000 * time).astype(np.int64), **numbers)


def _with_known_category(complete: list[Complete]) -> tuple[list[Complete], Ints]:
    """The events with a category that matters here, and their categories."""
    category: Ints = np.array([_NUMBERS.get(row.cat, NONE) for row in complete], np.int8)
    for row in np.flatnonzero(category == _OLD_OPERATOR).tolist():
        category[row] = Category.ANNOTATION if "#" in complete[row].name else Category.OPERATOR
    is_known = category != NONE
    return (complete, category) if is_known.all() else (list(compress(complete, is_known)), category[is_known])


def _argument_of(complete: list[Complete], chosen: Mask, field_name: str) -> Ints:
    """One argument of the chosen events, and NONE for the others."""
    values, rows = np.full(len(complete), NONE, np.int64), np.flatnonzero(chosen)
    arguments = [complete[row].args or _NO_ARGUMENTS for row in rows.tolist()]
    values[rows] = _integers(list(map(attrgetter(field_name), arguments)))
    return values


def _times(complete: list[Complete]) -> tuple[Ints, Ints, Mask]:
    """Start and end in nanoseconds, and which of them are sound.

    The fractions are added before they are rounded, so an event that ends with its parent in the file still does so.
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
    """The values as integers of 64 bits, NONE for anything else."""
    try:
        numbers = np.array(values, np.int64)
        if numbers.ndim == 1:
            return numbers
    except (ValueError, TypeError, OverflowError):
        pass
    fits = [isinstance(value, int) and -(1 << 63) <= value < 1 << 63 for value in values]
    return np.array([value if fit else NONE for value, fit in zip(values, fits, strict=True)], np.int64)


def _either(preferred: list[Any], fallback: list[Any], wanted: Mask) -> Ints:
    """The preferred values, from arguments; if these are missing in a command, the fallback, from its row."""
    numbers = _integers(preferred)
    unknown = (numbers == NONE) & wanted
    return np.where(unknown, _integers(fallback), numbers) if unknown.any() else numbers


def _collective(arguments: Arguments) -> Collective:
    peer = _number(arguments.from_rank) if _number(arguments.from_rank) != NONE else _number(arguments.to_rank)
    return Collective(
        str(arguments.collective),
        _number(arguments.elements_in),
        _number(arguments.elements_out),
        str(arguments.dtype),
        str(arguments.group),
        _number(arguments.group_size),
        _ranks(arguments.ranks),
        peer,
    )


def _number(value: Any) -> int:
    return int(_integers([value])[0])


def _ranks(listed: Any) -> tuple[int, ...]:
    """The ranks in a list, or in a string that holds one and ends with `...` if it is long."""
    if isinstance(listed, list):
        return tuple(rank for rank in listed if isinstance(rank, int))
    if not isinstance(listed, str) or "." in listed:
        return ()
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", listed))


def read_traces(paths: Sequence[str | Path], on_progress: OnProgress | None = None) -> list[Trace]:
    """Reads all these files, in their order, with a process per core if that is faster."""
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
    names: list[str], function: Callable[[str], _Made], on_progress: OnProgress | None = None
) -> Iterator[tuple[int, _Made | BadInput]]:
    """Applies `function`, which the processes import from its module, to each file, with a process per core if that is
    faster. Yields results as they come, and keeps none."""
    sizes, read_bytes = [_size(name) for name in names], 0
    shares = deal(sizes, len(os.sched_getaffinity(0))) if sum(sizes) >= WORTH_PROCESSES and sys.executable else []
    in_this_process: Iterator[tuple[int, _Made | BadInput | None]] = ((index, None) for index in range(len(names)))
    for index, answer in _elsewhere(names, shares, function) if len(shares) > 1 else in_this_process:
        yield index, tried(names[index], function) if answer is None else answer
        read_bytes += sizes[index]
        if on_progress:
            on_progress(f"reading {len(names)} traces", read_bytes / max(sum(sizes), 1))


def tried(name: str, function: Callable[[str], _Made]) -> _Made | BadInput:
    try:
        return function(name)
    except BadInput as error:
        return error


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size * (_USUAL_RATIO if name.endswith(".gz") else 1)
    except (OSError, ValueError):
        return 0


def deal(sizes: list[int], processes: int) -> list[list[int]]:
    """Which files each process reads: the largest first, each to the process with the least to read."""
    shares: list[list[int]] = [[] for _ in range(min(processes, len(sizes)))]
    loads = [0] * len(shares)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return shares


def _elsewhere(
    names: list[str], shares: list[list[int]], function: Callable[[str], _Made]
) -> Iterator[tuple[int, _Made | BadInput | None]]:
    """Results as they come. None means that a process failed, so that file has to be read in this process."""
    answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    for share in shares:
        PythonThread(target=_listen, args=(names, share, function, answers), daemon=True).start()
    for _ in names:
        yield answers.get()


def _listen(
    names: list[str], share: list[int], function: Callable[[str], _Made], answers: SimpleQueue[tuple[int, Any]]
) -> None:
    """Reads these files with a plain Python command: a multiprocessing pool would run the user's script again."""
    unread = list(share)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from {__name__} import serve; from {function.__module__} import {function.__name__} as read; serve(read)"
    call = [sys.executable, "-c", code, *[names[index] for index in share]]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(call, env=environment, **pipes) as process:  # type: ignore[call-overload]
            while unread:
                answer = pickle.load(process.stdout)  # from our own child, never from a file
                answers.put((unread.pop(0), answer))
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        for index in unread:
            answers.put((index, None))


def serve(function: Callable[[str], object]) -> None:
    """Runs in such a process: applies the function to each file and writes the results to its parent."""
    for name in sys.argv[1:]:
        pickle.dump(tried(name, function), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


def ranks_of(traces: Sequence[Trace]) -> list[int]:
    """The rank of each trace: by `distributedInfo`, else by the file's name, else by order. Raises BadInput unless they
    are of one run."""
    ranks = _stated_ranks(traces)
    known_ranks = [rank for rank in ranks if rank is not None]
    if len(known_ranks) < len(ranks) or len(set(known_ranks)) < len(known_ranks):
        raise BadInput(
            f"{traces[0].path} and {traces[-1].path} are not the ranks of one run: {len(traces)} traces name "
            f"{len(set(known_ranks))} different ranks; give the traces of one run, each rank's once."
        )
    if len(traces) > 1:  # one file alone may be any rank of any run
        _refuse_other_runs(traces)
    return known_ranks


def _stated_ranks(traces: Sequence[Trace]) -> list[int | None]:
    stated = [trace.rank for trace in traces]
    if None not in stated and len(set(stated)) == len(stated):
        return stated
    matches = [_IN_NAME.search(Path(trace.path).name) for trace in traces]
    named = [int(match[1]) if match else None for match in matches]
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
