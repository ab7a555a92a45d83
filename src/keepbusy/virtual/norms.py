"""Normalisations: a pass for the statistics, a pass for the result, and what their gradients take."""

from __future__ import annotations

from collections.abc import Callable

from keepbusy.virtual.families import Call
from keepbusy.virtual.operands import Kernel, size


def layer_norm(call: Call) -> list[Kernel]:
    moved = size(call.inputs[0]) + size(call.outputs[0] if call.outputs else call.inputs[0])
    return [("layer_norm", call.streamed(moved, call.device.efficiency.norm, 2_500))]


def layer_norm_backward(call: Call) -> list[Kernel]:
    moved = size(call.inputs[0]) + size(call.inputs[1])
    kernels = [("layer_norm_grad_input", call.streamed(1.5 * moved, call.device.efficiency.streaming, 2_000))]
    if len(call.outputs) > 1:
        kernels.append(("layer_norm_grad_weight", call.streamed(moved, call.device.efficiency.norm * 0.63, 4_000)))
    return kernels


def group_norm(call: Call) -> list[Kernel]:
    moved, efficiency = size(call.inputs[0]), call.device.efficiency
    return [
        ("group_norm_moments", call.streamed(moved, efficiency.columns, 2_000)),
        ("group_norm_parameters", 1_500),
        ("group_norm_apply", call.streamed(2 * moved, efficiency.mixed)),
    ]


def group_norm_backward(call: Call) -> list[Kernel]:
    moved, efficiency = size(call.inputs[0]), call.device.efficiency
    return [
        ("group_norm_sums", call.streamed(2 * moved, efficiency.columns, 2_000)),
        ("group_norm_parameters", 2_000),
        ("group_norm_grad_input", call.streamed(3 * moved, efficiency.mixed)),
        ("group_norm_grad_weight", 3_000),
    ]


def batch_norm(call: Call) -> list[Kernel]:
    """Statistics, running averages, and the transformation."""
    moved, efficiency = size(call.inputs[0]), call.device.efficiency
    return [
        ("batch_norm_statistics", call.streamed(moved, efficiency.statistics, 2_000)),
        ("batch_norm_running", 1_300),
        ("batch_norm_transform", call.streamed(2 * moved, efficiency.columns)),
    ]


def batch_norm_backward(call: Call) -> list[Kernel]:
    moved, efficiency = size(call.inputs[0]), call.device.efficiency
    return [
        ("batch_norm_reduce", call.streamed(2 * moved, efficiency.norm, 2_000)),
        ("batch_norm_grad_input", call.streamed(3 * moved, efficiency.heavy)),
    ]


FAMILIES: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), layer_norm),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward", "rms_norm_backward"), layer_norm_backward
    ),
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"), batch_norm
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"), batch_norm_backward
    ),
}
