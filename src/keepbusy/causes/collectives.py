"""Collectives that run while nothing computes, although something could."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepbusy.causes.cause import CauseKind, Finding, FindingBuilder, LedgerPlace
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.timeline.edit import Edit, SideLane
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, STAGED_BYTES, Ints, Kind, Mask

_WHOLE_PASS = Role.BACKWARD | Role.GRADIENTS
"""Roles of frames that enclose the calls for gradients and are no part of them."""


class ExposedCollective(CauseKind):
    """The edit sends gradients once instead of after every micro-batch, and all other data while the GPU computes.

    Messages through CPU memory block Python; from GPU to GPU they would not.
    """

    place = LedgerPlace(
        name="exposed_collective",
        label="exposed collective",
        colour="#7aa5e2",
        sentence="Communication does not overlap with computing",
        happens="A collective runs while nothing computes although something could.",
        fixed_by=(
            "Send gradients while the backward pass runs; with several micro-batches, "
            "[once per step](../how-to/accumulate.md)."
        ),
    )
    among_ranks = True

    def find(self, inputs: CauseInputs, builder: FindingBuilder) -> None:
        spans = inputs.timeline.spans
        travels = (spans.kind == Kind.COLLECTIVE) & (spans.size > STAGED_BYTES) & ~inputs.is_paired & ~inputs.is_message
        early, of_gradients = _sent_early(inputs, travels)
        for launch, rows in early.items():
            builder.edit.drop[rows] = True
            builder.culprit[rows] = launch
        rows = np.flatnonzero(travels & ~of_gradients)
        builder.edit.lane[rows] = SideLane.WIRE
        builder.culprit[rows] = np.where(inputs.launch[rows] == NONE, rows, inputs.launch[rows])
        rows = np.flatnonzero((spans.kind == Kind.WORK) & inputs.within(Role.THROUGH_HOST))
        builder.edit.drop[rows] = True
        builder.culprit[rows] = rows

    def what_happened(self, inputs: CauseInputs, finding: Finding) -> str:
        if finding.edit.drop[inputs.timeline.on_device].any():
            return "The gradients are sent after every micro-batch, though only their sum is used ({often} too often)."
        if finding.edit.drop.any():
            return "Python waits for messages of other ranks, which are copied through CPU memory ({often})."
        return "Collectives ({often}) run after the computation, not while it runs."


def _sent_early(inputs: CauseInputs, travels: Mask) -> tuple[dict[int, Ints], Mask]:
    """Collectives that send gradients to which later micro-batches add: their launches, each with the rows that the
    program saves if it sends only the sum. And which collectives send such gradients, those of the last pass included.
    """
    timeline, early = inputs.timeline, dict[int, Ints]()
    of_gradients = np.zeros(len(timeline), bool)
    for passes in _accumulated(inputs):
        collectives = [backward.gradients_of(inputs, travels) for backward in passes]
        if not len(collectives[-1]):
            continue
        of_gradients[np.concatenate(collectives)] = True
        for backward, rows in zip(passes[:-1], collectives[:-1], strict=True):
            calls = [backward.call_of(inputs, row) for row in rows.tolist()]
            if calls:
                calls[0] = np.concatenate([calls[0], backward.scaled(inputs)])
            early |= dict(zip(inputs.launch[rows].tolist(), calls, strict=True))
    return early, of_gradients


@dataclass(frozen=True)
class BackwardPass:
    """The rows of one backward pass, and of what follows until the next one or the optimizer."""

    first: int
    last: int
    end: int
    main: int  # the lane of the thread that called it
    later: frozenset[int] = frozenset()  # paths of the launches between the last pass and the optimizer

    def gradients_of(self, inputs: CauseInputs, travels: Mask) -> Ints:
        """Its collectives: those that PyTorch launches as gradients become ready, and those of the program afterwards.
        Not what FSDP gathers then: parameters, which each pass needs."""
        launch, rank = inputs.launch, inputs.timeline.rank_of_rows
        rows = np.flatnonzero(travels & (launch >= self.first) & (launch < self.end))
        rows = rows[rank[rows] == inputs.timeline.lanes[self.main].rank]
        after = launch[rows] > self.last
        frame = inputs.timeline.spans.frame[launch[rows]]
        of_later_path = np.isin(inputs.path[frame], list(self.later)) & (frame != NONE)
        of_program = of_later_path & ~inputs.within(Role.SHARDS)[launch[rows]]
        return rows[np.where(after, of_program, inputs.hands_over_gradients[launch[rows]])]

    def scaled(self, inputs: CauseInputs) -> Ints:
        """What PyTorch launches besides its collectives: copies into buckets, and division by the number of ranks."""
        rows = np.arange(self.first, self.last + 1)
        of_rank = inputs.timeline.rank_of_rows[rows] == inputs.timeline.lanes[self.main].rank
        fills_buckets = inputs.within(Role.GRADIENTS) & inputs.within(Role.SCALES | Role.MOVES)
        inside = rows[of_rank & fills_buckets[rows]]
        return np.concatenate([inside, np.flatnonzero(np.isin(inputs.launch, inside))])

    def call_of(self, inputs: CauseInputs, row: int) -> Ints:
        """The rows that disappear with a collective: all of the call that launches it, within the pass or after it."""
        launch, spans, frames = int(inputs.launch[row]), inputs.timeline.spans, inputs.timeline.frames
        begins = int(spans.end[self.last]) if launch > self.last else 0
        frame, call = int(spans.frame[launch]), NONE
        while frame != NONE and frames.start[frame] >= begins and not frames.role[frame] & _WHOLE_PASS:
            frame, call = int(frames.parent[frame]), frame
        if call == NONE:
            return np.array([launch, row], np.int64)
        rows = np.arange(self.first, self.end)
        rows = rows[(spans.lane[rows] == frames.lane[call]) & (spans.frame[rows] != NONE)]
        of_row = spans.frame[rows]
        inside = rows[(frames.start[of_row] >= frames.start[call]) & (frames.end[of_row] <= frames.end[call])]
        commands = np.flatnonzero(np.isin(inputs.launch, inside))
        return np.concatenate([inside, commands])


def _accumulated(inputs: CauseInputs) -> Iterator[list[BackwardPass]]:
    """Two or more backward passes in a row whose gradients the optimizer uses together.

    They are unknown on a rank that takes no optimizer step itself, but receives the new weights.
    """
    timeline, rank_of_rows = inputs.timeline, inputs.timeline.rank_of_rows
    optimizer = inputs.within(Role.OPTIMIZER)
    backward = inputs.within(Role.BACKWARD)
    launches = (inputs.command != NONE) | optimizer
    for rank in np.unique(rank_of_rows[optimizer]).tolist():
        rows = np.flatnonzero(launches & (rank_of_rows == rank))
        main = int(timeline.spans.lane[timeline.marks_of(rank)[0]])
        kind = np.where(optimizer[rows], 2, np.where(backward[rows], 1, 0))
        changes = np.flatnonzero(np.diff(kind, prepend=-1))
        group: list[BackwardPass] = []
        for index, begin in enumerate(changes.tolist()):
            end = changes[index + 1] if index + 1 < len(changes) else len(rows)
            if kind[begin] == 1:
                group.append(BackwardPass(int(rows[begin]), int(rows[end - 1]), int(rows[end - 1]) + 1, main))
            elif group and kind[begin] == 0:
                group[-1] = replace(group[-1], end=int(rows[end - 1]) + 1)
            elif group:
                yield from _with_later_launches(inputs, group)
                group = []
        yield from _with_later_launches(inputs, group)


def _with_later_launches(inputs: CauseInputs, group: Sequence[BackwardPass]) -> Iterator[list[BackwardPass]]:
    if len(group) > 1:
        rows = np.arange(group[-1].last + 1, group[-1].end)
        frame = inputs.timeline.spans.frame[rows[(inputs.command[rows] != NONE)]]
        later = frozenset(inputs.path[frame[frame != NONE]].tolist())
        yield [replace(backward, later=later) for backward in group]


def without_messages(inputs: CauseInputs) -> Edit:
    """Not a fix: measures what the stages of a pipeline would spend if they never waited for messages."""
    edit = Edit.nothing(inputs.timeline)
    edit.lane[inputs.is_message] = SideLane.WIRE
    return edit
