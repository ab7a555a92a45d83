"""One operator as it was called: its tensors, and how long so many bytes or elements take on its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

from keepbusy.virtual.costs import figures
from keepbusy.virtual.costs.device import Device

Shape: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[Shape, str, Shape]
"""An `Array` in plain, which is quicker to make."""
Kernel: TypeAlias = tuple[str, int]
"""Its name, and how long it runs."""

SHORTEST: int = figures("kernel").shortest
"""Nanoseconds of the shortest kernel."""
_SIZES = {
    "float64": 8, "int64": 8, "complex64": 8, "uint64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "complex32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


class Array(NamedTuple):
    """A tensor as a kernel finds it: its shape, the name of its type ("bfloat16") and its strides. Hashable."""

    shape: Shape
    dtype: str
    strides: Shape

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def item_size(self) -> int:
        """Bytes an element; one for the small types."""
        return _SIZES.get(self.dtype, 1)

    @property
    def size(self) -> int:
        """Bytes that a kernel touches: of an expanded tensor, those that exist."""
        return prod(length for length, stride in zip(self.shape, self.strides, strict=True) if stride) * self.item_size

    @property
    def rows(self) -> float:
        return self.elements / max(1, self.shape[-1]) if self.shape else 1.0

    @property
    def dense(self) -> bool:
        """Whether its elements fill their memory, in whatever order of dimensions."""
        return _fills(sorted((at, length) for length, at in zip(self.shape, self.strides, strict=True) if length != 1))

    @property
    def contiguous(self) -> bool:
        """Whether its elements fill their memory in the order of its dimensions."""
        return _fills((stride, length) for length, stride in zip(self.shape[::-1], self.strides[::-1], strict=True))

    @property
    def channels_last(self) -> bool:
        return len(self.shape) >= 4 and self.strides[1] == 1 and self.shape[1] > 1

    def lies_as(self, other: Array) -> bool:
        """Whether two tensors lie in memory in the same order."""
        strides = zip(self.shape, self.strides, other.strides, strict=True)
        return self.shape == other.shape and all(mine == its for length, mine, its in strides if length != 1)


def _fills(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Given stride and length, from the innermost dimension on."""
    expected = 1
    for stride, length in dimensions:
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def total(operands: Iterable[Array]) -> int:
    return sum(one.size for one in operands)


def largest(operands: Iterable[Array]) -> Array:
    return max(operands, key=lambda one: one.elements)


def lasts(start: float, *limits: float) -> int:
    """A kernel's time: its fixed part, and the longest of the times that limit it."""
    return round(start + max(limits))


class NoLaw(Exception):  # noqa: N818  # what is missing, not that something is wrong
    """The law of this operator says nothing of such tensors; its bytes set its time, as for one that has no law."""


@dataclass(frozen=True)
class Call:
    """An operator, the tensors in its schema's order, and those arguments that its law asks for."""

    device: Device
    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    arguments: Mapping[str, Any]
    tf32: bool = False

    @property
    def result(self) -> Array:
        """What it makes; in place, what it is given."""
        return (self.outputs or self.inputs)[0]

    def dtype(self, convolution: bool = False) -> str:
        """As the matrix units see it. cuDNN may use TF32 unless told otherwise, cuBLAS only when told so."""
        dtype = (self.inputs or self.outputs)[0].dtype
        if dtype == "float32" and (self.tf32 or convolution):
            return "tfloat32"
        return "float8" if dtype.startswith("float8") else "float32" if dtype.startswith("complex") else dtype

    def moved(self) -> int:
        """Bytes read and written; an operator in place writes its first input."""
        in_place = () if self.outputs or not self.name.endswith("_") else self.inputs[:1]
        return total(self.inputs) + total(self.outputs) + total(in_place)

    def streaming(self, moved: float, share: float) -> float:
        """How long so many bytes take at a share of the memory bandwidth."""
        return moved / (self.device.memory.bandwidth * share)

    def streamed(self, moved: float, share: float, start: float = SHORTEST) -> int:
        """A kernel that moves so many bytes."""
        return lasts(start, self.streaming(moved, share))

    def each(self, count: float, rate: float) -> float:
        """How long so many elements take, at so many a nanosecond on each multiprocessor."""
        return count / (self.device.multiprocessors * rate)

    def strided(self, count: float) -> int:
        """A kernel that reaches so many elements one by one."""
        return lasts(SHORTEST, self.each(count, 4.0 * self.device.efficiency.strided))
