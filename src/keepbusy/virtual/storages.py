"""Storages: moving, resizing and loading them, which this build of PyTorch can do for host memory only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepbusy.virtual.current import CURRENT

_Storage = torch.UntypedStorage
_resize, _clone, _size = _Storage.resize_, _Storage.clone, torch._C.StorageBase.nbytes
_logical: dict[int, int] = {}
"""Of a shrunken storage its size as the program sees it. Its bytes stay, for FSDP will have them back."""


def patch() -> None:
    _Storage.cuda = _to_device
    _Storage.to = _storage_to
    _Storage._to = lambda self, *, device, non_blocking=False: _storage_to(self, device=device)
    _Storage.resize_, _Storage.size, _Storage.nbytes = _resized, _seen_size, _seen_size
    _Storage.clone = _cloned
    torch.TypedStorage.cuda = _typed_to_device
    torch.serialization.register_package(5, lambda _storage: None, _load)


def _to_device(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
    if storage.device.type == "cuda":
        return storage
    flat = Tensor().to(torch.uint8).set_(storage)
    return flat.to(torch.device("cuda", CURRENT.index(device)), non_blocking=non_blocking).untyped_storage()


def _storage_to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    return _to_device(storage, device, non_blocking) if torch.device(device).type == "cuda" else storage.cpu()


def _typed_to_device(typed: Any, device: Any = None, non_blocking: bool = False) -> Any:
    moved = _to_device(typed._untyped_storage, device, non_blocking)
    return torch.TypedStorage(wrap_storage=moved, dtype=typed.dtype, _internal=True)


def _cloned(storage: Any) -> Any:
    """Also what `copy.deepcopy` of a tensor comes down to."""
    if storage.device.type != "cuda":
        return _clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def _seen_size(storage: Any) -> int:
    return _logical[storage._cdata] if storage._cdata in _logical else _size(storage)


def _resized(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    whole = _size(storage)
    if size > whole:
        raise NotImplementedError("keepbusy's virtual GPU cannot grow a storage past its first size.")
    if size == whole:
        _logical.pop(storage._cdata, None)
    else:
        _logical[storage._cdata] = size
    return storage


def _load(storage: Any, location: str) -> Any:
    """For `torch.load`: what was saved from a device, or is mapped to one."""
    return _to_device(storage, torch.device(location)) if location.startswith("cuda") else None
