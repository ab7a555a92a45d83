"""Predictions: an edit made and replayed, and how far the answer depends on what we do not know."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepbusy.explain.diagnosis import Prediction
from keepbusy.explain.edit import Edit, apply
from keepbusy.explain.ledger import Busy, busy
from keepbusy.explain.plain import Plain
from keepbusy.timeline.replay import pace

NOISE = 0.03
"""Gains below this share of the step are not claimed: plain steps of one program differ by as much from run to run."""


@dataclass(eq=False)
class Forecast:
    """The plain run, and the same run under another view of what recording cost. Their difference is the range."""

    plain: Plain
    other: Plain
    _known: dict[int, Prediction] = field(default_factory=dict)

    @property
    def noise(self) -> int:
        return round(NOISE * self.plain.step)

    def predict(self, edit: Edit) -> Prediction:
        if id(edit) not in self._known:
            limit = self.plain.step
            steps = [min(limit, round(one.ratio * pace(apply(one.timeline, edit)))) for one in (self.plain, self.other)]
            spread = self.noise // 2
            low, high = min(steps) - spread, min(limit, max(steps) + spread)
            self._known[id(edit)] = Prediction(steps[0], max(0, min(low, steps[0])), max(high, steps[0]))
        return self._known[id(edit)]

    def spent(self, edit: Edit) -> Busy:
        """How the mended step is spent on the device."""
        timeline, ratio = apply(self.plain.timeline, edit), self.plain.ratio
        found = busy(timeline, pace(timeline))
        return Busy(found.step * ratio, found.computing * ratio, found.copying * ratio, found.wire * ratio)
