"""What costs need to know of a tensor: its shape, type and strides, as a plain hashable tuple."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TypeAlias

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
