"""Calls that a loop need not make: they change no value, and hold the GPU up."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from keepbusy.fix.live.batch_copies import DeferredCopies
from keepbusy.fix.live.switch import FixSwitch, is_ours
from keepbusy.instrument import lines
from keepbusy.instrument.patches import Function, Patches

_SCARCE_MEMORY = 0.1
"""Of the device's memory: with less than this free, what the program gives back is given back."""
_WHOLE = 50
"""So many collections look at new objects only; then one looks at all of them."""
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")


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
            if self.switch.on and self._turn() > 0 and not is_ours() and not _is_scarce():
                self.switch.count()
            else:
                plain()

        return empty_cache


def _is_scarce() -> bool:
    free, total = torch.cuda.mem_get_info()
    return bool(free < _SCARCE_MEMORY * total)


class QuickCollection:
    """`gc.collect()` in a loop looks at every object of the program, nearly all of which were there the time before."""

    def __init__(self, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("garbage", "collections of garbage that look at new objects only")
        self._turn, self._calls = turn, 0

    def patch(self, patches: Patches) -> None:
        patches.replace(gc, "collect", self._collect)

    def _collect(self, plain: Function) -> Function:
        def collect(*generation: Any, **named: Any) -> int:
            if not self.switch.on or not self._turn() or generation or named or is_ours():
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


class SkippedWaits:
    """`torch.cuda.synchronize()` and its kin in a loop, put off until somebody could tell the difference.

    That is who reads a clock, asks an event whether it has passed, or asks another event for a time. Where the program
    has copies home that it does not wait for, pinned memory that it may change after a copy, streams of its own or
    other processes, each call waits as it stands.
    """

    def __init__(self, copies: DeferredCopies, turn: Callable[[], int]) -> None:
        self.switch = FixSwitch("syncs", "waits for the GPU, put off until somebody reads a clock or an event")
        self._copies, self._turn = copies, turn
        self._owed: set[int] = set()  # devices

    def patch(self, patches: Patches) -> None:
        patches.replace(torch.cuda, "synchronize", self._putting_off)
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            patches.replace(kind, "synchronize", self._putting_off)
            patches.replace(kind, "query", self._paying)
        patches.replace(torch.cuda.Event, "elapsed_time", self._paying_for_time)
        for name in _CLOCKS:
            patches.replace(time, name, self._clock)
        patches.later(self._pay)

    def _putting_off(self, plain: Function) -> Function:
        def synchronize(*args: Any, **kwargs: Any) -> None:
            if is_ours() or not self.switch.on or not self._turn() or not self._may():
                plain(*args, **kwargs)
                return
            self.switch.count()
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, int | str | torch.device)]
            self._owed.add(_get_device_index(given[0] if given else None, optional=True))

        return synchronize

    def _may(self) -> bool:
        copies = self._copies
        return not (
            copies.brings_home
            or copies.own_streams
            or copies.reads_pinned()
            or torch.cuda.is_current_stream_capturing()
            or (torch.distributed.is_available() and torch.distributed.is_initialized())
        )

    def _pay(self, asking: FrameType | None = None) -> None:
        """Unless it is we who ask: a recording's marks look at their events all the time."""
        if self._owed and not is_ours() and not (asking and lines.is_ours(asking.f_code.co_filename)):
            for device in self._owed:
                with torch.cuda.device(device):
                    torch._C._cuda_synchronize()
            self._owed.clear()

    def _paying(self, plain: Function) -> Function:
        def query(*args: Any) -> bool:
            self._pay(sys._getframe(1))
            return bool(plain(*args))

        return query

    def _paying_for_time(self, plain: Function) -> Function:
        def elapsed_time(start: Any, end: Any) -> float:
            self._pay(sys._getframe(1))
            return float(plain(start, end))

        return elapsed_time

    def _clock(self, plain: Function) -> Function:
        def clock() -> Any:
            if self._owed and lines.kind_of(sys._getframe(1).f_code.co_filename) == lines.USER:
                self._pay()
            return plain()

        return clock
