"""What the program itself reads from and writes to pinned memory, while copies from or to it may be under way.

PyTorch says of each function that Python calls which tensors go in and come out. That is looked at only from the first
copy on that does not block, and only of pinned tensors that a copy has used since the host last waited for it. A view
reads nothing.

An array of `Tensor.numpy()` does not tell what is done with it. But what a copy reads must be the same until the host
has waited for it: if it is not, an array was written to. If the functions that run then have one statement that does
so, it is to blame.
"""

from __future__ import annotations

import ast
import ctypes
import linecache
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepbusy.instrument.lines import USER, kind_of, outwards, shown
from keepbusy.virtual.accesses import HOST, Use
from keepbusy.virtual.clock.order import Reached
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.tensors import is_pinned, memory_at, tensors_in

_READS_VALUES = frozenset([
    "tolist", "item", "equal", "allclose", "is_nonzero", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__contains__", "__repr__", "__format__", "__deepcopy__",
])  # fmt: skip
"""Functions that read values and return no tensor that shows it."""
_ONLY_FORM = frozenset([
    "requires_grad_", "share_memory_", "detach_", "resize_", "resize_as_", "unsqueeze_", "squeeze_", "transpose_", "t_",
    "swapaxes_", "swapdims_", "as_strided_", "set_", "rename_", "apply_",
])  # fmt: skip
"""Functions whose names say that they write, and that change a tensor's form alone."""


