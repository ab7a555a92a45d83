"""Copies between host and device, and the reads that hide in `.item()`, `bool`, `float` and `print`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepbusy.timeline.model import Direction
from keepbusy.virtual.current_device import CURRENT
from keepbusy.virtual.machine import MACHINE, DeviceCall
from keepbusy.virtual.memory import host_memory
from keepbusy.virtual.pytorch import cuda_api
from keepbusy.virtual.pytorch.cuda_graphs import Recording, lasting
from keepbusy.virtual.pytorch.kernels import Kernel, adopt
from keepbusy.virtual.pytorch.outlines import VALUES, computed, zeroed
from keepbusy.virtual.pytorch.tensors import CPU, as_seen, to_host

_aten = torch.ops.aten
_cast = _aten._to_copy.default
_TO_DEVICE, _TO_HOST = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten::copy_`, as the dispatcher calls it when either side is on a device."""
    with DeviceCall("aten::copy_"):
        size = target.numel() * source.element_size()  # casts happen on the device: the smaller type never grows before
        if not source.is_cuda:
            _ask(target.get_device(), source, non_blocking)
        elif not target.is_cuda:
            _ask(source.get_device(), target, non_blocking)
        _write(target, source)
        if not target.is_cuda:
            is_pinned = host_memory.is_pinned(target)
            MACHINE.copy(source.get_device(), size, _TO_HOST, pinned=is_pinned, non_blocking=is_pinned and non_blocking)
        else:
            _send(target, source, size, non_blocking)
        return target


def _ask(device: int, host: Tensor, non_blocking: bool) -> None:
    """Before anything is written: whether the program may copy so between host and device."""
    MACHINE.needs_pinned(device, host_memory.is_pinned(host))
    if not non_blocking:
        cuda_api.announce_sync()


def _write(target: Tensor, source: Tensor) -> None:
    if not VALUES.worth_keeping(source, target):
        VALUES.forget(target) if target.is_cuda else target.zero_()
        return
    recording = MACHINE.records((source if source.is_cuda else target).get_device())
    into, values = _seen(target, recording), _seen(source, recording)
    if recording is None:
        into.copy_(values)
    else:
        recording.run(partial(into.copy_, values), into)
    if target.is_cuda:
        VALUES.keep(target)


def _seen(tensor: Tensor, recording: Recording | None) -> Tensor:
    """As a host tensor, and as one that lasts where a graph will use it again."""
    if not tensor.is_cuda:
        return tensor
    return as_seen(to_host(tensor) if recording is None else lasting(tensor), tensor)


def _send(target: Tensor, source: Tensor, size: int, non_blocking: bool) -> None:
    """To a device, from wherever."""
    device = target.get_device()
    if not source.is_cuda:
        MACHINE.copy(device, size, _TO_DEVICE, pinned=host_memory.is_pinned(source), non_blocking=non_blocking)
    elif source.get_device() == device:
        MACHINE.launch(device, "copy_", [source], [target], {})
    else:
        MACHINE.clock.copy_to_peer(MACHINE.stream(source.get_device()), MACHINE.stream(device), target.nbytes)


_copy_lists_as_one = Kernel(_aten._foreach_copy_.default)


def copy_lists(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """`torch._foreach_copy_`: a kernel copies lists laid out the same on one device; others go tensor by tensor."""
    pairs = list(zip(targets, sources, strict=True))
    if (
        len({one.device for one in (*targets, *sources)}) == 1
        and len({one.dtype for one in targets}) == len({one.dtype for one in sources}) == 1
        and all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in pairs)
    ):
        _copy_lists_as_one(targets, sources, non_blocking)
        return
    for target, source in pairs:
        _aten.copy_.default(target, source, non_blocking)


