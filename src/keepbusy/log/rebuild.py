"""Rebuilds the GPU's part of a run from the log: when each command ran, and when each wait is predicted to have ended.

The host's part is known. A command begins when it has arrived and the one before it in its stream has ended, and takes
as long as the same command took in the profiler's window, times a factor for the GPU's clock. Waits show this factor:
each is predicted from those before it, and then the timeline is corrected to end where the wait really ended.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverLog, device_commands, waited_copies
from keepbusy.timeline.model import PENDING_LIMIT, STAGED_BYTES

SYNCS = ("stream_sync", "event_sync", "context_sync")
_FASTEST, _SLOWEST = 0.5, 3.0
"""Bounds of the clock's factor."""
_TRUSTED = 1_000_000
"""Nanoseconds of work for which a wait counts as much for the clock's factor as all earlier ones."""
_FULL_QUEUE_WAIT, _FULL_QUEUE_PENDING = 100_000, 400
"""A launch that takes so many nanoseconds while so many commands are pending waits until the queue has room."""
_FULL_FOR = 100_000_000
"""Nanoseconds of work from which on a full queue corrects the GPU's progress, if the queue's size is not known."""
_KNOWN_LATELY = 1_000_000
"""Nanoseconds after a correction in which a full queue is ignored."""
_FEWER, _MORE = 0.9, 1.5
"""A full queue may seem to hold so many times as many commands as it is known to hold."""
_LARGEST_QUEUE = 8 * PENDING_LIMIT
_LATEST = 15
"""So many latest calls of a kind give the median that predicts the next one."""
_NO_COMMAND = -1
LONG_WAIT = 50_000
"""Nanoseconds of work from which on a wait shows the clock's factor."""


@dataclass(frozen=True)
class RebuiltWait:
    """A call that waits for the GPU. Times in nanoseconds of the log's clock."""

    row: int
    begin: int
    ended: int
    """The measured end."""
    predicted: float
    """The end as predicted from earlier waits."""


@dataclass
class RebuiltRun:
    """Each command of the GPU with its time, in issue order."""

    issuers: NDArray[Any]
    described: NDArray[Any]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    known: float
    """The share of commands whose durations are known from the window."""
    waits: list[RebuiltWait] = field(default_factory=list)
    held_when_full: list[int] = field(default_factory=list)
    """Commands that were pending on a stream whenever a launch that had waited for room returned."""


def how_close(waits: Sequence[RebuiltWait]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """The relative errors of long waits, the absolute errors of all waits, and the share of long ones in their time."""
    begin, ended, predicted = np.array([(wait.begin, wait.ended, wait.predicted) for wait in waits]).reshape(-1, 3).T
    error, length = np.abs(predicted - ended), np.maximum(ended, predicted) - begin
    long = length >= LONG_WAIT
    return error[long] / length[long], error, float(length[long].sum() / max(1.0, length.sum()))


class Meeting(NamedTuple):
    """A collective on one rank."""

    wire: float
    """How long it takes once all ranks have arrived."""
    until: float = 0.0
    """When it would end if this rank arrived first."""


def rebuild(log: DriverLog, times: KernelTimes) -> RebuiltRun:
    """Rebuild the run of a process that waits for no other rank."""
    return Rebuilder(log, times).run({})


class Rebuilder:
    """The facts of a log that stay the same, however often its run is rebuilt."""

    def __init__(self, log: DriverLog, times: KernelTimes) -> None:
        self.log, self.times = log, times
        self.issuers, self.described = device_commands(log)
        durations, known = times.of(log, self.described)
        self.durations, self.known = durations.tolist(), float(known.mean()) if len(known) else 0.0
        kinds = log.kinds()
        self.is_kernel = (kinds[self.described] == "launch").tolist()
        first_of = np.searchsorted(self.issuers, np.arange(len(log.rows) + 1))
        actions = _actions(log, kinds, first_of[1:] > first_of[:-1])
        rows = np.flatnonzero(actions != "")
        columns = (actions, first_of[:-1], first_of[1:], log.begin, log.took, log.rows["stream"], log.rows["value"])
        self.steps = [*zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True)]

    def run(self, meetings: Mapping[int, Meeting]) -> RebuiltRun:
        """Rebuild the run in one pass through the rows. `meetings`: commands that wait for other ranks, by number."""
        count = len(self.issuers)
        run = RebuiltRun(self.issuers, self.described, np.zeros(count), np.zeros(count), self.known)
        _Rebuilding(self, run, meetings).run_through()
        return run


_COPY_WAITED_FOR, _COPY_THROUGH_HOST, _QUEUE_WAS_FULL, _ISSUE = "copied", "copied through host", "full", "issue"


