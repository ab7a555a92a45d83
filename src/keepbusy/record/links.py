"""Who released whom: launches and their commands, stream waits, handoffs between host threads."""

from __future__ import annotations

import bisect
import re

import numpy as np

from keepbusy.record.calls import Calls
from keepbusy.record.events import Category, Trace
from keepbusy.record.threads import Threads
from keepbusy.timeline.model import NONE, Ints, LinkKind, Links, Timeline
from keepbusy.timeline.replay import NEVER

_STREAM_WAIT = re.compile(r"^(cuda|hip)StreamWaitEvent|^cuStreamWaitEvent")
CLOCK_JITTER = 1_000
"""Commands of two streams may seem to overlap by this much although one waited for the other."""
TIGHT = 8_000
_EVENT_SYNC = re.compile(r"EventSynchronize$")


def launch_links(call_rows: Ints, command_rows: Ints, launch: Ints) -> Links:
    known = np.flatnonzero(launch != NONE)
    return Links.of(len(known), source=call_rows[launch[known]], target=command_rows[known], kind=LinkKind.LAUNCH)


def queue_links(commands: Ints, queue_rows: Ints) -> Links:
    """A host that found a queue full goes on when a command has made room."""
    return Links.of(len(commands), source=commands, target=queue_rows, kind=LinkKind.ORDER)


def handoff_links(timeline: Timeline, lane_of: dict[int, int], hosts: Threads) -> Links:
    """The main thread -> a burst of another, and back."""
    source, target = [], []
    main = timeline.rows_of(lane_of[hosts.main])
    ends, starts = timeline.spans.end[main], timeline.spans.start[main]
    for thread in np.unique(hosts.handoffs[:, 0]).tolist():
        bursts = hosts.handoffs[hosts.handoffs[:, 0] == thread]
        rows = timeline.rows_of(lane_of[thread])
        first = np.searchsorted(timeline.spans.start[rows], bursts[:, 1])
        last = np.searchsorted(timeline.spans.start[rows], bursts[:, 2]) - 1
        before = np.searchsorted(ends, bursts[:, 1], side="right") - 1
        after = np.searchsorted(starts, bursts[:, 2])
        into, back = (before >= 0) & (first < len(rows)), (after < len(main)) & (last >= 0)
        source += [main[before[into]], rows[last[back]]]
        target += [rows[first[into]], main[after[back]]]
    if not source:
        return Links.of(0)
    sources, targets = np.concatenate(source), np.concatenate(target)
    forward = sources < targets
    return Links.of(int(forward.sum()), source=sources[forward], target=targets[forward], kind=LinkKind.HANDOFF)


def order_links(trace: Trace, timeline: Timeline, calls: Calls, call_rows: Ints) -> Links:
    """Waits of one stream for another, and of the host for an event."""
    pairs = [*_stream_waits(trace, timeline), *_event_syncs(trace, timeline, calls, call_rows)]
    table = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    return Links.of(len(table), source=table[:, 0], target=table[:, 1], kind=LinkKind.ORDER)


def _stream_waits(trace: Trace, timeline: Timeline) -> list[tuple[int, int]]:
    """A stream wait binds the next launch on its stream. Traces name neither stream nor event: the times must tell."""
    events = trace.events
    named = np.array([bool(_STREAM_WAIT.match(name)) for name in trace.names], bool)
    is_call = (events.category == Category.RUNTIME) | (events.category == Category.DRIVER)
    waits = np.sort(events.start[is_call & named[events.name]])
    streams = [_Stream(timeline, index) for index, lane in enumerate(timeline.lanes) if lane.device is not None]
    if not len(waits) or len(streams) < 2:
        return []
    return [pair for when in waits.tolist() for pair in _bound_by(streams, when)]


class _Stream:
    """One device lane as a wait sees it: when each of its commands was issued, began and ended."""

    def __init__(self, timeline: Timeline, lane: int) -> None:
        spans, links = timeline.spans, timeline.links
        launches = links.take(np.flatnonzero((spans.lane[links.target] == lane) & (links.kind == LinkKind.LAUNCH)))
        order = np.argsort(launches.target)
        self.row = launches.target[order].tolist()
        self.issued = spans.start[launches.source[order]].tolist()
        self.start, self.end = spans.start[self.row].tolist(), spans.end[self.row].tolist()

    def next_after(self, when: int) -> int:
        return bisect.bisect_left(self.issued, when)

    def ended_by(self, start: int, last: int) -> tuple[int, int]:
        """The end and the row of the latest of the first `last` commands that had ended at `start`."""
        place = bisect.bisect_right(self.end, start + CLOCK_JITTER, 0, last) - 1
        return (self.end[place], self.row[place]) if place >= 0 else (NEVER, NONE)

    def held_up(self, place: int, until: int) -> bool:
        """Neither its launch nor its own stream explains that the command began only then."""
        before = self.end[place - 1] if place else NEVER
        return max(before, self.issued[place]) < until


def _bound_by(streams: list[_Stream], when: int) -> list[tuple[int, int]]:
    """Who waited for whom: a command that begins just as another stream's command ends has waited for it.

    Where none does, the stream that launches next is taken to wait for the last commands of the
    others, if its times allow that; a release that did not bind costs nothing to assume.
    """
    places = [(stream, stream.next_after(when)) for stream in streams]
    waiting = sorted((pair for pair in places if pair[1] < len(pair[0].row)), key=lambda one: one[0].issued[one[1]])
    for stream, place in waiting:
        tight = [other.ended_by(stream.start[place], last) for other, last in places if other is not stream]
        tight = [(end, row) for end, row in tight if stream.start[place] - end < TIGHT and stream.held_up(place, end)]
        if tight:
            return [(max(tight)[1], stream.row[place])]
    for stream, place in waiting:
        released = [
            (other.row[last - 1], stream.row[place])
            for other, last in places
            if other is not stream and last > 0 and other.end[last - 1] <= stream.start[place] + CLOCK_JITTER
        ]
        if released:
            return released
    return []


def _event_syncs(trace: Trace, timeline: Timeline, calls: Calls, call_rows: Ints) -> list[tuple[int, int]]:
    """A host that waits for an event waits for a command: the last one to end before it returned."""
    named = np.array([bool(_EVENT_SYNC.search(name)) for name in trace.names], bool)
    rows = call_rows[named[trace.events.name[calls.event]]]
    spans = timeline.spans
    rows = rows[(spans.awaits[rows] == NONE) & (spans.end[rows] - spans.start[rows] > 5_000)]
    if not len(rows):
        return []
    commands = np.flatnonzero(timeline.on_device)
    commands = commands[np.argsort(spans.end[commands], kind="stable")]
    place = np.searchsorted(spans.end[commands], spans.end[rows] + 2_000, side="right") - 1
    pairs = [(int(commands[at]), int(row)) for at, row in zip(place, rows, strict=True) if at >= 0]
    return [(source, row) for source, row in pairs if spans.end[source] > spans.start[row] and source < row]
