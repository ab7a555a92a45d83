"""Operators that compute, as products: matrices, attention, recurrent layers."""

from __future__ import annotations

from math import prod

from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.operands import (
    LEAST,
    Call,
    Kernel,
    Operand,
    channels_last,
    elements,
    item_size,
    size,
    total,
)

# How long matrix products and attention take: tiles on multiprocessors.
#
# A product is cut into tiles, and the multiprocessors take one each, wave after wave; the last wave
# may be nearly empty. A long inner dimension is split where that fills the waves. Numbers in capitals
# were fitted to 75 products of five models on an H200 (mean error 4.5%): they belong to no case.

_TILES = {
    (256, 128): 1.0,
    (128, 256): 1.0,
    (192, 192): 1.0,
    (128, 128): 0.95,
    (128, 64): 0.8,
    (64, 128): 0.8,
    (64, 64): 0.6,
}
_SIMT_TILES = {**_TILES, (64, 32): 0.5, (32, 32): 0.45}
"""Tiles, and which share of the best rate their inner loop reaches; without tensor cores smaller ones are worth it."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LEAST_SPLIT = 256
PROLOGUE, _SIMT_PROLOGUE = 160, 16
"""Filling and draining a tile's pipeline takes as long as this much of the inner dimension."""
START = 2_500
SUMMING = 3_500
LONG = 500_000
"""A product that runs longer than this meets the limit of power."""
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8", "float64")
_ATTENTION_TILE, _ATTENTION_START = 128, 3_500
_TILE_FORWARD, _TILE_BACKWARD = (1_000.0, 10.2, 0.45), (2_300.0, 26.5, 0.5)
"""Of a tile of queries: nanoseconds to begin, for each key with heads of 64, and the power at which wider heads take
longer; of an H200, whose rate and multiprocessors follow."""
_ATTENTION_RATE, _ATTENTION_BLOCKS = 989_000.0, 132


def product(
    device: Device, rows: int, columns: int, inner: int, dtype: str, size: int, batch: int = 1, moved: int = 0
) -> int:
    """`size`: bytes of an element; `moved`: bytes in all, where they are fewer than those of the matrices."""
    if not rows * columns * inner * batch:
        return START
    tiles = _TILES if dtype in _TENSOR_CORES else _SIMT_TILES
    best = min(_tiled(device, rows, columns, inner, dtype, tile, split, batch) for tile in tiles for split in _SPLITS)
    moved = moved or batch * (rows * inner + inner * columns + rows * columns) * size
    streamed = moved / (device.memory.bandwidth * device.efficiency.streaming)
    return round(START + max(_powered(device, best, 2.0 * batch * rows * columns * inner, dtype), streamed))


