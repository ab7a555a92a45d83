"""The turns that were explained, for those who draw them: where each span belongs in the program, and why each gap is.

A gap's cause is found as everything here is: each cause is fixed alone, and the one whose fix takes most of the gap
away gives it its name. That is a picture's truth: the sums are in the ledger, where waits that two causes share are
counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keepbusy.explain.diagnosis import CAUSES, RESIDUAL, PlannedFix, Where
from keepbusy.explain.edit import Edit, Finding, SideLane, apply
from keepbusy.timeline.frame_roles import Owner, Role, source_line
from keepbusy.timeline.model import NONE, FrameKind, Ints, Kind, Mask, Timeline
from keepbusy.timeline.replay import Replayed, steady

NO_CAUSE = CAUSES.index("unknown")
HALF_OF_A_GAP = 0.5
"""What a particular cause's fix takes of a gap that bears its name and not that of a residual one."""


class Gaps(NamedTuple):
    """When a GPU has nothing to do, and the command that ends each gap."""

    start: Ints
    end: Ints
    row: Ints


def at_work_from(kind: Ints, start: Ints, end: Ints, work: Ints) -> Ints:
    """Of a collective only its end is the wire: before that it waits for its peers, or, if it sends to all, is gone."""
    return np.where(kind == Kind.COLLECTIVE, end - work, start)


@dataclass(frozen=True, eq=False)
class Turns:
    """Whole turns without their recorder. Columns have a place for each row of the timeline."""

    timeline: Timeline
    ratio: float  # of the plain step to what the unchanged timeline replays to
    places: tuple[Where, ...]  # lines of the program
    place: Ints  # which of them each row belongs to, or NONE
    call: Ints  # the name of what the program called there, or NONE
    cause: Ints  # of the command that ends a gap: which of CAUSES the gap has
    rest: Ints  # which of them what is left of it has once that one is fixed
    culprit: Ints  # of the same command: the row to blame, or NONE
    aside: Ints  # of a copy or a collective that should run beside the compute: which of CAUSES says so

    def gaps(self, rank: int, row: Ints, start: Ints, end: Ints) -> Gaps:
        """Where a rank's GPU has nothing to do, if these rows run at these times."""
        spans = self.timeline.spans
        mine = (self.timeline.on_device & (self.timeline.rank_of_rows == rank))[row]
        row, end = row[mine], end[mine]
        start = at_work_from(spans.kind[row], start[mine], end, spans.work[row])
        order = np.argsort(start, kind="stable")
        row, start, reached = row[order], start[order], np.maximum.accumulate(end[order])
        found = start[1:] > reached[:-1]
        return Gaps(reached[:-1][found], start[1:][found], row[1:][found])

    def blame(self, row: int) -> tuple[str, Where | None]:
        """Of the gap that a command ends: its cause, and the line to blame where that is known."""
        culprit, cause = int(self.culprit[row]), int(self.cause[row])
        place = int(self.place[culprit]) if culprit != NONE else NONE
        return CAUSES[cause] if cause != NONE else "unknown", self.places[place] if place != NONE else None

    def edit_of(self, fix: PlannedFix) -> Edit | None:
        """What the fix changes in these turns: nothing, where it is a fix of others."""
        edit = fix.edit
        if edit is None or fix.loop or fix.every or len(edit.drop) != len(self.timeline):
            return None
        return edit


def turns_of(timeline: Timeline, ratio: float, found: Sequence[Finding], gaining: int) -> Turns:
    """`found`: of each cause that was found; the first so many of them gain something."""
    places, place, call = _places(timeline)
    cause, rest, culprit = _causes(timeline, found)
    aside = np.full(len(timeline), NONE, np.int64)
    moved_to = (SideLane.FETCH, SideLane.RETURN, SideLane.WIRE)
    for one in reversed(found[:gaining]):
        aside[np.isin(one.edit.lane, moved_to) & timeline.on_device] = CAUSES.index(one.cause)
    return Turns(timeline, ratio, places, place, call, cause, rest, culprit, aside)


