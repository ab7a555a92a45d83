"""Operators that compute, as products; and those that run over lists of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from keepbusy.virtual.device import Device
from keepbusy.virtual.operands import Kernel, Operand, channels_last, elements, item_size, size, total
from keepbusy.virtual.products import CHANNELS, attention, convolution, product

PRODUCTS = (
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot",
    "_scaled_mm", "_int_mm", "_addmm_activation", "addr", "outer", "linalg_vecdot",
)  # fmt: skip
CONVOLUTIONS = (
    "convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d",
    "cudnn_convolution_transpose", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d",
    "mkldnn_convolution",
)  # fmt: skip
CONVOLUTIONS_BACKWARD = ("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward")
ATTENTION = (
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
ATTENTION_BACKWARD = tuple(f"{name}_backward" for name in ATTENTION)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn")
RECURRENT_BACKWARD = tuple(f"{name}_backward" for name in RECURRENT)

LEAST = 1_000
"""The shortest kernel, in nanoseconds."""
CHUNK, BLOCKS = 65_536, 320
"""Elements of a block, and blocks of a launch, of PyTorch's multi-tensor kernels."""
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_PADDING = 0.35
"""Of the memory bandwidth: padding the channels of an image."""
_STEP = 5_000
"""A step of a recurrent layer: its product and its gates, which nothing can run beside."""


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

    def strided(self, count: int) -> int:
        """How long so many elements take that lie apart."""
        return round(LEAST + count / (self.device.multiprocessors * 4.0 * self.device.efficiency.strided))


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


def convolve(call: Call) -> list[Kernel]:
    source, filters = call.inputs[0], call.inputs[1]
    result = call.outputs[0] if call.outputs else source
    kernels = [*_conversion(call, source), *_convolution(call, source, filters, result, "forward")]
    if len(call.inputs) > 2:
        kernels.append(("elementwise_bias", call.strided(elements(result))))
    return kernels


def convolve_backward(call: Call) -> list[Kernel]:
    """The gradients that were asked for: their shapes tell which."""
    grad, source, filters = call.inputs[:3]
    kernels = _conversion(call, grad)
    for result in call.outputs:
        if result[0] == source[0]:
            kernels += _convolution(call, source, filters, grad, "input")
        elif result[0] == filters[0]:
            kernels += _convolution(call, source, filters, grad, "weight")
        elif len(result[0]) == 1:
            share = columns_share(call.device, result[0][0])
            kernels.append(("reduce_sum", round(7_000 + size(grad) / (call.bandwidth * share))))
    return kernels


def columns_share(device: Device, columns: int) -> float:
    """Of the memory bandwidth, what a sum over rows reaches: few columns leave most of the device idle."""
    return device.efficiency.columns * min(1.0, max(0.3, columns / 1800))


def _convolution(call: Call, source: Operand, filters: Operand, result: Operand, turn: str) -> list[Kernel]:
    groups = int(call.asked.get("groups", 1))
    transposed = bool(call.asked.get("transposed", False))
    if transposed:
        source, result = result, source
        turn = {"forward": "input", "input": "forward"}.get(turn, turn)
    positions = result[0][0] * prod(result[0][2:])
    padding = _padding(call, source, filters) if turn != "input" else []
    return padding + convolution(
        call.device,
        positions,
        filters[0][0],
        filters[0][1] * groups,
        prod(filters[0][2:]),
        groups,
        call.dtype(convolution=True),
        item_size(source[1]),
        turn,
    )


def _padding(call: Call, source: Operand, filters: Operand) -> list[Kernel]:
    """Images have three channels, and tensor cores want eight."""
    if filters[0][1] >= CHANNELS or call.dtype(convolution=True) in ("float32", "float64") or filters[0][1] == 1:
        return []
    padded = size(source) / source[0][1] * CHANNELS
    return [
        ("fill", round(900 + padded / (call.bandwidth * call.device.efficiency.streaming))),
        ("conv_pad_channels", round(1_500 + 1.4 * padded / (call.bandwidth * _PADDING))),
    ]


def _conversion(call: Call, source: Operand) -> list[Kernel]:
    """Tensor cores read channels last; what lies otherwise is transposed before and after."""
    if len(source[0]) != 4 or channels_last(source) or call.dtype(convolution=True) in ("float32", "float64"):
        return []
    results = total(call.outputs)
    spent = 2.0 * (size(source) + results) / (call.bandwidth * call.device.efficiency.mixed)
    return [("nchw_to_nhwc", round(1_500 + spent))]


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


def recur(call: Call) -> list[Kernel]:
    """cuDNN's recurrent layers: the products over the whole input at once, then step after step."""
    source = call.inputs[0]
    weights = [one for one in call.inputs[1:] if len(one[0]) == 2]
    layers = max(1, len(weights) // 2)
    steps, batch = (source[0][0], source[0][1]) if len(source[0]) == 3 else (source[0][0], 1)
    times = 2 if call.name.endswith("_backward") else 1
    kernels: list[Kernel] = []
    for layer in range(layers):
        whole, again = weights[2 * layer : 2 * layer + 2] if len(weights) >= 2 else (source, source)
        dtype, width = call.dtype(convolution=True), item_size(source[1])
        kernels += [
            ("rnn_input_gemm", product(call.device, steps * batch, whole[0][0], whole[0][1], dtype, width))
        ] * times
        step = max(_STEP, product(call.device, batch, again[0][0], again[0][1], dtype, width) + 2_000)
        kernels += [("rnn_step", step)] * (steps * times)
    return kernels


def multi_tensor(call: Call) -> list[Kernel]:
    """foreach and fused optimizers: blocks of all tensors in as few launches as their tables hold."""
    lists = max(1, int(call.asked.get("lists", 0)) or _lists(call))
    count = max(1, len(call.inputs) // lists)
    first = call.inputs[:count]
    deep = lists + (1 if call.outputs and not call.name.endswith("_") else 0)
    launches = _launches(first, _MOST_TENSORS.get(deep, 30))
    moved = total(call.inputs) + (total(call.outputs) if deep > lists else total(first) * _written(call, lists))
    share = moved / max(1, sum(launches)) / (call.bandwidth * call.device.efficiency.foreach)
    return [(f"multi_tensor{call.name.rstrip('_')}", round(2_000 + part * share)) for part in launches]


def _written(call: Call, lists: int) -> int:
    """How many lists are written: fused Adam writes the parameters and both averages."""
    if not call.name.startswith("_fused_"):
        return 1
    return max(1, min(lists, 4) - 1)


def _lists(call: Call) -> int:
    """How many lists of equal shapes the inputs may be made of."""
    shapes = [one[0] for one in call.inputs]
    for lists in (5, 4, 3, 2):
        part = len(shapes) // lists
        same = len(shapes) == part * lists and all(shapes[i] == shapes[i % part] for i in range(len(shapes)))
        if part and same and len(set(shapes)) > 1:
            return lists
    return 1


def _launches(tensors: tuple[Operand, ...], most: int) -> list[int]:
    """Elements of each launch."""
    launches, blocks, held, here = [], 0, 0, 0
    for tensor in tensors:
        left = elements(tensor)
        held += 1
        while left > 0:
            part = min(left, CHUNK)
            left -= part
            here += part
            blocks += 1
            if blocks == BLOCKS or (held == most and left == 0):
                launches.append(here)
                blocks, here, held = 0, 0, int(left > 0)
    return [*launches, here] if here or not launches else launches