def _tiled(
    device: Device, rows: int, columns: int, inner: int, dtype: str, tile: tuple[int, int], split: int, batch: int
) -> float:
    if split > 1 and inner // split < _LEAST_SPLIT:
        return float("inf")
    tiles = batch * -(-rows // tile[0]) * -(-columns // tile[1]) * split
    waves = -(-tiles // device.multiprocessors)
    rate = best_rate(device, dtype) * _SIMT_TILES[tile] / device.multiprocessors
    prologue = PROLOGUE if dtype in _TENSOR_CORES else _SIMT_PROLOGUE
    spent = waves * 2.0 * tile[0] * tile[1] * (-(-inner // split) + prologue) / rate
    return spent if split == 1 else spent + SUMMING + 8.0 * batch * rows * columns / device.memory.bandwidth


def best_rate(device: Device, dtype: str) -> float:
    share = device.efficiency.matrix if dtype in _TENSOR_CORES else device.efficiency.simt
    return device.rate(dtype) * share


def _powered(device: Device, spent: float, operations: float, dtype: str) -> float:
    if spent <= LONG or dtype not in _TENSOR_CORES:
        return spent
    return LONG + (spent - LONG) / spent * operations / (device.rate(dtype) * device.efficiency.sustained)


def attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, dtype: str, backward: bool = False
) -> list[Kernel]:
    """Recognised whole: one kernel forward, three backward. `heads`: over the batch."""
    tensor = dtype in _TENSOR_CORES
    whole = _tiled_attention if tensor else _plain_attention
    spent = round(whole(device, heads, queries, keys, width, causal, backward))
    if not backward:
        return [("flash_attention_forward", spent)]
    moved = heads * queries * width * (2 if tensor else 4)
    bandwidth = device.memory.bandwidth
    return [
        ("flash_attention_dot", round(1_000 + 2 * moved / (bandwidth * 0.38))),
        ("flash_attention_backward", spent),
        ("flash_attention_convert", round(1_000 + 3 * moved / (bandwidth * 0.67))),
    ]


def _tiled_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """A block for each tile of queries, past all of its keys; backward the other way round."""
    mine, others = (keys, queries) if backward else (queries, keys)
    tile = _ATTENTION_TILE
    padded = -(-others // tile) * tile
    passed = (padded + tile) / 2 if causal else padded
    begin, each, wider = _TILE_BACKWARD if backward else _TILE_FORWARD
    slower = _ATTENTION_RATE / device.rate("bfloat16") * device.multiprocessors / _ATTENTION_BLOCKS
    waves = -(-heads * -(-mine // tile) // device.multiprocessors)
    return _ATTENTION_START + waves * (begin + passed * each * max(1.0, width / 64) ** wider) * slower


def _plain_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """Without tensor cores: arithmetic, over tiles of 64."""
    length, depth = (-(-one // 64) * 64 for one in (queries, keys))
    operations = 4.0 * heads * length * depth * width * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    share = 0.45 if width <= 64 or backward else 0.62
    return _ATTENTION_START + operations / (device.rate("float32") * share)


# How long convolutions take: implicit products over channels last, and what cuDNN does around them.
#
# Numbers in capitals were fitted to kernels of an H200 at plain shapes: tests/gpu/truth/operator_costs.json.gz.

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
_CONVOLUTION_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8")


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
    if channels < CHANNELS and call.dtype(convolution=True) in _CONVOLUTION_CORES:
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
    if call.dtype(convolution=True) not in _CONVOLUTION_CORES or len(source[0]) != 4 or source[0][1] == 1:
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


PRODUCTS = (
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot",
    "_scaled_mm", "_int_mm", "_addmm_activation", "addr", "outer", "linalg_vecdot",
)  # fmt: skip
ATTENTION = (
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
ATTENTION_BACKWARD = tuple(f"{name}_backward" for name in ATTENTION)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn")
RECURRENT_BACKWARD = tuple(f"{name}_backward" for name in RECURRENT)

_GATES, _THIN, _THIN_BACKWARD = 2_000, 2.0, 3.0
"""A step of a recurrent layer: its gates, and how much longer its thin product takes than the best; nothing can run
beside them."""


def matrix_product(call: Call) -> list[Kernel]:
    matrices = [one for one in call.inputs if len(one[0]) >= 1]
    two = matrices[-2:] if call.name.startswith(("add", "badd", "_addmm")) and len(matrices) > 2 else matrices[:2]
    if len(two) < 2:
        return [("gemm", 2_500)]
    left, right = two
    if call.name == "addr" or call.name == "outer" or len(left[0]) == 1 or len(right[0]) == 1:
        return [("gemv", round(2_000 + total((left, right, *call.outputs)) / (call.bandwidth * 0.56)))]
    inner = left[0][-1]
    columns = right[0][-2] if call.name == "linear" else right[0][-1]
    folds = call.name in ("linear", "matmul") and len(right[0]) == 2
    batch = 1 if folds else prod(left[0][:-2]) if len(left[0]) > 2 else prod(right[0][:-2])
    rows = prod(left[0][:-1]) if folds else left[0][-2]
    dtype = call.dtype()
    if min(rows, columns) == 1:
        return [("gemv", round(2_000 + total((left, right)) / (call.bandwidth * 0.56)))]
    return [(f"gemm_{dtype}", product(call.device, rows, columns, inner, dtype, item_size(left[1]), batch))]


def attend(call: Call) -> list[Kernel]:
    return _attention(call, call.inputs[0], call.inputs[1], False)


def attend_backward(call: Call) -> list[Kernel]:
    """Its inputs begin with the gradient of the result, or with the query."""
    first = call.inputs[0]
    same = [one for one in call.inputs if len(one[0]) == 4 and one[0][-1] == first[0][-1]]
    keys = same[2] if len(same) > 3 else same[min(1, len(same) - 1)]
    return _attention(call, first, keys, True)


def _attention(call: Call, query: Operand, key: Operand, backward: bool) -> list[Kernel]:
    *heads, queries, width = query[0]
    causal = bool(call.asked.get("is_causal", False))
    return attention(call.device, prod(heads), queries, key[0][-2], width, causal, call.dtype(), backward)


def attend_whole(call: Call) -> list[Kernel]:
    """Its projections with it: queries, keys and values at once, and what comes out."""
    (batch, length, width), dtype = call.inputs[0][0], call.dtype()
    heads = int(call.asked.get("num_head", 1))
    inner, size = width // max(1, heads), item_size(call.inputs[0][1])
    into = product(call.device, batch * length, 3 * width, width, dtype, size)
    out = product(call.device, batch * length, width, width, dtype, size)
    mixed = attention(call.device, batch * heads, length, length, inner, False, dtype)
    return [(f"gemm_{dtype}", into), *mixed, (f"gemm_{dtype}", out)]


def recur(call: Call) -> list[Kernel]:
    """cuDNN's recurrent layers: the products over the whole input at once, then step after step."""
    source = call.inputs[0]
    weights = [one for one in call.inputs[1:] if len(one[0]) == 2]
    layers = max(1, len(weights) // 2)
    packed = int(call.asked.get("batch_sizes", 0))
    steps = packed or source[0][0]
    batch = source[0][1] if len(source[0]) == 3 else -(-source[0][0] // steps)
    backward = call.name.endswith("_backward")
    kernels: list[Kernel] = []
    for layer in range(layers):
        whole, again = weights[2 * layer : 2 * layer + 2] if len(weights) >= 2 else (source, source)
        dtype, width = call.dtype(convolution=True), item_size(source[1])
        inputs = product(call.device, steps * batch, whole[0][0], whole[0][1], dtype, width)
        again_and_again = product(call.device, batch, again[0][0], again[0][1], dtype, width) - START
        step = START + _GATES + round(again_and_again * (_THIN_BACKWARD if backward else _THIN))
        kernels += [("rnn_input_gemm", inputs)] * (2 if backward else 1)
        kernels += [("rnn_step", step)] * (steps * (2 if backward else 1))
    return kernels
