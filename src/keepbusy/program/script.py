"""Runs the user's program as Python itself would: as `__main__`, with its own names, argv, path and tracebacks. Its
process ends as Python would end it, after one last call."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import decode_source
from itertools import filterfalse, pairwise, takewhile
from operator import attrgetter, itemgetter
from pathlib import Path
from pkgutil import get_importer
from traceback import walk_tb
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, TextIO

from keepbusy.program.lines import (
    OURS,
    PROGRAM_CODE,
    TEXTS,
    USER,
    compiled_as_written,
    is_ours,
    kind_of,
    line_number,
    outwards,
    shown,
    stacks_of,
)
from keepbusy.program.patches import Function, Patches, when_imported
from keepbusy.program.processes import KeptDescriptor, UnseenThread, kept_pipe
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.run_facts import CutShort
from keepbusy.torch_names.cpython import run_module_as_main

COMPILE: list[Callable[[bytes, str], CodeType]] = [compiled_as_written]
"""Functions that compile a script; the last one is used."""
LIFTED = set[CodeType]()
"""Code of statements that were lifted out of a function; tracebacks show it as a part of that function."""
_FILE = __file__
_BETWEEN = tuple(f"{OURS}{room}{os.sep}" for room in ("program", "log", "virtual", "fix", f"runtime{os.sep}graph"))
"""Code that may be between the program's own frames when it is recorded or fixed, or has a virtual GPU."""


def find(script: str) -> Path:
    """The file, folder or archive to run. Python itself reports any other error in it."""
    path = Path(script)
    if not path.is_file() and not (path / "__main__.py").is_file():
        raise BadInput(f"{script}: there is no such script.")
    return path


def run_file(script: str, arguments: Sequence[str]) -> int:
    """Run it as `python script` does: a script, a compiled one, or a folder or archive with a `__main__`.

    Returns the program's exit code, or the negative number of the signal that Python would die of. SystemExit passes.
    """
    path = os.path.abspath(script)  # noqa: PTH100  # a symbolic link keeps its name
    main = _new_main([script], arguments)
    if get_importer(path) is not None:  # Python decides so, too: something on `sys.path_hooks` can import from there
        _set_first_path(path)
        return _to_its_end(lambda: _run_module("__main__", alter_argv=False))
    _set_first_path(str(Path(path).resolve().parent))
    is_compiled = path.endswith(".pyc")
    loader = SourcelessFileLoader("__main__", path) if is_compiled else SourceFileLoader("__main__", path)
    main.__dict__["__loader__"] = loader
    code = partial(loader.get_code, "__main__") if is_compiled else lambda: COMPILE[-1](Path(path).read_bytes(), path)
    return _to_its_end(lambda: _execute(code, main, {"__file__": path, "__cached__": None}))


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run it as `python -m name` does."""
    _new_main(["-m", name], arguments)
    _set_first_path(str(Path.cwd()))
    return _to_its_end(lambda: _run_module(name))


def _run_module(*names: str, **how: bool) -> None:
    _begin_the_stack()
    run_module_as_main(*names, **how)


def run_text(source: str | bytes, arguments: Sequence[str]) -> int:
    """Run it as `python -c source` does, or bytes from standard input as `python -` does."""
    file, loader = ("<stdin>" if isinstance(source, bytes) else "<string>"), BuiltinImporter
    main = _new_main(["-"] if isinstance(source, bytes) else ["-c", source], arguments)
    main.__dict__["__loader__"] = loader
    _set_first_path(str(Path.cwd()), "")
    text = source if isinstance(source, bytes) else source.encode("utf-8", "surrogateescape")
    with suppress(SyntaxError, ValueError):  # Python will report it
        TEXTS[file] = decode_source(text)
    if sys.version_info >= (3, 13) and isinstance(source, str):  # there Python shows its lines
        linecache.cache[file] = len(source), None, [f"{line}\n" for line in source.splitlines()], file
    own = {"__file__": file, "__cached__": None} if isinstance(source, bytes) else {}
    return _to_its_end(lambda: _execute(lambda: COMPILE[-1](text, file), main, own))


def _new_main(program: Sequence[str], arguments: Sequence[str]) -> ModuleType:
    sys.argv = [program[0], *arguments]
    sys.orig_argv[:] = [sys.executable, *program, *arguments]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063
    sys.modules["__main__"] = main  # it stays: pickles, spawned children and exit handlers look for it
    if "__mp_main__" in sys.modules:  # so does multiprocessing when it is imported
        sys.modules["__mp_main__"] = main
    return main


def _set_first_path(folder: str, as_written: str | None = None) -> None:
    """Replace keepbusy's entry in `sys.path`, unless Python was told to make none."""
    if not sys.flags.safe_path:
        _INTERPRETERS.append(_Interpreter(folder))
        sys.path[0:1] = [folder if as_written is None else as_written]


