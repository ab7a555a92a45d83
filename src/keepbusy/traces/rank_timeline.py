"""One rank's trace -> its `Timeline`: what occupied each lane, and what released what.

The host lanes are tiled: every call that matters to the device is a span, and the time between two of them is work,
cut where something begins or ends that a fix may remove. Links are launches and their commands, stream waits, and
handoffs between host threads.
"""

from __future__ import annotations

import bisect
import re
import zlib
from typing import NamedTuple, TypeAlias

import numpy as np

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import Role, described
from keepbusy.timeline.model import (
    NEVER,
    NONE,
    UNRECORDED,
    Ints,
    Kind,
    LinkKind,
    Links,
    Mask,
    MemoryUse,
    Spans,
    Timeline,
    check_times,
    settle,
)
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.traces.kineto_names import ELEMENT_SIZES, NCCL_KERNEL, QUEUE_FULL, STREAM_WAIT, Category
from keepbusy.traces.rank_trace import RankTrace, sorted_once
from keepbusy.traces.trace_file import Collective, Trace, TracedDevice

_BANDWIDTHS = ((9, 52.0), (8, 24.0), (1, 12.0))
"""Bytes a nanosecond from a compute capability on: PCIe 5 as measured on an H200, 4 and 3 in proportion."""
_ENQUEUE = 5_000
"""The time that a blocking call takes before it waits: about one launch."""
_LONG_FRAME = 100_000
"""A frame of this duration that launches nothing becomes a span of its own."""
_LONG_WORK = 1_000_000
"""Work of this duration is cut at frames, since a reader wants to know whose it is."""
_COST = {
    Category.OPERATOR: 1_200,
    Category.PYTHON: 800,
    Category.RUNTIME: 2_200,
    Category.DRIVER: 2_200,
    Category.LINE: 800,
}
"""Nanoseconds that one recorded event adds, measured on a slow host; only the proportions matter, since the explanation
scales them: docs/explanation/distortion.md."""
_LARGEST_MESSAGE = 1 << 50
"""No collective moves so many bytes. Larger numbers are damaged, and their sums would not fit into 64 bits."""
_AFTER_COMMANDS = 1 << 40
_BITS = re.compile(r"(\d{1,4})")
_CLOCK_JITTER = 1_000
"""Commands of two streams may seem to overlap by this much although one waited for the other."""
_RELEASE_GAP = 8_000
"""A command that begins so soon after the end of another stream's command has waited for it."""
_Streams: TypeAlias = "dict[tuple[int, int], _Stream]"
_NamedWaits: TypeAlias = "dict[int, tuple[_Stream | None, int]]"
"""By the correlation of the call that waits: the stream that it holds up, and the command that it waits for."""


def timeline_of(file: Trace, rank: int = 0) -> Timeline:
    timeline = settle(_as_traced(file, rank))
    try:
        check_times(timeline)
    except ValueError as error:
        raise BadInput(f"{file.path} is damaged: it holds {error}; record it again.") from None
    return timeline


def _as_traced(file: Trace, rank: int) -> Timeline:
    """The timeline with the trace's own times. What `trace` holds is freed before work and lags are derived."""
    trace = RankTrace(file, rank)
    groups = np.array([*(_group_of(collective, rank) for collective in file.collectives), 0], np.int64)  # 0 for none
    members = [2 if collective.peer >= 0 else collective.group_size for collective in file.collectives]
    spans, place = _spans(trace, groups)
    names = (*file.names, UNRECORDED)
    timeline = Timeline(
        lanes=trace.lanes,
        names=names,
        spans=described(spans, names),
        frames=trace.frames,
        memory=_memory(trace),
        facts=_facts(file, dict(zip(groups.tolist(), members, strict=False))),
    )
    timeline = timeline.change(links=_links(trace, timeline, place))
    rows = timeline.rows_of(trace.main_lane)
    marks = np.searchsorted(spans.start[rows], trace.marks)
    return timeline.change(marks=np.unique(rows[marks[marks < len(rows)]]))


