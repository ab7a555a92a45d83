"""What PyTorch has for CUDA alone: how the host computes it. All tensors here are the host's.

What is not in this table and has no kernel for the host is refused by name, see `operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# PyTorch's own functions, not those of `torch`: what the program calls there stands in the timeline
_aten = torch.ops.aten

# `nn.GRUCell` and `nn.LSTMCell`: everything behind the two products is one kernel, and one in the backward pass.


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (reset_in, update_in, new_in), (reset_h, update_h, new_h) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset, update = (reset_in + reset_h).sigmoid(), (update_in + update_h).sigmoid()
    new = (new_in + reset * new_h).tanh()
    return new + update * (hidden - new), _aten.cat.default([reset, update, new, hidden, new_h], 1)


def _lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    take, forget, new, give = gates.chunk(4, 1)
    take, forget, new, give = take.sigmoid(), forget.sigmoid(), new.tanh(), give.sigmoid()
    after = forget * cell + take * new
    return give * after.tanh(), after, _aten.cat.default([take, forget, new, give], 1)


# `nn.SyncBatchNorm`: its halves, between which ranks exchange their means.


def _over_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [at for at in range(tensor.dim()) if at != 1]


def _batch_norm_stats(tensor: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    variance, mean = _aten.var_mean.correction(tensor.float(), _all_but_channels(tensor), correction=0)
    return mean, (variance + epsilon).rsqrt()


def _batch_norm_elemt(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, _epsilon: float
) -> Tensor:
    normal = (tensor - _over_channels(mean, tensor)) * _over_channels(scale, tensor)
    normal = normal if weight is None else normal * _over_channels(weight, tensor)
    return (normal if bias is None else normal + _over_channels(bias, tensor)).to(tensor.dtype)


def _batch_norm_gather_stats(tensor: Tensor, means: Tensor, scales: Tensor, *about: Any) -> tuple[Tensor, Tensor]:
    """Of all ranks: a row of `means` and `scales` for each, made of so many values."""
    running_mean, running_var, momentum, epsilon, counts = about
    each = counts.to(means.dtype).view(-1, 1) if isinstance(counts, Tensor) else _aten.full_like.default(means, counts)
    total = each.expand_as(means).sum(0)
    mean = (means * each).sum(0) / total
    variance = ((scales.pow(-2) - epsilon + (means - mean).square()) * each).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (variance + epsilon).rsqrt()


def _batch_norm_backward_reduce(
    gradient: Tensor, tensor: Tensor, mean: Tensor, scale: Tensor, _weight: Tensor | None, *needs: bool
) -> tuple[Tensor | None, ...]:
    needs_input, needs_weight, needs_bias = needs
    total = gradient.float().sum(_all_but_channels(tensor))
    with_input = (gradient * (tensor - _over_channels(mean, tensor))).float().sum(_all_but_channels(tensor))
    sums = (total, with_input) if needs_input else (None, None)
    return *sums, with_input * scale if needs_weight else None, total if needs_bias else None


def _batch_norm_backward_elemt(
    gradient: Tensor, tensor: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *sums: Tensor
) -> Tensor:
    total, with_input, counts = sums
    count = counts.sum()
    centred = tensor - _over_channels(mean, tensor)
    slope = _over_channels(with_input / count * scale * scale, tensor)
    factor = scale if weight is None else scale * weight
    inner = gradient - _over_channels(total / count, tensor) - centred * slope
    return (inner * _over_channels(factor, tensor)).to(tensor.dtype)


# Dropout: the host's own way draws the same numbers and scales them before it multiplies.


def _dropout(tensor: Tensor, p: float, train: bool | None, *, generator: Any = None) -> Any:
    if train is False or p in (0, 1):
        return _aten.native_dropout.default._op(tensor, p, train)
    noise = _aten.bernoulli_.float(_aten.empty_like.default(tensor), 1 - p, generator=generator).div_(1 - p)
    return tensor * noise, noise != 0


def _dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Any:
    if not scale:
        return _aten.native_dropout_backward.default._op(gradient, mask, scale)
    return gradient * mask.to(gradient.dtype).div_(1 / scale)


# A softmax that takes sixteen bits and gives thirty-two, as autocast has it.


def _widening(softmax: Any) -> Callable[..., Tensor]:
    return lambda tensor, dim, half_to_float: softmax(tensor.float() if half_to_float else tensor, dim, False)


def _narrowing(backward: Any) -> Callable[..., Tensor]:
    return lambda gradient, output, dim, dtype: backward(gradient, output, dim, gradient.dtype).to(dtype)


# Products in sixteen bits whose result has thirty-two.


def _wide(product: Any) -> Callable[..., Tensor]:
    """Its last argument is the type."""
    return lambda *given, **factors: product(*[one.to(given[-1]) for one in given[:-1]], **factors)


CELLS: dict[str, Callable[..., Any]] = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_lstm_cell": _lstm_cell}
ON_HOST: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_elemt": _batch_norm_elemt,
    "batch_norm_gather_stats": _batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather_stats,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward_elemt,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    "_softmax": _widening(_aten._softmax.default),
    "_log_softmax": _widening(_aten._log_softmax.default),
    "_softmax_backward_data": _narrowing(_aten._softmax_backward_data.default),
    "_log_softmax_backward_data": _narrowing(_aten._log_softmax_backward_data.default),
    "mm.dtype": _wide(_aten.mm.default),
    "bmm.dtype": _wide(_aten.bmm.default),
    "addmm.dtype": _wide(_aten.addmm.default),
    "baddbmm.dtype": _wide(_aten.baddbmm.default),
}
