"""What a step reads without being given it: closures, globals, and attributes of the object that it belongs to.

A graph keeps the numbers and the addresses that these names stood for when it was captured.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.user_lines import is_users

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, dict, set, deque)


class NameRead(NamedTuple):
    """A name, and how to read it now."""

    label: str
    read: Callable[[], Any]


def names_of(step: Callable[..., Any]) -> list[NameRead]:
    """Every name from outside that the step reads, or a function of the user's that it names."""
    names: list[NameRead] = []
    seen: set[Any] = set()
    ahead: list[Any] = [step]
    while ahead:
        function, owner = _function_in(ahead.pop())
        if function is None or function.__code__ in seen or not (is_users(function.__code__.co_filename) or not seen):
            continue
        seen.add(function.__code__)
        found = [*_cells(function), *_globals(function), *_attributes(function, owner)]
        names += found
        ahead += [one.read() for one in found] + _methods(function, owner)
    return list({one.label: one for one in names}.values())


def _function_in(step: Any) -> tuple[FunctionType | None, Any]:
    """The function in it, and the object whose method it is."""
    while isinstance(step, functools.partial):
        step = step.func
    if isinstance(step, MethodType):
        return (step.__func__ if isinstance(step.__func__, FunctionType) else None), step.__self__
    return (step if isinstance(step, FunctionType) else None), None


def _cells(function: FunctionType) -> Iterator[NameRead]:
    for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield NameRead(label, functools.partial(_content, cell))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _globals(function: FunctionType) -> Iterator[NameRead]:
    """Not what stands behind a dot: in `optimizer.step()` nobody reads a counter that is called `step`."""
    known = function.__globals__
    read = (one.argval for one in dis.get_instructions(function) if one.opname == "LOAD_GLOBAL")
    for label in dict.fromkeys(read):
        if label in known:
            yield NameRead(label, functools.partial(known.get, label))


def _attributes(function: FunctionType, owner: Any) -> Iterator[NameRead]:
    held = getattr(owner, "__dict__", {})
    for label in function.__code__.co_names:
        if label in held:
            yield NameRead(f"self.{label}", functools.partial(held.get, label))


def _methods(function: FunctionType, owner: Any) -> list[Any]:
    """The other methods of its object that it calls."""
    kind = type(owner)
    named = [getattr(kind, label, None) for label in function.__code__.co_names] if owner is not None else []
    return [MethodType(one, owner) for one in named if isinstance(one, FunctionType)]


def constant(value: Any) -> Any:
    """What a graph keeps of a value: numbers and texts themselves, of tensors where they lie, of others nothing."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, (torch.nn.Module, Optimizer)):
        return id(value)
    if not issubclass(type(value), torch.Tensor):
        return None
    if value.layout is not torch.strided:
        return id(value)
    # a tensor of the host is kept by its value, so writing to it counts, too
    return value.data_ptr(), value.shape, value.dtype, value._version if value.device.type == "cpu" else 0


def container_size(value: Any) -> int | None:
    """How much a container holds: a step that appends to one does so once a capture, not once a replay."""
    return len(value) if type(value) in _CONTAINERS else None
