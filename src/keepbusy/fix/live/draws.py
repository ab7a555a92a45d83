"""Random numbers of the CPU, drawn before the program asks for them.

A loop draws the same shapes in the same order, turn after turn. Once that is seen, a thread of ours draws the next ones
with a generator of its own, which begins where the program's stands. When the program asks, its generator is looked at:
if it stands where ours began, it is set to where ours ended, and the numbers are those that it would have drawn. If it
stands elsewhere, ours are thrown away, and it draws as ever.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from keepbusy.fix.live.background import Background
from keepbusy.fix.live.switch import FixSwitch, is_ours, same_bits
from keepbusy.instrument.patches import Function, Patches, left_alone

_DRAWING = ("rand", "randn", "randint", "randperm", "normal")
_SHORTEST_DRAW = 200_000
"""Nanoseconds that a draw must take: a shorter one is over before a thread has heard of it."""
_REPEATED = 3
"""So often an order is seen before anything is drawn ahead, and so many draws are then made both ways and compared."""
_STOCK, _SLOW_STOCK = 16, 2
"""Draws that nobody has asked for yet, and those of them that take long."""
_CONTEXT = 4
"""Draws that say what comes next."""
_ORDERS = 1000
"""So many pairs of draws are remembered."""
_VAIN_DRAWS = 16
"""Draws in a row that came to nothing: then the program draws in no order that can be foreseen."""


class Draw(NamedTuple):
    """What is asked for: the function's name, its arguments, and the settings that it depends on."""

    name: str
    given: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    inference: bool

    def run(self, plain: Function, generator: torch.Generator | None = None) -> Tensor:
        more = {} if generator is None else {"generator": generator}
        with torch.inference_mode(self.inference):
            return plain(*self.given, **dict(self.options), **more)


Context: TypeAlias = tuple[Draw, ...]
"""The last draws, the latest last."""


class Chain:
    """Draws in the order in which they are expected, each beginning where the one before it ended."""

    def __init__(self, state: Tensor, thread: Background) -> None:
        self.state = state
        """Where the program's generator is to stand when it asks for the next of them."""
        self.draws: deque[tuple[Draw, Future[tuple[Tensor, Tensor]]]] = deque()
        self._generator, self._thread, self._dropped = torch.Generator(), thread, False
        self._generator.set_state(state)

    def add(self, draw: Draw, plain: Function) -> None:
        def run() -> tuple[Tensor, Tensor]:
            if self._dropped or torch.get_default_dtype() is not draw.dtype:
                raise LookupError
            return draw.run(plain, self._generator), self._generator.get_state()

        self.draws.append((draw, self._thread.call(run)))

    def take(self, draw: Draw) -> tuple[Tensor, Tensor] | None:
        """The numbers, and where the generator stands after them; None, for good, if the program does otherwise."""
        with suppress(LookupError):
            expected, result = self.draws.popleft()
            if expected == draw and torch.equal(self.state, torch.get_rng_state()):
                numbers, self.state = result.result()
                return numbers, self.state
        self.draws.clear()
        self._dropped = True
        return None


class DrawsAhead:
    """`torch.randn(...)` and its kin on the CPU, with PyTorch's own generator."""

    def __init__(self) -> None:
        self.switch = FixSwitch("draws", "draws of random numbers on the CPU made while the program did something else")
        self._plain: dict[str, Function] = {}
        self._thread = Background()
        self._follows: dict[Context, Draw] = {}
        self._seen: Counter[tuple[Context, Draw]] = Counter()
        self._slow: set[Draw] = set()
        self._last: Context = ()
        self._chain: Chain | None = None
        self._vain = 0

    def patch(self, patches: Patches) -> None:
        patches.later(self._thread.stop)
        os.register_at_fork(after_in_child=lambda: self.switch.stop("a child draws for itself"))
        for name in _DRAWING:
            self._plain[name] = getattr(torch, name)
            patches.replace(torch, name, partial(self._drawing, name))

    def _drawing(self, name: str, plain: Function) -> Function:
        @left_alone
        def drawing(*given: Any, **options: Any) -> Any:
            if is_ours() or not self.switch.on:
                return plain(*given, **options)
            draw = _draw_of(name, given, options)
            if draw is None:
                return plain(*given, **options)
            numbers = self._take(draw)
            if numbers is None:
                began = time.perf_counter_ns()
                numbers = plain(*given, **options)
                if time.perf_counter_ns() - began > _SHORTEST_DRAW:
                    self._slow.add(draw)
            self._learn(draw)
            return numbers

        return drawing

    def _take(self, draw: Draw) -> Tensor | None:
        """What was drawn ahead, if it is what the program would draw now."""
        if self._chain is None or not self._chain.draws:
            return None
        taken = self._chain.take(draw)
        if taken is None:
            self._chain, self._vain = None, self._vain + 1
            if self._vain > _VAIN_DRAWS:
                self.switch.stop("the program draws in no order that can be foreseen")
            return None
        numbers, after = taken
        self._vain = 0
        self.switch.count()
        if self.switch.checked < _REPEATED:
            self.switch.checked += 1
            plain = draw.run(self._plain[draw.name])
            if not same_bits(plain, numbers) or not torch.equal(after, torch.get_rng_state()):
                self.switch.stop("numbers came out different")
                self._chain = None
            return plain
        torch.set_rng_state(after)
        return numbers

    def _learn(self, draw: Draw) -> None:
        """And go ahead with the draws that are expected after this one."""
        if len(self._seen) > _ORDERS:
            self.switch.stop("the program draws in no order that can be foreseen")
        self._seen[self._last, draw] += 1
        self._follows[self._last] = draw
        self._last = (*self._last, draw)[-_CONTEXT:]
        asked = [one for one, _ in self._chain.draws] if self._chain is not None else []
        if sum(one in self._slow for one in asked) >= _SLOW_STOCK:
            return
        coming = self._coming((*self._last, *asked)[-_CONTEXT:])
        if coming and not asked:
            self._chain = Chain(torch.get_rng_state(), self._thread)
        for one in coming:
            assert self._chain is not None
            self._chain.add(one, self._plain[one.name])

    def _coming(self, last: Context) -> list[Draw]:
        """What is expected, as far as the next draw that is worth it; nothing if none is."""
        coming: list[Draw] = []
        while len(coming) < _STOCK and self._seen[last, self._follows.get(last)] >= _REPEATED:  # type: ignore[index]
            coming.append(self._follows[last])
            if coming[-1] in self._slow:
                return coming
            last = (*last, coming[-1])[-_CONTEXT:]
        return []


def _draw_of(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Draw | None:
    """None where it is not the CPU's own generator, or more than its arguments say what is drawn."""
    device = options.get("device")
    where = torch.get_default_device() if device is None else torch.device(device)
    special = options.get("generator") is not None or options.get("out") is not None
    if special or where.type != "cpu" or torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling():
        return None
    flat = tuple(tuple(one) if isinstance(one, list) else one for one in given)
    if any(isinstance(one, Tensor) for one in (*flat, *options.values())):
        return None
    dtype, inference = torch.get_default_dtype(), torch.is_inference_mode_enabled()
    draw = Draw(name, flat, tuple(sorted(options.items())), dtype, inference)
    try:
        hash(draw)
    except TypeError:
        return None
    return draw
