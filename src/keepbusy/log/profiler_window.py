"""Matches the events of the profiler's windows with the log: the row of each command, and the operators around each
call. Outside the windows, the same call from the same line is assumed to be made in the same operators."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keepbusy.log.kernel_times import DeviceEvent, KernelTimes, device_events, learn
from keepbusy.log.log_file import DriverLog, device_commands
from keepbusy.program.loops.codes import in_common
from keepbusy.timeline.model import Ints

_CLOCKS_DIFFER = 20_000_000
"""Nanoseconds by which the two clocks, compared once per window, may differ."""
_SHORTEST = 10_000
"""Nanoseconds: shorter operators without a call are left out."""


class CallKey(NamedTuple):
    """Calls that are assumed to have the same operators: the same call, from the same stack, after the same call."""

    stack: int
    call: int
    before: int


class Operators(NamedTuple):
    """The operators around a call, from the outside in."""

    names: tuple[str, ...] = ()
    shared: int = 0
    """How many of them are also around the call before."""


class OperatorBetweenCalls(NamedTuple):
    """An operator that makes no call. It begins and ends at these shares of the time between two calls."""

    name: str
    begin: float
    end: float


@dataclass
class CallOperators:
    """The operators around calls and between them, learned from all windows."""

    around: dict[CallKey, Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    around_any: dict[tuple[int, int], Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    """By stack and call, whatever the call before."""
    around_function: dict[tuple[int, int], Counter[Operators]] = field(default_factory=lambda: defaultdict(Counter))
    """By stack and kernel, whatever its grid, which may depend on data."""
    functions: dict[int, int] = field(default_factory=dict)
    """The kernel of each call that launches one."""
    between: dict[tuple[CallKey, CallKey], list[OperatorBetweenCalls]] = field(default_factory=dict)
    shortest: dict[tuple[CallKey, CallKey], int] = field(default_factory=dict)
    """The shortest time between two calls. `between` is taken from it, because nothing else delayed the program."""
    _usual: dict[CallKey, Operators] = field(default_factory=dict)

    def of(self, key: CallKey) -> Operators:
        usual = self._usual.get(key)
        if usual is None:
            kernel = key.stack, self.functions.get(key.call, 0)
            counts = self.around.get(key) or self.around_any.get(key[:2]) or self.around_function.get(kernel)
            usual = self._usual[key] = counts.most_common(1)[0][0] if counts else Operators()
        return usual


def call_keys(log: DriverLog) -> Ints:
    """The `CallKey` of each row, as columns."""
    stack, call, thread = (log.rows[name].astype(np.int64) for name in ("stack", "call", "thread"))
    before = np.zeros(len(call), np.int64)
    for number in np.unique(thread).tolist():
        rows = np.flatnonzero(thread == number)
        before[rows[1:]] = call[rows[:-1]]
    return np.stack([stack, call, before], axis=1)


def learn_from_windows(
    log: DriverLog, folder: Path, windows: Sequence[dict[str, int]]
) -> tuple[KernelTimes, CallOperators]:
    """Learn from the windows in the folder of a process. `windows` has the moments when they opened, on both clocks."""
    kernels = {number: call.function for number, call in log.calls.items() if call.kind == "launch"}
    times, operators = list[KernelTimes](), CallOperators(functions=kernels)
    keys = call_keys(log)
    for number, window in enumerate(windows):
        path = folder / f"window{number}.json"
        if not path.exists():
            continue
        base, trace = _read(path)
        aligned = _aligned(log, _issued_inside(device_events(trace)), window["clock"] - window["wall"] + base)
        if aligned is None:
            continue
        first, last, events, ahead = aligned
        times.append(learn(log, first, last, events))
        _learn_operators(operators, log, keys, trace, ahead)
    return _merged(times), operators


_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_BETWEEN_EVENTS = "\n  },\n  {"


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """The origin of its times, and its events. If the file is damaged, the events that can be read."""
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
    """Merge windows: the first that has a command gives its times, and the one with most commands the delays."""
    if not times:
        return KernelTimes()
    merged = replace(max(times, key=lambda window: len(window.durations)))
    for name in ("durations", "fastest", "names", "by_function", "copies"):
        values = dict[Any, Any]()
        for window in reversed(times):
            values |= getattr(window, name)
        setattr(merged, name, values)
    return merged


def _issued_inside(events: Sequence[DeviceEvent]) -> list[DeviceEvent]:
    """From the first to the last event whose call the window has. In between it may miss the calls of some copies."""
    inside = [index for index, event in enumerate(events) if not math.isnan(event.issued)]
    return [*events[inside[0] : inside[-1] + 1]] if inside else []


def _aligned(log: DriverLog, events: list[DeviceEvent], ahead: int) -> tuple[int, int, list[DeviceEvent], int] | None:
    """The moments between which the log has these commands, and how much its clock is ahead of the profiler's.

    Both have the commands in the same order. If they fit in several places, as iterations repeat, the clocks decide.
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
    if best is None:  # several threads launch, and the log has another order than the profiler
        return int(issued[0]) + ahead, int(issued[-1]) + ahead, events, ahead
    chosen = near[best[1] : best[1] + len(profiled)]
    return int(begin[chosen[0]]), int(begin[chosen[-1]]), events, ahead + round(best[0])


