"""Who released whom: launches and their commands, stream waits, handoffs between host threads."""

from __future__ import annotations

import bisect
from typing import TypeAlias

import numpy as np

from keepbusy.timeline.model import NONE, Ints, LinkKind, Links, Spans, Timeline
from keepbusy.timeline.replay import NEVER
from keepbusy.traces.kineto_names import STREAM_WAIT
from keepbusy.traces.rank_trace import RankTrace

CLOCK_JITTER = 1_000
"""Commands of two streams may seem to overlap by this much although one waited for the other."""
RELEASE_GAP = 8_000
"""A command that begins so soon after another stream's command ended has waited for it."""

Streams: TypeAlias = "dict[tuple[int, int], _Stream]"
NamedWaits: TypeAlias = "dict[int, tuple[_Stream | None, int]]"
"""By the correlation of the call that waits: the stream that it holds up, and the command it waits for."""


def links_of(trace: RankTrace, timeline: Timeline, place: Ints) -> Links:
    """`place`: where the spans went, as `spans_of` tells."""
    known, held = np.flatnonzero(trace.launch != NONE), trace.held[trace.held != NONE]
    call_rows, queue_rows = np.split(place, [len(trace.calls.event)])
    command_rows = place[-len(trace.commands) :]
    launches = Links.of(
        len(known), source=call_rows[trace.launch[known]], target=command_rows[known], kind=LinkKind.LAUNCH
    )
    # a host that found a queue full goes on when a command has made room
    room = Links.of(len(held), source=command_rows[held], target=queue_rows[: len(held)], kind=LinkKind.ORDER)
    orders = _orders(trace, timeline, launches, call_rows)
    return Links.concatenate([launches, _handoffs(trace, timeline), orders, room])


def _handoffs(trace: RankTrace, timeline: Timeline) -> Links:
    """The main thread -> a burst of another, and back."""
    source, target = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    main, handoffs = timeline.rows_of(trace.main_lane), trace.hosts.handoffs
    ends, starts = timeline.spans.end[main], timeline.spans.start[main]
    for thread in np.unique(handoffs[:, 0]).tolist():
        bursts = handoffs[handoffs[:, 0] == thread]
        rows = timeline.rows_of(trace.lane_of_thread[thread])
        first = np.searchsorted(timeline.spans.start[rows], bursts[:, 1])
        last = np.searchsorted(timeline.spans.start[rows], bursts[:, 2]) - 1
        before = np.searchsorted(ends, bursts[:, 1], side="right") - 1
        after = np.searchsorted(starts, bursts[:, 2])
        into, back = (before >= 0) & (first < len(rows)), (after < len(main)) & (last >= 0)
        source += [main[before[into]], rows[last[back]]]
        target += [rows[first[into]], main[after[back]]]
    sources, targets = np.concatenate(source), np.concatenate(target)
    forward = sources < targets
    return Links.of(int(forward.sum()), source=sources[forward], target=targets[forward], kind=LinkKind.HANDOFF)


def _orders(trace: RankTrace, timeline: Timeline, launches: Links, call_rows: Ints) -> Links:
    """Waits of one stream for another, and of the host for an event."""
    streams = {
        (lane.device, lane.number): _Stream(timeline.spans, launches, index)
        for index, lane in enumerate(timeline.lanes)
        if lane.device is not None
    }
    said = _named_waits(trace, streams)
    pairs = [*_stream_waits(trace, streams, said), *_event_syncs(trace, timeline, call_rows, said)]
    table = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    return Links.of(len(table), source=table[:, 0], target=table[:, 1], kind=LinkKind.ORDER)


def _stream_waits(trace: RankTrace, streams: Streams, said: NamedWaits) -> list[tuple[int, int]]:
    """A stream wait binds the next launch on its stream. Most traces name neither stream nor event: times must tell."""
    events = trace.events
    waits = np.flatnonzero(trace.file.is_call & trace.file.named(STREAM_WAIT.match))
    waits = waits[np.argsort(events.start[waits], kind="stable")]
    if len(streams) < 2:
        return []
    known, pairs = list(streams.values()), list[tuple[int, int]]()
    for when, correlation in zip(events.start[waits].tolist(), events.correlation[waits].tolist(), strict=True):
        if correlation in said:
            stream, source = said[correlation]
            pairs += stream.bound_to(source, when) if stream and source != NONE else []
        else:
            pairs += _bound_by(known, when)
    return pairs


