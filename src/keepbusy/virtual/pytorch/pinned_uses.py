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
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from keepbusy.program.lines import USER, kind_of, outwards, shown
from keepbusy.virtual.accesses import HOST
from keepbusy.virtual.clock.order import Command
from keepbusy.virtual.found_races import program_tree
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.memory_views import Extent
from keepbusy.virtual.pytorch import OPERATORS
from keepbusy.virtual.pytorch.tensors import is_pinned, memory_at, tensors_in

_PLAIN_KINDS = (Tensor, Parameter)
"""Others may have no memory of their own, and their classes would notice that we look."""
_MOST_COPIED = 64
_WORDS = 1 << 18
"""So many words of larger memory are looked at."""
# What is in memory that a copy reads.


class _Copied(NamedTuple):
    """Pinned memory that a copy reads, and what was in it."""

    memory: object  # what stands for it
    storage: int  # where that begins
    extent: Extent
    command: Command
    checksum: int

    def is_there(self) -> bool:
        return memory_at(self.storage) is self.memory


_COPIED: list[_Copied] = []


def note_copy(tensor: Tensor, command: Command) -> None:
    """A copy that does not block reads it."""
    storage, extent = tensor.untyped_storage().data_ptr(), Extent.of(tensor, tensor.data_ptr())
    _check(lambda copied: copied.storage == storage)
    MACHINE.clock.order.before_host_waits = lambda reached: _check(
        lambda copied: reached.get(copied.command.stream, 0) >= copied.command.number
    )
    if len(_COPIED) > _MOST_COPIED:  # of a program that waits for nothing; most of their memory is gone
        _COPIED[:] = [copied for copied in _COPIED if copied.is_there()][-_MOST_COPIED:]
    if tensor.is_contiguous():
        _COPIED.append(_Copied(memory_at(storage), storage, extent, command, _checksum(extent)))


def forget_copied(tensor: Tensor) -> None:
    """Something else changes it, which is noted."""
    storage = tensor.untyped_storage().data_ptr()
    _COPIED[:] = [copied for copied in _COPIED if copied.storage != storage]


def forget_all_copied() -> None:
    """A graph is replayed, whose copies may change any of it."""
    _COPIED.clear()


def _check(is_done: Callable[[_Copied], bool]) -> None:
    """Whether what copies have read has changed. This is asked once, for later changes are in order."""
    done = [copied for copied in _COPIED if is_done(copied)]
    if done:
        _COPIED[:] = [copied for copied in _COPIED if not is_done(copied)]
    for copied in done:
        if copied.is_there() and _checksum(copied.extent) != copied.checksum:
            host = Command(HOST, 0, _place_writing(copied.extent))
            MACHINE.memory.accesses.use_pinned(copied.storage, copied.memory, copied.extent, True, host)


def _checksum(extent: Extent) -> int:
    words = np.ctypeslib.as_array((ctypes.c_uint8 * (extent.high - extent.low)).from_address(extent.low))
    words = words[: len(words) // 8 * 8].view(np.uint64) if len(words) >= 8 else words.astype(np.uint64)
    return hash(words[:: max(1, len(words) // _WORDS)].tobytes())


# The statement that has changed it.


def _place_writing(extent: Extent) -> int:
    """The one statement that writes there; nowhere if there are several."""
    found = set[int]()
    for frame in outwards(sys._getframe(1)):
        if kind_of(frame.f_code.co_filename) != USER:
            continue
        names = {**frame.f_globals, **frame.f_locals}
        functions, writes = _writes_in(frame.f_code.co_filename)
        current = _innermost(functions, frame.f_lineno or 0)
        for line, target in writes:
            if _innermost(functions, line) != current:
                continue
            if any(extent.low <= address < extent.high for address in _addresses(_held(target, names))):
                file = shown(frame.f_code.co_filename)
                found.add(MACHINE.clock.place(f"{file}({line}): {frame.f_code.co_name}"))
    return found.pop() if len(found) == 1 else 0


def _innermost(functions: list[tuple[int, int]], line: int) -> tuple[int, int]:
    """The function around a line, by its first line and its last."""
    return max(((first, last) for first, last in functions if first <= line <= last), default=(0, 0))


@cache
def _writes_in(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, ast.expr]]]:
    """The functions of a file, and its lines that may write into an array or a tensor, with what that is called."""
    functions, found = list[tuple[int, int]](), list[tuple[int, ast.expr]]()
    for node in ast.walk(program_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Assign):
            found += [(node.lineno, target.value) for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            found.append((node.lineno, node.target))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, keyword.value) for keyword in node.keywords if keyword.arg == "out"]
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
                writes = name in OPERATORS["numpy_writing_methods"] or (name.endswith("_") and not name.endswith("__"))
                found += [(node.lineno, node.func.value)] if writes else []
                found += [(node.lineno, node.args[0])] if name in OPERATORS["numpy_writers"] and node.args else []
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
        return [address for part in value for address in _addresses(part)]
    return []


# What functions of PyTorch read and write.

_WRITES_FORM = frozenset(OPERATORS["writes_form"])


def note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """A function of PyTorch's was called, on a modelled clock. On another one nothing stands around the program's own
    calls, for that would change which kernels PyTorch chooses."""
    if not MACHINE.memory.accesses.pinned or name in OPERATORS["reads_form"] or name.endswith("_as"):
        return
    given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if type(tensor) in _PLAIN_KINDS]
    try:
        used = [tensor for tensor in given if _is_in_use(tensor)]
    except RuntimeError:  # tensors without memory, as function transforms have them
        return
    made = [tensor for tensor in tensors_in(result) if type(tensor) in _PLAIN_KINDS] if used else []
    if not used or any(tensor.is_cuda for tensor in (*given, *made)):  # a copy, which its operator notes
        return
    written = tensors_in(kwargs.get("out")) + (tensors_in(args[0]) if args and _writes(name) else [])
    reads = name in OPERATORS["reads_values"] or bool(written)
    if not (name.endswith("_like") or name.startswith("new_") or name in _WRITES_FORM):
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        reads |= any(tensor.untyped_storage().data_ptr() not in known for tensor in made if _is_dense(tensor))
    host = Command(HOST, 0, MACHINE.places.here())
    for tensor in used:
        writes = any(tensor is target for target in written)
        if writes:
            forget_copied(tensor)
        if writes or reads:
            MACHINE.use_pinned(tensor, writes, host)


def note_pickling(tensor: Tensor) -> None:
    """The program reads its values in a way that is no function of a tensor's."""
    if type(tensor) in _PLAIN_KINDS and _is_dense(tensor) and _is_in_use(tensor):
        MACHINE.use_pinned(tensor, False, Command(HOST, 0, MACHINE.places.here()))


def _is_in_use(tensor: Tensor) -> bool:
    if not is_pinned(tensor):
        return False
    address = tensor.untyped_storage().data_ptr()
    return MACHINE.memory.accesses.is_in_use(address, memory_at(address))


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_") and name not in _WRITES_FORM


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
