"""What a data set can reach: whether another process may prepare its samples, and whether preparing one changed it.

Reached is what hangs on the data set and on the functions that work on it: their attributes, what they close over, and
the names of their modules that they use. Numbers, texts, arrays, tensors of the host and containers of them can be
looked at and compared; an open file, a lock or a tensor of the GPU cannot be shared with another process.
"""

from __future__ import annotations

import dis
import enum
import pathlib
import random
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from keepbusy.instrument.lines import USER, kind_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, re.Pattern, pathlib.PurePath, range, slice)
_TORCH = (torch.dtype, torch.device, torch.Size, torch.memory_format)
_CODE = (types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType)
_DEPTH, _PARTS, _NODES = 8, 64, 4000
"""So deep, so many parts of one container, so many things in all are looked at."""
_WHOLE = 4096
"""Bytes of an array that are compared; of a larger one every so many-th."""


class Unshared(Exception):  # noqa: N818 -- it is a finding, and always caught
    """Why another process cannot stand in, as the end of a sentence."""


class Reach:
    """Of a data set and the function that makes batches of its samples."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots

    def state(self) -> list[Any]:
        """Equal as long as nothing of it changed. Raises Unshared."""
        walk = _Walk()
        return [one for root in self._roots for one in walk.of(root, 0)]


def random_states() -> list[Any]:
    """Of Python, NumPy and PyTorch."""
    numpy = sys.modules.get("numpy")
    of_numpy = _comparable(numpy.random.get_state()) if numpy else ()
    return [random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()]


def _comparable(state: Any) -> tuple[Any, ...]:
    return state[0], state[1].tobytes(), *state[2:]


class _Walk:
    """Meets each thing once."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}

    def of(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, _PLAIN):
            yield value
            return
        if isinstance(value, (*_TORCH, *_CODE)) or id(value) in self._met or depth > _DEPTH:
            return
        self._met[id(value)] = value
        if len(self._met) > _NODES:
            raise Unshared("it holds too much to be looked at")
        yield type(value)
        yield from self._parts(value, depth + 1)

    def _parts(self, value: Any, depth: int) -> Iterator[Any]:
        generator = _generator_state(value)
        if generator is not None:
            yield generator
        elif isinstance(value, torch.Tensor):
            yield from _of_tensor(value)
        elif hasattr(value, "__array_interface__"):
            yield from _of_array(value)
        elif isinstance(value, list | tuple | set | frozenset | dict):
            yield from self._of_container(value, depth)
        elif isinstance(value, types.FunctionType | types.MethodType):
            yield from self._of_function(value, depth)
        elif isinstance(value, type):
            yield from self._of_class(value, depth)
        else:
            yield from self._of_object(value, depth)

    def _of_container(self, value: Any, depth: int) -> Iterator[Any]:
        yield len(value)
        parts = iter(value.items()) if isinstance(value, dict) else iter(value)
        for _, one in zip(range(_PARTS), parts, strict=False):
            yield from self.of(one, depth)

    def _of_function(self, value: Any, depth: int) -> Iterator[Any]:
        if isinstance(value, types.MethodType):
            yield from self.of(value.__self__, depth)
            value = value.__func__
        if not isinstance(value, types.FunctionType):
            return
        for cell in value.__closure__ or ():
            yield from self.of(cell.cell_contents, depth)
        yield from self.of(value.__defaults__, depth)
        if kind_of(value.__code__.co_filename) == USER:
            for name in _globals_of(value.__code__):
                if name in value.__globals__:
                    yield from self.of(value.__globals__[name], depth)

    def _of_class(self, value: type, depth: int) -> Iterator[Any]:
        if kind_of(getattr(sys.modules.get(value.__module__), "__file__", None) or "") == USER:
            for name, one in vars(value).items():
                if isinstance(one, types.FunctionType) or not name.startswith(("__", "_abc_")):
                    yield from self.of(one, depth)

    def _of_object(self, value: Any, depth: int) -> Iterator[Any]:
        held = getattr(value, "__dict__", None)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        if held is None and not slots and not isinstance(value, staticmethod | classmethod | property):
            raise Unshared(f"it holds a {type(value).__name__}, which another process may not share")
        yield from self.of(type(value), depth)
        yield from self.of(held or {}, depth)
        for name in slots:
            yield from self.of(getattr(value, name, None), depth)


@cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of its module that a function uses, and that the functions within it use."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _globals_of(one)]
    own = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *inner]))


def _generator_state(value: Any) -> Any:
    """Of a generator of random numbers."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value).__module__.startswith("numpy.random"):
        source = getattr(value, "bit_generator", None)
        return repr(source.state if source is not None else value.get_state())
    return None


def _of_tensor(value: torch.Tensor) -> Iterator[Any]:
    if value.device.type != "cpu":
        raise Unshared("it holds a tensor of the GPU")
    if value.is_inference():
        raise Unshared("it holds a tensor of inference mode, whose changes nobody counts")
    yield value._version
    yield value.shape
    if value.layout is torch.strided:
        yield value.data_ptr()


def _of_array(value: Any) -> Iterator[Any]:
    yield value.__array_interface__["data"][0]
    yield value.shape
    if value.dtype != object:
        flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()[:_WHOLE]
        yield flat[:: max(1, flat.nbytes // _WHOLE)].tobytes()
