"""What encloses the calls: operators, Python functions and annotations, nested as they were entered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.model import NONE, FrameKind, Ints
from keepbusy.traces.event_columns import Trace
from keepbusy.traces.kineto_names import Category

_KINDS = {
    Category.OPERATOR: FrameKind.OPERATOR,
    Category.PYTHON: FrameKind.PYTHON,
    Category.ANNOTATION: FrameKind.ANNOTATION,
    Category.LINE: FrameKind.LINE,
}
_KIND_OF_CATEGORY = np.array([_KINDS.get(category, NONE) for category in Category], np.int64)


@dataclass(frozen=True, eq=False)
class Nest:
    """The frames of one host thread, parents first."""

    event: Ints
    kind: Ints
    parent: Ints  # a position in this nest, or NONE
    start: Ints
    end: Ints

    @staticmethod
    def of(trace: Trace, thread: int) -> Nest:
        events = trace.events
        rows = np.flatnonzero((events.thread == thread) & (_KIND_OF_CATEGORY[events.category] != NONE))
        rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
        start, end = events.start[rows], events.end[rows]
        return Nest(rows, _KIND_OF_CATEGORY[events.category[rows]], _parents(end, start), start, end)

    def innermost(self, times: Ints) -> Ints:
        """The frame that is open at each time, or NONE."""
        if not len(self.event):
            return np.full(len(times), NONE, np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        while True:
            closed = (at != NONE) & (self.end[np.maximum(at, 0)] <= times)
            if not closed.any():
                return at
            at[closed] = self.parent[at[closed]]


def _parents(end: Ints, start: Ints) -> Ints:
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
