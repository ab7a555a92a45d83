"""The program's own reads and writes of pinned memory, while copies from or to it may be running.

The memory that a copy reads must stay the same until the host has waited for the copy. If PyTorch, or an array of
`Tensor.numpy()`, has changed it, and the running functions have a single statement that may do so, that one is named.

On a modelled clock each function of PyTorch that Python calls is seen with its tensors. Then reads are found, too, and
the line is always known. A view reads nothing.
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
"""Tensors of other classes may have no memory, and their classes would see our calls."""
_MOST_COPIED = 64
_WORDS = 1 << 18
"""The number of words of a larger memory that its checksum covers."""


class _Copied(NamedTuple):
    """Pinned memory that a copy reads, and a checksum of it."""

    memory: object  # identifies it
    storage: int  # address of its storage
    extent: Extent
    command: Command
    checksum: int

    def exists(self) -> bool:
        return memory_at(self.storage) is self.memory


_COPIED: list[_Copied] = []


def note_copy(tensor: Tensor, command: Command) -> None:
    """A copy that does not block reads the tensor."""
    storage, extent = tensor.untyped_storage().data_ptr(), Extent.of(tensor, tensor.data_ptr())
    _check(lambda copied: copied.storage == storage)
    MACHINE.clock.order.before_host_waits = lambda reached: _check(
        lambda copied: reached.get(copied.command.stream, 0) >= copied.command.number
    )
    if len(_COPIED) > _MOST_COPIED:  # the program waits for nothing; most of that memory is freed
        _COPIED[:] = [copied for copied in _COPIED if copied.exists()][-_MOST_COPIED:]
    if tensor.is_contiguous():
        _COPIED.append(_Copied(memory_at(storage), storage, extent, command, _checksum(extent)))


def forget_copied(tensor: Tensor) -> None:
    """The tensor is changed by something else, which is noted elsewhere."""
    storage = tensor.untyped_storage().data_ptr()
    _COPIED[:] = [copied for copied in _COPIED if copied.storage != storage]


def forget_all_copied() -> None:
    """A graph is replayed, whose copies may change any pinned memory."""
    _COPIED.clear()


def _check(is_done: Callable[[_Copied], bool]) -> None:
    """Note a write if memory that finished copies have read has changed. Later changes are allowed."""
    finished = [copied for copied in _COPIED if is_done(copied)]
    if finished:
        _COPIED[:] = [copied for copied in _COPIED if not is_done(copied)]
    for copied in finished:
        if copied.exists() and _checksum(copied.extent) != copied.checksum:
            host = Command(HOST, 0, _place_writing(copied.extent))
            MACHINE.memory.accesses.use_pinned(copied.storage, copied.memory, copied.extent, True, host)


def _checksum(extent: Extent) -> int:
    words = np.ctypeslib.as_array((ctypes.c_uint8 * (extent.high - extent.low)).from_address(extent.low))
    words = words[: len(words) // 8 * 8].view(np.uint64) if len(words) >= 8 else words.astype(np.uint64)
    return hash(words[:: max(1, len(words) // _WORDS)].tobytes())


# The statement that has changed the memory.


def _place_writing(extent: Extent) -> int:
    """The place of the only statement that may write there; 0 if there are several, or none."""
    places = set[int]()
    for frame in outwards(sys._getframe(1)):
        if kind_of(frame.f_code.co_filename) != USER:
            continue
        names = {**frame.f_globals, **frame.f_locals}
        functions, writes = _writes_in(frame.f_code.co_filename)
        current = _innermost(functions, frame.f_lineno or 0)
        for line, target in writes:
            if _innermost(functions, line) != current:
                continue
            if any(extent.low <= address < extent.high for address in _addresses(_value_of(target, names))):
                file = shown(frame.f_code.co_filename)
                places.add(MACHINE.clock.place(f"{file}({line}): {frame.f_code.co_name}"))
    return places.pop() if len(places) == 1 else 0


def _innermost(functions: list[tuple[int, int]], line: int) -> tuple[int, int]:
    """The first and last line of the innermost function around a line."""
    return max(((first, last) for first, last in functions if first <= line <= last), default=(0, 0))


@cache
def _writes_in(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, ast.expr]]]:
    """A file's functions, by first and last line; and lines that may write into an array or a tensor, with its name."""
    functions, writes = list[tuple[int, int]](), list[tuple[int, ast.expr]]()
    for node in ast.walk(program_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.Assign):
            writes += [(node.lineno, target.value) for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            writes.append((node.lineno, node.target))
        elif isinstance(node, ast.Call):
            writes += [(node.lineno, keyword.value) for keyword in node.keywords if keyword.arg == "out"]
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in OPERATORS["numpy_writing_methods"] or (name.endswith("_") and not name.endswith("__")):
                    writes.append((node.lineno, node.func.value))
                writes += [(node.lineno, node.args[0])] if name in OPERATORS["numpy_writers"] and node.args else []
    return functions, writes


def _value_of(name: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, an attribute or a part of one, found without running code of the program."""
    if isinstance(name, ast.Name):
        return names.get(name.id)
    if isinstance(name, ast.Subscript):
        return _value_of(name.value, names)
    if isinstance(name, ast.Attribute):
        return getattr(_value_of(name.value, names), "__dict__", {}).get(name.attr)
    return None


def _addresses(value: Any) -> list[int]:
    """Addresses of an array or a tensor, or of those in a list or a dict."""
    if isinstance(value, np.ndarray):
        return [value.ctypes.data]
    if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        return [value.data_ptr()]
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple) and len(value) <= _MOST_COPIED:
        return [address for part in value for address in _addresses(part)]
    return []


# Reads and writes of PyTorch's functions.

_WRITES_FORM = frozenset(OPERATORS["writes_form"])


def note_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """A function of PyTorch was called, on a modelled clock. On a measured one the program's calls are not wrapped,
    since that would change which kernels PyTorch chooses."""
    if not MACHINE.memory.accesses.pinned or name in OPERATORS["reads_form"] or name.endswith("_as"):
        return
    tensors = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if type(tensor) in _PLAIN_KINDS]
    try:
        in_use = [tensor for tensor in tensors if _is_in_use(tensor)]
    except RuntimeError:  # tensors without memory, as in function transforms
        return
    results = [tensor for tensor in tensors_in(result) if type(tensor) in _PLAIN_KINDS] if in_use else []
    if not in_use or any(tensor.is_cuda for tensor in (*tensors, *results)):  # a copy: its operator notes the use
        return
    written = tensors_in(kwargs.get("out")) + (tensors_in(args[0]) if args and _writes(name) else [])
    reads = name in OPERATORS["reads_values"] or bool(written)
    if not (name.endswith("_like") or name.startswith("new_") or name in _WRITES_FORM):
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        reads |= any(tensor.untyped_storage().data_ptr() not in storages for tensor in results if _is_dense(tensor))
    host = Command(HOST, 0, MACHINE.places.current_place())
    for tensor in in_use:
        writes = any(tensor is target for target in written)
        if writes:
            forget_copied(tensor)
        if writes or reads:
            MACHINE.use_pinned(tensor, writes, host)


def note_pickling(tensor: Tensor) -> None:
    """The program pickles a tensor, which calls no function of the tensor."""
    if type(tensor) in _PLAIN_KINDS and _is_dense(tensor) and _is_in_use(tensor):
        MACHINE.use_pinned(tensor, False, Command(HOST, 0, MACHINE.places.current_place()))


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
