"""Makes PyTorch's C++ find CUDA: replaces its device guard and its CUDA hooks, and hides the timer of DDP.

Two objects with virtual methods get vtables in which some methods are replaced. Slot numbers are read from the headers
in the installed wheel, and their count is compared with the size of the vtable's symbol in the library. A difference
raises `Mismatch`, which the self-test reports before a program begins.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from keepbusy.torch_names import headers
from keepbusy.torch_names.headers import Mismatch
from keepbusy.virtual.machine import CURRENT
from keepbusy.virtual.pytorch.tensors import native_is_pinned, native_pins

DEVICE_TYPE, _META_TYPE = 1, 14
"""c10::DeviceType of CUDA, and of Meta tensors."""
CUDA_VERSION = torch.version.cuda or "13.0"
"""A build with CUDA keeps its version, since packages with native code check that theirs is the same."""
CUDNN_VERSION = 91_002

_LIBRARIES = Path(torch.__file__).parent / "lib"
_POINTER = 8
_PREAMBLE = 2
"""Words of a vtable before its first slot: the offset to the top, and the type information."""

_FOUND_WORDS, _SIZE_AT, _WITH_SYMBOL = 4, 16, 1
"""Words of the C library's Dl_info, the offset of the size in an Elf64_Sym, and RTLD_DL_SYMENT."""


def _symbol_size(address: int) -> int:
    """Bytes of the dynamic symbol at `address`; 0 where there is none."""
    details, symbol = (ctypes.c_void_p * _FOUND_WORDS)(), ctypes.c_void_p()
    is_known = ctypes.CDLL(None).dladdr1(ctypes.c_void_p(address), details, ctypes.byref(symbol), _WITH_SYMBOL)
    return ctypes.c_uint64.from_address(symbol.value + _SIZE_AT).value if is_known and symbol.value else 0


def _library(name: str) -> ctypes.CDLL:
    path = _LIBRARIES / name
    if not path.exists():
        raise Mismatch(f"this PyTorch has no {name}")
    return ctypes.CDLL(str(path))


def _address_of(shared: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(shared, name))
    except ValueError:
        raise Mismatch(f"no symbol {name}") from None


def _result_of(shared: ctypes.CDLL, name: str) -> Any:
    """The address that a C++ function without arguments returns."""
    return ctypes.CFUNCTYPE(ctypes.c_void_p)(_address_of(shared, name))()