def _actions(log: DriverLog, kinds: NDArray[Any], has_commands: NDArray[np.bool_]) -> NDArray[Any]:
    """What `_Rebuilding` has to do for each row; "" if nothing."""
    has_not_run = log.rows["flags"] & int(CallFlag.CAPTURED | CallFlag.FAILED) != 0
    waited_for, through_host = waited_copies(log, kinds)
    return np.select(
        [
            has_not_run,
            has_commands & waited_for,
            has_commands & through_host,
            has_commands & (log.took > _FULL_QUEUE_WAIT),
            has_commands,
            np.isin(kinds, (*SYNCS, "event_record", "event_wait")),
        ],
        [*("", _COPY_WAITED_FOR, _COPY_THROUGH_HOST, _QUEUE_WAS_FULL, _ISSUE), kinds],
        "",
    )


class _StreamState:
    """A stream on the way: until when it is busy, and its recent commands."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.chain_since = 0.0
        """Since when it has been busy without a pause, or waited for another stream that was."""
        self.commands: list[int] = []
        """Commands whose measured end is not known yet."""
        self.waited_for_ranks = False
        """Whether it waited for other ranks since then; such a time says nothing about this GPU's clock."""

    def hold(self, event: _EventState, moment: float) -> None:
        if moment > self.busy_until:
            self.busy_until = moment
            self.chain_since, self.waited_for_ranks = event.chain_since, event.waited_for_ranks


class _EventState(NamedTuple):
    """The state of a stream when an event was recorded in it."""

    last: int = _NO_COMMAND
    moment: float = 0.0
    """The time of the event, if it is not the end of the last command."""
    chain_since: float = 0.0
    waited_for_ranks: bool = False


