"""Settle: read the facts of a recording out of its times.

What a span does once nothing holds it up (`work`), and which lag each of its releases leaves
behind (`lag`). The lag belongs to the release that bound the span: had another release been the
last one, the span would have begun a typical lag after that one. So the bound one keeps what was
measured, and the others keep no more than what is typical.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from keepbusy.timeline.model import EVERY_LANE, NONE, Ints, Kind, LinkKind, Timeline, previous_on_lane
from keepbusy.timeline.replay import NEVER, PENDING_LIMIT, continued, launched_lane

TYPICAL_GAP = 1_000
TYPICAL_LATENCY = 6_000
EARLY_RETURN = 30_000
"""A blocking call may return before its command ends: a pageable copy by up to 10 µs, measured, and clocks drift."""
_ENOUGH = 50

Queue: TypeAlias = tuple[Ints, Ints, Ints]
"""A stream's commands, the launches that begin there, and among the commands the place of what each enqueues first."""


def settle(timeline: Timeline) -> Timeline:
    """The same timeline with `work` and every `lag` derived from its measured times."""
    if not len(timeline):
        return timeline
    queues = list(_queues(timeline))
    timeline = _lags(_with_room(timeline, queues))
    awaits, awaited = _awaited(timeline)
    spans, span = timeline.spans, timeline.spans.end - timeline.spans.start
    work = np.where(awaited > spans.start, spans.end - awaited, span)
    timeline = timeline.change_spans(awaits=awaits)
    work = np.where(spans.kind == Kind.LAUNCH, _without_back_pressure(timeline, span, queues), work)
    work = np.where(spans.meeting != NONE, spans.end - last_arrival(timeline), work)
    return timeline.change_spans(work=work)


def _lags(timeline: Timeline) -> Timeline:
    spans, links = timeline.spans, timeline.links
    before = previous_on_lane(spans.lane)
    on_lane = np.where(before == NONE, -NEVER, spans.start - spans.end[before])
    to_start = links.kind == LinkKind.LAUNCH
    released = np.where(to_start, spans.start[links.source], spans.end[links.source])
    on_link = spans.start[links.target] - released
    to_sync = spans.kind[links.target] == Kind.SYNC  # such a link releases the end of its target, not the start
    bound = on_lane.copy()
    np.minimum.at(bound, links.target[~to_sync], on_link[~to_sync])
    gap, latency = typical_lags(timeline)
    usual = np.where(timeline.on_device, gap, 0)
    lag = np.where((on_lane == bound) & (before != NONE), on_lane, np.minimum(on_lane, usual))
    link_usual = np.where(to_start, latency, np.where(links.kind == LinkKind.ORDER, gap, 0))
    link_lag = np.where(on_link == bound[links.target], on_link, np.minimum(on_link, link_usual))
    link_lag = np.where(to_sync, 0, link_lag)
    lag = np.where(before == NONE, usual, lag)
    return timeline.change_spans(lag=lag).change(links=links.change(lag=link_lag))


def typical_lags(timeline: Timeline) -> tuple[int, int]:
    """Between two commands that stood ready, and from a launch to its command on an idle stream."""
    spans, links = timeline.spans, timeline.links
    launches = links.take(np.flatnonzero(links.kind == LinkKind.LAUNCH))
    launch, command = launches.source, launches.target
    before = previous_on_lane(spans.lane)[command]
    tail = np.where(before == NONE, NEVER, spans.end[before])
    latency = (spans.start[command] - spans.start[launch])[tail < spans.start[launch]]
    ready = (before != NONE) & (spans.start[command] - spans.end[launch] > 30_000)
    gap = (spans.start[command] - tail)[ready]
    gap = gap[gap < 20_000]
    return (
        int(np.median(gap)) if len(gap) >= _ENOUGH else TYPICAL_GAP,
        int(np.median(latency)) if len(latency) >= _ENOUGH else TYPICAL_LATENCY,
    )


