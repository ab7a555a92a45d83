"""One rank's trace as spans: the device's commands, the host's calls, what they wait for, and the work between them.

The host lanes are tiled: every call that matters to the device is a span, and the time between two of them is work,
cut where something begins or ends that a fix may want to take out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, Ints, Kind, Mask, Spans
from keepbusy.timeline.replay import NEVER
from keepbusy.traces.event_columns import Collective
from keepbusy.traces.kineto_names import ELEMENT_SIZES, NCCL_KERNEL, QUEUE_FULL, Category
from keepbusy.traces.rank_trace import RankTrace, sorted_once

ENQUEUE = 5_000
"""What a blocking call spends before it waits: about one launch."""
LONG_FRAME = 100_000
"""A frame that launches nothing is told apart from its surroundings when it lasts this long."""
LONG_WORK = 1_000_000
"""Of what is so long a reader wants to know whose work it is."""
COST = {
    Category.OPERATOR: 1_200,
    Category.PYTHON: 800,
    Category.RUNTIME: 2_200,
    Category.DRIVER: 2_200,
    Category.LINE: 800,
}
"""Nanoseconds that one recorded event adds, measured on a slow host; only the proportions matter, since the explanation
scales them: docs/explanation/distortion.md."""
LARGEST_MESSAGE = 1 << 50
"""No collective moves so many bytes; larger numbers are damaged, and their sums would leave 64 bits."""
_AFTER_COMMANDS = 1 << 40
_BITS = re.compile(r"(\d{1,4})")


class IssuedSpans(NamedTuple):
    """Spans before they stand in issue order."""

    spans: Spans
    key: Ints  # when each was issued
    turn: Ints | int = 0  # settles ties: a wait for room, the call, its commands, its wait


def spans_of(trace: RankTrace, groups: Ints) -> tuple[Spans, Ints]:
    """All spans in issue order, and where each went: first the calls, next the waits for room in a queue, then other
    spans of the host, last the commands, each in their own order. `groups`: the number of each collective's group.
    """
    work = [_work_of(trace, thread) for thread in trace.hosts.alive]
    host = [*_calls(trace), *_loader(trace), *(IssuedSpans(one, one.start) for one in work)]
    parts = [*host, _commands(trace, groups)]
    turn = np.concatenate([np.broadcast_to(one.turn, len(one.spans)) for one in parts])
    order = np.lexsort([turn, np.concatenate([one.key for one in parts])])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # column by column: spans are the most of what a trace takes of memory
    tables = [part.spans.columns() for part in parts]
    spans = Spans(**{name: np.concatenate([one[name] for one in tables])[order] for name in tables[0]})
    return spans.change(frame=_frame_of(trace, spans), recording=_cost_of_recording(trace, spans)), place


def _commands(trace: RankTrace, groups: Ints) -> IssuedSpans:
    events, commands, launch = trace.events, trace.commands, trace.launch
    collective = trace.of_command.collective
    moved = np.array([_bytes_of(one) for one in trace.file.collectives] + [0], np.int64)
    kind = np.array([Kind.KERNEL, Kind.COPY, Kind.FILL])[events.category[commands]]
    meets = (collective != NONE) | trace.file.begins(NCCL_KERNEL)[commands]
    spans = Spans.of(
        len(commands),
        lane=trace.lane_of_command,
        kind=np.where((kind == Kind.KERNEL) & meets, Kind.COLLECTIVE, kind),
        name=events.name[commands],
        start=events.start[commands],
        end=events.end[commands],
        group=np.where(collective == NONE, NONE, groups[collective]),
        size=np.where(collective == NONE, np.maximum(trace.of_command.size, 0), moved[collective]),
        blocks=trace.of_command.blocks,
        direction=trace.direction,
        pinned=trace.pinned,
    )
    issued = np.where(launch == NONE, spans.start, trace.calls.start[launch])
    issued = np.where(trace.backlog, events.start.min() - 1, issued)
    # a command follows its launch at once; several of one launch keep the order in which they ran
    return IssuedSpans(spans, issued, turn=1 + np.arange(len(commands)))


def _bytes_of(one: Collective) -> int:
    dtype = one.dtype.lower()
    bits = _BITS.search(dtype)
    each = ELEMENT_SIZES.get(dtype) or (max(1, int(bits[1]) // 8) if bits else 1)
    return min(LARGEST_MESSAGE, max(one.elements_in, one.elements_out) * each)


def _calls(trace: RankTrace) -> tuple[IssuedSpans, IssuedSpans, IssuedSpans]:
    """The calls themselves, how long some of them waited for room in a queue, and some for their own copy.

    A call that finds the queue full waits first, and only then launches. A blocking copy enqueues first.
    """
    calls, held, blocking = trace.calls, np.flatnonzero(trace.held != NONE), np.flatnonzero(trace.blocking)
    lane_of = np.full(len(trace.file.threads), trace.main_lane, np.int64)
    lane_of[list(trace.lane_of_thread)] = list(trace.lane_of_thread.values())
    lane, name = lane_of[calls.thread], trace.events.name[calls.event]
    begin, end = calls.start.copy(), calls.end.copy()
    begin[held] = np.clip(trace.events.end[trace.commands[trace.held[held]]], begin[held], end[held])
    whole = (calls.end - calls.start)[blocking]
    end[blocking] = np.minimum(end[blocking], calls.start[blocking] + np.minimum(ENQUEUE, whole // 2))
    by_event = trace.by_event & (calls.end - calls.start > ENQUEUE)
    waits = ((calls.kind == Kind.SYNC) & ~by_event) | ((calls.kind == Kind.ALLOCATE) & calls.waits)
    awaits = np.where(waits, trace.awaited, NONE)
    themselves = Spans.of(len(lane), lane=lane, kind=calls.kind, name=name, start=begin, end=end, awaits=awaits)
    for_room = Spans.of(
        len(held), lane=lane[held], kind=Kind.SYNC, name=name[held], start=calls.start[held], end=begin[held]
    )
    for_copies = Spans.of(
        len(blocking),
        lane=lane[blocking],
        kind=Kind.SYNC,
        name=name[blocking],
        start=end[blocking],
        end=calls.end[blocking],
        awaits=trace.launched[blocking],
    )
    return (
        IssuedSpans(themselves, calls.start),
        IssuedSpans(for_room, for_room.start, turn=-1),
        IssuedSpans(for_copies, calls.start[blocking], turn=_AFTER_COMMANDS),
    )


def _loader(trace: RankTrace) -> tuple[IssuedSpans, IssuedSpans]:
    """The batches of the loader's workers, and the waits of the loop for them."""
    begin, end = trace.starved.T
    nest, main = trace.nests[trace.hosts.main], trace.hosts.main
    name = nest.name[nest.innermost(begin)] if len(begin) else begin
    made_from = np.append(trace.hosts.alive[main][0, 0], end[:-1])[: len(end)]
    made = Spans.of(len(end), lane=trace.workers_lane, kind=Kind.WORK, name=name, start=made_from, end=end)
    waited = Spans.of(
        len(end),
        lane=trace.main_lane,
        kind=Kind.SYNC,
        name=name,
        start=begin,
        end=end,
        awaits=trace.workers_lane,
    )
    return IssuedSpans(made, begin, turn=-1), IssuedSpans(waited, begin)


