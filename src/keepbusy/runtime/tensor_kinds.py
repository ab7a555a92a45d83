"""Whether tensors are of the kinds of those before, and lie where they lay, in one call for hundreds; what a function
returned, taken apart."""

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
    """Tells of as many others whether all are alike: class, device, type, shape, stride, and whether gradients are due.

    PyTorch's compiler guards its inputs so. Asked of each in Python, the same takes half a microsecond a tensor.
    """
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


def same_places(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Tells whether they all lie where they lie now. PyTorch built for CUDA compares them in one call of its own."""
    known = [*tensors]
    places = [tensor.data_ptr() for tensor in known]
    if same_addresses is None:
        return lambda: [*map(Tensor.data_ptr, known)] == places
    return functools.partial(same_addresses, known, places, [*range(len(known))])


def flatten_result(returned: Any) -> tuple[list[Any], TreeSpec]:
    """Its leaves, as `tree_flatten` gives them, those of dataclasses among them."""
    return cast("tuple[list[Any], TreeSpec]", tree_flatten(tree_map(_opened, returned)))


class _Fields:
    """Stands for a dataclass, which PyTorch takes for a leaf unless its own class was registered."""

    def __init__(self, held: Any) -> None:
        self.kind, self.parts = type(held), {field.name: getattr(held, field.name) for field in fields(held)}


def _opened(leaf: Any) -> Any:
    return _Fields(leaf) if is_dataclass(leaf) and not isinstance(leaf, type) else leaf


def _parts_of(held: _Fields) -> tuple[list[Any], Any]:
    return [tree_map(_opened, part) for part in held.parts.values()], (held.kind, *held.parts)


def _made_of(parts: Any, context: Any) -> Any:
    kind, *names = context
    made = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)  # as frozen ones are made, too
    return made


register_pytree_node(_Fields, _parts_of, _made_of)