def _facts(file: Trace, groups: dict[int, int]) -> RunFacts:
    """The facts about its run. `groups`: the number of ranks in each."""
    device = file.devices[0] if file.devices else TracedDevice("", 0)
    return RunFacts(
        device=device.name,
        pinned_bandwidth=next((bandwidth for since, bandwidth in _BANDWIDTHS if device.capability >= since), None),
        stacks=file.stacks,
        source=file.path,
        skipped=file.skipped,
        world=file.world,
        groups=groups,
    )


def _memory(trace: RankTrace) -> MemoryUse:
    """The memory that the program's own threads allocated and freed."""
    memory, lanes = trace.file.memory, trace.lane_of_thread
    begun, over = trace.events.start.min(), trace.events.end.max()
    memory = memory.take(np.isin(memory.lane, list(lanes)) & (memory.time >= begun) & (memory.time <= over))
    return memory.change(lane=np.array([lanes[thread] for thread in memory.lane.tolist()], np.int64))


def _group_of(collective: Collective, rank: int) -> int:
    """A number for the ranks that meet in this collective, which all of them compute equally.

    A send and its receive meet between two ranks, everything else between all of the group.
    """
    members = f"{collective.group}|{collective.ranks}"
    if collective.peer >= 0:
        index = collective.ranks.index(rank) if rank in collective.ranks else rank
        members = f"{members}|{min(index, collective.peer)}-{max(index, collective.peer)}"
    return zlib.crc32(members.encode()) & 0x7FFFFFFF


class _IssuedSpans(NamedTuple):
    """Spans before they are in issue order."""

    spans: Spans
    key: Ints  # when each was issued
    tie: Ints | int = 0  # orders spans with equal keys: a wait for room, the call, its commands, its wait


def _spans(trace: RankTrace, groups: Ints) -> tuple[Spans, Ints]:
    """All spans in issue order, and the new row of each, for these in turn: the calls, the waits for room in a queue,
    other spans of the host, the commands. `groups`: the number of each collective's group."""
    work = [_work_of(trace, thread) for thread in trace.hosts.alive]
    issued_work = [_IssuedSpans(of_thread, of_thread.start) for of_thread in work]
    parts = [*_calls(trace), *_loader(trace), *issued_work, _commands(trace, groups)]
    tie = np.concatenate([np.broadcast_to(part.tie, len(part.spans)) for part in parts])
    order = np.lexsort([tie, np.concatenate([part.key for part in parts])])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # column by column, as spans take most of a trace's memory
    tables = [part.spans.columns() for part in parts]
    spans = Spans(**{name: np.concatenate([columns[name] for columns in tables])[order] for name in tables[0]})
    return spans.change(frame=_frame_of(trace, spans), recording=_cost_of_recording(trace, spans)), place


def _commands(trace: RankTrace, groups: Ints) -> _IssuedSpans:
    events, commands, launch = trace.events, trace.commands, trace.launch
    collective = trace.of_command.collective
    moved = np.array([_bytes_of(message) for message in trace.file.collectives] + [0], np.int64)
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
    # a command directly follows its launch; several of one launch stay in the order in which they ran
    return _IssuedSpans(spans, issued, tie=1 + np.arange(len(commands)))


