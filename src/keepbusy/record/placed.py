"""The lines seen, as events of the trace and in its own time, so that they enclose its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from keepbusy.record.events import Category, Events, Trace
from keepbusy.record.seen import Seen, Stretch
from keepbusy.timeline.model import Ints

MARK = "keepbusy.step#"
"""Our own mark of a step's end in the trace."""
_CLOSE = 100
_TRIALS = 64


class Tick(NamedTuple):
    """One of our marks: the profiler noted it between these two readings of the host's clock."""

    number: int
    before: int
    after: int


def placed(trace: Trace, seen: Seen, ticks: Sequence[Tick]) -> Trace:
    """The trace with the lines seen, and with our marks as what they are: the profiler takes them for operators."""
    ours = _marked(trace)
    category = np.where(ours, Category.ANNOTATION, trace.events.category)
    trace = replace(trace, events=trace.events.change(category=category))
    number = {thread.number: index for index, thread in enumerate(trace.threads)}
    stretches = [one for one in seen.stretches() if str(one.thread) in number]
    if not stretches or not ours.any():
        return trace
    thread = np.array([number[str(one.thread)] for one in stretches], np.int64)
    start = np.array([one.start for one in stretches], np.int64)
    shift = offset(trace, ticks, {one: start[thread == one] for one in np.unique(thread).tolist()})
    return _with_lines(trace, seen, stretches, thread, shift)


def _with_lines(trace: Trace, seen: Seen, stretches: Sequence[Stretch], thread: Ints, shift: int) -> Trace:
    number: dict[str, int] = {}
    names = [seen.written(one.code, one.line) for one in stretches]
    lines = Events.of(
        len(stretches),
        category=np.array([Category.LINE if one.line else Category.PYTHON for one in stretches], np.int64),
        name=np.array([number.setdefault(name, len(trace.names) + len(number)) for name in names], np.int64),
        thread=thread,
        start=np.array([one.start for one in stretches], np.int64) + shift,
        end=np.array([one.end for one in stretches], np.int64) + shift,
    )
    events = Events.concatenate([trace.events, lines])
    return replace(trace, names=(*trace.names, *number), events=events)


def _marked(trace: Trace) -> np.ndarray:
    return np.array([name.startswith(MARK) for name in trace.names], bool)[trace.events.name]


def offset(trace: Trace, ticks: Sequence[Tick], begins: dict[int, Ints]) -> int:
    """From the host's clock to the trace's: as the marks allow, and such that lines begin between operators."""
    rows = np.flatnonzero(_marked(trace))
    noted = {trace.names[trace.events.name[row]]: int(trace.events.start[row]) for row in rows.tolist()}
    pairs = [(noted[f"{MARK}{tick.number}"], tick) for tick in ticks if f"{MARK}{tick.number}" in noted]
    least, most = sorted((max(at - tick.after for at, tick in pairs), min(at - tick.before for at, tick in pairs)))
    trials = np.linspace(least, most, 1 + min(_TRIALS, (most - least) // _CLOSE)).astype(np.int64)
    within = sum(_begun_within(trace, thread, times, trials) for thread, times in begins.items())
    best = trials[within == np.min(within)]
    return int(best[len(best) // 2])


def _begun_within(trace: Trace, thread: int, times: Ints, trials: Ints) -> Ints:
    """Under each shift, how many lines begin within an operator of their thread."""
    events = trace.events
    rows = np.flatnonzero((events.category == Category.OPERATOR) & (events.thread == thread))
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    start, end = events.start[rows], np.maximum.accumulate(events.end[rows])
    found = [np.searchsorted(start, times + shift, side="right") for shift in trials.tolist()]
    ends = np.concatenate([[np.iinfo(np.int64).min], end])
    return np.array([(times + shift < ends[place]).sum() for place, shift in zip(found, trials.tolist(), strict=True)])
