"""A batch opened into its leaves and closed again: whatever PyTorch knows as a tree, dataclasses, and kinds of dict."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_unflatten

Close = Callable[[Iterator[Any]], Any]
"""Puts leaves, taken from an iterator in their order, where the opened batch had its own."""


def opened(batch: Any) -> tuple[list[Any], Close]:
    """Its leaves and what closes it. A leaf is a tensor, something that moves itself, or of no concern to us."""
    nodes, spec = tree_flatten(batch, is_leaf=moves_itself)
    inner = {place: _parts(node) for place, node in enumerate(nodes) if node.__class__ is not Tensor and _holds(node)}
    if not inner:
        return nodes, partial(_close, spec)
    parts = {place: opened(found) for place, found in inner.items()}
    leaves = [leaf for place, node in enumerate(nodes) for leaf in (parts[place][0] if place in parts else (node,))]

    def close(found: Iterator[Any]) -> Any:
        closed = [
            _with_parts(node, parts[place][1](found)) if place in parts else next(found)
            for place, node in enumerate(nodes)
        ]
        return tree_unflatten(closed, spec)

    return leaves, close


def changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every leaf changed."""
    leaves, close = opened(batch)
    return close(map(change, leaves))


def moves_itself(value: Any) -> bool:
    """Whether it has a `to` of its own, and PyTorch does not know how to open it."""
    kind = value.__class__
    return kind is not Tensor and hasattr(kind, "to") and kind not in SUPPORTED_NODES


def _close(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    return tree_unflatten(list(islice(leaves, spec.num_leaves)), spec)


def _holds(node: Any) -> bool:
    record = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return (record or isinstance(node, dict)) and not moves_itself(node)


def _parts(node: Any) -> dict[Any, Any]:
    if isinstance(node, dict):
        return dict(node)
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if hasattr(node, field.name)}


def _with_parts(node: Any, parts: dict[Any, Any]) -> Any:
    """A copy of it that holds these: no constructor runs, which might want other arguments, or check them."""
    new = copy.copy(node)
    for name, part in parts.items():
        if isinstance(node, dict):
            new[name] = part
        else:
            object.__setattr__(new, name, part)
    return new