def _bytes_of(collective: Collective) -> int:
    dtype = collective.dtype.lower()
    bits = _BITS.search(dtype)
    each = ELEMENT_SIZES.get(dtype) or (max(1, int(bits[1]) // 8) if bits else 1)
    return min(_LARGEST_MESSAGE, max(0, collective.elements_in, collective.elements_out) * each)


def _calls(trace: RankTrace) -> tuple[_IssuedSpans, _IssuedSpans, _IssuedSpans]:
    """The calls themselves, the waits of some for room in a queue, and of others for their own copy.

    A call that finds the queue full waits and then launches. A blocking copy enqueues and then waits.
    """
    calls, full, blocking = trace.calls, np.flatnonzero(trace.full_queue != NONE), np.flatnonzero(trace.blocking)
    lane_of = np.full(len(trace.file.threads), trace.main_lane, np.int64)
    lane_of[list(trace.lane_of_thread)] = list(trace.lane_of_thread.values())
    lane, name = lane_of[calls.thread], trace.events.name[calls.event]
    begin, end = calls.start.copy(), calls.end.copy()
    begin[full] = np.clip(trace.events.end[trace.commands[trace.full_queue[full]]], begin[full], end[full])
    lasting = (calls.end - calls.start)[blocking]
    end[blocking] = np.minimum(end[blocking], calls.start[blocking] + np.minimum(_ENQUEUE, lasting // 2))
    by_event = trace.by_event & (calls.end - calls.start > _ENQUEUE)
    waits = ((calls.kind == Kind.SYNC) & ~by_event) | ((calls.kind == Kind.ALLOCATE) & calls.waits)
    awaits = np.where(waits, trace.awaited, NONE)
    themselves = Spans.of(len(lane), lane=lane, kind=calls.kind, name=name, start=begin, end=end, awaits=awaits)
    for_room = Spans.of(
        len(full), lane=lane[full], kind=Kind.SYNC, name=name[full], start=calls.start[full], end=begin[full]
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
        _IssuedSpans(themselves, calls.start),
        _IssuedSpans(for_room, for_room.start, tie=-1),
        _IssuedSpans(for_copies, calls.start[blocking], tie=_AFTER_COMMANDS),
    )


def _loader(trace: RankTrace) -> tuple[_IssuedSpans, _IssuedSpans]:
    """The batches of the loader's workers, and the loop's waits for them."""
    begin, end = trace.starved.T
    nest, main = trace.nests[trace.hosts.main], trace.hosts.main
    name = nest.name[nest.innermost(begin)] if len(begin) else begin
    prepared_from = np.append(trace.hosts.alive[main][0, 0], end[:-1])[: len(end)]
    batches = Spans.of(len(end), lane=trace.workers_lane, kind=Kind.WORK, name=name, start=prepared_from, end=end)
    waited = Spans.of(
        len(end),
        lane=trace.main_lane,
        kind=Kind.SYNC,
        name=name,
        start=begin,
        end=end,
        awaits=trace.workers_lane,
    )
    return _IssuedSpans(batches, begin, tie=-1), _IssuedSpans(waited, begin)


def _work_of(trace: RankTrace, thread: int) -> Spans:
    """A thread's work between its calls, cut at every border that a fix or a reader may need."""
    nest = trace.nests[thread]
    alive, recorder = trace.hosts.alive[thread], _recorder(trace, thread)
    of_thread = trace.calls.thread == thread
    elsewhere = [np.stack([trace.calls.start[of_thread], trace.calls.end[of_thread]], axis=1)]
    if thread == trace.hosts.main:  # also while another thread works for it, and while it waits for a batch
        elsewhere += [trace.hosts.handoffs[:, 1:], trace.starved, trace.marks]
    borders = [alive, recorder, *elsewhere, *_borders(trace, thread)]
    cuts = sorted_once(np.concatenate([border.ravel() for border in borders]))
    middle = (cuts[:-1] + cuts[1:]) // 2
    free = _inside(middle, alive)
    for intervals in elsewhere[:3]:
        free &= ~_inside(middle, intervals)
    start, end, middle = cuts[:-1][free], cuts[1:][free], middle[free]
    inner = nest.innermost(middle)
    unrecorded = len(trace.file.names)  # the index of UNRECORDED, after the trace's own names
    names = np.append(nest.name, unrecorded)
    kind = np.where(_inside(middle, recorder), Kind.RECORDING, Kind.WORK)
    return Spans.of(len(start), lane=trace.lane_of_thread[thread], kind=kind, name=names[inner], start=start, end=end)


def _borders(trace: RankTrace, thread: int) -> tuple[Ints, Ints, Ints]:
    """Where frames cut host work: long ones that launch nothing, operators that wait, and loaders, at both ends.

    Also any frame that separates long work from long work: that after a function's last launch from that before the
    next function's first.
    """
    nest, calls = trace.nests[thread], trace.calls.thread == thread
    start, end = trace.calls.start[calls], trace.calls.end[calls]
    idle = np.searchsorted(start, nest.end) == np.searchsorted(start, nest.start)
    telling = idle & (nest.end - nest.start >= _LONG_FRAME)
    telling |= nest.role & (Role.READS | Role.MOVES | Role.LOADER) != 0
    parting = np.concatenate([nest.start[~idle], nest.end[~idle]])
    after = parting - np.append(NEVER, end)[np.searchsorted(end, parting, side="right")]
    before = np.append(start, -NEVER)[np.searchsorted(start, parting)] - parting
    return nest.start[telling], nest.end[telling], parting[np.minimum(after, before) >= _LONG_WORK]


def _recorder(trace: RankTrace, thread: int) -> Ints:
    """When the recorder reports work of its own during which this thread did nothing. A full queue does not count."""
    events = trace.events
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & ~trace.file.named(QUEUE_FULL.__eq__))
    rows = rows[np.argsort(events.start[rows])]
    own_borders = np.sort(np.concatenate([column[events.thread == thread] for column in (events.start, events.end)]))
    quiet = np.searchsorted(own_borders, events.end[rows]) == np.searchsorted(own_borders, events.start[rows])
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
    """For each span of the host, the innermost frame around it."""
    frame: Ints = np.full(len(spans), NONE, np.int32)
    for thread, nest in trace.nests.items():
        rows = np.flatnonzero(spans.lane == trace.lane_of_thread[thread])
        inner = nest.innermost((spans.start[rows] + spans.end[rows]) // 2)
        frame[rows] = np.where(inner == NONE, NONE, inner + nest.first)
    return frame


def _cost_of_recording(trace: RankTrace, spans: Spans) -> Ints:
    """The cost in each span: half of an event's cost where it begins, and half where it ends."""
    events = trace.events
    cost = np.zeros(len(spans), np.float64)
    for thread, lane in trace.lane_of_thread.items():
        of_lane = np.flatnonzero(spans.lane == lane)
        for category, each in _COST.items():
            rows = (events.thread == thread) & (events.category == category)
            for times in (np.sort(events.start[rows]), np.sort(events.end[rows])):
                count = np.searchsorted(times, spans.end[of_lane]) - np.searchsorted(times, spans.start[of_lane])
                cost[of_lane] += count * each / 2
    return np.where(spans.kind == Kind.RECORDING, spans.end - spans.start, cost).astype(np.int64)


def _links(trace: RankTrace, timeline: Timeline, place: Ints) -> Links:
    """`place`: the new rows of the spans, as `_spans` returns them."""
    launched, full = np.flatnonzero(trace.launch != NONE), trace.full_queue[trace.full_queue != NONE]
    call_rows, queue_rows = np.split(place, [len(trace.calls.event)])
    command_rows = place[-len(trace.commands) :]
    launches = Links.of(
        len(launched), source=call_rows[trace.launch[launched]], target=command_rows[launched], kind=LinkKind.LAUNCH
    )
    # a host that found a queue full continues when a command has made room
    room = Links.of(len(full), source=command_rows[full], target=queue_rows[: len(full)], kind=LinkKind.ORDER)
    orders = _orders(trace, timeline, launches, call_rows)
    return Links.concatenate([launches, _handoffs(trace, timeline), orders, room])


def _handoffs(trace: RankTrace, timeline: Timeline) -> Links:
    """Links from the main thread to bursts of other threads, and back."""
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
    named = _named_waits(trace, streams)
    pairs = [*_stream_waits(trace, streams, named), *_event_syncs(trace, timeline, call_rows, named)]
    table = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    return Links.of(len(table), source=table[:, 0], target=table[:, 1], kind=LinkKind.ORDER)


def _stream_waits(trace: RankTrace, streams: _Streams, named: _NamedWaits) -> list[tuple[int, int]]:
    """A stream wait holds up the next launch on its stream. Most traces name no stream and event, so times must do."""
    events = trace.events
    waits = np.flatnonzero(trace.is_call & trace.file.named(STREAM_WAIT.match))
    waits = waits[np.argsort(events.start[waits], kind="stable")]
    if len(streams) < 2:
        return []
    all_streams, pairs = list(streams.values()), list[tuple[int, int]]()
    for when, correlation in zip(events.start[waits].tolist(), events.correlation[waits].tolist(), strict=True):
        if correlation in named:
            stream, source = named[correlation]
            place = stream.next_after(when) if stream and source != NONE else NONE
            if stream and 0 <= place < len(stream.row) and source < stream.row[place]:
                pairs.append((source, stream.row[place]))
        else:
            pairs += _bound_by(all_streams, when)
    return pairs


def _named_waits(trace: RankTrace, streams: _Streams) -> _NamedWaits:
    """Waits in traces with sync events, which name the stream that waits (none for the host) and the event."""
    events, syncs = trace.events, trace.syncs.take(trace.syncs.awaited_stream >= 0)
    calls = np.flatnonzero(trace.is_call & (events.correlation >= 0)) if len(syncs) else syncs.event
    called = dict(zip(events.correlation[calls].tolist(), events.start[calls].tolist(), strict=True))
    named: _NamedWaits = {}
    columns = (events.correlation[syncs.event], syncs.device, syncs.stream, syncs.awaited_stream, syncs.awaited_record)
    for correlation, device, stream, awaited, record in zip(*[column.tolist() for column in columns], strict=True):
        recorded = called.get(record, called.get(correlation))
        if recorded is not None:
            source = streams.get((device, awaited))
            named[correlation] = (streams.get((device, stream)), source.last_before(recorded) if source else NONE)
    return named


class _Stream:
    """One device lane: when each of its commands was issued, began and ended."""

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

    def ended_by(self, start: int, last: int) -> tuple[int, int]:
        """The end and the row of the latest of the first `last` commands that had ended at `start`."""
        place = bisect.bisect_right(self.end, start + _CLOCK_JITTER, 0, last) - 1
        return (self.end[place], self.row[place]) if place >= 0 else (NEVER, NONE)

    def held_up(self, place: int, until: int) -> bool:
        """Whether neither its launch nor its own stream explains why the command did not begin before `until`."""
        before = self.end[place - 1] if place else NEVER
        return max(before, self.issued[place]) < until


def _bound_by(streams: list[_Stream], when: int) -> list[tuple[int, int]]:
    """Which command waited for which, after a stream wait at this time whose streams are unknown."""
    places = [(stream, stream.next_after(when)) for stream in streams]
    waiting = sorted((pair for pair in places if pair[1] < len(pair[0].row)), key=lambda pair: pair[0].issued[pair[1]])
    for stream, place in waiting:  # a command that begins just as another stream's command ends has waited for it
        begin = stream.start[place]
        ended = [other.ended_by(begin, last) for other, last in places if other is not stream]
        tight = [(end, row) for end, row in ended if begin - end < _RELEASE_GAP and stream.held_up(place, end)]
        if tight:
            return [(max(tight)[1], stream.row[place])]
    # otherwise the stream that launches next waits for the last commands of the others, if times allow that: assuming
    # a release that delayed nothing does no harm
    for stream, place in waiting:
        latest = [(other.end[last - 1], other.row[last - 1]) for other, last in places if other is not stream and last]
        if assumed := [row for end, row in latest if end <= stream.start[place] + _CLOCK_JITTER]:
            return [(row, stream.row[place]) for row in assumed]
    return []


def _event_syncs(trace: RankTrace, timeline: Timeline, call_rows: Ints, named: _NamedWaits) -> list[tuple[int, int]]:
    """Links to hosts that wait for an event, from the command that the trace names, or else the last to end before."""
    rows = call_rows[trace.by_event]
    correlations = trace.events.correlation[trace.calls.event[trace.by_event]]
    spans = timeline.spans
    waited = (spans.awaits[rows] == NONE) & (spans.end[rows] - spans.start[rows] > 5_000)
    commands = np.flatnonzero(timeline.on_device)
    commands = commands[np.argsort(spans.end[commands], kind="stable")]
    pairs = []
    for row, correlation in zip(rows[waited].tolist(), correlations[waited].tolist(), strict=True):
        place = int(np.searchsorted(spans.end[commands], spans.end[row] + 2_000, side="right")) - 1
        last = int(commands[place]) if place >= 0 else NONE
        source = named[correlation][1] if correlation in named else last
        if source != NONE and spans.end[source] > spans.start[row] and source < row:
            pairs.append((source, row))
    return pairs
