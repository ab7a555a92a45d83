"""The processes and threads of a run: those that the program spawns, one of ours beside it, and where they leave what
they tell each other."""

from __future__ import annotations

import _thread
import atexit
import fcntl
import json
import multiprocessing.spawn
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import finalize

from keepbusy.program.patches import Patches
from keepbusy.torch_names.cpython import ForeignThread, run_module_code

# Processes that the program spawns: each becomes what its parent is before it imports the program again.

CHILD = "KEEPBUSY_SPAWNED"
"""How a spawned child is told what to be: what to call first, with which options, and the script of its parent."""
_FILE = __file__
_SCRIPT, _MODULE = _MAIN = ("init_main_from_path", "init_main_from_name")
"""How Python tells a child which program it belongs to: a file, or with `-m` a module."""


_followed = Patches()
"""What `follow` replaced last."""
_CHILD_CALLS: list[dict[str, Any]] = []
"""What children call besides, once they have begun."""


def follow(begin: Callable[..., object], options: dict[str, Any]) -> Callable[[], None]:
    """From now on spawned children call `begin(**options)` first. What is forked has its parent's state anyway.

    It holds for one `begin` at a time, the last; what is returned puts Python's own way back. An option that is a
    function is asked when a child is spawned.
    """
    _followed.undo()
    child = {"module": begin.__module__, "function": begin.__qualname__}

    def prepared(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
        data = prepare(name)
        main = {key: data.pop(key) for key in _MAIN if data.get(key) not in (None, _FILE)}
        asked = {name: value() if callable(value) else value for name, value in options.items()}
        os.environ[CHILD] = json.dumps({**child, "options": asked, "then": _CHILD_CALLS, **main})
        return data | {_SCRIPT: _FILE}

    _followed.wrap(multiprocessing.spawn, "get_preparation_data", prepared)
    return _followed.undo


def follow_with(then: Callable[..., object], **options: Any) -> None:
    """To be called in spawned children that are followed, once they have begun."""
    _CHILD_CALLS.append({"module": then.__module__, "function": then.__qualname__, "options": options})


def _be_child(child: dict[str, Any], names: dict[str, Any]) -> None:
    """Python runs this file in place of the script: become what the parent is, then be the script as Python would."""
    for call in (child, *child["then"]):
        getattr(import_module(call["module"]), call["function"])(**call["options"])
    script, module = child.get(_SCRIPT), child.get(_MODULE)
    main: dict[str, Any] = {}
    if script is not None and script.endswith(".py"):
        from keepbusy.program.script import COMPILE

        code = COMPILE[-1](Path(script).read_bytes(), script)
        main = run_module_code(code, None, "__mp_main__", pkg_name="", script_name=script)
    elif script is not None:
        main = runpy.run_path(script, run_name="__mp_main__")
    elif module is not None and module.rpartition(".")[2] != "__main__":
        main = runpy.run_module(module, run_name="__mp_main__", alter_sys=True)
    names.clear()
    names.update(main)


# Threads: one of ours that the program does not find among its own, which it may count or wait for.


@contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Threads that are begun in here stay so: a signal that the program holds back waits for the program's own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UnseenThread:
    """Runs at once, and is no reason for the process not to end. `threading` does not know of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._at_work = _thread.allocate_lock()
        self._at_work.acquire()
        with deaf_to_signals():
            _thread.start_new_thread(self._run, ())

    def join(self, patience: float) -> None:
        """Wait for its end, but no more than so many seconds."""
        if self._at_work.acquire(timeout=patience):
            self._at_work.release()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._at_work.release()


def known_thread() -> threading.Thread | None:
    """The calling thread, where `threading` knows it. Asked for the current one, it would make one up that stays."""
    return next((thread for thread in threading.enumerate() if thread.ident == threading.get_ident()), None)


_ending = threading.local()


def at_end_of_thread(does: Callable[[], object]) -> None:
    """Call it when the calling thread ends. A thread that C++ started has no end: Python forgets it after each call."""
    thread = known_thread()
    if thread not in (None, threading.main_thread()) and not isinstance(thread, ForeignThread):
        its_own: set[object] = _ending.__dict__.setdefault("its_own", set())  # it goes with the thread
        finalize(its_own, does).atexit = False


def processor_times(thread: int) -> tuple[int, int] | None:
    """Nanoseconds so far in which the thread of this native number had a processor, and in which it waited for one;
    None where nobody knows, as of a thread that ended."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


# Descriptors of ours, in a process whose program may close any number, also those that it never opened.


def high_copy(descriptor: int) -> int:
    """Of a descriptor, by a high number: what the program opens has the numbers that it would have."""
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
    with suppress(OSError, ValueError):
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, limit - 16)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


