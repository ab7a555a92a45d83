"""A batch opened into its leaves and closed again: whatever PyTorch knows as a tree, dataclasses, and kinds of dict."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

Settle = Callable[[Any], Any]
Close = Callable[[Iterator[Any], Settle], Any]
"""Makes the batch again, of leaves from an iterator. What knows its own device is settled once its leaves are in."""
Parts = tuple[list[Any], Callable[[list[Any], Settle], Any]]


def opened(batch: Any) -> tuple[list[Any], Close]:
    """Its leaves and what closes it. A leaf is a tensor, something that moves itself, or of no concern to us."""
    nodes, spec = tree_flatten(batch, is_leaf=_has_to)
    within = {place: _within(node) for place, node in enumerate(nodes) if node.__class__ is not Tensor}
    inner = {place: found for place, found in within.items() if found is not None}
    if inner:
        leaves = [leaf for place, node in enumerate(nodes) for leaf in (inner[place][0] if place in inner else [node])]
    else:
        leaves = nodes

    def close(found: Iterator[Any], settle: Settle) -> Any:
        if not inner:
            return tree_unflatten(list(islice(found, len(nodes))), spec)
        closed = [inner[place][1](found, settle) if place in inner else next(found) for place in range(len(nodes))]
        return tree_unflatten(closed, spec)

    return leaves, close


def moves_itself(value: Any) -> bool:
    """Whether it has a `to` of its own, and PyTorch does not know how to open it."""
    return _has_to(value) and value.__class__ not in SUPPORTED_NODES


def _has_to(value: Any) -> bool:
    return value.__class__ is not Tensor and hasattr(value.__class__, "to")


def _within(node: Any) -> tuple[list[Any], Close] | None:
    parts = _parts(node)
    if parts is None:
        return None
    leaves, close = opened(parts[0])
    return leaves, lambda found, settle: parts[1](close(found, settle), settle)


def _parts(node: Any) -> Parts | None:
    """What it directly holds, and how to make another that holds other things."""
    if _has_to(node):
        return _known(node) if node.__class__ in SUPPORTED_NODES else None
    if isinstance(node, dict):
        return list(node.values()), lambda parts, _: _filled(copy.copy(node), dict.__setitem__, node, parts)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in names]
        # no constructor runs: it might want other arguments, or check them, or the class may be frozen
        return values, lambda parts, _: _filled(copy.copy(node), object.__setattr__, names, parts)
    return None


def _known(node: Any) -> Parts:
    """PyTorch opens it, and it keeps its device in mind, as a TensorDict does."""
    children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)
    return children, lambda parts, settle: settle(tree_unflatten(parts, spec))


def _filled(new: Any, put: Callable[[Any, Any, Any], None], names: Any, parts: list[Any]) -> Any:
    for name, part in zip(names, parts, strict=True):
        put(new, name, part)
    return new
