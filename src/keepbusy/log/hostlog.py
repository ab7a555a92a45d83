"""Starts and stops the library that logs this process's calls of the CUDA driver: `hostlog.c`, which says how."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("libhostlog.so")
MOST_BYTES = 2 << 30
"""Of rows: some 67 million calls."""


class PythonLayout(ctypes.Structure):
    """Where this version of CPython keeps a thread's frames: `struct python_layout` of the library."""

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


def start(folder: Path, most_bytes: int = MOST_BYTES) -> str:
    """Begins to log into the files `rows` and `names` of this folder. Returns why it cannot, or an empty string."""
    library = _library()
    if library is None:
        return f"{LIBRARY.name} is missing: compile hostlog.c to {LIBRARY}"
    files = [
        os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) for name in ("rows", "names")
    ]
    layout = _layout(library)
    reason = library.hostlog_start(*files, most_bytes, _counter_is_a_clock(), layout and ctypes.byref(layout))
    if reason:
        for file in files:
            os.close(file)
        return reason.decode()
    if layout and hasattr(ctypes.pythonapi, "PyCode_AddWatcher"):
        ctypes.pythonapi.PyCode_AddWatcher(library.hostlog_code_event)
    return ""


def pause(paused: bool) -> None:
    """Calls made meanwhile leave no row."""
    if (library := _library()) is not None:
        library.hostlog_pause(paused)


def stop() -> str:
    """Ends the log. Returns why it had ended before, or an empty string."""
    library = _library()
    return (library.hostlog_stop() or b"").decode() if library is not None else ""


def _counter_is_a_clock() -> bool:
    """The system itself takes its time from the processor's counter."""
    try:
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return False
    return source in ("tsc", "arch_sys_counter")


@cache
def _library() -> ctypes.PyDLL | None:
    try:
        library = ctypes.PyDLL(str(LIBRARY))
    except OSError:
        return None
    library.hostlog_start.restype = library.hostlog_stop.restype = ctypes.c_char_p
    library.hostlog_start.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p)
    library.hostlog_stack.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    return library


def _layout(library: ctypes.PyDLL) -> PythonLayout | None:
    """None if what the library reads with it differs from what Python says of this stack. Rows have no stacks then."""
    offsets = _OFFSETS.get(sys.version_info[:2])
    if offsets is None or sys.implementation.name != "cpython" or sys.abiflags:  # debug and free-threaded builds differ
        return None
    layout = PythonLayout(
        ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, ctypes.c_void_p),
        ctypes.cast(ctypes.pythonapi.PyCode_Addr2Line, ctypes.c_void_p),
        **offsets,
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
    right = own[::2] == [frame.f_code.co_filename, frame.f_code.co_qualname] and callers == expected[: len(callers)]
    return layout if right else None


_ALL = {"filename": 112, "name": 128, "length": 16, "state": 32, "kind_bit": 2}
_SINCE_3_12 = (
    _ALL
    | {"previous": 8, "code": 0, "instruction": 56, "owner": 70, "first_owner_in_c": 3}
    | {"ascii": 40, "compact": 56}
)
_OFFSETS: dict[tuple[int, int], dict[str, int]] = {
    (3, 11): _ALL
    | {"frame_holder": 56, "current_frame": 8, "previous": 48, "code": 32, "instruction": 56, "owner": 69}
    | {"first_owner_in_c": 255, "first_instruction": 184, "ascii": 48, "compact": 72},
    (3, 12): _SINCE_3_12 | {"frame_holder": 56, "current_frame": 0, "first_instruction": 192},
    (3, 13): _SINCE_3_12 | {"frame_holder": 0, "current_frame": 72, "first_instruction": 200},
}
"""Offsets of fields in CPython's structures, which no release of a minor version moves."""
