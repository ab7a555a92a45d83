"""Tables of integers in few bytes, and back.

A column is first told apart from what can be guessed (the row before it, the start of its span),
then kept in as few bytes a number as its range needs, all first bytes before all second ones, since
the higher bytes are nearly always alike; then zlib finds the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from keepbusy.timeline.model import Ints

Columns: TypeAlias = dict[str, Ints]
Described: TypeAlias = tuple[str, str, int, int]
"""A packed column: its name, what its numbers were taken from, bytes a number, bytes in all."""

_LEVEL = 6
_GUESSES = {
    "start": "lane",
    "end": "start",
    "work": "length",
    "parent": "before",
    "source": "before",
    "target": "before",
    "marks": "before",
}
_WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_NEEDS = {"lane": ("lane",), "start": ("start",), "length": ("start", "end")}


def pack(table: Columns) -> Iterator[tuple[Described, bytes]]:
    """Each column, described and packed; what a column is guessed from comes before it."""
    for name in _ordered(table):
        guess = _guess(name, table)
        numbers = _narrow(_differences(table[name].astype(np.int64), guess, table))
        content = zlib.compress(_planes(numbers), _LEVEL)
        yield (name, guess, numbers.itemsize, len(content)), content


def unpack(described: list[Described], content: memoryview, rows: int) -> Columns:
    """The columns again; raises ValueError or the like for what `pack` did not write."""
    table: Columns = {}
    for name, guess, width, size in described:
        planes = _inflated(content[:size], rows * width)
        numbers = np.frombuffer(planes, np.uint8).reshape(width, rows).T
        differences = np.ascontiguousarray(numbers).view(_WIDTHS[width]).reshape(rows).astype(np.int64)
        table[name] = _summed(differences, guess, table)
        content = content[size:]
    return table


def _ordered(table: Columns) -> list[str]:
    first = [name for name in ("lane", "start", "end") if name in table]
    return first + [name for name in table if name not in first]


def _guess(name: str, table: Columns) -> str:
    guess = _GUESSES.get(name, "")
    return guess if all(needed in table for needed in _NEEDS.get(guess, ())) else ""


def _differences(numbers: Ints, guess: str, table: Columns) -> Ints:
    if guess == "before":
        return np.diff(numbers, prepend=np.int64(0))
    if guess == "lane":
        return np.diff(numbers[_by_lane(table)], prepend=np.int64(0))
    return numbers - _expected(guess, table)


def _summed(differences: Ints, guess: str, table: Columns) -> Ints:
    """64-bit sums wrap as the differences did, so even the ends of the range come back."""
    if guess == "before":
        return np.cumsum(differences)
    if guess == "lane":
        numbers = np.empty_like(differences)
        numbers[_by_lane(table)] = np.cumsum(differences)
        return numbers
    return differences + _expected(guess, table)


def _by_lane(table: Columns) -> Ints:
    return np.argsort(table["lane"], kind="stable")


def _expected(guess: str, table: Columns) -> Ints:
    if guess == "start":
        return table["start"]
    return table["end"] - table["start"] if guess == "length" else np.zeros(1, np.int64)


def _narrow(numbers: Ints) -> Ints:
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    fits = [dtype for dtype in _WIDTHS.values() if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max]
    narrow: Ints = numbers.astype(fits[0])
    return narrow


def _planes(numbers: Ints) -> bytes:
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T).tobytes()


def _inflated(content: memoryview, size: int) -> bytes:
    """Exactly so many bytes, and never more, whatever the content claims."""
    unpacker = zlib.decompressobj()
    planes = unpacker.decompress(content, size + 1)
    if len(planes) != size or not unpacker.eof:
        raise ValueError("a column of another length")
    return planes
