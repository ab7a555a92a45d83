"""Predictions: an edit made and replayed, and how far the answer depends on what we do not know."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepbusy.explain.diagnosis import Prediction
from keepbusy.explain.edit import Edit, apply
from keepbusy.explain.ledger import Busy, busy
from keepbusy.explain.plain import Plain
from keepbusy.timeline.replay import pace, steady

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
        """How the mended step is spent on the device."""
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
