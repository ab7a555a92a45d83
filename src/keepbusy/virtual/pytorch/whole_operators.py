"""Operators that PyTorch takes apart on the host, and that a GPU runs whole: attention, recurrent networks.

The parts are recorded by autograd on the host, and their gradient is computed there. To the program and to the clock
it is one operator forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keepbusy.virtual.machine import MACHINE, DeviceCall
from keepbusy.virtual.pytorch import OPERATORS, randomness
from keepbusy.virtual.pytorch.cuda_graphs import lasting
from keepbusy.virtual.pytorch.cuda_only import CELLS
from keepbusy.virtual.pytorch.kernels import Kernel, overload_named
from keepbusy.virtual.pytorch.outlines import VALUES, outline, reserved
from keepbusy.virtual.pytorch.tensors import map_tensors, tensors_in, to_host

_aten = torch.ops.aten
_NO_HOOKS = (lambda tensor: tensor,) * 2


class _Run:
    """One call: what it computed on the host, and from what. A graph that is replayed computes it anew."""

    def __init__(self, kernel: Kernel, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.device = kernel, tensors[0].get_device()
        self.leaves = [self.seen(one).requires_grad_(one.requires_grad) for one in tensors]
        waiting = iter(self.leaves)
        self.args, self.kwargs = _placed(args, waiting), {name: _placed(one, waiting) for name, one in kwargs.items()}
        self.parts: list[Tensor] = []
        given = dict(zip(kernel.arguments, self.args, strict=False)) | self.kwargs
        self.draws = any(given.get(name) for name in ("dropout_p", "dropout"))

    def forward(self) -> list[Tensor]:
        compute = self.kernel.on_host or self.kernel.native
        # a checkpoint would throw away what the parts save, and compute the operator anew for each of them
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*_NO_HOOKS):
            if self.draws:
                out = randomness.draw(compute, self.device, list(self.args), self.kwargs, False)
            else:
                out = compute(*self.args, **self.kwargs)
        self.parts = list(out) if isinstance(out, list | tuple) else [out]
        return [one.detach() for one in self.parts]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        needed = [one for one in self.leaves if one.requires_grad]
        known = self.reached(gradients)
        ends, given = [part for part, _ in known], [one for _, one in known]
        return list(torch.autograd.grad(ends, needed, given, allow_unused=True, retain_graph=True))

    def reached(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """The parts that a gradient has come for, and that pass it on."""
        both = zip(self.parts, gradients, strict=True)
        return [(part, one) for part, one in both if one is not None and part.requires_grad]

    def seen(self, tensor: Tensor) -> Tensor:
        if not VALUES.real:
            return outline(tensor)
        return to_host(tensor.detach()) if MACHINE.recording is None else lasting(tensor.detach())

    def launch(self, suffix: str, inputs: Any, outputs: Sequence[Tensor | None]) -> None:
        known = [one for one in outputs if one is not None]
        MACHINE.launch(
            self.device, self.kernel.short + suffix, inputs, known, self.kernel.asked(self.args, self.kwargs)
        )

    def results(self, compute: Callable[[], Any], found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What was found, on the device, and computed again by each replay of a graph that is captured now."""
        hosts = [one if one is None or VALUES.real else reserved(one) for one in found]
        made = [None if one is None else MACHINE.place_on(one, self.device) for one in hosts]
        if (recording := MACHINE.records(self.device)) is not None:
            recording.repeat(compute, found)
        return made


class _Whole(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        with DeviceCall(kernel.name):
            ctx.run = run = _Run(kernel, args, kwargs, tensors)
            found = run.forward()
            run.launch("", run.leaves, run.parts)
            ctx.save_for_backward(*tensors)
            results = tuple(run.results(run.forward, found))
            return results if len(kernel.returned) > 1 else results[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  # says so if they are freed already
        run = ctx.run
        with DeviceCall(f"{run.kernel.name}_backward"):
            seen = [None if one is None else run.seen(one) for one in gradients]
            found = run.backward(seen)
            run.launch("_backward", [*run.leaves, *(one for _, one in run.reached(seen))], found)
            results = iter(run.results(partial(run.backward, seen), found))
            return None, None, None, *[next(results) if one.requires_grad else None for one in run.leaves]


def _placed(value: Any, waiting: Iterator[Tensor]) -> Any:
    return map_tensors(lambda one: next(waiting) if one.is_cuda else one, value)


def as_one(overload: torch._ops.OpOverload, on_host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    kernel = Kernel(overload, on_host)

    def call(*args: Any, **kwargs: Any) -> Any:
        of_device = [one for one in tensors_in([*args, *kwargs.values()]) if one.is_cuda]
        return _Whole.apply(kernel, args, kwargs, *of_device)

    return call


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
    found = {name: overload_named(f"aten::{name}") for name in (*OPERATORS["whole"], *CELLS)}
    kernels = {name: as_one(overload, CELLS.get(name)) for name, overload in found.items() if overload is not None}
    return {"scaled_dot_product_attention": attention, **kernels}