def to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`aten::_to_copy`: `.to`, `.cuda`, `.cpu`, `.float` and all their kin."""
    with DeviceCall("aten::_to_copy"):
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"keepbusy's virtual GPU has no {layout} tensors; only dense ones.")
        where = CURRENT.index(device) if not tensor.is_cuda else tensor.get_device()
        if not tensor.is_cuda:
            _ask(where, tensor, non_blocking)
        # what makes the values in new host memory, in the type and layout asked for
        options = {"dtype": dtype, "memory_format": memory_format}
        if VALUES.carried(tensor):
            cast = partial(_cast, _seen(tensor, MACHINE.records(where)), **options)
        else:
            cast = partial(computed, _cast, "_to_copy", (tensor,), options)
        if tensor.is_cuda and device is not None and device.type != "cuda":
            return _taken_home(tensor, cast, device, non_blocking)
        target, host = where if device is None or device.index is None else device.index, cast()
        result = MACHINE.place_on(host, target)
        if VALUES.carried(tensor):
            VALUES.keep(result)
        _send(result, tensor, host.numel() * tensor.element_size(), non_blocking)
        _repeat(where if tensor.is_cuda else target, cast, host)
        return result


def _repeat(device: int, compute: Callable[[], Tensor], host: Tensor) -> None:
    """At each replay of a graph, compute it again."""
    recording = MACHINE.records(device)
    if recording is not None:
        recording.repeat(compute, host)


def _taken_home(tensor: Tensor, cast: Callable[[], Tensor], device: torch.device, non_blocking: bool) -> Tensor:
    host = cast()
    if device.type not in ("cpu", "meta"):
        raise RuntimeError(f"keepbusy's virtual GPU cannot copy to {device}.")
    if device.type == "meta":
        return host.to("meta")
    if not VALUES.known(tensor):
        host = zeroed(host)
    MACHINE.needs_pinned(tensor.get_device(), non_blocking)
    # asked not to block, PyTorch takes pinned memory for the result, and the call does return at once
    if non_blocking:
        host_memory.pin(host)
    else:
        cuda_api.announce_sync()
    device_index = tensor.get_device()
    fresh = 0 if non_blocking else MACHINE.pages.take(tensor.nbytes, host)
    MACHINE.copy(device_index, tensor.nbytes, _TO_HOST, pinned=non_blocking, non_blocking=non_blocking, fresh=fresh)
    _repeat(device_index, lambda: host.copy_(cast()), host)
    return host


def read_scalar(tensor: Tensor) -> Any:
    """`aten::_local_scalar_dense`: what every truth test and every `.item()` comes down to, told by the better name."""
    with DeviceCall("aten::item"):
        cuda_api.announce_sync()
        MACHINE.copy(tensor.get_device(), tensor.element_size(), _TO_HOST, pinned=True, non_blocking=False)
        return _aten._local_scalar_dense.default(
            to_host(tensor) if VALUES.known(tensor) else _aten.zeros.default([], dtype=tensor.dtype)
        )


def empty(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Memory alone: no kernel runs."""
    MACHINE.clock.spend_on_view(MACHINE.clock.host())
    return _blank(_aten.empty.memory_format, (size,), options, CURRENT.index(device))


def empty_strided(size: Any, stride: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    return _blank(_aten.empty_strided.default, (size, stride), options, CURRENT.index(device))


def _blank(make: Callable[..., Tensor], sizes: tuple[Any, ...], options: dict[str, Any], device: int) -> Tensor:
    options.update(pin_memory=False, layout=None)
    try:
        host = make(*sizes, device=CPU, **options)
    except RuntimeError as error:
        raise MACHINE.lacks_memory(error, device) or error from None
    if MACHINE.recording is not None:
        host.zero_()  # what lies in a graph's memory must not stop the host's operators, which look at indices
    return MACHINE.place_on(host, device)


def efficient_zeros(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Autograd's tensors of zeros, which nobody reads."""
    make = partial(_aten.zeros.default if VALUES.real else _aten.empty.memory_format, size, dtype=options.get("dtype"))
    host = make()
    result = MACHINE.place_on(host, CURRENT.index(device))
    _repeat(CURRENT.index(device), make, host)
    return result


def resize_(tensor: Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Within its storage where there is room, else in a new one that begins with the old values."""
    shape = _aten.empty.memory_format(size, dtype=tensor.dtype, device="meta")
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if shape.nbytes <= room:
        _aten.set_.source_Storage_storage_offset(
            tensor, tensor.untyped_storage(), tensor.storage_offset(), list(size), list(shape.stride())
        )
        return tensor
    device, dtype = tensor.get_device(), tensor.dtype
    old = _seen(tensor, MACHINE.records(device)) if VALUES.real else None

    def grow() -> Tensor:
        grown = _aten.empty.memory_format(size, dtype=dtype, device="cpu")
        if old is not None:
            grown.view(-1)[: old.numel()] = old.reshape(-1)
        return grown

    grown = grow()
    adopt(tensor, MACHINE.place_on(grown, device))
    _repeat(device, grow, grown)
    return tensor


SPECIAL = {
    "copy_": copy_,
    "_to_copy": to_copy,
    "_local_scalar_dense": read_scalar,
    "_foreach_copy_": copy_lists,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_efficientzerotensor": efficient_zeros,
    "resize_": resize_,
    **dict.fromkeys(
        ("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"),
        lambda *_args, **_kwargs: False,
    ),
}
