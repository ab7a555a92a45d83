"""How long operators take that multiply: matrices, attention, convolutions, recurrent layers.

A product is cut into tiles, and the multiprocessors take one each, wave after wave; the last wave may be
nearly empty. A long inner dimension is split where that fills the waves. The figures are those of
figures.toml. Which operator follows which law stands in operator_costs.py.
"""

from __future__ import annotations

from math import prod

from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.costs.figures import figures
from keepbusy.virtual.costs.laws import columns_share
from keepbusy.virtual.costs.operator_call import (
    SHORTEST,
    Call,
    Kernel,
    NoLaw,
    Operand,
    channels_last,
    elements,
    item_size,
    lasts,
    size,
    total,
)

PRODUCTS, ATTENTION = figures("products"), figures("attention")
CONVOLUTIONS, RECURRENT = figures("convolutions"), figures("recurrent")
TILES = tuple((rows, columns, share) for rows, columns, share in PRODUCTS.tiles)
SIMT_TILES = (*TILES, *((rows, columns, share) for rows, columns, share in PRODUCTS.small_tiles))
_TENSOR_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8", "float64")
_CONVOLUTION_CORES = ("float16", "bfloat16", "tfloat32", "float8", "int8")

# Matrices


def matrix_product(call: Call) -> list[Kernel]:
    matrices = [one for one in call.inputs if len(one[0]) >= 1]
    adds = call.name.startswith(("add", "badd", "_addmm")) and len(matrices) > 2
    operands = matrices[-2:] if adds else matrices[:2]
    if len(operands) < 2:
        return [("gemm", PRODUCTS.start)]
    left, right = operands
    if call.name in ("addr", "outer") or len(left[0]) == 1 or len(right[0]) == 1:
        return [_vector_product(call, left, right, *call.outputs)]
    folds = call.name in ("linear", "matmul") and len(right[0]) == 2
    rows = prod(left[0][:-1]) if folds else left[0][-2]
    columns = right[0][-2] if call.name == "linear" else right[0][-1]
    if min(rows, columns) == 1:
        return [_vector_product(call, left, right)]
    batch = 1 if folds else prod(left[0][:-2]) if len(left[0]) > 2 else prod(right[0][:-2])
    dtype = call.dtype()
    return [(f"gemm_{dtype}", product(call.device, rows, columns, left[0][-1], dtype, item_size(left[1]), batch))]


def _vector_product(call: Call, *operands: Operand) -> Kernel:
    return "gemv", call.streamed(total(operands), PRODUCTS.vector_share, PRODUCTS.vector_start)


