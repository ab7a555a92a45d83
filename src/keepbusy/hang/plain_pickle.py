"""Pickles of lists, dicts, strings and numbers, read without being able to do anything else.

Python's own reader runs what a pickle names. This one knows the two dozen instructions that build plain values; any
other refuses the file. Nothing it allocates is larger than the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAGIC = b"\x80"
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_NUMBERS = {0x4A: "<i", 0x4B: "<B", 0x4D: "<H", 0x47: ">d"}
_TEXTS = {0x8C: "<B", 0x58: "<I", 0x8D: "<Q"}
_KEPT = {0x71: "<B", 0x72: "<I"}
_FETCHED = {0x68: "<B", 0x6A: "<I"}
_PASSED = {0x80: 1, 0x95: 8}
"""Instructions without a meaning here, and their bytes: the protocol's number, and how long a part is."""
_STOP, _MARK, _LIST, _DICT, _LONG, _REMEMBER = 0x2E, 0x28, 0x5D, 0x7D, 0x8A, 0x94


def loads(data: bytes) -> Any:
    """The value; ValueError for anything that is no plain one."""
    try:
        return _Machine(data).value()
    except (struct.error, IndexError, KeyError, TypeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from None


class _Machine:
    """A stack, and what was put by for later."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            self._step(code)

    def _step(self, code: int) -> None:
        if code in _FETCHED:
            self.stack.append(self.memo[self._number(_FETCHED[code])])
        elif code in _KEPT:
            self.memo[self._number(_KEPT[code])] = self.stack[-1]
        elif code in _NUMBERS:
            self.stack.append(self._number(_NUMBERS[code]))
        elif code in _TEXTS:
            self.stack.append(str(self._bytes(self._number(_TEXTS[code])), "utf-8", "replace"))
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _PASSED:
            self._bytes(_PASSED[code])
        elif code in _OTHERS:
            _OTHERS[code](self)
        else:
            raise ValueError(f"instruction {code:#04x} at byte {self.at - 1}, which plain values do not need")

    def _bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("cut off")
        return self.data[self.at - size : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        found, self.stack[begin:] = self.stack[begin:], []
        return found

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def new_list(self) -> None:
        self.stack.append([])

    def new_dict(self) -> None:
        self.stack.append({})

    def long(self) -> None:
        self.stack.append(int.from_bytes(self._bytes(self._number("<B")), "little", signed=True))

    def remember(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def append(self) -> None:
        value = self.stack.pop()
        self.stack[-1].append(value)

    def extend(self) -> None:
        values = self._since_mark()
        self.stack[-1].extend(values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][key] = value

    def set_items(self) -> None:
        values = self._since_mark()
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def tuple_since_mark(self) -> None:
        self.stack.append(tuple(self._since_mark()))

    def tuple_of(self, size: int) -> None:
        if len(self.stack) < size:
            raise ValueError("damaged")
        found, self.stack[-size:] = tuple(self.stack[-size:]), []
        self.stack.append(found)


_OTHERS: dict[int, Callable[[_Machine], None]] = {
    _MARK: _Machine.mark, _LIST: _Machine.new_list, _DICT: _Machine.new_dict, _LONG: _Machine.long,
    _REMEMBER: _Machine.remember, 0x61: _Machine.append, 0x65: _Machine.extend, 0x73: _Machine.set_item,
    0x75: _Machine.set_items, 0x74: _Machine.tuple_since_mark,
    0x85: lambda machine: machine.tuple_of(1), 0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
}  # fmt: skip
