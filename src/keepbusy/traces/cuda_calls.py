"""What NCCL kernels say of themselves: their group and how many bytes they move."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.model import EVERY_LANE, NONE, Ints, Kind, Mask
from keepbusy.traces.event_columns import Collective, Events, Trace
from keepbusy.traces.kineto_names import (
    ALLOCATION,
    ALLOCATION_SYNC,
    DEVICE_SYNC,
    DIRECTIONS,
    ELEMENT_SIZES,
    EVENT_SYNC,
    PAGEABLE,
    PINNED,
    SYNC_CALL,
    Category,
)

# Which CUDA calls matter to the device, and what each of them does to the host.

BLOCKS_UNTIL_ITS_END = 10_000
"""A blocking copy returns up to 10 µs before its command ends (measured), or a little of a long copy."""
ENQUEUE = 5_000
"""What a blocking copy spends before it waits: about one launch."""


UNKNOWN = -3
"""No lane, and not even none: nobody recorded what a call waits for."""
FULL_FOR, MANY_PENDING = 100_000, 400
"""A launch that takes this long while so many commands of its stream are pending has found the queue full."""


@dataclass(frozen=True)
class Calls:
    """The outermost calls that matter, in order of start; `command` rows follow separately."""

    event: Ints  # row of the event
    kind: Ints
    waits: Mask  # an allocation that waits for the device, or a copy that waits for itself


def calls_of(trace: Trace, commands: Ints, threads: Ints) -> Calls:
    events = trace.events
    rows = np.flatnonzero(trace.is_call & np.isin(events.thread, threads))
    rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
    kinds, waits = kinds_of_names(trace.names)
    kind, waiting = kinds[events.name[rows]], waits[events.name[rows]]
    launches = np.isin(events.correlation[rows], events.correlation[commands]) & (events.correlation[rows] >= 0)
    blocking = launches & (kind == Kind.SYNC)
    kind = np.where(launches, Kind.LAUNCH, kind)
    matters = kind != Kind.WORK
    rows, kind, waiting = rows[matters], kind[matters], (waiting | blocking)[matters]
    outer = _outermost(events, rows)
    return Calls(rows[outer], kind[outer], waiting[outer])


def kinds_of_names(names: tuple[str, ...]) -> tuple[Ints, Mask]:
    """Of each name, the kind of call it would be, and whether an allocation so called waits for the device."""
    kinds = [
        Kind.SYNC if SYNC_CALL.match(name) else Kind.ALLOCATE if ALLOCATION.match(name) else Kind.WORK for name in names
    ]
    return np.array(kinds, np.int64), np.array([bool(ALLOCATION_SYNC.match(name)) for name in names], bool)


def _outermost(events: Events, rows: Ints) -> Mask:
    """Not inside another call of the same thread. A lazily loaded module launches within a launch."""
    outer = np.ones(len(rows), bool)
    for thread in np.unique(events.thread[rows]):
        mine = np.flatnonzero(events.thread[rows] == thread)
        reached = np.maximum.accumulate(events.end[rows[mine]])
        outer[mine[1:]] = events.start[rows[mine[1:]]] >= reached[:-1]
    return outer


def launch_of(trace: Trace, calls: Calls, commands: Ints) -> Ints:
    """Of each command, the position in `calls` of the call that launched it, or NONE."""
    events = trace.events
    all_calls = np.flatnonzero(trace.is_call & (events.correlation >= 0))
    order = all_calls[np.argsort(events.correlation[all_calls], kind="stable")]
    place = np.searchsorted(events.correlation[order], events.correlation[commands])
    found = place < len(order)
    found &= (
        events.correlation[order[np.minimum(place, len(order) - 1)]] == events.correlation[commands]
        if len(order)
        else found
    )
    call = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(commands), np.int64)
    return np.where(found, _enclosing_call(events, calls, call), NONE)


def _enclosing_call(events: Events, calls: Calls, call: Ints) -> Ints:
    """The outermost call that a call stands in: itself, as a rule."""
    result = np.full(len(call), NONE, np.int64)
    for thread in np.unique(events.thread[calls.event]):
        mine = np.flatnonzero(events.thread[calls.event] == thread)
        here = np.flatnonzero(events.thread[call] == thread)
        place = np.searchsorted(events.start[calls.event[mine]], events.start[call[here]], side="right") - 1
        inside = (place >= 0) & (events.end[call[here]] <= events.end[calls.event[mine[np.maximum(place, 0)]]])
        result[here] = np.where(inside, mine[np.maximum(place, 0)], NONE)
    return result


def directions_of_names(names: tuple[str, ...]) -> tuple[Ints, Ints]:
    """Of each copy's name (`Memcpy HtoD (Pageable -> Device)`), its direction and whether its host side is pinned."""
    direction = [next((int(kind) for mark, kind in DIRECTIONS if mark in name), 0) for name in names]
    pinned = [1 if PINNED in name else 0 if PAGEABLE in name else NONE for name in names]
    return np.array(direction, np.int64), np.array(pinned, np.int64)


