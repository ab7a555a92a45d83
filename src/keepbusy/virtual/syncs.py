"""Which operators make the host wait, because only the device knows the shape of what they return."""

from __future__ import annotations

from typing import Any

import torch

from keepbusy.virtual.signature import Signature

_LEARN = (
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "equal", "bincount", "repeat_interleave", "linalg_eig", "_linalg_eigh", "_linalg_svd", "histogram", "histc",
    "linalg_lstsq",
)  # fmt: skip
INDEX = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_MASKS = (torch.bool, torch.uint8)


def learns(name: str, args: list[Any]) -> bool:
    """Whether the host waits within this call."""
    return name in _LEARN or (name in INDEX and indexes_with_mask(name, args))


def shown(signature: Signature) -> str:
    """The operator that waits: indexing with a mask looks for the ones first."""
    return "aten::nonzero" if signature.short in INDEX else signature.name


def indexes_with_mask(name: str, args: list[Any]) -> bool:
    """A mask has as many indices as it has ones; only a single value can be written without knowing how many."""
    masked = any(isinstance(one, torch.Tensor) and one.dtype in _MASKS for one in args[1] or ())
    writes_one_value = "put" in name and isinstance(args[2], torch.Tensor) and args[2].numel() == 1
    return masked and not writes_one_value
