"""Numbers, parts, weights and hooks of modules: what a graph of them keeps, asked for all at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from keepbusy.runtime.graph.names_read import PLAIN, names_in
from keepbusy.runtime.tensor_kinds import same_places
from keepbusy.torch_names.pytorch import HOOKS, HOOKS_OF_ALL, PARTS

_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), itemgetter("training")
_END = object()
"""Stands behind all parts: a longer or a shorter row of them is another one."""


@cache
def read_by_class(kind: type) -> frozenset[str]:
    """What a module's forward pass names, and the methods of its class that it calls."""
    names, ahead = set[str](), {"forward"}
    while ahead:
        method = getattr(kind, ahead.pop(), None)
        if isinstance(method, FunctionType):
            found = names_in(method.__code__).attributes - names
            names |= found
            ahead |= found
    return frozenset(names)


class ModuleState:
    """What modules hold now, as values that can be compared."""

    def __init__(self, modules: list[nn.Module], is_read: Callable[[nn.Module, str], bool]) -> None:
        """`is_read`: whether anybody reads that number of a module."""
        held = [vars(module) for module in modules]
        self._parts = [parts[name] for parts in held for name in PARTS if parts[name]]
        tensors = [value for parts in self._parts for value in parts.values() if isinstance(value, Tensor)]
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        of_all = [value for name, value in vars(nn.modules.module).items() if name.startswith(HOOKS_OF_ALL)]
        hooks = [*of_all, *[parts[name] for parts in held for name in HOOKS if name in parts]]
        self._hooks = [held for held in hooks if isinstance(held, dict)]
        self._values: list[Any] | None = None
        self._trained = [parts for parts in held if "training" in parts]
        self._numbers = []
        for module, parts in zip(modules, held, strict=True):
            names = [name for name, value in parts.items() if type(value) in PLAIN and is_read(module, name)]
            if names:
                self._numbers.append((itemgetter(*names), parts))

    def numbers(self) -> tuple[Any, ...]:
        """Their settings, what is trained, and how many hooks there are. Raises KeyError if one is gone."""
        return (
            tuple(map(_TRAINING, self._trained)),
            tuple([held(parts) for held, parts in self._numbers]),
            tuple(map(_REQUIRES_GRAD, self._tensors)),
            any(self._hooks) and tuple(map(len, self._hooks)),  # most modules have none
        )

    def remember(self) -> None:
        """Which parts and weights they have, and where these lie."""
        self._values = [*chain.from_iterable(map(dict.values, self._parts)), _END]
        self._lie_there = same_places(self._tensors)

    def is_as_remembered(self) -> bool:
        """Asked before each replay, so nothing is made that need not be."""
        values = chain(chain.from_iterable(map(dict.values, self._parts)), (_END,))
        return self._values is not None and all(map(is_, values, self._values)) and self._lie_there()

    def tensors(self) -> list[Tensor]:
        return self._tensors
