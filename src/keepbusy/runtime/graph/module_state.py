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

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REQUIRES_GRAD = attrgetter("requires_grad")
_PARTS = ("_modules", "_parameters", "_buffers")
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

    def __init__(self, modules: list[nn.Module], is_read: Callable[[nn.Module, str], bool] | None = None) -> None:
        """`is_read`: whether anybody reads that number of a module; by default all count."""
        self._modules, held = modules, [vars(module) for module in modules]
        self._parts = [parts[name] for parts in held for name in _PARTS if parts[name]]
        tensors = [value for parts in self._parts for value in parts.values() if isinstance(value, Tensor)]
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.has_sparse = len(self._tensors) < len(tensors)
        of_all = [(name, value) for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
        named = [(name, parts[name]) for parts in held for name in _HOOKS if name in parts]
        self._named_hooks = [(name, hooks) for name, hooks in (*of_all, *named) if isinstance(hooks, dict)]
        self._hooks = [hooks for _, hooks in self._named_hooks]
        self._forwards = [(parts, type(module)) for parts, module in zip(held, modules, strict=True)]
        self._values: list[Any] | None = None
        self._numbers = []
        for module, parts in zip(modules, held, strict=True):
            names = [name for name, value in parts.items() if type(value) in PLAIN]
            if is_read is not None:
                names = [name for name in names if name == "training" or is_read(module, name)]
            if names:
                self._numbers.append((itemgetter(*names), parts))

    def finding(self) -> str:
        if any(isinstance(module, torch.jit.ScriptModule) for module in self._modules):
            return "it is TorchScript"
        if self.has_sparse:
            return "it holds sparse tensors"
        if any(self._hooks_of_weights()) or any(hooks for name, hooks in self._named_hooks if "backward" in name):
            return "it has hooks in its backward pass"
        return ""

    def numbers(self) -> tuple[Any, ...]:
        """Their settings, what is trained, and how many hooks there are. Raises KeyError if one is gone."""
        return (
            tuple([held(parts) for held, parts in self._numbers]),
            tuple(map(_REQUIRES_GRAD, self._tensors)),
            any(self._hooks) and tuple(map(len, self._hooks)),  # most modules have none
        )

    def remember(self) -> None:
        """Which parts and weights they have, and where these lie."""
        self._values = [*chain.from_iterable(map(dict.values, self._parts)), _END]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]

    def is_as_remembered(self) -> bool:
        """Asked before each replay, so nothing is made that need not be."""
        values = chain(chain.from_iterable(map(dict.values, self._parts)), (_END,))
        is_same = self._values is not None and all(map(is_, values, self._values))
        return is_same and [*map(Tensor.data_ptr, self._tensors)] == self._addresses

    def code(self) -> tuple[Any, ...]:
        """What runs beside their classes' methods as they were."""
        return (
            *self._hooks_of_weights(),
            *[(parts.get("forward"), kind.forward) for parts, kind in self._forwards],
        )

    def tensors(self) -> list[Tensor]:
        return self._tensors

    def _hooks_of_weights(self) -> list[Any]:
        return [tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self._tensors]
