"""Tensors that carry the CUDA device over host memory.

A DLPack capsule names its device in one word. Written anew, it makes a tensor of the other device
over the same memory, without a copy: `to_device` lets a host tensor be seen as one of the device,
`to_host` back again. Dispatch, autograd and autocast then see a CUDA tensor, not an imitation.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

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


def to_host_as_seen(tensor: Tensor) -> Tensor:
    """As `to_host`, with conjugate and negative bits kept: for copies, which those keys let through."""
    return as_seen(to_host(tensor), tensor)


def as_seen(host: Tensor, tensor: Tensor) -> Tensor:
    """A host tensor with the conjugate and negative bits of another."""
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


def host_of(value: Any) -> Any:
    """Device tensors as host tensors, wherever they stand in lists; all else as it is."""
    return map_tensors(lambda one: to_host(one) if one.is_cuda else one, value)