class PinnedUses(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """At the bottom of a thread's modes, for the program's own come and go above it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tensors_in((*args, *kwargs.values()))
        if any(map(_is_in_use, given)):
            host = MACHINE.clock.pause()
            try:
                _note(getattr(func, "__name__", ""), args, kwargs, given, result)
            finally:
                host.resume()
        return result


class _Watched(threading.local):
    is_on = False


_WATCHED = _Watched()


# What is written through arrays.


class _Copied(NamedTuple):
    """Pinned memory that a copy reads, and what was in it."""

    memory: object  # what stands for it
    storage: int  # where that begins
    low: int
    size: int
    stream: int
    number: int
    print: int

    def is_there(self) -> bool:
        return memory_at(self.storage) is self.memory


_COPIED: list[_Copied] = []
_MOST_COPIED = 64
_WORDS = 1 << 18
"""Of larger memory so many are looked at."""
_WRITERS = {"copyto": 0, "put": 0, "place": 0, "putmask": 0}
"""Functions of NumPy that write into one of their arguments."""
_WRITING_METHODS = {"fill", "sort", "partition", "put", "itemset", "setfield"}


def copied_from(tensor: Tensor, stream: int, number: int) -> None:
    """A copy that does not block reads it."""
    storage, low, size = tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.nbytes
    _look_at([one for one in _COPIED if one.storage == storage])
    MACHINE.clock.order.before_host_waits = _about_to_wait
    if len(_COPIED) > _MOST_COPIED:  # of a program that waits for nothing; most of their memory is gone
        _COPIED[:] = [one for one in _COPIED if one.is_there()][-_MOST_COPIED:]
    if tensor.is_contiguous():
        _COPIED.append(_Copied(memory_at(storage), storage, low, size, stream, number, _print(low, size)))


def forget_copied(tensor: Tensor) -> None:
    """Something else changes it, which is noted."""
    storage = tensor.untyped_storage().data_ptr()
    _COPIED[:] = [one for one in _COPIED if one.storage != storage]


def forget_all_copied() -> None:
    """A graph is replayed, whose copies may change any of it."""
    _COPIED.clear()


def _about_to_wait(reached: Reached) -> None:
    if _COPIED:
        _look_at([one for one in _COPIED if reached.get(one.stream, 0) >= one.number])


def _look_at(copied: list[_Copied]) -> None:
    """Whether anything has changed. This is done once, for later changes are in order."""
    if not copied:
        return
    done = {id(one) for one in copied}
    _COPIED[:] = [one for one in _COPIED if id(one) not in done]
    for one in copied:
        if one.is_there() and _print(one.low, one.size) != one.print:
            use = Use(one.low, one.low + one.size, True, HOST, 0, _place_writing(one))
            MACHINE.memory.accesses.use_pinned_bytes(one.storage, one.memory, use)


def _print(low: int, size: int) -> int:
    words = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low))
    words = words[: len(words) // 8 * 8].view(np.uint64) if len(words) >= 8 else words.astype(np.uint64)
    some = words[:: max(1, len(words) // _WORDS)]
    return hash(some.tobytes())


def _place_writing(copied: _Copied) -> int:
    """The program's statement that writes into an array over this memory; nowhere if it cannot be told from others."""
    found = set[int]()
    for frame in outwards(sys._getframe(1)):
        if kind_of(frame.f_code.co_filename) != USER:
            continue
        names = {**frame.f_globals, **frame.f_locals}
        for line, target in _array_writes(frame.f_code.co_filename):
            array = _value(target, names)
            if isinstance(array, np.ndarray) and 0 <= array.ctypes.data - copied.low < copied.size:
                file = shown(frame.f_code.co_filename)
                found.add(MACHINE.clock.place(f"{file}({line}): {frame.f_code.co_name}"))
    return found.pop() if len(found) == 1 else 0


@cache
def _array_writes(file: str) -> list[tuple[int, ast.expr]]:
    """Of a file, the lines that may write into an array, and what that array is called."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = list[tuple[int, ast.expr]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [(node.lineno, one.value) for one in targets if isinstance(one, ast.Subscript)]
            found += [(node.lineno, one) for one in targets if isinstance(node, ast.AugAssign) and one is node.target]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, one.value) for one in node.keywords if one.arg == "out"]
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
                found += [(node.lineno, node.func.value)] if name in _WRITING_METHODS else []
                found += [(node.lineno, node.args[0])] if name in _WRITERS and node.args else []
    return found


def _value(name: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name or an attribute is, without running anything of the program's."""
    if isinstance(name, ast.Name):
        return names.get(name.id)
    if isinstance(name, ast.Subscript):  # a part of an array, or an array of a list
        whole = _value(name.value, names)
        if isinstance(whole, list | tuple):
            return next((one for one in whole if isinstance(one, np.ndarray)), None)
        return whole
    if isinstance(name, ast.Attribute):
        owner = _value(name.value, names)
        return getattr(owner, "__dict__", {}).get(name.attr)
    return None


# What is read and written by functions of PyTorch.


def watch() -> None:
    """From now on, in this thread."""
    if _WATCHED.is_on:
        return
    _WATCHED.is_on = True
    above = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    for mode in (PinnedUses(), *reversed(above)):
        torch._C._push_on_torch_function_stack(mode)


def read(tensor: Tensor) -> None:
    """The program reads its values in a way that is no function of a tensor's: it pickles it."""
    if tensor.layout is torch.strided and _is_in_use(tensor):
        MACHINE.memory.accesses.use_pinned(tensor, False, HOST, 0, MACHINE.places.here())


def _is_in_use(tensor: Tensor) -> bool:
    return is_pinned(tensor) and MACHINE.memory.accesses.is_in_use(tensor)


def _note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor], result: Any) -> None:
    made = tensors_in(result)
    if any(one.is_cuda for one in (*given, *made)):
        return  # a copy, whose operator has noted it
    written = tensors_in(kwargs.get("out"))
    if args and _writes(name):
        written += tensors_in(args[0])
    reads = name in _READS_VALUES or bool(written)
    if not (name.endswith("_like") or name.startswith("new_") or name in _ONLY_FORM):
        known = {one.untyped_storage().data_ptr() for one in given}
        reads |= any(one.untyped_storage().data_ptr() not in known for one in made if _is_dense(one))
    place = MACHINE.places.here()
    for one in filter(_is_in_use, given):
        writes = any(one is each for each in written)
        if writes:
            forget_copied(one)
        if writes or reads:
            MACHINE.memory.accesses.use_pinned(one, writes, HOST, 0, place)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_") and name not in _ONLY_FORM


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
