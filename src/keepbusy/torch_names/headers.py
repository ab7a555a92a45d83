"""Of PyTorch's C++: the classes whose virtual methods the virtual GPU replaces, as the headers in the installed wheel
declare them, and the symbols by which their objects are found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from keepbusy.torch_names import PROBES, MissingName, Probe

_INCLUDES = Path(torch.__file__).parent / "include"

HOOKS = (
    ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface"),
    ("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface"),
)
GUARD = (("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface"),)


class Mismatch(RuntimeError):  # noqa: N818  # it names what is wrong
    """This build of PyTorch has an unknown layout."""


def slots(classes: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The slot of each virtual method. `classes`: (header, class) pairs, the base class first."""
    methods: list[str] = []
    for header, name in classes:
        for method in _virtual_methods(_INCLUDES / header, name):
            if method.startswith("~"):
                # a destructor has two slots: the complete object's and the deleting one
                methods += [] if "~" in methods else ["~", "~delete"]
            elif method not in methods:  # an override keeps the slot of what it overrides
                methods.append(method)
    return {method: slot for slot, method in enumerate(methods)}


_NO_CODE = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*|#ifdef USE_ROCM.*?#endif|\[\[.*?\]\]', re.DOTALL)


def _virtual_methods(header: Path, name: str) -> Iterator[str]:
    if not header.exists():
        raise Mismatch(f"this PyTorch comes without {header.name}")
    source = _NO_CODE.sub("", header.read_text(encoding="utf-8"))
    begin = re.search(
        rf"(?:struct|class)\s+(?:\w+_API\s+)?{name}\b(?:\s*final)?\s*(?::\s*(?:public\s+)?[\w:]+\s*)?{{", source
    )
    if begin is None:
        raise Mismatch(f"{header.name} declares no {name}")
    body, inner_bodies = source[begin.end() :], 1
    while inner_bodies:  # the innermost ones first; each ends its declaration
        body, inner_bodies = re.subn(r"{[^{}]*}", ";", body)
    for statement in body.partition("}")[0].split(";"):
        method = re.search(r"(~?\w+)\s*\(", statement)
        if method and re.search(r"\b(virtual|override)\b", statement):
            yield method[1]


HOOKS_VTABLE, HOOKS_GETTER = "_ZTVN2at18CUDAHooksInterfaceE", "_ZN2at6detail12getCUDAHooksEv"
"""Symbols of libtorch_cpu.so."""
CPU_ALLOCATOR, GUARDS = "_ZN3c1015GetCPUAllocatorEv", "_ZN3c104impl26device_guard_impl_registryE"
"""Symbols of libc10.so."""
DDP_TIMERS = "_ZN4c10d13TimerRegistryEv"
"""Of libtorch_cpu.so, where it has PyTorch's distributed half."""
HOOKS_NEEDED = ("hasCUDA", "hasPrimaryContext", "init", "deviceCount", "isPinnedPtr", "getPinnedMemoryAllocator")
GUARD_NEEDED = ("type", "getDevice", "deviceCount", "getStream")


def _register(classes: Sequence[tuple[str, str]], needed: Sequence[str]) -> None:
    def check() -> bool:
        missing = [method for method in needed if method not in slots(classes)]
        if missing:
            raise MissingName(*missing)
        return True

    PROBES.append(Probe(f"C++ class {classes[-1][1]}", "`keepbusy run --on` has no virtual GPU", check))


_register(HOOKS, HOOKS_NEEDED)
_register(GUARD, GUARD_NEEDED)
