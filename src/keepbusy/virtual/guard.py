"""The device guard of CUDA: how C++ learns and changes the current device.

PyTorch keeps one guard a device type in a registry. Ours is one that PyTorch itself builds for
devices written in Python; it is moved to CUDA's place, with the methods replaced that know the
current device. There is one stream a device in C++; streams live in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from keepbusy.virtual.abi import GUARD, POINTER, Mismatch, address_of, library, slots, symbol_size
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.vtable import Vtable, first_word, keep_alive

CUDA, META = 1, 14
"""c10::DeviceType."""
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


def replace_guard() -> Callable[[], None]:
    """Put our guard into CUDA's place; returns what makes it harmless again."""
    registry = _registry()
    where = _python_guard(registry)
    vtable = Vtable(first_word(where).value or 0, slots(GUARD))
    vtable.need("type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice", "deviceCount")
    _fill(vtable)
    first_word(where).value = vtable.address
    registry[CUDA] = where

    def undo() -> None:
        # late C++ destructors find Meta's guard, which does nothing, instead of a Python that is gone
        registry[CUDA] = registry[META]

    return undo


def _registry() -> ctypes.Array[ctypes.c_void_p]:
    shared = library("libc10.so")
    size = symbol_size(address_of(shared, _REGISTRY)) or 0
    if size < POINTER * (META + 1):
        raise Mismatch("the registry of device guards has another shape")
    return (ctypes.c_void_p * (size // POINTER)).in_dll(shared, _REGISTRY)


def _python_guard(registry: ctypes.Array[ctypes.c_void_p]) -> int:
    """The address of a guard made by PyTorch for a device written in Python, taken out of its usual place."""
    python = getattr(torch._C, "_acc", None)
    if python is None or not hasattr(python, "register_python_privateuseone_device_guard"):
        raise Mismatch("this PyTorch has no device guards written in Python; it has them from 2.9 on")

    class Guard(python.DeviceGuard):  # type: ignore[misc, name-defined]
        def type_(self) -> object:
            return torch._C._autograd.DeviceType.CUDA

    ours = Guard()
    keep_alive(ours)
    usual = int(torch._C._autograd.DeviceType.PrivateUse1.value)
    if registry[usual] or not python.register_python_privateuseone_device_guard(ours):
        raise Mismatch("another device backend has registered itself as PrivateUse1")
    where = registry[usual]
    registry[usual] = None
    if not where:
        raise Mismatch("the device guard did not appear in its registry")
    return int(where)


def _fill(vtable: Vtable) -> None:
    byte, pair = ctypes.c_int8, ctypes.c_int16  # c10::Device is {int8 type, int8 index}, passed in one register
    vtable.put("type", byte, (), lambda: CUDA)
    vtable.put("getDevice", pair, (), lambda: _device(CURRENT.device))
    vtable.put("exchangeDevice", pair, (pair,), lambda device: _device(CURRENT.exchange(device >> 8)))
    vtable.put("setDevice", None, (pair,), _set)
    vtable.put("uncheckedSetDevice", None, (pair,), _set)
    vtable.put("deviceCount", byte, (), lambda: CURRENT.count)


def _device(index: int) -> int:
    return CUDA | index << 8


def _set(device: int) -> None:
    CURRENT.exchange(device >> 8)
