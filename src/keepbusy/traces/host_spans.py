"""What recording cost the host, by what was recorded. The explanation scales it; see docs/explanation/distortion.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.model import NONE, Ints, Kind, Spans
from keepbusy.traces.cuda_calls import ENQUEUE, is_event_sync
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.frames import worth_telling_apart
from keepbusy.traces.host_threads import inside
from keepbusy.traces.kineto_names import QUEUE_FULL, Category
from keepbusy.traces.trace_facts import Reading, batches

# Spans before they stand in issue order.


@dataclass(frozen=True, eq=False)
class Rows:
    """`key` is when a span was issued. `turn` settles ties: a wait for room, the call, its commands, its wait."""

    spans: Spans
    key: Ints
    turn: Ints

    @staticmethod
    def of(spans: Spans, key: Ints | None = None, turn: int = 0) -> Rows:
        return Rows(spans, spans.start if key is None else key, np.full(len(spans), turn, np.int64))

    @staticmethod
    def concatenate(parts: list[Rows]) -> Rows:
        return Rows(
            Spans.concatenate([part.spans for part in parts]),
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.turn for part in parts]),
        )

    def in_issue_order(self) -> tuple[Spans, Ints]:
        """The spans sorted, and where each of them went."""
        order = np.lexsort((self.turn, self.key))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return self.spans.take(order), place


# The host's side of a trace as spans: calls, what they wait for, and the work between them.
#
# The host lanes are tiled: every call that matters to the device is a span, and the time between
# two of them is work, cut where something begins or ends that a fix may want to take out.

_LAST = 1 << 40


def host_rows(reading: Reading) -> Rows:
    """The calls first and the waits for room in a queue next, each in their own order; the links count on it."""
    parts = [_calls(reading), _waits_for_room(reading), _waits_for_copies(reading), *_loader(reading), _work(reading)]
    rows = Rows.concatenate(parts)
    spans = _with_frames(rows.spans, reading)
    thread_of_lane = {lane: thread for thread, lane in reading.lane_of_thread.items()}
    recording = cost_of_recording(reading.trace, spans, thread_of_lane)
    return Rows(spans.change(recording=recording), rows.key, rows.turn)


def _lane_of_calls(reading: Reading) -> Ints:
    lane_of = np.full(len(reading.trace.threads), reading.main_lane, np.int64)
    lane_of[list(reading.lane_of_thread)] = list(reading.lane_of_thread.values())
    return lane_of[reading.events.thread[reading.calls.event]]


def _begin(reading: Reading) -> Ints:
    """A call that finds the queue full waits first, and only then launches."""
    begin = reading.call_start.copy()
    held = reading.held != NONE
    released = reading.events.end[reading.commands[reading.held[held]]]
    begin[held] = np.clip(released, reading.call_start[held], reading.call_end[held])
    return begin


def _split(reading: Reading) -> Ints:
    """A blocking copy enqueues first, and then waits."""
    start, end = reading.call_start, reading.call_end
    enqueued = np.minimum(end, start + np.minimum(ENQUEUE, (end - start) // 2))
    return np.where(reading.blocking, enqueued, end)


def _calls(reading: Reading) -> Rows:
    calls = reading.calls
    by_event = is_event_sync(reading.trace, calls) & (reading.call_end - reading.call_start > ENQUEUE)
    waits = ((calls.kind == Kind.SYNC) & ~by_event) | ((calls.kind == Kind.ALLOCATE) & calls.waits)
    spans = Spans.of(
        len(calls.event),
        lane=_lane_of_calls(reading),
        kind=calls.kind,
        name=reading.events.name[calls.event],
        start=_begin(reading),
        end=_split(reading),
        awaits=np.where(waits, reading.awaited, NONE),
    )
    return Rows.of(spans, key=reading.call_start)


def _waits_for_room(reading: Reading) -> Rows:
    rows = np.flatnonzero(reading.held != NONE)
    spans = Spans.of(
        len(rows),
        lane=_lane_of_calls(reading)[rows],
        kind=Kind.SYNC,
        name=reading.events.name[reading.calls.event[rows]],
        start=reading.call_start[rows],
        end=_begin(reading)[rows],
    )
    return Rows.of(spans, turn=-1)


def _waits_for_copies(reading: Reading) -> Rows:
    rows = np.flatnonzero(reading.blocking)
    spans = Spans.of(
        len(rows),
        lane=_lane_of_calls(reading)[rows],
        kind=Kind.SYNC,
        name=reading.events.name[reading.calls.event[rows]],
        start=_split(reading)[rows],
        end=reading.call_end[rows],
        awaits=reading.launched[rows],
    )
    return Rows.of(spans, key=reading.call_start[rows], turn=_LAST)


def _loader(reading: Reading) -> tuple[Rows, Rows]:
    """The batches of the loader's workers, and the waits of the loop for them."""
    waits = reading.starved
    begin, end = batches(waits, int(reading.hosts.alive[reading.hosts.main][0, 0]))
    nest = reading.nests[reading.hosts.main]
    name = reading.events.name[nest.event[nest.innermost(waits[:, 0])]] if len(waits) else waits[:, 0]
    made = Spans.of(len(waits), lane=reading.workers_lane, kind=Kind.WORK, name=name, start=begin, end=end)
    waited = Spans.of(
        len(waits),
        lane=reading.main_lane,
        kind=Kind.SYNC,
        name=name,
        start=waits[:, 0],
        end=waits[:, 1],
        awaits=reading.workers_lane,
    )
    return Rows.of(made, key=waits[:, 0], turn=-1), Rows.of(waited)


