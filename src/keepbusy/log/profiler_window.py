"""What PyTorch's profiler saw in one of its windows, beside the log of the same calls: which row each command is of,
and in which operators calls are made. The same call from the same line is made in the same operators all along."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepbusy.log.kernel_times import DeviceEvent, KernelTimes, device_events, learn
from keepbusy.log.log_file import DriverLog, device_commands
from keepbusy.program.loops.codes import in_common

_CLOCKS_DIFFER = 20_000_000
"""Nanoseconds by which the clocks, set beside each other once, may differ."""
_SHORTEST = 10_000
"""Nanoseconds of an operator that calls nothing, for it to be kept."""


class CallKey(NamedTuple):
    """Calls that are made in the same operators: from one stack, after the same call as before."""

    stack: int
    call: int
    before: int


class Operators(NamedTuple):
    """Around a call, from the outside in."""

    names: tuple[str, ...] = ()
    shared: int = 0
    """How many of them are those that the call before was made in, too."""


class OperatorBetweenCalls(NamedTuple):
    """One that makes no call: when it begins and ends, as shares of the time between two calls."""

    name: str
    begin: float
    end: float


@dataclass
class CallOperators:
    """Of all windows."""

    around: dict[CallKey, Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    around_any: dict[tuple[int, int], Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    """By stack and call, whatever was called before."""
    around_function: dict[tuple[int, int], Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    """By stack and kernel, whatever its grid: that may depend on data."""
    functions: dict[int, int] = field(default_factory=dict)
    """Of each call that launches, the kernel."""
    between: dict[tuple[CallKey, CallKey], list[OperatorBetweenCalls]] = field(default_factory=dict)
    shortest: dict[tuple[CallKey, CallKey], int] = field(default_factory=dict)
    """Between two calls, the least time that was seen, in which nothing else has held them up: `between` is of it."""
    _usual: dict[CallKey, Operators] = field(default_factory=dict)

    def of(self, key: CallKey) -> Operators:
        usual = self._usual.get(key)
        if usual is None:
            kernel = key.stack, self.functions.get(key.call, 0)
            found = self.around.get(key) or self.around_any.get(key[:2]) or self.around_function.get(kernel)
            usual = self._usual[key] = found.most_common(1)[0][0] if found else Operators()
        return usual


def call_keys(log: DriverLog) -> NDArray[np.int64]:
    """Of each row, as in `CallKey`."""
    stack, call, thread = (log.rows[name].astype(np.int64) for name in ("stack", "call", "thread"))
    before = np.zeros(len(call), np.int64)
    for number in np.unique(thread).tolist():
        rows = np.flatnonzero(thread == number)
        before[rows[1:]] = call[rows[:-1]]
    return np.stack([stack, call, before], axis=1)


def learn_from_windows(
    log: DriverLog, folder: Path, windows: Sequence[dict[str, int]]
) -> tuple[KernelTimes, CallOperators]:
    """Of the windows that a process has left in this folder. `windows`: when they were opened, by both clocks."""
    kernels = {number: call.function for number, call in log.calls.items() if call.kind == "launch"}
    times, operators = list[KernelTimes](), CallOperators(functions=kernels)
    keys = call_keys(log)
    for number, window in enumerate(windows):
        path = folder / f"window{number}.json"
        if not path.exists():
            continue
        base, trace = _read(path)
        found = _aligned(log, _issued_inside(device_events(trace)), window["clock"] - window["wall"] + base)
        if found is None:
            continue
        first, last, events, ahead = found
        times.append(learn(log, first, last, events))
        _learn_operators(operators, log, keys, trace, ahead)
    return _merged(times), operators


_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_BETWEEN_EVENTS = "\n  },\n  {"


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """From when times count, and the events. Of a file that is damaged, or whose names are no JSON, those that are."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        trace = json.loads(text, strict=False)
        return int(trace.get("baseTimeNanoseconds", 0)), list(trace["traceEvents"])
    except (ValueError, KeyError):
        base, events = _BASE.search(text), list[dict[str, Any]]()
    _, _, body = text.partition('"traceEvents": [')
    for part in body.strip().removeprefix("{").split(_BETWEEN_EVENTS):
        with suppress(ValueError):
            events.append(json.loads(f"{{{part}}}", strict=False))
    return int(base[1]) if base else 0, events


def _merged(times: Sequence[KernelTimes]) -> KernelTimes:
    """What an earlier one knows of a command counts for more; delays are those of the window that knows most."""
    if not times:
        return KernelTimes()
    merged = replace(max(times, key=lambda one: len(one.durations)))
    for name in ("durations", "fastest", "names", "by_function", "copies"):
        known = dict[Any, Any]()
        for one in reversed(times):
            known |= getattr(one, name)
        setattr(merged, name, known)
    return merged


def _issued_inside(events: Sequence[DeviceEvent]) -> list[DeviceEvent]:
    """Without those of which the window had no call, before its first one and after its last. In between it misses the
    calls of some copies."""
    inside = [place for place, event in enumerate(events) if not math.isnan(event.issued)]
    return [*events[inside[0] : inside[-1] + 1]] if inside else []


