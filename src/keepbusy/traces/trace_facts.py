"""Where a step begins, as the trace itself says: profiler steps, else optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.frame_roles import PROFILER_STEP, STEP_MARKS, Role, roles_of
from keepbusy.timeline.model import NONE, WORKERS, Frames, Ints, Lane, Mask
from keepbusy.traces.cuda_calls import (
    Calls,
    awaited_lane,
    calls_of,
    launch_of,
    recorded_lane,
    released_by,
    waits_for_its_copy,
)
from keepbusy.traces.event_columns import Events, Trace
from keepbusy.traces.frames import Nest, frames_of, nest_of
from keepbusy.traces.host_threads import Threads, issuing_threads, threads_of
from keepbusy.traces.kineto_names import Category

# A loader with workers: what the training process spends in `__next__` is a wait for them, not work.
#
# The workers are processes that no trace shows. When the loop finds no batch ready, the time from one
# such batch to the next is what they take to make it; so they become a lane whose spans are batches.

STARVED = 300_000
"""Taking a batch that is ready costs less than this."""


def starved(role: Ints, nest: Nest, calls: Ints) -> Ints:
    """Rows of (start, end): when the loop waited for its workers and called nothing else."""
    mine = np.flatnonzero((role[nest.event] & Role.LOADER_WORKERS != 0) & (nest.end - nest.start > STARVED))
    mine = mine[np.searchsorted(calls, nest.end[mine]) == np.searchsorted(calls, nest.start[mine])]
    return np.stack([nest.start[mine], nest.end[mine]], axis=1)


def batches(waits: Ints, begin: int) -> tuple[Ints, Ints]:
    """When the workers began and ended each batch that the loop had to wait for."""
    return np.concatenate([[begin], waits[:-1, 1]])[: len(waits)], waits[:, 1]


# One trace being read: what it shows, each thing looked up once.


@dataclass(frozen=True, eq=False)
class Reading:
    """Positions: a call's is its index in `calls`, a command's its index in `commands`."""

    trace: Trace
    rank: int

    @property
    def events(self) -> Events:
        return self.trace.events

    @cached_property
    def role(self) -> Ints:
        """Of each event, what a frame so called does."""
        return roles_of(self.trace.names)[1][self.events.name]

    @cached_property
    def commands(self) -> Ints:
        """The device's commands in order of start."""
        events = self.events
        rows = np.flatnonzero(events.category <= Category.FILL)
        if not len(rows):
            raise BadInput(
                f"{self.trace.path} shows nothing that ran on a GPU; "
                "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine that has one."
            )
        return rows[np.lexsort((events.end[rows], events.start[rows]))]

    @cached_property
    def threads(self) -> Ints:
        return issuing_threads(self.trace, self.commands)

    @cached_property
    def calls(self) -> Calls:
        calls = calls_of(self.trace, self.commands, self.threads)
        if not len(calls.event):
            raise BadInput(
                f"{self.trace.path} shows commands of the device but no call that launched them; "
                "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
            )
        return calls

    @cached_property
    def call_start(self) -> Ints:
        return self.events.start[self.calls.event]

    @cached_property
    def call_end(self) -> Ints:
        return self.events.end[self.calls.event]

    @cached_property
    def launch(self) -> Ints:
        """Of each command the call that launched it, or NONE."""
        return launch_of(self.trace, self.calls, self.commands)

    @cached_property
    def backlog(self) -> Mask:
        """What a stream still had to do when recording began: such commands were issued before the window.

        A stream keeps its order, so that holds of whatever ran there before its first command that has a launch.
        """
        place, known = np.arange(len(self.commands)), np.flatnonzero(self.launch != NONE)
        lane = self.lane_of_command
        first = np.full(int(lane.max()) + 1, NONE, np.int64)
        first[lane[known][::-1]] = known[::-1]
        return place < first[lane]

    @cached_property
    def launched(self) -> Ints:
        """Of each call the lane of its first command, or NONE."""
        launched = np.full(len(self.calls.event), NONE, np.int64)
        known = self.launch != NONE
        launched[self.launch[known][::-1]] = self.lane_of_command[known][::-1]
        return launched

    @cached_property
    def held(self) -> Ints:
        """Of each call that found its stream's queue full the command that made room, else NONE."""
        return released_by(self.trace, self.calls, self.commands, self.launch, self.lane_of_command)

    @cached_property
    def awaited(self) -> Ints:
        """Of each call the lane that it would wait for."""
        streams = {pair: index + len(self.lane_of_thread) for index, pair in enumerate(self._streams[0])}
        recorded = recorded_lane(self.trace, self.calls, streams)
        return awaited_lane(self.trace, self.calls, self.launched, recorded)

    @cached_property
    def blocking(self) -> Mask:
        """Which calls return only when their own copy has ended."""
        return waits_for_its_copy(self.trace, self.calls, self.commands, self.launch) & (self.held == NONE)

    @cached_property
    def hosts(self) -> Threads:
        return threads_of(self.trace, self.threads, self.calls)

    @cached_property
    def nests(self) -> dict[int, Nest]:
        return {thread: nest_of(self.trace, thread) for thread in self.hosts.alive}

    @cached_property
    def marks(self) -> Ints:
        return step_marks(self.trace, self.hosts.main)

    @cached_property
    def starved(self) -> Ints:
        """When the loop waited for a loader's workers: rows of (start, end)."""
        mine = self.call_start[self.events.thread[self.calls.event] == self.hosts.main]
        return starved(self.role, self.nests[self.hosts.main], mine)

    @cached_property
    def lane_of_thread(self) -> dict[int, int]:
        others = sorted(thread for thread in self.hosts.alive if thread != self.hosts.main)
        return {thread: index for index, thread in enumerate([self.hosts.main, *others])}

    @property
    def main_lane(self) -> int:
        return self.lane_of_thread[self.hosts.main]

    @cached_property
    def _streams(self) -> tuple[list[tuple[int, int]], Ints]:
        events, commands = self.events, self.commands
        pairs = np.stack([events.device[commands], events.stream[commands]], axis=1).astype(np.int64)
        unique, which = np.unique(pairs, axis=0, return_inverse=True)
        return [(int(device), int(stream)) for device, stream in unique], which.reshape(-1)

    @cached_property
    def lane_of_command(self) -> Ints:
        return self._streams[1] + len(self.lane_of_thread)

    @cached_property
    def workers_lane(self) -> int:
        return len(self.lane_of_thread) + len(self._streams[0])

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Host threads, then streams, then the loader's workers if the loop waits for them."""
        threads = [
            Lane(self.rank, None, index, self.trace.threads[thread].name)
            for thread, index in self.lane_of_thread.items()
        ]
        streams = [Lane(self.rank, device, stream, f"stream {stream}") for device, stream in self._streams[0]]
        workers = [Lane(self.rank, None, NONE, WORKERS)] if len(self.starved) else []
        return (*threads, *streams, *workers)

    @cached_property
    def _frames(self) -> tuple[Frames, dict[int, int]]:
        return frames_of(self.nests, self.lane_of_thread, self.trace)

    @property
    def frames(self) -> Frames:
        return self._frames[0]

    @property
    def first_frame(self) -> dict[int, int]:
        """Where in `frames` each thread's own begin."""
        return self._frames[1]


def step_marks(trace: Trace, main: int) -> Ints:
    """Times on the main thread at which steps begin; none where the trace does not mark any."""
    events = trace.events
    mine = (events.category == Category.ANNOTATION) & (events.thread == main)
    for prefix in STEP_MARKS:
        these = mine & trace.begins(prefix)
        marks = np.unique(events.start[these])
        if len(marks) >= 2:
            # a profiler step is a whole one, so the last one's end is a mark, too
            return np.append(marks, events.end[these].max()) if prefix == PROFILER_STEP else marks
    return np.zeros(0, np.int64)
