"""Registering kernels for the CUDA device, and refusing by name what is not virtual."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch import randomness
from keepbusy.virtual.pytorch.copies import SPECIAL
from keepbusy.virtual.pytorch.cuda_graphs import lasting
from keepbusy.virtual.pytorch.kernels import HOST_KEYS, Kernel, overload_named, returns_a_view
from keepbusy.virtual.pytorch.tensors import map_tensors, to_host
from keepbusy.virtual.pytorch.values import VALUES, outline, reserved

# Operators that PyTorch takes apart on the host, and that a GPU runs whole: attention, recurrent networks.
#
# The parts are recorded by autograd on the host, and their gradient is computed there. To the program
# and to the clock it is one operator forward and one backward.

_aten = torch.ops.aten
_TAKEN = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
          "rnn_relu.data", "rms_norm")  # fmt: skip
_DROPOUT = ("dropout_p", "dropout")


class _Run:
    """One call: what it computed on the host, and from what. A graph that is replayed computes it anew."""

    def __init__(self, kernel: Kernel, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.device = kernel, tensors[0].get_device()
        self.leaves = [self.seen(one).requires_grad_(one.requires_grad) for one in tensors]
        waiting = iter(self.leaves)
        self.args, self.kwargs = _placed(args, waiting), {name: _placed(one, waiting) for name, one in kwargs.items()}
        self.parts: list[Tensor] = []
        self.draws = any(self._argument(name) for name in _DROPOUT)

    def _argument(self, name: str) -> Any:
        known = self.kernel.signature.arguments
        at = known.index(name) if name in known else len(self.args)
        return self.args[at] if at < len(self.args) else self.kwargs.get(name)

    def forward(self) -> list[Tensor]:
        with torch.enable_grad():
            if self.draws:
                out = randomness.draw(self.kernel.raw, self.device, list(self.args), self.kwargs, takes_generator=False)
            else:
                out = self.kernel.raw(*self.args, **self.kwargs)
        self.parts = list(out) if isinstance(out, list | tuple) else [out]
        return [one.detach() for one in self.parts]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        needed = [one for one in self.leaves if one.requires_grad]
        known = [
            (part, one)
            for part, one in zip(self.parts, gradients, strict=True)
            if one is not None and part.requires_grad
        ]
        ends, given = [part for part, _ in known], [one for _, one in known]
        return list(torch.autograd.grad(ends, needed, given, allow_unused=True, retain_graph=True))

    def seen(self, tensor: Tensor) -> Tensor:
        if not VALUES.real:
            return outline(tensor)
        return to_host(tensor.detach()) if MACHINE.recording is None else lasting(tensor.detach())

    def launch(self, suffix: str, inputs: Any, outputs: Sequence[Tensor | None]) -> None:
        signature = self.kernel.signature
        known = [one for one in outputs if one is not None]
        MACHINE.launch(self.device, signature.short + suffix, inputs, known, signature.asked(self.args, self.kwargs))

    def results(self, compute: Callable[[], Any], found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What was found, on the device, and computed again by each replay of a graph that is captured now."""
        made = [None if one is None else _placed_on(one, self.device) for one in found]
        if (recording := MACHINE.records(self.device)) is not None:
            recording.repeat(compute, found)
        return made


