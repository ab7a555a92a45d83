"""The CUDA hooks: how PyTorch's device-independent half asks whether CUDA is there.

The object may be the interface itself (a CPU build) or the real hooks (a CUDA build). Both have no
state, so either gets the same copy of the *interface's* vtable: nothing of the real CUDA stays
reachable through it, and what we do not answer says that it is not there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from keepbusy.virtual.abi import HOOKS, POINTER, PREAMBLE, Mismatch, address_of, function, library, slots, symbol_size
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.vtable import Vtable, first_word

CUDNN = 91_002
"""The version of cuDNN that we say is there."""


def replace_hooks(is_pinned: Callable[[int], bool], pins: Callable[[], None]) -> Callable[[], None]:
    """Let C++ believe in CUDA; returns what takes it back.

    `is_pinned` is asked with an address; `pins` hears that native code is about to take pinned memory.
    """
    shared = library("libtorch_cpu.so")
    methods = slots(HOOKS)
    interface = address_of(shared, "_ZTVN2at18CUDAHooksInterfaceE")
    size = symbol_size(interface)
    if size not in (None, POINTER * (len(methods) + PREAMBLE)):
        raise Mismatch(f"the CUDA hooks have {size // POINTER - PREAMBLE} slots, their header says {len(methods)}")
    vtable = Vtable(interface + POINTER * PREAMBLE, methods)
    vtable.need("hasCUDA", "hasPrimaryContext", "init", "deviceCount", "isPinnedPtr", "getPinnedMemoryAllocator")
    _fill(vtable, is_pinned, pins)
    hooks = first_word(function(shared, "_ZN2at6detail12getCUDAHooksEv")())
    before = hooks.value
    hooks.value = vtable.address

    def undo() -> None:
        hooks.value = before

    return undo


def _fill(vtable: Vtable, is_pinned: Callable[[int], bool], pins: Callable[[], None]) -> None:
    flag, byte, pointer = ctypes.c_bool, ctypes.c_int8, ctypes.c_void_p
    for method in ("isBuilt", "isAvailable", "hasCUDA"):
        vtable.put(method, flag, (), lambda: True)
    vtable.put("hasPrimaryContext", flag, (byte,), lambda _device: True)
    vtable.put("init", None, (), lambda: None)
    vtable.put("deviceCount", byte, (), lambda: CURRENT.count)
    vtable.put("getNumGPUs", ctypes.c_int, (), lambda: CURRENT.count)
    vtable.put("setCurrentDevice", None, (byte,), lambda device: CURRENT.change(device) and None)
    for method in ("getCurrentDevice", "current_device"):
        vtable.put(method, byte, (), lambda: CURRENT.device)
    for method in ("exchangeDevice", "maybeExchangeDevice"):
        vtable.put(method, byte, (byte,), CURRENT.change)
    vtable.put("isPinnedPtr", flag, (pointer,), lambda address: is_pinned(address or 0))
    allocator = function(library("libc10.so"), "_ZN3c1015GetCPUAllocatorEv")()

    def pinned_allocator() -> Any:
        pins()
        return allocator

    vtable.put("getPinnedMemoryAllocator", pointer, (), pinned_allocator)
    vtable.put("getCUDADeviceAllocator", pointer, (), lambda: allocator)
    for method in ("versionCuDNN", "versionRuntimeCuDNN"):
        vtable.put(method, ctypes.c_long, (), lambda: CUDNN)
    vtable.put("deviceSynchronize", None, (byte,), lambda _device: None)
