"""Copies between host and device, and the reads that hide in `.item()`, `bool`, `float` and `print`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepbusy.timeline.model import Direction
from keepbusy.virtual import pinned
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.kernels import Kernel, adopt
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.tensors import CPU, to_host, to_host_as_seen
from keepbusy.virtual.unreal import VALUES, outline, reserved

_aten = torch.ops.aten
_cast = _aten._to_copy.default
_IN, _OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten::copy_`, as the dispatcher calls it when either side is on a device."""
    MACHINE.begin("aten::copy_")
    try:
        if target.is_cuda and source.is_cuda:
            _write(target, source)
            _copied_on_device(target, source)
        elif target.is_cuda:
            _write(target, source)
            _copied_in(target.get_device(), _carried(source, target), source, non_blocking)
        else:
            target.copy_(to_host_as_seen(source)) if VALUES.real else target.zero_()
            is_pinned = pinned.is_pinned(target)
            size = _carried(source, target)
            MACHINE.copy(source.get_device(), size, _OUT, pinned=is_pinned, non_blocking=is_pinned and non_blocking)
        return target
    finally:
        MACHINE.end()


def _write(target: Tensor, source: Tensor) -> None:
    if VALUES.real:
        to_host_as_seen(target).copy_(to_host_as_seen(source) if source.is_cuda else source)


def _carried(source: Tensor, target: Tensor) -> int:
    """Bytes on the bus: casts happen on the device, so the smaller type never grows before it."""
    return int(target.numel() * source.element_size())


def _copied_on_device(target: Tensor, source: Tensor) -> None:
    one, other = source.get_device(), target.get_device()
    if one == other:
        MACHINE.launch(one, "copy_", [source], [target])
    else:
        MACHINE.clock.copy_to_peer(MACHINE.stream(one), MACHINE.stream(other), target.nbytes)


def _copied_in(device: int, size: int, source: Tensor, non_blocking: bool) -> None:
    MACHINE.copy(device, size, _IN, pinned=pinned.is_pinned(source), non_blocking=non_blocking)


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
    MACHINE.begin("aten::_to_copy")
    try:
        if layout not in (None, torch.strided):
            raise NotImplementedError(f"keepbusy's virtual GPU has no {layout} tensors; only dense ones.")
        host = _cast_on_host(tensor, dtype, memory_format)
        if not tensor.is_cuda:
            return _brought_in(tensor, host, CURRENT.index(device), non_blocking)
        if device is None or device.type == "cuda":
            return _moved(tensor, host, device)
        return _taken_home(tensor, host, device, non_blocking)
    finally:
        MACHINE.end()


