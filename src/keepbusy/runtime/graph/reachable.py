"""What can be reached from a name: through attributes, containers, closures, iterators; and the state of each object.

A step may keep its state in any of them: a generator of random numbers in a dict of an object, a tensor that a list
holds anew after each call. What is written in C and shows nothing of itself is not seen; comparing the first replays
with eager calls is for that.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import random
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterable
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.runtime.graph.names_read import PLAIN, attributes_of, is_a
from keepbusy.torch_names.pytorch import SCALER_PARTS, storage_users

_MOST_OBJECTS = 100_000
"""Objects whose state is read, the nearest first."""
_MOST_BYTES = 1 << 20
"""An array of the host that is larger is known by where it lies."""
_CHUNK = 1 << 22
_ENDS = (*PLAIN, torch.Size, torch.dtype, torch.device, torch.layout, type, ModuleType)
_LEFT_ALONE = {"logging", "threading", "_thread", "weakref", "multiprocessing", "concurrent", "asyncio"}
"""Packages whose objects hold what belongs to the whole process."""

_OF_GRAPHS = "keepbusy.runtime.graph.graphed_step"
"""Of what `graph` returned only the step matters: the rest is its own account of it."""


class SameObject:
    """Equal to nothing but the same object, which it keeps alive meanwhile."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def reach(*roots: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Every object behind the roots and what a person calls it: all behind the first ones, the nearest first."""
    found: dict[int, tuple[str, Any]] = {}
    for labelled in roots:
        ahead = deque(labelled)
        while ahead and len(found) < _MOST_OBJECTS:
            label, value = ahead.popleft()
            package = type(value).__module__.partition(".")[0]
            if id(value) not in found and not is_a(value, *_ENDS) and package not in _LEFT_ALONE:
                found[id(value)] = label, value
                ahead += [(label + suffix, part) for suffix, part in parts_of(value).items()]
    return [*found.values()]


def parts_of(value: Any) -> dict[str, Any]:
    """What an object holds, by how one gets there."""
    try:
        return _parts_of(value)
    except Exception:  # its class answers in a way of its own, or another thread writes to it
        return {}


def _parts_of(value: Any) -> dict[str, Any]:
    if type(value).__module__ == _OF_GRAPHS:
        return {"": vars(value).get("__wrapped__")}
    if isinstance(value, torch.amp.GradScaler):  # which makes its other parts anew at each step
        return {f".{name}": vars(value)[name] for name in SCALER_PARTS if name in vars(value)}
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        for place, (key, part) in enumerate(dict.items(value)):
            parts[f"[{key!r}]" if type(key) in PLAIN else f"[{place}]"] = part
    elif isinstance(value, list | tuple | deque | set | frozenset):
        parts |= {f"[{place}]": part for place, part in enumerate(value)}
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts |= {f".{name}": cell for name, cell in cells}
        parts |= {f".{place}": part for place, part in enumerate(value.__defaults__ or ())}
    elif isinstance(value, CellType):
        parts |= {"": value.cell_contents}  # fails where nothing is assigned yet: it has no parts then
    elif isinstance(value, MethodType):
        parts |= {"": value.__self__, "()": value.__func__}
    elif type(value).__name__ in _METHODS_IN_C:
        parts |= {"": getattr(value, "__self__", None)}
    elif isinstance(value, functools.partial):
        parts |= {"": value.func, ".args": value.args, ".keywords": value.keywords}
    elif isinstance(value, GeneratorType):
        parts |= dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
    elif hasattr(type(value), "__next__"):
        parts |= {f"<{place}>": part for place, part in enumerate(_reduced(value)) if hasattr(part, "__next__")}
    parts |= {f".{name}": part for name, part in attributes_of(value).items()}
    return parts


_METHODS_IN_C = {"builtin_function_or_method", "cython_function_or_method", "method-wrapper"}


class ObjectState(NamedTuple):
    """What an object holds itself, as a value that can be compared with a later one."""

    own: Any
    parts: dict[str, Any]


def state_of(value: Any) -> ObjectState:
    try:
        own = _own_state(value)
    except Exception:  # an object that cannot tell its state has none that could be compared
        own = None
    return ObjectState(own, {suffix: held_as(part) for suffix, part in parts_of(value).items()})


