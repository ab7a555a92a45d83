"""Compares hundreds of tensors with earlier ones, by kind or by address, in one call; and flattens results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor

from keepbusy.torch_names.pytorch import (
    TensorGuards,
    TreeSpec,
    register_pytree_node,
    same_addresses,
    tree_flatten,
    tree_map,
)


def same_kinds(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that compares as many tensors with these: class, device, type, shape, stride and `requires_grad`.

    PyTorch's compiler guards its inputs with it. In Python the same takes half a microsecond a tensor.
    """
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


def same_places(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A function that says whether all are still at the same address; one call of PyTorch's in a build with CUDA."""
    watched = [*tensors]
    places = [tensor.data_ptr() for tensor in watched]
    if same_addresses is None:
        return lambda: [*map(Tensor.data_ptr, watched)] == places
    return functools.partial(same_addresses, watched, places, [*range(len(watched))])


def flatten_result(result: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a function's result and its structure, as by `tree_flatten`, which opens dataclasses, too."""
    return cast("tuple[list[Any], TreeSpec]", tree_flatten(tree_map(_open_dataclass, result)))


class _Fields:
    """In place of a dataclass, which PyTorch treats as a leaf unless its class was registered."""

    def __init__(self, value: Any) -> None:
        self.kind, self.parts = type(value), {field.name: getattr(value, field.name) for field in fields(value)}


def _open_dataclass(leaf: Any) -> Any:
    return _Fields(leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else leaf


def _parts_of(opened: _Fields) -> tuple[list[Any], Any]:
    return [tree_map(_open_dataclass, part) for part in opened.parts.values()], (opened.kind, *opened.parts)


def _made_of(parts: Any, context: Any) -> Any:
    kind, *names = context
    instance = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(instance, name, part)  # works for frozen dataclasses, too
    return instance


register_pytree_node(_Fields, _parts_of, _made_of)
