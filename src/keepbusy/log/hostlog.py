"""Starts and stops the library that logs this process's calls of the CUDA driver: `hostlog.c`, which says how."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from keepbusy.torch_names.cpython import FRAME_OFFSETS, line_of_code, thread_state

SOURCE = Path(__file__).with_name("hostlog.c")
LIBRARY = SOURCE.with_name("libhostlog.so")
_COMPILED_WITH = ("-O2", "-std=gnu11", "-shared", "-fPIC")
MOST_BYTES = 48 << 20
"""The most bytes of rows: 1.5 million calls, which are explained in half a minute."""
_FILES = ("rows", "names")
_STARTED: list[Path] = []
"""The folder in which this process began its log."""


class PythonLayout(ctypes.Structure):
    """The layout of a thread's frames in this version of CPython: `struct python_layout` of the library."""

    _fields_ = (
        ("thread_state", ctypes.c_void_p),
        ("line_of", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint32)
            for name in (
                *("frame_holder", "current_frame", "previous", "code", "instruction", "owner", "first_owner_in_c"),
                *("filename", "name", "first_instruction"),
                *("length", "state", "kind_bit", "ascii", "compact"),
            )
        ),
    )


def build() -> str:
    """Compile the library into the user's cache, if it is not there. Return why that failed, or ""."""
    try:
        path = _path()
    except (OSError, RuntimeError) as error:
        return f"there is no place for its library ({error})"
    return "" if path.exists() else compile_into(path)


def compile_into(path: Path) -> str:
    """Compile the library. Return why that failed, or ""."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler; install gcc"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            library = Path(folder) / path.name
            command = [compiler, *_COMPILED_WITH, str(SOURCE), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            library.replace(path)  # several processes may do so at once
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} could not compile {SOURCE} ({error})"
    return ""


def _path() -> Path:
    if LIBRARY.exists():
        return LIBRARY
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_folder / "keepbusy" / f"hostlog-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"


def start(folder: Path, most_bytes: int = MOST_BYTES) -> str:
    """Begin to log into the files `rows` and `names` of this folder. Return why that failed, or "".

    A process has one log. If it was started before, it goes on, and this folder gets the same files.
    """
    library = _library()
    if library is None:
        return f"{_path()} is missing"
    if _STARTED:
        if library.hostlog_is_on():
            return "keepbusy records this process already"
        for name in _FILES:
            (folder / name).hardlink_to(_STARTED[0] / name)
        why = stop()
        pause(False)
        thin(False)
        return why
    files = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) for name in _FILES]
    layout = _layout(library)
    reason = library.hostlog_start(*files, most_bytes, _counter_is_a_clock(), layout and ctypes.byref(layout))
    if reason:
        for file in files:
            os.close(file)
        return reason.decode()
    _STARTED.append(folder)
    if layout and hasattr(ctypes.pythonapi, "PyCode_AddWatcher"):
        ctypes.pythonapi.PyCode_AddWatcher(library.hostlog_code_event)
    return ""


def reads_stacks() -> bool:
    """Whether rows will have Python stacks: the layout of this Python's frames must be known."""
    library = _library()
    return library is not None and _layout(library) is not None


def pause(paused: bool) -> None:
    """Calls leave no row while paused."""
    if (library := _library()) is not None:
        library.hostlog_pause(paused)


def thin(thinned: bool) -> None:
    """Calls leave no row while thinned. Graphs and communicators are still written."""
    if (library := _library()) is not None:
        library.hostlog_thin(thinned)


def note(value: int) -> None:
    """Write a row with this value and the caller's stack."""
    if (library := _library()) is not None:
        library.hostlog_note(value)


def stop() -> str:
    """End the log. Return why it had ended before, or ""."""
    library = _library()
    return (library.hostlog_stop() or b"").decode() if library is not None else ""


def _counter_is_a_clock() -> bool:
    """Whether the system itself takes its time from the processor's counter."""
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return False
    return source in ("tsc", "arch_sys_counter")


@cache
def _library() -> ctypes.PyDLL | None:
    try:
        library = ctypes.PyDLL(str(_path()))
    except (OSError, RuntimeError):
        return None
    library.hostlog_start.restype = library.hostlog_stop.restype = ctypes.c_char_p
    library.hostlog_start.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p)
    library.hostlog_note.argtypes = (ctypes.c_uint64,)
    library.hostlog_stack.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    return library


def _layout(library: ctypes.PyDLL) -> PythonLayout | None:
    """None if the library, with this layout, reads another stack than Python's own. Rows have no stacks then."""
    if FRAME_OFFSETS is None:
        return None
    layout = PythonLayout(
        ctypes.cast(thread_state, ctypes.c_void_p),
        ctypes.cast(line_of_code, ctypes.c_void_p),
        **FRAME_OFFSETS,
    )
    text = ctypes.create_string_buffer(1 << 20)
    if not library.hostlog_stack(ctypes.byref(layout), text, len(text)):
        return None
    own, *callers = json.loads(text.value)
    frame = sys._getframe()
    expected, caller = [], frame.f_back
    while caller is not None:
        expected.append([caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_qualname])
        caller = caller.f_back
    is_equal = own[::2] == [frame.f_code.co_filename, frame.f_code.co_qualname] and callers == expected[: len(callers)]
    return layout if is_equal else None
