"""JSON -> dataclasses, for files that somebody else may have written: what is not of its type is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def typed(kind: type[Kind], value: object, path: str = "") -> Kind:
    """The value as `kind`; raises ValueError where it is something else.

    Fields of a dataclass that are missing keep their defaults, and unknown ones are passed over: a later version of
    keepbusy may have added them.
    """
    result: Kind = _typed(kind, value, path)
    return result


def _typed(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # only ever `… | None`
        return None if value is None else _typed(arguments[0], value, path)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = {one.name: value[one.name] for one in fields(kind) if one.name in value}
        return _made(kind, {name: _typed(hints[name], one, f"{path}.{name}") for name, one in known.items()}, path)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(arguments[0], one, path) for one in value)
    if origin is Mapping and isinstance(value, dict):  # JSON spells its keys as strings
        return {_number(key, path): _typed(arguments[1], one, f"{path}.{key}") for key, one in value.items()}
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is kind and (kind is not int or -(1 << 63) <= value < 1 << 63):
        return value
    raise ValueError(f"{path.lstrip('.') or 'it'} is {type(value).__name__}")


def _made(kind: Any, known: dict[str, Any], path: str) -> Any:
    try:
        return kind(**known)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{path.lstrip('.') or 'it'}: {error}") from None


def _number(key: str, path: str) -> int:
    if not key.isdecimal() or len(key) > 18:
        raise ValueError(f"{path.lstrip('.')} has the key {key[:20]!r}")
    return int(key)
