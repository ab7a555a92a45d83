"""A file that is there whole or not at all: whatever stood in its place stays until the new one is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