def _causes(timeline: Timeline, found: Sequence[Finding]) -> tuple[Ints, Ints, Ints]:
    gaps = idle_before(timeline, steady(timeline))
    cause, rest, culprit = (np.full(len(timeline), NONE, np.int64) for _ in range(3))
    ends = np.flatnonzero(gaps > 0)
    if not len(ends):
        return cause, rest, culprit
    taken = np.array([_taken(timeline, one.edit, gaps)[ends] for one in found], np.int64).reshape(len(found), len(ends))
    numbers = np.array([CAUSES.index(one.cause) for one in found] + [NO_CAUSE], np.int64)
    first, second = _two_best(found, taken, gaps[ends])
    cause[ends], rest[ends] = numbers[first], numbers[second]
    for index, one in enumerate(found):
        mine = ends[first == index]
        if len(mine) and len(rows := one.rows):
            # the last of its rows before the command was issued; before the first of them, the last of the turn before
            culprit[mine] = rows[np.searchsorted(rows, mine) - 1]
    return cause, rest, culprit


def _taken(timeline: Timeline, edit: Edit, gaps: Ints) -> Ints:
    """How much of each gap the edit takes away."""
    changed = apply(timeline, edit)
    left = np.zeros(len(timeline), np.int64)
    left[~edit.drop] = idle_before(changed, steady(changed))
    return np.clip(gaps - left, 0, gaps)


def _two_best(found: Sequence[Finding], taken: Ints, gaps: Ints) -> tuple[Ints, Ints]:
    """The first of the particular causes that takes half of a gap, else the one that takes most; and the next one."""
    none = len(found)
    general = np.array([one.cause in RESIDUAL for one in found], bool)[:, None]
    weight = np.where(taken >= HALF_OF_A_GAP * gaps, taken + np.where(general, 0, gaps), taken).astype(np.float64)
    weight = np.concatenate([np.where(taken > 0, weight, 0.0), np.full((1, len(gaps)), 0.5)])
    order = np.argsort(-weight, axis=0, kind="stable")
    second = order[1] if none else order[0]
    return order[0], np.where(order[0] == none, none, second)


def idle_before(timeline: Timeline, replayed: Replayed) -> Ints:
    """Of each command, how long its GPU had nothing to do before it; of a collective, before it was on the wire."""
    gaps = np.zeros(len(timeline), np.int64)
    spans, rank = timeline.spans, timeline.rank_of_rows
    start = at_work_from(spans.kind, replayed.start, replayed.end, spans.work)
    for one in timeline.ranks:
        rows = np.flatnonzero(timeline.on_device & (rank == one))
        rows = rows[np.argsort(start[rows], kind="stable")]
        reached = np.maximum.accumulate(replayed.end[rows])
        gaps[rows[1:]] = np.maximum(start[rows[1:]] - reached[:-1], 0)
        if len(rows) and len(timeline.marks):  # a turn begins where the one before it ended
            around = round(replayed.pace * len(timeline.marks_of(timeline.ranks[0])))
            gaps[rows[0]] = 0 if timeline.facts.one_turn else max(0, int(start[rows[0]]) + around - int(reached[-1]))
    return gaps


