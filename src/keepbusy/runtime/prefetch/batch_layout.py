"""A batch taken apart: its tree, and how its tensors stand in one piece of memory, of those that can stand there."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

from keepbusy.runtime.tensor_kinds import same_kinds

ALIGNMENT = 512
"""Bytes. As the caching allocator aligns: no kernel sees the difference to a tensor that came alone."""
DIRECT_COPY_BYTES = 256 << 10
"""From this size on a pinned tensor is copied from where it is. Measured on an H200: a copy of its own keeps the bus
two thirds busy at this size, a fifth at 64 KB; packing costs the host twice as much as issuing that copy."""
_STRETCH = 4
"""More tensors than these whose rows are alike are cut out by one call of their own, each in its shape."""

ToDevice = Callable[[Any], Any]
_TensorKind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]
"""Type, shape, and stride unless the tensor is contiguous."""
_View = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Shape and stride; None of a tensor that is cut out in its shape."""


class BatchTree:
    """The `leaves` of a batch. Each is a tensor, something that moves itself, or of no concern to us."""

    def __init__(self, batch: Any) -> None:
        nodes, self._structure = taken_apart(batch)
        self._size = len(nodes)
        plain = self._structure.__class__ is list
        opened = {} if plain else {at: _opened(node) for at, node in enumerate(nodes) if node.__class__ is not Tensor}
        self._inner = {place: inner for place, inner in opened.items() if inner is not None}
        self.leaves = nodes
        if self._inner:
            parts = [
                self._inner[place][0].leaves if place in self._inner else [node] for place, node in enumerate(nodes)
            ]
            self.leaves = [leaf for part in parts for leaf in part]

    def close(self, leaves: Iterator[Any], to_device: ToDevice) -> Any:
        """The batch again, of other leaves. What keeps its device in mind learns the new one at the end."""
        if not self._inner:
            return put_together(list(islice(leaves, self._size)), self._structure)
        nodes = []
        for place in range(self._size):
            if place in self._inner:
                tree, rebuild = self._inner[place]
                nodes.append(rebuild(tree.close(leaves, to_device), to_device))
            else:
                nodes.append(next(leaves))
        return put_together(nodes, self._structure)


def taken_apart(batch: Any, kind: type = Tensor) -> tuple[list[Any], Any]:
    """What is in it, and its structure: of a dict of tensors its names, for PyTorch's trees take ten times as long."""
    if batch.__class__ is dict and set(map(type, batch.values())) == {kind}:
        return list(batch.values()), list(batch)
    return tree_flatten(batch, is_leaf=has_to)


def put_together(nodes: list[Any], structure: Any) -> Any:
    """The same of other things."""
    return dict(zip(structure, nodes, strict=True)) if structure.__class__ is list else tree_unflatten(nodes, structure)


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


class PackedStretch(NamedTuple):
    """Tensors of one type that stand one after the other; of many that share what stands in a row, its shape."""

    dtype: torch.dtype
    row: tuple[int, ...]
    begin: int  # bytes
    end: int
    sizes: list[int]  # in rows: a tensor, the gap after it, and so on; or the tensors, if there are no gaps
    step: int  # from a tensor to the next among these
    views: list[_View]  # none if all are cut out in their shapes


class Layout(NamedTuple):
    """Where all tensors of a batch stand: first those that travel together, then those that travel alone."""

    stretches: list[PackedStretch]
    order: list[int]  # which tensor stands first, which one second, and so on
    together: int  # how many travel together
    packed: int  # bytes up to the end of those
    pageable: int  # bytes of those that are large enough to travel alone, and only not pinned
    size: int  # bytes in all


def packable(leaves: Sequence[Any]) -> list[int]:
    """Which of them are tensors of the host that are nothing but their bytes. In one loop: there may be hundreds."""
    strided = torch.strided
    return [
        place
        for place, leaf in enumerate(leaves)
        if leaf.__class__ is Tensor
        and leaf.is_cpu
        and leaf.layout is strided
        and not leaf.requires_grad
        and not leaf.is_quantized
    ]


class BatchLayouts:
    """The layouts of batches that come one after the other: most are of the kind of the one before."""

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._count, self._places, self._others = 0, list[int](), list[int]()
        self._layout: Layout | None = None
        self._alike: Callable[..., bool] | None = None

    def of(self, leaves: Sequence[Any]) -> tuple[list[int], list[int], Layout]:
        """Places of the leaves that travel as bytes, those of the others, and the layout of the former."""
        before = self._layout
        if before and self._alike and len(leaves) == self._count and self._alike(*[leaves[at] for at in self._places]):
            return self._places, self._others, before
        places = packable(leaves)
        tensors = [leaves[place] for place in places]
        layout = layout_of(tensors, self._together)
        # whether large ones are pinned has to be asked of each, so batches with such are always looked at
        again = layout is before and places == self._places and not layout.pageable and layout.together == len(tensors)
        self._alike = same_kinds(tensors) if again else None
        self._count, self._places, self._layout = len(leaves), places, layout
        self._others = sorted(set(range(len(leaves))).difference(places))
        return places, self._others, layout


