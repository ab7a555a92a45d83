"""The kernel of each operator of the CUDA device, and the operators that are refused by name.

Most are a `Kernel` made from their schema. The others are here: copies between host and device, and operators that a
GPU runs as a whole.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keepbusy.program.patches import Patches, when_imported
from keepbusy.timeline.model import Direction
from keepbusy.torch_names import dispatcher
from keepbusy.virtual.machine import CURRENT, MACHINE, DeviceCall
from keepbusy.virtual.pytorch import OPERATORS, cuda_api, pinned_uses, randomness, refusal
from keepbusy.virtual.pytorch.kernels import CELLS, HOST_KEYS, ON_HOST, Kernel, adopt
from keepbusy.virtual.pytorch.recordings import Recording
from keepbusy.virtual.pytorch.tensors import (
    CPU,
    SPARSE_KEYS,
    VALUES,
    computed,
    is_pinned,
    map_tensors,
    outline,
    pin,
    reserved,
    tensors_in,
    to_host,
    zeroed,
)

_LAYOUTS = {"SparseCsrCUDA": "compressed sparse", "NestedTensorCUDA": "nested", "QuantizedCUDA": "quantized"}
"""Layouts refused altogether, by dispatch key."""
_LAYOUT_PREFIXES = {
    "nested": ("_nested",),
    "quantized": ("quantize",),
    "semi-structured sparse": ("_sparse_semi",),
    "compressed sparse": ("_sparse_c", "_sparse_b", "_to_sparse_", "to_sparse_"),  # except for those of COO
}
_LIBRARIES: list[Any] = []
"""Registrations last as long as these objects."""


def prepare() -> None:
    """Make the kernels, which takes most of the time of `register`, so that forks of this process have them."""
    _dense_kernels()
    _sparse_kernels()


def register() -> None:
    """From now on operators of the CUDA device run here."""
    aten, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _LIBRARIES.extend([aten, everything])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CUDA build each kernel replaces another one
        whole_operators = _whole_operators()
        for name, kernel in (_dense_kernels() | whole_operators).items():  # PyTorch 2.11 accepts one kernel a name
            aten.impl(name, kernel, "CUDA")
        for name, kernel in whole_operators.items():
            aten.impl(name, kernel, "AutogradCUDA")
        on_demand = cache(_kernel)  # for operators that other packages register
        everything.fallback(lambda overload, *args, **kwargs: on_demand(overload)(*args, **kwargs), "CUDA")
        # on a CUDA build other layouts have native kernels, which must not be reached
        sparse = _sparse_kernels()
        for name in {*_registered("SparseCUDA"), *sparse}:
            aten.impl(name, sparse.get(name) or _refusal_of_layout("sparse", name), "SparseCUDA")
        everything.fallback(_refuse_any("sparse"), "SparseCUDA")
        for key, layout in _LAYOUTS.items():
            everything.fallback(_refuse_any(layout), key)
            for name in _registered(key):
                aten.impl(name, _refusal_of_layout(layout, name), key)


def refuse_triton(patches: Patches) -> None:
    """Refuse to launch Triton's kernels, by name. Triton itself is imported and defines kernels as with a GPU."""

    def refuse(_native: Callable[..., Any], kernel: Any, *_args: Any, **_kwargs: Any) -> Any:
        name = getattr(getattr(kernel, "base_fn", kernel), "__name__", "one")  # the function within a tuned kernel
        refusal(f"runs no kernels written in Triton ({name})")()

    def patch() -> None:
        module = sys.modules["triton.runtime.jit"]
        patches.wrap(module.JITFunction, "run", refuse)
        patches.wrap(module.KernelInterface, "__getitem__", refuse)  # kernel[grid](…): tuned ones ask a driver first

    when_imported("triton.runtime.jit", patch)


