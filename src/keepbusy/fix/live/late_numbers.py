"""Numbers of the device that are read when somebody looks at them: what the rewritten lines call.

`total += loss.item()` becomes `total = late.add(total, lambda a: a, (loss,), ())`, and each place that reads `total`
becomes `late.value(total)`. A value is the one at the call: it is copied aside on the device, and a page of such values
comes home as one. Numbers are combined on the host in the program's own order, so sums are the same to the last bit.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.fix.live.switch import FixSwitch
from keepbusy.runtime.readback import readback

_CHECKED = 3
"""So many numbers are read both ways and compared."""
_PAGE = 1024
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class ValuePage:
    """Values of one device beside each other. A page that is full travels home while the program goes on."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._memory = torch.empty(_PAGE, dtype=dtype, device=device)
        self._places = self._memory.unbind()
        self._used, self._home = 0, list[Any]()
        self._travelling: Any = None

    @property
    def full(self) -> bool:
        return self._used == _PAGE

    def put(self, value: Tensor) -> int:
        place = self._used
        self._places[place].copy_(value.detach().reshape(()))
        self._used += 1
        if self.full:
            self._travelling = readback(self._memory)
        return place

    def read(self, place: int) -> Any:
        if place >= len(self._home):
            memory = self._travelling.tensor if self._travelling is not None else self._memory[: self._used].cpu()
            self._home = memory.tolist()
        return self._home[place]


class PutAside(NamedTuple):
    """A value on a page."""

    page: ValuePage
    place: int
    is_truth: bool

    def item(self) -> Any:
        number = self.page.read(self.place)
        return bool(number) if self.is_truth else number


class Contribution(NamedTuple):
    """What is to be added or appended: a formula of values that were put aside, and of plain ones."""

    formula: Callable[..., Any]
    values: tuple[PutAside, ...]
    others: tuple[Any, ...]

    def number(self) -> Any:
        return self.formula(*(one.item() for one in self.values), *self.others)


class LateSum:
    """A number, and what is yet to be added to it."""

    __slots__ = ("number", "pending")

    def __init__(self, number: Any) -> None:
        self.number = number
        self.pending: deque[Contribution] = deque()

    def settle(self) -> Any:
        while self.pending:
            self.number += self.pending.popleft().number()
        return self.number


class LateNumber:
    """One value of a formula."""

    __slots__ = ("contribution", "number")

    def __init__(self, contribution: Contribution) -> None:
        self.contribution: Contribution | None = contribution
        self.number: Any = None

    def settle(self) -> Any:
        if self.contribution is not None:
            self.number, self.contribution = self.contribution.number(), None
        return self.number


class LateNumbers:
    """The names that rewritten lines use; it is `__keepbusy_late__` there."""

    def __init__(self) -> None:
        self.switch = FixSwitch("late_numbers", "numbers that are only summed or kept, read when somebody looks")
        self._pages: dict[tuple[torch.device, torch.dtype], ValuePage] = {}
        self._lock = Lock()

    def add(self, total: Any, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        """`total += formula(...)`."""
        if not self.switch.on or not isinstance(total, LateSum | int | float) or not _can_wait(values):
            before = self.value(total)
            before += _now(formula, values, others)
            return before
        late = total if isinstance(total, LateSum) else LateSum(total)
        late.pending.append(self._put_aside(formula, values, others))
        if len(late.pending) > 2 * _PAGE:  # those of the page before have long been home
            for _ in range(_PAGE):
                late.number += late.pending.popleft().number()
        return late

    def keep(self, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        """`name = formula(...)`."""
        if not self.switch.on or not _can_wait(values):
            return _now(formula, values, others)
        return LateNumber(self._put_aside(formula, values, others))

    def append(self, held: Any, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        """`held.append(formula(...))`, where nobody else can look into `held`."""
        held.append(self.keep(formula, values, others))

    def value(self, name: Any) -> Any:
        """What a name holds, for whoever reads it."""
        if isinstance(name, LateSum | LateNumber):
            return name.settle()
        if type(name) is list:
            for place, one in enumerate(name):
                if isinstance(one, LateNumber):
                    name[place] = one.settle()
        return name

    def _put_aside(self, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Contribution:
        self.switch.count(sys._getframe(2))  # the user's line is found from there on
        with self._lock:
            contribution = Contribution(formula, tuple([self._on_page(one) for one in values]), others)
        if self.switch.checked < _CHECKED:
            self.switch.checked += 1
            late, now = contribution.number(), _now(formula, values, others)
            if repr(late) != repr(now):
                self.switch.stop("a number came out different")
                return Contribution(lambda: now, (), ())
        return contribution

    def _on_page(self, value: Tensor) -> PutAside:
        key = value.device, torch.float64 if value.dtype in _FLOATS else torch.int64
        page = self._pages.get(key)
        if page is None or page.full:
            page = self._pages[key] = ValuePage(*key)
        return PutAside(page, page.put(value), value.dtype is torch.bool)


def _can_wait(values: tuple[Any, ...]) -> bool:
    """Whether they are single numbers of a device that its default stream makes."""
    return (
        all(
            type(one) is Tensor and one.is_cuda and one.numel() == 1 and one.dtype in (*_FLOATS, *_WHOLE)
            for one in values
        )
        and torch.cuda.current_stream() == torch.cuda.default_stream()
    )


def _now(formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    return formula(*(one.item() for one in values), *others)
