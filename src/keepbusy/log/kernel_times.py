"""How long commands take on the GPU: learned in one window of PyTorch's profiler, for all of the run.

The profiler's events and the log's rows are the same commands in the same order. A kernel that is launched with the
same grid takes about as long each time, and a copy of as many bytes, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.log_file import CallFlag, DriverCall, DriverLog, collective_of, device_commands, different_rows

Key = tuple[int, int, int]
"""What commands that take equally long have in common: the call, with its grid; of a copy also bytes and pageable, of
a collective the number of elements."""
_KINDS = {"kernel": "launch", "gpu_memset": "set_memory", "gpu_memcpy": "copy"}
_COPY, _LARGE = 1_500.0, 1 << 16
"""Nanoseconds of a copy of no bytes, and bytes from which on a copy tells what a byte takes."""
_QUEUED = 20_000
"""Nanoseconds before the end of the command before it: who is launched so early begins as soon as the GPU can."""


class DeviceEvent(NamedTuple):
    """A command as the profiler saw it, in nanoseconds of its clock."""

    kind: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    stream: int
    issued: float  # when the call began that issued it; NaN if the profiler has not seen that
    start: float
    duration: float
    name: str = ""


def device_events(trace: Iterable[dict[str, Any]]) -> list[DeviceEvent]:
    """Of the events of a Chrome trace, in issue order."""
    issued, found = dict[int, float](), list[tuple[int, DeviceEvent]]()
    for event in trace:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and correlation is not None:
            issued[correlation] = 1e3 * event["ts"]
        elif event.get("cat") in _KINDS:
            args, start = event["args"], 1e3 * event["ts"]
            shape = tuple(args.get("grid", ())), tuple(args.get("block", ()))
            seen = DeviceEvent(
                _KINDS[event["cat"]], *shape, args["stream"], np.nan, start, 1e3 * event["dur"], event.get("name", "")
            )
            found.append((correlation, seen))
    found.sort(key=lambda pair: (pair[0], pair[1].start))
    return [event._replace(issued=issued.get(correlation, np.nan)) for correlation, event in found]


@dataclass
class KernelTimes:
    """Times in nanoseconds."""

    durations: dict[Key, float] = field(default_factory=dict)
    fastest: dict[Key, float] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Of kernels, by call, as the profiler shows them."""
    by_function: dict[int, float] = field(default_factory=dict)
    """Of a kernel, whatever its grid."""
    copies: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """Of copies of a kind, from or to pageable memory or not: what each takes, and what a byte adds."""
    usual: float = 3_000.0
    """Of a kernel that the window did not have."""
    launch: float = 5_000.0
    """From a call to its command, on a GPU that is idle."""
    gap: float = 1_000.0
    """Between two commands of a stream, the later of which was issued in time."""
    gap_in_graph: float = 100.0
    back: float = 5_000.0
    """From the end of the last command to the return of a call that waits for it."""

    def of(self, log: DriverLog, described: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Of each command, by the row that describes it; and whether that is known: the window had one like it, or
        it is a copy whose bytes tell it."""
        keys, which = _keys(log, described)
        known = np.array([key in self.durations or self._is_known_copy(log, key) for key in keys], bool)
        durations = np.array([self._of_key(log, key) for key in keys], float)
        return durations[which], known[which]

    def wires(self, log: DriverLog, described: NDArray[Any]) -> NDArray[np.float64]:
        """What each would take if it waited for no other rank."""
        keys, which = _keys(log, described)
        return np.array([self.fastest.get(key, self._of_key(log, key)) for key in keys], float)[which]

    def _is_known_copy(self, log: DriverLog, key: Key) -> bool:
        kind = log.calls[key[0]].kind
        return kind != "launch" and (key[1] < _LARGE or (kind, key[2]) in self.copies)

    def _of_key(self, log: DriverLog, key: Key) -> float:
        call = log.calls[key[0]]
        if key in self.durations:
            return self.durations[key]
        if call.kind == "launch":
            return self.by_function.get(call.function, self.usual)
        each, byte = self.copies.get((call.kind, key[2]), (_COPY, _usual_byte(call.kind, key[2])))
        return each + byte * key[1]


def learn(log: DriverLog, first: int, last: int, events: Sequence[DeviceEvent]) -> KernelTimes:
    """From what was issued between these two moments, and the profiler's events of it."""
    issuers, described = device_commands(log)
    inside = (log.begin[issuers] >= first) & (log.begin[issuers] <= last)
    issuers, described = issuers[inside], described[inside]
    matched = _matched(log, described, events)
    keys, which = _keys(log, described)
    seen, names = defaultdict[Key, list[float]](list), dict[int, str]()
    for at, event in matched:
        seen[keys[which[at]]].append(event.duration)
        names.setdefault(keys[which[at]][0], event.name)
    times = KernelTimes({key: float(np.median(durations)) for key, durations in seen.items()})
    times.names = names
    times.fastest = {key: min(durations) for key, durations in seen.items()}
    by_kind = defaultdict[tuple[str, int], list[tuple[int, float]]](list)
    for key, duration in times.durations.items():
        if log.calls[key[0]].kind != "launch":
            by_kind[log.calls[key[0]].kind, key[2]].append((key[1], duration))
    times.by_function = _by_function(log, times.durations)
    times.usual = float(np.median([*times.by_function.values()])) if times.by_function else times.usual
    times.copies = {kind: _line(points, _usual_byte(*kind)) for kind, points in by_kind.items()}
    _learn_delays(times, log, issuers, matched)
    return times


def shared_by_ranks(logs: Sequence[DriverLog], times: Sequence[KernelTimes]) -> list[KernelTimes]:
    """Ranks run the same kernels on like GPUs, so a rank whose window missed one takes its time from other ranks."""
    most = max(times, key=lambda of_rank: len(of_rank.durations))
    numbers = [_numbers_of_names(log) for log in logs]
    learned = defaultdict[tuple[DriverCall, int, int], list[tuple[float, float, str]]](list)
    for of_rank, its_times in zip(numbers, times, strict=True):
        calls = {number: call for call, number in of_rank.items()}
        for (number, size, flag), duration in its_times.durations.items():
            if number in calls:
                fastest, name = its_times.fastest.get((number, size, flag), duration), its_times.names.get(number, "")
                learned[calls[number], size, flag].append((duration, fastest, name))
    shared = list[KernelTimes]()
    for log, of_rank, its_times in zip(logs, numbers, times, strict=True):
        known = replace(its_times if its_times.durations else most, durations={}, fastest={}, names={})
        for (call, size, flag), each in learned.items():
            if call in of_rank:
                number = of_rank[call]
                durations, fastest_of, names = zip(*each, strict=True)
                known.durations[number, size, flag] = float(np.median(durations))
                known.fastest[number, size, flag], known.names[number] = min(fastest_of), names[0]
        for field_name in ("durations", "fastest", "names"):
            getattr(known, field_name).update(getattr(its_times, field_name))
        known.by_function, known.copies = _by_function(log, known.durations), most.copies | its_times.copies
        shared.append(known)
    return shared


def _numbers_of_names(log: DriverLog) -> dict[DriverCall, int]:
    """Calls without the address that a function has in one process, where that tells which it is."""
    numbers = defaultdict[DriverCall, list[int]](list)
    for number, call in log.calls.items():
        if call.name or call.kind != "launch":
            numbers[replace(call, function=0)].append(number)
    return {call: of_call[0] for call, of_call in numbers.items() if len(of_call) == 1}


def _by_function(log: DriverLog, durations: dict[Key, float]) -> dict[int, float]:
    found = defaultdict[int, list[float]](list)
    for (number, _, _), duration in durations.items():
        if log.calls[number].kind == "launch":
            found[log.calls[number].function].append(duration)
    return {function: float(np.median(each)) for function, each in found.items()}


def _keys(log: DriverLog, described: NDArray[Any]) -> tuple[list[Key], NDArray[np.intp]]:
    """The different ones, and of each command which it has."""
    rows = log.rows[described]
    values = log.rows["value"].astype(np.int64)
    is_launch, collective = log.kinds()[described] == "launch", collective_of(log)[described]
    pageable = (rows["flags"] & CallFlag.PAGEABLE).astype(np.int64)
    sizes = np.where(is_launch, np.where(collective < 0, 0, values[collective]), values[described])
    keys, which = different_rows(rows["call"], sizes, pageable)
    return [(call, size, flag) for call, size, flag in keys.tolist()], which


def _matched(log: DriverLog, described: NDArray[Any], events: Sequence[DeviceEvent]) -> list[tuple[int, DeviceEvent]]:
    """Each command, by its place among those described, with its event. Where the orders differ, only commands of a
    shape that both have equally often."""
    by_shape = defaultdict[Any, list[int]](list)
    for at, number in enumerate(log.rows["call"][described].tolist()):
        by_shape[log.calls[number].shape].append(at)
    seen = defaultdict[Any, list[DeviceEvent]](list)
    for event in events:
        seen[event.kind, event.grid, event.block].append(event)
    equal = [shape for shape, places in by_shape.items() if len(places) == len(seen[shape])]
    return sorted(pair for shape in equal for pair in zip(by_shape[shape], seen[shape], strict=True))


def _line(points: Sequence[tuple[int, float]], usual: float) -> tuple[float, float]:
    """What a copy takes, and what a byte adds, by its sizes in the window. Of small ones alone, a byte adds what is
    usual."""
    sizes, durations = (np.array(column, float) for column in zip(*points, strict=True))
    byte = usual
    if sizes.max() >= _LARGE:
        several = len(set(sizes)) > 1
        byte = float(np.polyfit(sizes, durations, 1)[0]) if several else float(durations.min() / sizes.max())
    return max(500.0, float(np.median(durations - max(0.0, byte) * sizes))), max(0.0, byte)


def _usual_byte(kind: str, pageable: int) -> float:
    """Nanoseconds, where no large copy tells: on the GPU, or through the link."""
    if kind in ("copy_on_gpu", "set_memory"):
        return 0.001
    return 0.1 if pageable else 0.04


def _learn_delays(
    times: KernelTimes, log: DriverLog, issuers: NDArray[Any], matched: Sequence[tuple[int, DeviceEvent]]
) -> None:
    """Those between calls and commands, and from command to command. Calls have both clocks."""
    latencies, gaps, gaps_in_graph, ends = list[float](), list[float](), list[float](), dict[int, float]()
    issued_by = dict[int, int]()
    offsets = [log.begin[issuers[at]] - event.issued for at, event in matched if event.issued == event.issued]
    for at, event in matched:
        issuer, free = int(issuers[at]), ends.get(event.stream, -np.inf)
        if issued_by.get(event.stream) == issuer:
            gaps_in_graph.append(event.start - free)
        elif free < event.issued:
            latencies.append(event.start - event.issued)
        elif event.issued < free - _QUEUED:
            gaps.append(event.start - free)
        ends[event.stream], issued_by[event.stream] = event.start + event.duration, issuer
    if latencies:
        times.launch = float(np.percentile(latencies, 10))  # the profiler makes most of them longer
    if gaps:
        times.gap = max(0.0, float(np.median(gaps)))
    if gaps_in_graph:
        times.gap_in_graph = max(0.0, float(np.median(gaps_in_graph)))
    if offsets and matched:
        _learn_return(times, log, [event for _, event in matched], float(np.median(offsets)))


def _learn_return(times: KernelTimes, log: DriverLog, events: Sequence[DeviceEvent], offset: float) -> None:
    ended = np.sort([event.start + event.duration + offset for event in events])
    waits = np.flatnonzero(np.isin(log.kinds(), ("stream_sync", "context_sync")))
    begin, end = log.begin[waits], log.begin[waits] + log.took[waits]
    last = np.searchsorted(ended, end) - 1
    is_late = (last >= 0) & (ended[np.maximum(last, 0)] > begin) & (end < ended[-1] + 1e6)
    if is_late.any():
        times.back = float(np.median(end[is_late] - ended[last[is_late]]))