def held_as(value: Any) -> Any:
    """Numbers and texts themselves, others by which they are."""
    return value if type(value) in PLAIN else SameObject(value)


def _own_state(value: Any) -> Any:
    """Beside its parts."""
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, Tensor):
        return TensorState(value) if has_memory(value) else SameObject(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist() if value.device.type == "cpu" else None
    if package == "numpy" and hasattr(value, "bit_generator"):
        return pickle.dumps(value.bit_generator.state)
    if package == "numpy" and hasattr(value, "get_state"):
        return pickle.dumps(value.get_state(legacy=False))
    if package == "numpy" and hasattr(value, "random_raw"):
        return pickle.dumps(value.state)
    if isinstance(value, io.IOBase):
        return None if value in (sys.stdout, sys.stderr) else value.tell()
    if isinstance(value, GeneratorType):
        return value.gi_frame and value.gi_frame.f_lasti
    if isinstance(value, bytearray | memoryview) or package in ("numpy", "array"):
        data = memoryview(value).cast("B")
        return data.nbytes, zlib.crc32(data) if data.nbytes <= _MOST_BYTES else None
    if hasattr(type(value), "__next__") and package in ("builtins", "itertools"):
        return repr(value) if package == "itertools" else None, operator.length_hint(value, -1), *_reduced(value)
    return None


def writes_to(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as PyTorch counts: not by way of `.data`."""
    return 0 if tensor.is_inference() else tensor._version


def has_memory(tensor: Tensor) -> bool:
    """Of its own: not so one that stands for others within `torch.func`."""
    try:
        return tensor.layout is torch.strided and tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_alone(tensor: Tensor) -> bool:
    """Whether it is a plain tensor of a device, and no other one shares its memory."""
    if storage_users is None or type(tensor) is not Tensor or not tensor.is_cuda or not has_memory(tensor):
        return False
    is_plain = tensor.is_leaf and not tensor.requires_grad and not tensor.is_inference()
    return is_plain and _users_of(tensor) == _users_of(torch.empty(1, device=tensor.device))


def _users_of(tensor: Tensor) -> int:
    return int(storage_users(tensor.untyped_storage()._cdata))


def exchange_memory(tensor: Tensor, other: Tensor) -> None:
    """Each holds what it held, where the other one lay."""
    with torch.no_grad():
        kept = tensor.clone()
        tensor.copy_(other)
        other.copy_(kept)
        tensor.data, other.data = other.data, tensor.data


def content_sum(storage: torch.UntypedStorage) -> Tensor:
    """A number that is another one when the memory holds something else. Each place weighs differently."""
    data = bytes_of(storage)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    tail = data[len(words) * 8 :].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in (*words.split(_CHUNK), *([tail] if len(tail) else [])):
        weights = torch.arange(1, 2 * len(part) + 1, 2, device=data.device)
        total = total * 31 + (part * weights).sum()
    return total


class TensorState:
    """Where a tensor lies, and what one of the host holds. Its memory is kept, so nothing else goes there."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.is_of_host = tensor.device.type == "cpu"
        writes: Any = None
        if self.is_of_host:
            is_small = self._storage.nbytes() <= _MOST_BYTES
            writes = int(content_sum(self._storage)) if is_small else writes_to(tensor)
        self._place = (
            self._storage._cdata,
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            writes,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorState) and self._place == other._place

    def is_like(self, other: TensorState) -> bool:
        """Whether it would be the same, lay it elsewhere."""
        return self._place[2:5] == other._place[2:5]

    __hash__ = None  # type: ignore[assignment]


def _reduced(iterator: Any) -> list[Any]:
    """What an iterator of Python's own is made of: numbers, other iterators, and how long its lists are."""
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that itertools will not tell it any more some day
        try:
            reduced = iterator.__reduce__()
        except (TypeError, AttributeError):
            return []
    flat: list[Any] = []
    ahead = [*reduced[1:]]
    while ahead:
        part = ahead.pop()
        if isinstance(part, tuple):
            ahead += part
        elif isinstance(part, list | dict | set):
            flat.append(len(part))
        elif type(part) in PLAIN or hasattr(part, "__next__"):
            flat.append(part)
    return flat
