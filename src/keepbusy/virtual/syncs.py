"""Which operators make the host wait, because only the device knows the shape of what they return."""

from __future__ import annotations

from typing import Any

import torch

_LEARN = frozenset(
    "aten::nonzero aten::masked_select aten::_unique aten::_unique2 aten::unique_dim aten::unique_consecutive "
    "aten::unique_dim_consecutive aten::equal aten::bincount aten::repeat_interleave aten::linalg_eig "
    "aten::_linalg_eigh aten::_linalg_svd aten::histogram aten::histc aten::linalg_lstsq".split()
)
_INDEX = frozenset(
    "aten::index aten::_unsafe_index aten::index_put aten::index_put_ aten::_index_put_impl_ aten::_unsafe_index_put".split()
)
_MASKS = (torch.bool, torch.uint8)


def learns(name: str, args: list[Any]) -> bool:
    """Whether the host waits within this call."""
    return name in _LEARN or (name in _INDEX and indexes_with_mask(name, args))


def indexes_with_mask(name: str, args: list[Any]) -> bool:
    """A mask has as many indices as it has ones; only a single value can be written without knowing how many."""
    masked = any(isinstance(one, torch.Tensor) and one.dtype in _MASKS for one in args[1] or ())
    writes_one_value = "put" in name and isinstance(args[2], torch.Tensor) and args[2].numel() == 1
    return masked and not writes_one_value
