"""Operators that compute, as products: matrices, attention, recurrent layers."""

from __future__ import annotations

from math import prod

from keepbusy.virtual.call import Call
from keepbusy.virtual.operands import Kernel, Operand, item_size, total
from keepbusy.virtual.products import START, attention, product

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
