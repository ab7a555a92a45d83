"""Running the user's script as Python itself would: as `__main__`, with its own argv, path and end."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType

from keepbusy.timeline.errors import BadInput

INTERRUPTED = 130


def find(script: str) -> Path:
    """The file to run: as for Python, a folder or an archive stands for the `__main__.py` inside."""
    path = Path(script)
    if path.is_dir():
        path = path / "__main__.py"
    if not path.is_file():
        raise BadInput(f"{script}: there is no such script.")
    return path


def run_file(path: Path, arguments: Sequence[str]) -> int:
    """Run a script to its end, whatever that is; returns its exit code."""
    sys.argv = [str(path), *arguments]
    sys.path[0:1] = [str(path.resolve().parent)]
    return _to_its_end(lambda: _execute(path))


def run_module(name: str, arguments: Sequence[str]) -> int:
    """As `python -m name` does."""
    sys.argv = [name, *arguments]
    sys.path[0:1] = [str(Path.cwd())]
    return _to_its_end(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _execute(path: Path) -> None:
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main  # it stays: pickles, spawned children and exit handlers look for it
    exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)


def _to_its_end(runs: object) -> int:
    try:
        runs()  # type: ignore[operator]
    except SystemExit as leaving:
        return _exit_code(leaving)
    except KeyboardInterrupt as error:
        _show(error)
        return INTERRUPTED
    except BaseException as error:
        _show(error)
        return 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)  # noqa: T201  # as Python does
    return 1


def _show(error: BaseException) -> None:
    """The script's traceback, without our frames at its top and those of what records it in between."""
    stack = error.__traceback__
    while stack is not None and stack.tb_next is not None and _is_ours(stack):
        stack = stack.tb_next
    kept = [one for one in _frames(stack) if one.tb_next is None or not _is_ours(one, "recording")]
    for one, after in pairwise(kept):
        one.tb_next = after
    error.__traceback__ = stack
    hook = sys.excepthook if sys.excepthook is not sys.__excepthook__ else traceback.print_exception
    hook(type(error), error, stack)
    sys.stderr.flush()


def _frames(stack: TracebackType | None) -> Iterator[TracebackType]:
    while stack is not None:
        yield stack
        stack = stack.tb_next


def _is_ours(stack: TracebackType, room: str = "") -> bool:
    file = stack.tb_frame.f_code.co_filename
    return file.startswith((str(Path(__file__).parents[1] / room) + os.sep, "<frozen runpy"))
