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
"""What is around the calls that are made of gradients, and no part of them."""


class ExposedCollective(CauseKind):
    """Gradients that travel after every micro-batch travel once; whatever else travels does so during the compute.

    What comes through the memory of hosts holds Python up, and would not from GPU to GPU.
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
        early, all_of_them = _sent_early(inputs, travels)
        for launch, rows in early.items():
            builder.edit.drop[rows] = True
            builder.culprit[rows] = launch
        rows = np.flatnonzero(travels & ~all_of_them)
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
    """Of each collective of gradients that more gradients are added to before the optimizer uses them: its launch, and
    what leaves if they travel with the last ones. And which collectives are of such gradients, the last ones included.
    """
    timeline, early = inputs.timeline, dict[int, Ints]()
    of_gradients = np.zeros(len(timeline), bool)
    for passes in _accumulated(inputs):
        collectives = np.concatenate([one.gradients_of(inputs, travels) for one in passes])
        if not len(passes[-1].gradients_of(inputs, travels)):
            continue
        of_gradients[collectives] = True
        for one in passes[:-1]:
            rows = one.gradients_of(inputs, travels)
            leaves = [one.call_of(inputs, row) for row in rows.tolist()]
            leaves[:1] = [np.concatenate([first, one.scaled(inputs)]) for first in leaves[:1]]
            early |= dict(zip(inputs.launch[rows].tolist(), leaves, strict=True))
    return early, of_gradients


@dataclass(frozen=True)
class BackwardPass:
    """The rows of one backward pass, and of what follows until the next one or the optimizer."""

    first: int
    last: int
    end: int
    main: int  # the lane of the thread that called it
    later: frozenset[int] = frozenset()  # paths of what launches after the last pass, before the optimizer does

    def gradients_of(self, inputs: CauseInputs, travels: Mask) -> Ints:
        """Its collectives: those that PyTorch launches as gradients are done, and those of the program afterwards. What
        FSDP gathers then are parameters, which each pass needs."""
        launch, rank = inputs.launch, inputs.timeline.rank_of_rows
        rows = np.flatnonzero(travels & (launch >= self.first) & (launch < self.end))
        rows = rows[rank[rows] == inputs.timeline.lanes[self.main].rank]
        after = launch[rows] > self.last
        frame = inputs.timeline.spans.frame[launch[rows]]
        known = (
            np.isin(inputs.path[frame], list(self.later)) & (frame != NONE) & ~inputs.within(Role.SHARDS)[launch[rows]]
        )
        return rows[np.where(after, known, inputs.hands_over_gradients[launch[rows]])]

    def scaled(self, inputs: CauseInputs) -> Ints:
        """What PyTorch launches beside its collectives: into their buckets, and for the mean over the ranks."""
        rows = np.arange(self.first, self.last + 1)
        of_rank = inputs.timeline.rank_of_rows[rows] == inputs.timeline.lanes[self.main].rank
        fills_buckets = inputs.within(Role.GRADIENTS) & inputs.within(Role.SCALES | Role.MOVES)
        inside = rows[of_rank & fills_buckets[rows]]
        return np.concatenate([inside, np.flatnonzero(np.isin(inputs.launch, inside))])

    def call_of(self, inputs: CauseInputs, row: int) -> Ints:
        """The rows that leave with a collective: all that is called for it, within the pass or after it."""
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
    """Backward passes in a row, whose gradients the optimizer uses together; two or more.

    Of a rank that takes no step itself, but is sent the new weights, nobody knows which ones these are.
    """
    timeline, rank = inputs.timeline, inputs.timeline.rank_of_rows
    optimizer = inputs.within(Role.OPTIMIZER)
    backward = inputs.within(Role.BACKWARD)
    launches = (inputs.command != NONE) | optimizer
    for one in np.unique(rank[optimizer]).tolist():
        rows = np.flatnonzero(launches & (rank == one))
        main = int(timeline.spans.lane[timeline.marks_of(one)[0]])
        kind = np.where(optimizer[rows], 2, np.where(backward[rows], 1, 0))
        changes = np.flatnonzero(np.diff(kind, prepend=-1))
        group: list[BackwardPass] = []
        for place, begin in enumerate(changes.tolist()):
            end = changes[place + 1] if place + 1 < len(changes) else len(rows)
            if kind[begin] == 1:
                group.append(BackwardPass(int(rows[begin]), int(rows[end - 1]), int(rows[end - 1]) + 1, main))
            elif group and kind[begin] == 0:
                group[-1] = replace(group[-1], end=int(rows[end - 1]) + 1)
            elif group:
                yield from _whole(inputs, group)
                group = []
        yield from _whole(inputs, group)


def _whole(inputs: CauseInputs, group: Sequence[BackwardPass]) -> Iterator[list[BackwardPass]]:
    if len(group) > 1:
        rows = np.arange(group[-1].last + 1, group[-1].end)
        frame = inputs.timeline.spans.frame[rows[(inputs.command[rows] != NONE)]]
        later = frozenset(inputs.path[frame[frame != NONE]].tolist())
        yield [replace(one, later=later) for one in group]


def without_messages(inputs: CauseInputs) -> Edit:
    """No fix, but a measure: what stages of a pipeline would spend if no message had to be waited for."""
    edit = Edit.nothing(inputs.timeline)
    edit.lane[inputs.is_message] = SideLane.WIRE
    return edit
