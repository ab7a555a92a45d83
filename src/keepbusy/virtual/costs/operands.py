"""One operator as it was called, and what the laws of its cost have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from keepbusy.virtual.costs.device import Device

# What costs need to know of a tensor: its shape, type and strides, as a plain hashable tuple.

Shape: TypeAlias = tuple[int, ...]
Operand: TypeAlias = tuple[Shape, str, Shape]
"""Shape, name of the type ("bfloat16") and strides."""
Kernel: TypeAlias = tuple[str, int]
"""Its name, and how long it runs."""

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


def dense(one: Operand) -> bool:
    """Whether its elements fill their memory, in whatever order of dimensions."""
    expected = 1
    for stride, length in sorted(
        (stride, length) for length, stride in zip(one[0], one[2], strict=True) if length != 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True


def contiguous(one: Operand) -> bool:
    """In the order of its dimensions."""
    expected = 1
    for length, stride in zip(reversed(one[0]), reversed(one[2]), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def alike(one: Operand, other: Operand) -> bool:
    """Whether two tensors lie in memory in the same order."""
    return one[0] == other[0] and all(
        mine == its for length, mine, its in zip(one[0], one[2], other[2], strict=True) if length != 1
    )


def largest(operands: Iterable[Operand]) -> Operand:
    return max(operands, key=elements)


def channels_last(one: Operand) -> bool:
    return len(one[0]) >= 4 and one[2][1] == 1 and one[0][1] > 1


LEAST = 1_000
"""The shortest kernel, in nanoseconds."""


@dataclass(frozen=True)
class Call:
    """One operator as it was called."""

    device: Device
    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    asked: dict[str, Any]
    tf32: bool = False

    def dtype(self, convolution: bool = False) -> str:
        """As the matrix units see it. cuDNN may use TF32 unless told otherwise, cuBLAS only when told so."""
        dtype = self.inputs[0][1] if self.inputs else self.outputs[0][1]
        if dtype == "float32" and (self.tf32 or convolution):
            return "tfloat32"
        return "float8" if dtype.startswith("float8") else "float32" if dtype.startswith("complex") else dtype

    @property
    def bandwidth(self) -> float:
        return self.device.memory.bandwidth

    def moved(self) -> int:
        """Bytes read and written; an operator in place writes its first input."""
        own = () if self.outputs or not self.name.endswith("_") else self.inputs[:1]
        return total(self.inputs) + total(self.outputs) + total(own)

    def streamed(self, moved: float, share: float, least: int = LEAST) -> int:
        """How long so many bytes take at a share of the memory bandwidth."""
        return round(least + moved / (self.bandwidth * share))

    def strided(self, count: float) -> int:
        """How long so many elements take that lie apart."""
        return round(LEAST + self.each(count, 4.0 * self.device.efficiency.strided))

    def each(self, count: float, rate: float) -> float:
        """How long so many elements take, at so many a nanosecond on each multiprocessor."""
        return count / (self.device.multiprocessors * rate)

    def waves(self, blocks: float) -> float:
        """How often the device is filled with so many blocks, a multiprocessor each; a part of once takes as long."""
        return max(1.0, blocks / self.device.multiprocessors)
