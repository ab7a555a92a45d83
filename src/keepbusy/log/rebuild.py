"""The GPU's part of a run, rebuilt from the log: when each command ran, and when each wait ought to have ended.

The host's part is known. A command begins once it has arrived and the one before it in its stream has ended, and takes
as long as the same command took in the profiler's window. The GPU's clock changes that, and the waits tell by how
much: each is predicted from those before it, and then the timeline is made to end where it really ended.
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
"""Nanoseconds of work after which a wait tells as much about the clock as all those before it."""
_FULL_QUEUE_WAIT, _FULL_QUEUE_PENDING = 100_000, 400
"""A launch that takes so many nanoseconds while so many commands are pending waits until the queue has room."""
_FULL_FOR = 100_000_000
"""Nanoseconds of work after which a full queue tells how far the GPU is, if it is not known how much it holds."""
_KNOWN_LATELY = 1_000_000
"""Nanoseconds for which a full queue tells nothing new."""
_FEWER, _MORE = 0.9, 1.5
"""Times the number that a queue is known to hold: so many may seem to be pending when it is full."""
_LARGEST_QUEUE = 8 * PENDING_LIMIT
_LATEST = 15
"""Calls of a kind, of which the median tells what the next one takes."""
_NO_COMMAND = -1
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
    held_when_full: list[int] = field(default_factory=list)
    """Commands that were pending on a stream whenever a launch that had waited for room returned."""


def how_close(waits: Sequence[RebuiltWait]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Of each long wait by what share of it the prediction was wrong, of each wait by how much, and the long ones'
    share of all that was waited."""
    begin, ended, predicted = np.array([(one.begin, one.ended, one.predicted) for one in waits]).reshape(-1, 3).T
    apart, length = np.abs(predicted - ended), np.maximum(ended, predicted) - begin
    long = length >= LONG_WAIT
    return apart[long] / length[long], apart, float(length[long].sum() / max(1.0, length.sum()))


class Meeting(NamedTuple):
    """A collective on one rank."""

    wire: float
    """What it takes once all have arrived."""
    until: float = 0.0
    """When it would end if only the others were waited for, as far as is known."""


def rebuild(log: DriverLog, times: KernelTimes) -> RebuiltRun:
    """Of a process that waits for no other rank."""
    return Rebuilder(log, times).run({})


class Rebuilder:
    """What of a log does not change, however often its run is rebuilt."""

    def __init__(self, log: DriverLog, times: KernelTimes) -> None:
        self.log, self.times = log, times
        self.issuers, self.described = device_commands(log)
        durations, known = times.of(log, self.described)
        self.durations, self.known = durations.tolist(), float(known.mean()) if len(known) else 0.0
        kinds = log.kinds()
        self.is_kernel = (kinds[self.described] == "launch").tolist()
        first_of = np.searchsorted(self.issuers, np.arange(len(log.rows) + 1))
        what = _what_to_do(log, kinds, first_of[1:] > first_of[:-1])
        rows = np.flatnonzero(what != "")
        columns = (first_of[:-1], first_of[1:], log.begin, log.took, log.rows["stream"], log.rows["value"])
        self.steps = [*zip(rows.tolist(), what[rows].tolist(), *(one[rows].tolist() for one in columns), strict=True)]

    def run(self, meetings: Mapping[int, Meeting]) -> RebuiltRun:
        """In one pass through the rows. `meetings`: commands, by number, that wait for other ranks."""
        count = len(self.issuers)
        run = RebuiltRun(self.issuers, self.described, np.zeros(count), np.zeros(count), self.known)
        _Rebuilding(self, run, meetings).run_through()
        return run


_COPY_WAITED_FOR, _COPY_THROUGH_HOST, _QUEUE_WAS_FULL, _ISSUE = "copied", "copied through host", "full", "issue"


def _what_to_do(log: DriverLog, kinds: NDArray[Any], has_commands: NDArray[np.bool_]) -> NDArray[Any]:
    """Of each row; "" where nothing."""
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
    """Where it stands: until when it is busy, and with which commands."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.chain_since = 0.0
        """Since when it has been at work without a pause, or another stream that it waited for."""
        self.commands: list[int] = []
        """Those of which it is not known yet when they really ended."""
        self.has_met = False
        """Whether other ranks were waited for meanwhile: that tells nothing of this GPU's clock."""

    def hold(self, event: _EventState, moment: float) -> None:
        if moment > self.busy_until:
            self.busy_until = moment
            self.chain_since, self.has_met = event.chain_since, event.has_met


class _EventState(NamedTuple):
    """What its stream had before it."""

    last: int = _NO_COMMAND
    moment: float = 0.0
    """Where no command of the stream tells it."""
    chain_since: float = 0.0
    has_met: bool = False