class _Interpreter:
    """Python's imports and built-in functions as they were before the program; the report runs with them.

    A module beside the program may have the name of one that PyTorch has imported already; then the program still
    imports its own. It may also change or empty `sys.path` and `sys.modules`.
    """

    def __init__(self, folder: str) -> None:
        self._path, self._finders = [*sys.path], [*sys.meta_path]
        self._modules, self._builtins = {**sys.modules}, {**vars(builtins)}
        for name in ("__main__", "__mp_main__"):  # keepbusy must not keep the program's objects alive at its end
            self._modules.pop(name, None)
        beside = [*Path(folder).iterdir()] if os.path.isdir(folder) else []  # noqa: PTH112  # else an archive
        self._beside = {entry.stem for entry in beside if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
        for name in self._beside - {"torch", "keepbusy", "encodings"}:  # the last is there before any program
            origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
            if origin not in (None, "built-in", "frozen") and not Path(origin).is_relative_to(folder):
                _taken_out(name)

    @contextmanager
    def again(self) -> Iterator[None]:
        path, finders, its_builtins = sys.path, sys.meta_path, {**vars(builtins)}
        vars(builtins).update(self._builtins)
        sys.path, sys.meta_path = self._path, self._finders
        doubled = {name for name in self._beside if name in self._modules or PathFinder.find_spec(name, self._path)}
        doubled |= {name.partition(".")[0] for name, module in [*sys.modules.items()] if module is None}  # forbidden
        its_own = {module_name: module for name in doubled for module_name, module in _taken_out(name).items()}
        its_own |= {name: sys.modules[name] for name in self._modules.keys() & sys.modules.keys()}
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            sys.modules.update(its_own)
            sys.path, sys.meta_path = path, finders
            vars(builtins).update(its_builtins)


def _taken_out(name: str) -> dict[str, ModuleType]:
    """Remove a module and its submodules from `sys.modules`."""
    return {module: sys.modules.pop(module) for module in [*sys.modules] if module.partition(".")[0] == name}


_INTERPRETERS: list[_Interpreter] = []
"""The interpreter's state before the program, once that runs."""


def _execute(made: Callable[[], CodeType | None], main: ModuleType, own: dict[str, str | None]) -> None:
    """`own`: names that exist while it runs. Python removes them, too, so exit handlers do not find them."""
    main.__dict__.update(own)
    code = made()
    _begin_the_stack()
    try:
        exec(code, main.__dict__)  # type: ignore[arg-type]
    finally:
        for name in own:
            main.__dict__.pop(name, None)


def _to_its_end(program: Callable[[], object]) -> int:
    failed: BaseException | None = None
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        failed = error
    flush()
    if failed is None:
        return 0
    _show(failed)  # no longer being handled, or what goes wrong in a hook would have it for its context
    return -signal.SIGINT if isinstance(failed, KeyboardInterrupt) else 1


def _begin_the_stack() -> None:
    """Hide keepbusy's frames below the program: from the recursion limit, and wherever Python shows a stack. Only code
    that walks frames itself finds them."""
    patches, own_depth, limit, plain = Patches(), _depth() - 1, sys.getrecursionlimit(), sys.setrecursionlimit

    def getrecursionlimit() -> int:
        return limit

    def setrecursionlimit(depth: int, /) -> None:
        nonlocal limit
        plain(depth + own_depth if depth > 0 else depth)  # which says what is wrong with it
        limit = depth

    setrecursionlimit(limit)
    for function in (getrecursionlimit, setrecursionlimit):  # plain ones: PyTorch's compiler takes no others for them
        setattr(sys, function.__name__, wraps(getattr(sys, function.__name__))(function))
    patches.replace(traceback, "walk_stack", lambda plain: lambda frame: _its_own(plain(frame), itemgetter(0)))
    when_imported("inspect", lambda: patches.wrap(sys.modules["inspect"], "getouterframes", _outer_frames))
    when_imported("bdb", lambda: patches.wrap(sys.modules["bdb"].Bdb, "get_stack", _debugged_stack))


_PROBE = compile(
    "def deep(n):\n    try: return deep(n + 1)\n    except RecursionError: return n\ndepth = deep(1)", "", "exec"
)


def _depth() -> int:
    """The depth of the caller as Python counts it: some versions also count calls of C."""
    limit, names = sys.getrecursionlimit(), dict[str, int]()
    enough = sum(1 for _ in outwards(sys._getframe())) + 60
    sys.setrecursionlimit(enough)
    try:
        exec(_PROBE, names)
    finally:
        sys.setrecursionlimit(limit)
    return enough - 2 - names["depth"]


def _its_own(stack: Iterable[Any], frame_of: Callable[[Any], FrameType]) -> Iterator[Any]:
    """The program's frames of a stack, from the inside out, without keepbusy's below them and between them."""
    return filterfalse(
        lambda entry: frame_of(entry).f_code.co_filename.startswith(_BETWEEN),
        takewhile(lambda entry: frame_of(entry).f_code.co_filename != _FILE, stack),
    )


def _outer_frames(plain: Function, *args: Any, **kwargs: Any) -> list[Any]:
    return [*_its_own(plain(*args, **kwargs), attrgetter("frame"))]


def _debugged_stack(plain: Function, debugger: Any, frame: FrameType | None, traceback: TracebackType | None) -> Any:
    stack, index = plain(debugger, frame, traceback)
    inner = [*_its_own(reversed(stack[: index + 1]), itemgetter(0))][::-1]
    return inner + stack[index + 1 :], max(0, len(inner) - 1)


def flush(*streams: TextIO | None) -> None:
    """Flush these streams, or both standard ones, as Python does when a script has ended."""
    for stream in streams or (getattr(sys, "stderr", None), getattr(sys, "stdout", None)):
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _leave_us_out(error: BaseException) -> None:
    """Remove keepbusy's frames from the traceback of an exception, at its top and in between."""
    frames = list[TracebackType]()
    stack = error.__traceback__
    while stack is not None:
        file = stack.tb_frame.f_code.co_filename
        if not file.startswith(OURS if not frames else _BETWEEN):
            if stack.tb_frame.f_code in LIFTED:
                del frames[-1:]  # its caller
            frames.append(stack)
        stack = stack.tb_next
    for outer, inner in pairwise([*frames, None]):
        outer.tb_next = inner  # type: ignore[union-attr]
    error.__traceback__ = frames[0] if frames else None


def _shown_with(error: BaseException) -> list[BaseException]:
    """This exception and all that Python shows with it: its causes, its contexts, and those of a group."""
    errors, pending = dict[int, BaseException](), [error]
    while pending:
        shown_too = pending.pop()
        if id(shown_too) not in errors:
            errors[id(shown_too)] = shown_too
            more = shown_too.__cause__, shown_too.__context__, *getattr(shown_too, "exceptions", ())
            pending += [each for each in more if each is not None]
    return [*errors.values()]


def _show(error: BaseException) -> None:
    """Show the program's traceback as Python does."""
    for each in _shown_with(error):
        _leave_us_out(each)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    another: BaseException | None = None
    try:
        if not hasattr(sys, "excepthook"):
            _say("sys.excepthook is missing\n")
        getattr(sys, "excepthook", sys.__excepthook__)(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as raised:
        another = raised
    if another is not None:
        another.__traceback__ = another.__traceback__ and another.__traceback__.tb_next
        _say("Error in sys.excepthook:\n")
        sys.__excepthook__(type(another), another, another.__traceback__)
        _say("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text)


# The end of the process


def cut_short(number: int = 0) -> CutShort | None:
    """What cut the program of this process short: an exception, or else the signal with this number."""
    from keepbusy.program.loops.codes import read_source  # imported late, so that the program starts sooner
    from keepbusy.program.loops.source_loops import SourceLoops

    error = getattr(sys, "last_value", None)
    if error is not None:
        stack = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    elif number:
        main = threading.main_thread().ident or 0
        stack = [(code, line_number(code, instruction)) for code, instruction in reversed(stacks_of([main])[main])]
    else:
        return None
    own = [(code, line) for code, line in stack if kind_of(code.co_filename) in PROGRAM_CODE]
    users = [f"{shown(code.co_filename)}:{line}" for code, line in own if kind_of(code.co_filename) == USER]
    sources = SourceLoops(read_source)
    loops = [f"{shown(code.co_filename)}:{loop.first}" for code, line in own for loop in sources.around(code, line)]
    ended_by = type(error).__name__ if error is not None else signal.Signals(number).name
    within = tuple(dict.fromkeys([*users, *loops]))
    return CutShort(ended_by, users[-1] if users else "", within, ended=time.time_ns() // 1_000_000)


_set, _get, _set_wakeup = signal.signal, signal.getsignal, signal.set_wakeup_fd
_PATIENCE, _PATIENCE_WITH_US = 3.0, 20.0
"""Seconds after which a program in a call that does not return is ended without a report; longer with a virtual GPU,
whose operators may take long to compute."""


class Ending:
    """Calls `finish` at the end of the process. It is created before the program begins, so that `finish` is called
    after the program's threads have ended and its exit handlers have run.

    The first SIGTERM ends the program after `finish`, another one ends it at once. Forked children do not call
    `finish`. The program does not see this handler, because a program that handles SIGTERM itself would call it.
    """

    def __init__(self, finish: Callable[[], None], in_handler: bool = True) -> None:
        """`in_handler`: `finish` may run in the signal handler, wherever the program is. Otherwise it runs in a thread
        of its own, once the program is at a line of its own."""
        self._finish, self._in_handler, self._process = finish, in_handler, os.getpid()
        self.signal, self._depth = 0, sys.getrecursionlimit()
        self._handled, self._patches = threading.Event(), Patches()
        self._pipe: tuple[KeptDescriptor, KeptDescriptor] | None = None
        self._is_woken = False  # whether Python writes the numbers of signals into the pipe
        self._lock = threading.RLock()  # of the pipe and of where signals are written
        self._forking = threading.local()
        self._is_awaited = False  # whether the program ends when a call of keepbusy returns
        self._is_ending = False  # the program has ended by itself
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread() and _get(signal.SIGTERM) is signal.SIG_DFL:
            _set(signal.SIGTERM, self._terminated)
            for name in ("signal", "getsignal"):
                self._patches.wrap(signal, name, self._without_ours)
            self._is_woken = True
            self._hear_signals()
            _set_wakeup(self._wakeup, warn_on_full_buffer=False)
            self._patches.wrap(signal, "set_wakeup_fd", self._set_wakeup_fd)
            self._patches.wrap(os, "closerange", self._close_range)
            os.register_at_fork(before=self._hold, after_in_parent=self._hold_no_more, after_in_child=self._in_child)

    def exit_code(self, code: int) -> int:
        """The process's exit code. A code below 0 is a signal, of which the process dies when all is done, as Python
        dies of a KeyboardInterrupt."""
        if code < 0:
            self.signal = -code
        return code if code >= 0 else 128 - code

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._is_ending = True
            self._let_go()
            if threading.current_thread() is threading.main_thread():
                _set(signal.SIGINT, signal.SIG_IGN)  # it would show a traceback of ours, of a program that has ended
                if _get(signal.SIGTERM) is signal.SIG_DFL:  # torchrun ends all ranks once one has failed
                    _set(signal.SIGTERM, self._terminated)
            self._last()
        if self.signal:
            flush()
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending:  # `finish` comes or is under way
            self._handled.set()
            self.signal = number
            _set(number, signal.SIG_DFL)
            return
        call = None if self._in_handler or self._is_awaited else _call_of_ours(frame)
        if call is not None and os.getpid() == self._process:
            self._is_awaited = True
            _at_return(call, lambda: self._end_by(number, finishes=True))
        else:
            self._end_by(number, finishes=not self._is_awaited)

    def _end_by(self, number: int, finishes: bool) -> None:
        self._handled.set()
        self.signal = number
        _set(number, signal.SIG_DFL)
        try:
            if finishes and os.getpid() == self._process:
                report = threading.Thread(target=self._last, name="keepbusy report")
                if self._in_handler or not _starts(report):
                    self._last()
                else:
                    report.join()
        finally:
            os.kill(os.getpid(), number)

    def _last(self) -> None:
        """Call `finish` with the interpreter's state from before the program, which may also have limited its stack."""
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, self._depth))
        try:
            with _INTERPRETERS[-1].again() if _INTERPRETERS else nullcontext():
                self._finish()
        finally:
            sys.setrecursionlimit(limit)

    def _without_ours(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        handler = original(*args, **kwargs)
        return signal.SIG_DFL if handler == self._terminated else handler

    def _hear_signals(self) -> None:
        """Python's handlers run between two lines of the program, and on a real GPU it may hang in one, as a rank does
        whose peer has died.

        A pipe that was closed is made anew by its old number, since only the main thread may tell Python another one.
        """
        with self._lock:
            writing_number = self._wakeup
            self._close_pipe()
            self._pipe = pipe = kept_pipe(writing_number)
            if pipe is not None:
                with suppress(OSError):  # the program may have closed it by now: who listens makes another one
                    os.set_blocking(pipe[1].copy, False)
                UnseenThread(lambda: self._hear(pipe))

    @property
    def _wakeup(self) -> int:
        """Where Python says of a signal that it has come; -1 where nobody listens."""
        return self._pipe[1].copy if self._pipe is not None else -1

    def _set_wakeup_fd(self, original: Function, fd: int, **options: Any) -> int:
        """Where the program sets none, ours stays, and it is told that there is none: some warn about another one."""
        with self._lock:
            own = self._wakeup
            before = original(own, warn_on_full_buffer=False) if fd == -1 else original(fd, **options)
            self._is_woken = fd == -1
        return -1 if before == own else int(before)

    def _hear(self, pipe: tuple[KeptDescriptor, KeptDescriptor]) -> None:
        patience = _PATIENCE if self._in_handler else _PATIENCE_WITH_US
        with suppress(OSError):
            while (reading := pipe[0].descriptor()) is not None and (number := os.read(reading, 1)):
                if number[0] == signal.SIGTERM and not self._handled.wait(patience) and self._is_ours():
                    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python would have this said in the main thread
                    os.kill(self._process, signal.SIGTERM)
        with self._lock:
            if self._pipe is pipe:
                self._hear_signals()

    def _close_range(self, original: Function, *numbers: int) -> None:
        """Daemons close all that there is, and Python would complain at each signal that it cannot write."""
        original(*numbers)
        with self._lock:
            if self._pipe is not None and any(end.descriptor() is None for end in self._pipe):
                self._hear_signals()

    def _close_pipe(self) -> None:
        for end in self._pipe or ():
            end.close()
        self._pipe = None

    def _is_ours(self) -> bool:
        return bool(_get(signal.SIGTERM) == self._terminated)

    def _hold(self) -> None:
        """A child that is forked has our handler and our pipe at first: what is sent to it then would be its parent's,
        and it would not die of it."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def _hold_no_more(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _in_child(self) -> None:
        self._is_ending, self._lock = False, threading.RLock()
        self._let_go()
        self._hold_no_more()

    def _let_go(self) -> None:
        """At the program's end, and in a child that it forks."""
        self._patches.undo()
        if self._is_ours() and not self._is_ending:
            _set(signal.SIGTERM, signal.SIG_DFL)
        with self._lock:
            if self._is_woken:
                self._is_woken = False
                _set_wakeup(-1)
            self._close_pipe()


def _starts(thread: threading.Thread) -> bool:
    """Not once Python has begun to end."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _call_of_ours(frame: FrameType | None) -> FrameType | None:
    """The call of ours, or the import, that the program's innermost line stands in: it may be half done."""
    found: FrameType | None = None
    for caller in outwards(frame):
        if is_ours(caller.f_code.co_filename):
            found = caller
        elif found is not None or kind_of(caller.f_code.co_filename) in PROGRAM_CODE:
            break
    return found


def _at_return(frame: FrameType, act: Callable[[], object]) -> None:
    """`act` is called once this frame is left. Python tells that of a frame only while it traces."""
    before, own = sys.gettrace(), frame.f_trace

    def trace(_: FrameType, event: str, __: object) -> Any:
        if event == "return":
            sys.settrace(before)
            frame.f_trace = own
            act()
        return trace

    frame.f_trace = trace
    sys.settrace(lambda *_: None)