def _named_waits(trace: RankTrace, streams: Streams) -> NamedWaits:
    """Traces with sync events say which stream waits (none: the host does), and for what was recorded when."""
    events, syncs = trace.events, trace.syncs.take(trace.syncs.awaited_stream >= 0)
    calls = np.flatnonzero(trace.file.is_call & (events.correlation >= 0)) if len(syncs) else syncs.event
    called = dict(zip(events.correlation[calls].tolist(), events.start[calls].tolist(), strict=True))
    said: NamedWaits = {}
    columns = (events.correlation[syncs.event], syncs.device, syncs.stream, syncs.awaited_stream, syncs.awaited_record)
    for correlation, device, stream, awaited, record in zip(*[one.tolist() for one in columns], strict=True):
        recorded = called.get(record, called.get(correlation))
        if recorded is not None:
            source = streams.get((device, awaited))
            said[correlation] = (streams.get((device, stream)), source.last_before(recorded) if source else NONE)
    return said


class _Stream:
    """One device lane as a wait sees it: when each of its commands was issued, began and ended."""

    def __init__(self, spans: Spans, launches: Links, lane: int) -> None:
        launches = launches.take(spans.lane[launches.target] == lane)
        order = np.argsort(launches.target)
        self.row = launches.target[order].tolist()
        self.issued = spans.start[launches.source[order]].tolist()
        self.start, self.end = spans.start[self.row].tolist(), spans.end[self.row].tolist()

    def next_after(self, when: int) -> int:
        return bisect.bisect_left(self.issued, when)

    def last_before(self, when: int) -> int:
        """The row of the command that was issued last."""
        place = self.next_after(when)
        return self.row[place - 1] if place else NONE

    def bound_to(self, source: int, when: int) -> list[tuple[int, int]]:
        """What is issued next waits for this command."""
        place = self.next_after(when)
        return [(source, self.row[place])] if place < len(self.row) and source < self.row[place] else []

    def ended_by(self, start: int, last: int) -> tuple[int, int]:
        """The end and the row of the latest of the first `last` commands that had ended at `start`."""
        place = bisect.bisect_right(self.end, start + CLOCK_JITTER, 0, last) - 1
        return (self.end[place], self.row[place]) if place >= 0 else (NEVER, NONE)

    def held_up(self, place: int, until: int) -> bool:
        """Neither its launch nor its own stream explains that the command began only then."""
        before = self.end[place - 1] if place else NEVER
        return max(before, self.issued[place]) < until


def _bound_by(streams: list[_Stream], when: int) -> list[tuple[int, int]]:
    """Who waited for whom: of each stream, what it issued after that moment may have waited for the others."""
    places = [(stream, stream.next_after(when)) for stream in streams]
    waiting = sorted((pair for pair in places if pair[1] < len(pair[0].row)), key=lambda one: one[0].issued[one[1]])
    found = (_tight_release(*pair, places) for pair in waiting)
    assumed = (_assumed_releases(*pair, places) for pair in waiting)
    return next(filter(None, found), []) or next(filter(None, assumed), [])


def _tight_release(stream: _Stream, place: int, places: list[tuple[_Stream, int]]) -> list[tuple[int, int]]:
    """A command that begins just as another stream's command ends has waited for it."""
    begin = stream.start[place]
    ended = [other.ended_by(begin, last) for other, last in places if other is not stream]
    tight = [one for one in ended if begin - one[0] < RELEASE_GAP and stream.held_up(place, one[0])]
    return [(max(tight)[1], stream.row[place])] if tight else []


def _assumed_releases(stream: _Stream, place: int, places: list[tuple[_Stream, int]]) -> list[tuple[int, int]]:
    """Where none does, the stream that launches next is taken to wait for the last commands of the others, if its
    times allow that; a release that did not bind costs nothing to assume."""
    latest = [(other.end[last - 1], other.row[last - 1]) for other, last in places if other is not stream and last]
    return [(row, stream.row[place]) for end, row in latest if end <= stream.start[place] + CLOCK_JITTER]


def _event_syncs(trace: RankTrace, timeline: Timeline, call_rows: Ints, said: NamedWaits) -> list[tuple[int, int]]:
    """A host that waits for an event waits for a command: the one that the trace names, else the last to end before."""
    rows = call_rows[trace.by_event]
    correlations = trace.events.correlation[trace.calls.event[trace.by_event]]
    spans = timeline.spans
    waited = (spans.awaits[rows] == NONE) & (spans.end[rows] - spans.start[rows] > 5_000)
    commands = np.flatnonzero(timeline.on_device)
    commands = commands[np.argsort(spans.end[commands], kind="stable")]
    pairs = []
    for row, correlation in zip(rows[waited].tolist(), correlations[waited].tolist(), strict=True):
        place = int(np.searchsorted(spans.end[commands], spans.end[row] + 2_000, side="right")) - 1
        source = said[correlation][1] if correlation in said else int(commands[place]) if place >= 0 else NONE
        if source != NONE and spans.end[source] > spans.start[row] and source < row:
            pairs.append((source, row))
    return pairs
