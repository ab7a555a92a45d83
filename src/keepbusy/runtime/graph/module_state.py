"""Numbers, parts, weights and hooks of modules: what a graph of them keeps, asked for all at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from keepbusy.runtime.graph.names_read import PLAIN, names_in

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = ("_modules", "_parameters", "_buffers")


@cache
def read_by_class(kind: type) -> frozenset[str]:
    """What the methods of a module's class name, those of PyTorch's base class apart."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = [one for base in bases for one in vars(base).values() if isinstance(one, FunctionType)]
    return frozenset(name for one in methods for name in names_in(one.__code__).attributes)


class ModuleState:
    """What modules hold now, as values that can be compared."""

    def __init__(self, modules: list[nn.Module], is_read: Callable[[nn.Module, str], bool] | None = None) -> None:
        """`is_read`: whether anybody reads that number of a module; by default all count."""
        self._modules, held = modules, [vars(module) for module in modules]
        self._parts = [parts[name] for parts in held for name in _PARTS]
        tensors = [value for parts in self._parts for value in parts.values() if isinstance(value, Tensor)]
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.has_sparse = len(self._tensors) < len(tensors)
        of_all = [(name, value) for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
        named = [(name, parts[name]) for parts in held for name in _HOOKS if name in parts]
        self._hooks = [(name, hooks) for name, hooks in (*of_all, *named) if isinstance(hooks, dict)]
        self._forwards = [(parts, type(module)) for parts, module in zip(held, modules, strict=True)]
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
        of_weights = (tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self._tensors)
        if any(of_weights) or any(hooks for name, hooks in self._hooks if "backward" in name):
            return "it has hooks in its backward pass"
        return ""

    def numbers(self) -> tuple[Any, ...]:
        """Their settings: numbers, hooks, methods, and what is trained. Raises KeyError if one is gone."""
        return (
            *[held(parts) for held, parts in self._numbers],
            *[
                (tensor.requires_grad, len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ()))
                for tensor in self._tensors
            ],
            *[len(hooks) for _, hooks in self._hooks],
            *[(parts.get("forward"), kind.forward) for parts, kind in self._forwards],
        )

    def places(self) -> tuple[Any, ...]:
        """Which parts and weights they have, and where these lie."""
        return (
            *map(id, chain.from_iterable(map(dict.values, self._parts))),
            *map(Tensor.data_ptr, self._tensors),
        )
