"""How long convolutions take: implicit products over channels last, and what cuDNN does around them.

Numbers in capitals were fitted to kernels of an H200 at plain shapes: tests/gpu/truth/operator_costs.json.gz.
"""

from __future__ import annotations

from math import prod

from keepbusy.virtual.call import LEAST, Call
from keepbusy.virtual.device import Device
from keepbusy.virtual.operands import Kernel, Operand, channels_last, elements, item_size, size, total
from keepbusy.virtual.products import START, product

CONVOLUTIONS = (
    "convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d",
    "cudnn_convolution_transpose", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d",
    "mkldnn_convolution",
)  # fmt: skip
CONVOLUTIONS_BACKWARD = ("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward")

CHANNELS = 8
"""Tensor cores want so many; the three of an image are padded."""
_GATHERING = 2_500
"""What finding its pixels costs an implicit product."""
_WEIGHT = {"tfloat32": (1.3, 30_000)}
_WEIGHT_USUAL = (1.08, 8_000)
"""A filter's gradient sums over all positions, in parts that are added up: slower than a product of its size."""
_PADDING = 0.35
"""Of the memory bandwidth: padding the channels of an image."""
_TRANSPOSING, _TRANSPOSING_FILTERS = 4.4, 1.4
"""Elements a nanosecond a multiprocessor, from channels first to channels last: of images, and of filters."""
_TRANSPOSED_BYTES = 0.72
_SHALLOW, _SHALLOW_TAP, _SHALLOW_WEIGHT = 3.2e-3, 12.3e-6, 4.7e-3
"""Nanoseconds an element of the result, and for each of its taps and channels, where an image is the input."""
_DEPTHWISE = {  # nanoseconds an element of the result, and for each of its taps
    ("forward", False): (4.6e-3, 0.58e-3),
    ("input", False): (2.6e-3, 1.33e-3),
    ("weight", False): (11.8e-3, 0.65e-3),
    ("forward", True): (0.9e-3, 0.14e-3),
    ("input", True): (0.4e-3, 0.34e-3),
    ("weight", True): (1.3e-3, 0.13e-3),
}
"""A channel by itself: by turn, and whether channels come last."""
_MEASURED_ON = 132
"""Multiprocessors of the device that these were measured on."""
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8")


def convolve(call: Call) -> list[Kernel]:
    source, filters = call.inputs[0], call.inputs[1]
    result = call.outputs[0] if call.outputs else source
    kernels = _turn(call, source, filters, result, "forward")
    if len(call.inputs) > 2:
        kernels.append(("elementwise_bias", call.strided(elements(result))))
    return kernels


def convolve_backward(call: Call) -> list[Kernel]:
    """The gradients that were asked for: their shapes tell which."""
    grad, source, filters = call.inputs[:3]
    kernels: list[Kernel] = []
    for result in call.outputs:
        if result[0] == source[0]:
            kernels += _turn(call, source, filters, grad, "input")
        elif result[0] == filters[0]:
            kernels += _turn(call, source, filters, grad, "weight")
        elif len(result[0]) == 1:
            share = columns_share(call.device, result[0][0])
            kernels.append(("reduce_sum", round(7_000 + size(grad) / (call.bandwidth * share))))
    return kernels


def columns_share(device: Device, columns: int) -> float:
    """Of the memory bandwidth, what a sum over rows reaches: few columns leave most of the device idle."""
    return device.efficiency.columns * min(1.0, max(0.3, columns / 1800))


def _turn(call: Call, source: Operand, filters: Operand, result: Operand, turn: str) -> list[Kernel]:
    """Forward, or one of the gradients; a transposed convolution is the other way round."""
    groups = int(call.asked.get("groups", 1))
    if call.asked.get("transposed", False):
        source, result = result, source
        turn = {"forward": "input", "input": "forward"}.get(turn, turn)
    channels, taps = filters[0][1], prod(filters[0][2:])
    if groups > 1 and channels == 1:
        return _depthwise(call, source, result, taps, turn)
    if channels < CHANNELS and call.dtype(convolution=True) in _TENSOR_CORES:
        return [*_conversions(call, source, result), *_padding(call, source, channels), *_shallow(result, taps, turn)]
    around = [] if _is_product(call, source, taps) else _conversions(call, source, result, filters)
    return [*around, _product(call, source, filters, result, turn, groups)]


