"""Whether tensors are of the kinds of those before, and lie where they lay, in one call for hundreds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor


def same_kinds(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Tells of as many others whether all are alike: class, device, type, shape, stride, and whether gradients are due.

    PyTorch's compiler guards its inputs so. Asked of each in Python, the same takes half a microsecond a tensor.
    """
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return cast("Callable[..., bool]", guards.check)


def same_places(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Tells whether they all lie where they lie now. PyTorch built for CUDA compares them in one call of its own."""
    known = [*tensors]
    places = [tensor.data_ptr() for tensor in known]
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is None:
        return lambda: [*map(Tensor.data_ptr, known)] == places
    return functools.partial(compare, known, places, [*range(len(known))])
