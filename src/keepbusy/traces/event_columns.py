"""A profiler trace as columns: what PyTorch wrote, in Kineto's own terms, before anyone interprets it.

Rows are turned into columns batch by batch, so that the rows can go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import compress
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from keepbusy.timeline.model import NONE, Ints, Mask, MemoryUse, Table, column
from keepbusy.traces.json_events import LARGEST_FLOAT_TIME, Arguments, Complete, EventBatch, Instant, Naming
from keepbusy.traces.kineto_names import CATEGORIES, OLD_OPERATOR, Category


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


@dataclass(frozen=True, eq=False)
class Trace:
    """One file."""

    path: str
    events: Events
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[Collective, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Everything that stands beside `traceEvents`: schemaVersion, deviceProperties, distributedInfo, with_stack, …"""
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


def _among(*categories: Category) -> Mask:
    return np.isin(np.arange(len(Category)), categories)


_OLD_OPERATOR = len(Category)
_NUMBERS = {name: int(category) for name, category in CATEGORIES.items()} | {OLD_OPERATOR: _OLD_OPERATOR}
_ON_DEVICE = _among(Category.KERNEL, Category.COPY, Category.FILL, Category.SYNC, Category.RECORD)
_CALL = _among(Category.RUNTIME, Category.DRIVER)
_OPERATOR = _among(Category.OPERATOR)
_LARGEST_TIME = 2.0**52
"""Microseconds beyond which nanoseconds would leave 64 bits."""
_NO_ARGUMENTS = Arguments()


class KeyNumbers(dict[Any, int]):
    """Numbers its keys in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = index = len(self)
        return index


class Blocks(dict[bytes, int]):
    """How many there are in a grid, by its text."""

    def __missing__(self, text: bytes) -> int:
        self[text] = 0
        with suppress(ValueError, RecursionError):  # some other tool's, or none
            count = prod(msgspec.json.decode(text, type=list[int]))
            self[text] = count if 0 < count < 1 << 31 else 0
        return self[text]


class ThreadNumbers(dict[tuple[Any, Any], int]):
    """The same for threads, which may call themselves 7 or "7"."""

    def __init__(self) -> None:
        self.spelled = KeyNumbers()
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


class Collector:
    """Takes the rows of one trace, and makes its columns of them."""

    def __init__(self) -> None:
        self.names, self.threads, self.collectives, self.blocks = KeyNumbers(), ThreadNumbers(), KeyNumbers(), Blocks()
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
                    sequence=_said(complete, _OPERATOR[category], "sequence"),
                )
            )
            self._device_events.append(self._on_device(complete, np.flatnonzero(on_device), category))
            self.count += len(complete)

    def trace(self, path: str, facts: Mapping[str, Any], skipped: int) -> Trace:
        """Of all rows so far, of which there are some."""
        return Trace(
            path=path,
            events=Events.concatenate(self._events),
            device_events=DeviceEvents.concatenate(self._device_events),
            memory=MemoryUse.concatenate(self._memory),
            names=tuple(self.names),
            threads=self.threads.table(),
            collectives=tuple(self.collectives),
            facts=facts,
            skipped=skipped,
        )

    def _on_device(self, complete: list[Complete], rows: Ints, category: Ints) -> DeviceEvents:
        """What these rows of the batch say besides."""
        complete, category = [complete[row] for row in rows.tolist()], category[rows]
        arguments, command = [row.args or _NO_ARGUMENTS for row in complete], category <= Category.FILL
        device = _either([one.device for one in arguments], [row.pid for row in complete], command)
        return DeviceEvents(
            event=self.count + rows,
            device=np.where(np.abs(device) < 1 << 31, device, NONE),
            stream=_either([one.stream for one in arguments], [row.tid for row in complete], command),
            size=integers([one.size for one in arguments]),
            blocks=np.array([self.blocks[bytes(one.grid)] for one in arguments], np.int32),
            collective=self._collectives(arguments, category),
            awaited_stream=integers([one.awaited_stream for one in arguments]),
            awaited_record=integers([one.awaited_record for one in arguments]),
        )

    def _collectives(self, arguments: list[Arguments], category: Ints) -> Ints:
        kernel = (category == Category.KERNEL).tolist()
        found = [
            self.collectives[_collective(one)] if here and isinstance(one.collective, str) else NONE
            for here, one in zip(kernel, arguments, strict=True)
        ]
        return np.array(found, np.int64)


def _memory(rows: list[Instant], threads: ThreadNumbers) -> MemoryUse:
    time = np.nan_to_num(np.clip([row.ts for row in rows], -_LARGEST_TIME, _LARGEST_TIME))
    held = [row.args for row in rows if row.args is not None]
    numbers = {
        name: integers([getattr(one, name) for one in held])
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
    said[rows] = integers(list(map(attrgetter(what), arguments)))
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


def integers(values: list[Any]) -> Ints:
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
    numbers = integers(said)
    unknown = (numbers == NONE) & wanted
    return np.where(unknown, integers(stood), numbers) if unknown.any() else numbers


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
    return int(integers([value])[0])


def _ranks(said: Any) -> tuple[int, ...]:
    """Either a list or one in a string, which ends with `...` when it is long."""
    if isinstance(said, list):
        return tuple(one for one in said if isinstance(one, int))
    if not isinstance(said, str) or "." in said:
        return ()
    return tuple(int(digits) for digits in re.findall(r"\d{1,9}", said))
