"""Files, also of strangers: opened without waiting for ever, read type by type, written whole or not at all.

What reaches a person when such input is at fault is a `BadInput`.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")
_LARGEST = 1 << 60
"""No time, size or count of ours is larger, so two of them still fit into 64 bits. (A nan is no smaller, either.)"""
_DEEPEST = 500
"""Characters of the path to a fact: what stands deeper was not written by us, and who walks it might not come back."""
_PART = ".part"
"""The end of the name of what is not whole yet."""
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


def parsed(path: str | Path, wanted: str, parse: Callable[[str], Kind], most: int) -> Kind:
    """What `parse` makes of a text of no more than `most` bytes. A device may have no end."""
    with opened(path, wanted) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadInput(f"{path} has more than {most >> 10} kB; give {wanted}.")
    try:
        return parse(content.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be understood ({str(error)[:200]}); give {wanted}.") from None


# Files and folders that take their place once they are whole. Until then they lie beside it under a name that nobody
# can guess, and are locked: where the lock can be taken, the process that wrote is gone.


def write_whole(path: str | Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file whole or not at all, as `replacing` does."""
    with replacing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` if all goes well, and vanishes if not; an OSError names `path`.

    It keeps the mode of the one that it replaces, and its owner where this user may give files away. What a link points
    to is replaced, not the link. `durable`: it also survives a machine that loses power at once, which takes some
    milliseconds.
    """
    part = None
    try:
        replaced = _status(path)
        if replaced is not None and not stat.S_ISREG(replaced.st_mode):  # /dev/null is written, not replaced
            with Path(path).open("wb") as file:
                yield file
            return
        target = os.path.realpath(path)
        mode = 0o666 if replaced is None else 0o600  # until it has its own
        descriptor, part = _begin_part(target, lambda name: os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
        with open(part, "wb", opener=lambda *_: descriptor) as file:
            yield file
            file.flush()
            if replaced is not None:
                _be_as(replaced, descriptor)
            if durable:
                os.fsync(descriptor)
            Path(part).replace(target)
    except OSError as error:
        if error.errno is None or not (error.filename is None or str(error.filename).endswith(_PART)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """A folder that takes the place of the one at `path`, or of nothing. Between the two there is a moment without."""
    target, replaced = os.path.realpath(path), _status(path)
    descriptor, part = _begin_part(target, _make_folder)
    try:
        yield Path(part)
        if replaced is not None:
            _be_as(replaced, descriptor)
            old = Path(target).rename(f"{part}.old")
        Path(part).rename(target)
        if replaced is not None:
            old.rename(part)  # it may go from here on
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(descriptor)


def _status(path: str | Path) -> os.stat_result | None:
    """Of what a link points to, if the system lets us follow it; None where nothing is."""
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _make_folder(name: str) -> int:
    Path(name).mkdir()
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _be_as(replaced: os.stat_result, descriptor: int) -> None:
    """As far as this user may and the file system can. What runs as its owner is not to run as somebody else."""
    for user, group in ((-1, replaced.st_gid), (replaced.st_uid, -1)):
        with suppress(OSError):
            os.fchown(descriptor, user, group)
    now = os.fstat(descriptor)
    is_owned_alike = (now.st_uid, now.st_gid) == (replaced.st_uid, replaced.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode) & (0o7777 if is_owned_alike else 0o777))


def _begin_part(target: str, make: Callable[[str], int]) -> tuple[int, str]:
    """What `make` opens under a new name in the folder of `target`, locked. Stale ones of this host go first: others
    may not see each other's locks."""
    folder, host = Path(target).parent, f".keepbusy-{zlib.crc32(os.uname().nodename.encode()):08x}-"
    with suppress(OSError):
        for stale in [*folder.glob(f"{host}*{_PART}")]:
            remove_stale(stale)
    while True:
        part = str(folder / f"{host}{os.urandom(8).hex()}{_PART}")
        descriptor = make(part)
        with suppress(BlockingIOError):
            lock(descriptor, fcntl.LOCK_EX)
            if os.path.lexists(part):
                return descriptor, part
        os.close(descriptor)  # it was taken for a stale one before it was locked


def lock(descriptor: int, kind: int) -> bool:
    """Whether it is locked now: not every file system can. Raises BlockingIOError where somebody else's lock stands."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def remove_stale(path: Path) -> None:
    """A file or folder of this user's that no living process has locked."""
    with suppress(OSError):
        is_folder = path.is_dir()
        descriptor = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            is_own = os.fstat(descriptor).st_uid == os.getuid()
            if is_own and lock(descriptor, fcntl.LOCK_EX):
                shutil.rmtree(path) if is_folder else path.unlink()
        finally:
            os.close(descriptor)


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
