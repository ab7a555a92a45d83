"""Whether the fixes gain anything here: turns with them and without them, in turns, and the times compared.

A turn ends with a step of an optimizer. Times are those of events on the device, and nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

_WARM_UP, _BLOCK, _ROUNDS, _SETTLE = 6, 4, 4, 1
"""Turns before the trial, turns of a block, blocks of each kind, and turns between blocks that count for neither."""


@dataclass
class TrialResult:
    """Median times of a turn in nanoseconds, and their ranges over the blocks."""

    plain: list[int]
    fixed: list[int]

    @property
    def gain(self) -> float:
        """The share of a turn that the fixes save."""
        return 1 - median(self.fixed) / median(self.plain)


class FixTrial:
    """Switches the fixes on and off by turns, once enough turns have come."""

    def __init__(self, switch: Callable[[bool], None], judge: Callable[[TrialResult], None]) -> None:
        self._switch, self._judge = switch, judge
        self.turns, self._first = 0, _WARM_UP
        self.result: TrialResult | None = None
        self._times: dict[bool, list[int]] = {False: [], True: []}
        self._marks: deque[tuple[bool, Any, Any]] = deque()
        self._began: Any = None

    def begin_again(self) -> None:
        """The loop has become another: what was measured so far is of no use."""
        self._first = self.turns + _WARM_UP
        self._times, self._began = {False: [], True: []}, None
        self._marks.clear()
        if self.result is None:
            self._switch(True)

    def turn(self, tried: bool = True) -> None:
        """Another step of an optimizer."""
        if not torch.cuda.is_initialized():
            return
        self.turns += 1
        at = self.turns - self._first
        if self.result is not None or at < 0 or not tried:
            return
        block, place = divmod(at, _BLOCK + _SETTLE)
        if place == 0 and self._began is not None:
            self._marks.append((self._is_fixed(block - 1), self._began, _mark()))
            self._began = None
        if block >= 2 * _ROUNDS:
            self._settle()
        elif place == 0:
            self._switch(self._is_fixed(block))
        if place == _SETTLE and block < 2 * _ROUNDS:
            self._began = _mark()

    def _is_fixed(self, block: int) -> bool:
        return block % 2 == 1

    def _settle(self) -> None:
        self._switch(True)
        while self._marks and self._marks[0][2].query():
            fixed, began, ended = self._marks.popleft()
            self._times[fixed].append(round(began.elapsed_time(ended) * 1e6 / _BLOCK))
        if not self._marks:
            self.result = TrialResult(self._times[False], self._times[True])
            self._judge(self.result)


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
