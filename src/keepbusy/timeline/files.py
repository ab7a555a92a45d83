"""Files, also untrusted ones: opened without waiting for ever, read type by type, written completely or not at all.

Faulty input raises `BadInput`, whose text the user sees.
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
"""No valid time, size or count is larger, so two of them still fit into 64 bits. (A nan is no smaller, either.)"""
_DEEPEST = 500
"""Characters of the path to a fact. Deeper facts are not keepbusy's, and reading them could overflow the stack."""
_PART = ".part"
"""The end of the names of incomplete files."""
PATIENCE = 10
"""Seconds in which another process must begin to write into a pipe."""


class BadInput(ValueError):  # noqa: N818  the name says what is wrong
    """One sentence: what was found, what was expected and what to do. The CLI prints it and exits with 2."""


@contextmanager
def opened(path: str | Path, wanted: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading. If it cannot be read, `BadInput` says to give what is `wanted`."""
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
    """Opens a pipe only if another process writes into it, as in `<(zcat …)`."""
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
    """Parses a text of at most `most` bytes. The limit matters because a device may have no end."""
    with opened(path, wanted) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadInput(f"{path} has more than {most >> 10} kB; give {wanted}.")
    try:
        return parse(content.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be understood ({str(error)[:200]}); give {wanted}.") from None


# Files and folders that take their place once they are complete. Until then they are beside it under a random name, and
# locked: if the lock is free, the process that wrote has ended.


def write_whole(path: str | Path, content: str | bytes, durable: bool = True) -> None:
    """Writes a file completely or not at all, as `replacing` does."""
    with replacing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: str | Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file that replaces `path` if all goes well, and vanishes if not. An OSError names `path`.

    It keeps the mode of the file that it replaces, and its owner if this user may give files away. A link stays: its
    target is replaced. `durable`: it survives a loss of power right afterwards, which takes some milliseconds.
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
    """A folder that replaces the one at `path`, if there is one. For a moment in between there is none."""
    target, replaced = os.path.realpath(path), _status(path)
    descriptor, part = _begin_part(target, _make_folder)
    try:
        yield Path(part)
        if replaced is not None:
            _be_as(replaced, descriptor)
            old = Path(target).rename(f"{part}.old")
        Path(part).rename(target)
        if replaced is not None:
            old.rename(part)  # a stale folder from now on
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(descriptor)


def _status(path: str | Path) -> os.stat_result | None:
    """The status of the file, or of a link's target; None if there is none."""
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _make_folder(name: str) -> int:
    Path(name).mkdir()
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _be_as(replaced: os.stat_result, descriptor: int) -> None:
    """Copies owner and mode, as far as this user may. If the owner differs, setuid is dropped: it is another user's."""
    for user, group in ((-1, replaced.st_gid), (replaced.st_uid, -1)):
        with suppress(OSError):
            os.fchown(descriptor, user, group)
    now = os.fstat(descriptor)
    is_owned_alike = (now.st_uid, now.st_gid) == (replaced.st_uid, replaced.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode) & (0o7777 if is_owned_alike else 0o777))


def _begin_part(target: str, make: Callable[[str], int]) -> tuple[int, str]:
    """Opens a new file or folder beside `target` with `make`, and locks it. Removes stale ones of this host first, as
    locks of other hosts may be invisible."""
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
        os.close(descriptor)  # another process removed it as stale before it was locked


def lock(descriptor: int, kind: int) -> bool:
    """Whether it is locked now: not every file system can. Raises BlockingIOError if another process holds a lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def remove_stale(path: Path) -> None:
    """Removes a file or folder of this user that no living process has locked."""
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
    """A value from JSON as `kind`; raises ValueError if it is something else.

    Missing fields of a dataclass keep their defaults, and unknown ones are ignored, as a later version of keepbusy may
    have added them.
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
        return tuple(_typed(arguments[0], item, path) for item in value)
    if origin is Mapping and isinstance(value, dict):  # JSON spells its keys as strings
        return {_number(key, path): _typed(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    is_number = kind in (int, float)
    accepted = (int, kind) if is_number else (kind,)
    if type(value) not in accepted or (is_number and not abs(value) <= _LARGEST):
        raise ValueError(f"{path.lstrip('.') or 'it'} is {type(value).__name__}")
    return kind(value) if is_number else value


def _dataclass_of(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind) if entry.name in value]
    try:
        return kind(**{name: _typed(hints[name], value[name], f"{path}.{name}") for name in names})
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{path.lstrip('.') or 'it'}: {error}") from None


def _number(key: str, path: str) -> int:
    if not key.isdecimal() or len(key) > 18:
        raise ValueError(f"{path.lstrip('.')} has the key {key[:20]!r}")
    return int(key)
