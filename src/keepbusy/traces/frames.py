"""What encloses the calls: operators, Python functions and annotations, nested as they were entered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepbusy.timeline.frame_roles import roles_of
from keepbusy.timeline.model import NONE, FrameKind, Frames, Ints
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
    """The frames of one host thread, parents first: a stretch of all frames."""

    first: int  # where among all frames they begin
    parent: Ints  # a position in this nest, or NONE
    name: Ints
    role: Ints
    start: Ints
    end: Ints

    def innermost(self, times: Ints) -> Ints:
        """The frame that is open at each time, or NONE."""
        if not len(self.start):
            return np.full(len(times), NONE, np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        while True:
            closed = (at != NONE) & (self.end[np.maximum(at, 0)] <= times)
            if not closed.any():
                return at
            at[closed] = self.parent[at[closed]]


def nested_frames(trace: Trace, lanes: dict[int, int]) -> tuple[Frames, dict[int, Nest]]:
    """The frames of these threads, each on its lane, as one table, and the nest of each thread among them."""
    (owner, role), events = roles_of(trace.names), trace.events
    each = [_rows_of(trace, thread) for thread in lanes]
    rows, counts = np.concatenate(each), [len(one) for one in each]
    name = events.name[rows]
    frames = Frames.of(
        len(rows),
        lane=np.repeat(list(lanes.values()), counts),
        kind=_KIND_OF_CATEGORY[events.category[rows]],
        name=name,
        start=events.start[rows],
        end=events.end[rows],
        sequence=events.sequence[rows],
        owner=owner[name],
        role=role[name],
    )
    nests = dict[int, Nest]()
    for thread, count, last in zip(lanes, counts, np.cumsum(counts).tolist(), strict=True):
        mine = frames.take(slice(last - count, last))
        nests[thread] = Nest(last - count, _parents(mine), mine.name, mine.role, mine.start, mine.end)
    parents = [np.where(nest.parent == NONE, NONE, nest.parent + nest.first) for nest in nests.values()]
    return frames.change(parent=np.concatenate(parents)), nests


def _rows_of(trace: Trace, thread: int) -> Ints:
    events = trace.events
    rows = np.flatnonzero((events.thread == thread) & (_KIND_OF_CATEGORY[events.category] != NONE))
    return rows[np.lexsort((-events.end[rows], events.start[rows]))]


def _parents(frames: Frames) -> Ints:
    """Of frames sorted by (start, -end), the nearest earlier one that encloses each.

    Everyone first suspects the one before. A suspect that does not reach far enough passes its
    own suspect on: whatever it skipped ended before it did, so it cannot enclose either.
    """
    start, end = frames.start, frames.end
    parent: Ints = np.arange(-1, len(frames) - 1, dtype=np.int32)  # half the memory
    asking = np.arange(1, len(frames))
    while len(asking):
        reached = end[parent[asking]]
        asking = asking[(reached < end[asking]) | (reached <= start[asking])]
        parent[asking] = parent[parent[asking]]
        asking = asking[parent[asking] != NONE]
    return parent
