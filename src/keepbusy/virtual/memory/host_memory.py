"""Pinned host memory: which addresses are, and how tensors come to be there."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

NativeCall: TypeAlias = tuple[tuple[CodeType, int], ...]
"""Each function on the stack, and the instruction that it is at."""
_HOOKS = ("keepbusy.virtual.memory.", "keepbusy.virtual.cpp_hooks")
"""Modules whose functions native code calls back."""


class Pages:
    """Bytes that results hold in memory of the host, and how many of them were touched at once so far.

    The C library hands out again what was freed, which is fast. What was never touched the kernel maps first, page by
    page, and that takes several times as long as the copy itself. Large blocks it maps anew each time.
    """

    def __init__(self, mapped: int) -> None:
        """`mapped`: so large blocks are never handed out again."""
        self.mapped = mapped
        self._held = self._touched = 0

    def take(self, size: int, holder: Any) -> int:
        """Memory that lasts as long as `holder`; returns how much of it is touched for the first time."""
        if size >= self.mapped:
            return size
        self._held += size
        weakref.finalize(holder, self._free, size)
        new = max(0, self._held - self._touched)
        self._touched += new
        return min(size, new)

    def _free(self, size: int) -> None:
        self._held -= size


class _Registered:
    """Memory that is pinned until it is said not to be."""

    def expired(self) -> bool:
        return False


_PINNED: dict[int, StorageWeakRef | _Registered] = {}
_SWEEP_AT = 4096
_pins_within: dict[int, NativeCall] = {}
"""Of each thread, the call in which native code was given an allocator of pinned memory and has not yet looked at what
came of it."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and is_pinned_address(_address(tensor))


def is_pinned_address(address: int) -> bool:
    """Of the begin of a storage."""
    storage = _PINNED.get(address)
    return storage is not None and not storage.expired()


def native_pins() -> None:
    """Native code takes memory that shall be pinned; where it lies, nobody tells us."""
    _pins_within[get_ident()] = _native_call()


def native_is_pinned(address: int) -> bool:
    """What native code hears of an address: DDP looks whether the memory that it has just taken is pinned.

    An address that we do not know is that memory only within the call that took it.
    """
    if is_pinned_address(address):
        return True
    thread = get_ident()
    return thread in _pins_within and _pins_within.pop(thread) == _native_call()


def _native_call() -> NativeCall:
    """Where the program, and PyTorch's Python, called into native code; nowhere in a thread of its own."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if found or not frame.f_globals.get("__name__", "").startswith(_HOOKS):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def pin(tensor: Tensor) -> Tensor:
    """Say of a host tensor's memory that it is pinned; returns the tensor."""
    if len(_PINNED) > _SWEEP_AT:
        for address in [address for address, storage in _PINNED.items() if storage.expired()]:
            del _PINNED[address]
    _PINNED[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def register(address: int, _size: int, _flags: int) -> int:
    """cudaHostRegister, of a storage from its begin."""
    _PINNED[address] = _Registered()
    return 0


def unregister(address: int) -> int:
    """cudaHostUnregister."""
    _PINNED.pop(address, None)
    return 0


def pinned_copy(tensor: Tensor) -> Tensor:
    """What `Tensor.pin_memory` returns."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else pin(tensor.detach().clone(memory_format=torch.preserve_format))


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
