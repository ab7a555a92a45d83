"""Kineto's events -> a `Timeline` of one rank."""

from __future__ import annotations

import re
import zlib

import numpy as np

from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import NONE, UNRECORDED, Ints, Kind, MemoryUse, Spans, Timeline, check_times
from keepbusy.timeline.replay import settle
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.traces.event_columns import Collective, Trace
from keepbusy.traces.host_spans import IssuedSpans, host_spans, in_issue_order, within_frames
from keepbusy.traces.kineto_names import ELEMENT_SIZES, NCCL_KERNEL
from keepbusy.traces.links import links_of
from keepbusy.traces.rank_trace import RankTrace
from keepbusy.traces.trace_facts import device_name, pinned_bandwidth, world_size

LARGEST_MESSAGE = 1 << 50
"""No collective moves so many bytes; larger numbers are damaged, and their sums would leave 64 bits."""
_BITS = re.compile(r"(\d{1,4})")


def timeline_of(file: Trace, rank: int = 0) -> Timeline:
    timeline = settle(_as_traced(file, rank))
    try:
        check_times(timeline)
    except ValueError as error:
        raise BadInput(f"{file.path} is damaged: it holds {error}; record it again.") from None
    return timeline


def _as_traced(file: Trace, rank: int) -> Timeline:
    """With the times of the trace. What was looked up for it goes before work and lags are derived from them."""
    trace = RankTrace(file, rank)
    groups = np.array([_group_of(one, rank) for one in file.collectives] + [0], np.int64)  # one more stands for none
    members = [2 if one.peer >= 0 else one.group_size for one in file.collectives]
    spans, place = in_issue_order([*host_spans(trace), _commands(trace, groups)])
    timeline = Timeline(
        lanes=trace.lanes,
        names=(*file.names, UNRECORDED),
        spans=within_frames(trace, spans),
        frames=trace.frames,
        memory=_memory(trace),
        facts=RunFacts(
            device=device_name(file),
            pinned_bandwidth=pinned_bandwidth(file),
            stacks=bool(file.facts.get("with_stack")),
            source=file.path,
            skipped=file.skipped,
            world=world_size(file),
            groups=dict(zip(groups.tolist(), members, strict=False)),
        ),
    )
    timeline = timeline.change(links=links_of(trace, timeline, place, place[-len(trace.commands) :]))
    rows = timeline.rows_of(trace.main_lane)
    marks = np.searchsorted(spans.start[rows], trace.marks)
    return timeline.change(marks=np.unique(rows[marks[marks < len(rows)]]))


def _memory(trace: RankTrace) -> MemoryUse:
    """What the program's own threads took and gave back."""
    memory, lanes = trace.file.memory, trace.lane_of_thread
    begun, over = trace.events.start.min(), trace.events.end.max()
    memory = memory.take(np.isin(memory.lane, list(lanes)) & (memory.time >= begun) & (memory.time <= over))
    return memory.change(lane=np.array([lanes[thread] for thread in memory.lane.tolist()], np.int64))


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
    return IssuedSpans(spans, issued, 1 + np.arange(len(commands)))


def _group_of(one: Collective, rank: int) -> int:
    """A number that all members of its group agree on.

    A send and its receive meet between two ranks; everything else between all of the group.
    """
    members = f"{one.group}|{one.ranks}"
    if one.peer >= 0:
        mine = one.ranks.index(rank) if rank in one.ranks else rank
        members = f"{members}|{min(mine, one.peer)}-{max(mine, one.peer)}"
    return zlib.crc32(members.encode()) & 0x7FFFFFFF


def _bytes_of(one: Collective) -> int:
    dtype = one.dtype.lower()
    bits = _BITS.search(dtype)
    each = ELEMENT_SIZES.get(dtype) or (max(1, int(bits[1]) // 8) if bits else 1)
    return min(LARGEST_MESSAGE, max(one.elements_in, one.elements_out) * each)