def _cast_on_host(tensor: Tensor, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Tensor:
    """The values in new host memory, in the type and layout asked for."""
    if VALUES.real:
        return _cast(to_host_as_seen(tensor) if tensor.is_cuda else tensor, dtype=dtype, memory_format=memory_format)
    return reserved(_cast(outline(tensor), dtype=dtype, memory_format=memory_format))


def _brought_in(tensor: Tensor, host: Tensor, device: int, non_blocking: bool) -> Tensor:
    result = MACHINE.place_on(host, device)
    _copied_in(device, host.numel() * tensor.element_size(), tensor, non_blocking)
    return result


def _moved(tensor: Tensor, host: Tensor, device: torch.device | None) -> Tensor:
    target = tensor.get_device() if device is None or device.index is None else device.index
    result = MACHINE.place_on(host, target)
    _copied_on_device(result, tensor)
    return result


def _taken_home(tensor: Tensor, host: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    if device.type not in ("cpu", "meta"):
        raise RuntimeError(f"keepbusy's virtual GPU cannot copy to {device}.")
    if device.type == "meta":
        return host.to("meta")
    if not VALUES.real:
        host.zero_()
    # asked not to block, PyTorch takes pinned memory for the result, and the call does return at once
    if non_blocking:
        pinned.pin(host)
    device_index, fresh = tensor.get_device(), not non_blocking
    MACHINE.copy(device_index, tensor.nbytes, _OUT, pinned=non_blocking, non_blocking=non_blocking, fresh=fresh)
    return host


def read_scalar(tensor: Tensor) -> Any:
    """`aten::_local_scalar_dense`: what every truth test and every `.item()` comes down to."""
    MACHINE.begin("aten::_local_scalar_dense")
    try:
        MACHINE.copy(tensor.get_device(), tensor.element_size(), _OUT, pinned=True, non_blocking=False)
        return _aten._local_scalar_dense.default(
            to_host(tensor) if VALUES.real else _aten.zeros.default([], dtype=tensor.dtype)
        )
    finally:
        MACHINE.end()


def empty(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Memory alone: no kernel runs."""
    options.update(pin_memory=False, layout=None)
    return MACHINE.place_on(_aten.empty.memory_format(size, device=CPU, **options), CURRENT.index(device))


def empty_strided(size: Any, stride: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    options.update(pin_memory=False, layout=None)
    return MACHINE.place_on(_aten.empty_strided.default(size, stride, device=CPU, **options), CURRENT.index(device))


def efficient_zeros(size: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Autograd's tensors of zeros, which nobody reads."""
    make = _aten.zeros.default if VALUES.real else _aten.empty.memory_format
    return MACHINE.place_on(make(size, dtype=options.get("dtype")), CURRENT.index(device))


def resize_(tensor: Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Within its storage where there is room, else in a new one that begins with the old values."""
    shape = _new(size, tensor.dtype, "meta")
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    if shape.nbytes <= room:
        _aten.set_.source_Storage_storage_offset(
            tensor, tensor.untyped_storage(), tensor.storage_offset(), list(size), list(shape.stride())
        )
        return tensor
    grown = _new(size, tensor.dtype, "cpu")
    if VALUES.real:
        old = to_host(tensor).reshape(-1)
        grown.view(-1)[: old.numel()] = old
    adopt(tensor, MACHINE.place_on(grown, tensor.get_device()))
    return tensor


def _new(size: Any, dtype: torch.dtype, device: str) -> Tensor:
    return _aten.empty.memory_format(size, dtype=dtype, device=device)


class _Dropout(Kernel):
    """The host has another operator for it, which draws the same numbers and scales them before it multiplies."""

    __slots__ = ()

    def _call(self, tensor: Tensor, p: float, train: bool | None, *, generator: Any = None) -> Any:
        if train is False or p in (0, 1):
            return self.raw(tensor, p, train)
        # PyTorch's own functions, not those of `torch`: what the program calls there stands in the timeline
        noise = _aten.bernoulli_.float(_aten.empty_like.default(tensor), 1 - p, generator=generator).div_(1 - p)
        return tensor * noise, noise != 0


class _DropoutBackward(Kernel):
    __slots__ = ()

    def _call(self, gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
        if not scale:
            return self.raw(gradient, mask, scale)
        return gradient * mask.to(gradient.dtype).div_(1 / scale)


_dropout = _Dropout(_aten.native_dropout.default)
_dropout.signature.has_generator = True

SPECIAL = {
    "copy_": copy_,
    "_to_copy": to_copy,
    "_local_scalar_dense": read_scalar,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_efficientzerotensor": efficient_zeros,
    "resize_": resize_,
    "native_dropout": _dropout,
    "native_dropout_backward": _DropoutBackward(_aten.native_dropout_backward.default),
    "_use_cudnn_ctc_loss": lambda *_args, **_kwargs: False,
    "_use_cudnn_ctc_loss.Tensor": lambda *_args, **_kwargs: False,
    "_use_miopen_ctc_loss": lambda *_args, **_kwargs: False,
    "_use_miopen_ctc_loss.Tensor": lambda *_args, **_kwargs: False,
    "record_stream": lambda *_args: None,
}