def _aligned(log: DriverLog, events: list[DeviceEvent], ahead: int) -> tuple[int, int, list[DeviceEvent], int] | None:
    """The moments between which the log has these commands, and how much its clock is ahead of the profiler's.

    Both have the commands in the same order. Where that fits in several places, as iterations repeat, the clocks tell.
    """
    if not events:
        return None
    issuers, described = device_commands(log)
    begin = log.begin[issuers]
    near = (begin > events[0].issued + ahead - _CLOCKS_DIFFER) & (begin < events[-1].issued + ahead + _CLOCKS_DIFFER)
    near = np.flatnonzero(near)
    shapes = dict[Any, int]()
    of_call = {number: shapes.setdefault(call.shape, len(shapes)) for number, call in log.calls.items()}
    logged = np.array([of_call[call] for call in log.rows["call"][described[near]].tolist()], np.int64)
    shapes_profiled = [(event.kind, event.grid, event.block) for event in events]
    profiled = np.array([shapes.setdefault(shape, len(shapes)) for shape in shapes_profiled], np.int64)
    issued = np.array([event.issued for event in events])
    best: tuple[float, int] | None = None
    for shift in range(len(logged) - len(profiled) + 1):
        if logged[shift] == profiled[0] and (logged[shift : shift + len(profiled)] == profiled).all():
            differs = float(np.nanmedian(begin[near[shift : shift + len(profiled)]] - issued)) - ahead
            if best is None or abs(differs) < abs(best[0]):
                best = differs, shift
    if best is None:  # several threads launch, in an order that only one of the two has right
        return int(issued[0]) + ahead, int(issued[-1]) + ahead, events, ahead
    chosen = near[best[1] : best[1] + len(profiled)]
    return int(begin[chosen[0]]), int(begin[chosen[-1]]), events, ahead + round(best[0])


class _Operator(NamedTuple):
    begin: float
    end: float
    name: str


def _learn_operators(
    operators: CallOperators, log: DriverLog, keys: NDArray[np.int64], trace: Sequence[dict[str, Any]], ahead: int
) -> None:
    by_thread = defaultdict[int, list[_Operator]](list)
    for event in trace:
        if event.get("cat") == "cpu_op" and event.get("ph") == "X":
            begin = 1e3 * event["ts"] + ahead
            by_thread[event["tid"]].append(_Operator(begin, begin + 1e3 * event.get("dur", 0.0), event["name"]))
    for thread, found in by_thread.items():
        found.sort(key=lambda one: (one.begin, -one.end))
        numbers = [line["thread"] for line in log.threads if line["id"] == thread]  # of what the system calls so
        rows = np.flatnonzero(np.isin(log.rows["thread"], numbers))
        first, last = (np.searchsorted(log.begin[rows], moment) for moment in (found[0].begin, found[-1].end))
        _learn_of_thread(operators, log, keys, found, rows[first:last])


def _learn_of_thread(
    operators: CallOperators,
    log: DriverLog,
    keys: NDArray[np.int64],
    found: Sequence[_Operator],
    rows: NDArray[np.intp],
) -> None:
    key_of = {row: CallKey(*key) for row, key in zip(rows.tolist(), keys[rows].tolist(), strict=True)}
    around, chain, at = list[list[int]](), list[int](), 0
    begins, ends = log.begin[rows].tolist(), (log.begin + log.took)[rows].tolist()
    for moment in begins:
        while at < len(found) and found[at].begin <= moment:
            while chain and found[chain[-1]].end < found[at].end:
                chain.pop()
            chain.append(at)
            at += 1
        while chain and found[chain[-1]].end < moment:
            chain.pop()
        around.append([*chain])
    for place, row in enumerate(rows.tolist()):
        shared = in_common(around[place], around[place - 1]) if place else 0
        these = Operators(tuple(found[operator].name for operator in around[place]), shared)
        operators.around[key_of[row]][these] += 1
        operators.around_any[key_of[row][:2]][these] += 1
        if kernel := operators.functions.get(key_of[row].call, 0):
            operators.around_function[key_of[row].stack, kernel][these] += 1
    calling = {operator for chain in around for operator in chain}
    starts = [operator.begin for operator in found]
    for place in range(1, len(rows)):
        key = key_of[int(rows[place - 1])], key_of[int(rows[place])]
        free, until = ends[place - 1], begins[place]
        if 2 * _SHORTEST < until - free < operators.shortest.get(key, math.inf):
            operators.shortest[key] = until - free
            within = range(bisect_right(starts, free), bisect_left(starts, until))
            operators.between[key] = [*_host_operators(found, within, calling, free, until)]


def _host_operators(
    found: Sequence[_Operator], within: range, calling: set[int], free: float, until: float
) -> Iterator[OperatorBetweenCalls]:
    reached = free
    for one in within:
        operator = found[one]
        if one not in calling and operator.begin >= reached and operator.end <= until:
            reached = operator.end
            if operator.end - operator.begin >= _SHORTEST:
                span = until - free
                yield OperatorBetweenCalls(operator.name, (operator.begin - free) / span, (operator.end - free) / span)
