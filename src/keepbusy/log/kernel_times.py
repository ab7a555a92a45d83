"""How long commands take on the GPU: learned in a window of PyTorch's profiler, for the whole run.

The profiler's events and the log's rows are the same commands in the same order. A kernel with the same grid takes
about as long each time, and so does a copy of as many bytes.
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
"""Commands with the same key take equally long: the call with its grid, the size (bytes of a copy, elements of a
collective), and whether a copy's memory is pageable."""
_KINDS = {"kernel": "launch", "gpu_memset": "set_memory", "gpu_memcpy": "copy"}
_COPY, _LARGE = 1_500.0, 1 << 16
"""Nanoseconds of a copy of no bytes, and bytes from which on a copy shows the time per byte."""
_QUEUED = 20_000
"""A command that is launched so many nanoseconds before the end of the one before it begins as soon as the GPU can."""


class DeviceEvent(NamedTuple):
    """A command as the profiler saw it, in nanoseconds of its clock."""

    kind: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    stream: int
    issued: float  # the begin of the call that issued it; NaN if the profiler did not record the call
    start: float
    duration: float
    name: str = ""


def device_events(trace: Iterable[dict[str, Any]]) -> list[DeviceEvent]:
    """The commands among the events of a Chrome trace, in issue order."""
    issued, commands = dict[int, float](), list[tuple[int, DeviceEvent]]()
    for event in trace:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and correlation is not None:
            issued[correlation] = 1e3 * event["ts"]
        elif event.get("cat") in _KINDS:
            args, start = event["args"], 1e3 * event["ts"]
            shape = tuple(args.get("grid", ())), tuple(args.get("block", ()))
            command = DeviceEvent(
                _KINDS[event["cat"]], *shape, args["stream"], np.nan, start, 1e3 * event["dur"], event.get("name", "")
            )
            commands.append((correlation, command))
    commands.sort(key=lambda pair: (pair[0], pair[1].start))
    return [command._replace(issued=issued.get(correlation, np.nan)) for correlation, command in commands]


