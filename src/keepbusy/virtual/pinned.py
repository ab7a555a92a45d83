"""Pinned host memory: which addresses are, and how tensors come to be there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_PINNED: dict[int, StorageWeakRef] = {}
_SWEEP_AT = 4096
_asked_for: list[bool] = []
"""Whether native code was given an allocator of pinned memory, and has not looked at what came of it."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and is_pinned_address(_address(tensor))


def is_pinned_address(address: int) -> bool:
    """Of the begin of a storage."""
    storage = _PINNED.get(address)
    return storage is not None and not storage.expired()


def asked_for() -> None:
    """Native code takes memory that shall be pinned; where it lies, nobody tells us."""
    _asked_for[:] = [True]


def answer(address: int) -> bool:
    """What native code hears of an address: DDP looks whether the memory that it has just taken is pinned."""
    if is_pinned_address(address):
        return True
    return bool(_asked_for) and _asked_for.pop()


def pin(tensor: Tensor) -> Tensor:
    """Say of a host tensor's memory that it is pinned; returns the tensor."""
    if len(_PINNED) > _SWEEP_AT:
        for address in [address for address, storage in _PINNED.items() if storage.expired()]:
            del _PINNED[address]
    _PINNED[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def pinned_copy(tensor: Tensor) -> Tensor:
    """What `Tensor.pin_memory` returns."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else pin(tensor.detach().clone(memory_format=torch.preserve_format))


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
