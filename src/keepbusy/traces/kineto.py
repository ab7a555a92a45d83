"""Kineto's events -> a `Timeline` of one rank."""

from __future__ import annotations

import numpy as np

from keepbusy.timeline.model import NONE, UNRECORDED, Ints, Kind, Links, Spans, Timeline
from keepbusy.timeline.replay import settle
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.traces.cuda_calls import directions_of_names, groups_and_sizes
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.host_spans import Rows, host_rows
from keepbusy.traces.kineto_names import NCCL_KERNEL, Category
from keepbusy.traces.links import handoff_links, launch_links, order_links, queue_links
from keepbusy.traces.trace_facts import Reading

_DEVICE_KINDS = {Category.KERNEL: Kind.KERNEL, Category.COPY: Kind.COPY, Category.FILL: Kind.FILL}


def timeline_of(trace: Trace, rank: int = 0) -> Timeline:
    reading = Reading(trace, rank)
    host, device = host_rows(reading), _device_rows(reading)
    spans, place = Rows.concatenate([host, device]).in_issue_order()
    timeline = Timeline(
        lanes=reading.lanes,
        names=(*trace.names, UNRECORDED),
        spans=spans,
        frames=reading.frames.described(trace.names),
        facts=_facts(trace, rank),
    )
    call_rows, command_rows = place[: len(reading.calls.event)], place[len(host.spans) :]
    timeline = timeline.change(links=launch_links(call_rows, command_rows, reading.launch))
    links = [timeline.links, *_other_links(reading, timeline, call_rows, command_rows, place)]
    timeline = timeline.change(links=Links.concatenate(links))
    return settle(timeline.change(marks=_rows_at(timeline, reading.main_lane, reading.marks)))


def _other_links(
    reading: Reading, timeline: Timeline, call_rows: Ints, command_rows: Ints, place: Ints
) -> tuple[Links, Links, Links]:
    held = reading.held[reading.held != NONE]
    queue_rows = place[len(call_rows) : len(call_rows) + len(held)]
    return (
        handoff_links(timeline, reading.lane_of_thread, reading.hosts),
        order_links(reading.trace, timeline, reading.calls, call_rows),
        queue_links(command_rows[held], queue_rows),
    )


def _device_rows(reading: Reading) -> Rows:
    events, commands, launch = reading.events, reading.commands, reading.launch
    kind = _kinds(reading)
    direction, pinned = directions_of_names(reading.trace.names)
    collective, is_copy = events.collective[commands], kind == Kind.COPY
    group, moved = groups_and_sizes(reading.trace.collectives, reading.rank)
    spans = Spans.of(
        len(commands),
        lane=reading.lane_of_command,
        kind=kind,
        name=events.name[commands],
        start=events.start[commands],
        end=events.end[commands],
        group=np.where(collective == NONE, NONE, group[collective]),
        size=np.where(collective == NONE, np.maximum(events.size[commands], 0), moved[collective]),
        direction=np.where(is_copy, direction[events.name[commands]], 0),
        pinned=np.where(is_copy, pinned[events.name[commands]], NONE),
    )
    issued = np.where(launch == NONE, events.start[commands], reading.call_start[launch])
    issued = np.where(reading.backlog, events.start.min() - 1, issued)
    # a command follows its launch at once; several of one launch keep the order in which they ran
    return Rows(spans, issued, 1 + np.arange(len(commands)))


def _kinds(reading: Reading) -> Ints:
    events, commands = reading.events, reading.commands
    kind = np.array([_DEVICE_KINDS[Category(category)] for category in range(3)])[events.category[commands]]
    nccl = reading.trace.begins(NCCL_KERNEL)[commands]
    meets = (events.collective[commands] != NONE) | nccl
    return np.where((kind == Kind.KERNEL) & meets, Kind.COLLECTIVE, kind)


def _rows_at(timeline: Timeline, lane: int, marks: Ints) -> Ints:
    """The rows of the main lane that begin at the marks."""
    rows = timeline.rows_of(lane)
    place = np.searchsorted(timeline.spans.start[rows], marks)
    return np.unique(rows[place[place < len(rows)]])


def _facts(trace: Trace, rank: int) -> RunFacts:
    group, _ = groups_and_sizes(trace.collectives, rank)
    members = [2 if one.peer >= 0 else one.group_size for one in trace.collectives]
    return RunFacts(
        device=_device_name(trace),
        stacks=bool(trace.facts.get("with_stack")),
        source=trace.path,
        skipped=trace.skipped,
        groups=dict(zip(group.tolist(), members, strict=False)),
    )


def _device_name(trace: Trace) -> str:
    devices = trace.facts.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""