@dataclass
class KernelTimes:
    """Times of commands, in nanoseconds."""

    durations: dict[Key, float] = field(default_factory=dict)
    fastest: dict[Key, float] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Names of kernels by call, as the profiler shows them."""
    by_function: dict[int, float] = field(default_factory=dict)
    """The duration of a kernel, whatever its grid."""
    copies: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """The time of an empty copy and the time per byte, by the copy's kind and whether its memory is pageable."""
    usual: float = 3_000.0
    """The duration of a kernel that is not in the window."""
    launch: float = 5_000.0
    """The time from a call to its command on an idle GPU."""
    gap: float = 1_000.0
    """The time between two commands of a stream if the later one was issued in time."""
    gap_in_graph: float = 100.0
    back: float = 5_000.0
    """The time from the end of the last command to the return of a call that waits for it."""

    def of(self, log: DriverLog, described: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The duration of each command, by the row that describes it, and whether it is known: from a command in the
        window with the same key, or from a copy's bytes."""
        keys, which = _keys(log, described)
        known = np.array([key in self.durations or self._is_known_copy(log, key) for key in keys], bool)
        durations = np.array([self._of_key(log, key) for key in keys], float)
        return durations[which], known[which]

    def wires(self, log: DriverLog, described: NDArray[Any]) -> NDArray[np.float64]:
        """The duration of each command if it waited for no other rank."""
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
    """Learn from the commands that were issued between these two moments, and the profiler's events of them."""
    issuers, described = device_commands(log)
    inside = (log.begin[issuers] >= first) & (log.begin[issuers] <= last)
    issuers, described = issuers[inside], described[inside]
    matched = _matched(log, described, events)
    keys, which = _keys(log, described)
    durations_of, names = defaultdict[Key, list[float]](list), dict[int, str]()
    for index, event in matched:
        durations_of[keys[which[index]]].append(event.duration)
        names.setdefault(keys[which[index]][0], event.name)
    times = KernelTimes({key: float(np.median(durations)) for key, durations in durations_of.items()})
    times.names = names
    times.fastest = {key: min(durations) for key, durations in durations_of.items()}
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
    """Ranks run the same kernels on equal GPUs, so a rank whose window has no such kernel uses the time of others."""
    most = max(times, key=lambda times_of_rank: len(times_of_rank.durations))
    numbers = [_numbers_of_calls(log) for log in logs]
    learned = defaultdict[tuple[DriverCall, int, int], list[tuple[float, float, str]]](list)
    for number_of, own in zip(numbers, times, strict=True):
        calls = {number: call for call, number in number_of.items()}
        for (number, size, flag), duration in own.durations.items():
            if number in calls:
                fastest, name = own.fastest.get((number, size, flag), duration), own.names.get(number, "")
                learned[calls[number], size, flag].append((duration, fastest, name))
    shared = list[KernelTimes]()
    for log, number_of, own in zip(logs, numbers, times, strict=True):
        merged = replace(own if own.durations else most, durations={}, fastest={}, names={})
        for (call, size, flag), of_ranks in learned.items():
            if call in number_of:
                number = number_of[call]
                durations, fastest_of, names = zip(*of_ranks, strict=True)
                merged.durations[number, size, flag] = float(np.median(durations))
                merged.fastest[number, size, flag], merged.names[number] = min(fastest_of), names[0]
        for field_name in ("durations", "fastest", "names"):
            getattr(merged, field_name).update(getattr(own, field_name))
        merged.by_function, merged.copies = _by_function(log, merged.durations), most.copies | own.copies
        shared.append(merged)
    return shared


def _numbers_of_calls(log: DriverLog) -> dict[DriverCall, int]:
    """Numbers by call without the function's address, which differs between processes; only unambiguous calls."""
    numbers = defaultdict[DriverCall, list[int]](list)
    for number, call in log.calls.items():
        if call.name or call.kind != "launch":
            numbers[replace(call, function=0)].append(number)
    return {call: of_call[0] for call, of_call in numbers.items() if len(of_call) == 1}


def _by_function(log: DriverLog, durations: dict[Key, float]) -> dict[int, float]:
    of_function = defaultdict[int, list[float]](list)
    for (number, _, _), duration in durations.items():
        if log.calls[number].kind == "launch":
            of_function[log.calls[number].function].append(duration)
    return {function: float(np.median(durations)) for function, durations in of_function.items()}


def _keys(log: DriverLog, described: NDArray[Any]) -> tuple[list[Key], NDArray[np.intp]]:
    """The distinct keys, and for each command the index of its key."""
    rows = log.rows[described]
    values = log.rows["value"].astype(np.int64)
    is_launch, collective = log.kinds()[described] == "launch", collective_of(log)[described]
    pageable = (rows["flags"] & CallFlag.PAGEABLE).astype(np.int64)
    sizes = np.where(is_launch, np.where(collective < 0, 0, values[collective]), values[described])
    keys, which = different_rows(rows["call"], sizes, pageable)
    return [(call, size, flag) for call, size, flag in keys.tolist()], which


def _matched(log: DriverLog, described: NDArray[Any], events: Sequence[DeviceEvent]) -> list[tuple[int, DeviceEvent]]:
    """Commands, by their index in `described`, with their events. They are matched in order within each shape that the
    log and the profiler have equally often."""
    by_shape = defaultdict[Any, list[int]](list)
    for index, number in enumerate(log.rows["call"][described].tolist()):
        by_shape[log.calls[number].shape].append(index)
    profiled = defaultdict[Any, list[DeviceEvent]](list)
    for event in events:
        profiled[event.kind, event.grid, event.block].append(event)
    equal = [shape for shape, indices in by_shape.items() if len(indices) == len(profiled[shape])]
    return sorted(pair for shape in equal for pair in zip(by_shape[shape], profiled[shape], strict=True))


def _line(points: Sequence[tuple[int, float]], usual: float) -> tuple[float, float]:
    """The time of an empty copy and the time per byte, fitted to the window's copies. If all of them are small, the
    time per byte is `usual`."""
    sizes, durations = (np.array(column, float) for column in zip(*points, strict=True))
    byte = usual
    if sizes.max() >= _LARGE:
        several = len(set(sizes)) > 1
        byte = float(np.polyfit(sizes, durations, 1)[0]) if several else float(durations.min() / sizes.max())
    return max(500.0, float(np.median(durations - max(0.0, byte) * sizes))), max(0.0, byte)


def _usual_byte(kind: str, pageable: int) -> float:
    """Nanoseconds per byte if no large copy was measured, on the GPU or through the link."""
    if kind in ("copy_on_gpu", "set_memory"):
        return 0.001
    return 0.1 if pageable else 0.04


def _learn_delays(
    times: KernelTimes, log: DriverLog, issuers: NDArray[Any], matched: Sequence[tuple[int, DeviceEvent]]
) -> None:
    """Learn the delays from calls to commands, and from command to command. Calls have times on both clocks."""
    latencies, gaps, gaps_in_graph, ends = list[float](), list[float](), list[float](), dict[int, float]()
    issued_by = dict[int, int]()
    offsets = [log.begin[issuers[index]] - event.issued for index, event in matched if event.issued == event.issued]
    for index, event in matched:
        issuer, free = int(issuers[index]), ends.get(event.stream, -np.inf)
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
