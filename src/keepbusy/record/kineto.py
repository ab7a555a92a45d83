"""Kineto's events -> a `Timeline` of one rank.

The host lanes are tiled: every call that matters to the device is a span, and the time between
two of them is work, cut where something begins or ends that a fix may want to take out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.record.calls import (
    ENQUEUE,
    Calls,
    awaited_lane,
    calls_of,
    directions_of_names,
    is_event_sync,
    launch_of,
    released_by,
    waits_for_its_copy,
)
from keepbusy.record.events import Category, Trace
from keepbusy.record.collectives import groups_and_sizes
from keepbusy.record.frames import Nest, frames_of, nest_of, worth_telling_apart
from keepbusy.record.links import handoff_links, launch_links, order_links, queue_links
from keepbusy.record.recording import cost_of_recording
from keepbusy.record.steps import step_marks
from keepbusy.record.threads import Threads, inside, issuing_threads, threads_of
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import NONE, Ints, Kind, Lane, Spans, Timeline
from keepbusy.timeline.settle import settle

_DEVICE_KINDS = {Category.KERNEL: Kind.KERNEL, Category.COPY: Kind.COPY, Category.FILL: Kind.FILL}


@dataclass(frozen=True)
class Rows:
    """Spans before they stand in issue order. `key` is when they were issued, `turn` settles ties."""

    spans: Spans
    key: Ints
    turn: Ints

    @staticmethod
    def concatenate(parts: list[Rows]) -> Rows:
        return Rows(
            Spans.concatenate([part.spans for part in parts]),
            np.concatenate([part.key for part in parts]),
            np.concatenate([part.turn for part in parts]),
        )


def timeline_of(trace: Trace, rank: int = 0) -> Timeline:
    commands = _commands(trace)
    threads = issuing_threads(trace, commands)
    calls = calls_of(trace, commands, threads)
    if not len(calls.event):
        raise BadInput(
            f"{trace.path} shows commands of the device but no call that launched them; record the CPU and CUDA activities together."
        )
    launch = launch_of(trace, calls, commands)
    hosts = threads_of(trace, threads, calls)
    lanes = _lanes(trace, hosts, commands, rank)
    nests = {thread: nest_of(trace, thread) for thread in hosts.alive}
    frames, offsets = frames_of(nests, {thread: lanes.of_thread[thread] for thread in nests}, trace)
    marks = step_marks(trace, hosts.main)

    host = _host_rows(trace, calls, hosts, nests, offsets, lanes, commands, launch, marks)
    device = _device_rows(trace, calls, commands, launch, lanes)
    rows = Rows.concatenate([host, device])
    order = np.lexsort((rows.turn, rows.key))
    spans = rows.spans.take(order)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    call_rows, command_rows = place[: len(calls.event)], place[len(host.spans) :]

    held = released_by(trace, calls, commands, launch, lanes.of_command)
    queue_rows = place[len(calls.event) : len(calls.event) + int((held != NONE).sum())]
    links = launch_links(call_rows, command_rows, launch)
    timeline = Timeline(
        lanes=lanes.lanes,
        names=trace.names,
        spans=spans,
        links=links,
        frames=frames,
        facts=_facts(trace, rank),
    )
    extra = [
        handoff_links(timeline, lanes.of_thread, hosts),
        order_links(trace, timeline, calls, call_rows),
        queue_links(command_rows[held[held != NONE]], queue_rows),
    ]
    links = type(links).concatenate([links, *extra])
    timeline = timeline.change(links=links, marks=_rows_at(timeline, lanes.of_thread[hosts.main], marks))
    return settle(timeline)


def _commands(trace: Trace) -> Ints:
    """The device's commands in order of start."""
    events = trace.events
    rows = np.flatnonzero(events.category <= Category.FILL)
    return rows[np.lexsort((events.end[rows], events.start[rows]))]


@dataclass(frozen=True)
class _Lanes:
    lanes: tuple[Lane, ...]
    of_thread: dict[int, int]
    of_command: Ints


def _lanes(trace: Trace, hosts: Threads, commands: Ints, rank: int) -> _Lanes:
    events = trace.events
    threads = [hosts.main, *sorted(thread for thread in hosts.alive if thread != hosts.main)]
    lanes = [Lane(rank, None, index, trace.threads[thread].name) for index, thread in enumerate(threads)]
    streams = np.stack([events.device[commands], events.stream[commands]], axis=1).astype(np.int64)
    unique, which = np.unique(streams, axis=0, return_inverse=True)
    lanes += [Lane(rank, int(device), int(stream), f"stream {stream}") for device, stream in unique.tolist()]
    of_thread = {thread: index for index, thread in enumerate(threads)}
    return _Lanes(tuple(lanes), of_thread, which.reshape(-1) + len(threads))


