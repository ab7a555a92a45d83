"""Steps counted at the optimizer's: what tells the window when to open."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any


class Marks:
    """Calls `on_step` with the number of steps so far, at the end of each."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step, self._handle, self._aside = on_step, None, False
        self._ended: list[tuple[int, bool]] = []

    def begin(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._handle = register_optimizer_step_post_hook(self._step)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def look_closely(self, yes: bool) -> None:
        self._aside = yes

    def _step(self, *_: Any) -> None:
        self._ended.append((time.perf_counter_ns(), self._aside))
        self._on_step(len(self._ended))

    def steady(self, count: int) -> bool:
        """Whether the last steps are alike."""
        times = [one for one, _ in self._ended[-count - 1 :]]
        lengths = sorted(after - before for before, after in itertools.pairwise(times))
        return len(lengths) >= count and lengths[-1] < 1.5 * lengths[len(lengths) // 2]

    def plain_step(self) -> int | None:
        """The mean of the steps outside the window, but for the slow ones at the beginning."""
        pairs = list(zip(self._ended[5:-1], self._ended[6:], strict=True))
        times = sorted(after[0] - before[0] for before, after in pairs if not (before[1] or after[1]))
        if len(times) < 3:
            return None
        middle = times[: max(3, int(0.95 * len(times)))]
        return sum(middle) // len(middle)

    def facts(self) -> dict[str, object]:
        return {}