def _areas(permission: str) -> Iterator[tuple[int, int]]:
    """Address ranges for which this process has a permission."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, *_ = line.split()
        if permission in permissions:
            low, _, high = bounds.partition("-")
            yield int(low, 16), int(high, 16)


_ALIVE: list[Any] = []
"""Objects that native code points to: they are never freed."""


class Vtable:
    """A copy of a C++ vtable whose methods can be replaced. `address`: that of its first slot."""

    def __init__(self, address: int, slots: Mapping[str, int]) -> None:
        executable = list(_areas("x"))
        targets = (ctypes.c_void_p.from_address(address + _POINTER * slot).value or 0 for slot in range(len(slots)))
        if not all(any(low <= target < high for low, high in executable) for target in targets):
            raise Mismatch("a vtable is shorter than its header says")
        words = len(slots) + _PREAMBLE
        source = (ctypes.c_char * (_POINTER * words)).from_address(address - _POINTER * _PREAMBLE)
        self._words = (ctypes.c_void_p * words).from_buffer_copy(source)
        self._slots = slots
        self.address = ctypes.addressof(self._words) + _POINTER * _PREAMBLE
        _ALIVE.append(self._words)

    def put(self, method: str, result: Any, arguments: Sequence[Any], replacement: Callable[..., Any]) -> None:
        """Replace one method, if this version has it. `replacement` is called without `this`."""
        native = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(lambda _this, *args: replacement(*args))
        _ALIVE.append(native)
        self._put_address(method, ctypes.cast(native, ctypes.c_void_p).value)

    def put_constant(self, method: str, value: int) -> None:
        """Replace one method by machine code that returns a small number, and zero in a second register.

        Python called from there would lose an exception that is being raised, such as that of Ctrl-C.
        """
        code = {
            "x86_64": b"\xb8" + struct.pack("<I", value) + b"\x31\xd2\xc3",
            "aarch64": struct.pack("<3I", 0x52800000 | value << 5, 0xD2800001, 0xD65F03C0),
        }.get(platform.machine())
        if code is None:
            raise Mismatch(f"the virtual GPU does not know processors of the kind {platform.machine()}")
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        _ALIVE.append(page)
        self._put_address(method, ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def _put_address(self, method: str, function: int | None) -> None:
        if method in self._slots:
            self._words[_PREAMBLE + self._slots[method]] = function

    def need(self, *methods: str) -> None:
        missing = [method for method in methods if method not in self._slots]
        if missing:
            raise Mismatch(f"no method {', '.join(missing)}")


# The CUDA hooks, by which PyTorch's device-independent half asks for CUDA.
#
# The object is the interface itself in a CPU build, and the real hooks in a CUDA build. Neither has state, so both get
# the same copy of the *interface's* vtable. The real CUDA cannot be reached through it, and methods that are not
# replaced report that CUDA is missing.


def replace_hooks() -> Callable[[], None]:
    """Make C++ find CUDA; returns a function that undoes it."""
    shared = _library("libtorch_cpu.so")
    methods = headers.slots(headers.HOOKS)
    interface = _address_of(shared, headers.HOOKS_VTABLE)
    size = _symbol_size(interface)
    if size != _POINTER * (len(methods) + _PREAMBLE):
        raise Mismatch(f"the CUDA hooks have {size // _POINTER - _PREAMBLE} slots, their header says {len(methods)}")
    vtable = Vtable(interface + _POINTER * _PREAMBLE, methods)
    vtable.need(*headers.HOOKS_NEEDED)
    allocator = _result_of(_library("libc10.so"), headers.CPU_ALLOCATOR)

    def about_to_pin() -> Any:
        native_pins()
        return allocator

    flag, byte, pointer = ctypes.c_bool, ctypes.c_int8, ctypes.c_void_p
    for method in ("isBuilt", "isAvailable", "hasCUDA", "hasPrimaryContext"):
        vtable.put_constant(method, True)
    for method in ("deviceCount", "getNumGPUs"):
        vtable.put_constant(method, CURRENT.count)
    for names, result, arguments, answer in (
        ("init", None, (), lambda: None),
        ("setCurrentDevice", None, (byte,), lambda device: CURRENT.change(device) and None),
        ("getCurrentDevice current_device", byte, (), lambda: CURRENT.device),
        ("exchangeDevice maybeExchangeDevice", byte, (byte,), CURRENT.change),
        ("isPinnedPtr", flag, (pointer,), lambda address: native_is_pinned(address or 0)),
        ("getPinnedMemoryAllocator", pointer, (), about_to_pin),
        ("getCUDADeviceAllocator", pointer, (), lambda: allocator),
        ("versionCuDNN versionRuntimeCuDNN", ctypes.c_long, (), lambda: CUDNN_VERSION),
        ("deviceSynchronize", None, (byte,), lambda _device: None),
    ):
        for method in names.split():
            vtable.put(method, result, arguments, answer)
    if CURRENT.count == 1:
        for method in ("getCurrentDevice", "current_device", "exchangeDevice", "maybeExchangeDevice"):
            vtable.put_constant(method, 0)
    hooks = ctypes.c_void_p.from_address(_result_of(shared, headers.HOOKS_GETTER))
    before, hooks.value = hooks.value, vtable.address
    return lambda: setattr(hooks, "value", before)


# The device guard, by which C++ reads and changes the current device and stream.
#
# PyTorch keeps a guard for each device type in a registry, an object without state. CUDA gets that of Meta tensors,
# which changes nothing: devices and streams are kept in Python, and each kernel finds them by its tensors. C++ sees one
# stream, the first device's. Methods that leave a device or a stream must not be written in Python, which would lose an
# exception that is being raised.


def replace_guard() -> Callable[[], None]:
    """Register a guard for CUDA; returns a function that puts a harmless one in its place."""
    shared = _library("libc10.so")
    size = _symbol_size(_address_of(shared, headers.GUARDS))
    if size < _POINTER * (_META_TYPE + 1):
        raise Mismatch("the registry of device guards has another shape")
    registry = (ctypes.c_void_p * (size // _POINTER)).in_dll(shared, headers.GUARDS)
    meta = registry[_META_TYPE]
    if not meta:
        raise Mismatch("there is no device guard for Meta tensors")
    vtable = Vtable(ctypes.c_void_p.from_address(meta).value or 0, headers.slots(headers.GUARD))
    vtable.need(*headers.GUARD_NEEDED)
    vtable.put_constant("type", DEVICE_TYPE)
    vtable.put_constant("deviceCount", CURRENT.count)
    pair = ctypes.c_int16  # c10::Device is {int8 type, int8 index}, passed in one register
    if CURRENT.count == 1:
        vtable.put_constant("getDevice", DEVICE_TYPE)
    else:
        vtable.put("getDevice", pair, (), lambda: DEVICE_TYPE | CURRENT.device << 8)
    for method in ("getStream", "getDefaultStream", "exchangeStream"):
        vtable.put_constant(method, DEVICE_TYPE)  # {{CUDA, 0}, 0}
    guard = ctypes.c_void_p(vtable.address)
    _ALIVE.append(guard)
    registry[DEVICE_TYPE] = ctypes.addressof(guard)
    # late C++ destructors must not call Python after it has ended
    return lambda: registry.__setitem__(DEVICE_TYPE, meta)


# DDP times its backward pass with a timer that it looks up in a registry by device type. On a CUDA build that timer
# uses native events. Entries cannot be removed from the registry, so the key of CUDA's entry is overwritten, after the
# layout of the map has been checked.

_NO_DEVICE_TYPE = 120


def timer_keys() -> dict[int, ctypes.c_int8]:
    """The keys in the registry of timers, by value; raises `Mismatch` unless the whole map has the expected layout.

    A `std::unordered_map` is the address of its buckets, their count, its first node and its length. A bucket holds
    the node before its own first node. A node is the address of the next node, and a key, which is its own hash.
    """
    make = getattr(_library("libtorch_cpu.so"), headers.DDP_TIMERS, None)
    if make is None:
        return {}
    make.restype = ctypes.c_void_p
    word = ctypes.c_uint64.from_address
    registry = make()
    buckets, count, first, length = (word(registry + _POINTER * index).value for index in range(4))
    if not (0 < count < 4096 and 0 < length < 16 and _is_mapped(buckets, _POINTER * count)):
        raise Mismatch("the registry of DDP's timers has another shape")
    keys: dict[int, ctypes.c_int8] = {}
    before, node = registry + 2 * _POINTER, first
    for _ in range(length):
        if not _is_mapped(node, 2 * _POINTER):
            raise Mismatch("the registry of DDP's timers has another shape")
        key = ctypes.c_int8.from_address(node + _POINTER)
        starts_bucket = word(buckets + _POINTER * (key.value % count)).value == before
        if key.value in keys or not (starts_bucket or any(other % count == key.value % count for other in keys)):
            raise Mismatch("the registry of DDP's timers has another order")
        keys[key.value] = key
        before, node = node, word(node).value
    if node or 0 not in keys:  # every build has the CPU's timer
        raise Mismatch("the registry of DDP's timers has another length")
    return keys


def hide_native_timer() -> None:
    """DDP finds no timer for CUDA and goes without one."""
    key = timer_keys().get(DEVICE_TYPE)
    if key is not None:
        key.value = _NO_DEVICE_TYPE


def _is_mapped(address: int, size: int) -> bool:
    """Whether this process may read there."""
    return any(low <= address and address + size <= high for low, high in _areas("r"))