def layout_of(tensors: Sequence[Tensor], together: bool = False) -> Layout:
    """The same object for batches of the same kind. `together`: none travels alone, however large and pinned."""
    kinds = tuple([(one.dtype, one.shape, None if one.is_contiguous() else one.stride()) for one in tensors])
    large, layouts = _layouts_of(kinds)
    pinned = () if together else tuple([index for index in large if tensors[index].is_pinned()])
    if pinned not in layouts:
        layouts[pinned] = _new_layout(kinds, large, pinned)
    return layouts[pinned]


def pieces(memory: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors that stand there, in the order in which they stand. The memory may end where the packed ones end.

    None is a view of another in autograd's eyes: writing into one must not look like a change of its neighbours.
    """
    found: list[Tensor] = []
    for dtype, row, begin, end, sizes, step, views in layout.stretches:
        if end <= memory.numel():
            rows = memory[begin:end].view(dtype).view(-1, *row)
            cut = torch.unsafe_split_with_sizes(rows, sizes)[::step]
            if views:
                cut = [one if view is None else one.as_strided(*view) for one, view in zip(cut, views, strict=True)]
            found += cut
    return found


@lru_cache(maxsize=64)
def _layouts_of(kinds: tuple[_TensorKind, ...]) -> tuple[list[int], dict[tuple[int, ...], Layout]]:
    """Which tensors are large enough to travel alone, and the layouts there were, by those that did."""
    large = [
        index
        for index, kind in enumerate(kinds)
        if _bytes_of(kind) >= DIRECT_COPY_BYTES and _stride_on_device(kind) == kind[2]
    ]
    return large, {}


def _bytes_of(kind: _TensorKind) -> int:
    return math.prod(kind[1]) * kind[0].itemsize


def _stride_on_device(kind: _TensorKind) -> tuple[int, ...] | None:
    """As `Tensor.to` would lay it out: channels last stay so, gaps are closed. None if that is contiguous."""
    dtype, shape, stride = kind
    if stride is None:
        return None
    dense = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return None if dense.is_contiguous() else tuple(dense.stride())


def _new_layout(kinds: tuple[_TensorKind, ...], large: list[int], alone: tuple[int, ...]) -> Layout:
    rows = Counter((kind[0], kind[1][1:]) for kind in kinds)

    def neighbourhood(index: int) -> tuple[bool, str, tuple[int, ...]]:
        dtype, shape, stride = kinds[index]
        row = shape[1:] if len(shape) > 1 and stride is None and rows[dtype, shape[1:]] > _STRETCH else ()
        return (
            index in alone,
            str(dtype),
            row if math.prod(row) and not ALIGNMENT % (math.prod(row) * dtype.itemsize) else (),
        )

    order = sorted(range(len(kinds)), key=neighbourhood)
    stretches: list[PackedStretch] = []
    packed = size = 0
    for (travels_alone, _, row), group in groupby(order, neighbourhood):
        stretches.append(_new_stretch([kinds[index] for index in group], row, size))
        size = stretches[-1].end
        packed = packed if travels_alone else size
    pageable = sum(_bytes_of(kinds[index]) for index in large if index not in alone)
    return Layout(stretches, order, len(kinds) - len(alone), packed, pageable, size)


def _new_stretch(kinds: list[_TensorKind], row: tuple[int, ...], begin: int) -> PackedStretch:
    dtype, sizes, end = kinds[0][0], [], begin
    row_bytes = math.prod(row) * dtype.itemsize
    views: list[_View] = []
    for kind in kinds:
        shape, aligned = kind[1], -(-_bytes_of(kind) // ALIGNMENT) * ALIGNMENT
        count = _bytes_of(kind) // row_bytes
        sizes += [count, aligned // row_bytes - count]
        end += aligned
        stride = _stride_on_device(kind) or tuple(torch.empty(shape, device="meta").stride())
        views.append(None if row or len(shape) == 1 else (shape, stride))
    step = 2 if any(sizes[1::2]) else 1
    return PackedStretch(dtype, row, begin, end, sizes[:: 3 - step], step, views if any(views) else [])
