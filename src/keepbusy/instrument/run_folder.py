"""A folder for what the processes of a run leave each other. It goes with the process that made it."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path


class RunFolder:
    """One that is made when it is first asked for: a run that needs none and dies of a signal leaves none."""

    def __init__(self) -> None:
        self._prefix = f"keepbusy-{_host()}-"
        self._made: Path | None = None
        _remove_stale(self._prefix)
        process = os.getpid()

        def remove() -> None:
            if self._made is not None and os.getpid() == process:
                shutil.rmtree(self._made, ignore_errors=True)

        atexit.register(remove)  # exit handlers run the last one first: who is registered later still finds it

    def path(self) -> Path:
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-"))
        return self._made

    def files(self, pattern: str) -> list[Path]:
        """Those in it, by name."""
        return sorted(self._made.glob(pattern)) if self._made is not None else []


def make_folder() -> Path:
    """A new one that nobody else can guess or read; those of one's own runs that were killed are taken away."""
    return RunFolder().path()


def _host() -> str:
    """Whose process numbers these are: hosts and containers may share a temporary directory."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


def _remove_stale(prefix: str) -> None:
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            process = folder.name[len(prefix) :].partition("-")[0]
            if process.isdecimal() and folder.lstat().st_uid == os.getuid() and not _lives(int(process)):
                shutil.rmtree(folder, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # it may be somebody else's
        return not isinstance(error, ProcessLookupError)
    return True
