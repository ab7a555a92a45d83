"""Calls that a loop need not make: they change no value, and hold the GPU up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from keepbusy.fix.live.switch import FixSwitch
from keepbusy.instrument.patches import Function, Patches

_SCARCE = 0.1
"""Of the device's memory: with less than this free, what the program gives back is given back."""
_WHOLE = 50
"""So many collections look at new objects only; then one looks at all of them."""


class KeptCache:
    """`torch.cuda.empty_cache()` in a loop: the driver takes the memory, and a moment later is asked for it again."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("cache", "calls of empty_cache() in the loop, which the GPU would wait for")
        self._turn = turn

    def patch(self, patches: Patches) -> None:
        patches.replace(torch.cuda, "empty_cache", self._empty_cache)
        patches.replace(torch.cuda.memory, "empty_cache", self._empty_cache)

    def _empty_cache(self, plain: Function) -> Function:
        def empty_cache() -> None:
            if self.switch.on and self._turn() > 0 and not _is_scarce():
                self.switch.count()
            else:
                plain()

        return empty_cache


def _is_scarce() -> bool:
    free, total = torch.cuda.mem_get_info()
    return bool(free < _SCARCE * total)


class QuickCollection:
    """`gc.collect()` in a loop looks at every object of the program, nearly all of which were there the time before."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("garbage", "collections of garbage that look at new objects only")
        self._turn, self._calls = turn, 0

    def patch(self, patches: Patches) -> None:
        patches.replace(gc, "collect", self._collect)

    def _collect(self, plain: Function) -> Function:
        def collect(*generation: Any, **named: Any) -> int:
            if not self.switch.on or not self._turn() or generation or named:
                return int(plain(*generation, **named))
            self._calls += 1
            if self._calls % _WHOLE == 1:
                gc.unfreeze()
                found = int(plain())
                gc.freeze()
                return found
            self.switch.count()
            return int(plain())

        return collect