def _registered(key: str) -> set[str]:
    """Operators of PyTorch's own library that have a kernel for a dispatch key."""
    names: list[str] = dispatcher.operators_with_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _overload_named(name: str) -> dispatcher.OpOverload | None:
    """An overload by its full name, as `aten::add.Tensor`; None if this version lacks it."""
    base, _, variant = name.removeprefix("aten::").partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), variant or "default")
    except (AttributeError, RuntimeError):
        return None


@cache
def _dense_kernels() -> dict[str, Callable[..., Any]]:
    names = {name.removeprefix("aten::") for name in dispatcher.all_operators() if name.startswith("aten::")}
    with_kernel = {*_registered("CPU"), *_registered("CUDA"), *OPERATORS["kept_together"], *ON_HOST}
    with_kernel |= {name for name in names if name.startswith(("_foreach_", "_fused_"))}
    kernels: dict[str, Callable[..., Any]] = {}
    for name in names:
        overload, layout = _overload_named(name), _layout_named(name)
        if overload is None:
            continue
        if layout:
            kernels[name] = _refusal_of_layout(layout, name)
        elif name in _SPECIAL:
            kernels[name] = _SPECIAL[name]  # type: ignore[assignment]
        elif name in OPERATORS["views"]:
            kernels[name] = _native(overload, HOST_KEYS)
        elif name in with_kernel:
            aliases = [result.alias_info for result in dispatcher.schema_of(overload).returns]
            if all(alias is None or alias.is_write for alias in aliases):  # others return views
                kernels[name] = _kernel(overload)
    return kernels


def _layout_named(name: str) -> str | None:
    named = (layout for layout, prefixes in _LAYOUT_PREFIXES.items() if name.startswith(prefixes))
    return None if name.startswith("_sparse_coo") else next(named, None)


@cache
def _sparse_kernels() -> dict[str, Callable[..., Any]]:
    named = {name: _overload_named(name) for name in _registered("SparseCPU") if _layout_named(name) is None}
    overloads = {name: overload for name, overload in named.items() if overload is not None}
    natives = {name: _native(overloads[name], SPARSE_KEYS) for name in overloads.keys() & OPERATORS["sparse_structure"]}
    return {name: natives.get(name) or Kernel(overload, dense=False) for name, overload in overloads.items()}


def _native(overload: Any, keys: Any) -> Callable[..., Any]:
    """PyTorch's own kernel for the host, on tensors of the device."""
    native = partial(dispatcher.handle_of(overload).redispatch_boxed, keys)

    def run(*args: Any, **kwargs: Any) -> Any:
        host = MACHINE.pause()
        MACHINE.clock.spend_on_view(host)
        try:
            return native(*args, **kwargs)
        finally:
            host.resume()

    return run


def _kernel(overload: dispatcher.OpOverload) -> Callable[..., Any]:
    """A kernel that uses the host's kernel or its replacement; without either, a refusal by name."""
    name = dispatcher.schema_of(overload).name
    full = f"{name}.{dispatcher.variant_of(overload)}" if dispatcher.variant_of(overload) != "default" else name
    on_host = ON_HOST.get(full.removeprefix("aten::"))
    if on_host is None and not dispatcher.has_kernel(full, "CPU"):
        return refusal(f"cannot run {full}: PyTorch has it for CUDA alone")
    kernel = Kernel(overload, on_host)
    return _with_indices_on_device(kernel) if kernel.short in OPERATORS["indexing"] else kernel


