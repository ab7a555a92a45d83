"""A rebuilt run as a timeline: the host's calls with their lines, what it did between them, and the GPU's commands."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from keepbusy.log.host_frames import (
    NOWHERE,
    Chains,
    Noted,
    SamplesBetweenCalls,
    SourceLines,
    Visits,
    frames_of,
    with_operators,
)
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverLog, StackFrame, collective_of, different_rows, waited_copies
from keepbusy.log.profiler_window import CallKey, CallOperators, Operators, call_keys
from keepbusy.log.rebuild import SYNCS, RebuiltRun
from keepbusy.program.loops.codes import CodeObjects, in_common
from keepbusy.timeline.frame_roles import LOADER_WITH_WORKERS, described
from keepbusy.timeline.model import (
    EVERY_LANE,
    LONGEST_HANDOVER,
    NONE,
    UNRECORDED,
    WORKERS,
    Direction,
    Floats,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    Mask,
    Spans,
    Timeline,
    settle,
)
from keepbusy.timeline.run_facts import RunFacts
from keepbusy.traces.kineto_names import NAMES_OF_CALLS

_ALLOCATING = ("allocate", "free", "allocate_host", "free_host", "register_host", "unregister_host", "map_memory")
_WAITING_FOR_ALL = ("free", "free_host", "unregister_host")
"""Those of `_ALLOCATING` that wait for the GPU."""
_READ, _SCALAR = ("aten::item", "aten::_local_scalar_dense"), 8
"""The operators that are assumed around a copy of so few bytes to the host, if no window has seen it."""
_COPIES = {
    "copy_to_gpu": Direction.HOST_TO_DEVICE,
    "copy_to_host": Direction.DEVICE_TO_HOST,
    "copy_on_gpu": Direction.DEVICE_TO_DEVICE,
    "copy": Direction.UNKNOWN,
}
_ELEMENT_SIZES = {0: 1, 1: 1, 4: 8, 5: 8, 6: 2, 8: 8, 9: 2, 10: 1, 11: 1}
"""Bytes of NCCL's types; 4 for types that are missing."""
_KINDS = {"launch": Kind.KERNEL, "set_memory": Kind.FILL}
_HOST_LANE = 0
_THREADS_BEGIN_IN = ("<module>", "_run_module_as_main", "Thread._bootstrap")
"""The outermost functions of stacks in threads that Python began."""
_LONG_GAP = 50_000
"""Nanoseconds: a longer time between two calls is divided by samples and operators."""
_CALL, _COMMANDS, _WAIT = 1 << 40, 1 << 41, 1 << 42
"""The order of spans from one row: the host's work before the call (from 0), the call, its commands, its wait."""


@dataclass
class HostSide:
    """Facts about the host beside its calls."""

    began: int = 0
    ended: int = 0
    """The begin and the end of the run on the log's clock; 0 if not known."""
    notes: Sequence[str] = ("",)
    """Names of notes by number; number 0 ends the last open annotation."""
    operators: CallOperators = field(default_factory=CallOperators)
    sample_times: Sequence[int] = ()
    sample_chains: Sequence[tuple[StackFrame, ...]] = ()
    """The stack of each sample, from the outside in."""
    codes: CodeObjects = field(default_factory=lambda: CodeObjects(lambda _: ""))


@dataclass
class _HostEvents:
    """The calls and notes of a thread. All times count from the begin of the run."""

    row: Ints
    begin: Floats
    end: Floats
    reached: Floats
    """When the event before had ended."""
    lines: Ints
    """The chain of each event, without operators."""
    chain: Ints
    shared: Ints
    """How many frames it may have in common with the event before."""


class _Stay(NamedTuple):
    """A part of the time between two events, with the place where the program was."""

    event: int
    """The event that comes next."""
    place: int
    start: float
    end: float
    chain: int
    shared_at_most: int
    is_exact: bool


