"""Normalisations: a pass for the statistics, a pass for the result, and what their gradients take.

Numbers in capitals were fitted to kernels of an H200 at plain shapes: tests/gpu/truth/operator_costs.json.gz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepbusy.virtual.call import Call
from keepbusy.virtual.operands import Kernel, channels_last, elements, item_size, size

_ROW, _ROW_BACKWARD = 1.4, 0.95
"""Nanoseconds a row of layer norm, however short it is."""
_HALF = 3.3
"""Elements a nanosecond a multiprocessor: of half the bytes a normalised element takes no less than this."""
_SUMMED, _SUMMED_LONG, _LONG, _WIDE = 3.0, 4.3, 8_192, 1_024
"""Nanoseconds a row for the gradients of weights, and where there are more rows than so many; up to which width."""


def layer_norm(call: Call) -> list[Kernel]:
    source = call.inputs[0]
    moved = size(source) + size(call.outputs[0] if call.outputs else source)
    streamed = moved / (call.bandwidth * call.device.efficiency.norm)
    return [("layer_norm", round(2_500 + max(streamed, _rows(call) * _ROW, call.each(elements(source), _HALF))))]


def layer_norm_backward(call: Call) -> list[Kernel]:
    moved, efficiency = size(call.inputs[0]) + size(call.inputs[1]), call.device.efficiency
    streamed = 1.5 * moved / (call.bandwidth * efficiency.streaming)
    kernels = [("layer_norm_grad_input", round(2_000 + max(streamed, _rows(call) * _ROW_BACKWARD)))]
    if len(call.outputs) > 1:
        rows, wide = _rows(call), max(1.0, call.inputs[0][0][-1] / _WIDE if call.inputs[0][0] else 1.0)
        summed = rows * wide * (_SUMMED if rows < _LONG else _SUMMED_LONG)
        streamed = moved / (call.bandwidth * efficiency.streaming)
        kernels.append(("layer_norm_grad_weight", round(4_000 + max(streamed, summed))))
    return kernels


def _rows(call: Call) -> float:
    shape = call.inputs[0][0]
    return elements(call.inputs[0]) / max(1, shape[-1]) if shape else 1.0


@dataclass(frozen=True)
class Pass:
    """One kernel over an image: how often it moves the bytes, at which share of the bandwidth."""

    name: str
    times: float
    share: str
    least: int = 2_000

    def kernel(self, call: Call) -> Kernel:
        moved = self.times * size(call.inputs[0])
        return self.name, call.streamed(moved, getattr(call.device.efficiency, self.share), self.least)


@dataclass(frozen=True)
class Strided:
    """One kernel over an image whose elements are reached one by one."""

    name: str
    share: float = 1.0

    def kernel(self, call: Call) -> Kernel:
        return self.name, call.strided(elements(call.inputs[0]) * self.share)


@dataclass(frozen=True)
class Fixed:
    """One kernel over a value a channel."""

    name: str
    work: int

    def kernel(self, call: Call) -> Kernel:
        return self.name, self.work


@dataclass(frozen=True)
class Channels:
    """One kernel with a block for each channel, nanoseconds an element: few channels leave most of the device idle."""

    name: str
    each: float

    def kernel(self, call: Call) -> Kernel:
        shape = call.inputs[0][0]
        channels = shape[1] if len(shape) > 1 else 1
        alone = elements(call.inputs[0]) / max(1, channels) * self.each
        return self.name, round(3_000 + call.waves(channels) * alone)


_Passes = tuple[Pass | Strided | Fixed | Channels, ...]
GROUP_NORM: _Passes = (
    Pass("group_norm_moments", 1, "norm", 6_000),
    Fixed("group_norm_parameters", 1_500),
    Strided("group_norm_apply", 0.9),
)
GROUP_NORM_BACKWARD: _Passes = (
    Pass("group_norm_sums", 2, "norm", 4_000), Fixed("group_norm_parameters", 3_400),
    Strided("group_norm_grad_input", 1.2), Fixed("group_norm_grad_weight", 4_000),
)  # fmt: skip
BATCH_NORM: _Passes = (
    Pass("batch_norm_statistics", 1, "statistics", 5_000), Fixed("batch_norm_running", 1_300),
    Pass("batch_norm_transform", 2, "columns"),
)  # fmt: skip
BATCH_NORM_BACKWARD: _Passes = (
    Pass("batch_norm_reduce", 2, "norm", 4_000), Pass("batch_norm_grad_input", 3, "heavy", 3_000),
)  # fmt: skip
BATCH_NORM_FIRST: _Passes = (
    Channels("batch_norm_statistics", 0.5), Fixed("batch_norm_running", 1_300), Strided("batch_norm_transform"),
)  # fmt: skip
"""Channels first, and half precision: PyTorch's own kernels; in full precision cuDNN does it in one."""
BATCH_NORM_FIRST_BACKWARD: _Passes = (Channels("batch_norm_backward", 1.0),)
BATCH_NORM_CUDNN: _Passes = (Channels("batch_norm_cudnn", 0.43),)
BATCH_NORM_CUDNN_BACKWARD: _Passes = (Channels("batch_norm_cudnn_backward", 0.8),)


def _passes(passes: _Passes) -> Callable[[Call], list[Kernel]]:
    return lambda call: [one.kernel(call) for one in passes]


def _batch_norm(last: _Passes, first: _Passes, full: _Passes) -> Callable[[Call], list[Kernel]]:
    """By whether channels come last in memory, and by the type."""

    def kernels(call: Call) -> list[Kernel]:
        image = call.inputs[0]
        by_rows = channels_last(image) or len(image[0]) == 2
        passes = last if by_rows else full if item_size(image[1]) >= 4 else first
        return [one.kernel(call) for one in passes]

    return kernels


batch_norm = _batch_norm(BATCH_NORM, BATCH_NORM_FIRST, BATCH_NORM_CUDNN)
batch_norm_backward = _batch_norm(BATCH_NORM_BACKWARD, BATCH_NORM_FIRST_BACKWARD, BATCH_NORM_CUDNN_BACKWARD)

FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward", "rms_norm_backward"), layer_norm_backward
    ),
    "native_group_norm": _passes(GROUP_NORM),
    "native_group_norm_backward": _passes(GROUP_NORM_BACKWARD),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"), batch_norm
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"), batch_norm_backward
    ),
}