def _work_of(trace: RankTrace, thread: int) -> Spans:
    """What a thread does between its calls, cut at every border that a fix or a reader may ask for."""
    nest = trace.nests[thread]
    alive, recorder = trace.hosts.alive[thread], _recorder(trace, thread)
    mine = trace.calls.thread == thread
    elsewhere = [np.stack([trace.calls.start[mine], trace.calls.end[mine]], axis=1)]
    if thread == trace.hosts.main:  # while another thread works for it, or it waits for a batch
        elsewhere += [trace.hosts.handoffs[:, 1:], trace.starved, trace.marks]
    borders = [alive, recorder, *elsewhere, *_borders(trace, thread)]
    cuts = sorted_once(np.concatenate([border.ravel() for border in borders]))
    middle = (cuts[:-1] + cuts[1:]) // 2
    free = _inside(middle, alive)
    for intervals in elsewhere[:3]:
        free &= ~_inside(middle, intervals)
    start, end, middle = cuts[:-1][free], cuts[1:][free], middle[free]
    inner = nest.innermost(middle)
    unrecorded = len(trace.file.names)  # UNRECORDED stands behind the trace's own names
    names = np.append(nest.name, unrecorded)
    kind = np.where(_inside(middle, recorder), Kind.RECORDING, Kind.WORK)
    return Spans.of(len(start), lane=trace.lane_of_thread[thread], kind=kind, name=names[inner], start=start, end=end)


