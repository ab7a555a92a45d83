"""The place of a call: found by a stack walk from the operator out to the script.

A place is the chain of the user's lines and of library frames with a loop, such as a trainer's, and the innermost
library frame if a library is between the user and PyTorch. A known chain costs a walk and one look-up.
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
"""So many user lines are kept at both ends of a chain. Deep recursion loses its middle: loops are at the outer end."""
USER, LIBRARY, TORCH, PYTHON, HIDDEN, OUTSIDE = range(6)
"""Kinds of code: the user's; an installed package's; a part of PyTorch, or of keepbusy, that is shown; Python's; HIDDEN
is the rest of PyTorch, from a call to its operator, and of keepbusy; OUTSIDE is what calls the script."""
TEXTS: dict[str, str] = {}
"""Sources of programs that are no files, by the name that Python gives them."""
_BY_OPTION = {"<string>": "-c", "<stdin>": "-"}
"""How places name such programs, because Python gives the same name to other code, such as that of dataclasses."""
PROGRAM_CODE = (USER, LIBRARY)
"""Code of the program, without PyTorch and Python."""


def compiled_as_written(source: bytes, file: str) -> CodeType:
    """Compile without what this module has imported from `__future__`."""
    return compile(source, file, "exec", dont_inherit=True)


_LAUNCHERS = set[str]()
_RAN_ELSEWHERE: list[str] = []


def set_program(path: str) -> None:
    """Set `program_path` to that of another process, whose lines are shown in this one."""
    _RAN_ELSEWHERE.append(path)


def set_launcher() -> None:
    """Mark the callers of `keepbusy run`, such as the script that pip wrote, as no code of the user's."""
    files = {frame.f_code.co_filename for frame in outwards(sys._getframe())}
    _LAUNCHERS.update(file for file in files if kind_of(file) in PROGRAM_CODE)


class Places:
    """Numbers for places, which the clock's `place` assigns."""

    def __init__(self, number: Callable[..., int]) -> None:
        self._number = number
        self.lines: dict[str, tuple[CodeType, int]] = {}
        """The code and the line number of each line by its text."""
        # by identity, because Python takes equal code in two files for equal; `_codes` keeps the objects alive
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def current_place(self, frame: FrameType | None = None) -> int:
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
                    kind = USER  # its line belongs to the chain like the user's
                kinds[code] = kind
            if kind == HIDDEN:  # most frames
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
        identity = (*key, library)
        number = self._known.get(identity)
        if number is None:
            lines = [self._line(key[index], key[index + 1]) for index in range(len(key) - 2, -1, -2)]
            lines += [self._line(*library)] if library and lines else []
            number = self._known[identity] = self._number(*lines)
        return number

    def _line(self, identity: int, instruction: int) -> str:
        code = self._codes[identity]
        line = line_number(code, instruction)
        text = f"{shown(code.co_filename)}({line}): {code.co_name}"
        self.lines[text] = code, line
        return text


@contextmanager
def at_rest() -> Iterator[None]:
    """Keep other threads from running while this one looks at their frames, so that it never holds their objects last.

    A thread has the interpreter to itself for 5 ms, unless it waits for something, or the garbage collector runs code
    of the program, which Python before 3.12 also does not support while frames are inspected.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stacks_of(threads: Iterable[int]) -> dict[int, list[tuple[CodeType, int]]]:
    """The stacks of these threads, from the inside out: code and instruction. No frame outlives this call."""
    with at_rest():
        frames = sys._current_frames()
        stacks = {thread: [(each.f_code, each.f_lasti) for each in outwards(frames.get(thread))] for thread in threads}
        frames.clear()  # it contains this frame, so otherwise this cycle would keep all frames and what they hold
    return stacks


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_lines(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """The current lines of the program and its libraries, from the inside out."""
    for caller in outwards(frame):
        if kind_of(caller.f_code.co_filename) in PROGRAM_CODE:
            yield caller.f_code, caller.f_lineno or 0


def holds_loop(code: CodeType) -> bool:
    """Whether the code has a backward jump."""
    return not _BACKWARD.isdisjoint(code.co_code[::2])


def kind_of(file: str) -> int:
    """The kind of a file's code."""
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
    """The folder into which the file's package was installed, or "" if it belongs to no package.

    That is Python's own folder, or one of `pip install --target`, where each package lists its files in its RECORD;
    other files there are the user's. This is cached when a file is first seen, because then its folder is in
    `sys.path`.
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
    """The names of packages and modules that were installed into a folder."""
    names = set[str]()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            names |= {line.split(",", 1)[0].split("/", 1)[0] for line in lines}
    return frozenset(names)


def is_importing(file: str) -> bool:
    """Whether this is Python's own code that imports modules, and so calls their code."""
    return file.startswith("<frozen importlib")


def is_ours(file: str) -> bool:
    """Whether this is keepbusy's code or Python's import code, in which the program must not be interrupted."""
    return (file.startswith(OURS) or is_importing(file)) and file != _SCRIPT


def warn_program(text: str) -> None:
    """Warn at the program's line that called keepbusy."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


_CALL = compile("native(*args, **kwargs)", "", "eval")


def call_at_program(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it such that warnings of C++ name the program's line, not keepbusy's."""
    frame = next(caller for caller in outwards(sys._getframe(1)) if not is_ours(caller.f_code.co_filename))
    call = _CALL.replace(co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno)
    return eval(call, frame.f_globals, {"native": native, "args": args, "kwargs": kwargs})


def program_path() -> str:
    """The file that runs, or the folder of its package with `-m package.module`. It is the user's, wherever it is."""
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
"""Parts of PyTorch that read values themselves; a wait there is shown at their line."""


def line_number(code: CodeType, instruction: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def shown(file: str) -> str:
    """A file as Kineto shows it: from the name of an installed package on, or relative to the current folder."""
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
    except (ValueError, OSError):  # it has no name, or the current folder was removed
        return file
    return file if relative.startswith("..") else relative
