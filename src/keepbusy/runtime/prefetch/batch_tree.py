"""A batch as a tree: whatever PyTorch knows as one, dataclasses, and kinds of dict, opened into leaves and closed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

from keepbusy.runtime.prefetch.joined_batch import JoinedBatch

ToDevice = Callable[[Any], Any]


class BatchTree:
    """The `leaves` of a batch. Each is a tensor, something that moves itself, or of no concern to us."""

    def __init__(self, batch: Any) -> None:
        self._keys = list(batch) if batch.__class__ is dict and set(map(type, batch.values())) == {Tensor} else None
        if self._keys is not None:  # PyTorch's own trees take ten times as long for it
            self.leaves: list[Any] = list(batch.values())
            return
        nodes, self._spec = tree_flatten(batch, is_leaf=has_to)
        self._size = len(nodes)
        opened = {place: _opened(node) for place, node in enumerate(nodes) if node.__class__ is not Tensor}
        self._inner = {place: inner for place, inner in opened.items() if inner is not None}
        self.leaves = nodes
        if self._inner:
            parts = [
                self._inner[place][0].leaves if place in self._inner else [node] for place, node in enumerate(nodes)
            ]
            self.leaves = [leaf for part in parts for leaf in part]

    def close(self, leaves: Iterator[Any], to_device: ToDevice) -> Any:
        """The batch again, of other leaves. What keeps its device in mind learns the new one at the end."""
        if self._keys is not None:
            return dict(zip(self._keys, leaves, strict=False))
        if not self._inner:
            return tree_unflatten(list(islice(leaves, self._size)), self._spec)
        nodes = []
        for place in range(self._size):
            if place in self._inner:
                tree, rebuild = self._inner[place]
                nodes.append(rebuild(tree.close(leaves, to_device), to_device))
            else:
                nodes.append(next(leaves))
        return tree_unflatten(nodes, self._spec)


def moves_itself(value: Any) -> bool:
    """Whether it has a `to` of its own, and PyTorch does not know how to open it."""
    return has_to(value) and value.__class__ not in SUPPORTED_NODES


def has_to(value: Any) -> bool:
    """Whether it is no plain tensor and has a `to` of its own."""
    return value.__class__ is not Tensor and hasattr(value.__class__, "to")


def _opened(node: Any) -> tuple[BatchTree, Callable[[list[Any], ToDevice], Any]] | None:
    """What a node holds that PyTorch's trees end at, and how to make another that holds other things."""
    if has_to(node):
        if node.__class__ not in SUPPORTED_NODES:
            return None
        # PyTorch opens it, and it keeps its device in mind, as a TensorDict does
        children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)
        return BatchTree(children), lambda parts, to_device: to_device(tree_unflatten(parts, spec))
    if isinstance(node, JoinedBatch):
        return BatchTree([node.joined, *node.others]), lambda parts, _: node.opened(*parts)
    if isinstance(node, dict):
        return BatchTree(list(node.values())), lambda parts, _: _copy_with(node, dict.__setitem__, node, parts)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in names]
        # no constructor runs: it might want other arguments, or check them, or the class may be frozen
        return BatchTree(values), lambda parts, _: _copy_with(node, object.__setattr__, names, parts)
    return None


def _copy_with(node: Any, put: Callable[[Any, Any, Any], None], names: Any, parts: list[Any]) -> Any:
    new = copy.copy(node)
    for name, part in zip(names, parts, strict=True):
        put(new, name, part)
    return new