def _with_indices_on_device(kernel: Kernel) -> Callable[..., Any]:
    """As in CUDA, indexing first copies indices of the host to the device, blocking; a mask is copied as indices."""

    def call(tensor: Tensor, indices: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda and any(index is not None and not index.is_cuda for index in indices):
            device_indices: list[Tensor | None] = []
            for index in indices:
                if index is None or index.is_cuda:
                    device_indices.append(index)
                else:
                    is_mask = index.dtype in (torch.bool, torch.uint8)
                    parts = index.nonzero().unbind(1) if is_mask else [index]
                    device_indices += [part.to(tensor.device) for part in parts]
            indices = device_indices
        return kernel(tensor, indices, *args, **kwargs)

    return call


def _refusal_of_layout(layout: str, name: str) -> Callable[..., Any]:
    return refusal(f"cannot run aten::{name.removeprefix('aten::')} on {layout} tensors")


def _refuse_any(layout: str) -> Callable[..., Any]:
    return lambda overload, *_args, **_kwargs: _refusal_of_layout(layout, dispatcher.schema_of(overload).name)()


# Copies between host and device, reads, as in `.item()`, `bool`, `float` and `print`, and empty memory.

_aten = torch.ops.aten
_cast = _aten._to_copy.default
_TO_DEVICE, _TO_HOST = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten::copy_`, with at least one side on a device."""
    with DeviceCall("aten::copy_") as place:
        size = target.numel() * source.element_size()  # casts happen on the device
        if not source.is_cuda:
            _check_copy(target.get_device(), source, non_blocking)
        elif not target.is_cuda:
            _check_copy(source.get_device(), target, non_blocking)
        _write(target, source)
        if not target.is_cuda:
            pinned = is_pinned(target)
            if pinned:
                pinned_uses.forget_copied(target)
            MACHINE.use([source], [target], MACHINE.stream(source.get_device()), place)
            MACHINE.copy(source.get_device(), size, _TO_HOST, pinned=pinned, non_blocking=pinned and non_blocking)
        else:
            _send(target, source, size, non_blocking, place)
        return target


def _check_copy(device: int, host: Tensor, non_blocking: bool) -> None:
    """Refuse, or warn about, a copy between host and device before anything is written."""
    MACHINE.needs_pinned(device, is_pinned(host))
    if not non_blocking:
        cuda_api.announce_sync()


def _write(target: Tensor, source: Tensor) -> None:
    if not VALUES.worth_keeping(source, target):
        VALUES.forget(target) if target.is_cuda else target.zero_()
        return
    recording = MACHINE.records((source if source.is_cuda else target).get_device())
    into, values = _host_values(target, recording), _host_values(source, recording)
    if recording is None:
        into.copy_(values)
    else:
        recording.run(partial(into.copy_, values), into)
    if target.is_cuda:
        VALUES.keep(target)


def _host_values(tensor: Tensor, recording: Recording | None) -> Tensor:
    """The values as a host tensor, with conjugate and negative bits; one that a graph uses again must last."""
    if not tensor.is_cuda:
        return tensor
    host = to_host(tensor) if recording is None else MACHINE.lasting(tensor)
    host = dispatcher.conjugate_view(host) if tensor.is_conj() else host
    return dispatcher.negative_view(host) if tensor.is_neg() else host


def _send(target: Tensor, source: Tensor, size: int, non_blocking: bool, place: int) -> None:
    """Note and time a copy to a device, from the host or a device."""
    device, order = target.get_device(), MACHINE.clock.order
    stream = MACHINE.stream(source.get_device() if source.is_cuda else device)
    if source.is_cuda and source.get_device() != device:
        order.stream_waits(stream, order.reached(MACHINE.stream(device)))
    command = MACHINE.use([source], [target], stream, place)
    if non_blocking and is_pinned(source):
        pinned_uses.note_copy(source, command)
    if not source.is_cuda:
        MACHINE.copy(device, size, _TO_DEVICE, pinned=is_pinned(source), non_blocking=non_blocking)
    elif source.get_device() == device:
        MACHINE.launch(device, "copy_", [source], [target], {})
    else:
        MACHINE.clock.copy_to_peer(stream, MACHINE.stream(device), target.nbytes)


_copy_lists_as_one = Kernel(_aten._foreach_copy_.default)


def _copy_lists(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """`torch._foreach_copy_`: lists of the same layout on one device take one kernel, others a copy for each tensor."""
    pairs = list(zip(targets, sources, strict=True))
    if (
        len({tensor.device for tensor in (*targets, *sources)}) == 1
        and len({tensor.dtype for tensor in targets}) == len({tensor.dtype for tensor in sources}) == 1
        and all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in pairs)
    ):
        _copy_lists_as_one(targets, sources, non_blocking)
        return
    for target, source in pairs:
        _aten.copy_.default(target, source, non_blocking)


def _to_copy(
    tensor: Tensor, *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    """`aten::_to_copy`, as called by `.to`, `.cuda`, `.cpu` and `.float`."""
    with DeviceCall("aten::_to_copy") as place:
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"keepbusy's virtual GPU has no {layout} tensors; only dense ones.")
        index = CURRENT.index(device) if not tensor.is_cuda else tensor.get_device()
        if not tensor.is_cuda:
            _check_copy(index, tensor, non_blocking)
        # makes the values in new host memory, in the requested type and layout
        options = {"dtype": dtype, "memory_format": memory_format}
        if VALUES.carried(tensor):
            cast = partial(_cast, _host_values(tensor, MACHINE.records(index)), **options)
        else:
            cast = partial(computed, _cast, "_to_copy", (tensor,), options)
        if tensor.is_cuda and device is not None and device.type != "cuda":
            return _copy_to_host(tensor, cast, device, non_blocking, place)
        target, host = index if device is None or device.index is None else device.index, cast()
        result = MACHINE.place_on(host, target)
        if VALUES.carried(tensor):
            VALUES.keep(result)
        _send(result, tensor, host.numel() * tensor.element_size(), non_blocking, place)
        _repeat(index if tensor.is_cuda else target, cast, host)
        return result


def _repeat(device: int, compute: Callable[[], Tensor], host: Tensor) -> None:
    """Compute a result again at each replay of the current capture."""
    recording = MACHINE.records(device)
    if recording is not None:
        recording.repeat(compute, host)


def _copy_to_host(
    tensor: Tensor, cast: Callable[[], Tensor], device: torch.device, non_blocking: bool, place: int
) -> Tensor:
    host = cast()
    if device.type not in ("cpu", "meta"):
        raise RuntimeError(f"keepbusy's virtual GPU cannot copy to {device}.")
    if device.type == "meta":
        return host.to("meta")
    if not VALUES.readable(tensor):
        host = zeroed(host)
    MACHINE.needs_pinned(tensor.get_device(), non_blocking)
    # a copy that should not block has pinned memory for its result, and returns at once
    if non_blocking:
        pin(host)
    else:
        cuda_api.announce_sync()
    device_index = tensor.get_device()
    MACHINE.use([tensor], [host], MACHINE.stream(device_index), place)
    fresh = 0 if non_blocking else MACHINE.pages.take(tensor.nbytes, host)
    MACHINE.copy(device_index, tensor.nbytes, _TO_HOST, pinned=non_blocking, non_blocking=non_blocking, fresh=fresh)
    _repeat(device_index, lambda: host.copy_(cast()), host)
    return host


def _read_scalar(tensor: Tensor) -> Any:
    """`aten::_local_scalar_dense`, which each truth test and each `.item()` calls; shown as `aten::item`."""
    with DeviceCall("aten::item") as place:
        cuda_api.announce_sync()
        MACHINE.use([tensor], [], MACHINE.stream(tensor.get_device()), place)
        MACHINE.copy(tensor.get_device(), tensor.element_size(), _TO_HOST, pinned=True, non_blocking=False)
        return _aten._local_scalar_dense.default(
            to_host(tensor) if VALUES.readable(tensor) else _aten.zeros.default([], dtype=tensor.dtype)
        )


def _empty(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Memory without values, so no kernel runs."""
    MACHINE.clock.spend_on_view(MACHINE.clock.host())
    return _blank(_aten.empty.memory_format, (size,), options, CURRENT.index(device))


def _empty_strided(size: Any, stride: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    return _blank(_aten.empty_strided.default, (size, stride), options, CURRENT.index(device))


def _blank(make: Callable[..., Tensor], sizes: tuple[Any, ...], options: dict[str, Any], device: int) -> Tensor:
    options.update(pin_memory=False, layout=None)
    try:
        host = make(*sizes, device=CPU, **options)
    except RuntimeError as error:
        MACHINE.raise_for_memory(error, device)
        raise
    if MACHINE.recording is not None:
        host.zero_()  # values in a graph's memory may be used as indices by the host's operators
    return MACHINE.place_on(host, device)


def _efficient_zeros(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Autograd's tensors of zeros."""
    make = partial(_aten.zeros.default if VALUES.real else _aten.empty.memory_format, size, dtype=options.get("dtype"))
    host = make()
    result = MACHINE.place_on(host, CURRENT.index(device))
    MACHINE.use([], [result], MACHINE.stream(CURRENT.index(device)), MACHINE.places.current_place())
    _repeat(CURRENT.index(device), make, host)
    return result


def _resize_(tensor: Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize within the storage if there is room, else in a new one that begins with the old values."""
    shape = _aten.empty.memory_format(size, dtype=tensor.dtype, device="meta", memory_format=memory_format)
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if shape.nbytes <= room:
        _aten.set_.source_Storage_storage_offset(
            tensor, tensor.untyped_storage(), tensor.storage_offset(), list(size), list(shape.stride())
        )
        return tensor
    device, dtype = tensor.get_device(), tensor.dtype
    old = _host_values(tensor, MACHINE.records(device)) if VALUES.real else None

    def grow() -> Tensor:
        grown = _aten.empty.memory_format(size, dtype=dtype, device="cpu", memory_format=memory_format)
        if old is not None:
            grown.as_strided([old.numel()], [1])[:] = old.reshape(-1)
        return grown

    grown = grow()
    adopt(tensor, MACHINE.place_on(grown, device))
    _repeat(device, grow, grown)
    return tensor


_SPECIAL = {
    "copy_": _copy_,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _read_scalar,
    "_foreach_copy_": _copy_lists,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_efficientzerotensor": _efficient_zeros,
    "resize_": _resize_,
    **dict.fromkeys(
        ("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"),
        lambda *_args, **_kwargs: False,
    ),
}


# Operators that PyTorch decomposes on the host and a GPU runs as a whole: attention, recurrent networks.
#
# Autograd records the parts on the host and computes their gradients there. For the program and the clock there is one
# operator forward and one backward.

_NO_HOOKS = (lambda tensor: tensor,) * 2


class _WholeCall:
    """A call of such an operator: its inputs and results on the host."""

    def __init__(self, kernel: Kernel, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.device = kernel, tensors[0].get_device()
        self.leaves = [self.on_host(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors]
        device_leaves = iter(self.leaves)
        self.args = _placed(args, device_leaves)
        self.kwargs = {name: _placed(option, device_leaves) for name, option in kwargs.items()}
        self.parts: list[Tensor] = []
        arguments = dict(zip(kernel.arguments, self.args, strict=False)) | self.kwargs
        self.draws = any(arguments.get(name) for name in ("dropout_p", "dropout"))

    def forward(self) -> list[Tensor]:
        compute = self.kernel.on_host or self.kernel.native
        # a checkpoint would drop what the parts save, and compute the operator again for each of them
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*_NO_HOOKS):
            if self.draws:
                out = randomness.draw(compute, self.device, list(self.args), self.kwargs, False)
            else:
                out = compute(*self.args, **self.kwargs)
        self.parts = list(out) if isinstance(out, list | tuple) else [out]
        return [part.detach() for part in self.parts]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        needed = [leaf for leaf in self.leaves if leaf.requires_grad]
        reached = self.with_gradients(gradients)
        ends, output_gradients = [part for part, _ in reached], [gradient for _, gradient in reached]
        return list(torch.autograd.grad(ends, needed, output_gradients, allow_unused=True, retain_graph=True))

    def with_gradients(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """The parts that have a gradient and pass it on, with their gradients."""
        pairs = zip(self.parts, gradients, strict=True)
        return [(part, gradient) for part, gradient in pairs if gradient is not None and part.requires_grad]

    def on_host(self, tensor: Tensor) -> Tensor:
        if not VALUES.real:
            return outline(tensor)
        return to_host(tensor.detach()) if MACHINE.recording is None else MACHINE.lasting(tensor.detach())

    def launch(self, suffix: str, inputs: Any, outputs: Sequence[Tensor | None]) -> None:
        present = [output for output in outputs if output is not None]
        arguments = self.kernel.cost_arguments(self.args, self.kwargs)
        MACHINE.launch(self.device, self.kernel.short + suffix, inputs, present, arguments)

    def results(self, compute: Callable[[], Any], host_results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Host results as device tensors; each replay of the current capture computes them again."""
        hosts = [result if result is None or VALUES.real else reserved(result) for result in host_results]
        results = [None if host is None else MACHINE.place_on(host, self.device) for host in hosts]
        if (recording := MACHINE.records(self.device)) is not None:
            recording.repeat(compute, host_results)
        return results


class _WholeOperator(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not typed here
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        with DeviceCall(kernel.name) as place:
            ctx.call = call = _WholeCall(kernel, args, kwargs, tensors)
            host_results = call.forward()
            call.launch("", call.leaves, call.parts)
            ctx.save_for_backward(*tensors)
            results = tuple(call.results(call.forward, host_results))
            MACHINE.use(tensors, results, MACHINE.stream(call.device), place)
            return results if len(kernel.returned) > 1 else results[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # raises if they are freed already
        call = ctx.call
        with DeviceCall(f"{call.kernel.name}_backward") as place:
            host_gradients = [None if gradient is None else call.on_host(gradient) for gradient in gradients]
            host_results = call.backward(host_gradients)
            used = [gradient for _, gradient in call.with_gradients(host_gradients)]
            call.launch("_backward", [*call.leaves, *used], host_results)
            input_gradients = call.results(partial(call.backward, host_gradients), host_results)
            MACHINE.use((*saved, *gradients), input_gradients, MACHINE.stream(call.device), place)
            results = iter(input_gradients)
            return None, None, None, *[next(results) if leaf.requires_grad else None for leaf in call.leaves]


def _placed(value: Any, replacements: Iterator[Tensor]) -> Any:
    return map_tensors(lambda tensor: next(replacements) if tensor.is_cuda else tensor, value)


def _as_one(overload: dispatcher.OpOverload, on_host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    kernel = Kernel(overload, on_host)

    def call(*args: Any, **kwargs: Any) -> Any:
        of_device = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.is_cuda]
        return _WholeOperator.apply(kernel, args, kwargs, *of_device)

    return call


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`, by the host's flash kernel if the host would use it, else as a whole."""
    host_inputs = [to_host(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in (query, key, value)]
    mask = None if attn_mask is None else to_host(attn_mask.detach()).requires_grad_(attn_mask.requires_grad)
    flash = 1
    if (
        dispatcher.attention_choice(*host_inputs, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        != flash
    ):
        return _attention_as_one(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


_attention_as_one = _as_one(_aten.scaled_dot_product_attention.default)


def _whole_operators() -> dict[str, Callable[..., Any]]:
    """Operators that run above autograd, by name."""
    overloads = {name: _overload_named(f"aten::{name}") for name in (*OPERATORS["whole"], *CELLS)}
    kernels = {name: _as_one(overload, CELLS.get(name)) for name, overload in overloads.items() if overload is not None}
    return {"scaled_dot_product_attention": _attention, **kernels}
