"""One rank's trace and what it shows: commands, calls, threads, lanes, what waits for what.

PyTorch runs the backward pass on a separate thread while its caller waits. In a trace that is a burst of one thread
during which the main thread records nothing: a handoff. A thread that works at the same time as the main thread is an
independent lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import PROFILER_STEP, STEP_MARKS, Role, described
from keepbusy.timeline.model import (
    EVERY_LANE,
    LONGEST_HANDOVER,
    NONE,
    WORKERS,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    Mask,
)
from keepbusy.traces.kineto_names import (
    ALLOCATION,
    ALLOCATION_SYNC,
    DEVICE_SYNC,
    DIRECTIONS,
    EVENT_SYNC,
    PAGEABLE,
    PINNED,
    SYNC_CALL,
    Category,
)
from keepbusy.traces.trace_file import Trace

BLOCKS_UNTIL_ITS_END = 10_000
"""A blocking copy returns up to 10 µs before its command ends (measured), or by a small share of a long copy."""
FULL_QUEUE_WAIT, FULL_QUEUE_PENDING = 100_000, 400
"""A launch that takes this long while so many commands of its stream are pending has found the queue full."""
_KINDS = {
    Category.OPERATOR: FrameKind.OPERATOR,
    Category.PYTHON: FrameKind.PYTHON,
    Category.ANNOTATION: FrameKind.ANNOTATION,
    Category.LINE: FrameKind.LINE,
}
_KIND_OF_CATEGORY = np.array([_KINDS.get(category, NONE) for category in Category], np.int64)


@dataclass(frozen=True, eq=False)
class Calls:
    """The outermost calls that matter to the device, in order of start."""

    event: Ints  # row of the event
    kind: Ints
    waits: Mask  # an allocation that waits for the device, or a copy that waits for itself
    thread: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, eq=False)
class HostThreads:
    """The threads that issue work, each only within its `alive` intervals."""

    main: int
    alive: dict[int, Ints]  # thread -> rows of (start, end)
    handoffs: Ints  # rows of (thread, start, end), during which the main thread waits


class RankTrace:
    """What a trace shows. Calls are indices in `calls`, commands are indices in `commands`."""

    def __init__(self, file: Trace, rank: int) -> None:
        self.file, self.rank, self.events = file, rank, file.events
        # what ran on the device, and what called it
        self.commands = self._commands()
        details, category = file.device_events, self.events.category[file.device_events.event]
        self.of_command = details.take(np.searchsorted(details.event, self.commands))  # the details of each command
        self.syncs = details.take((category == Category.SYNC) & (details.device >= 0))
        self.is_step_mark = (self.events.category == Category.ANNOTATION) & file.begins(*STEP_MARKS)
        self.is_call = file.is_call
        launched = np.unique(self.events.correlation[self.commands])
        self.threads = self._threads(launched)
        self.calls = self._calls(launched)
        self.launch = self._launch()
        # which threads issue work, and within which frames
        self.hosts = self._hosts()
        self.marks = self._marks()
        # the lanes: host threads, then streams, then the loader's workers
        others = sorted(thread for thread in self.hosts.alive if thread != self.hosts.main)
        self.lane_of_thread = {thread: lane for lane, thread in enumerate([self.hosts.main, *others])}
        self.main_lane = self.lane_of_thread[self.hosts.main]
        self.frames, self.nests = _nested_frames(file, self.lane_of_thread)
        self.starved = self._starved()
        streams_of_commands = np.stack([self.of_command.device, self.of_command.stream], axis=1).astype(np.int64)
        streams, which = np.unique(streams_of_commands, axis=0, return_inverse=True)
        self.streams = [(int(device), int(stream)) for device, stream in streams]  # the device and number of each
        self.lane_of_command = which.reshape(-1) + len(self.lane_of_thread)
        self.workers_lane = len(self.lane_of_thread) + len(self.streams)
        # what waits for what
        self.launched = self._launched()
        self.backlog = self._backlog()
        self.full_queue = self._full_queue()
        self.by_event = file.named(EVENT_SYNC.search)[self.calls.event]  # which calls wait for an event
        self.awaited = self._awaited()
        directions = [next((int(value) for mark, value in DIRECTIONS if mark in name), 0) for name in file.names]
        pinned = [1 if PINNED in name else 0 if PAGEABLE in name else NONE for name in file.names]
        self.direction, self.pinned = self._of_copies(directions, 0), self._of_copies(pinned, NONE)
        self.blocking = self._blocking()
        self.lanes = self._lanes()

    def _commands(self) -> Ints:
        """The device's commands in order of start."""
        events = self.events
        rows = np.flatnonzero(events.category <= Category.FILL)
        if not len(rows):
            raise BadInput(
                f"{self.file.path} shows nothing that ran on a GPU; "
                "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine that has one."
            )
        return rows[np.lexsort((events.end[rows], events.start[rows]))]

    def _threads(self, launched: Ints) -> Ints:
        """Threads that launch something or mark steps. Others, such as watchdogs, are not part of the program."""
        events = self.events
        calls = np.flatnonzero(self.is_call & (events.correlation >= 0))
        launching = calls[_among(events.correlation[calls], launched)]
        return np.unique(np.concatenate([events.thread[launching], events.thread[self.is_step_mark]]))

    def _calls(self, launched: Ints) -> Calls:
        file, events = self.file, self.events
        rows = np.flatnonzero(self.is_call & np.isin(events.thread, self.threads))
        rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
        allocates, synchronises = file.named(ALLOCATION.match)[rows], file.named(SYNC_CALL.match)[rows]
        launches = _among(events.correlation[rows], launched) & (events.correlation[rows] >= 0)
        waits = file.named(ALLOCATION_SYNC.match)[rows] | (launches & synchronises)
        kind = np.select([launches, synchronises, allocates], [Kind.LAUNCH, Kind.SYNC, Kind.ALLOCATE], Kind.WORK)
        matters = kind != Kind.WORK
        for thread in self.threads:  # only outermost calls: a launch that loads a module contains another launch
            of_thread = np.flatnonzero(matters & (events.thread[rows] == thread))
            reached = np.maximum.accumulate(events.end[rows[of_thread]])
            matters[of_thread[1:]] = events.start[rows[of_thread[1:]]] >= reached[:-1]
        if not matters.any():
            raise BadInput(
                f"{file.path} shows commands of the device but no call that launched them; "
                "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
            )
        event = rows[matters]
        return Calls(event, kind[matters], waits[matters], events.thread[event], events.start[event], events.end[event])

    def _launch(self) -> Ints:
        """For each command, the outermost call that launched it, or NONE."""
        events, calls, launch = self.events, self.calls, np.full(len(self.commands), NONE, np.int64)
        rows = np.flatnonzero(self.is_call & (events.correlation >= 0))
        if not len(rows):
            return launch
        rows = rows[np.argsort(events.correlation[rows], kind="stable")]
        wanted = events.correlation[self.commands]
        call = rows[np.minimum(np.searchsorted(events.correlation[rows], wanted), len(rows) - 1)]
        is_launched = events.correlation[call] == wanted
        for thread in self.threads:
            outer = np.flatnonzero(calls.thread == thread)
            of_thread = np.flatnonzero(is_launched & (events.thread[call] == thread))
            inner = call[of_thread]
            place = np.searchsorted(calls.start[outer], events.start[inner], side="right") - 1
            enclosing = outer[np.maximum(place, 0)]
            launch[of_thread] = np.where((place >= 0) & (events.end[inner] <= calls.end[enclosing]), enclosing, NONE)
        return launch

    def _launched(self) -> Ints:
        """For each call, the lane of its first command, or NONE."""
        launched = np.full(len(self.calls.event), NONE, np.int64)
        is_launched = self.launch != NONE
        launched[self.launch[is_launched][::-1]] = self.lane_of_command[is_launched][::-1]
        return launched

    def _backlog(self) -> Mask:
        """Which commands were issued before recording began: those before the first one on their stream with a launch,
        as a stream keeps its order."""
        launched, lane = np.flatnonzero(self.launch != NONE), self.lane_of_command
        first = np.full(int(lane.max()) + 1, NONE, np.int64)
        first[lane[launched][::-1]] = launched[::-1]
        return np.arange(len(lane)) < first[lane]

    def _full_queue(self) -> Ints:
        """For each call that found its stream's queue full, the command that made room; else NONE."""
        calls, launch = self.calls, self.launch
        commands_with_room = np.full(len(calls.event), NONE, np.int64)
        for lane in np.unique(self.lane_of_command).tolist():
            of_lane = np.flatnonzero((self.lane_of_command == lane) & (launch != NONE))
            of_lane = of_lane[np.argsort(calls.start[launch[of_lane]], kind="stable")]
            call = sorted_once(launch[of_lane])
            ended = np.maximum.accumulate(self.events.end[self.commands[of_lane]])
            ended_before = np.searchsorted(ended, calls.end[call], side="right")
            issued = np.searchsorted(calls.start[launch[of_lane]], calls.start[call])
            full = (calls.end[call] - calls.start[call] > FULL_QUEUE_WAIT) & (ended_before > 0)
            full &= issued - ended_before > FULL_QUEUE_PENDING
            commands_with_room[call[full]] = of_lane[ended_before[full] - 1]
        return commands_with_room

    def _awaited(self) -> Ints:
        """For each call, the lane that it would wait for: its sync event's, or else its thread's last launch's."""
        events, calls = self.events, self.calls
        before = np.full(len(self.launched), NONE, np.int64)
        for thread in self.threads:
            of_thread = np.flatnonzero(calls.thread == thread)
            before[of_thread] = np.maximum.accumulate(np.where(self.launched[of_thread] != NONE, of_thread, NONE))
        lane = np.where(before == NONE, NONE, self.launched[np.maximum(before, 0)])
        syncs = self.syncs.take(self.syncs.stream >= 0)
        if len(syncs):
            lanes = {pair: index + len(self.lane_of_thread) for index, pair in enumerate(self.streams)}
            streams = zip(syncs.device.tolist(), syncs.stream.tolist(), strict=True)
            correlations = events.correlation[syncs.event].tolist()
            named_lanes = dict(zip(correlations, (lanes.get(pair, NONE) for pair in streams), strict=True))
            named_lanes.pop(NONE, None)
            calls_and_lanes = zip(events.correlation[calls.event].tolist(), lane.tolist(), strict=True)
            lane = np.array([named_lanes.get(correlation, usual) for correlation, usual in calls_and_lanes], np.int64)
        all_lanes = self.file.named(DEVICE_SYNC.search)[calls.event] | (calls.kind == Kind.ALLOCATE)
        return np.where(all_lanes, EVERY_LANE, lane)

    def _of_copies(self, of_name: list[int], otherwise: int) -> Ints:
        """For each copy, the value that its name has, as in `Memcpy HtoD (Pageable -> Device)`."""
        is_copy = self.events.category[self.commands] == Category.COPY
        return np.where(is_copy, np.array(of_name, np.int64)[self.events.name[self.commands]], otherwise)

    def _blocking(self) -> Mask:
        """Which calls return only when their own copy of pageable memory has ended, or nearly so."""
        events, calls = self.events, self.calls
        pageable = (self.pinned == 0) & (self.launch != NONE)
        copy, call = self.commands[pageable], self.launch[pageable]
        early = np.maximum(BLOCKS_UNTIL_ITS_END, (events.end[copy] - events.start[copy]) // 50)
        blocking = calls.waits & (calls.kind == Kind.LAUNCH)
        blocking[call[calls.end[call] >= events.end[copy] - early]] = True
        return blocking & (self.full_queue == NONE)

    def _hosts(self) -> HostThreads:
        events = self.events
        on_host = (events.category == Category.OPERATOR) | (events.category == Category.ANNOTATION)
        on_host[self.calls.event] = True
        recorded = np.flatnonzero(on_host)
        rows_of = {int(thread): recorded[events.thread[recorded] == thread] for thread in self.threads}
        main = self._main_thread()
        python = np.flatnonzero((events.thread == main) & (events.category == Category.PYTHON))
        extent = np.concatenate([rows_of[main], python])
        alive = {main: np.array([[events.start[extent].min(), events.end[extent].max()]], np.int64)}
        handoffs: list[tuple[int, int, int]] = []
        for thread, rows in rows_of.items():
            if thread == main or not len(rows):
                continue
            bursts, alone = self._bursts(rows, rows_of[main])
            alive[thread] = bursts if alone else np.array([[bursts[0, 0], bursts[-1, 1]]], np.int64)
            handoffs += [(thread, start, end) for start, end in bursts.tolist() if alone]
        handoffs.sort(key=lambda handoff: handoff[1])
        return HostThreads(main, alive, np.array(handoffs, np.int64).reshape(-1, 3))

    def _main_thread(self) -> int:
        """The thread that marks steps, or else that with the most Python, or the most operators."""
        events = self.events
        for rows in (self.is_step_mark, events.category == Category.PYTHON, events.category == Category.OPERATOR):
            counts = np.array([np.count_nonzero(rows & (events.thread == thread)) for thread in self.threads])
            if counts.max(initial=0) > 0:
                return int(self.threads[counts.argmax()])
        return int(self.threads[0])

    def _bursts(self, rows: Ints, main: Ints) -> tuple[Ints, bool]:
        """Bursts of a thread, between which the main thread did something, and whether it did nothing within any."""
        events = self.events
        rows = rows[np.argsort(events.start[rows], kind="stable")]
        start, reached = events.start[rows], np.maximum.accumulate(events.end[rows])
        borders = np.sort(np.concatenate([events.start[main], events.end[main]]))
        parted = np.searchsorted(borders, start[1:]) > np.searchsorted(borders, reached[:-1])
        bursts = np.stack([start[np.append(True, parted)], reached[np.append(parted, True)]], axis=1)
        within = np.searchsorted(borders, bursts[:, 1]) - np.searchsorted(borders, bursts[:, 0], side="right")
        return bursts, not within.any()

    def _marks(self) -> Ints:
        """Times on the main thread at which steps begin; none if the trace marks no steps."""
        events = self.events
        on_main = (events.category == Category.ANNOTATION) & (events.thread == self.hosts.main)
        for prefix in STEP_MARKS:
            steps = on_main & self.file.begins(prefix)
            marks = np.unique(events.start[steps])
            if len(marks) >= 2:
                # a profiler's step has an end, so that of the last one is a mark, too
                return np.append(marks, events.end[steps].max()) if prefix == PROFILER_STEP else marks
        return np.zeros(0, np.int64)

    def _starved(self) -> Ints:
        """When the loop waited for a loader's workers and called nothing else: rows of (start, end).

        The workers are processes that no trace shows. If the loop finds no batch ready, they take the time since the
        batch before to prepare it, so they become a lane whose spans are batches.
        """
        nest, calls = self.nests[self.hosts.main], self.calls.start[self.calls.thread == self.hosts.main]
        of_workers = nest.role & Role.LOADER_WORKERS != 0
        waits = np.flatnonzero(of_workers & (nest.end - nest.start > LONGEST_HANDOVER))
        waits = waits[np.searchsorted(calls, nest.end[waits]) == np.searchsorted(calls, nest.start[waits])]
        return np.stack([nest.start[waits], nest.end[waits]], axis=1)

    def _lanes(self) -> tuple[Lane, ...]:
        """Host threads, then streams, then the loader's workers if the loop waits for them."""
        threads = [
            Lane(self.rank, None, index, self.file.threads[thread].name)
            for thread, index in self.lane_of_thread.items()
        ]
        streams = [Lane(self.rank, device, stream, f"stream {stream}") for device, stream in self.streams]
        workers = [Lane(self.rank, None, NONE, WORKERS)] if len(self.starved) else []
        return (*threads, *streams, *workers)


def _among(numbers: Ints, sorted_numbers: Ints) -> Mask:
    """Which numbers are among the sorted ones. `np.isin` takes three times as long."""
    return sorted_numbers[np.minimum(np.searchsorted(sorted_numbers, numbers), len(sorted_numbers) - 1)] == numbers


def sorted_once(numbers: Ints) -> Ints:
    """In order, each number once. `np.unique` hashes them first, which takes many times as long if most differ."""
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


@dataclass(frozen=True, eq=False)
class Nest:
    """The frames of one host thread, nested: a slice of all frames, parents first."""

    first: int  # the index of its first frame among all frames
    parent: Ints  # an index in this nest, or NONE
    name: Ints
    role: Ints
    start: Ints
    end: Ints

    def innermost(self, times: Ints) -> Ints:
        """The frame that is open at each time, or NONE."""
        if not len(self.start):
            return np.full(len(times), NONE, np.int64)
        frame = np.searchsorted(self.start, times, side="right") - 1
        while True:
            closed = (frame != NONE) & (self.end[np.maximum(frame, 0)] <= times)
            if not closed.any():
                return frame
            frame[closed] = self.parent[frame[closed]]


def _nested_frames(trace: Trace, lanes: dict[int, int]) -> tuple[Frames, dict[int, Nest]]:
    """The frames of these threads as one table, and the nest of each thread."""
    events = trace.events
    rows_of_threads = list[Ints]()
    for thread in lanes:
        own = np.flatnonzero((events.thread == thread) & (_KIND_OF_CATEGORY[events.category] != NONE))
        rows_of_threads.append(own[np.lexsort((-events.end[own], events.start[own]))])
    rows, counts = np.concatenate(rows_of_threads), [len(own) for own in rows_of_threads]
    frames = Frames.of(
        len(rows),
        lane=np.repeat(list(lanes.values()), counts),
        kind=_KIND_OF_CATEGORY[events.category[rows]],
        name=events.name[rows],
        start=events.start[rows],
        end=events.end[rows],
        sequence=events.sequence[rows],
    )
    frames = described(frames, trace.names)
    nests = dict[int, Nest]()
    for thread, count, last in zip(lanes, counts, np.cumsum(counts).tolist(), strict=True):
        part = frames.take(slice(last - count, last))
        nests[thread] = Nest(last - count, _parents(part), part.name, part.role, part.start, part.end)
    parents = [np.where(nest.parent == NONE, NONE, nest.parent + nest.first) for nest in nests.values()]
    return frames.change(parent=np.concatenate(parents)), nests


def _parents(frames: Frames) -> Ints:
    """For frames sorted by (start, -end), the nearest earlier one that encloses each.

    The first candidate is the frame before. If it does not reach far enough, its own candidate is next: all frames
    in between ended earlier, so they cannot enclose this one either.
    """
    start, end = frames.start, frames.end
    parent: Ints = np.arange(-1, len(frames) - 1, dtype=np.int32)  # half the memory
    unsettled = np.arange(1, len(frames))
    while len(unsettled):
        reached = end[parent[unsettled]]
        unsettled = unsettled[(reached < end[unsettled]) | (reached <= start[unsettled])]
        parent[unsettled] = parent[parent[unsettled]]
        unsettled = unsettled[parent[unsettled] != NONE]
    return parent