def product(
    device: Device, rows: int, columns: int, inner: int, dtype: str, width: int, batch: int = 1, moved: int = 0
) -> int:
    """`width`: bytes of an element; `moved`: bytes in all, where they are fewer than those of the matrices."""
    if not rows * columns * inner * batch:
        return int(PRODUCTS.start)
    cores = dtype in _TENSOR_CORES
    rate = device.rate(dtype) * (device.efficiency.matrix if cores else device.efficiency.simt)
    tiles, fill = (TILES, PRODUCTS.fill) if cores else (SIMT_TILES, PRODUCTS.fill_simt)
    spent = float("inf")
    for split in PRODUCTS.splits:
        if split > 1 and inner // split < PRODUCTS.least_split:
            continue
        written = 8.0 * batch * rows * columns / device.memory.bandwidth
        for high, wide, share in tiles:
            count = batch * -(-rows // high) * -(-columns // wide) * split
            waves = -(-count // device.multiprocessors)
            reached = rate * share / device.multiprocessors
            tiled = waves * 2.0 * high * wide * (-(-inner // split) + fill) / reached
            spent = min(spent, tiled if split == 1 else tiled + PRODUCTS.summing + written)
    if spent > PRODUCTS.long and cores:  # the limit of power
        operations = 2.0 * batch * rows * columns * inner
        beyond = (spent - PRODUCTS.long) / spent * operations
        spent = PRODUCTS.long + beyond / (device.rate(dtype) * device.efficiency.sustained)
    moved = moved or batch * (rows * inner + inner * columns + rows * columns) * width
    return lasts(PRODUCTS.start, spent, moved / (device.memory.bandwidth * device.efficiency.streaming))


# Attention, recognised whole: one kernel forward, three backward


def attend(call: Call) -> list[Kernel]:
    return _attention(call, call.inputs[0], call.inputs[1])


def attend_backward(call: Call) -> list[Kernel]:
    """Its inputs begin with the gradient of the result, or with the query."""
    query = call.inputs[0]
    same = [one for one in call.inputs if len(one[0]) == 4 and one[0][-1] == query[0][-1]]
    if not same:
        raise NoLaw("no heads of four dimensions")
    keys = same[2] if len(same) > 3 else same[min(1, len(same) - 1)]
    moved = prod(query[0]) * (2 if call.dtype() in _TENSOR_CORES else 4)
    dot, convert = ATTENTION.dot, ATTENTION.convert
    return [
        ("flash_attention_dot", call.streamed(2 * moved, dot["share"], dot["start"])),
        *_attention(call, query, keys, backward=True),
        ("flash_attention_convert", call.streamed(3 * moved, convert["share"], convert["start"])),
    ]


def attend_whole(call: Call) -> list[Kernel]:
    """Its projections with it: queries, keys and values at once, and what comes out."""
    if len(call.inputs[0][0]) != 3:
        raise NoLaw("not a batch of sequences")
    (batch, length, width), dtype = call.inputs[0][0], call.dtype()
    heads = int(call.arguments.get("num_head", 1))
    query: Operand = ((batch * heads, length, width // max(1, heads)), call.inputs[0][1], (1, 1, 1))
    item = item_size(call.inputs[0][1])
    into = product(call.device, batch * length, 3 * width, width, dtype, item)
    out = product(call.device, batch * length, width, width, dtype, item)
    return [(f"gemm_{dtype}", into), *_attention(call, query, query), (f"gemm_{dtype}", out)]


def _attention(call: Call, query: Operand, key: Operand, backward: bool = False) -> list[Kernel]:
    *heads, queries, width = query[0]
    keys, causal = key[0][-2], bool(call.arguments.get("is_causal", False))
    attention = _tiled_attention if call.dtype() in _TENSOR_CORES else _plain_attention
    spent = attention(call.device, prod(heads), queries, keys, width, causal, backward)
    return [(f"flash_attention_{'backward' if backward else 'forward'}", lasts(ATTENTION.start, spent))]


def _tiled_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """A block for each tile of queries, past all of its keys; backward the other way round."""
    mine, others = (keys, queries) if backward else (queries, keys)
    tile = ATTENTION.tile
    padded = -(-others // tile) * tile
    passed = (padded + tile) / 2 if causal else padded
    law = ATTENTION.backward if backward else ATTENTION.forward
    slower = ATTENTION.rate / device.rate("bfloat16") * device.multiprocessors / ATTENTION.multiprocessors
    waves = -(-heads * -(-mine // tile) // device.multiprocessors)
    return float(waves * (law["begin"] + passed * law["each"] * max(1.0, width / 64) ** law["wider"]) * slower)


def _plain_attention(
    device: Device, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool
) -> float:
    """Without tensor cores: arithmetic, over tiles of 64."""
    length, depth = (-(-one // 64) * 64 for one in (queries, keys))
    operations = 4.0 * heads * length * depth * width * (0.5 if causal else 1.0)
    operations *= ATTENTION.plain_backward if backward else 1.0
    share = ATTENTION.plain_share if width <= 64 or backward else ATTENTION.plain_share_wide
    return float(operations / (device.rate("float32") * share))


# Convolutions: implicit products over channels last, and what cuDNN does around them


def convolve(call: Call) -> list[Kernel]:
    source, filters = call.inputs[0], call.inputs[1]
    result = call.outputs[0] if call.outputs else source
    kernels = _convolution(call, source, filters, result, "forward")
    if len(call.inputs) > 2:
        kernels.append(("elementwise_bias", call.strided(elements(result))))
    return kernels


def convolve_backward(call: Call) -> list[Kernel]:
    """The gradients that were asked for: their shapes tell which."""
    grad, source, filters = call.inputs[:3]
    kernels: list[Kernel] = []
    for result in call.outputs:
        if result[0] == source[0]:
            kernels += _convolution(call, source, filters, grad, "input")
        elif result[0] == filters[0]:
            kernels += _convolution(call, source, filters, grad, "weight")
        elif len(result[0]) == 1:
            share = columns_share(call.device, result[0][0])
            kernels.append(("reduce_sum", call.streamed(size(grad), share, CONVOLUTIONS.bias_start)))
    return kernels


def _convolution(call: Call, source: Operand, filters: Operand, result: Operand, turn: str) -> list[Kernel]:
    """Forward, or one of the gradients; a transposed convolution is the other way round."""
    groups, dtype = int(call.arguments.get("groups", 1)), call.dtype(convolution=True)
    if call.arguments.get("transposed", False):
        source, result = result, source
        turn = {"forward": "input", "input": "forward"}.get(turn, turn)
    channels, taps = filters[0][1], prod(filters[0][2:])
    if groups > 1 and channels == 1:
        return [_depthwise(call, source, result, taps, turn)]
    cores = dtype in _CONVOLUTION_CORES
    if cores and channels < CONVOLUTIONS.channels:
        return [*_transposed(call, source, result), *_padded(call, source, channels), _shallow(result, taps, turn)]
    # one tap at every pixel needs no other layout: a plain product does
    plain = taps == 1 and all(one == 1 for one in call.arguments.get("stride", ())) and len(source[0]) > 2
    around = _transposed(call, source, result, filters) if cores and not plain else []
    return [*around, _implicit_product(call, source, filters, result, turn, groups)]


def _implicit_product(call: Call, source: Operand, filters: Operand, result: Operand, turn: str, groups: int) -> Kernel:
    """As a product of matrices whose bytes are those of the images."""
    if not result[0]:
        raise NoLaw("a result without dimensions")
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
        law = CONVOLUTIONS.weight_tfloat32 if dtype == "tfloat32" else CONVOLUTIONS.weight
        spent = round(spent * law["times"]) + law["adding"]
    return f"conv_{turn}_{dtype}", spent + (CONVOLUTIONS.gathering if taps > 1 else 0)


def _transposed(call: Call, source: Operand, result: Operand, filters: Operand | None = None) -> list[Kernel]:
    """Tensor cores read channels last; what lies otherwise is transposed before and after."""
    if len(source[0]) != 4 or source[0][1] == 1:
        return []
    law, of_filters = CONVOLUTIONS.transposing, CONVOLUTIONS.transposing_filters
    kernels: list[Kernel] = []
    for one in (source, result):
        if not channels_last(one):
            limits = call.streaming(2 * size(one), law["share"]), call.each(elements(one), law["rate"])
            kernels.append(("nchw_to_nhwc", lasts(law["start"], *limits)))
    if kernels and filters is not None:
        turned = lasts(of_filters["start"], call.each(elements(filters), of_filters["rate"]))
        kernels.append(("nchw_to_nhwc", turned))
    return kernels


def _padded(call: Call, source: Operand, channels: int) -> list[Kernel]:
    """Images have three channels, and tensor cores want eight."""
    if channels == 1:
        return []
    if len(source[0]) < 2 or not source[0][1]:
        raise NoLaw("no channels")
    law, padded = CONVOLUTIONS.padding, size(source) / source[0][1] * CONVOLUTIONS.channels
    return [
        ("fill", call.streamed(padded, call.device.efficiency.streaming, law["clearing"])),
        ("conv_pad_channels", call.streamed(law["times"] * padded, law["share"], law["start"])),
    ]


def _shallow(result: Operand, taps: int, turn: str) -> Kernel:
    """Few channels feed the tensor cores badly: the results set the time."""
    count, law, weight = elements(result), CONVOLUTIONS.shallow, CONVOLUTIONS.shallow_weight
    if turn == "weight":
        return f"conv_{turn}", lasts(weight["start"], count * weight["each"])
    each = law["each"] + law["tap"] * taps * CONVOLUTIONS.channels
    return f"conv_{turn}", lasts(PRODUCTS.start, count * each)


def _depthwise(call: Call, source: Operand, result: Operand, taps: int, turn: str) -> Kernel:
    """A channel by itself."""
    law = CONVOLUTIONS.depthwise_last if channels_last(source) else CONVOLUTIONS.depthwise
    each, tap = law[turn]
    slower = CONVOLUTIONS.multiprocessors / call.device.multiprocessors
    streaming = call.streaming(total((source, result)), call.device.efficiency.streaming)
    return f"conv_depthwise_{turn}", lasts(SHORTEST, elements(result) * (each + tap * taps) * slower, streaming)


# Recurrent layers, cuDNN's: the products over the whole input at once, then step after step


def recur(call: Call) -> list[Kernel]:
    source, backward = call.inputs[0], call.name.endswith("_backward")
    weights = [one for one in call.inputs[1:] if len(one[0]) == 2]
    packed = int(call.arguments.get("batch_sizes", 0))
    steps = packed or source[0][0]
    if not steps and len(source[0]) != 3:
        raise NoLaw("no steps")
    batch = source[0][1] if len(source[0]) == 3 else -(-source[0][0] // steps)
    dtype, width = call.dtype(convolution=True), item_size(source[1])
    thin, times = (RECURRENT.thin_backward, 2) if backward else (RECURRENT.thin, 1)
    kernels: list[Kernel] = []
    for layer in range(max(1, len(weights) // 2)):
        of_input, of_state = weights[2 * layer : 2 * layer + 2] if len(weights) >= 2 else (source, source)
        whole = product(call.device, steps * batch, of_input[0][0], of_input[0][1], dtype, width)
        one = product(call.device, batch, of_state[0][0], of_state[0][1], dtype, width) - PRODUCTS.start
        step = PRODUCTS.start + RECURRENT.gates + round(one * thin)
        kernels += [("rnn_input_gemm", whole)] * times
        kernels += [("rnn_step", step)] * (steps * times)
    return kernels
