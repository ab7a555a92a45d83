"""Whether fixes gain anything here: turns with them and without them, in turns, and the times compared.

A turn ends where an optimizer steps again; where nothing is trained, at the line that brings home what was computed.
Times are those of events on the device, and nothing waits for them.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any

import torch

from keepbusy.fix.live.switch import Place, is_ours, ours, place_of
from keepbusy.instrument.patches import Function, Patches, left_alone

_WARM_UP, _BLOCK, _ROUNDS, _SETTLE = 6, 4, 4, 1
"""Turns before the first trial, turns of a block, blocks of each kind, and turns between blocks that count for none."""
_WON_PAIRS = 0.9
"""Of all pairs of a block with the fixes and one without: in so many the fixes have to gain. With four blocks of each
kind chance alone does so in 2 of 70 cases."""
_USUAL = 3
"""Passes of a line that make it the end of a turn."""


@dataclass
class TrialResult:
    """Median times of a turn in nanoseconds, and their ranges over the blocks."""

    plain: list[int]
    fixed: list[int]
    plain_turns: range
    """The last of the turns without them."""

    @property
    def gain(self) -> float:
        """The share of a turn that the fixes save."""
        return 1 - median(self.fixed) / median(self.plain)

    @property
    def stands_out(self) -> bool:
        """Whether blocks with them are seldom longer than blocks without, whatever the machine does meanwhile."""
        pairs = [fixed < plain for fixed in self.fixed for plain in self.plain]
        return sum(pairs) >= _WON_PAIRS * len(pairs)

    @property
    def saved(self) -> int:
        """Of a turn."""
        return round(median(self.plain) - median(self.fixed))


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

    @property
    def to_come(self) -> int:
        """Turns that a comparison still needs."""
        return max(1, self._first + 2 * _ROUNDS * (_BLOCK + _SETTLE) + 1 - self.turns)

    def begin_again(self) -> None:
        """The loop has become another: what was measured so far is of no use."""
        self._first = self.turns + _WARM_UP
        self._forget()
        if self._switch is not None:
            self._switch(True)

    def turn(self) -> None:
        """Another one begins."""
        if not self.turns and not torch.cuda.is_initialized():
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
            last = self._first + (2 * _ROUNDS - 2) * (_BLOCK + _SETTLE) + _SETTLE
            result = TrialResult(self._times[False], self._times[True], range(last, last + _BLOCK))
            self._switch = None
            self._forget()
            self._judge(result)


class InferenceTurns:
    """Turns of a program that only infers: it brings what it computed home, always at the same line."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self._turn, self._patches = turn, Patches()
        self._passes: Counter[Place] = Counter()
        self._line: Place | None = None
        self._over = False

    def begin(self) -> None:
        for name in ("item", "cpu", "tolist"):
            self._patches.replace(torch.Tensor, name, self._reading)

    def end(self) -> None:
        self._over = True
        self._patches.undo()

    def _reading(self, plain: Function) -> Function:
        @left_alone
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda and not is_ours():
                self.passed(sys._getframe(1))
                with ours():  # under a mode of PyTorch's the method is called once more, by its name
                    return plain(tensor, *args, **kwargs)
            return plain(tensor, *args, **kwargs)

        return read

    def passed(self, frame: FrameType) -> None:
        """The program is at a line that reads, or that put its reading off."""
        if self._over:
            return
        place = place_of(frame)
        if self._line is None:
            self._passes[place] += 1
            if self._passes[place] == _USUAL:
                self._line = place
        if self._line == place:
            self._turn()


def _is_fixed(block: int) -> bool:
    return block % 2 == 1


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
