"""What a step reads without being given it: closures, globals, and attributes of the object that it belongs to.

A graph keeps the numbers and the addresses that these names stood for when it was captured.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.user_lines import OURS, is_users

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CODE = (FunctionType, MethodType, ModuleType, type)


def is_a(value: Any, *kinds: type) -> bool:
    """By its type alone: `isinstance` would run code of a proxy's."""
    return issubclass(type(value), kinds)


class NameRead(NamedTuple):
    """A name, and how to read it now."""

    label: str
    read: Callable[[], Any]


class CodeNames(NamedTuple):
    """What stands in the code of a function, and of functions within it."""

    outer: tuple[str, ...]
    """Globals."""
    attributes: frozenset[str]
    texts: frozenset[str]
    """Constants: what `config["rate"]` looks up."""


class StepNames:
    """Every name from outside that a step reads or writes, or a function of the user's that it names."""

    def __init__(
        self, step: Callable[..., Any], modules: Iterable[torch.nn.Module] = (), bound: Mapping[str, Any] | None = None
    ) -> None:
        """`modules`: those that it calls. Their forward passes are functions that it names. `bound`: what it is given,
        by the names of its parameters, and finds as it would find a closure's."""
        self.words: set[str] = set()
        """All attributes that its code names, and texts that it looks up."""
        self._found: dict[Any, NameRead] = {}
        self._functions: dict[Any, Any] = {}
        self._ahead: list[Any] = [getattr(module, "forward", None) for module in modules]
        self._ahead += [*_methods(step, CodeNames((), frozenset({"forward"}), frozenset())), step]
        while self._ahead:
            function, owner = _function_in(self._ahead.pop())
            key = function and (function.__code__, id(function.__closure__), id(owner))
            if function is None or key in self._functions:
                continue
            file = function.__code__.co_filename
            if is_users(file) or not (self._functions or file.startswith(OURS)):
                self._read(function, owner, (bound or {}) if not self._functions else {})
                self._functions[key] = owner
        self.reads = [*self._found.values()]

    def _read(self, function: FunctionType, owner: Any, bound: Mapping[str, Any]) -> None:
        names = names_in(function.__code__)
        self.words |= names.attributes | names.texts
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        known, held, code = function.__globals__, attributes_of(owner), function.__code__
        of_owner = names_of(code, code.co_varnames[0]) if code.co_argcount else names  # by what it calls its object
        values = [self._note(label, id(cell), functools.partial(_content, cell)) for label, cell in cells]
        values += [
            self._note(label, (id(known), label), functools.partial(known.get, label))
            for label in names.outer
            if label in known
        ]
        values += [
            self._note(f"self.{label}", (id(owner), label), functools.partial(getattr, owner, label, None))
            for label in sorted(of_owner.attributes)
            if label in held and not (is_a(owner, torch.nn.Module) and type(held[label]) in PLAIN)
        ]
        for name, value in bound.items():
            if is_a(value, torch.Tensor, torch.nn.Module, Optimizer, dict, list, tuple, *_CODE):
                values.append(self._note(name, id(value), functools.partial(lambda bound: bound, value)))
                continue
            of_value = names_of(function.__code__, name)  # they may hold anything beside
            self._ahead += _methods(value, of_value)
            values += [
                self._note(f"{name}.{label}", (id(value), label), functools.partial(getattr, value, label, None))
                for label in sorted(of_value.attributes)
                if label in attributes_of(value)
            ]
        self._ahead += _methods(owner, of_owner)
        for label, value in values:
            self._ahead.append(value)
            if is_a(value, ModuleType, type):
                self._ahead += [inner for _, inner in self._namespace(label, value, names)]
            else:
                self._ahead += _methods(value, names)

    def _note(self, label: str, place: Any, read: Callable[[], Any]) -> tuple[str, Any]:
        self._found.setdefault(place, NameRead(label, read))
        return label, read()

    def _namespace(self, label: str, space: Any, names: CodeNames) -> list[tuple[str, Any]]:
        """What is read of a file or a class of the user's, by a dot."""
        file = getattr(space if isinstance(space, ModuleType) else sys.modules.get(space.__module__), "__file__", None)
        if not isinstance(file, str) or not is_users(file):
            return []
        held = vars(space)
        return [
            self._note(f"{label}.{name}", (id(space), name), functools.partial(_entry, space, name))
            for name in sorted(names.attributes)
            if name in held
        ]