@dataclass
class _Correction:
    """Stretches predicted times from `since` to `predicted` so that they end at `measured`, and moves later ones."""

    since: float
    predicted: float
    measured: float
    slower: float
    """Later commands take so many times as long as predicted."""
    ends: list[float] = field(default_factory=list)
    """The ends of later meetings, in order."""
    absorbed: list[float] = field(default_factory=lambda: [0.0])
    """By how much less the times after each meeting move: a rank that arrives earlier waits longer there."""

    def of(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        early = self.since + (times - self.since) * (self.measured - self.since) / (self.predicted - self.since)
        late = self.measured + (times - self.predicted) * self.slower
        if self.ends:
            late = late - np.array(self.absorbed)[np.searchsorted(self.ends, times, side="left")]
        return np.where(times <= self.since, times, np.where(times <= self.predicted, early, late))

    def of_one(self, time: float) -> float:
        """`of` for a single time, which is far faster."""
        if time <= self.since:
            return time
        if time <= self.predicted:
            return self.since + (time - self.since) * (self.measured - self.since) / (self.predicted - self.since)
        late = self.measured + (time - self.predicted) * self.slower
        return late - self.absorbed[bisect_left(self.ends, time)]

    def add_meeting(self, begin: float, end: float, meeting: Meeting) -> None:
        """Add the next later meeting, with its predicted times. It ends at `meeting.until` at the earliest."""
        own_end = self.of_one(begin) + meeting.wire
        moved = self.of_one(end)
        self.absorbed.append(self.absorbed[-1] + moved - max(own_end, meeting.until))
        self.ends.append(end)


class _Rebuilding:
    """One pass through the rows, and its state."""

    def __init__(self, rebuilder: Rebuilder, run: RebuiltRun, meetings: Mapping[int, Meeting]) -> None:
        self._log, self._times, self._steps = rebuilder.log, rebuilder.times, rebuilder.steps
        self._durations, self._is_kernel = [*rebuilder.durations], rebuilder.is_kernel
        self._run, self._meetings = run, meetings
        self._streams = defaultdict[int, _StreamState](_StreamState)
        self._events = dict[int, _EventState]()
        self._factor = 1.0
        self._begins, self._ends, self._chain_begins = (array("d", bytes(8 * len(run.issuers))) for _ in range(3))
        """Times of each command. Single numbers are faster in these arrays than in NumPy's, which share the memory."""
        run.begin, run.end = np.frombuffer(self._begins), np.frombuffer(self._ends)
        self._chains = np.frombuffer(self._chain_begins)
        """For each command, since when the stream had been busy without a pause."""
        self._open_meetings = list[int]()
        """Meetings whose measured end is not known yet."""
        self._known_until = 0.0
        """The time of the last correction."""
        self._clock_since = self._moved = 0.0
        """Since when the speed of kernels is measured, and by how much corrections have moved times since."""
        self._pending = dict[tuple[int, int], int]()
        """Commands that were pending when the queue was full, by the call that waited and its stack."""
        self._copies = defaultdict[tuple[int, int], list[float]](list)
        """Durations of copies that were waited for, by call and size."""
        self._calls = defaultdict[tuple[str, int], list[int]](list)
        """Durations of waits that found the GPU idle, by their kind and stack."""

    def run_through(self) -> None:
        for row, action, first, last, begin, took, number, value in self._steps:
            if action == "event_sync":
                self._wait(row, action, self._events.get(value, _EventState()))
                continue
            stream = self._streams[number]
            if action == _COPY_WAITED_FOR:
                self._copy_and_wait(row, stream, first, value)
                continue
            if first < last:
                self._issue(stream, range(first, last), begin)
            if action == "stream_sync":
                self._wait(row, action, self._event_of(stream))
            elif action == _COPY_THROUGH_HOST:  # in pieces; the call returns with the last one, so its end is known
                ended, copy = begin + took - self._times.back, stream.commands[-1]
                stream.busy_until = self._ends[copy] = max(self._begins[copy], ended)
            elif action == _QUEUE_WAS_FULL:
                self._wait_for_room(row, stream, begin + took)
            elif action == "event_record":
                self._events[value] = self._event_of(stream)
            elif action == "event_wait":
                event = self._events.get(value, _EventState())
                stream.hold(event, self._moment(event))
            elif action == "context_sync":
                latest = max(self._streams.values(), key=lambda state: state.busy_until)
                self._wait(row, action, self._event_of(latest))

    def _event_of(self, stream: _StreamState) -> _EventState:
        """An event that is recorded in the stream now."""
        last = stream.commands[-1] if stream.commands else _NO_COMMAND
        if last != _NO_COMMAND and self._ends[last] != stream.busy_until:
            last = _NO_COMMAND  # it has waited for another stream since
        return _EventState(last, stream.busy_until, stream.chain_since, stream.waited_for_ranks)

    def _moment(self, event: _EventState) -> float:
        return self._ends[event.last] if event.last != _NO_COMMAND else event.moment

    def _issue(self, stream: _StreamState, commands: range, begin: int) -> None:
        arrived, gap = begin + self._times.launch, self._times.gap
        meetings, busy_until = self._meetings, stream.busy_until
        for number in commands:
            start = busy_until + gap
            if arrived > start:
                start = stream.chain_since = arrived
                stream.waited_for_ranks = False
            if number in meetings:
                meeting = meetings[number]
                self._open_meetings.append(number)
                busy_until = max(start + meeting.wire, meeting.until)
                stream.waited_for_ranks = True
            else:
                busy_until = start + self._durations[number] * (self._factor if self._is_kernel[number] else 1.0)
            self._begins[number], self._ends[number] = start, busy_until
            self._chain_begins[number] = stream.chain_since
            gap = self._times.gap_in_graph
        stream.busy_until = busy_until
        stream.commands.extend(commands)

    def _wait(self, row: int, kind: str, event: _EventState) -> None:
        begin, took = int(self._log.begin[row]), int(self._log.took[row])
        calls, done = self._calls[kind, int(self._log.rows["stack"][row])], self._moment(event)
        own = float(np.median(calls[-_LATEST:])) if calls else self._times.back
        is_late = done > begin
        predicted = max(done + self._times.back, begin + own) if is_late else begin + own
        self._run.waits.append(RebuiltWait(row, begin, begin + took, predicted))
        if is_late:
            self._correct(event, max(float(begin), begin + took - self._times.back))
        else:
            calls.append(took)

    def _copy_and_wait(self, row: int, stream: _StreamState, number: int, size: int) -> None:
        """A copy that the call waits for is predicted to take as long as similar copies. The time of a large one
        depends on the host's memory, so a longer time says nothing about kernels. The measured time of a small one
        counts only if the GPU was idle before it."""
        begin, took = int(self._log.begin[row]), int(self._log.took[row])
        similar = self._copies[int(self._log.rows["call"][row]), size]
        shortest = min([self._durations[number], *similar])
        if similar:
            self._durations[number] = float(np.median(similar[-_LATEST:]))
        was_idle = stream.busy_until <= begin
        self._issue(stream, range(number, number + 1), begin)
        measured = max(float(begin), begin + took - self._times.back)
        self._run.waits.append(RebuiltWait(row, begin, begin + took, self._ends[number] + self._times.back))
        is_longer = measured > self._begins[number] + shortest
        if was_idle or size > STAGED_BYTES:
            duration = max(shortest, measured - self._begins[number])
            similar.append(duration)
            self._ends[number] = stream.busy_until = self._begins[number] + duration
        is_known = was_idle or (size > STAGED_BYTES and is_longer)
        self._correct(self._event_of(stream), measured, math.inf if is_known else LONG_WAIT)

    def _wait_for_room(self, row: int, stream: _StreamState, measured: int) -> None:
        """A launch that found the queue full returns when an earlier command has ended: as many commands before as the
        queue is known to hold, or else as many as were pending when the same call first found it full."""
        if measured - self._known_until < _KNOWN_LATELY:
            return
        commands, begin = np.array(stream.commands[-_LARGEST_QUEUE:]), int(self._log.begin[row])
        pending = len(commands) - int(np.searchsorted(self._run.end[commands], begin, side="right"))
        if not _FULL_QUEUE_PENDING <= pending < _LARGEST_QUEUE:
            return
        is_exact = _FEWER * PENDING_LIMIT < pending < _MORE * PENDING_LIMIT
        key = int(self._log.rows["call"][row]), int(self._log.rows["stack"][row])
        usual = PENDING_LIMIT if is_exact else self._pending.setdefault(key, pending)
        if usual > len(commands):
            return
        last = int(commands[-usual])
        predicted, chain_since = float(self._run.end[last]), float(self._chains[last])
        since = max(chain_since, self._known_until)
        is_reliable = is_exact
        if not stream.waited_for_ranks:  # otherwise other ranks may have delayed it by any time
            is_reliable |= min(measured, predicted) - since >= _FULL_FOR
            # a call that took far longer also waited for something else, such as the profiler
            is_reliable &= _FASTEST * (predicted - since) < measured - since < _SLOWEST * (predicted - since)
        if is_reliable:
            self._correct(_EventState(last, predicted, chain_since, stream.waited_for_ranks), measured, _FULL_FOR)
            self._run.held_when_full.append(usual - 1)

    def _correct(self, event: _EventState, measured: float, least_work: float = LONG_WAIT) -> None:
        """Correct all streams: the GPU reached this event at the measured time. If at least `least_work` nanoseconds
        of work came before it, that also shows how fast kernels are."""
        predicted, since = self._moment(event), max(event.chain_since, self._known_until)
        if min(measured, predicted) <= since:
            return
        slower = self._learn_clock(event, predicted, measured, least_work)
        correction = _Correction(since, predicted, measured, slower)
        begin, end = self._run.begin, self._run.end
        unsettled = [number for number in self._open_meetings if end[number] > since]
        self._open_meetings = sorted(unsettled, key=end.__getitem__)
        for number in self._open_meetings:
            if end[number] > predicted:
                correction.add_meeting(float(begin[number]), float(end[number]), self._meetings[number])
        for stream in self._streams.values():
            self._correct_commands(stream, correction)
            if stream.chain_since <= since:
                stream.busy_until = correction.of_one(stream.busy_until)
                if stream.commands:
                    stream.busy_until = max(stream.busy_until, float(end[stream.commands[-1]]))
        for key, recorded in self._events.items():
            if recorded.last == _NO_COMMAND and recorded.chain_since <= since < recorded.moment:
                self._events[key] = recorded._replace(moment=correction.of_one(recorded.moment))
        self._known_until = measured

    def _correct_commands(self, stream: _StreamState, correction: _Correction) -> None:
        """Move the stream's commands, except those after a pause that is later than `since`."""
        if not stream.commands:
            return
        numbers, run = np.array(stream.commands), self._run
        begin, end = run.begin[numbers], run.end[numbers]
        issued = self._log.begin[run.issuers[numbers]]
        moves = self._chains[numbers] <= correction.since  # the others began when they arrived
        begin = np.where(moves, np.maximum(correction.of(begin), issued), begin)
        begin = np.minimum.accumulate(begin[::-1])[::-1]
        end = np.maximum(begin, np.where(moves, correction.of(end), end))
        end[:-1] = np.minimum(end[:-1], begin[1:])
        run.begin[numbers], run.end[numbers] = begin, end
        stream.commands = numbers[end > correction.measured].tolist()

    def _learn_clock(self, event: _EventState, predicted: float, measured: float, least_work: float) -> float:
        """Update the clock's factor from the busy time before the event; return the change of the factor."""
        if event.chain_since > self._clock_since:
            self._clock_since, self._moved = event.chain_since, 0.0
        self._moved += measured - predicted
        before, measured_work = self._factor, measured - self._clock_since
        if measured_work < least_work:
            return 1.0
        predicted_work = measured_work - self._moved
        is_plausible = _FASTEST * predicted_work < measured_work < _SLOWEST * predicted_work
        if not event.waited_for_ranks and is_plausible:
            change = (measured_work / predicted_work) ** (predicted_work / (predicted_work + _TRUSTED))
            self._factor = min(_SLOWEST, max(_FASTEST, self._factor * change))
        self._clock_since, self._moved = measured, 0.0
        return self._factor / before