class _Operator(NamedTuple):
    begin: float
    end: float
    name: str


def _learn_operators(
    operators: CallOperators, log: DriverLog, keys: Ints, trace: Sequence[dict[str, Any]], ahead: int
) -> None:
    by_thread = defaultdict[int, list[_Operator]](list)
    for event in trace:
        if event.get("cat") == "cpu_op" and event.get("ph") == "X":
            begin = 1e3 * event["ts"] + ahead
            by_thread[event["tid"]].append(_Operator(begin, begin + 1e3 * event.get("dur", 0.0), event["name"]))
    for thread, recorded in by_thread.items():
        recorded.sort(key=lambda operator: (operator.begin, -operator.end))
        numbers = [line["thread"] for line in log.threads if line["id"] == thread]  # the log's numbers of this thread
        rows = np.flatnonzero(np.isin(log.rows["thread"], numbers))
        first, last = (np.searchsorted(log.begin[rows], moment) for moment in (recorded[0].begin, recorded[-1].end))
        _learn_of_thread(operators, log, keys, recorded, rows[first:last])


def _learn_of_thread(
    operators: CallOperators, log: DriverLog, keys: Ints, recorded: Sequence[_Operator], rows: Ints
) -> None:
    calls = [CallKey(*key) for key in keys[rows].tolist()]
    begins, ends = log.begin[rows].tolist(), (log.begin + log.took)[rows].tolist()
    open_at = _open_operators(recorded, begins)
    for key, (chain_before, chain) in zip(calls, pairwise([[], *open_at]), strict=True):
        around_call = Operators(tuple(recorded[index].name for index in chain), in_common(chain, chain_before))
        operators.around[key][around_call] += 1
        operators.around_any[key[:2]][around_call] += 1
        if kernel := operators.functions.get(key.call, 0):
            operators.around_function[key.stack, kernel][around_call] += 1
    calling = {index for chain in open_at for index in chain}
    starts = [operator.begin for operator in recorded]
    for gap, free, until in zip(pairwise(calls), ends[:-1], begins[1:], strict=True):
        if 2 * _SHORTEST < until - free < operators.shortest.get(gap, math.inf):
            operators.shortest[gap] = until - free
            within = range(bisect_right(starts, free), bisect_left(starts, until))
            operators.between[gap] = [*_host_operators(recorded, within, calling, free, until)]


def _open_operators(recorded: Sequence[_Operator], moments: Sequence[int]) -> list[list[int]]:
    """The operators that are open at each moment, from the outside in, by their index."""
    open_at, chain, opened = list[list[int]](), list[int](), 0
    for moment in moments:
        while opened < len(recorded) and recorded[opened].begin <= moment:
            while chain and recorded[chain[-1]].end < recorded[opened].end:
                chain.pop()
            chain.append(opened)
            opened += 1
        while chain and recorded[chain[-1]].end < moment:
            chain.pop()
        open_at.append([*chain])
    return open_at


def _host_operators(
    recorded: Sequence[_Operator], within: range, calling: set[int], free: float, until: float
) -> Iterator[OperatorBetweenCalls]:
    """The operators without a call between two calls."""
    reached = free
    for index in within:
        operator = recorded[index]
        if index not in calling and operator.begin >= reached and operator.end <= until:
            reached = operator.end
            if operator.end - operator.begin >= _SHORTEST:
                span = until - free
                yield OperatorBetweenCalls(operator.name, (operator.begin - free) / span, (operator.end - free) / span)
