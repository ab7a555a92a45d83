"""Where the program is: a stack walk at the call, from the operator out to the script.

The place of a call is the chain of the user's own lines and of library frames with a loop, as a trainer's, and the
innermost library frame after them where a library stands between the user and PyTorch. A chain seen before costs a
walk and one look-up.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(f"{path}{os.sep}" for path in {_PATHS["stdlib"], _PATHS["platstdlib"]})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
OURS = str(Path(__file__).parents[1]) + os.sep
_PROVES = str(Path(OURS, "runtime", "graph", "replay_check.py"))
_SCRIPT = str(Path(__file__).with_name("script.py"))


_SPEC = find_spec("torch")  # found without importing it
_FOLDERS = _SPEC.submodule_search_locations if _SPEC else None
_TORCH = _FOLDERS[0] + os.sep if _FOLDERS else "<not installed>"
_BACKWARD = {number for name, number in dis.opmap.items() if name.startswith("JUMP_BACKWARD")}
KEPT_AT_EITHER_END = 24
"""User lines of a chain; recursion may go deeper, and its middle is left out: the outer end is where the loops are."""
USER, LIBRARY, TORCH, PYTHON, HIDDEN, OUTSIDE = range(6)
"""Whose code it is: the user's own; an installed package's; a part of PyTorch, or of ours, that speaks for itself;
Python's; hidden is PyTorch's way from a call to an operator, machinery, and else what is ours;
what calls the script stands outside of it."""
TEXTS: dict[str, str] = {}
"""Programs that are no files: their source, by the name that Python gives them."""
_BY_OPTION = {"<string>": "-c", "<stdin>": "-"}
"""Under the name that Python gives it stands other code, too, as of dataclasses: a place says how it was given."""
PROGRAM_CODE = (USER, LIBRARY)
"""What a program consists of, but for PyTorch and Python."""


def compiled_as_written(source: bytes, file: str) -> CodeType:
    """Without what this module has imported from `__future__`."""
    return compile(source, file, "exec", dont_inherit=True)


_LAUNCHERS = set[str]()
_RAN_ELSEWHERE: list[str] = []


def set_program(path: str) -> None:
    """What `program_path` was in the process whose lines are told of here."""
    _RAN_ELSEWHERE.append(path)


def set_launcher() -> None:
    """What calls `keepbusy run`, as the script that pip wrote for it, is no code of the user's."""
    files = {frame.f_code.co_filename for frame in outwards(sys._getframe())}
    _LAUNCHERS.update(file for file in files if kind_of(file) in PROGRAM_CODE)


class Places:
    """Numbers for places, as the clock's `place` gives them."""

    def __init__(self, number: Callable[..., int]) -> None:
        self._number = number
        self.lines: dict[str, tuple[CodeType, int]] = {}
        """Of each line as it is written: its code, and its number."""
        # by identity, for Python takes the same words in two files for equal; what is kept keeps its identity
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def here(self, frame: FrameType | None = None) -> int:
        """The place of the caller's caller, or of `frame`."""
        frame = sys._getframe(2) if frame is None else frame
        kinds = self._kinds
        key: list[Any] = []
        library: tuple[int, int] | None = None
        while frame is not None:
            code = id(frame.f_code)
            kind = kinds.get(code)
            if kind is None:
                self._codes[code] = frame.f_code
                kind = kind_of(frame.f_code.co_filename)
                if kind == LIBRARY and holds_loop(frame.f_code):
                    kind = USER  # its line belongs to the chain as the user's own do
                kinds[code] = kind
            if kind == HIDDEN:  # most are
                frame = frame.f_back
                continue
            if kind == USER:
                key += (code, frame.f_lasti)
            elif kind == OUTSIDE:
                break
            elif library is None and not key:
                library = (code, frame.f_lasti)
            frame = frame.f_back
        if len(key) > 4 * KEPT_AT_EITHER_END:
            del key[2 * KEPT_AT_EITHER_END : -2 * KEPT_AT_EITHER_END]
        whole = (*key, library)
        number = self._known.get(whole)
        if number is None:
            lines = [self._line(key[at], key[at + 1]) for at in range(len(key) - 2, -1, -2)]
            lines += [self._line(*library)] if library and lines else []
            number = self._known[whole] = self._number(*lines)
        return number

    def _line(self, identity: int, instruction: int) -> str:
        code = self._codes[identity]
        line = line_number(code, instruction)
        written = f"{shown(code.co_filename)}({line}): {code.co_name}"
        self.lines[written] = code, line
        return written


