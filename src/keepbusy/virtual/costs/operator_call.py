"""One operator as it was called: its tensors, and how long so many bytes or elements take on its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.figures import figures

Shape: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[Shape, str, Shape]
"""A tensor, hashable: its shape, the name of its type ("bfloat16") and its strides."""
Kernel: TypeAlias = tuple[str, int]
"""Its name, and how long it runs."""

SHORTEST: int = figures("kernel").shortest
"""Nanoseconds of the shortest kernel."""
_SIZES = {
    "float64": 8, "int64": 8, "complex64": 8, "uint64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "complex32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


def elements(one: Operand) -> int:
    return prod(one[0])


def item_size(dtype: str) -> int:
    """Bytes an element; one for the small types."""
    return _SIZES.get(dtype, 1)


def size(one: Operand) -> int:
    """Bytes that a kernel touches: of an expanded tensor, those that exist."""
    return prod(length for length, stride in zip(one[0], one[2], strict=True) if stride) * item_size(one[1])


def total(operands: Iterable[Operand]) -> int:
    return sum(map(size, operands))


def largest(operands: Iterable[Operand]) -> Operand:
    return max(operands, key=elements)


def dense(one: Operand) -> bool:
    """Whether its elements fill their memory, in whatever order of dimensions."""
    return _fills(sorted((stride, length) for length, stride in zip(one[0], one[2], strict=True) if length != 1))


def contiguous(one: Operand) -> bool:
    """Whether its elements fill their memory in the order of its dimensions."""
    return _fills((stride, length) for length, stride in zip(reversed(one[0]), reversed(one[2]), strict=True))


def _fills(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Given stride and length, from the innermost dimension on."""
    expected = 1
    for stride, length in dimensions:
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def same_layout(one: Operand, other: Operand) -> bool:
    """Whether two tensors lie in memory in the same order."""
    return one[0] == other[0] and all(
        mine == its for length, mine, its in zip(one[0], one[2], other[2], strict=True) if length != 1
    )


def channels_last(one: Operand) -> bool:
    return len(one[0]) >= 4 and one[2][1] == 1 and one[0][1] > 1


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
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    arguments: Mapping[str, Any]
    tf32: bool = False

    def dtype(self, convolution: bool = False) -> str:
        """As the matrix units see it. cuDNN may use TF32 unless told otherwise, cuBLAS only when told so."""
        dtype = self.inputs[0][1] if self.inputs else self.outputs[0][1]
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