def _device_rows(trace: Trace, calls: Calls, commands: Ints, launch: Ints, lanes: _Lanes) -> Rows:
    events = trace.events
    kinds = np.array([_DEVICE_KINDS[Category(category)] for category in range(3)])
    kind = kinds[events.category[commands]]
    nccl = np.array([name.startswith("nccl") for name in trace.names], bool)[events.name[commands]]
    kind = np.where((kind == Kind.KERNEL) & ((events.collective[commands] != NONE) | nccl), Kind.COLLECTIVE, kind)
    direction, pinned = directions_of_names(trace.names)
    is_copy = kind == Kind.COPY
    collective = events.collective[commands]
    group, moved = groups_and_sizes(trace.collectives, lanes.lanes[0].rank)
    spans = Spans.of(
        len(commands),
        lane=lanes.of_command,
        kind=kind,
        name=events.name[commands],
        start=events.start[commands],
        end=events.end[commands],
        group=np.where(collective == NONE, NONE, group[collective]),
        size=np.where(collective == NONE, np.maximum(events.size[commands], 0), moved[collective]),
        direction=np.where(is_copy, direction[events.name[commands]], 0),
        pinned=np.where(is_copy, pinned[events.name[commands]], NONE),
    )
    issued = np.where(launch == NONE, events.start[commands], events.start[calls.event[launch]])
    # a command follows its launch at once; several of one launch keep the order in which they ran
    return Rows(spans, issued, 1 + np.arange(len(commands)))


