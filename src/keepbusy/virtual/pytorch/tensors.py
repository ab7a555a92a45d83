"""Storages: moving, resizing and loading them, which this build of PyTorch can do for host memory only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.current_device import CURRENT

# Tensors that carry the CUDA device over host memory.
#
# A DLPack capsule names its device in one word. Written anew, it makes a tensor of the other device
# over the same memory, without a copy: `to_device` lets a host tensor be seen as one of the device,
# `to_host` back again. Dispatch, autograd and autocast then see a CUDA tensor, not an imitation.

CPU = torch.device("cpu")

_HOST_WORD, _CUDA_WORD = 1, 2  # DLDevice: {int32 type, int32 number}
_DEVICE_AT = 8  # its place in DLManagedTensor, after the data pointer

_to_capsule, _from_capsule = torch._C._to_dlpack, torch._C._from_dlpack
_word_at = ctypes.c_int64.from_address
_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def to_host(tensor: Tensor) -> Tensor:
    """The same memory as a host tensor. Conjugate and negative bits are dropped, as kernels below those keys expect."""
    capsule = _to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _HOST_WORD
    return _from_capsule(capsule)


def as_seen(host: Tensor, tensor: Tensor) -> Tensor:
    """A host tensor with the conjugate and negative bits of another: for copies, which those keys let through."""
    if tensor.is_conj():
        host = torch._conj(host)
    return torch._neg_view(host) if tensor.is_neg() else host


def to_device(tensor: Tensor, index: int) -> Tensor:
    """The same memory as a tensor of a device. Nothing is accounted for: see `memory`."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"keepbusy's virtual GPU has no {str(tensor.layout).removeprefix('torch.')} tensors; only dense ones."
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    capsule = _to_capsule(tensor)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _CUDA_WORD | index << 32
    return _from_capsule(capsule)


def map_tensors(does: Any, value: Any) -> Any:
    """`does` on every tensor in a value of nested lists."""
    if isinstance(value, Tensor):
        return does(value)
    if isinstance(value, list | tuple):
        return [map_tensors(does, one) for one in value]
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value of nested lists."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


# Sparse tensors (COO) are made of two dense ones, on whatever device these are.

SPARSE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
_aten = torch.ops.aten


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that it is made of."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    return tuple(part.redispatch(SPARSE_KEYS, tensor) for part in (_aten._indices.default, _aten._values.default))


def sparse_to_host(tensor: Tensor, in_capture: bool) -> Tensor:
    if in_capture:
        raise NotImplementedError("keepbusy's virtual GPU captures no sparse tensors in CUDA graphs.")
    return sparse_like(tensor, *(to_host(one) for one in pieces(tensor)))


def sparse_like(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Made of other parts, and on their device."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
        SPARSE_KEYS,
        tensor.sparse_dim(),
        tensor.dense_dim(),
        list(tensor.shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=tensor.is_coalesced(),
    )


_Storage = torch.UntypedStorage
_resize, _clone, _size = _Storage.resize_, _Storage.clone, torch._C.StorageBase.nbytes
_logical_sizes: dict[int, int] = {}
"""Of a shrunken storage its size as the program sees it. Its bytes stay, for FSDP will have them back."""


def patch(resize: Callable[[Any, int], None]) -> None:
    """`resize`: told of a storage whose size the program changes."""
    _Storage.cuda = _to_device
    _Storage.resize_ = partialmethod(_resize_storage, resize)
    _Storage.size = _Storage.nbytes = _logical_size_of
    _Storage.clone = _clone_storage
    torch.serialization.register_package(5, lambda _storage: None, _load)


def _to_device(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
    if storage.device.type == "cuda":
        return storage
    flat = Tensor().to(torch.uint8).set_(storage)
    return flat.to(torch.device("cuda", CURRENT.index(device)), non_blocking=non_blocking).untyped_storage()


def _clone_storage(storage: Any) -> Any:
    """Also what `copy.deepcopy` of a tensor comes down to."""
    if storage.device.type != "cuda":
        return _clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def _logical_size_of(storage: Any) -> int:
    return _logical_sizes[storage._cdata] if storage._cdata in _logical_sizes else _size(storage)


def _resize_storage(storage: Any, resize: Callable[[Any, int], None], size: int) -> Any:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    whole = _size(storage)
    if size > whole:
        raise NotImplementedError("keepbusy's virtual GPU cannot grow a storage past its first size.")
    if size != _logical_size_of(storage):
        resize(storage, size)
    if size == whole:
        _logical_sizes.pop(storage._cdata, None)
    else:
        _logical_sizes[storage._cdata] = size
    return storage


def _load(storage: Any, location: str) -> Any:
    """For `torch.load`: what was saved from a device, or is mapped to one."""
    return _to_device(storage, torch.device(location)) if location.startswith("cuda") else None
