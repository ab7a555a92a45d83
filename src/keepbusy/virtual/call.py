"""One operator as it was called, and what the laws of its cost have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepbusy.virtual.device import Device
from keepbusy.virtual.operands import Operand, total

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
