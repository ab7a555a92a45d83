"""A fix that can be switched on and off while the program runs, what it has done so far, and what is our own doing."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from keepbusy.instrument.lines import HIDDEN, OUTSIDE, PROGRAM_CODE, USER, kind_of, shown

Place: TypeAlias = tuple[str, int]
"""A file and a line."""
CHECKED = 3
"""So many times a thing is done both ways and compared."""


class FixSwitch:
    """Of one fix. What it does it does the plain way while `on` is false."""

    def __init__(self, name: str, about: str, tolerance: str = "") -> None:
        self.name, self.about, self.tolerance = name, about, tolerance
        self.on = False
        self.done: Counter[Place] = Counter()
        self.checked = 0
        """How often it was done both ways and compared."""
        self.off_because = ""
        self.saved: int | None = None
        """Of a turn, where turns with it and without it were compared."""
        self.notes: list[str] = []
        """What else there is to tell of it."""

    def count(self, frame: FrameType | None = None, times: int = 1) -> None:
        """Done once more, at the user's line."""
        self.done[place_of(frame or sys._getframe(1))] += times

    @property
    def places(self) -> list[tuple[str, int]]:
        """The user's lines, and how often at each."""
        by_place = self.done.most_common()
        return [(f"{shown(file)}:{line}" if file else "somewhere in C++", count) for (file, line), count in by_place]

    def checked_against(self, made: Any, plain: Callable[[], Any], different: str) -> Any:
        """What was made; the first times it must be what the plain way makes, or that counts from then on."""
        if self.checked >= CHECKED:
            return made
        self.checked += 1
        with ours():
            other = plain()
        if same_bits(made, other):
            return made
        self.stop(different)
        return other

    def stop(self, why: str) -> None:
        """For good."""
        self.on = False
        self.off_because = self.off_because or why


_KINDS: dict[str, int] = {}


def place_of(frame: FrameType | None) -> Place:
    """The innermost line of the user's, else of a library's."""
    library: Place = ("", 0)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _KINDS.get(file)
        if kind is None:
            kind = _KINDS[file] = kind_of(file)
        if kind == USER:
            return file, frame.f_lineno
        if kind == OUTSIDE:
            break
        if kind != HIDDEN and not library[0]:
            library = file, frame.f_lineno
        frame = frame.f_back
    return library


class _Ours(threading.local):
    under_way = False


_OURS = _Ours()


@contextmanager
def ours() -> Iterator[None]:
    """Meanwhile what this thread asks of PyTorch is not the program's doing."""
    before, _OURS.under_way = _OURS.under_way, True
    try:
        yield
    finally:
        _OURS.under_way = before


def is_ours() -> bool:
    return _OURS.under_way


_SPELLED = {"float": "__float__", "int": "__int__", "bool": "__bool__"}


def replaced_by_program(names: Iterable[str]) -> str:
    """The first of these methods of tensors that is the program's own, which is to see all calls; "" if none is."""
    from torch import Tensor

    for name in names:
        method = getattr(Tensor, _SPELLED.get(name, name), None)
        code = getattr(method, "__code__", None) or getattr(type(method).__call__, "__code__", None)
        if code is not None and kind_of(code.co_filename) in PROGRAM_CODE:
            return name
    return ""


def makes_on_host() -> bool:
    """Whether new tensors that name no device are the host's. PyTorch has two settings for that, and tells of one."""
    import torch

    return torch.get_default_device().type == torch._C._get_default_device() == "cpu"


def same_bits(one: Any, other: Any) -> bool:
    """Whether two results are the same in type and value, also where neither is a number."""
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if not isinstance(one, torch.Tensor):
        return repr(one) == repr(other) if not hasattr(one, "tobytes") else bool(one.tobytes() == other.tobytes())
    if one.dtype != other.dtype or one.stride() != other.stride() or one.device != other.device:
        return False
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())