def waits_for_its_copy(trace: Trace, calls: Calls, commands: Ints, launch: Ints) -> Mask:
    """Of each call: it moves pageable memory and returned only when its own copy had ended, or nearly so."""
    events = trace.events
    _, pinned = directions_of_names(trace.names)
    pageable = (events.category[commands] == Category.COPY) & (pinned[events.name[commands]] == 0) & (launch != NONE)
    copy, call = commands[pageable], calls.event[launch[pageable]]
    length = events.end[copy] - events.start[copy]
    lasted = events.end[call] >= events.end[copy] - np.maximum(BLOCKS_UNTIL_ITS_END, length // 50)
    blocking = calls.waits & (calls.kind == Kind.LAUNCH)
    blocking[launch[pageable][lasted]] = True
    return blocking


def released_by(trace: Trace, calls: Calls, commands: Ints, launch: Ints, lane: Ints) -> Ints:
    """Of each call that found its stream's queue full, the position of the command whose end made room; else NONE."""
    events = trace.events
    start, end = events.start[calls.event], events.end[calls.event]
    result = np.full(len(calls.event), NONE, np.int64)
    for one in np.unique(lane).tolist():
        mine = np.flatnonzero((lane == one) & (launch != NONE))
        mine = mine[np.argsort(start[launch[mine]], kind="stable")]
        call = np.unique(launch[mine])
        ended = np.maximum.accumulate(events.end[commands[mine]])
        done = np.searchsorted(ended, end[call], side="right")
        issued = np.searchsorted(start[launch[mine]], start[call])
        full = (end[call] - start[call] > FULL_FOR) & (issued - done > MANY_PENDING) & (done > 0)
        result[call[full]] = mine[done[full] - 1]
    return result


def awaited_lane(trace: Trace, calls: Calls, launched: Ints, recorded: Ints) -> Ints:
    """Of each sync, the lane it waits for: the recorded one, else that of what its thread launched last."""
    events = trace.events
    whole = trace.named(DEVICE_SYNC.search)[calls.event]
    whole |= calls.kind == Kind.ALLOCATE
    last = np.where(launched != NONE, np.arange(len(launched)), NONE)
    before = np.full(len(launched), NONE, np.int64)
    for thread in np.unique(events.thread[calls.event]):
        mine = np.flatnonzero(events.thread[calls.event] == thread)
        before[mine] = np.maximum.accumulate(last[mine])
    lane = np.where(before == NONE, NONE, launched[np.maximum(before, 0)])
    return np.where(whole, EVERY_LANE, np.where(recorded == UNKNOWN, lane, recorded))


def recorded_lane(trace: Trace, calls: Calls, lane_of: Mapping[tuple[int, int], int]) -> Ints:
    """Of each call the lane that a sync row names: NONE if nothing ran there, UNKNOWN without such a row."""
    events = trace.events
    rows = np.flatnonzero((events.category == Category.SYNC) & (events.stream >= 0) & (events.device >= 0))
    places = zip(events.device[rows].tolist(), events.stream[rows].tolist(), strict=True)
    said = dict(zip(events.correlation[rows].tolist(), [lane_of.get(place, NONE) for place in places], strict=True))
    said.pop(NONE, None)
    asked = events.correlation[calls.event].tolist() if said else [NONE] * len(calls.event)
    return np.array([said.get(correlation, UNKNOWN) for correlation in asked], np.int64)


def is_event_sync(trace: Trace, calls: Calls) -> Mask:
    return trace.named(EVENT_SYNC.search)[calls.event]


_BITS = re.compile(r"(\d{1,4})")
LARGEST = 1 << 50
"""No collective moves so many bytes; larger numbers are damaged, and their sums would leave 64 bits."""


def groups_and_sizes(collectives: Sequence[Collective], rank: int) -> tuple[Ints, Ints]:
    """Of each collective, a number that all members of its group agree on, and its bytes. One more stands for none."""
    groups = [zlib.crc32(_members(one, rank).encode()) & 0x7FFFFFFF for one in collectives]
    sizes = [min(LARGEST, max(one.elements_in, one.elements_out) * bytes_of(one.dtype)) for one in collectives]
    return np.array([*groups, 0], np.int64), np.array([*sizes, 0], np.int64)


def _members(one: Collective, rank: int) -> str:
    """A send and its receive meet between two ranks; everything else between all of the group."""
    if one.peer < 0:
        return f"{one.group}|{one.ranks}"
    mine = one.ranks.index(rank) if rank in one.ranks else rank
    return f"{one.group}|{one.ranks}|{min(mine, one.peer)}-{max(mine, one.peer)}"


def bytes_of(dtype: str) -> int:
    name = dtype.lower()
    if name in ELEMENT_SIZES:
        return ELEMENT_SIZES[name]
    bits = _BITS.search(name)
    return max(1, int(bits.group(1)) // 8) if bits else 1