def _function_in(step: Any) -> tuple[FunctionType | None, Any]:
    """The function in it, and the object whose method it is."""
    while is_a(step, functools.partial):
        step = step.func
    if is_a(step, staticmethod, classmethod):
        step = step.__func__
    if is_a(step, MethodType):
        return (step.__func__ if is_a(step.__func__, FunctionType) else None), step.__self__
    return (step if is_a(step, FunctionType) else None), None


@functools.cache
def names_in(code: CodeType) -> CodeNames:
    """Not what stands behind a dot is a global: in `optimizer.step()` nobody reads a counter that is called `step`."""
    outer, attributes, texts = dict[str, None](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            outer[argument] = None
        elif name.endswith(("_ATTR", "_METHOD")):
            attributes.add(argument[-1] if isinstance(argument, tuple) else argument)
        elif isinstance(argument, str) and name.endswith("_CONST"):
            texts.add(argument)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            within = names_in(inner)
            outer |= dict.fromkeys(within.outer)
            attributes |= within.attributes
            texts |= within.texts
    return CodeNames(tuple(outer), frozenset(attributes), frozenset(texts))


@functools.cache
def names_of(code: CodeType, variable: str) -> CodeNames:
    """The same, and of attributes only those of this variable, where the code does nothing else with it: in
    `self.optimizer.step()` nobody calls the method `step` of `self`."""
    names, direct = names_in(code), set[str]()
    if "super" in names.outer:  # which finds the object by itself
        return names
    instructions = [*dis.get_instructions(code)]
    for place, (name, argument) in enumerate(
        [(instruction.opname, instruction.argval) for instruction in instructions]
    ):
        loaded = argument if isinstance(argument, tuple) else (argument,)  # some load two
        if variable not in loaded or name.endswith(("_ATTR", "_METHOD", "_CONST", "_GLOBAL", "_NAME")):
            continue
        following = instructions[place + 1 :]
        if following and following[0].opname == "COPY":  # it is read and written: `self.count += 1`
            del following[0]
        is_last = "LOAD_FAST" in name and loaded.index(variable) == len(loaded) - 1
        if not is_last or not following or not following[0].opname.endswith(("_ATTR", "_METHOD")):
            return names
        attribute = following[0].argval
        direct.add(attribute[-1] if isinstance(attribute, tuple) else attribute)
    return names._replace(attributes=frozenset(direct))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _entry(space: Any, name: str) -> Any:
    return vars(space).get(name)


def own_dict(value: Any) -> dict[str, Any] | None:
    try:
        held = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return held if type(held) is dict else None


def attributes_of(value: Any) -> dict[str, Any]:
    """Its own and those of the user's classes, without calling what these may define."""
    held = dict(own_dict(value) or {})
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                try:
                    held[name] = object.__getattribute__(value, name)
                except AttributeError:  # it is not set, or has another name within its class
                    continue
    kind_of_value: Any = type(value)
    held = {name: vars(kind)[name] for kind, name in _class_data(kind_of_value)} | held
    if is_a(value, torch.nn.Module):
        empty = {name for name, part in held.items() if name.startswith("_") and isinstance(part, dict) and not part}
        held = {name: part for name, part in held.items() if name not in empty}
        for place in ("_parameters", "_buffers", "_modules"):
            held |= held.pop(place, {})
    elif is_a(value, Optimizer):
        held |= {f"state[{place}]": state for place, state in enumerate(held.pop("state", {}).values())}
    return held


@functools.cache
def _class_data(kind: type) -> list[tuple[type, str]]:
    """What the user's classes hold for all of their objects: no methods."""
    found = []
    for base in reversed(kind.__mro__):
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if isinstance(file, str) and is_users(file):
            data = [(name, held) for name, held in vars(base).items() if not name.startswith("__")]
            found += [(base, name) for name, held in data if not callable(held) and not hasattr(type(held), "__get__")]
    return found


def _methods(owner: Any, names: CodeNames) -> list[Any]:
    """The methods of an object that the code names, and what a call of the object itself runs."""
    kind = type(owner)
    if owner is None or kind in PLAIN or is_a(owner, FunctionType, MethodType):
        return []
    named = [getattr(kind, label, None) for label in (*names.attributes, "__call__")]
    return [MethodType(function, owner) for function in named if isinstance(function, FunctionType)]


def constant(value: Any) -> Any:
    """What a graph keeps of a value: numbers and texts themselves, of tensors where they lie, of others which it is."""
    if type(value) in PLAIN:
        return value
    if not issubclass(type(value), torch.Tensor) or value.layout is not torch.strided:
        return id(value)
    # a tensor of the host is kept by its value, so writing to it counts, too
    is_counted = value.device.type == "cpu" and not value.is_inference()
    return value.data_ptr(), value.shape, value.dtype, value._version if is_counted else 0
