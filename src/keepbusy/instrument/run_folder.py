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


def make_folder() -> Path:
    """A new one that nobody else can guess or read; those of one's own runs that were killed are taken away."""
    prefix = f"keepbusy-{_host()}-"
    _remove_stale(prefix)
    process = os.getpid()
    made = Path(tempfile.mkdtemp(prefix=f"{prefix}{process}-"))

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


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
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
