"""What encloses the calls: operators, Python functions and annotations, nested as they were entered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, FrameKind, Frames, Ints, Mask
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.kineto_names import Category

_KINDS = {
    Category.OPERATOR: FrameKind.OPERATOR,
    Category.PYTHON: FrameKind.PYTHON,
    Category.ANNOTATION: FrameKind.ANNOTATION,
    Category.LINE: FrameKind.LINE,
}
SIGNIFICANT = 100_000
"""A frame that launches nothing is told apart from its surroundings when it lasts this long."""


@dataclass(frozen=True)
class Nest:
    """The frames of one host thread, parents first."""

    event: Ints
    kind: Ints
    parent: Ints  # a position in this nest, or NONE
    start: Ints
    end: Ints

    def innermost(self, times: Ints) -> Ints:
        """The frame that is open at each time, or NONE."""
        if not len(self.event):
            return np.full(len(times), NONE, np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        at = np.where(at < 0, NONE, at)
        while True:
            closed = (at != NONE) & (self.end[np.maximum(at, 0)] <= times)
            if not closed.any():
                return at
            at[closed] = self.parent[at[closed]]


def nest_of(trace: Trace, thread: int) -> Nest:
    events = trace.events
    kinds = np.full(max(Category) + 1, NONE, np.int64)
    for category, kind in _KINDS.items():
        kinds[category] = kind
    rows = np.flatnonzero((events.thread == thread) & (kinds[events.category] != NONE))
    rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
    start, end = events.start[rows], events.end[rows]
    return Nest(rows, kinds[events.category[rows]], parents(end, start), start, end)


def parents(end: Ints, start: Ints) -> Ints:
    """Of intervals sorted by (start, -end), the nearest earlier one that encloses each.

    Everyone first suspects the one before. A suspect that does not reach far enough passes its
    own suspect on: whatever it skipped ended before it did, so it cannot enclose either.
    """
    parent = np.arange(len(end), dtype=np.int64) - 1
    while True:
        wrong = np.flatnonzero((parent != NONE) & ((end[parent] < end) | (end[parent] <= start)))
        if not len(wrong):
            return parent
        parent[wrong] = parent[parent[wrong]]


def without_launch(nest: Nest, launches: Ints) -> Mask:
    """Which frames launch nothing: no call that matters begins within them."""
    return np.searchsorted(launches, nest.end) == np.searchsorted(launches, nest.start)


def worth_telling_apart(nest: Nest, role: Ints, calls: Ints) -> Mask:
    """Frames whose borders cut host work: long ones that launch nothing, operators that wait, loaders.

    `role`: of each event, what a frame so called does.
    """
    long = nest.end - nest.start >= SIGNIFICANT
    idle = without_launch(nest, calls) & long
    return idle | (role[nest.event] & (Role.READS | Role.MOVES | Role.LOADER) != 0)


def frames_of(nests: dict[int, Nest], lanes: dict[int, int], trace: Trace) -> tuple[Frames, dict[int, int]]:
    """All nests as one table, and where in it each thread's frames begin."""
    parts, offsets, offset = [], {}, 0
    for thread, nest in nests.items():
        offsets[thread] = offset
        parent = np.where(nest.parent == NONE, NONE, nest.parent + offset)
        parts.append(
            Frames.of(
                len(nest.event),
                lane=lanes[thread],
                kind=nest.kind,
                name=trace.events.name[nest.event],
                parent=parent,
                start=nest.start,
                end=nest.end,
                sequence=trace.events.sequence[nest.event],
            )
        )
        offset += len(nest.event)
    return (Frames.concatenate(parts) if parts else Frames.of(0)), offsets
