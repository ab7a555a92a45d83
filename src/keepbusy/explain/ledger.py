"""Predictions: an edit made and replayed, and how far the answer depends on what we do not know."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keepbusy.explain.diagnosis import Prediction
from keepbusy.explain.edit import Edit, apply
from keepbusy.explain.plain import Plain
from keepbusy.timeline.model import Direction, Ints, Kind, Mask, Timeline
from keepbusy.timeline.replay import Replayed, pace, steady

# Where the nanoseconds of a step go: computing, copying, on the wire, waiting.
#
# A steady run repeats itself, so the last round of a replay is laid on a circle as long as the round.
# What a command does there counts once: computing before copying before the wire. The rest is waiting.


@dataclass(frozen=True)
class Busy:
    """A step of one timeline, the mean of its ranks. Together with `waiting` it is the whole step."""

    step: float
    computing: float
    copying: float
    wire: float
    paced_by: str = ""  # the name of the lane that sets the pace

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
    return Busy(steady.pace, computing, copying, wire, timeline.lanes[steady.slowest].name)


def _shares(timeline: Timeline, mine: Mask, around: float) -> tuple[float, float, float]:
    spans = timeline.spans
    copy = (spans.kind == Kind.COPY) & (spans.direction != Direction.DEVICE_TO_DEVICE)
    wire = spans.kind == Kind.COLLECTIVE
    computing = timeline.on_device & ~copy & ~wire
    # of a collective only its end is the wire; before that it waits for its peers
    start = np.where(wire, spans.end - spans.work, spans.start)
    reached: list[float] = []
    taken = np.zeros(len(timeline), bool)
    for these in (computing, copy, wire):
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
