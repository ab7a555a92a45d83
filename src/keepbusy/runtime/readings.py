"""`Readings`: running means of many values for one copy a step, known one step late."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torch import Tensor

from keepbusy.runtime.reading import Reading, readback

_Step = dict[str, Reading | float]


class Readings:
    """Means and checks of many values, for one copy a step and without making the host wait for the step it is in.

        readings = Readings()
        for step, batch in enumerate(loader):
            ...
            readings.add(loss=loss, accuracy=accuracy, rate=schedule.get_last_lr()[0])
            if readings.nonfinite():
                break
            if step % 100 == 0:
                print(readings.means())
        print(readings.means(last=True))

    Every answer is one step late: it is about all steps but the last one added, so that the device still has that one
    to do while the host reads. It does not depend on how fast anything ran. `last=True` counts the last step too, and
    waits for it: that is for the end of an epoch. Sums are kept in double precision.
    """

    def __init__(self) -> None:
        self._late: deque[_Step] = deque()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._nonfinite: dict[str, None] = {}

    def add(self, **values: Any) -> None:
        """A step's values by name: tensors with one element, on any device, or numbers. Steps may differ in names."""
        for name, value in values.items():
            _check(name, value)
        self._late.append(readback(values))
        while len(self._late) > 1 and _ready(self._late[0]):
            self._count(self._late.popleft())

    def means(self, *, last: bool = False) -> dict[str, float]:
        """Of each name the mean since the last `reset()`."""
        self._read(last)
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def nonfinite(self, *, last: bool = False) -> list[str]:
        """The names that were infinite or not a number since the last `reset()`: a check that does not stall."""
        self._read(last)
        return list(self._nonfinite)

    def reset(self) -> None:
        """Begin anew. What has not been counted yet, the step added last, belongs to the new beginning."""
        self._read(last=False)
        self._sums, self._counts, self._nonfinite = {}, {}, {}

    def _read(self, last: bool) -> None:
        while len(self._late) > (0 if last else 1):
            self._count(self._late.popleft())

    def _count(self, step: _Step) -> None:
        for name, reading in step.items():
            value = float(reading)
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
            if not math.isfinite(value):
                self._nonfinite[name] = None


def _check(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return
        found = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, Reading | int | float):
        return
    else:
        found = f"a {type(value).__name__}"
    raise ValueError(
        f"add({name}=...) was given {found}, and a mean is kept of single numbers; give {name}'s own mean."
    )


def _ready(step: _Step) -> bool:
    return all(reading.ready for reading in step.values() if isinstance(reading, Reading))
