"""Of CPython and its library: how frames are laid out, and how a script is run as `python` runs it."""

from __future__ import annotations

import sys
import threading
from pickle import _Unpickler as PythonUnpickler

from keepbusy.torch_names import look_up, place, reader, register, takes

__all__ = ["PythonUnpickler"]

_NO_STACKS = "`keepbusy run` does not know from which lines kernels are launched on a real GPU"
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

FRAME_OFFSETS = _OFFSETS.get(sys.version_info[:2])
"""For this version; None where nobody knows them, as in debug and free-threaded builds, which differ."""
if sys.implementation.name != "cpython" or sys.abiflags:
    FRAME_OFFSETS = None
register(f"{__name__}:FRAME_OFFSETS", _NO_STACKS, bool)
thread_state = look_up("ctypes:pythonapi.PyGILState_GetThisThreadState", _NO_STACKS)
line_of_code = look_up("ctypes:pythonapi.PyCode_Addr2Line", _NO_STACKS)

_NO_STACK = "keepbusy does not know which line of a program waits"
register("sys:_getframe", _NO_STACK, lambda get_frame: get_frame().f_code.co_name)  # used where it stands: on each call
register("sys:_current_frames", _NO_STACK, lambda frames: threading.get_ident() in frames())
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_ATTR", "STORE_ATTR", "LOAD_CONST", "FOR_ITER", "COPY")
register("dis:opmap", "`keepbusy.graph` does not know what a step reads", lambda opcodes: {*_READS} <= opcodes.keys())

run_module_as_main = look_up(
    "runpy:_run_module_as_main", "`keepbusy run -m` runs no modules", takes("module", alter_argv=False)
)
run_module_code = look_up(
    "runpy:_run_module_code",
    "processes that a program spawns are not recorded",
    takes("code", None, "__mp_main__", pkg_name="", script_name="train.py"),
)
ForeignThread = look_up("threading:_DummyThread", "PyTorch's own threads are taken for the program's")
SHOW_WARNING = place("warnings:_showwarnmsg", "`keepbusy.guard` does not hear of waits", takes("message"))
register("pickle:_Unpickler", "`keepbusy hang` reads no dumps in pickle's format", lambda kind: kind.dispatch)
read_flags = reader("argparse:ArgumentParser", "_actions", "shells complete no flags of keepbusy")
flags_by_name = reader("argparse:ArgumentParser", "_option_string_actions", "flags behind a script are not explained")
