"""A copy of a C++ vtable in which single methods are ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepbusy.virtual.abi import POINTER, PREAMBLE, Mismatch, code_slots

_ALIVE: list[Any] = []
"""What native code points to must outlive everything: it is never freed."""


class Vtable:
    """Copied from `address`, which points to the first slot, as an object's first word does."""

    def __init__(self, address: int, slots: Mapping[str, int]) -> None:
        if code_slots(address) < len(slots):
            raise Mismatch("a vtable is shorter than its header says")
        words = len(slots) + PREAMBLE
        source = (ctypes.c_char * (POINTER * words)).from_address(address - POINTER * PREAMBLE)
        self._words = (ctypes.c_void_p * words).from_buffer_copy(source)
        self._slots = slots
        _ALIVE.append(self._words)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words) + POINTER * PREAMBLE

    def put(self, method: str, result: Any, arguments: Sequence[Any], does: Callable[..., Any]) -> None:
        """Replace one method, where this version has it. `does` is called without `this`."""
        if method not in self._slots:
            return
        native = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(lambda _this, *given: does(*given))
        _ALIVE.append(native)
        self._words[PREAMBLE + self._slots[method]] = ctypes.cast(native, ctypes.c_void_p).value

    def need(self, *methods: str) -> None:
        missing = [method for method in methods if method not in self._slots]
        if missing:
            raise Mismatch(f"no method {', '.join(missing)}")


def first_word(address: int) -> ctypes.c_void_p:
    """The first word of an object: the address of its vtable, to be read and written."""
    return ctypes.c_void_p.from_address(address)


def keep_alive(thing: Any) -> None:
    _ALIVE.append(thing)
