"""The processes and threads of a run: spawned children, hidden threads, descriptors, folders, and ranks."""

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

# Spawned children: each is recorded like its parent before it imports the program again

CHILD = "KEEPBUSY_SPAWNED"
"""Tells a spawned child what to call first, with which options, and the script of its parent."""
_FILE = __file__
_SCRIPT, _MODULE = _MAIN = ("init_main_from_path", "init_main_from_name")
"""Python's keys for the program of a child: a file, or with `-m` a module."""


_followed = Patches()
"""The latest replacement by `follow`."""
_CHILD_CALLS: list[dict[str, Any]] = []
"""Further calls of children, once they have begun."""


def follow(begin: Callable[..., object], options: dict[str, Any]) -> Callable[[], None]:
    """Make spawned children call `begin(**options)` first. Forked children have their parent's state anyway.

    Only the last `begin` counts. The returned function undoes it. An option that is a function is called when a child
    is spawned.
    """
    _followed.undo()
    child = {"module": begin.__module__, "function": begin.__qualname__}

    def prepared(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
        data = prepare(name)
        main = {key: data.pop(key) for key in _MAIN if data.get(key) not in (None, _FILE)}
        values = {name: value() if callable(value) else value for name, value in options.items()}
        os.environ[CHILD] = json.dumps({**child, "options": values, "then": _CHILD_CALLS, **main})
        return data | {_SCRIPT: _FILE}

    _followed.wrap(multiprocessing.spawn, "get_preparation_data", prepared)
    return _followed.undo


def follow_with(then: Callable[..., object], **options: Any) -> None:
    """Make followed children call `then` as well, once they have begun."""
    _CHILD_CALLS.append({"module": then.__module__, "function": then.__qualname__, "options": options})


def _be_child(child: dict[str, Any], names: dict[str, Any]) -> None:
    """Run in place of the script: be recorded like the parent, then run the script as Python would."""
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


# Threads that the program does not see, since it may count its threads or wait for them


@contextmanager
def deaf_to_signals() -> Iterator[None]:
    """Block signals in threads that start within, so that a signal which the program blocks does not reach them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UnseenThread:
    """A thread that `threading` does not know. It starts at once, and does not keep the process from ending."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._at_work = _thread.allocate_lock()
        self._at_work.acquire()
        with deaf_to_signals():
            _thread.start_new_thread(self._run, ())

    def join(self, patience: float) -> None:
        """Wait for its end, for at most so many seconds."""
        if self._at_work.acquire(timeout=patience):
            self._at_work.release()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._at_work.release()


def known_thread() -> threading.Thread | None:
    """The calling thread, if `threading` knows it; `threading.current_thread` would add an unknown one for good."""
    return next((thread for thread in threading.enumerate() if thread.ident == threading.get_ident()), None)


_ending = threading.local()


def at_end_of_thread(does: Callable[[], object]) -> None:
    """Call it when the calling thread ends; not in a thread of C++, which Python forgets after each call."""
    thread = known_thread()
    if thread not in (None, threading.main_thread()) and not isinstance(thread, ForeignThread):
        dies_with_thread: set[object] = _ending.__dict__.setdefault("dies_with_thread", set())
        finalize(dies_with_thread, does).atexit = False


def processor_times(thread: int) -> tuple[int, int] | None:
    """Nanoseconds that the thread with this native id has run, and has waited for a core; None if unknown, for example
    after its end."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


# Descriptors of keepbusy, in a process whose program may close any descriptor


def high_copy(descriptor: int) -> int:
    """Copy a descriptor to a high number, so that the program's descriptors have the same numbers as without it."""
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
    with suppress(OSError, ValueError):
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, limit - 16)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


@dataclass(frozen=True)
class KeptDescriptor:
    """A copy of a descriptor, and its file: if the program closes it, the number may become that of another file, which
    must not be touched."""

    copy: int
    number: int
    file: tuple[int, int]

    @classmethod
    def of(cls, number: int, is_inherited: bool = True, wanted: int = -1) -> KeptDescriptor | None:
        """None if it is closed. `is_inherited`: forked children have the copy, too; otherwise a child that outlives the
        program does not hold a pipe open. `wanted`: the number that the copy must have; None if it is in use."""
        with suppress(OSError):
            copy = high_copy(number) if wanted < 0 else fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, wanted)
            if wanted not in (-1, copy):
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
        """The copy, or if it was closed the original, unless that belongs to another file by now."""
        for number in (self.copy, self.number):
            with suppress(OSError):
                if _file(number) == self.file:
                    return number
        return None


def kept_pipe(writing_number: int = -1) -> tuple[KeptDescriptor, KeptDescriptor] | None:
    """The reading and the writing end of a pipe, the latter with this number; None if that is not possible."""
    with suppress(OSError):
        ends = os.pipe()
        writing = KeptDescriptor.of(ends[1], wanted=writing_number)
        reading = KeptDescriptor.of(ends[0])
        for end in ends:
            os.close(end)
        if reading is not None and writing is not None:
            return reading, writing
    return None


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


# A folder that the processes of a run share. It is removed with the process that made it


class RunFolder:
    """A folder that is made at its first use, so that a run which needs none leaves none if a signal kills it."""

    def __init__(self) -> None:
        self._prefix = f"keepbusy-{_host()}-"
        self._made: Path | None = None
        _remove_stale(self._prefix)
        process = os.getpid()

        def remove() -> None:
            if self._made is not None and os.getpid() == process:
                shutil.rmtree(self._made, ignore_errors=True)

        atexit.register(remove)  # exit handlers run in reverse order: those registered later still find the folder

    def path(self) -> Path:
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-"))
        return self._made

    def files(self, pattern: str) -> list[Path]:
        """The files of the folder that match, sorted by name."""
        return sorted(self._made.glob(pattern)) if self._made is not None else []


def make_folder() -> Path:
    """A new folder that nobody else can guess or read. Folders of this user's runs that were killed are removed."""
    return RunFolder().path()


def _host() -> str:
    """Identifies the host or container of process numbers, since several may share a temporary folder."""
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
                    os.kill(int(process), 0)  # checks whether it is alive
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
                except PermissionError:  # it is alive, and somebody else's
                    pass


# Ranks and GPU of a process that may just be importing PyTorch

_KNOWN_RANKS: dict[int, tuple[int, int]] = {}
"""Rank and world of each process, because it may have left its group when they are needed again."""


def rank_and_world() -> tuple[int, int]:
    """As PyTorch knows or has known them, or else as the launcher set them."""
    distributed: Any = sys.modules.get("torch.distributed")
    process = os.getpid()
    if getattr(distributed, "is_initialized", bool)():
        _KNOWN_RANKS[process] = distributed.get_rank(), distributed.get_world_size()
    return _KNOWN_RANKS.get(process) or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def uses_gpu() -> bool:
    """Whether the program uses its GPU by now. Another thread may call this while the program imports PyTorch."""
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


if __name__ == "__mp_main__" and CHILD in os.environ:  # at the end, because it removes all names of this module
    _be_child(json.loads(os.environ[CHILD]), globals())