@contextmanager
def at_rest() -> Iterator[None]:
    """Other threads stand still while one looks at their frames, and let go of nothing that it would then hold.

    It has the interpreter to itself for 5 ms, unless it waits for something, or the collector runs the program's own
    code. Python before 3.12 does not bear that while frames are looked at, either.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stacks_of(threads: Iterable[int]) -> dict[int, list[tuple[CodeType, int]]]:
    """Where these threads are, from the inside out: code and instruction. None of their frames outlives the look."""
    with at_rest():
        frames = sys._current_frames()
        found = {thread: [(each.f_code, each.f_lasti) for each in outwards(frames.get(thread))] for thread in threads}
        frames.clear()  # with our own frame in it, it would last until the collector comes, and all that they hold
    return found


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_lines(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Where a program stands, from the inside out: its own lines and its libraries'."""
    for caller in outwards(frame):
        if kind_of(caller.f_code.co_filename) in PROGRAM_CODE:
            yield caller.f_code, caller.f_lineno or 0


def holds_loop(code: CodeType) -> bool:
    """Whether it jumps back anywhere."""
    return not _BACKWARD.isdisjoint(code.co_code[::2])


def kind_of(file: str) -> int:
    """Whose code a file holds."""
    if file == _SCRIPT or file in _LAUNCHERS:
        return OUTSIDE
    if file in TEXTS:
        return USER
    if file.startswith((OURS, "<")):
        return TORCH if file == _PROVES else HIDDEN
    if file.startswith(_TORCH):
        return TORCH if file.startswith(_ON_THEIR_OWN, len(_TORCH)) else HIDDEN
    if file.startswith(_LIBRARIES) and not _installed_into(file):
        return PYTHON
    return USER if not _installed_into(file) or file.startswith(program_path()) else LIBRARY


@cache
def _installed_into(file: str) -> str:
    """The folder into which somebody installed the package that a file belongs to, or nothing: no package's.

    That is Python's own, or one of `pip install --target`, where each package says in its RECORD what it brought; what
    else lies there is the user's. A file is asked for when it is met first, for then its folder is where Python looks.
    """
    for part in _INSTALLED:
        if part in file:
            return file[: file.index(part) + len(part)]
    for folder in (f"{Path(entry).absolute()}{os.sep}" for entry in sys.path if entry):
        if file.startswith(folder) and file[len(folder) :].split(os.sep, 1)[0] in _brought_into(folder):
            return folder
    return ""


@cache
def _brought_into(folder: str) -> frozenset[str]:
    """The packages and modules that were installed there, by name as it stands in the folder."""
    found = set[str]()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            found |= {line.split(",", 1)[0].split("/", 1)[0] for line in lines}
    return frozenset(found)


def is_importing(file: str) -> bool:
    """Whether it is Python's own way of importing, which calls what the module does."""
    return file.startswith("<frozen importlib")


def is_ours(file: str) -> bool:
    """Ours, or Python's own way of importing: code in whose midst the program cannot be left."""
    return (file.startswith(OURS) or is_importing(file)) and file != _SCRIPT


def warn_program(text: str) -> None:
    """A warning at the program's line, out of ours."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


_CALL = compile("native(*args, **kwargs)", "", "eval")


def call_at_program(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What C++ warns of is said of the line that calls it: here that is the program's, out of ours."""
    frame = next(caller for caller in outwards(sys._getframe(1)) if not is_ours(caller.f_code.co_filename))
    call = _CALL.replace(co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno)
    return eval(call, frame.f_globals, {"native": native, "args": args, "kwargs": kwargs})


def program_path() -> str:
    """The file that runs, or the folder of its package where that was named: `-m package.module`.

    It is the user's own wherever it lies.
    """
    if _RAN_ELSEWHERE:
        return _RAN_ELSEWHERE[-1]
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or "<none>"
    depth = spec.name.count(".") if spec is not None else 0
    return f"{Path(file).parents[depth - 1]}{os.sep}" if depth else file


_ON_THEIR_OWN = (
    "optim/",
    "nn/utils/",
    "amp/",
    "distributed/",
    "distributions/",
    "utils/data/",
    "serialization.py",
    "_tensor_str.py",
)
"""Parts of PyTorch that read values on their own account: who waits there should know that the line is theirs."""


def line_number(code: CodeType, instruction: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def shown(file: str) -> str:
    """As Kineto writes it: of an installed package from its name on, else relative to where the program runs."""
    if file in TEXTS:
        return _BY_OPTION[file]
    if file.startswith(OURS):
        return f"keepbusy/{file[len(OURS) :].replace(os.sep, '/')}"
    if root := _installed_into(file):
        return file[len(root) :]
    if file.startswith(_LIBRARIES):
        return next(file[len(root) :] for root in _LIBRARIES if file.startswith(root))
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # it has no name, or the folder that the program runs in is gone
        return file
    return file if relative.startswith("..") else relative
