"""Files, also of strangers: opened without waiting for ever, read type by type, written whole or not at all.

What reaches a person when such input is at fault is a `BadInput`.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")
_LARGEST = 1 << 60
"""No time, size or count of ours is larger, so two of them still fit into 64 bits. (A nan is no smaller, either.)"""
_DEEPEST = 500
"""Characters of the path to a fact: what stands deeper was not written by us, and who walks it might not come back."""
PATIENCE = 10
"""Seconds in which somebody must begin to write into a pipe that we are to read."""


class BadInput(ValueError):  # noqa: N818  a person reads it as what it says
    """One sentence: what was found, what was expected and what to do. The CLI prints it and exits with 2."""


@contextmanager
def opened(path: str | Path, wanted: str) -> Iterator[IO[bytes]]:
    """For reading. Where it is not there or cannot be read, a person is told to give what is `wanted`."""
    try:
        with _open(Path(path)) as file:
            yield file
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give {wanted}.") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; give {wanted} within it.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read ({reason}); give {wanted}.") from None


def _open(path: Path) -> IO[bytes]:
    """A pipe only if somebody writes into it, as `<(zcat …)` does."""
    if not stat.S_ISFIFO(path.stat().st_mode):
        return path.open("rb")
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN | select.POLLHUP)
    if not waiting.poll(PATIENCE * 1000):
        os.close(pipe)
        raise BadInput(f"{path} is a pipe into which nobody has written for {PATIENCE} seconds; give a file.")
    os.set_blocking(pipe, True)
    return os.fdopen(pipe, "rb")


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A file beside `path` that takes its place if all goes well, and vanishes if not.

    `durable`: it also survives a machine that loses power at once, which takes some milliseconds.
    """
    path = path.resolve()  # what a link points to is replaced, not the link
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/null is written, not replaced
        yield path
        return
    part = path.with_name(f".{path.name[:60]}.{os.getpid()}.part{path.suffix[:20]}")
    try:
        yield part
        if durable:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def typed(kind: type[Kind], value: object, path: str = "") -> Kind:
    """What stands in JSON, as `kind`; raises ValueError where it is something else.

    Fields of a dataclass that are missing keep their defaults, and unknown ones are passed over: a later version of
    keepbusy may have added them.
    """
    result: Kind = _typed(kind, value, path)
    return result


def _typed(kind: Any, value: Any, path: str) -> Any:
    if len(path) > _DEEPEST:
        raise ValueError("facts within facts without end")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # only ever `… | None`
        return None if value is None else _typed(arguments[0], value, path)
    if is_dataclass(kind) and isinstance(value, dict):
        return _dataclass_of(kind, value, path)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(arguments[0], one, path) for one in value)
    if origin is Mapping and isinstance(value, dict):  # JSON spells its keys as strings
        return {_number(key, path): _typed(arguments[1], one, f"{path}.{key}") for key, one in value.items()}
    return _scalar(kind, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    is_number = kind in (int, float)
    accepted = (int, kind) if is_number else (kind,)
    if type(value) not in accepted or (is_number and not abs(value) <= _LARGEST):
        raise ValueError(f"{path.lstrip('.') or 'it'} is {type(value).__name__}")
    return kind(value) if is_number else value


def _dataclass_of(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    hints = get_type_hints(kind)
    given = [one.name for one in fields(kind) if one.name in value]
    try:
        return kind(**{name: _typed(hints[name], value[name], f"{path}.{name}") for name in given})
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{path.lstrip('.') or 'it'}: {error}") from None


def _number(key: str, path: str) -> int:
    if not key.isdecimal() or len(key) > 18:
        raise ValueError(f"{path.lstrip('.')} has the key {key[:20]!r}")
    return int(key)