class LogTimeline:
    """Builds the timeline of a log, `source_lines`, and a mask `exact_frames`: known from calls, not from samples."""

    def __init__(
        self, log: DriverLog, run: RebuiltRun, times: KernelTimes, rank: int, facts: RunFacts, host: HostSide
    ) -> None:
        self._log, self._run, self._times, self._rank, self._facts, self._host = log, run, times, rank, facts, host
        self._origin = host.began or (int(log.begin[0]) if len(log.begin) else 0)
        self._kinds = log.kinds()
        self.source_lines = SourceLines(host.codes)
        self.exact_frames = np.zeros(0, bool)
        self._chains = Chains(self.source_lines, log.stacks, host.notes)
        self._names: dict[str, int] = {}
        self._keys = call_keys(log)
        self._collective = collective_of(log)
        streams = np.unique(log.rows["stream"][run.issuers]).tolist()
        self._lanes = {stream: 1 + number for number, stream in enumerate(streams)}
        self._lane_of_row, self._is_own_thread = self._threads()
        flags, has_commands = log.rows["flags"], np.zeros(len(log.rows), bool)
        has_commands[run.issuers] = True
        ran = flags & (CallFlag.CAPTURED | CallFlag.FAILED) == 0
        self._is_launch = has_commands & ran
        self._is_sync = np.isin(self._kinds, SYNCS) & ran & ~has_commands
        self._is_allocation = np.isin(self._kinds, _ALLOCATING) & ran & ~has_commands
        self._is_note = self._kinds == "note"
        self._reads_scalar = self._is_launch & (self._kinds == "copy_to_host") & (log.rows["value"] <= _SCALAR)
        self._is_waited_for = self._is_launch & np.logical_or(*waited_copies(log, self._kinds))

    def _threads(self) -> tuple[Ints, Mask]:
        """The lane of each row, and whether Python began its thread. Other threads are PyTorch's own and work for the
        thread with most calls, even if they call Python, as for a hook in a backward pass."""
        thread, stack = self._log.rows["thread"], self._log.rows["stack"]
        threads, counts = np.unique(thread[stack != 0], return_counts=True)
        threads = threads[np.argsort(-counts, kind="stable")]
        begun = [
            number for number, frames in self._log.stacks.items() if frames and frames[-1].function in _THREADS_BEGIN_IN
        ]
        of_python = [number for number in threads.tolist() if np.isin(stack[thread == number], begun).any()]
        lane_of, is_own = np.zeros(256, np.int64), np.zeros(256, bool)
        for index, number in enumerate(of_python or threads[:1].tolist()):
            lane_of[number], is_own[number] = len(self._lanes) + index if index else _HOST_LANE, True
        return lane_of[thread], is_own[thread]

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def timeline(self, begins: Ints) -> Timeline:
        log, run, origin = self._log, self._run, self._origin
        is_event = self._is_launch | self._is_sync | self._is_allocation | self._is_note
        parts, frames, is_exact = list[Spans](), list[Frames](), list[Mask]()
        rows, places = list[Ints](), list[Ints]()
        lanes = [_HOST_LANE, *(lane for lane in np.unique(self._lane_of_row).tolist() if lane != _HOST_LANE)]
        workers_lane = len(self._lanes) + len(lanes)
        for lane in lanes:
            events = self._events(np.flatnonzero(is_event & (self._lane_of_row == lane)))
            spans, visits, visit_of_span, row, place = self._host_spans(events, lane)
            of_lane, exact, innermost = frames_of(visits, self._chains.known, self._names, lane)
            first = sum(map(len, frames))
            frame = np.append(innermost, NONE)[visit_of_span]
            if lane == _HOST_LANE:
                chains = self._chains.known
                takes = np.array([any(name.startswith(LOADER_WITH_WORKERS) for _, name in chain) for chain in chains])
                taking = np.flatnonzero(takes[np.append(visits.chain, NOWHERE)[visit_of_span]])
                loader = _LateBatches.of(spans, taking, workers_lane)
                spans, frame, row, place = loader.spans, frame[loader.kept], row[loader.kept], place[loader.kept]
                parts.append(loader.batches)  # before the waits that they release
                rows.append(row[loader.late])
                places.append(place[loader.late])
            parts.append(spans.change(frame=np.where(frame == NONE, NONE, frame + first)))
            frames.append(of_lane.change(parent=np.where(of_lane.parent == NONE, NONE, of_lane.parent + first)))
            is_exact.append(exact)
            rows.append(row)
            places.append(place)
        self.exact_frames = np.concatenate(is_exact)
        commands = self._command_spans()
        of_issuer = np.arange(len(run.issuers)) - np.searchsorted(run.issuers, run.issuers)
        rows.append(run.issuers)
        places.append(_COMMANDS + of_issuer)
        spans = Spans.concatenate([*parts, commands])
        order = np.lexsort((np.concatenate(places), np.concatenate(rows)))
        spans = spans.take(order)
        new = np.empty(len(order), np.int64)
        new[order] = np.arange(len(order))
        command_rows = new[len(order) - len(commands) :]
        late = len(loader.late)
        begun = Links.of(late, source=new[late + loader.before], target=new[:late], kind=LinkKind.HANDOFF)
        calls = np.full(len(log.rows), NONE, np.int64)
        is_call = np.concatenate(places) == _CALL
        calls[np.concatenate(rows)[is_call]] = new[is_call]
        names, held = (*self._names, UNRECORDED), run.held_when_full  # where launches had to wait for room
        spans = described(spans, names)
        host_lanes = (Lane(self._rank, None, lane, f"thread {lane - len(self._lanes)}") for lane in lanes[1:])
        groups = {line["id"] & 0x7FFFFFFF: line["ranks"] for line in log.communicators if "id" in line}
        timeline = Timeline(
            lanes=(
                Lane(self._rank, None, 0, "program"),
                *(Lane(self._rank, 0, stream) for stream in self._lanes),
                *host_lanes,
                *([Lane(self._rank, None, NONE, WORKERS)] if (spans.lane == workers_lane).any() else []),
            ),
            names=names,
            spans=spans,
            links=Links.concatenate([self._links(calls, command_rows), begun]),
            frames=described(Frames.concatenate(frames), names),
            facts=replace(self._facts, groups=groups, pending_limit=int(np.median(held)) if held else None),
        )
        host = timeline.rows_of(_HOST_LANE)
        marks = np.searchsorted(spans.start[host], begins - origin)
        return settle(timeline.change(marks=np.unique(host[marks[marks < len(host)]])))

    def _events(self, rows: Ints) -> _HostEvents:
        log = self._log
        begin = (log.begin[rows] - self._origin).astype(np.float64)
        latest = np.maximum.accumulate(begin + log.took[rows]) if len(rows) else begin
        reached = np.concatenate([[0.0], latest])[:-1]
        begin = np.maximum(begin, reached)
        state, states = self._noted(rows)
        stack = self._stacks_beneath(rows, state, states)
        keys, of_key = different_rows(*self._keys[rows].T)
        operators = [self._host.operators.of(CallKey(*key)) for key in keys.tolist()]
        is_unknown = np.array([not around_call.names for around_call in operators], bool)
        copies = np.flatnonzero(is_unknown[of_key] & self._reads_scalar[rows])
        waits = copies[copies + 1 < len(rows)] + 1
        waits = waits[is_unknown[of_key[waits]] & (self._kinds[rows[waits]] == "stream_sync")]
        of_key[copies], of_key[waits] = len(operators), len(operators) + 1
        operators += [Operators(_READ), Operators(_READ, len(_READ))]
        which = np.where(self._is_note[rows], NONE, of_key)
        table, of_kind = different_rows(stack, state, which)
        lines, chains, shared = list[int](), list[int](), list[int]()
        for number, noted, key in table.tolist():
            around = operators[key] if key != NONE else Operators()
            lines.append(self._chains.of_call(number, states[noted], Operators()))
            chains.append(self._chains.of_call(number, states[noted], around))
            depth = len(self._chains.known[lines[-1]])
            shared.append(depth + around.shared if around.names else depth)
        columns = (
            np.array(numbers, np.int64)[of_kind] if len(rows) else np.zeros(0, np.int64)
            for numbers in (lines, chains, shared)
        )
        return _HostEvents(rows, begin, np.maximum(begin, latest), reached, *columns)

    def _stacks_beneath(self, rows: Ints, state: Ints, states: Sequence[Noted]) -> Ints:
        """The stack of each row. In PyTorch's own threads it begins at the line that waits for the backward pass."""
        stack = self._log.rows["stack"][rows].astype(np.int64)
        beneath = np.flatnonzero((stack == 0) | ~self._is_own_thread[rows])
        if len(beneath):
            pairs, which = different_rows(stack[beneath], state[beneath])
            stacks = [self._chains.beneath(number, states[noted]) for number, noted in pairs.tolist()]
            stack[beneath] = np.array(stacks, np.int64)[which]
        return stack

    def _noted(self, rows: Ints) -> tuple[Ints, list[Noted]]:
        """The open annotations at each row of a thread, as an index, and the list that it refers to."""
        states, numbers = list[Noted]([()]), dict[Noted, int]({(): 0})
        notes = np.flatnonzero(self._is_note[rows])
        now: Noted = ()
        after = [0]
        values, stacks = (self._log.rows[name][rows[notes]].tolist() for name in ("value", "stack"))
        for value, stack, is_own in zip(values, stacks, self._is_own_thread[rows[notes]].tolist(), strict=True):
            now = (*now, (value, stack if is_own else self._chains.beneath(stack, now))) if value else now[:-1]
            if now not in numbers:
                numbers[now] = len(states)
                states.append(now)
            after.append(numbers[now])
        return np.array(after, np.int64)[np.searchsorted(notes, np.arange(len(rows)))], states

    def _host_spans(self, events: _HostEvents, lane: int) -> tuple[Spans, Visits, Ints, Ints, Ints]:
        """The spans of a thread, its visits, the visit of each span, the row that each span comes before, and its place
        among the spans of that row."""
        rows, log = events.row, self._log
        waits = events.begin > events.reached
        stays = self._divided(events) if lane == _HOST_LANE else []
        of_stay, stay_place, stay_chain, stay_shared = (
            np.array([getattr(stay, name) for stay in stays], np.int64)
            for name in ("event", "place", "chain", "shared_at_most")
        )
        stay_start, stay_end = (np.array([getattr(stay, name) for stay in stays], float) for name in ("start", "end"))
        is_whole = waits.copy()
        is_whole[of_stay] = False
        gaps, calls = np.flatnonzero(is_whole), np.flatnonzero(~self._is_note[rows])
        work = self._number("work")
        end = self._host.ended - self._origin if lane == _HOST_LANE and self._host.ended else 0
        last = events.end[-1:] if len(rows) else np.zeros(1)
        tail = last[last < end]

        # visits: between calls, in parts of such a time, in calls
        row = np.concatenate([gaps, of_stay, calls])
        place = np.concatenate([np.zeros(len(gaps), np.int64), stay_place, np.full(len(calls), _CALL)])
        starts = np.concatenate([events.reached[gaps], stay_start, events.begin[calls]])
        ends = np.concatenate([events.begin[gaps], stay_end, events.end[calls]])
        are_exact = np.ones(len(row), bool)
        are_exact[len(gaps) : len(gaps) + len(stays)] = [stay.is_exact for stay in stays]
        gap_chain = self._open_between(events, gaps)
        lengths = np.array([len(chain) for chain in self._chains.known], np.int64)
        visits = Visits(
            chain=np.concatenate([gap_chain, stay_chain, events.chain[calls]]),
            start=starts.astype(np.int64),
            end=ends.astype(np.int64),
            shared_at_most=np.concatenate([lengths[gap_chain], stay_shared, events.shared[calls]]),
            is_exact=are_exact,
        )
        call_kind = np.select(
            [self._is_launch[rows[calls]], self._is_sync[rows[calls]]], [Kind.LAUNCH, Kind.SYNC], Kind.ALLOCATE
        )
        kind = np.concatenate([np.full(len(gaps) + len(stays), Kind.WORK), call_kind])
        by_call = {number: self._number(NAMES_OF_CALLS.get(call.kind, call.kind)) for number, call in log.calls.items()}
        call_name = np.array([by_call[number] for number in log.rows["call"][rows[calls]].tolist()], np.int64)
        name = np.concatenate([np.full(len(gaps) + len(stays), work), call_name])
        awaits = np.concatenate([np.full(len(gaps) + len(stays), NONE), self._awaits(rows[calls])])
        # a copy that the caller waits for is a launch and a wait
        copies = np.flatnonzero(self._is_waited_for[rows[calls]]) + len(gaps) + len(stays)
        launched = np.minimum(ends[copies], starts[copies] + self._times.launch)
        until = ends.copy()
        until[copies] = launched
        waited = self._stream_lanes(rows[row[copies]])
        count = len(copies) + len(tail)
        spans = Spans.of(
            len(row) + count,
            lane=lane,
            kind=np.concatenate([kind, np.full(len(copies), Kind.SYNC), np.full(len(tail), Kind.WORK)]),
            name=np.concatenate([name, name[copies], np.full(len(tail), work)]),
            start=_whole(np.concatenate([starts, launched, tail])),
            end=_whole(np.concatenate([until, ends[copies], np.full(len(tail), end)])),
            awaits=np.concatenate([awaits, waited, np.full(len(tail), NONE)]),
        )
        known = np.flatnonzero(visits.chain != NOWHERE)
        ordered = known[np.lexsort((place[known], row[known]))]
        number = np.full(len(row), NONE, np.int64)
        number[ordered] = np.arange(len(ordered))
        visits = visits.take(ordered)
        visit_of_span = np.concatenate([number, number[copies], np.full(len(tail), NONE)])
        log_row = np.concatenate([rows[row], rows[row[copies]], np.full(len(tail), len(log.rows))])
        places = np.concatenate([place, np.full(len(copies), _WAIT), np.zeros(len(tail), np.int64)])
        return spans, visits, visit_of_span, log_row, places

    def _open_between(self, events: _HostEvents, gaps: Ints) -> Ints:
        """The chain of the time before each of these events: its line, and the operators that it shares with the event
        before."""
        before = np.where(gaps > 0, events.chain[np.maximum(gaps - 1, 0)], NOWHERE)
        table, which = different_rows(before, events.chain[gaps], events.lines[gaps], events.shared[gaps])
        chains = list[int]()
        for earlier, later, line, shared in table.tolist():
            chain = self._chains.known[later]
            same = in_common(self._chains.known[earlier], chain[:shared])
            chains.append(self._chains.number(chain[: max(same, len(self._chains.known[line]))]))
        return np.array(chains, np.int64)[which] if len(gaps) else events.lines[gaps]

    def _divided(self, events: _HostEvents) -> list[_Stay]:
        """The parts of long times between two events, where samples or operators show more than the next event."""
        rows, log, chains = events.row, self._log, self._chains
        with_python = np.flatnonzero((log.rows["stack"][rows] != 0) & self._is_own_thread[rows])
        stacks = log.rows["stack"][rows].tolist()
        kinds = [(stacks[before], stacks[after]) for before, after in pairwise(with_python)]
        times = np.array(self._host.sample_times, np.int64) - self._origin
        sampled = [self.source_lines.of_sample(chain) for chain in self._host.sample_chains]
        begins, ends = events.end[with_python][:-1].astype(np.int64), events.begin[with_python][1:].astype(np.int64)
        samples = SamplesBetweenCalls(times, sampled, begins, ends, kinds)
        operators, stays = self._host.operators.between, list[_Stay]()
        long = np.flatnonzero(events.begin - events.reached >= _LONG_GAP)
        counts = samples.count(events.reached[long].astype(np.int64), events.begin[long].astype(np.int64)).tolist()
        state, states = self._noted(rows)
        before, after = (self._keys[rows[events_of]].tolist() for events_of in (np.maximum(long - 1, 0), long))
        for event, count, key, next_key in zip(long.tolist(), counts, before, after, strict=True):
            kind = (stacks[event - 1], stacks[event]) if event else (NONE, NONE)
            within = operators.get((CallKey(*key), CallKey(*next_key)), []) if event else []
            if count < 2 and not within and kind not in samples.of_kind:
                continue
            start, end = float(events.reached[event]), float(events.begin[event])
            noted, usual = states[state[event]], chains.known[events.lines[event]]
            pieces = [
                piece if piece.chain is None else piece._replace(chain=chains.annotated(piece.chain, noted))
                for piece in samples.between(start, end, kind)
            ]
            reached = start
            for place, (piece, shared) in enumerate(with_operators(pieces, within, start, end, usual)):
                chain = usual if piece.chain is None else piece.chain
                is_exact = chain[: len(usual)] == usual
                at_most = len(chain) if shared == NONE else shared
                stays.append(_Stay(event, place, reached, piece.until, chains.number(chain), at_most, is_exact))
                reached = piece.until
        return stays

    def _stream_lanes(self, rows: Ints) -> Ints:
        lane_of = np.full(1 << 16, NONE, np.int64)
        lane_of[[*self._lanes]] = [*self._lanes.values()]
        return lane_of[self._log.rows["stream"][rows]]

    def _awaits(self, rows: Ints) -> Ints:
        kinds = self._kinds[rows]
        waits_for_all = np.isin(kinds, ("context_sync", *_WAITING_FOR_ALL))
        return np.select([kinds == "stream_sync", waits_for_all], [self._stream_lanes(rows), EVERY_LANE], NONE)

    def _command_spans(self) -> Spans:
        log, run = self._log, self._run
        described_by = run.described
        is_pageable = log.rows["flags"][described_by] & CallFlag.PAGEABLE != 0
        calls = log.rows["call"][described_by].astype(np.int64)
        pairs, which = np.unique(2 * calls + is_pageable, return_inverse=True)
        distinct = [(log.calls[pair // 2], pair // 2, pair % 2) for pair in pairs.tolist()]
        name = np.array([self._number(self._name(number, pageable)) for _, number, pageable in distinct], np.int64)
        kind = np.array([_KINDS.get(call.kind, Kind.COPY) for call, _, _ in distinct], np.int64)
        direction = np.array([_COPIES.get(call.kind, Direction.UNKNOWN) for call, _, _ in distinct], np.int64)
        kind, size = kind[which], log.rows["value"][described_by].astype(np.int64)
        group, pinned = np.full(len(kind), NONE, np.int64), np.where(kind == Kind.COPY, ~is_pageable, NONE)
        size[kind == Kind.KERNEL] = 0
        groups = {line["communicator"]: line["id"] & 0x7FFFFFFF for line in log.communicators if "id" in line}
        for command in np.flatnonzero(self._collective[described_by] != NONE).tolist():
            row = int(self._collective[described_by[command]])
            call = log.calls[int(log.rows["call"][row])]
            kind[command] = Kind.COLLECTIVE
            size[command] = int(log.rows["value"][row]) * _ELEMENT_SIZES.get(call.grid[0], 4)
            group[command] = groups.get(call.function, NONE)
        return Spans.of(
            len(kind),
            lane=self._stream_lanes(run.issuers),
            kind=kind,
            name=name[which],
            start=_whole(run.begin - self._origin),
            end=_whole(run.end - self._origin),
            group=group,
            size=size,
            direction=direction[which],
            pinned=pinned,
        )

    def _name(self, number: int, pageable: int) -> str:
        """The name that the profiler shows."""
        call, host = self._log.calls[number], "Pageable" if pageable else "Pinned"
        by_kind = {
            "copy_to_gpu": f"Memcpy HtoD ({host} -> Device)",
            "copy_to_host": f"Memcpy DtoH (Device -> {host})",
            "copy_on_gpu": "Memcpy DtoD (Device -> Device)",
            "set_memory": "Memset (Device)",
        }
        return by_kind.get(call.kind) or self._times.names.get(number, call.name) or call.kind

    def _links(self, calls: Ints, commands: Ints) -> Links:
        """`calls` has the span of each row, `commands` that of each command."""
        run, values, kinds = self._run, self._log.rows["value"], self._kinds
        lanes = self._stream_lanes(run.issuers)
        of_lane = {lane: np.flatnonzero(lanes == lane) for lane in self._lanes.values()}
        issuers = {lane: run.issuers[commands_of].tolist() for lane, commands_of in of_lane.items()}
        events, held = dict[int, int](), defaultdict[int, list[tuple[int, int]]](list)
        orders = list[tuple[int, int]]()
        rows = np.flatnonzero(np.isin(kinds, ("event_record", "event_wait", "event_sync")))
        rows = rows[self._log.rows["flags"][rows] & (CallFlag.CAPTURED | CallFlag.FAILED) == 0]
        for row, lane in zip(rows.tolist(), self._stream_lanes(rows).tolist(), strict=True):
            value = int(values[row])
            if kinds[row] == "event_sync":
                if value in events:
                    orders.append((int(commands[events[value]]), int(calls[row])))
                continue
            in_stream = of_lane.get(lane)
            if in_stream is None:
                continue
            before = bisect_left(issuers[lane], row)
            if kinds[row] == "event_record" and before:
                events[value] = int(in_stream[before - 1])
            elif kinds[row] == "event_wait" and value in events and before < len(in_stream):
                held[int(in_stream[before])].append((int(commands[events[value]]), int(commands[in_stream[before]])))
        orders += [pair for command in sorted(held) for pair in held[command]]
        launches = np.stack([calls[run.issuers], commands], axis=1)
        pairs = np.concatenate([launches, np.array(orders, np.int64).reshape(-1, 2)])
        kind = np.repeat([LinkKind.LAUNCH, LinkKind.ORDER], [len(launches), len(orders)])
        return Links.of(len(pairs), source=pairs[:, 0], target=pairs[:, 1], kind=kind)


class _LateBatches(NamedTuple):
    """Batches that loader workers make, in processes of their own, while the program waits for them. A batch is made
    from the time the program takes the one before it."""

    spans: Spans
    """The thread's spans, with one span for the wait for each late batch."""
    kept: Ints
    """The index that each of these had before."""
    batches: Spans
    late: Ints
    """The span that waits for each batch."""
    before: Ints
    """The span at whose end each batch is begun."""

    @classmethod
    def of(cls, spans: Spans, taking: Ints, lane: int) -> _LateBatches:
        """`taking`: spans in which the thread takes a batch. Spans that touch take the same batch."""
        taking = taking[np.argsort(spans.start[taking], kind="stable")]
        opens = np.append(True, spans.start[taking[1:]] != spans.end[taking[:-1]])[: len(taking)]
        firsts = np.flatnonzero(opens)
        first, last = taking[firsts], taking[np.append(firsts[1:], len(taking))[: len(firsts)] - 1]
        works = np.logical_and.reduceat(spans.kind[taking] == Kind.WORK, firsts) if len(firsts) else opens
        begins, ends = spans.start[first], spans.end[last]
        is_late = works & (ends - begins > LONGEST_HANDOVER) & (np.arange(len(first)) > 0)
        joined = taking[~opens & is_late[np.cumsum(opens) - 1]]
        kept = np.setdiff1d(np.arange(len(spans)), joined)
        kind, awaits, end = spans.kind.copy(), spans.awaits.copy(), spans.end.copy()
        late, batch = first[is_late], np.flatnonzero(is_late)
        kind[late], awaits[late], end[late] = Kind.SYNC, lane, ends[batch]
        batches = Spans.of(
            len(late), lane=lane, kind=Kind.WORK, name=spans.name[late], start=ends[batch - 1], end=ends[batch]
        )
        waited = spans.change(kind=kind, awaits=awaits, end=end).take(kept)
        before = np.where(is_late, first, last)[batch - 1]
        return cls(waited, kept, batches, np.searchsorted(kept, late), np.searchsorted(kept, before))


def _whole(times: Floats) -> Ints:
    return np.round(times).astype(np.int64)