def _host_rows(
    trace: Trace,
    calls: Calls,
    hosts: Threads,
    nests: dict[int, Nest],
    offsets: dict[int, int],
    lanes: _Lanes,
    commands: Ints,
    launch: Ints,
    marks: Ints,
) -> Rows:
    events = trace.events
    launched = np.full(len(calls.event), NONE, np.int64)
    known = launch != NONE
    launched[launch[known][::-1]] = lanes.of_command[known][::-1]
    blocking = waits_for_its_copy(trace, calls, commands, launch)
    start, end = events.start[calls.event], events.end[calls.event]
    lane = np.array([lanes.of_thread.get(int(thread), 0) for thread in events.thread[calls.event]], np.int64)
    awaits = awaited_lane(trace, calls, launched)
    own = (calls.kind == Kind.SYNC) & ~(is_event_sync(trace, calls) & (end - start > ENQUEUE))
    held = released_by(trace, calls, commands, launch, lanes.of_command)
    queued = np.flatnonzero(held != NONE)
    begin = start.copy()  # a call that finds the queue full waits first, and only then launches
    begin[queued] = np.clip(events.end[commands[held[queued]]], start[queued], end[queued])
    split = np.where(blocking & (held == NONE), np.minimum(end, start + np.minimum(ENQUEUE, (end - start) // 2)), end)
    of_calls = Spans.of(
        len(calls.event),
        lane=lane,
        kind=calls.kind,
        name=events.name[calls.event],
        start=begin,
        end=split,
        awaits=np.where(own | ((calls.kind == Kind.ALLOCATE) & calls.waits), awaits, NONE),
    )
    of_queue = Spans.of(
        len(queued),
        lane=lane[queued],
        kind=Kind.SYNC,
        name=of_calls.name[queued],
        start=start[queued],
        end=begin[queued],
    )
    rest = np.flatnonzero(blocking & (held == NONE))
    of_waits = Spans.of(
        len(rest),
        lane=lane[rest],
        kind=Kind.SYNC,
        name=of_calls.name[rest],
        start=split[rest],
        end=end[rest],
        awaits=launched[rest],
    )
    work = _work(trace, calls, hosts, nests, lanes, marks)
    spans = Spans.concatenate([of_calls, of_queue, of_waits, work])
    spans = _with_frames(spans, nests, offsets, lanes)
    spans = spans.change(
        recording=cost_of_recording(trace, spans, {index: thread for thread, index in lanes.of_thread.items()})
    )
    turn = [np.zeros(len(calls.event)), np.full(len(queued), -1), np.full(len(rest), 1 << 40), np.zeros(len(work))]
    key = np.concatenate([start, start[queued], start[rest], work.start])
    return Rows(spans, key.astype(np.int64), np.concatenate(turn).astype(np.int64))


def _with_frames(spans: Spans, nests: dict[int, Nest], offsets: dict[int, int], lanes: _Lanes) -> Spans:
    frame = np.full(len(spans), NONE, np.int64)
    for thread, nest in nests.items():
        mine = np.flatnonzero(spans.lane == lanes.of_thread[thread])
        inner = nest.innermost((spans.start[mine] + spans.end[mine]) // 2)
        frame[mine] = np.where(inner == NONE, NONE, inner + offsets[thread])
    return spans.change(frame=frame)


def _work(trace: Trace, calls: Calls, hosts: Threads, nests: dict[int, Nest], lanes: _Lanes, marks: Ints) -> Spans:
    parts = [
        _work_of_thread(trace, calls, hosts, thread, nests[thread], lanes.of_thread[thread], marks)
        for thread in hosts.alive
    ]
    return Spans.concatenate(parts)


def _work_of_thread(
    trace: Trace, calls: Calls, hosts: Threads, thread: int, nest: Nest, lane: int, marks: Ints
) -> Spans:
    """What a thread does between its calls, cut at every border that a fix or a reader may ask for."""
    events = trace.events
    mine = calls.event[events.thread[calls.event] == thread]
    busy = np.stack([events.start[mine], events.end[mine]], axis=1)
    apart = worth_telling_apart(nest, trace.names, events.name, events.start[mine])
    away = hosts.handoffs[:, 1:] if thread == hosts.main else np.zeros((0, 2), np.int64)
    recorder = _recorder(trace, thread)
    borders = [
        busy.ravel(),
        away.ravel(),
        hosts.alive[thread].ravel(),
        nest.start[apart],
        nest.end[apart],
        recorder.ravel(),
    ]
    cuts = np.unique(np.concatenate([*borders, marks if thread == hosts.main else marks[:0]]))
    middle = (cuts[:-1] + cuts[1:]) // 2
    free = inside(middle, hosts.alive[thread]) & ~inside(middle, busy) & ~inside(middle, away)
    name = np.where(
        nest.innermost(middle) == NONE, 0, events.name[nest.event[nest.innermost(middle)]] if len(nest.event) else 0
    )
    kind = np.where(inside(middle, recorder), Kind.RECORDING, Kind.WORK)
    return Spans.of(
        int(free.sum()), lane=lane, kind=kind[free], name=name[free], start=cuts[:-1][free], end=cuts[1:][free]
    )


def _recorder(trace: Trace, thread: int) -> Ints:
    """When the recorder says that it worked for itself, and this thread meanwhile did nothing. A full command buffer is no such thing."""
    events = trace.events
    named = np.array([name != "Command Buffer Full" for name in trace.names], bool)
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & named[events.name])
    rows = rows[np.argsort(events.start[rows])]
    mine = np.sort(np.concatenate([column[events.thread == thread] for column in (events.start, events.end)]))
    quiet = np.searchsorted(mine, events.end[rows]) == np.searchsorted(mine, events.start[rows])
    spans = np.stack([events.start[rows], events.end[rows]], axis=1)[quiet]
    if len(spans) > 1:  # they may overlap each other
        spans = spans[np.concatenate([[True], spans[1:, 0] >= np.maximum.accumulate(spans[:-1, 1])])]
    return spans


def _rows_at(timeline: Timeline, lane: int, marks: Ints) -> Ints:
    """The rows of the main lane that begin at the marks."""
    rows = timeline.rows_of(lane)
    place = np.searchsorted(timeline.spans.start[rows], marks)
    return np.unique(rows[place[place < len(rows)]])


def _facts(trace: Trace, rank: int) -> dict[str, object]:
    devices = trace.facts.get("deviceProperties") or []
    name = devices[0].get("name", "") if isinstance(devices, list) and devices and isinstance(devices[0], dict) else ""
    group, _ = groups_and_sizes(trace.collectives, rank)
    return {
        "device": str(name),
        "stacks": bool(trace.facts.get("with_stack")),
        "source": trace.path,
        "groups": {
            str(number): 2 if one.peer >= 0 else one.group_size
            for number, one in zip(group.tolist(), trace.collectives)
        },
    }
