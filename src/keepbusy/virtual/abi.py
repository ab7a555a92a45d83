"""Where methods stand in the two C++ vtables that the virtual device replaces.

Slot numbers are read from the headers inside the installed wheel and held against the size of the
vtable's symbol in the library. Nothing is guessed: what does not agree raises `Mismatch`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

LIBRARIES = Path(torch.__file__).parent / "lib"
INCLUDES = Path(torch.__file__).parent / "include"
POINTER = 8
PREAMBLE = 2
"""Words of a vtable before its first slot: the offset to the top, and the type information."""

HOOKS = (
    ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface"),
    ("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface"),
)
GUARD = (("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface"),)


class Mismatch(RuntimeError):  # noqa: N818  # what is wrong, not that something is
    """This build of PyTorch is laid out in a way that we do not know."""


def slots(classes: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Of each virtual method its slot. `classes` are (header, class), the base first."""
    found: list[str] = []
    for header, name in classes:
        for method in _virtual_methods(INCLUDES / header, name):
            if method.startswith("~"):
                # a destructor has two slots: the complete object's and the deleting one
                found += [] if "~" in found else ["~", "~delete"]
            elif method not in found:  # an override keeps the slot of what it overrides
                found.append(method)
    return {method: slot for slot, method in enumerate(found)}


def _virtual_methods(header: Path, name: str) -> Iterator[str]:
    if not header.exists():
        raise Mismatch(f"this PyTorch comes without {header.name}")
    source = _without_comments(header.read_text(encoding="utf-8"))
    begin = re.search(
        rf"(?:struct|class)\s+(?:\w+_API\s+)?{name}\b(?:\s*final)?\s*(?::\s*(?:public\s+)?[\w:]+\s*)?{{", source
    )
    if begin is None:
        raise Mismatch(f"{header.name} declares no {name}")
    for statement in _top_level(source, begin.end()).split(";"):
        method = re.search(r"(~?\w+)\s*\(", statement)
        if method and re.search(r"\b(virtual|override)\b", statement):
            yield method[1]


def _without_comments(source: str) -> str:
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    source = re.sub(r"//[^\n]*", "", source)
    source = re.sub(r'"(?:\\.|[^"\\])*"', '""', source)
    source = re.sub(r"#ifdef USE_ROCM.*?#endif", "", source, flags=re.DOTALL)
    return re.sub(r"\[\[.*?\]\]", "", source)


def _top_level(source: str, begin: int) -> str:
    """The text of a class from its opening brace on, without what stands in inner braces."""
    depth, kept, place = 1, [], begin
    while depth:
        letter = source[place]
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "{" and depth == 2:
            kept.append(";")  # a body ends its declaration
        elif depth == 1 and letter != "}":
            kept.append(letter)
        place += 1
    return "".join(kept)


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class _Found(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def symbol_size(address: int) -> int | None:
    """Bytes of the dynamic symbol at `address`; None where this C library cannot say."""
    look_up = getattr(ctypes.CDLL(None), "dladdr1", None)
    if look_up is None:
        return None
    look_up.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Found), ctypes.POINTER(ctypes.POINTER(_Symbol)), ctypes.c_int]
    found, symbol = _Found(), ctypes.POINTER(_Symbol)()
    with_symbol = 1  # RTLD_DL_SYMENT
    if not look_up(address, ctypes.byref(found), ctypes.byref(symbol), with_symbol) or not symbol:
        return None
    return int(symbol.contents.size)


def library(name: str) -> ctypes.CDLL:
    path = LIBRARIES / name
    if not path.exists():
        raise Mismatch(f"this PyTorch has no {name}")
    return ctypes.CDLL(str(path))


def function(shared: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    """A C++ function that takes nothing and returns a pointer."""
    try:
        found = shared[name]
    except AttributeError:
        raise Mismatch(f"no symbol {name}") from None
    found.restype = ctypes.c_void_p
    return found


def address_of(shared: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(shared, name))
    except ValueError:
        raise Mismatch(f"no symbol {name}") from None


def code_slots(vtable: int, most: int = 128) -> int:
    """How many leading slots point to code: no vtable is longer than that."""
    executable = [_bounds(line) for line in Path("/proc/self/maps").read_text().splitlines() if "x" in line.split()[1]]
    for slot in range(most):
        target = ctypes.c_void_p.from_address(vtable + POINTER * slot).value or 0
        if not any(low <= target < high for low, high in executable):
            return slot
    return most


def _bounds(line: str) -> tuple[int, int]:
    low, _, high = line.split(maxsplit=1)[0].partition("-")
    return int(low, 16), int(high, 16)
