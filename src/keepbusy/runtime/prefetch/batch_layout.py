"""The tree of a batch, and the layout of its tensors in one piece of memory.

A loader's workers join a batch's tensors in shared memory that is pinned once. Tensors sent one by one each need a file
of their own and a pinning of their own, and Python takes them from and puts them into their batch. Joined they are one
tensor until they are split on the device, and large ones are not copied again to pinned memory, from pages that the
training process has never touched.

The first byte of a buffer says who owns it. The worker sets it and fills the rest; the training process clears it when
the batch is freed, after the device has read it. While a batch is kept, its worker uses another buffer. The second byte
says that the training process holds the buffer: then its name is sent instead, and no file is passed between processes,
which takes a fifth of a millisecond.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from keepbusy.runtime.tensor_kinds import same_kinds
from keepbusy.torch_names.pytorch import (
    HELD_ITERATOR,
    SUPPORTED_NODES,
    foreach_copy,
    new_shared_storage,
    pin_memory,
    tree_flatten,
    tree_unflatten,
)

ALIGNMENT = 512
"""Bytes, as in the caching allocator, so that kernels find tensors aligned as usual."""
DIRECT_COPY_BYTES = 256 << 10
"""Bytes from which a pinned tensor is copied directly. Measured on an H200: a copy of its own keeps the bus
two thirds busy at this size, a fifth at 64 KB; packing costs the host twice as much as issuing that copy."""
_SECTION_MINIMUM = 4
"""More tensors than this with equal rows are a section of their own, split into their shapes by one call."""
BUFFERS = 8
"""Buffers of a worker: for batches being made, in the loop, and on their way to the device."""
_WORTH_JOINING = 8
"""Joining fewer small tensors saves nothing."""
_HELD, _NAME = 1, slice(16, 32)
_BY_NAME: dict[bytes, torch.UntypedStorage] = {}
"""The buffers that this process holds."""
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""

ToDevice = Callable[[Any], Any]
_Rebuild = Callable[[list[Any], ToDevice], Any]
_TensorKind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]
"""Type, shape, and stride unless the tensor is contiguous."""
_View = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Shape and stride; None for a tensor that is split off in its shape."""


class BatchTree:
    """The `leaves` of a batch: tensors, objects that move themselves, and others, which are left as they are."""

    def __init__(self, batch: Any) -> None:
        nodes, self._structure = take_apart(batch)
        self._size = len(nodes)
        is_tensor_dict = self._structure.__class__ is list
        self._inner: dict[int, tuple[BatchTree, _Rebuild]] = {}
        for place, node in enumerate(nodes if not is_tensor_dict else ()):
            if node.__class__ is not Tensor and (inner := _open_node(node)) is not None:
                self._inner[place] = inner
        self.leaves = nodes
        if self._inner:
            parts = [
                self._inner[place][0].leaves if place in self._inner else [node] for place, node in enumerate(nodes)
            ]
            self.leaves = [leaf for part in parts for leaf in part]

    def close(self, leaves: Iterator[Any], to_device: ToDevice) -> Any:
        """The batch with other leaves. Objects that store their device are moved at the end."""
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


def take_apart(batch: Any, kind: type = Tensor) -> tuple[list[Any], Any]:
    """A batch's parts and structure. For a dict of tensors that is its names, since pytrees take ten times as long."""
    if batch.__class__ is dict and set(map(type, batch.values())) == {kind}:
        return list(batch.values()), list(batch)
    return tree_flatten(batch, is_leaf=_has_to)


def put_together(nodes: list[Any], structure: Any) -> Any:
    """A batch of that structure with other parts."""
    return dict(zip(structure, nodes, strict=True)) if structure.__class__ is list else tree_unflatten(nodes, structure)


def moves_itself(value: Any) -> bool:
    """Whether it has a `to` method, and is no pytree."""
    return _has_to(value) and value.__class__ not in SUPPORTED_NODES


def _has_to(value: Any) -> bool:
    """Whether it has a `to` method and is no plain tensor."""
    return value.__class__ is not Tensor and hasattr(value.__class__, "to")