class _Whole(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        MACHINE.begin(kernel.signature.name)
        try:
            ctx.run = run = _Run(kernel, args, kwargs, tensors)
            found = run.forward()
            run.launch("", run.leaves, run.parts)
            ctx.save_for_backward(*tensors)
            results = tuple(run.results(run.forward, found))
            return results if len(kernel.signature.returned) > 1 else results[0]
        finally:
            MACHINE.end()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  # says so if they are freed already
        run = ctx.run
        MACHINE.begin(f"{run.kernel.signature.name}_backward")
        try:
            seen = [None if one is None else run.seen(one) for one in gradients]
            found = run.backward(seen)
            known = [g for part, g in zip(run.parts, seen, strict=True) if g is not None and part.requires_grad]
            run.launch("_backward", [*run.leaves, *known], found)
            results = iter(run.results(partial(run.backward, seen), found))
            return None, None, None, *[next(results) if one.requires_grad else None for one in run.leaves]
        finally:
            MACHINE.end()


def _placed_on(tensor: Tensor, device: int) -> Tensor:
    return MACHINE.place_on(tensor if VALUES.real else reserved(tensor), device)


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


_VIEWS = (
    "as_strided", "view", "_reshape_alias", "unfold", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "view_as_real", "view_as_complex", "is_set_to",
    "_unsafe_view",
)  # fmt: skip
"""They look at a tensor and never at its values: the host's kernels do for any device."""
_TAKEN_APART = ("_transformer_encoder_layer_fwd",)
"""They call other operators only: the host's kernels do for any device, and those are ours."""

_TAKEN_WHOLE = [
    "convolution",
    "convolution_backward",
    "convolution_overrideable",
    "native_group_norm",
    "native_layer_norm",
    "native_layer_norm_backward",
    "embedding_dense_backward",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "logspace",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
    "native_batch_norm",
    "one_hot",
    "repeat_interleave.Tensor",
]
"""PyTorch would take them apart, or choose by what the device's libraries can do."""
_OTHER_LAYOUTS = ("_nested", "quantize", "_sparse_coo", "_sparse_c", "_sparse_b", "to_sparse", "_to_sparse")
_LAYOUT_KEYS = {"_nested": "NestedTensorCUDA", "quantize": "QuantizedCUDA"}
_REFUSED_KEYS = ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA", "QuantizedCUDA")

_LIBRARIES: list[Any] = []


def register() -> None:
    """From now on operators of the CUDA device are ours."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _LIBRARIES.extend([aten, everything])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CUDA build every kernel stands in for another
        for name, kernel in _kernels():
            aten.impl(name, kernel, "CUDA")
        for name, kernel in whole_operators().items():
            aten.impl(name, kernel, "AutogradCUDA")
            aten.impl(name, kernel, "CUDA")
        for name in _named(*_OTHER_LAYOUTS):
            key = next((key for prefix, key in _LAYOUT_KEYS.items() if name.startswith(prefix)), "SparseCUDA")
            aten.impl(name, _refuse_named(key, f"aten::{name}"), "CUDA")
        everything.fallback(_Others(), "CUDA")
        _refuse_layouts(aten, everything)


def _kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    done = set()
    for name in (*_VIEWS, *_TAKEN_APART):
        overload = overload_named(f"aten::{name}")
        if overload is not None:
            done.add(name)
            yield name, _on_host_keys(overload)
    for name, kernel in SPECIAL.items():
        if overload_named(f"aten::{name}") is not None:
            done.add(name)
            yield name, kernel  # type: ignore[misc]
    for name in sorted(_computed() - done):
        overload = overload_named(f"aten::{name}")
        if overload is not None and not returns_a_view(overload):
            yield name, Kernel(overload)


def _computed() -> set[str]:
    """Operators with a kernel of their own on the host, or on a real CUDA device."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key
    names = {
        name.removeprefix("aten::") for key in ("CPU", "CUDA") for name in listed(key) if name.startswith("aten::")
    }
    names |= set(_named("_foreach_", "_fused_")) | set(_TAKEN_WHOLE)
    return {name for name in names if not name.startswith(_OTHER_LAYOUTS)}


def _named(*prefixes: str) -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and name.removeprefix("aten::").startswith(prefixes):
            yield name.removeprefix("aten::")


def _on_host_keys(overload: Any) -> Callable[..., Any]:
    def look(*args: Any, **kwargs: Any) -> Any:
        host = MACHINE.come()
        MACHINE.clock.glance()
        try:
            return overload.redispatch(HOST_KEYS, *args, **kwargs)
        finally:
            MACHINE.clock.go(host)

    return look


class _Others:
    """Whatever has no kernel of its own."""

    def __init__(self) -> None:
        self._kernels: dict[torch._ops.OpOverload, Kernel] = {}

    def __call__(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        kernel = self._kernels.get(overload)
        if kernel is None:
            kernel = self._kernels[overload] = Kernel(overload)
        return kernel(*args, **kwargs)


def _refuse_layouts(aten: torch.library.Library, everything: torch.library.Library) -> None:
    """On a CUDA build other layouts have native kernels, which must never be reached."""
    for key in _REFUSED_KEYS:
        everything.fallback(_refuse(key), key)
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            if name.startswith("aten::"):
                aten.impl(name.removeprefix("aten::"), _refuse_named(key, name), key)


def _refuse(key: str) -> Callable[..., Any]:
    def refuse(overload: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(_sentence(key, overload._schema.name))

    return refuse


def _refuse_named(key: str, name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(_sentence(key, name))

    return refuse


def _sentence(key: str, name: str) -> str:
    layout = {"SparseCUDA": "sparse", "SparseCsrCUDA": "sparse", "NestedTensorCUDA": "nested"}.get(key, "quantized")
    return f"keepbusy's virtual GPU has no {layout} tensors ({name}); it computes with dense ones only."
