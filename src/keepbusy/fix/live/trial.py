"""Whether fixes gain anything here: turns with them and without them, in turns, and the times compared.

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
"""Turns before the first trial, turns of a block, blocks of each kind, and turns between blocks that count for none."""


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
    """One comparison after the other, once enough turns have come."""

    def __init__(self) -> None:
        self.turns, self._first = 0, _WARM_UP
        self._switch: Callable[[bool], None] | None = None
        self._judge: Callable[[TrialResult], None]
        self._times: dict[bool, list[int]] = {False: [], True: []}
        self._marks: deque[tuple[bool, Any, Any]] = deque()
        self._began: Any = None

    def compare(self, switch: Callable[[bool], None], judge: Callable[[TrialResult], None]) -> None:
        """From the next turn on: `switch` turns what is compared on and off, `judge` is told what it gained."""
        self._switch, self._judge = switch, judge
        self._first = max(_WARM_UP, self.turns + 1)

    def begin_again(self) -> None:
        """The loop has become another: what was measured so far is of no use."""
        self._first = self.turns + _WARM_UP
        self._forget()
        if self._switch is not None:
            self._switch(True)

    def turn(self) -> None:
        """Another step of an optimizer."""
        if not torch.cuda.is_initialized():
            return
        self.turns += 1
        at = self.turns - self._first
        if self._switch is None or at < 0:
            return
        block, place = divmod(at, _BLOCK + _SETTLE)
        if place == 0 and self._began is not None:
            self._marks.append((_is_fixed(block - 1), self._began, _mark()))
            self._began = None
        if block >= 2 * _ROUNDS:
            self._settle()
        elif place == 0:
            self._switch(_is_fixed(block))
        if place == _SETTLE and block < 2 * _ROUNDS:
            self._began = _mark()

    def _forget(self) -> None:
        self._times, self._began = {False: [], True: []}, None
        self._marks.clear()

    def _settle(self) -> None:
        """As soon as the last block has passed on the device."""
        assert self._switch is not None
        self._switch(True)
        while self._marks and self._marks[0][2].query():
            fixed, began, ended = self._marks.popleft()
            self._times[fixed].append(round(began.elapsed_time(ended) * 1e6 / _BLOCK))
        if not self._marks:
            result = TrialResult(self._times[False], self._times[True])
            self._switch = None
            self._forget()
            self._judge(result)


def _is_fixed(block: int) -> bool:
    return block % 2 == 1


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