@dataclass
class _Correction:
    """From a moment that is known, what was predicted ends as it really did; what comes later moves with it."""

    since: float
    predicted: float
    really: float
    slower: float
    """What comes later takes so many times as long as was thought."""
    ends: list[float] = field(default_factory=list)
    """Of meetings that come later, in order."""
    absorbed: list[float] = field(default_factory=lambda: [0.0])
    """By how much less what follows them moves: a rank that comes earlier waits longer there, and the reverse."""

    def of(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        early = self.since + (times - self.since) * (self.really - self.since) / (self.predicted - self.since)
        late = self.really + (times - self.predicted) * self.slower
        if self.ends:
            late = late - np.array(self.absorbed)[np.searchsorted(self.ends, times, side="left")]
        return np.where(times <= self.since, times, np.where(times <= self.predicted, early, late))

    def of_one(self, time: float) -> float:
        """The same, far faster where it is asked of one time after another."""
        if time <= self.since:
            return time
        if time <= self.predicted:
            return self.since + (time - self.since) * (self.really - self.since) / (self.predicted - self.since)
        late = self.really + (time - self.predicted) * self.slower
        return late - self.absorbed[bisect_left(self.ends, time)]

    def meet(self, begin: float, end: float, meeting: Meeting) -> None:
        """A later one, as it was predicted: the others are there until `meeting.until`, whenever this rank comes."""
        comes = self.of_one(begin) + meeting.wire
        moved = self.of_one(end)
        self.absorbed.append(self.absorbed[-1] + moved - max(comes, meeting.until))
        self.ends.append(end)


class _Rebuilding:
    """One pass, and what is known on its way."""

    def __init__(self, what: Rebuilder, run: RebuiltRun, meetings: Mapping[int, Meeting]) -> None:
        self._log, self._times, self._steps = what.log, what.times, what.steps
        self._durations, self._is_kernel = [*what.durations], what.is_kernel
        self._run, self._meetings = run, meetings
        self._streams = defaultdict[int, _StreamState](_StreamState)
        self._events = dict[int, _EventState]()
        self._factor = 1.0
        self._begins, self._ends, self._chain_begins = (array("d", bytes(8 * len(run.issuers))) for _ in range(3))
        """Of each command. Numbers come and go faster here than in NumPy's arrays, which share the memory."""
        run.begin, run.end = np.frombuffer(self._begins), np.frombuffer(self._ends)
        self._chains = np.frombuffer(self._chain_begins)
        """Since when the stream had been at work without a pause, at each command."""
        self._met = list[int]()
        """Meetings of which it is not known yet when they really ended."""
        self._known_until = 0.0
        """When the last wait told what the GPU had really done."""
        self._clock_since = self._moved = 0.0
        """Since when it is measured how fast kernels are, and what corrections have added since."""
        self._pending = dict[tuple[int, int], int]()
        """Commands that were pending when the queue was full, by the call that waited and its stack."""
        self._copies = defaultdict[tuple[int, int], list[float]](list)
        """Of copies that were waited for, by call and size, what they took."""
        self._calls = defaultdict[tuple[str, int], list[int]](list)
        """Of each kind of wait, by the stack it comes from: what calls took that found the GPU done."""

    def run_through(self) -> None:
        for row, what, first, last, begin, took, number, value in self._steps:
            if what == "event_sync":
                self._wait(row, what, self._events.get(value, _EventState()))
                continue
            stream = self._streams[number]
            if what == _COPY_WAITED_FOR:
                self._copy_and_wait(row, stream, first, value)
                continue
            if first < last:
                self._issue(stream, range(first, last), begin)
            if what == "stream_sync":
                self._wait(row, what, self._event_of(stream))
            elif what == _COPY_THROUGH_HOST:  # piece by piece, and the call comes back with the last one: when is known
                ended, copy = begin + took - self._times.back, stream.commands[-1]
                stream.busy_until = self._ends[copy] = max(self._begins[copy], ended)
            elif what == _QUEUE_WAS_FULL:
                self._wait_for_room(row, stream, begin + took)
            elif what == "event_record":
                self._events[value] = self._event_of(stream)
            elif what == "event_wait":
                event = self._events.get(value, _EventState())
                stream.hold(event, self._moment(event))
            elif what == "context_sync":
                last_one = max(self._streams.values(), key=lambda one: one.busy_until)
                self._wait(row, what, self._event_of(last_one))

    def _event_of(self, stream: _StreamState) -> _EventState:
        """As if one were recorded there now."""
        last = stream.commands[-1] if stream.commands else _NO_COMMAND
        if last != _NO_COMMAND and self._ends[last] != stream.busy_until:
            last = _NO_COMMAND  # it has waited for another stream since
        return _EventState(last, stream.busy_until, stream.chain_since, stream.has_met)

    def _moment(self, event: _EventState) -> float:
        return self._ends[event.last] if event.last != _NO_COMMAND else event.moment

    def _issue(self, stream: _StreamState, commands: range, begin: int) -> None:
        arrived, gap = begin + self._times.launch, self._times.gap
        meetings, busy_until = self._meetings, stream.busy_until
        for number in commands:
            start = busy_until + gap
            if arrived > start:
                start = stream.chain_since = arrived
                stream.has_met = False
            if number in meetings:
                meeting = meetings[number]
                self._met.append(number)
                busy_until = max(start + meeting.wire, meeting.until)
                stream.has_met = True
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
        """It is predicted to take as long as those like it took. A large copy depends on the host's memory: what it
        took longer than predicted is its own time, and says nothing about kernels. A small one counts only if the GPU
        was idle before it."""
        begin, took = int(self._log.begin[row]), int(self._log.took[row])
        alike = self._copies[int(self._log.rows["call"][row]), size]
        shortest = min([self._durations[number], *alike])
        if alike:
            self._durations[number] = float(np.median(alike[-_LATEST:]))
        is_alone = stream.busy_until <= begin
        self._issue(stream, range(number, number + 1), begin)
        really = max(float(begin), begin + took - self._times.back)
        self._run.waits.append(RebuiltWait(row, begin, begin + took, self._ends[number] + self._times.back))
        longer = really > self._begins[number] + shortest
        if is_alone or size > STAGED_BYTES:
            took_itself = max(shortest, really - self._begins[number])
            alike.append(took_itself)
            self._ends[number] = stream.busy_until = self._begins[number] + took_itself
        is_known = is_alone or (size > STAGED_BYTES and longer)
        self._correct(self._event_of(stream), really, math.inf if is_known else LONG_WAIT)

    def _wait_for_room(self, row: int, stream: _StreamState, really: int) -> None:
        """A launch that found the queue full returns once a command has ended that was issued long before: as many
        before as the queue is known to hold; else as many as when the same call found it full for the first time."""
        if really - self._known_until < _KNOWN_LATELY:
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
        tells = is_exact
        if not stream.has_met:  # else other ranks may have held it up for any time
            tells |= min(really, predicted) - since >= _FULL_FOR
            # a call that took far longer waited for something else, too, as for the profiler
            tells &= _FASTEST * (predicted - since) < really - since < _SLOWEST * (predicted - since)
        if tells:
            self._correct(_EventState(last, predicted, chain_since, stream.has_met), really, _FULL_FOR)
            self._run.held_when_full.append(usual - 1)

    def _correct(self, event: _EventState, really: float, telling: float = LONG_WAIT) -> None:
        """The GPU has really come to this event then: all streams were earlier or later than predicted, since it was
        known last when they were. `telling`: nanoseconds of which that tells how fast kernels are."""
        predicted, since = self._moment(event), max(event.chain_since, self._known_until)
        if min(really, predicted) <= since:
            return
        told = self._learn_clock(event, predicted, really, telling)
        correction = _Correction(since, predicted, really, told)
        begin, end = self._run.begin, self._run.end
        self._met = sorted((one for one in self._met if end[one] > since), key=end.__getitem__)
        for number in self._met:
            if end[number] > predicted:
                correction.meet(float(begin[number]), float(end[number]), self._meetings[number])
        for stream in self._streams.values():
            self._correct_commands(stream, correction)
            if stream.chain_since <= since:
                stream.busy_until = correction.of_one(stream.busy_until)
                if stream.commands:
                    stream.busy_until = max(stream.busy_until, float(end[stream.commands[-1]]))
        for key, recorded in self._events.items():
            if recorded.last == _NO_COMMAND and recorded.chain_since <= since < recorded.moment:
                self._events[key] = recorded._replace(moment=correction.of_one(recorded.moment))
        self._known_until = really

    def _correct_commands(self, stream: _StreamState, correction: _Correction) -> None:
        """But those that began when they arrived, and what came after them without a pause."""
        if not stream.commands:
            return
        numbers, run = np.array(stream.commands), self._run
        begin, end = run.begin[numbers], run.end[numbers]
        issued = self._log.begin[run.issuers[numbers]]
        moves = self._chains[numbers] <= correction.since
        begin = np.where(moves, np.maximum(correction.of(begin), issued), begin)
        begin = np.minimum.accumulate(begin[::-1])[::-1]
        end = np.maximum(begin, np.where(moves, correction.of(end), end))
        end[:-1] = np.minimum(end[:-1], begin[1:])
        run.begin[numbers], run.end[numbers] = begin, end
        stream.commands = numbers[end > correction.really].tolist()

    def _learn_clock(self, event: _EventState, predicted: float, really: float, telling: float) -> float:
        """From the time without a pause before a moment; returns how many times as long as before kernels take."""
        if event.chain_since > self._clock_since:
            self._clock_since, self._moved = event.chain_since, 0.0
        self._moved += really - predicted
        before, measured = self._factor, really - self._clock_since
        if measured < telling:
            return 1.0
        thought = measured - self._moved
        if not event.has_met and _FASTEST * thought < measured < _SLOWEST * thought:
            faster = (measured / thought) ** (thought / (thought + _TRUSTED))
            self._factor = min(_SLOWEST, max(_FASTEST, self._factor * faster))
        self._clock_since, self._moved = really, 0.0
        return self._factor / before
