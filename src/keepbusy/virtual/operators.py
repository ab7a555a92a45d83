"""Registering kernels for the CUDA device, and refusing by name what is not virtual."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from keepbusy.virtual.copies import SPECIAL
from keepbusy.virtual.kernels import HOST_KEYS, Kernel
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.signature import overload_named, returns_a_view
from keepbusy.virtual.whole import whole_operators

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
