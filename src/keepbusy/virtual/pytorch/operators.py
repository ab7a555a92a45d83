"""Which kernel runs for which operator of the CUDA device, and which operators are refused by name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from keepbusy.instrument.patches import Patches, when_imported
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch import OPERATORS, refusal
from keepbusy.virtual.pytorch.cuda_only import ON_HOST
from keepbusy.virtual.pytorch.kernels import HOST_KEYS, Kernel, overload_named
from keepbusy.virtual.pytorch.tensors import SPARSE_KEYS
from keepbusy.virtual.pytorch.transfers import SPECIAL
from keepbusy.virtual.pytorch.whole_operators import whole_operators

_LAYOUTS = {"SparseCsrCUDA": "compressed sparse", "NestedTensorCUDA": "nested", "QuantizedCUDA": "quantized"}
"""By dispatch key, what is refused altogether."""
_LAYOUT_PREFIXES = {
    "nested": ("_nested",),
    "quantized": ("quantize",),
    "semi-structured sparse": ("_sparse_semi",),
    "compressed sparse": ("_sparse_c", "_sparse_b", "_to_sparse_", "to_sparse_"),  # but for those of COO
}
_LIBRARIES: list[Any] = []
"""Their registrations last as long as they do."""


def prepare() -> None:
    """Make what is registered, which takes most of the time: forks of this process then have it."""
    dense_kernels()
    sparse_kernels()


def register() -> None:
    """From now on operators of the CUDA device are ours."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _LIBRARIES.extend([aten, everything])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CUDA build every kernel stands in for another
        for name, kernel in dense_kernels().items():
            aten.impl(name, kernel, "CUDA")
        for name, kernel in whole_operators().items():
            aten.impl(name, kernel, "AutogradCUDA")
            aten.impl(name, kernel, "CUDA")
        on_demand = cache(_kernel)  # of operators that other packages register
        everything.fallback(lambda overload, *args, **kwargs: on_demand(overload)(*args, **kwargs), "CUDA")
        # on a CUDA build other layouts have native kernels, which must never be reached
        sparse = sparse_kernels()
        for name in {*_registered("SparseCUDA"), *sparse}:
            aten.impl(name, sparse.get(name) or _refusal_of_layout("sparse", name), "SparseCUDA")
        everything.fallback(_refuse_any("sparse"), "SparseCUDA")
        for key, layout in _LAYOUTS.items():
            everything.fallback(_refuse_any(layout), key)
            for name in _registered(key):
                aten.impl(name, _refusal_of_layout(layout, name), key)


def refuse_triton(patches: Patches) -> None:
    """Triton imports and defines kernels as on a machine with a GPU; to launch one is refused by its name."""

    def refuse(_native: Callable[..., Any], kernel: Any, *_args: Any, **_kwargs: Any) -> Any:
        name = getattr(getattr(kernel, "base_fn", kernel), "__name__", "one")  # of a tuned one, the function within
        refusal(f"runs no kernels written in Triton ({name})")()

    def patch() -> None:
        module = sys.modules["triton.runtime.jit"]
        patches.wrap(module.JITFunction, "run", refuse)
        patches.wrap(module.KernelInterface, "__getitem__", refuse)  # kernel[grid](…): tuned ones ask a driver first

    when_imported("triton.runtime.jit", patch)


def _registered(key: str) -> set[str]:
    """The names in PyTorch's own library that have a kernel for a dispatch key."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


@cache
def dense_kernels() -> dict[str, Callable[..., Any]]:
    every = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    computed = {*_registered("CPU"), *_registered("CUDA"), *OPERATORS["kept_together"], *ON_HOST}
    computed |= {name for name in every if name.startswith(("_foreach_", "_fused_"))}
    found: dict[str, Callable[..., Any]] = {}
    for name in every:
        overload, layout = overload_named(name), _layout_named(name)
        if overload is None:
            continue
        if layout:
            found[name] = _refusal_of_layout(layout, name)
        elif name in SPECIAL:
            found[name] = SPECIAL[name]  # type: ignore[assignment]
        elif name in OPERATORS["views"]:
            found[name] = _native(overload, HOST_KEYS)
        elif name in computed and not _returns_view(overload):
            found[name] = _kernel(overload)
    return found


def _returns_view(overload: torch._ops.OpOverload) -> bool:
    aliases = [one.alias_info for one in overload._schema.returns if one.alias_info is not None]
    return not all(one.is_write for one in aliases)


def _layout_named(name: str) -> str | None:
    named = (layout for layout, prefixes in _LAYOUT_PREFIXES.items() if name.startswith(prefixes))
    return None if name.startswith("_sparse_coo") else next(named, None)


@cache
def sparse_kernels() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name in _registered("SparseCPU"):
        overload = overload_named(name)
        if overload is not None and _layout_named(name) is None:
            found[name] = (
                _native(overload, SPARSE_KEYS)
                if name in OPERATORS["sparse_structure"]
                else Kernel(overload, dense=False)
            )
    return found


def _native(overload: Any, keys: torch._C.DispatchKeySet) -> Callable[..., Any]:
    """PyTorch's own kernel for the host, on tensors of the device."""
    native = partial(overload._handle.redispatch_boxed, keys)

    def look(*args: Any, **kwargs: Any) -> Any:
        host = MACHINE.pause()
        MACHINE.clock.spend_on_view(host)
        try:
            return native(*args, **kwargs)
        finally:
            host.resume()

    return look


def _kernel(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """By the host's kernel, or what stands for it; refused by name where there is neither."""
    name = overload._schema.name
    full = f"{name}.{overload._overloadname}" if overload._overloadname != "default" else name
    on_host = ON_HOST.get(full.removeprefix("aten::"))
    if on_host is None and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU"):
        return refusal(f"cannot run {full}: PyTorch has it for CUDA alone")
    return Kernel(overload, on_host)


def _refusal_of_layout(layout: str, name: str) -> Callable[..., Any]:
    name = name.removeprefix("aten::")
    return refusal(f"cannot run aten::{name} on {layout} tensors")


def _refuse_any(layout: str) -> Callable[..., Any]:
    return lambda overload, *_args, **_kwargs: _refusal_of_layout(layout, overload._schema.name)()
