"""Which bytes a tensor covers, and whether two uses share some: views of the same memory may interleave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from keepbusy.virtual.clock.order import Command

if TYPE_CHECKING:
    from torch import Tensor

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_MOST_ELEMENTS = 1 << 18
"""Elements of two interleaving views that are compared one by one. Larger views count as apart."""


class View(NamedTuple):
    """Where the elements of a tensor with gaps lie."""

    dimensions: tuple[tuple[int, int], ...]  # the length and the stride of each, the longest stride first
    item_size: int  # bytes an element

    @property
    def elements(self) -> int:
        return math.prod(length for length, _ in self.dimensions)


class Extent(NamedTuple):
    """The bytes of a tensor."""

    low: int  # its first byte
    high: int  # the byte after its last
    view: View | None = None  # None for memory without gaps

    @classmethod
    def of(cls, tensor: Tensor, low: int) -> Extent:
        """`low`: the address of its first byte."""
        item_size = tensor.element_size()
        if tensor.is_contiguous():
            return cls(low, low + tensor.nbytes)
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        dimensions = sorted((pair for pair in pairs if pair[1] and pair[0] > 1), key=lambda pair: -pair[1])
        view = View(tuple(dimensions), item_size)
        span = 1 + sum((length - 1) * stride for length, stride in dimensions)
        return cls(low, low + span * item_size, view if span > view.elements else None)

    def covers(self, other: Extent) -> bool:
        """Whether it certainly has all bytes of the other one."""
        return self == other or (self.view is None and self.low <= other.low and other.high <= self.high)

    def shares_bytes(self, other: Extent) -> bool:
        """Whether two overlapping ranges share a byte; False where the views are too large to compare."""
        if self.view is None and other.view is None:
            return True
        if any(view is not None and view.elements > _MOST_ELEMENTS for view in (self.view, other.view)):
            return False
        (starts, size), (other_starts, other_size) = self._pieces(), other._pieces()
        # the last start of this one before the end of each piece of the other
        before = np.searchsorted(starts, other_starts + other_size) - 1
        return bool((starts[np.maximum(before, 0)] + size > other_starts)[before >= 0].any())

    def _pieces(self) -> tuple[Addresses, int]:
        """Where its pieces begin, in order, and the length of each."""
        starts = np.array([self.low], np.int64)
        if self.view is None:
            return starts, self.high - self.low
        for length, stride in self.view.dimensions:
            steps = np.arange(length, dtype=np.int64) * (stride * self.view.item_size)
            starts = (starts[:, None] + steps).ravel()
        return np.sort(starts), self.view.item_size


class Use(NamedTuple):
    """A command, or the host, reads or writes memory."""

    extent: Extent
    command: Command
    writes: bool
    is_partial: bool = False  # only rows that an index chooses; which ones is not known
    in_backward: bool = False  # the engine keeps gradients until all streams are done with them
    is_freed: bool = False  # whether the memory was given back since

    def conflicts_with(self, other: Use) -> bool:
        """Whether their order matters, judged by their ranges."""
        overlap = self.extent.low < other.extent.high and other.extent.low < self.extent.high
        return overlap and (self.writes or other.writes) and not (self.is_partial and other.is_partial)

    def covers(self, other: Use) -> bool:
        return not self.is_partial and self.extent.covers(other.extent)