def _borders(trace: RankTrace, thread: int) -> tuple[Ints, Ints, Ints]:
    """Where frames cut host work: long ones that launch nothing, operators that wait, and loaders, at both ends.

    And any frame where it parts long work from long work: what a function did after its last launch is not what the
    next one does before its first.
    """
    nest, calls = trace.nests[thread], trace.calls.thread == thread
    start, end = trace.calls.start[calls], trace.calls.end[calls]
    idle = np.searchsorted(start, nest.end) == np.searchsorted(start, nest.start)
    telling = idle & (nest.end - nest.start >= LONG_FRAME)
    telling |= nest.role & (Role.READS | Role.MOVES | Role.LOADER) != 0
    parting = np.concatenate([nest.start[~idle], nest.end[~idle]])
    after = parting - np.append(NEVER, end)[np.searchsorted(end, parting, side="right")]
    before = np.append(start, -NEVER)[np.searchsorted(start, parting)] - parting
    return nest.start[telling], nest.end[telling], parting[np.minimum(after, before) >= LONG_WORK]


def _recorder(trace: RankTrace, thread: int) -> Ints:
    """When the recorder worked for itself, as it says, and this thread did nothing. A full queue is no such thing."""
    events = trace.events
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & ~trace.file.named(QUEUE_FULL.__eq__))
    rows = rows[np.argsort(events.start[rows])]
    mine = np.sort(np.concatenate([column[events.thread == thread] for column in (events.start, events.end)]))
    quiet = np.searchsorted(mine, events.end[rows]) == np.searchsorted(mine, events.start[rows])
    spans = np.stack([events.start[rows], events.end[rows]], axis=1)[quiet]
    if len(spans) > 1:  # they may overlap each other
        spans = spans[np.append(True, spans[1:, 0] >= np.maximum.accumulate(spans[:-1, 1]))]
    return spans


def _inside(times: Ints, intervals: Ints) -> Mask:
    """Which times lie within one of the sorted, disjoint intervals."""
    if not len(intervals):
        return np.zeros(len(times), bool)
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1])


def _frame_of(trace: RankTrace, spans: Spans) -> Ints:
    """Of each span of the host the innermost frame that it stands in."""
    frame: Ints = np.full(len(spans), NONE, np.int32)
    for thread, nest in trace.nests.items():
        mine = np.flatnonzero(spans.lane == trace.lane_of_thread[thread])
        inner = nest.innermost((spans.start[mine] + spans.end[mine]) // 2)
        frame[mine] = np.where(inner == NONE, NONE, inner + nest.first)
    return frame


def _cost_of_recording(trace: RankTrace, spans: Spans) -> Ints:
    """Of each span: half for every event recorded that begins within it, and half for every one that ends there."""
    events = trace.events
    cost = np.zeros(len(spans), np.float64)
    for thread, lane in trace.lane_of_thread.items():
        mine = np.flatnonzero(spans.lane == lane)
        for category, each in COST.items():
            rows = (events.thread == thread) & (events.category == category)
            for times in (np.sort(events.start[rows]), np.sort(events.end[rows])):
                count = np.searchsorted(times, spans.end[mine]) - np.searchsorted(times, spans.start[mine])
                cost[mine] += count * each / 2
    return np.where(spans.kind == Kind.RECORDING, spans.end - spans.start, cost).astype(np.int64)
