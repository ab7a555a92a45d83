"""The host threads that issue work, and where one of them hands over to another.

PyTorch runs the backward pass on a thread of its own while the caller stands still. In a trace
that shows as a burst of one thread during which the main thread records nothing: a handoff. A
thread that works while the main thread works too is a lane in its own right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.frame_roles import STEP_MARKS
from keepbusy.timeline.model import Ints
from keepbusy.traces.cuda_calls import Calls
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.kineto_names import Category


@dataclass(frozen=True)
class Threads:
    """The issuing threads; each works within its `alive` intervals only."""

    main: int
    alive: dict[int, Ints]  # thread -> rows of (start, end)
    handoffs: Ints  # rows of (thread, start, end): the main thread stands still meanwhile


def issuing_threads(trace: Trace, commands: Ints) -> Ints:
    """Threads that launched something, or say they take steps. Watchdogs and pollers are no part of the program."""
    events = trace.events
    launching = trace.is_call & (events.correlation >= 0) & np.isin(events.correlation, events.correlation[commands])
    return np.unique(events.thread[launching | is_step_mark(trace)])


def is_step_mark(trace: Trace) -> np.ndarray:
    return (trace.events.category == Category.ANNOTATION) & trace.begins(*STEP_MARKS)


def threads_of(trace: Trace, threads: Ints, calls: Calls) -> Threads:
    events = trace.events
    on_host = (events.category == Category.OPERATOR) | (events.category == Category.ANNOTATION)
    recorded = np.union1d(np.flatnonzero(on_host), calls.event)
    mine = {int(thread): recorded[events.thread[recorded] == thread] for thread in threads}
    main = _main_thread(trace, threads)
    first, last = _extent(trace, mine[main], main)
    alive, handoffs = {main: np.array([[first, last]], np.int64)}, []
    for thread, rows in mine.items():
        if thread == main or not len(rows):
            continue
        bursts, exclusive = _bursts(trace, rows, mine[main])
        if exclusive.all():
            alive[thread] = bursts
            handoffs += [(thread, start, end) for start, end in bursts.tolist()]
        else:
            alive[thread] = np.array([[bursts[0, 0], bursts[-1, 1]]], np.int64)
    return Threads(main, alive, np.array(sorted(handoffs, key=lambda one: one[1]), np.int64).reshape(-1, 3))


def _main_thread(trace: Trace, threads: Ints) -> int:
    """The one that takes the steps; else the one with most operators."""
    events = trace.events
    for these in (is_step_mark(trace), events.category == Category.PYTHON, events.category == Category.OPERATOR):
        counts = np.array([np.count_nonzero(these & (events.thread == thread)) for thread in threads])
        if counts.max(initial=0) > 0:
            return int(threads[counts.argmax()])
    return int(threads[0])


def _extent(trace: Trace, rows: Ints, thread: int) -> tuple[int, int]:
    events = trace.events
    python = np.flatnonzero((events.thread == thread) & (events.category == Category.PYTHON))
    rows = np.concatenate([rows, python])
    return int(events.start[rows].min()), int(events.end[rows].max())


def _bursts(trace: Trace, rows: Ints, main: Ints) -> tuple[Ints, np.ndarray]:
    """Stretches of a thread between which the main thread did something, and which of them it left alone."""
    events = trace.events
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    start, reached = events.start[rows], np.maximum.accumulate(events.end[rows])
    borders = np.sort(np.concatenate([events.start[main], events.end[main]]))
    parted = np.searchsorted(borders, start[1:]) > np.searchsorted(borders, reached[:-1])
    first = np.concatenate([[True], parted])
    last = np.concatenate([parted, [True]])
    bursts = np.stack([start[first], reached[last]], axis=1)
    inside = np.searchsorted(borders, bursts[:, 1]) - np.searchsorted(borders, bursts[:, 0], side="right")
    return bursts, inside == 0


def inside(times: Ints, intervals: Ints) -> np.ndarray:
    """Which times lie within one of the sorted, disjoint intervals."""
    if not len(intervals):
        return np.zeros(len(times), bool)
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1])
