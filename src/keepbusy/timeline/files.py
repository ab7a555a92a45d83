"""How files are written and opened: whole or not at all, and without waiting for ever."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from keepbusy.timeline.errors import BadInput

PATIENCE = 10
"""Seconds in which somebody must begin to write into a pipe that we are to read."""


def open_input(path: Path) -> IO[bytes]:
    """For reading; a pipe only if somebody writes into it, as `<(zcat …)` does."""
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