def _open_node(node: Any) -> tuple[BatchTree, _Rebuild] | None:
    """The parts of a node that is a leaf of pytrees, and a function that makes such a node of other parts."""
    if _has_to(node):
        if node.__class__ not in SUPPORTED_NODES:
            return None
        # a pytree that stores its device, such as a TensorDict
        children, spec = tree_flatten(node, is_leaf=lambda part: part is not node)
        return BatchTree(children), lambda parts, to_device: to_device(tree_unflatten(parts, spec))
    if isinstance(node, dict):
        return BatchTree(list(node.values())), lambda parts, _: _copy_with(node, dict.__setitem__, node, parts)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        values = [getattr(node, name) for name in names]
        # without the constructor, which may need other arguments or check them; the class may be frozen
        return BatchTree(values), lambda parts, _: _copy_with(node, object.__setattr__, names, parts)
    return None


def _copy_with(node: Any, put: Callable[[Any, Any, Any], None], names: Any, parts: list[Any]) -> Any:
    new = copy.copy(node)
    for name, part in zip(names, parts, strict=True):
        put(new, name, part)
    return new


class PackedSection(NamedTuple):
    """Consecutive tensors of one type; `row` is the shape of a row if many tensors share it."""

    dtype: torch.dtype
    row: tuple[int, ...]
    begin: int  # bytes
    end: int
    sizes: list[int]  # in rows: a tensor, the gap after it, and so on; or the tensors, if there are no gaps
    step: int  # from a tensor to the next among these
    views: list[_View]  # empty if all are split off in their shapes


class Layout(NamedTuple):
    """The places of a batch's tensors: first those that are copied together, then those that are copied alone."""

    sections: list[PackedSection]
    order: list[int]  # the tensors' numbers in the order of their places
    together: int  # how many are copied together
    packed: int  # bytes of those, with gaps
    pageable: int  # bytes of tensors that are large enough to be copied alone, but not pinned
    size: int  # bytes in all


def packable(leaves: Sequence[Any]) -> list[int]:
    """Places of plain host tensors, which can be copied as bytes. One loop, as there may be hundreds."""
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
    """The layouts of consecutive batches, most of which are of the same kind as the previous one."""

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._count, self._places, self._others = 0, list[int](), list[int]()
        self._layout: Layout | None = None
        self._alike: Callable[..., bool] | None = None

    def of(self, leaves: Sequence[Any]) -> tuple[list[int], list[int], Layout]:
        """Places of the leaves that are copied as bytes, places of the others, and the layout of the former."""
        previous, has_same_size = self._layout, len(leaves) == self._count
        if previous and self._alike and has_same_size and self._alike(*[leaves[place] for place in self._places]):
            return self._places, self._others, previous
        places = packable(leaves)
        tensors = [leaves[place] for place in places]
        layout = layout_of(tensors, self._together)
        # each large tensor may be pinned or not, so batches with large tensors are laid out each time
        has_large = layout.pageable or layout.together < len(tensors)
        is_repeated = layout is previous and places == self._places and not has_large
        self._alike = same_kinds(tensors) if is_repeated else None
        self._count, self._places, self._layout = len(leaves), places, layout
        self._others = sorted(set(range(len(leaves))).difference(places))
        return places, self._others, layout


def layout_of(tensors: Sequence[Tensor], together: bool = False) -> Layout:
    """The layout, one object for batches of the same kind. `together`: no tensor is copied alone."""
    kinds = tuple(
        [(tensor.dtype, tensor.shape, None if tensor.is_contiguous() else tensor.stride()) for tensor in tensors]
    )
    large, layouts = _layouts_of(kinds)
    pinned = () if together else tuple([index for index in large if tensors[index].is_pinned()])
    if pinned not in layouts:
        layouts[pinned] = _new_layout(kinds, large, pinned)
    return layouts[pinned]


