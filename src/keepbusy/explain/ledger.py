"""Predictions: an edit made and replayed, where the nanoseconds of the step then go, and how sure that is.

A steady run repeats itself, so the last round of a replay is laid on a circle as long as the round. What a command
does there counts once: computing before copying before the wire. The rest is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from random import Random

import numpy as np

from keepbusy.explain.diagnosis import Prediction
from keepbusy.explain.edit import Edit, SideLane, apply
from keepbusy.explain.plain import Plain
from keepbusy.timeline.model import WORKERS, Ints, Kind, Lane, Mask, Timeline
from keepbusy.timeline.replay import Replayed, pace, steady


@dataclass(frozen=True)
class Busy:
    """A step of one timeline, the mean of its ranks. Together with `waiting` it is the whole step."""

    step: float
    computing: float
    copying: float
    wire: float
    paced_by: SideLane = SideLane.STAY  # the lane for moved work that sets the pace, if one does

    def scaled(self, ratio: float) -> Busy:
        return Busy(self.step * ratio, self.computing * ratio, self.copying * ratio, self.wire * ratio, self.paced_by)

    @property
    def held_up(self) -> float:
        """The GPU computes nothing: it waits, copies, or exchanges data with no compute beside it."""
        return max(0.0, self.step - self.computing)

    @property
    def waiting(self) -> float:
        return max(0.0, self.held_up - self.copying - self.wire)


def busy(timeline: Timeline, steady: Replayed) -> Busy:
    """How a step of this steady replay is spent on the device."""
    replayed = timeline.change_spans(start=steady.start, end=steady.end)
    steps = len(timeline.marks_of(timeline.ranks[0]))
    rank = replayed.rank_of_rows
    shares = np.array([_shares(replayed, rank == one, steady.pace * steps) for one in timeline.ranks])
    computing, copying, wire = (float(share) for share in shares.mean(axis=0) / steps)
    return Busy(steady.pace, computing, copying, wire, _side_lane(timeline.lanes[steady.slowest]))


def _side_lane(lane: Lane) -> SideLane:
    """A loader's own workers count as the ones that a fix would add."""
    if lane.device is None and lane.name == WORKERS:
        return SideLane.WORKERS
    return SideLane(-lane.number) if -lane.number in set(SideLane) else SideLane.STAY


def _shares(timeline: Timeline, mine: Mask, around: float) -> tuple[float, float, float]:
    spans = timeline.spans
    wire = spans.kind == Kind.COLLECTIVE
    copying = (spans.kind == Kind.COPY) | (spans.kind == Kind.FILL)  # also within the device: nothing is computed
    computing = timeline.on_device & ~copying & ~wire
    # of a collective only its end is the wire; before that it waits for its peers
    start = np.where(wire, spans.end - spans.work, spans.start)
    reached: list[float] = []
    taken = np.zeros(len(timeline), bool)
    for these in (computing, copying, wire):
        taken |= these & mine
        reached.append(covered(start[taken], spans.end[taken], around))
    return reached[0], reached[1] - reached[0], reached[2] - reached[1]


def covered(start: Ints, end: Ints, around: float) -> float:
    """How much of a circle of this length the intervals cover together."""
    if not len(start) or around <= 0:  # commands of a damaged trace may overlap so much that no time passes
        return 0.0
    length = np.minimum(end - start, around)
    begin = np.mod(start, around).astype(np.float64)
    over = np.maximum(begin + length - around, 0)
    starts = np.concatenate([begin, np.zeros(int((over > 0).sum()))])
    ends = np.concatenate([begin + length - over, over[over > 0]])
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([[0.0], reached[:-1]])
    return float(np.maximum(reached - np.maximum(starts, before), 0).sum())


NOISE = 0.03
"""Gains below this share of the step are not claimed: plain steps of one program differ by as much from run to run."""


@dataclass(eq=False)
class Forecast:
    """The plain run, and the same run under another view of what recording cost. Their difference is the range."""

    plain: Plain
    other: Plain
    _spent: dict[Edit, Busy] = field(default_factory=dict)  # edits are compared by identity: each is replayed once
    _predicted: dict[Edit, Prediction] = field(default_factory=dict)

    @property
    def noise(self) -> int:
        return round(NOISE * self.plain.step)

    def spent(self, edit: Edit) -> Busy:
        """How the fixed step is spent on the device."""
        if edit not in self._spent:
            timeline, ratio = apply(self.plain.timeline, edit), self.plain.ratio
            self._spent[edit] = busy(timeline, steady(timeline)).scaled(ratio)
        return self._spent[edit]

    def step(self, edit: Edit) -> int:
        return min(self.plain.step, round(self.spent(edit).step))

    def gain(self, edit: Edit) -> int:
        return self.plain.step - self.step(edit)

    def predict(self, edit: Edit) -> Prediction:
        if edit not in self._predicted:
            step, spread = self.step(edit), self.noise // 2
            other = min(self.plain.step, round(self.other.ratio * pace(apply(self.other.timeline, edit))))
            low, high = min(step, other) - spread, min(self.plain.step, max(step, other) + spread)
            self._predicted[edit] = Prediction(step, max(0, low), high)
        return self._predicted[edit]


EXACT = 5
"""So many causes are fixed in every order that there is; of more, in a sample of orders."""
SAMPLED = 6


def mean_over_orders(causes: Sequence[str], left_after: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """What each cause takes away of what is left, whichever of the others were fixed before it (its Shapley value).

    `left_after` tells what is left once these are fixed. No fix gives back what another one took. A sample of orders
    holds each one also backwards, so that nobody has the better end of it.
    """
    if len(causes) <= EXACT:
        orders = list(permutations(causes))
    else:
        draw = Random(len(causes))
        forwards = [draw.sample(causes, len(causes)) for _ in range(SAMPLED)]
        orders = [tuple(order) for one in forwards for order in (one, one[::-1])]
    taken = dict.fromkeys(causes, 0.0)
    for order in orders:
        left = left_after(frozenset())
        for place, cause in enumerate(order, 1):
            after = min(left, left_after(frozenset(order[:place])))
            taken[cause] += (left - after) / len(orders)
            left = after
    return taken
