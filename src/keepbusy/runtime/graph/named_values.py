"""What names stand for, and what the step's code reads behind them: `config.rate`, `weights["a"]`, `parts[0].rate`.

All of it is constant in a graph, so it is read before each replay.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.names_read import PLAIN, StepNames, attributes_of, constant, is_a, own_dict
from keepbusy.runtime.graph.reachable import reach

_LARGEST = 64
"""A container that holds more is known by the places that the code names."""
_MOST_VALUES = 512
"""Values that are read before each replay, the nearest first."""
_CODE_TYPES = (FunctionType, BuiltinFunctionType, ModuleType, type)
"""What a name may stand for and nobody rebinds."""
_ENDS = (*PLAIN, *_CODE_TYPES, MethodType, Tensor, nn.Module, Optimizer)


class NamedValues:
    """Reads numbers and tensors; what holds them is found once, and anew where another object has taken its place."""

    def __init__(self, names: StepNames) -> None:
        self._words = names.words
        self._names = [name for name in names.reads if not is_a(name.read(), *_CODE_TYPES)]
        self._values: list[Any] = []
        self._holders: list[int] = []
        """Places of values that others were read from."""
        self._ends: list[int] = []
        self._find()

    def read(self) -> tuple[Any, ...]:
        if not self.is_as_read():
            try:
                values = self._all()
                is_known = len(values) == len(self._values) and self._has_sizes()
                is_known = is_known and all(values[place] is self._values[place] for place in self._holders)
            except (KeyError, AttributeError):  # it is gone
                is_known = False
            if is_known:
                self._values = values
            else:
                self._find()
        return tuple([constant(self._values[place]) for place in self._ends])

    def is_as_read(self) -> bool:
        """Whether all names stand for the very objects that `read` found."""
        try:
            values = self._all()
        except (KeyError, AttributeError):
            return False
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values)) and self._has_sizes()

    def _has_sizes(self) -> bool:
        return [*map(len, self._dicts)] == self._sizes

    def found(self) -> list[Any]:
        """The objects of which `read` told."""
        return [self._values[place] for place in self._ends]

    def tensors(self) -> list[Tensor]:
        """Those among them, whose memory or values may change while they are the same objects."""
        return [value for value in self.found() if is_a(value, Tensor)]

    def labels(self) -> list[str]:
        return [self._labels[place] for place in self._ends]

    def held(self) -> list[Any]:
        """The objects themselves, to be kept alive for a graph."""
        return self._all()

    def modules(self) -> list[nn.Module]:
        """All that can be reached."""
        named = [(name.label, name.read()) for name in self._names]
        return [value for _, value in reach(named) if is_a(value, nn.Module)]

    def _find(self) -> None:
        self._reads: list[tuple[Callable[[Any], Any], Any]] = []
        self._labels = [f"`{name.label}`" for name in self._names]
        values = [name.read() for name in self._names]
        seen: dict[int, Any] = {}
        ahead = deque(enumerate(values))
        holders: list[int] = []
        while ahead and len(values) < _MOST_VALUES:
            place, value = ahead.popleft()
            if is_a(value, *_ENDS) or id(value) in seen:
                continue
            seen[id(value)] = value
            read, names = self._entries(value)
            if read is not None:
                holders.append(place)
                self._reads.append((read, value))
                ahead += enumerate(read(value), len(values))
                self._labels += [f"`{self._labels[place].strip('`')}{name}`" for name in names]
                values += read(value)
        dicts = [own_dict(value) for value in seen.values()]  # which the loop may give an attribute
        self._dicts = [held for held in dicts if held is not None]
        self._sizes = [*map(len, self._dicts)]
        self._values, self._holders = values, holders
        self._ends = sorted({*range(len(values))}.difference(holders))

    def _all(self) -> list[Any]:
        return [
            *[name.read() for name in self._names],
            *chain.from_iterable([read(holder) for read, holder in self._reads]),
        ]

    def _entries(self, value: Any) -> tuple[Callable[[Any], Any] | None, list[str]]:
        """How to read what matters of an object, as a list, and what a person calls each."""
        if is_a(value, list, tuple, deque) and len(value) <= _LARGEST:
            return list, [f"[{place}]" for place in range(len(value))]
        if is_a(value, dict):
            if len(value) <= _LARGEST:
                return lambda held: [*dict.keys(held), *dict.values(held)], [f" has {key!r}" for key in value] + [
                    f"[{key!r}]" for key in value
                ]
            names = [key for key in value if key in self._words]
            return (_getter(operator.itemgetter, names) if names else None), [f"[{name!r}]" for name in names]
        names = [name for name in attributes_of(value) if name in self._words]
        return (_getter(operator.attrgetter, names) if names else None), [f".{name}" for name in names]


def _getter(kind: Callable[..., Any], names: list[str]) -> Callable[[Any], Any]:
    """Whatever the number of names, a sequence."""
    read = kind(*names)
    return read if len(names) > 1 else lambda held: (read(held),)