def _places(timeline: Timeline) -> tuple[tuple[Where, ...], Ints, Ints]:
    """Of each row the user's line around it and what was called there, each frame looked at once."""
    frames, spans = timeline.frames, timeline.spans
    needed = np.zeros(len(frames) + 1, bool)
    up = np.unique(spans.frame)
    while len(up := up[up != NONE]):
        needed[up] = True
        up = np.unique(frames.parent[up])
    rows = np.flatnonzero(needed[:-1])
    operator = (frames.kind == FrameKind.OPERATOR) & (frames.role & Role.BACKWARD == 0)
    # which frames are lines or functions of the user's own; one more place for no frame
    mine = np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)) & (frames.owner == Owner.USER)
    line = np.append(mine, False)
    user, called = np.full(len(frames) + 1, NONE, np.int64), np.full(len(frames) + 1, NONE, np.int64)
    parents, names = frames.parent.tolist(), frames.name.tolist()
    for frame in rows.tolist():
        parent = parents[frame]
        user[frame] = frame if line[frame] else user[parent]
        # the outermost operator of the innermost run of operators is what the program called
        begins = operator[frame] and (parent == NONE or not operator[parent])
        called[frame] = names[frame] if begins else called[parent]
    user[rows] = _of_forward(timeline, rows, user[rows], line)
    number: dict[Where, int] = {}
    of_frame = np.full(len(frames) + 1, NONE, np.int64)
    for frame in np.unique(user[user != NONE]).tolist():
        of_frame[frame] = number.setdefault(_where(timeline, frame), len(number))
    place, call = of_frame[user[spans.frame]], called[spans.frame]
    place = _at_the_same_time(timeline, place, line, of_frame, number)
    return tuple(number), place, call


def _of_forward(timeline: Timeline, rows: Ints, user: Ints, line: Mask) -> Ints:
    """Of frames of the backward pass without a line: that of the forward operator which left it to be done."""
    frames = timeline.frames
    numbered = np.flatnonzero(frames.sequence >= 0)
    mains = _main_lanes(timeline)
    forward = numbered[np.isin(frames.lane[numbered], list(mains.values()))]
    forward = forward[np.argsort(frames.sequence[forward], kind="stable")]
    known = dict(zip(frames.sequence[forward].tolist(), forward.tolist(), strict=True))  # of several, the last one
    found = user.copy()
    for place in np.flatnonzero(user == NONE).tolist():
        numbers = (int(frames.sequence[one]) for one in frames.around(int(rows[place])))
        operator = next((known[number] for number in numbers if number in known), NONE)
        found[place] = next((one for one in frames.around(operator) if line[one]), NONE)
    return found


def _main_lanes(timeline: Timeline) -> Mapping[int, int]:
    """Of each rank, the lane on which its turns begin."""
    marks = timeline.marks
    lanes = timeline.spans.lane[marks].tolist()
    return {timeline.lanes[lane].rank: lane for lane in reversed(lanes)}


def _at_the_same_time(timeline: Timeline, place: Ints, line: Mask, of_frame: Ints, number: dict[Where, int]) -> Ints:
    """Rows of other host threads that have no line: what the main thread stood at when they began."""
    spans, frames, found = timeline.spans, timeline.frames, place.copy()
    host = ~timeline.on_device & (place == NONE)
    for rank, main in _main_lanes(timeline).items():
        rows = np.flatnonzero(host & (timeline.rank_of_rows == rank) & (spans.lane != main))
        mine = np.flatnonzero(line[:-1] & (frames.lane == main))
        mine = mine[np.argsort(frames.start[mine], kind="stable")]
        if not len(rows) or not len(mine):
            continue
        at = np.searchsorted(frames.start[mine], spans.start[rows], side="right") - 1
        frame = np.where(at >= 0, mine[np.maximum(at, 0)], NONE)
        for _ in range(64):  # from the innermost that began before, out to one that is still open
            closed = (frame != NONE) & ((frames.end[frame] <= spans.start[rows]) | ~line[frame])
            if not closed.any():
                break
            frame = np.where(closed, frames.parent[frame], frame)
        for one in np.unique(frame[frame != NONE]).tolist():
            of_frame[one] = number.setdefault(_where(timeline, one), len(number))
        found[rows] = of_frame[frame]
    return found


def _where(timeline: Timeline, frame: int) -> Where:
    file, at, function = source_line(timeline.names[timeline.frames.name[frame]]) or ("", 0, "")
    return Where(file, at, function, exact=bool(timeline.frames.kind[frame] == FrameKind.LINE))
