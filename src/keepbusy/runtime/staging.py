"""Many tensors in one piece of memory: where each of them stands, on the host and on the device.

Every tensor that is handed out is one of its own, not a view in autograd's eyes: writing into one
must not look to autograd like a change of its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes. As the caching allocator aligns: no kernel sees the difference to a tensor that came alone."""
DIRECT = 256 << 10
"""Bytes from which a pinned tensor is copied from where it is: a command of its own costs less than packing it."""


class Look(NamedTuple):
    """What decides where a tensor stands."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pinned: bool  # and worth a copy of its own


class Place(NamedTuple):
    """Where a tensor stands in memory that is seen as elements of its type."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Layout(NamedTuple):
    """Where all tensors of a batch stand: first those that travel together, then those that travel alone."""

    places: tuple[Place, ...]
    together: tuple[int, ...]  # their indices
    alone: tuple[int, ...]
    packed: int  # bytes up to the end of those that travel together
    size: int  # bytes in all


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """The same object for batches that look the same."""
    return _layout(tuple([Look(one.dtype, one.shape, one.stride(), _travels_alone(one)) for one in tensors]))


def pieces(memory: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors that stand there."""
    seen = {dtype: memory.view(dtype) for dtype in {place.dtype for place in places}}
    return [seen[place.dtype].as_strided(place.shape, place.stride, place.offset).data for place in places]


def _travels_alone(tensor: Tensor) -> bool:
    return tensor.nbytes >= DIRECT and tensor.is_pinned()


@lru_cache(maxsize=64)
def _layout(looks: tuple[Look, ...]) -> Layout:
    strides = [_dense_stride(look) for look in looks]
    alone = [place for place, look in enumerate(looks) if look.pinned and strides[place] == look.stride]
    together = sorted(set(range(len(looks))) - set(alone))
    places: list[Any] = [None] * len(looks)
    packed = _put(places, looks, strides, together, 0)
    size = _put(places, looks, strides, alone, packed)
    return Layout(tuple(places), tuple(together), tuple(alone), packed, size)


def _put(places: list[Any], looks: Any, strides: Any, which: list[int], end: int) -> int:
    """Give these a place each, from `end` on; returns where they end."""
    for index in which:
        dtype, shape = looks[index].dtype, looks[index].shape
        places[index] = Place(dtype, shape, strides[index], end // dtype.itemsize)
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return end


def _dense_stride(look: Look) -> tuple[int, ...]:
    """As `Tensor.to` lays it out: channels last stay so, gaps are closed."""
    return tuple(torch.empty_like(torch.empty_strided(look.shape, look.stride, device="meta")).stride())


class Slot:
    """One batch's pinned memory, kept for the next batch. `free` waits until the device has read it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._pieces: list[Tensor] = []
        self._read: torch.cuda.Event | None = None
        self._held: Any = None

    def free(self) -> None:
        """Wait for the copies out of it, by their event alone."""
        if self._read is not None:
            self._read.synchronize()
        self._read = self._held = None

    def hold(self, sources: Any, read: torch.cuda.Event) -> None:
        """Until `read` has passed, what is copied from stays: pinned memory that is let go may be given out again."""
        self._held, self._read = sources, read

    def pack(self, layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
        """Pinned memory that holds what travels together."""
        if layout is not self._layout:
            self._arrange(layout)
        if layout.together:
            torch._foreach_copy_(self._pieces, [tensors[index] for index in layout.together])
        return self._memory[: layout.packed]

    def _arrange(self, layout: Layout) -> None:
        if layout.packed > self._memory.numel():
            self._memory = torch.empty(layout.packed, dtype=torch.uint8, pin_memory=True)
        self._pieces = pieces(self._memory, [layout.places[index] for index in layout.together])
        self._layout = layout