def pieces(memory: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors in a piece of memory, in the order of their places. The memory may end after the packed ones.

    For autograd they are not views of each other: writing into one must not count as a change of its neighbours.
    """
    tensors: list[Tensor] = []
    for dtype, row, begin, end, sizes, step, views in layout.sections:
        if end <= memory.numel():
            rows = memory[begin:end].view(dtype).view(-1, *row)
            cut = torch.unsafe_split_with_sizes(rows, sizes)[::step]
            if views:
                cut = [part if view is None else part.as_strided(*view) for part, view in zip(cut, views, strict=True)]
            tensors += cut
    return tensors


@lru_cache(maxsize=64)
def _layouts_of(kinds: tuple[_TensorKind, ...]) -> tuple[list[int], dict[tuple[int, ...], Layout]]:
    """Numbers of tensors large enough to be copied alone, and known layouts, by the tensors that were copied alone."""
    large = [
        index
        for index, kind in enumerate(kinds)
        if _bytes_of(kind) >= DIRECT_COPY_BYTES and _stride_on_device(kind) == kind[2]
    ]
    return large, {}


def _bytes_of(kind: _TensorKind) -> int:
    return math.prod(kind[1]) * kind[0].itemsize


def _stride_on_device(kind: _TensorKind) -> tuple[int, ...] | None:
    """The stride after `Tensor.to`, which keeps channels last and closes gaps. None if that is contiguous."""
    dtype, shape, stride = kind
    if stride is None:
        return None
    dense = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return None if dense.is_contiguous() else tuple(dense.stride())


def _new_layout(kinds: tuple[_TensorKind, ...], large: list[int], alone: tuple[int, ...]) -> Layout:
    rows = Counter((kind[0], kind[1][1:]) for kind in kinds)

    def neighbourhood(index: int) -> tuple[bool, str, tuple[int, ...]]:
        dtype, shape, stride = kinds[index]
        row = shape[1:] if len(shape) > 1 and stride is None and rows[dtype, shape[1:]] > _SECTION_MINIMUM else ()
        return (
            index in alone,
            str(dtype),
            row if math.prod(row) and not ALIGNMENT % (math.prod(row) * dtype.itemsize) else (),
        )

    order = sorted(range(len(kinds)), key=neighbourhood)
    sections: list[PackedSection] = []
    packed = size = 0
    for (travels_alone, _, row), group in groupby(order, neighbourhood):
        sections.append(_new_section([kinds[index] for index in group], row, size))
        size = sections[-1].end
        packed = packed if travels_alone else size
    pageable = sum(_bytes_of(kinds[index]) for index in large if index not in alone)
    return Layout(sections, order, len(kinds) - len(alone), packed, pageable, size)


def _new_section(kinds: list[_TensorKind], row: tuple[int, ...], begin: int) -> PackedSection:
    dtype, sizes, end = kinds[0][0], [], begin
    row_bytes = math.prod(row) * dtype.itemsize
    views: list[_View] = []
    for kind in kinds:
        shape, aligned_size = kind[1], -(-_bytes_of(kind) // ALIGNMENT) * ALIGNMENT
        count = _bytes_of(kind) // row_bytes
        sizes += [count, aligned_size // row_bytes - count]
        end += aligned_size
        stride = _stride_on_device(kind) or tuple(torch.empty(shape, device="meta").stride())
        views.append(None if row or len(shape) == 1 else (shape, stride))
    step = 2 if any(sizes[1::2]) else 1
    return PackedSection(dtype, row, begin, end, sizes[:: 3 - step], step, views if any(views) else [])


def with_packing_workers(loader: Any) -> Any:
    """The loader, or a copy of it whose workers join tensors; the user's own loader stays as it is."""
    if type(loader) is not DataLoader or not loader.num_workers or getattr(loader, HELD_ITERATOR) is not None:
        return loader
    packing = copy.copy(loader)
    packing.collate_fn = PackingCollate(loader.collate_fn)
    return packing


class PackingCollate:
    """A `collate_fn` that joins the tensors of batches with many tensors or large ones."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate, self._buffers, self._layouts = collate, WorkerBuffers(), BatchLayouts(together=True)
        self._kind: Any = None
        self._form = b""

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        nodes, structure = take_apart(batch)
        places, others, layout = self._layouts.of(nodes)
        if len(places) < _WORTH_JOINING and layout.packed < DIRECT_COPY_BYTES:
            return batch
        places = [places[index] for index in layout.order]
        kind = structure, places, others, layout
        try:
            if self._kind != kind:
                numbered = put_together(list(range(len(nodes))), structure)
                self._form = pickle.dumps((numbered, (*places, *others), layout))
                self._kind = kind
        except Exception:  # a kind of tree that accepts only tensors
            return batch
        joined = self._buffers.take(layout.packed)
        foreach_copy(pieces(joined, layout), [nodes[place] for place in places])
        return JoinedBatch(self._form, joined, [nodes[place] for place in others])


class WorkerBuffers:
    """The buffers that this worker made."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Memory of `size` bytes that is not in use."""
        free = [place for place, buffer in enumerate(self.made) if not buffer[0]]
        fitting = next((place for place in free if len(self.made[place]) >= ALIGNMENT + size), None)
        if fitting is not None:
            buffer = self.made[fitting]
        else:
            buffer = torch.empty(0, dtype=torch.uint8, device="cpu").set_(new_shared_storage(ALIGNMENT + size))
            name = list(os.urandom(_NAME.stop - _NAME.start))
            buffer[_NAME] = torch.tensor(name, dtype=torch.uint8, device="cpu")
            if free:  # batches have grown
                self.made[free[0]] = buffer
            elif len(self.made) < BUFFERS:
                self.made.append(buffer)
        buffer[0] = 1
        return buffer[ALIGNMENT : ALIGNMENT + size]


class JoinedBatch:
    """A batch sent by a worker: its tensors joined in one, and its other leaves."""

    joined: Tensor

    def __init__(self, form: bytes, joined: Tensor, others: list[Any]) -> None:
        self.form, self.joined, self.others = form, joined, others

    def __getstate__(self) -> tuple[Any, ...]:
        """The worker sends only the buffer's name if the training process holds the buffer."""
        sent = None if self.joined.untyped_storage()[_HELD] else self.joined
        return self.form, _name_of(self.joined), self.joined.nbytes, sent, self.others

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """The batch is received. The worker may fill its buffer again once the tensor in it is freed."""
        self.form, name, size, joined, self.others = state
        if joined is None:
            if name not in _BY_NAME:  # given up, as after the end of the pass
                return
            joined = torch.empty(0, dtype=torch.uint8, device="cpu").set_(_BY_NAME[name], ALIGNMENT, (size,))
        self.joined = joined
        weakref.finalize(joined, joined.untyped_storage().__setitem__, 0, 0).atexit = False

    def pin_memory(self) -> JoinedBatch:
        """Called by a loader. The buffer is pinned already, or will be before it is copied."""
        self.others = pin_memory(self.others)
        return self


class JoinedTree(BatchTree):
    """The tree of a joined batch; `close` makes the batch as it was before it was joined."""

    def __init__(self, batch: JoinedBatch) -> None:
        super().__init__([batch.joined, *batch.others])
        self._form = batch.form

    def close(self, leaves: Iterator[Any], to_device: ToDevice) -> Any:
        joined, *others = super().close(leaves, to_device)
        structure, places, layout = _form_of(self._form)
        nodes: list[Any] = [None] * len(places)
        for place, node in zip(places, chain(pieces(joined, layout), others), strict=True):
            nodes[place] = node
        return put_together(nodes, structure)


@lru_cache(maxsize=64)
def _form_of(form: bytes) -> tuple[Any, tuple[int, ...], Layout]:
    """The structure, the places of the leaves in it, and their layout; the same bytes for batches of the same kind."""
    numbered, places, layout = pickle.loads(form)
    return take_apart(numbered, int)[1], places, layout


class ReceivedBuffers:
    """Buffers of received batches, held so that a buffer used again is the same pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[bytes] = []
        self._registered: list[int] = []

    def hold(self, joined: Tensor) -> None:
        """Hold the buffer of a tensor, and pin it if it is large."""
        storage = joined.untyped_storage()
        if not storage[_HELD]:
            name = _name_of(joined)
            self._names.append(name)
            _BY_NAME[name] = storage
            cudart: Any = torch.cuda.cudart()  # None in a build without CUDA
            if joined.nbytes >= DIRECT_COPY_BYTES and cudart is not None:
                place = storage.data_ptr()
                if int(cudart.cudaHostRegister(place, storage.nbytes(), _FOR_ALL_DEVICES)) == 0:
                    self._registered.append(place)
                else:
                    with suppress(RuntimeError):  # clear the error, or the next kernel would raise it
                        torch.zeros(1, device=self._device)
            storage[_HELD] = 1

    def close(self, copy_stream: Any) -> None:
        """Give the buffers up once no copy reads them."""
        if self._registered:
            copy_stream.synchronize()
        for place in self._registered:
            torch.cuda.cudart().cudaHostUnregister(place)
        for name in self._names:
            _BY_NAME.pop(name)[_HELD] = 0
        self._registered.clear()
        self._names.clear()


def _name_of(joined: Tensor) -> bytes:
    """The name of a tensor's buffer."""
    return bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(joined.untyped_storage())[_NAME].tolist())
