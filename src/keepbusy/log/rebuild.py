"""The GPU's part of a run, rebuilt from the log: when each command ran, and when each wait ought to have ended.

The host's part is known. A command begins once it has arrived and the one before it in its stream has ended, and takes
as long as the same command took in the profiler's window. The GPU's clock changes that, and the waits tell by how
much: each is predicted from those before it, and then the timeline is made to end where it really ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.device_commands import device_commands
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverLog
from keepbusy.timeline.model import STAGED_BYTES

SYNCS = ("stream_sync", "event_sync", "context_sync")
_FASTEST, _SLOWEST = 0.5, 3.0
"""Bounds of the clock's factor."""
_TRUSTED = 1_000_000
"""Nanoseconds of work after which a wait tells as much about the clock as all those before it."""
_SAME_MOMENT = 1_000
"""Nanoseconds by which two moments may differ and count as one."""
_FULL_QUEUE_WAIT, _FULL_QUEUE_PENDING = 100_000, 400
"""A launch that takes so many nanoseconds while so many commands are pending waits until the queue has room."""
_FULL_FOR = 100_000_000
"""Nanoseconds of work after which it is told from a full queue how far the GPU is; from less it is not exact."""
LONG_WAIT = 50_000
"""Nanoseconds of work of which a wait tells the clock."""


@dataclass(frozen=True)
class RebuiltWait:
    """A call that waits for the GPU. Times in nanoseconds of the log's clock."""

    row: int
    begin: int
    ended: int
    """When it really did."""
    predicted: float
    """From what was known before it."""


@dataclass
class RebuiltRun:
    """Each command of the GPU with its time, in issue order."""

    issuers: NDArray[Any]
    described: NDArray[Any]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    known: float
    """The share of commands that the window had, too."""
    waits: list[RebuiltWait] = field(default_factory=list)
    arrivals: dict[int, float] = field(default_factory=dict)
    """Of each meeting, when this rank was predicted to be there, from the waits before."""

    def errors(self, least: int = LONG_WAIT) -> NDArray[np.float64]:
        """Of each wait of so many nanoseconds, real or predicted: by what share of it the prediction was wrong."""
        long = [
            (abs(one.predicted - one.ended), max(one.ended, one.predicted) - one.begin)
            for one in self.waits
            if max(one.ended, one.predicted) - one.begin >= least
        ]
        return np.array([error / length for error, length in long], float)


class Meeting(NamedTuple):
    """A collective on one rank."""

    wire: float
    """What it takes once all have arrived."""
    until: float = 0.0
    """When it ends for all, as far as is known."""


def rebuild(log: DriverLog, times: KernelTimes, meetings: Mapping[int, Meeting] | None = None) -> RebuiltRun:
    """In one pass through the rows. `meetings`: commands, by number, that wait for other ranks."""
    issuers, described = device_commands(log)
    durations, known = times.of(log, described)
    begin, end = np.zeros(len(issuers)), np.zeros(len(issuers))
    run = RebuiltRun(issuers, described, begin, end, float(known.mean()) if len(known) else 0.0)
    return _Rebuilding(log, times, run, durations, meetings or {}).run_through()


class _EventState(NamedTuple):
    """Of the stream that it was recorded in."""

    moment: float = 0.0
    chain_since: float = 0.0
    is_held: bool = False


class _StreamState:
    """Where it stands: until when it is busy, since when without a pause, and with which commands."""

    def __init__(self) -> None:
        self.busy_until = self.busy_since = 0.0
        self.chain_since = 0.0
        """Since when it has been at work, or another stream that it waited for."""
        self.commands: list[int] = []
        self.is_held = False
        """Whether one of them waits for another rank: that tells nothing of this GPU's clock."""

    def rests(self, until: float) -> None:
        self.busy_since = self.chain_since = until
        self.is_held = False
        self.commands.clear()

    def hold(self, event: _EventState) -> None:
        if event.moment > self.busy_until:
            self.busy_until = event.moment
            self.rests(event.moment)
            self.chain_since, self.is_held = event.chain_since, event.is_held


