"""The bytes of a trace, block by block, decompressed on the way: a file is never held whole."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from isal import igzip, isal_zlib

from keepbusy.timeline.errors import BadInput

OnProgress: TypeAlias = Callable[[str, float], Any]
"""Called now and then with what is being done, and which share of it is done, from 0 to 1."""

BLOCK = 256 << 10
"""Small enough that a block and its rows stay in the processor's cache: a quarter faster than 1 MB."""
SMALL = 64 << 20
"""Below this, what a file decompresses to is nobody's trouble."""
MOST_RATIO = 200
"""A long trace is about 20 times smaller compressed; only a file made to do harm shrinks so much more."""
MOST_BYTES = 64 << 30
_GZIP = b"\x1f\x8b"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, cast("type[Exception]", isal_zlib.error))


def blocks(path: str, on_progress: OnProgress | None = None) -> Iterator[bytes]:
    """What the file says, whether it is compressed or not and whatever its name claims."""
    try:
        with Path(path).open("rb") as file:
            yield from _decompressed(path, file, on_progress)
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give the path of a PyTorch profiler trace.") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory, not a trace; name the traces in it, as in {path}/*.json.gz.") from None
    except _DAMAGE as error:
        raise BadInput(f"{path} is a damaged gzip file ({error}); export or copy the trace again.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read ({reason}); give the path of a readable trace.") from None


def _decompressed(path: str, file: IO[bytes], on_progress: OnProgress | None) -> Iterator[bytes]:
    zipped = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]
    source = igzip.IGzipFile(fileobj=file) if zipped else file
    size, done = os.fstat(file.fileno()).st_size, 0
    while block := source.read(BLOCK):
        done += len(block)
        consumed = file.tell() if file.seekable() else done
        if zipped:
            _refuse_bomb(path, consumed, done)
        if on_progress and size:
            on_progress(f"reading {Path(path).name}", min(1.0, consumed / size))
        yield block
    if not done:
        raise BadInput(f"{path} is empty; export the trace again, after the profiler has stopped.")


def _refuse_bomb(path: str, consumed: int, done: int) -> None:
    if (done > SMALL and done > MOST_RATIO * consumed) or done > MOST_BYTES:
        raise BadInput(
            f"{path} unpacks to more than {done >> 20} MB from {consumed >> 10} kB, which no profiler trace does; "
            "check where it comes from, or unpack it yourself and give the .json."
        )