def _awaited(timeline: Timeline) -> tuple[Ints, Ints]:
    """Of each sync: whom it awaits, and when they had caught up. A sync that returned before them awaited nobody."""
    spans = timeline.spans
    awaited = np.full(len(timeline), NEVER, np.int64)
    syncs = np.flatnonzero(spans.awaits != NONE)
    for index, lane in enumerate(timeline.lanes):
        whole = _of_device(timeline, syncs, lane.rank) & (lane.device is not None)
        mine = syncs[(spans.awaits[syncs] == index) | whole]
        if not len(mine):
            continue
        rows = timeline.rows_of(index)
        place = np.searchsorted(rows, mine) - 1
        tail = np.where(place >= 0, spans.end[rows[np.maximum(place, 0)]], NEVER) if len(rows) else NEVER
        awaited[mine] = np.maximum(awaited[mine], tail)
    _await_links(timeline, awaited)
    wrong = awaited > spans.end + EARLY_RETURN
    return np.where(wrong, NONE, spans.awaits), np.where(wrong, NEVER, awaited)


def _await_links(timeline: Timeline, awaited: Ints) -> None:
    """A sync may also wait for one command, by an event."""
    spans, links = timeline.spans, timeline.links
    mine = links.take(np.flatnonzero(spans.kind[links.target] == Kind.SYNC))
    np.maximum.at(awaited, mine.target, spans.end[mine.source] + mine.lag)


def _of_device(timeline: Timeline, syncs: Ints, rank: int) -> Ints:
    return (timeline.spans.awaits[syncs] == EVERY_LANE) & (timeline.rank_of_rows[syncs] == rank)


def _with_room(timeline: Timeline, queues: list[Queue]) -> Timeline:
    """A queue holds at least as many commands as were pending when a launch returned; other devices, other limits."""
    limit = int(timeline.facts.get("pending_limit", PENDING_LIMIT))
    ends, seen = timeline.spans.end, limit
    for commands, launch, place in queues:
        done = np.searchsorted(np.maximum.accumulate(ends[commands]), ends[launch], side="right")
        seen = max(seen, int((place - done).max()) + 1)
    return timeline if seen == limit else timeline.change(facts={**timeline.facts, "pending_limit": seen})


def _without_back_pressure(timeline: Timeline, span: Ints, queues: list[Queue]) -> Ints:
    """The queue of a stream holds so many commands; the launch that finds it full waits for the oldest."""
    spans, work = timeline.spans, span.copy()
    limit = int(timeline.facts.get("pending_limit", PENDING_LIMIT))
    for commands, launch, place in queues:
        free = np.where(place >= limit, spans.end[commands[np.maximum(place - limit, 0)]], NEVER)
        blocked = (free > spans.start[launch]) & (free <= spans.end[launch])
        work[launch[blocked]] = (spans.end[launch] - free)[blocked]
    return work


def _queues(timeline: Timeline) -> Iterator[Queue]:
    launched, queued = launched_lane(timeline), ~continued(timeline)
    links = timeline.links.take(np.flatnonzero(timeline.links.kind == LinkKind.LAUNCH))
    for lane in np.unique(launched[launched != NONE]).tolist():
        rows = timeline.rows_of(lane)
        ends = np.flatnonzero(np.append(queued[rows][1:], True))  # of a graph, its last command
        commands, slot = rows[ends], np.cumsum(queued[rows]) - 1
        mine = links.take(
            np.flatnonzero((timeline.spans.lane[links.target] == lane) & (launched[links.source] == lane))
        )
        launch, first = np.unique(mine.source, return_index=True)
        yield commands, launch, slot[np.searchsorted(rows, mine.target[first])]


def last_arrival(timeline: Timeline) -> Ints:
    """Of each part of a collective, when the last of all its parts began; of other rows, their own start."""
    spans = timeline.spans
    parts = np.flatnonzero(spans.meeting != NONE)
    last = np.full(len(timeline.meetings), NEVER, np.int64)
    np.maximum.at(last, spans.meeting[parts], spans.start[parts])
    arrival = spans.start.copy()
    arrival[parts] = last[spans.meeting[parts]]
    return arrival