class _Rebuilding:
    def __init__(
        self,
        log: DriverLog,
        times: KernelTimes,
        run: RebuiltRun,
        durations: NDArray[np.float64],
        meetings: Mapping[int, Meeting],
    ) -> None:
        self._meetings = meetings
        self._log, self._times, self._run = log, times, run
        self._durations, self._kinds = durations.tolist(), log.kinds().tolist()
        self._is_kernel = [self._kinds[row] == "launch" for row in run.described.tolist()]
        self._streams = defaultdict[int, _StreamState](_StreamState)
        self._events = dict[int, _EventState]()
        self._factor = 1.0
        self._stacks = log.rows["stack"].tolist()
        self._pending = dict[tuple[int, int], int]()
        """Commands that were pending when the queue had room again, by the call that waited and its stack."""
        self._calls = defaultdict[tuple[str, int], list[int]](list)
        """Of each kind of wait, by the stack it comes from: what calls took that found the GPU done."""

    def run_through(self) -> RebuiltRun:
        log, run = self._log, self._run
        first_of = np.searchsorted(run.issuers, np.arange(len(log.rows) + 1)).tolist()
        streams, values = log.rows["stream"].tolist(), log.rows["value"].tolist()
        flags, begins, took = log.rows["flags"].tolist(), log.begin.tolist(), log.took.tolist()
        for row, kind in enumerate(self._kinds):
            if flags[row] & (CallFlag.CAPTURED | CallFlag.FAILED):
                continue
            stream = streams[row]
            if first_of[row] < first_of[row + 1]:
                self._issue(self._streams[stream], range(first_of[row], first_of[row + 1]), begins[row])
                if kind in ("copy_to_host", "copy") and flags[row] & (CallFlag.PAGEABLE | CallFlag.BLOCKING):
                    self._wait(row, [stream], self._streams[stream].busy_until)
                elif kind == "copy_to_gpu" and flags[row] & CallFlag.PAGEABLE and values[row] > STAGED_BYTES:
                    self._copy_through_host(self._streams[stream], begins[row] + took[row])
                elif took[row] > _FULL_QUEUE_WAIT:
                    self._wait_for_room(row, self._streams[stream], begins[row] + took[row])
            elif kind == "event_record":
                one = self._streams[stream]
                self._events[values[row]] = _EventState(one.busy_until, one.chain_since, one.is_held)
            elif kind == "event_wait":
                self._streams[stream].hold(self._events.get(values[row], _EventState()))
            elif kind == "event_sync":
                self._wait(row, [], self._events.get(values[row], _EventState()).moment)
            elif kind == "stream_sync":
                self._wait(row, [stream], self._streams[stream].busy_until)
            elif kind == "context_sync":
                self._wait(row, [*self._streams], max((one.busy_until for one in self._streams.values()), default=0.0))
        return run

    def _issue(self, stream: _StreamState, commands: range, begin: int) -> None:
        arrived, gap = begin + self._times.launch, self._times.gap
        for number in commands:
            start = stream.busy_until + gap
            if arrived > start:
                start = arrived
                stream.rests(arrived)
            meeting = self._meetings.get(number)
            if meeting is not None:
                self._run.arrivals[number] = start
                stream.busy_until = max(start + meeting.wire, meeting.until)
                stream.is_held |= stream.busy_until > start + meeting.wire + _SAME_MOMENT
            else:
                duration = self._durations[number] * (self._factor if self._is_kernel[number] else 1.0)
                stream.busy_until = start + duration
            stream.commands.append(number)
            self._run.begin[number], self._run.end[number] = start, stream.busy_until
            gap = self._times.gap_in_graph

    def _wait(self, row: int, streams: list[int], done: float) -> None:
        kind, begin, took = self._kinds[row], int(self._log.begin[row]), int(self._log.took[row])
        calls = self._calls[kind, self._stacks[row]]
        own = float(np.median(calls[-15:])) if calls else self._times.back
        is_late = done > begin
        predicted = max(done + self._times.back, begin + own) if is_late else begin + own
        self._run.waits.append(RebuiltWait(row, begin, begin + took, predicted))
        if not is_late:
            calls.append(took)
            return
        really = max(float(begin), begin + took - self._times.back)
        for number in streams:
            stream = self._streams[number]
            if stream.busy_until == done:
                self._close(stream, really)

    def _copy_through_host(self, stream: _StreamState, ended: int) -> None:
        """The driver carries it piece by piece, and the call comes back with the last one: when is known."""
        number = stream.commands[-1]
        stream.busy_until = self._run.end[number] = max(float(self._run.begin[number]), ended - self._times.back)

    def _wait_for_room(self, row: int, stream: _StreamState, really: int) -> None:
        """A launch that found the queue full returns once a command has ended that was issued long before: as many
        before as when the same call found it full for the first time."""
        commands = np.array(stream.commands)
        pending = len(commands) - int(np.searchsorted(self._run.end[commands], really, side="right"))
        key = int(self._log.rows["call"][row]), self._stacks[row]
        usual = self._pending.get(key)
        if usual is None and pending > _FULL_QUEUE_PENDING:
            self._pending[key] = pending
        elif usual is not None and usual < len(commands):
            self._has_ended(stream, commands, len(commands) - usual, really)

    def _has_ended(self, stream: _StreamState, commands: NDArray[np.int64], count: int, really: float) -> None:
        """The first so many of what the stream does without a pause."""
        begin, end, since = self._run.begin, self._run.end, stream.busy_since
        predicted = float(end[commands[count - 1]])
        if min(really, predicted) - since < _FULL_FOR:
            return
        self._learn_clock(stream, predicted, really)
        ratio = (really - since) / (predicted - since)
        for one in (begin, end):
            one[commands] = since + (one[commands] - since) * ratio
        stream.busy_until = since + (stream.busy_until - since) * ratio
        stream.busy_since = really
        stream.commands = commands[count:].tolist()

    def _learn_clock(self, stream: _StreamState, predicted: float, really: float) -> None:
        chain, measured = predicted - stream.chain_since, really - stream.chain_since
        if chain > LONG_WAIT and not stream.is_held and _FASTEST * chain < measured < _SLOWEST * chain:
            faster = (measured / chain) ** (chain / (chain + _TRUSTED))
            self._factor = min(_SLOWEST, max(_FASTEST, self._factor * faster))

    def _close(self, stream: _StreamState, really: float) -> None:
        """What the stream has done without a pause ended then, and not when it was predicted to."""
        self._learn_clock(stream, stream.busy_until, really)
        if really <= stream.busy_since or not stream.commands:
            return
        ratio = (really - stream.busy_since) / (stream.busy_until - stream.busy_since)
        numbers = np.array(stream.commands)
        begin, end = (
            stream.busy_since + (one[numbers] - stream.busy_since) * ratio for one in (self._run.begin, self._run.end)
        )
        self._run.begin[numbers] = begin = np.maximum(begin, self._log.begin[self._run.issuers[numbers]])
        self._run.end[numbers] = np.maximum(begin, end)
        stream.busy_until = really
        stream.rests(really)
