"""Operators that PyTorch takes apart on the host, and that a GPU runs whole: attention, recurrent networks.

The parts are recorded by autograd on the host, and their gradient is computed there. To the program
and to the clock it is one operator forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keepbusy.virtual.kernels import Kernel
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.signature import overload_named
from keepbusy.virtual.tensors import map_tensors, to_host
from keepbusy.virtual.unreal import VALUES, outline, reserved

_aten = torch.ops.aten
_TAKEN = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
          "rnn_relu.data", "rms_norm")  # fmt: skip


class _Whole(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        MACHINE.begin(kernel.signature.name)
        try:
            with torch.enable_grad():
                leaves = [_seen(one).requires_grad_(one.requires_grad) for one in tensors]
                waiting = iter(leaves)
                host_args, host_kwargs = _placed(args, waiting), {k: _placed(v, waiting) for k, v in kwargs.items()}
                out = kernel.raw(*host_args, **host_kwargs)
            parts = list(out) if isinstance(out, list | tuple) else [out]
            device = tensors[0].get_device()
            _launch(kernel, device, "", leaves, parts, host_args, host_kwargs)
            ctx.recorded = (kernel, device, leaves, parts, host_args, host_kwargs)
            ctx.save_for_backward(*tensors)
            results = tuple(_placed_on(one.detach(), device) for one in parts)
            return results if isinstance(out, list | tuple) else results[0]
        finally:
            MACHINE.end()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  # says so if they are freed already
        kernel, device, leaves, parts, args, kwargs = ctx.recorded
        MACHINE.begin(f"{kernel.signature.name}_backward")
        try:
            needed = [one for one in leaves if one.requires_grad]
            known = [
                (one, _seen(g)) for one, g in zip(parts, gradients, strict=True) if g is not None and one.requires_grad
            ]
            found = torch.autograd.grad(
                [one for one, _ in known], needed, [g for _, g in known], allow_unused=True, retain_graph=True
            )
            _launch(kernel, device, "_backward", [*leaves, *(g for _, g in known)], found, args, kwargs)
            results = iter([None if one is None else _placed_on(one, device) for one in found])
            return None, None, None, *[next(results) if one.requires_grad else None for one in leaves]
        finally:
            MACHINE.end()


def _seen(tensor: Tensor) -> Tensor:
    return to_host(tensor.detach()) if VALUES.real else outline(tensor)


def _placed_on(tensor: Tensor, device: int) -> Tensor:
    return MACHINE.place_on(tensor if VALUES.real else reserved(tensor), device)


def _launch(kernel: Kernel, device: int, suffix: str, inputs: Any, outputs: Any, args: Any, kwargs: Any) -> None:
    signature = kernel.signature
    known = [one for one in outputs if one is not None]
    MACHINE.launch(device, signature.short + suffix, inputs, known, signature.asked(args, kwargs))


def _placed(value: Any, waiting: Iterator[Tensor]) -> Any:
    return map_tensors(lambda one: next(waiting) if one.is_cuda else one, value)


def _device_tensors(args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda one: found.append(one) if one.is_cuda else None, [*args, *kwargs.values()])
    return found


def as_one(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    kernel = Kernel(overload)
    return lambda *args, **kwargs: _Whole.apply(kernel, args, kwargs, *_device_tensors(args, kwargs))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`: by the host's flash kernel where the host would take it, else as one."""
    seen = [to_host(one.detach()).requires_grad_(one.requires_grad) for one in (query, key, value)]
    mask = None if attn_mask is None else to_host(attn_mask.detach()).requires_grad_(attn_mask.requires_grad)
    flash = 1
    if torch._fused_sdp_choice(*seen, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa) != flash:
        return _attention_as_one(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


_attention_as_one = as_one(_aten.scaled_dot_product_attention.default)


def whole_operators() -> dict[str, Callable[..., Any]]:
    """By name, what to run above autograd."""
    found = {name: overload_named(f"aten::{name}") for name in _TAKEN}
    kernels = {name: as_one(overload) for name, overload in found.items() if overload is not None}
    return {"scaled_dot_product_attention": attention, **kernels}
