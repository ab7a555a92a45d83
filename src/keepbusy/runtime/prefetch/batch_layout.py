"""A batch taken apart: its tree, and how its tensors stand in one piece of memory, of those that can stand there.

A loader's workers do so where a batch is made, in shared memory that is pinned once. Of five hundred tensors that a
worker sends one by one, each comes by a file of its own, is pinned alone, and is taken from and put into its batch in
Python. Joined they are one tensor on all that way, until they are cut out on the device. And what is large is not
copied again to pinned memory, from pages that the training process has never touched before.

A buffer's first byte tells whose it is. The worker that made it sets it and fills the rest; the training process clears
it when the batch within is let go, which is after the device has read it. Where a batch is kept its worker takes
another buffer. The second byte says that the training process holds the buffer: then its name is sent in its place, and
no file is passed between processes, which takes a fifth of a millisecond.
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
"""Bytes. As the caching allocator aligns: no kernel sees the difference to a tensor that came alone."""
DIRECT_COPY_BYTES = 256 << 10
"""From this size on a pinned tensor is copied from where it is. Measured on an H200: a copy of its own keeps the bus
two thirds busy at this size, a fifth at 64 KB; packing costs the host twice as much as issuing that copy."""
_STRETCH = 4
"""More tensors than these whose rows are alike are cut out by one call of their own, each in its shape."""
BUFFERS = 8
"""Of a worker: what it has under way, what the loop has, and what is on its way to the device."""
_WORTH_JOINING = 8
"""Of fewer tensors, if they are small, nothing is gained."""
_HELD, _NAME = 1, slice(16, 32)
_BY_NAME: dict[bytes, torch.UntypedStorage] = {}
"""The buffers that this process holds."""
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""

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
    return tree_flatten(batch, is_leaf=_has_to)


def put_together(nodes: list[Any], structure: Any) -> Any:
    """The same of other things."""
    return dict(zip(structure, nodes, strict=True)) if structure.__class__ is list else tree_unflatten(nodes, structure)


def moves_itself(value: Any) -> bool:
    """Whether it has a `to` of its own, and PyTorch does not know how to open it."""
    return _has_to(value) and value.__class__ not in SUPPORTED_NODES


def _has_to(value: Any) -> bool:
    """Whether it is no plain tensor and has a `to` of its own."""
    return value.__class__ is not Tensor and hasattr(value.__class__, "to")


def _opened(node: Any) -> tuple[BatchTree, Callable[[list[Any], ToDevice], Any]] | None:
    """What a node holds that PyTorch's trees end at, and how to make another that holds other things."""
    if _has_to(node):
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
    kinds = tuple(
        [(tensor.dtype, tensor.shape, None if tensor.is_contiguous() else tensor.stride()) for tensor in tensors]
    )
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
                cut = [part if view is None else part.as_strided(*view) for part, view in zip(cut, views, strict=True)]
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


def with_packing_workers(loader: Any) -> Any:
    """The loader, or one just like it whose workers join tensors.

    The user's own stays as it is: what it gives to others is what its `collate_fn` makes.
    """
    if type(loader) is not DataLoader or not loader.num_workers or getattr(loader, HELD_ITERATOR) is not None:
        return loader
    packing = copy.copy(loader)
    packing.collate_fn = PackingCollate(loader.collate_fn)
    return packing


class PackingCollate:
    """A `collate_fn` whose batches are packed, where they hold many tensors or large ones."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate, self._buffers, self._layouts = collate, WorkerBuffers(), BatchLayouts(together=True)
        self._kind: Any = None
        self._form = b""

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        nodes, structure = taken_apart(batch)
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
        except Exception:  # a kind of tree that takes nothing but tensors
            return batch
        joined = self._buffers.take(layout.packed)
        foreach_copy(pieces(joined, layout), [nodes[place] for place in places])
        return JoinedBatch(self._form, joined, [nodes[place] for place in others])


class WorkerBuffers:
    """Those that this worker made."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Memory for so many bytes, which nobody reads until it is sent."""
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
    """A batch on its way from a worker: its tensors in one, and whatever else it holds."""

    joined: Tensor

    def __init__(self, form: bytes, joined: Tensor, others: list[Any]) -> None:
        self.form, self.joined, self.others = form, joined, others

    def __getstate__(self) -> tuple[Any, ...]:
        """As the worker sends it: by the name of its buffer, where the training process knows that."""
        sent = None if self.joined.untyped_storage()[_HELD] else self.joined
        return self.form, _name_of(self.joined), self.joined.nbytes, sent, self.others

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """It has come. The worker may fill its buffer again once the tensor in it is let go, however that happens."""
        self.form, name, size, joined, self.others = state
        if joined is None:
            if name not in _BY_NAME:  # let go, as after the pass that the batch was for
                return
            joined = torch.empty(0, dtype=torch.uint8, device="cpu").set_(_BY_NAME[name], ALIGNMENT, (size,))
        self.joined = joined
        weakref.finalize(joined, joined.untyped_storage().__setitem__, 0, 0).atexit = False

    def pin_memory(self) -> JoinedBatch:
        """As a loader does with what it knows; the buffer is pinned already, or once it is copied from."""
        self.others = pin_memory(self.others)
        return self


class JoinedTree(BatchTree):
    """Its leaves, and the batch as it was before it was joined, of the same bytes elsewhere."""

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
    """Its structure, where in it the leaves stand, and their layout.

    Batches of the same kind say it by the same bytes.
    """
    numbered, places, layout = pickle.loads(form)
    return taken_apart(numbered, int)[1], places, layout


class ReceivedBuffers:
    """Those that batches came in. Held, so that one that comes again is the same memory, which is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[bytes] = []
        self._registered: list[int] = []

    def hold(self, joined: Tensor) -> None:
        """The buffer that it stands in, and pin it if it is large, unless that is done."""
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
                    with suppress(RuntimeError):  # the next kernel would be blamed for it
                        torch.zeros(1, device=self._device)
            storage[_HELD] = 1

    def close(self, copy_stream: Any) -> None:
        """Let them go once nothing is copied from them any more."""
        if self._registered:
            copy_stream.synchronize()
        for place in self._registered:
            torch.cuda.cudart().cudaHostUnregister(place)
        for name in self._names:
            _BY_NAME.pop(name)[_HELD] = 0
        self._registered.clear()
        self._names.clear()


def _name_of(joined: Tensor) -> bytes:
    """Of its buffer."""
    return bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(joined.untyped_storage())[_NAME].tolist())