def _product(call: Call, source: Operand, filters: Operand, result: Operand, turn: str, groups: int) -> Kernel:
    """As a product of matrices whose bytes are those of the images."""
    dtype, width = call.dtype(convolution=True), item_size(source[1])
    positions = result[0][0] * prod(result[0][2:])
    channels, taps, out = filters[0][1], prod(filters[0][2:]), filters[0][0] // groups
    rows, columns, inner = positions, out, channels * taps
    if turn == "input":
        columns, inner = channels, out * taps
    elif turn == "weight":
        rows, columns, inner = out, channels * taps, positions
    moved = (elements(source) + elements(result) + elements(filters)) * width
    spent = product(call.device, rows, columns, inner, dtype, width, groups, moved)
    if turn == "weight":
        times, adding = _WEIGHT.get(dtype, _WEIGHT_USUAL)
        spent = round(spent * times) + adding
    return f"conv_{turn}_{dtype}", spent + (_GATHERING if taps > 1 else 0)


def _is_product(call: Call, source: Operand, taps: int) -> bool:
    """One tap at every pixel needs no other layout: a plain product does."""
    strides = call.asked.get("stride", ())
    return taps == 1 and all(one == 1 for one in strides) and len(source[0]) > 2


def _conversions(call: Call, source: Operand, result: Operand, filters: Operand | None = None) -> list[Kernel]:
    """Tensor cores read channels last; what lies otherwise is transposed before and after."""
    if call.dtype(convolution=True) not in _TENSOR_CORES or len(source[0]) != 4 or source[0][1] == 1:
        return []
    kernels = [_conversion(call, one) for one in (source, result) if not channels_last(one)]
    if kernels and filters is not None:
        kernels.append(("nchw_to_nhwc", round(1_700 + call.each(elements(filters), _TRANSPOSING_FILTERS))))
    return kernels


def _conversion(call: Call, one: Operand) -> Kernel:
    streamed = 2 * size(one) / (call.bandwidth * _TRANSPOSED_BYTES)
    return "nchw_to_nhwc", round(1_500 + max(streamed, call.each(elements(one), _TRANSPOSING)))


def _padding(call: Call, source: Operand, channels: int) -> list[Kernel]:
    """Images have three channels, and tensor cores want eight."""
    if channels == 1:
        return []
    padded = size(source) / source[0][1] * CHANNELS
    return [
        ("fill", round(900 + padded / (call.bandwidth * call.device.efficiency.streaming))),
        ("conv_pad_channels", round(1_500 + 1.4 * padded / (call.bandwidth * _PADDING))),
    ]


def _shallow(result: Operand, taps: int, turn: str) -> list[Kernel]:
    """Few channels feed the tensor cores badly: the results set the time."""
    count = elements(result)
    if turn == "weight":
        return [(f"conv_{turn}", round(8_000 + count * _SHALLOW_WEIGHT))]
    return [(f"conv_{turn}", round(START + count * (_SHALLOW + _SHALLOW_TAP * taps * CHANNELS)))]


def _depthwise(call: Call, source: Operand, result: Operand, taps: int, turn: str) -> list[Kernel]:
    each, tap = _DEPTHWISE[turn, channels_last(source)]
    slower = _MEASURED_ON / call.device.multiprocessors
    spent = elements(result) * (each + tap * taps) * slower
    streamed = total((source, result)) / (call.bandwidth * call.device.efficiency.streaming)
    return [(f"conv_depthwise_{turn}", round(LEAST + max(spent, streamed)))]