@dataclass(frozen=True)
class KeptDescriptor:
    """A copy of a descriptor, and which file it was: once it is closed the number may be that of a file of the
    program's, in which nobody else is to read or write."""

    copy: int
    number: int
    file: tuple[int, int]

    @classmethod
    def of(cls, number: int, is_inherited: bool = True, at: int = -1) -> KeptDescriptor | None:
        """None if it is closed. `is_inherited`: whether children that are forked have it, too; a child that outlives
        the program is not to hold a pipe open. `at`: the number that the copy must have; None if another one has it."""
        with suppress(OSError):
            copy = high_copy(number) if at < 0 else fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, at)
            if at not in (-1, copy):
                os.close(copy)
                return None
            kept = cls(copy, number, _file(number))
            if not is_inherited:
                os.register_at_fork(after_in_child=kept.close)
            return kept
        return None

    def close(self) -> None:
        with suppress(OSError):
            if _file(self.copy) == self.file:
                os.close(self.copy)

    def descriptor(self) -> int | None:
        """The copy, or if that was closed the stream itself, unless it leads elsewhere by now."""
        for number in (self.copy, self.number):
            with suppress(OSError):
                if _file(number) == self.file:
                    return number
        return None


def kept_pipe(at: int = -1) -> tuple[KeptDescriptor, KeptDescriptor] | None:
    """Its reading and its writing end, this one by the number `at`; None where there is no room for them."""
    with suppress(OSError):
        ends = os.pipe()
        writing = KeptDescriptor.of(ends[1], at=at)
        reading = KeptDescriptor.of(ends[0])
        for end in ends:
            os.close(end)
        if reading is not None and writing is not None:
            return reading, writing
    return None


def _file(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


# A folder for what the processes of a run leave each other. It goes with the process that made it.


class RunFolder:
    """One that is made when it is first asked for: a run that needs none and dies of a signal leaves none."""

    def __init__(self) -> None:
        self._prefix = f"keepbusy-{_host()}-"
        self._made: Path | None = None
        _remove_stale(self._prefix)
        process = os.getpid()

        def remove() -> None:
            if self._made is not None and os.getpid() == process:
                shutil.rmtree(self._made, ignore_errors=True)

        atexit.register(remove)  # exit handlers run the last one first: who is registered later still finds it

    def path(self) -> Path:
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-"))
        return self._made

    def files(self, pattern: str) -> list[Path]:
        """Those in it, by name."""
        return sorted(self._made.glob(pattern)) if self._made is not None else []


def make_folder() -> Path:
    """A new one that nobody else can guess or read; those of one's own runs that were killed are taken away."""
    return RunFolder().path()


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
            if process.isdecimal() and folder.lstat().st_uid == os.getuid():
                try:
                    os.kill(int(process), 0)  # which asks whether it lives
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
                except PermissionError:  # it does, and is somebody else's
                    pass


# What a process knows of its ranks and of its GPU, where PyTorch may be in the midst of its import.

_KNOWN_PLACES: dict[int, tuple[int, int]] = {}
"""Of each process, by its number: it may have left its group when it is asked again."""


def rank_and_world() -> tuple[int, int]:
    """As PyTorch knows them or has known them, or else the launcher."""
    distributed: Any = sys.modules.get("torch.distributed")
    process = os.getpid()
    if getattr(distributed, "is_initialized", bool)():
        _KNOWN_PLACES[process] = distributed.get_rank(), distributed.get_world_size()
    return _KNOWN_PLACES.get(process) or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def uses_gpu() -> bool:
    """Whether the program uses its GPU by now; asked from beside it, which may be while it imports PyTorch."""
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


if __name__ == "__mp_main__" and CHILD in os.environ:  # last, for all names go that are not the program's
    _be_child(json.loads(os.environ[CHILD]), globals())
