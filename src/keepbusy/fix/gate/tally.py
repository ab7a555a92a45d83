"""All places of a run at which Python waits for the GPU, counted step by step, also those that cost nothing today.

And how much of the copies ran beside the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keepbusy.explain.causes.host import of_large_copy
from keepbusy.explain.diagnosis import Where
from keepbusy.explain.ledger import covered
from keepbusy.explain.places import by_place
from keepbusy.explain.scene import Scene
from keepbusy.fix.gate import BLOCKING_COPY, SYNC
from keepbusy.fix.gate.allow_list import AllowList
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import source_line
from keepbusy.timeline.model import NONE, Ints, Kind, Timeline
from keepbusy.timeline.steps import whole_steps

_FEWEST_STEPS = 2


@dataclass(frozen=True)
class CountedPlace:
    """A line, what kind of wait it is, and how often it comes."""

    kind: str  # SYNC or BLOCKING_COPY
    where: Where
    most: int  # in one step
    steps: int  # that have it
    total: int
    held: int  # nanoseconds that Python stands there, over all steps
    reason: str = ""  # why it is allowed, where it is


@dataclass(frozen=True)
class WaitTally:
    """What was counted of a run."""

    source: str
    device: str
    steps: int
    one_turn: bool  # a script without steps, which counts as one
    modelled: bool
    places: tuple[CountedPlace, ...]  # the most frequent first
    counts: tuple[tuple[str, tuple[int, ...]], ...]  # of each kind, what is not allowed: how many in each step

    def most(self, kind: str) -> int:
        """In one step, of what is not allowed."""
        return max(dict(self.counts)[kind], default=0)


def tally(timeline: Timeline, allow: Sequence[str] = ()) -> WaitTally:
    """Count them. A run that has begun to take steps needs two whole ones: a start-up waits, and is no step."""
    if not timeline.on_device.any():
        raise BadInput(f"{timeline.facts.source or 'the run'} ran nothing on the GPU, so there is nothing to count.")
    marks = min(len(timeline.marks_of(one)) for one in timeline.ranks)
    whole = whole_steps(timeline)
    if whole.facts.one_turn and marks:
        raise BadInput(
            f"{timeline.facts.source or 'the run'} took {marks} steps, too few to tell a step from the start; "
            f"let it take {_FEWEST_STEPS + 1} or more."
        )
    scene, allowed = Scene(whole), AllowList(allow)
    step = _step_of(whole)
    steps = len(whole.marks_of(whole.ranks[0]))
    rank = np.searchsorted(whole.ranks, whole.rank_of_rows)
    places, counts = [], []
    for kind, rows in _rows_of_kinds(scene):
        sums = np.zeros((len(whole.ranks), steps), np.int64)
        for where, mine in by_place(scene, rows).items() if len(rows) else ():
            each = np.zeros((len(whole.ranks), steps), np.int64)
            np.add.at(each, (rank[mine], step[mine]), 1)
            reason = allowed.reason(_stack(whole, int(mine[0])))
            sums += 0 if reason else each
            held = int((whole.spans.end - whole.spans.start)[mine].sum())
            of_steps = each.max(axis=0)
            places.append(
                CountedPlace(kind, where, int(each.max()), int((of_steps > 0).sum()), len(mine), held, reason)
            )
        counts.append((kind, tuple(sums.max(axis=0).tolist())))
    places.sort(key=lambda place: (bool(place.reason), -place.total, str(place.where)))
    facts = whole.facts
    return WaitTally(facts.source, facts.device, steps, facts.one_turn, facts.modelled, tuple(places), tuple(counts))


def hidden_share(timeline: Timeline, since: int) -> float | None:
    """The share of the time of copies in which kernels ran as well; None where nothing was copied."""
    spans = timeline.spans
    copies, kernels = (spans.kind == Kind.COPY) & (spans.start >= since), spans.kind == Kind.KERNEL
    whole = float(spans.end.max(initial=0)) + 1
    copying, computing, either = (
        covered(spans.start[one], spans.end[one], whole) for one in (copies, kernels, copies | kernels)
    )
    return (copying + computing - either) / copying if copying else None


def _rows_of_kinds(scene: Scene) -> Iterator[tuple[str, Ints]]:
    copies = of_large_copy(scene)
    counted = scene.is_sync & ~_reuses_memory(scene)
    yield SYNC, np.flatnonzero(counted & ~copies)
    yield BLOCKING_COPY, np.flatnonzero(counted & copies)


def _reuses_memory(scene: Scene) -> np.ndarray:
    """Our own runtime asks for an event that has passed before it uses memory again, which holds nobody up."""
    spans, names = scene.timeline.spans, scene.timeline.names
    events = np.array(["EventSynchronize" in name for name in names], bool)[spans.name]
    return events & (spans.end - spans.start <= spans.work)


def _step_of(timeline: Timeline) -> Ints:
    """Of each row, the number of its rank's step."""
    step, row, rank = np.zeros(len(timeline), np.int64), np.arange(len(timeline)), timeline.rank_of_rows
    for one in timeline.ranks:
        mine = rank == one
        step[mine] = np.searchsorted(timeline.marks_of(one), row[mine], side="right") - 1
    return np.maximum(step, 0)


def _stack(timeline: Timeline, row: int) -> Iterator[tuple[str, int, str]]:
    """The source lines around a row, from the inside out."""
    frame = int(timeline.spans.frame[row])
    while frame != NONE:
        line = source_line(timeline.names[timeline.frames.name[frame]])
        if line:
            yield line
        frame = int(timeline.frames.parent[frame])