def _work(reading: Reading) -> Rows:
    return Rows.of(Spans.concatenate([_work_of(reading, thread) for thread in reading.hosts.alive]))


def _work_of(reading: Reading, thread: int) -> Spans:
    """What a thread does between its calls, cut at every border that a fix or a reader may ask for."""
    events, nest = reading.events, reading.nests[thread]
    alive, recorder = reading.hosts.alive[thread], _recorder(reading, thread)
    elsewhere = _elsewhere(reading, thread)
    borders = [alive, recorder, *elsewhere]
    cuts = np.unique(np.concatenate([*(border.ravel() for border in borders), *_cuts(reading, thread)]))
    middle = (cuts[:-1] + cuts[1:]) // 2
    free = inside(middle, alive)
    for intervals in elsewhere:
        free &= ~inside(middle, intervals)
    start, end, middle = cuts[:-1][free], cuts[1:][free], middle[free]
    inner = nest.innermost(middle)
    nothing = np.full(len(inner), len(reading.trace.names))  # UNRECORDED stands behind the trace's own names
    name = np.where(inner == NONE, nothing, events.name[nest.event[inner]]) if len(nest.event) else nothing
    kind = np.where(inside(middle, recorder), Kind.RECORDING, Kind.WORK)
    return Spans.of(
        len(start), lane=reading.lane_of_thread[thread], kind=kind, name=name.astype(np.int64), start=start, end=end
    )


def _elsewhere(reading: Reading, thread: int) -> list[Ints]:
    """When the thread does no work of its own: in calls, while another thread works for it, waiting for a batch."""
    mine = reading.events.thread[reading.calls.event] == thread
    calls = np.stack([reading.call_start[mine], reading.call_end[mine]], axis=1)
    if thread != reading.hosts.main:
        return [calls]
    return [calls, reading.hosts.handoffs[:, 1:], reading.starved]


def _cuts(reading: Reading, thread: int) -> list[Ints]:
    nest = reading.nests[thread]
    mine = reading.events.thread[reading.calls.event] == thread
    apart = worth_telling_apart(nest, reading.role, reading.call_start[mine])
    marks = reading.marks if thread == reading.hosts.main else reading.marks[:0]
    return [nest.start[apart], nest.end[apart], marks]


def _recorder(reading: Reading, thread: int) -> Ints:
    """When the recorder worked for itself, as it says, and this thread did nothing. A full queue is no such thing."""
    events = reading.events
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & ~reading.trace.named(QUEUE_FULL.__eq__))
    rows = rows[np.argsort(events.start[rows])]
    mine = np.sort(np.concatenate([column[events.thread == thread] for column in (events.start, events.end)]))
    quiet = np.searchsorted(mine, events.end[rows]) == np.searchsorted(mine, events.start[rows])
    spans = np.stack([events.start[rows], events.end[rows]], axis=1)[quiet]
    if len(spans) > 1:  # they may overlap each other
        spans = spans[np.concatenate([[True], spans[1:, 0] >= np.maximum.accumulate(spans[:-1, 1])])]
    return spans


def _with_frames(spans: Spans, reading: Reading) -> Spans:
    frame = np.full(len(spans), NONE, np.int64)
    for thread, nest in reading.nests.items():
        mine = np.flatnonzero(spans.lane == reading.lane_of_thread[thread])
        inner = nest.innermost((spans.start[mine] + spans.end[mine]) // 2)
        frame[mine] = np.where(inner == NONE, NONE, inner + reading.first_frame[thread])
    return spans.change(frame=frame)


COST = {
    Category.OPERATOR: 1_200,
    Category.PYTHON: 800,
    Category.RUNTIME: 2_200,
    Category.DRIVER: 2_200,
    Category.LINE: 800,
}
"""Nanoseconds that one recorded event adds, measured on a slow host; only the proportions matter."""


def cost_of_recording(trace: Trace, spans: Spans, thread_of_lane: dict[int, int]) -> Ints:
    """Half for every event that begins within a span and half for every one that ends there."""
    events = trace.events
    cost = np.zeros(len(spans), np.float64)
    for lane, thread in thread_of_lane.items():
        mine = np.flatnonzero(spans.lane == lane)
        here = events.thread == thread
        for category, each in COST.items():
            rows = here & (events.category == category)
            for times in (np.sort(events.start[rows]), np.sort(events.end[rows])):
                count = np.searchsorted(times, spans.end[mine]) - np.searchsorted(times, spans.start[mine])
                cost[mine] += count * each / 2
    recorder = spans.kind == Kind.RECORDING
    return np.where(recorder, spans.end - spans.start, cost).astype(np.int64)
