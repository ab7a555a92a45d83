"""Kineto's events -> a `Timeline` of one rank."""

from __future__ import annotations

import zlib

import numpy as np

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import UNRECORDED, MemoryUse, Timeline, check_times
from keepbusy.timeline.replay import settle
from keepbusy.traces.event_columns import Collective, Trace
from keepbusy.traces.links import links_of
from keepbusy.traces.rank_spans import spans_of
from keepbusy.traces.rank_trace import RankTrace
from keepbusy.traces.trace_facts import facts_of


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
    spans, place = spans_of(trace, groups)
    timeline = Timeline(
        lanes=trace.lanes,
        names=(*file.names, UNRECORDED),
        spans=spans,
        frames=trace.frames,
        memory=_memory(trace),
        facts=facts_of(file, dict(zip(groups.tolist(), members, strict=False))),
    )
    timeline = timeline.change(links=links_of(trace, timeline, place))
    rows = timeline.rows_of(trace.main_lane)
    marks = np.searchsorted(spans.start[rows], trace.marks)
    return timeline.change(marks=np.unique(rows[marks[marks < len(rows)]]))


def _memory(trace: RankTrace) -> MemoryUse:
    """What the program's own threads took and gave back."""
    memory, lanes = trace.file.memory, trace.lane_of_thread
    begun, over = trace.events.start.min(), trace.events.end.max()
    memory = memory.take(np.isin(memory.lane, list(lanes)) & (memory.time >= begun) & (memory.time <= over))
    return memory.change(lane=np.array([lanes[thread] for thread in memory.lane.tolist()], np.int64))


def _group_of(one: Collective, rank: int) -> int:
    """A number that all members of its group agree on.

    A send and its receive meet between two ranks; everything else between all of the group.
    """
    members = f"{one.group}|{one.ranks}"
    if one.peer >= 0:
        mine = one.ranks.index(rank) if rank in one.ranks else rank
        members = f"{members}|{min(mine, one.peer)}-{max(mine, one.peer)}"
    return zlib.crc32(members.encode()) & 0x7FFFFFFF
