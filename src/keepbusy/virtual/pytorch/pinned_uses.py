"""What the program itself reads from and writes to pinned memory, while copies from or to it may be under way.

What a copy reads must be the same until the host has waited for it: if it is not, it was written to, by PyTorch or
through an array of `Tensor.numpy()`. If the functions that run then have one statement that does so, it is to blame.

On a modelled clock each function of PyTorch's that Python calls is seen, with its tensors. There reads are found, too,
and the line is always known. A view reads nothing.
"""

from __future__ import annotations

import ast
import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from keepbusy.instrument.lines import USER, kind_of, outwards, shown
from keepbusy.virtual.accesses import HOST, Use
from keepbusy.virtual.clock.order import Reached
from keepbusy.virtual.found_races import program_tree
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.pytorch.tensors import is_pinned, memory_at, tensors_in

_PLAIN_KINDS = (Tensor, Parameter)
"""Others may have no memory of their own, and their classes would be told that we look."""
_MOST_COPIED = 64
_WORDS = 1 << 18
"""Of larger memory so many are looked at."""
_WRITERS = frozenset(["copyto", "put", "place", "putmask"])
"""Functions of NumPy that write into their first argument."""
_WRITING_METHODS = frozenset(["fill", "sort", "partition", "put", "itemset", "setfield"])

# What is in memory that a copy reads.


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


# The statement that has changed it.


def _place_writing(copied: _Copied) -> int:
    """The one statement that writes there; nowhere if it cannot be told from others."""
    found = set[int]()
    for frame in outwards(sys._getframe(1)):
        if kind_of(frame.f_code.co_filename) != USER:
            continue
        names = {**frame.f_globals, **frame.f_locals}
        functions, writes = _writes_in(frame.f_code.co_filename)
        here = _innermost(functions, frame.f_lineno or 0)
        for line, target in writes:
            if _innermost(functions, line) != here:
                continue
            if any(0 <= one - copied.low < copied.size for one in _addresses(_held(target, names))):
                file = shown(frame.f_code.co_filename)
                found.add(MACHINE.clock.place(f"{file}({line}): {frame.f_code.co_name}"))
    return found.pop() if len(found) == 1 else 0


def _innermost(functions: list[tuple[int, int]], line: int) -> tuple[int, int]:
    """The function around a line, by its first line and its last."""
    return max((one for one in functions if one[0] <= line <= one[1]), default=(0, 0))


@cache
def _writes_in(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, ast.expr]]]:
    """The functions of a file, and its lines that may write into an array or a tensor, with what that is called."""
    functions, found = list[tuple[int, int]](), list[tuple[int, ast.expr]]()
    for node in ast.walk(program_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Assign):
            found += [(node.lineno, one.value) for one in node.targets if isinstance(one, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            found.append((node.lineno, node.target))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, one.value) for one in node.keywords if one.arg == "out"]
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
                writes = name in _WRITING_METHODS or (name.endswith("_") and not name.endswith("__"))
                found += [(node.lineno, node.func.value)] if writes else []
                found += [(node.lineno, node.args[0])] if name in _WRITERS and node.args else []
    return functions, found


def _held(name: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, an attribute or a part of one is, without running anything of the program's."""
    if isinstance(name, ast.Name):
        return names.get(name.id)
    if isinstance(name, ast.Subscript):
        return _held(name.value, names)
    if isinstance(name, ast.Attribute):
        return getattr(_held(name.value, names), "__dict__", {}).get(name.attr)
    return None


def _addresses(value: Any) -> list[int]:
    """Where an array or a tensor begins, or those of a list or a dict."""
    if isinstance(value, np.ndarray):
        return [value.ctypes.data]
    if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        return [value.data_ptr()]
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple) and len(value) <= _MOST_COPIED:
        return [one for part in value for one in _addresses(part)]
    return []


# What functions of PyTorch read and write.

_READS_VALUES = frozenset([
    "tolist", "item", "equal", "allclose", "is_nonzero", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__contains__", "__repr__", "__format__", "__deepcopy__",
])  # fmt: skip
"""Those that read values and return no tensor that shows it."""
_READS_FORM = frozenset(["__get__", "__set__", "new", "to"])
"""Those that return other tensors and read no values: where `to` copies, an operator notes it."""
_WRITES_FORM = frozenset([
    "requires_grad_", "share_memory_", "detach_", "resize_", "resize_as_", "unsqueeze_", "squeeze_", "transpose_", "t_",
    "swapaxes_", "swapdims_", "as_strided_", "set_", "rename_",
])  # fmt: skip
"""Those whose names say that they write, and that change a tensor's form alone."""


def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """A function of PyTorch's was called, on a modelled clock. On another one nothing stands around the program's own
    calls, for that would change which kernels PyTorch chooses."""
    if not MACHINE.memory.accesses.has_pinned or name in _READS_FORM or name.endswith("_as"):
        return
    given = [one for one in tensors_in([*args, *kwargs.values()]) if type(one) in _PLAIN_KINDS]
    try:
        used = [one for one in given if _is_in_use(one)]
    except RuntimeError:  # tensors without memory, as function transforms have them
        return
    made = [one for one in tensors_in(result) if type(one) in _PLAIN_KINDS] if used else []
    if not used or any(one.is_cuda for one in (*given, *made)):  # a copy, which its operator notes
        return
    written = tensors_in(kwargs.get("out")) + (tensors_in(args[0]) if args and _writes(name) else [])
    reads = name in _READS_VALUES or bool(written)
    if not (name.endswith("_like") or name.startswith("new_") or name in _WRITES_FORM):
        known = {one.untyped_storage().data_ptr() for one in given}
        reads |= any(one.untyped_storage().data_ptr() not in known for one in made if _is_dense(one))
    place = MACHINE.places.here()
    for one in used:
        writes = any(one is each for each in written)
        if writes:
            forget_copied(one)
        if writes or reads:
            MACHINE.memory.accesses.use_pinned(one, _memory_of(one), writes, HOST, 0, place)


def read(tensor: Tensor) -> None:
    """The program reads its values in a way that is no function of a tensor's: it pickles it."""
    if type(tensor) in _PLAIN_KINDS and _is_dense(tensor) and _is_in_use(tensor):
        MACHINE.memory.accesses.use_pinned(tensor, _memory_of(tensor), False, HOST, 0, MACHINE.places.here())


def _is_in_use(tensor: Tensor) -> bool:
    memory = _memory_of(tensor) if is_pinned(tensor) else None
    return memory is not None and MACHINE.memory.accesses.is_in_use(tensor.untyped_storage().data_ptr(), memory)


def _memory_of(tensor: Tensor) -> object:
    return memory_at(tensor.untyped_storage().data_ptr())


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_") and name not in _WRITES_FORM


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
