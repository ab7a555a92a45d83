"""A Python that has imported PyTorch and keepbusy already: each command runs in a fork of it.

Starting Python and importing PyTorch takes two seconds of the processor, and some hundred tests would pay for it each.
What is asked for goes in and comes out as lines of JSON; what the command prints goes to files, as it would to a pipe.
What a test wants to know of Python's own start (streams, `sys.argv`, what is imported) needs a Python of its own.

Ranks of `--ranks` are forks as well, with what torchrun would tell them, and so is `keepbusy` where a verb starts it
anew, as `check`, `fix` and `plan` do; `agent=True` lets both start as they do for a user. Where a command starts Python
itself, for `multiprocessing` or as torchrun's agent, `stand_in.py` is started, and asks the warm one for a fork; a test
may start `executable` in place of Python, too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import math
import multiprocessing.spawn
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from keepbusy import virtual

SOURCES = Path(__file__).parents[1] / "src"
STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE = 1800
"""Seconds after which a command hangs: on a busy machine each takes many times as long as elsewhere."""
Run = Callable[..., subprocess.CompletedProcess[str]]
"""Of a script that the test writes: the fixture `run`."""
IMPORTED = (
    *("keepbusy.cli.run", "keepbusy.explain", "keepbusy.log.program_log", "keepbusy.report.terminal"),
    *("keepbusy.runtime.graph.graphed_step", "numpy.ma"),
    *virtual.IMPORTED,
)
"""What most commands would import."""


@contextmanager
def held_port() -> Iterator[int]:
    """Nobody else is given it meanwhile. PyTorch may listen there, as both say SO_REUSEADDR."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


class WarmPython:
    """One for a whole session of tests, in a process of its own: in that of the tests there are virtual GPUs."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
        program, address = self._folder / "python", self._folder / "asked"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{STAND_IN}" "{address}" "$@"\n')
        program.chmod(0o755)
        self.executable = str(program)
        """Starts a fork, with its files and its environment, wherever Python could be started."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.bind(str(address))
            asked.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, __file__, self.executable, str(asked.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
                pass_fds=[asked.fileno()],
            )

    def keepbusy(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        agent: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """`keepbusy` on the command line."""
        return self.python("-m", "keepbusy", *arguments, cwd=cwd, env=env, agent=agent)

    def python(
        self,
        *command: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        agent: bool = False,
        ranks: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `python` with a script, with `-m module` or `-c text`; output is captured as text.

        `ranks`: so many of them at a time, as torchrun would start them.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, error)]
            env = {**os.environ, "PYTHONPATH": str(SOURCES)} if env is None else {**env}
            asked = {"command": command, "cwd": str(cwd), "env": env, "paths": paths, "agent": agent, "ranks": ranks}
            assert self._process.stdin
            assert self._process.stdout
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            status = json.loads(self._process.stdout.readline())
            if status is None:
                raise subprocess.TimeoutExpired(command, PATIENCE)
            for file in (out, error):
                file.seek(0)
            return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), out.read(), error.read())

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.stdout
        self._process.stdout.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@cache
def warm() -> WarmPython:
    """That of this process of tests."""
    python = WarmPython()
    atexit.register(python.end)
    with trying_out() as caches:
        python.keepbusy("run", "--quiet", "-c", "", cwd=caches)
    return python


@contextmanager
def trying_out() -> Iterator[Path]:
    """Virtual GPUs are tried out once for all processes of tests, whose caches are in this folder."""
    caches = Path(os.environ["XDG_CACHE_HOME"])  # of `conftest.py`
    with (caches / "trying-out").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield caches


def caching_in(folder: Path) -> dict[str, str]:
    """An environment in which the last run is kept in this folder, and that virtual GPUs work is known already."""
    caches = folder / "keepbusy"
    caches.mkdir(exist_ok=True)
    for verdict in Path(os.environ["XDG_CACHE_HOME"], "keepbusy").glob("virtual-*.json"):
        shutil.copy(verdict, caches)
    return {**os.environ, "XDG_CACHE_HOME": str(folder)}


def _serve() -> None:
    atexit.register(_keep_installed)
    for module in IMPORTED:
        import_module(module)
    with suppress(ImportError):  # LibCST is an extra
        import_module("keepbusy.fix.source.from_plan")
    from keepbusy.cli import program
    from keepbusy.virtual.pytorch import operators

    operators.register()  # of tensors on the GPU alone, of which a fork without virtual GPUs has none
    setattr(operators, "register", lambda: None)  # noqa: B010  forks have it: it takes half of a short run
    _KERNELS.extend([operators._dense_kernels(), operators._sparse_kernels(), operators._LIBRARIES])

    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)
    for finalizer in [*vars(weakref.finalize)["_registry"]]:
        finalizer.atexit = False  # of PyTorch's operators, which would be taken down one by one
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")  # closed in each fork, as standard output is replaced
    forks = _Forks(*sys.argv[1:])
    while forks.attend_until(sys.stdin.fileno(), math.inf) and (line := sys.stdin.readline()):
        asked = json.loads(line)
        child = os.fork()
        if not child:
            answers.close()
            multiprocessing.spawn.set_executable(forks.python)
            if asked["agent"]:
                sys.executable = forks.python
            else:
                program.launch = _launched
                setattr(subprocess, "_fork_exec", _started)  # noqa: B010
            place = asked["command"], asked["cwd"], asked["paths"]
            run = partial(_run, *place, asked["env"])
            raise _Fork(partial(_forked, asked["ranks"], run) if asked["ranks"] else partial(run, {}))
        print(json.dumps(forks.status(child)), file=answers, flush=True)


def _keep_installed() -> None:
    """At a fork's end its program and our modules go as ever. PyTorch stays, with its kernels, and its libraries, as
    `_exit` comes first.

    To take these down would take longer than most tests.
    """
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in _INSTALLED}
    for stays in (kept, _KERNELS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stays))


_INSTALLED = {"torch", "sympy", "mpmath", "numpy"}
_KERNELS: list[object] = []


class _Fork(Exception):  # noqa: N818
    """Leaves the server's loops, which are none of what it runs: that is its argument."""


class _Forks:
    """Those that run a command, and those that were asked for by what stands in for a Python there."""

    def __init__(self, python: str, asked: str) -> None:
        self.python, self._asked = python, socket.socket(fileno=int(asked))
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """By the descriptor of its process and by that of its stand-in: the process, and who asked for it."""

    def status(self, child: int) -> int | None:
        """How it ended, or None if it had to be killed."""
        own = os.pidfd_open(child)
        ended = self.attend_until(own, time.monotonic() + PATIENCE)
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.close(own)
        _, status = os.waitpid(child, 0)
        return status if ended else None

    def attend_until(self, awaited: int, end: float) -> bool:
        """Whether there was something to read there before the end; stand-ins get their forks meanwhile."""
        while (left := end - time.monotonic()) > 0:
            ready = select.select([awaited, self._asked, *self._running], [], [], min(left, 3600))[0]
            if awaited in ready:
                return True
            for one in ready:
                if one is self._asked:
                    self._begin(self._asked.accept()[0])
                else:
                    self._end(one)
        return False

    def _begin(self, stand_in: socket.socket) -> None:
        with stand_in.makefile("rb") as words:
            _, given, _, _ = socket.recv_fds(stand_in, 1, 64)
            said = words.readline()
        if not said:  # it was ended before it had spoken
            stand_in.close()
            return
        asked, child = json.loads(said), os.fork()
        if not child:
            raise _Fork(partial(_stand, self.python, given, asked))
        for number in given:
            os.close(number)
        with suppress(OSError):  # it has ended meanwhile
            stand_in.sendall(f"{child}\n".encode())
        self._running |= dict.fromkeys((os.pidfd_open(child), stand_in.fileno()), (child, stand_in))

    def _end(self, number: int) -> None:
        """Of a fork, or of what stood in for it: that takes its fork with it."""
        if number not in self._running:
            return
        child, stand_in = self._running[number]
        if number == stand_in.fileno():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with suppress(OSError):
            stand_in.sendall(f"{status}\n".encode())
        for one in [one for one, (process, _) in self._running.items() if process == child]:
            del self._running[one]
            if one != stand_in.fileno():
                os.close(one)
        stand_in.close()


def _stand(python: str, given: Sequence[int], asked: Mapping[str, Any]) -> NoReturn:
    """With the files of what stands in for a Python, each under the number that it has there."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 512) for number in given]
    os.closerange(0, 512)
    for number, wanted in zip(high, asked["numbers"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    multiprocessing.spawn.set_executable(python)
    sys.executable = python
    command = asked["command"]
    while command[0] not in ("-c", "-m") and command[0].startswith("-"):
        del command[0]  # how a fresh Python is to behave
    _be(command, asked["cwd"], asked["env"])


def _launched(count: int, command: Sequence[str]) -> int:
    """Stands in for torchrun's agent."""

    def run(rank: Mapping[str, str]) -> NoReturn:
        os.environ |= rank
        sys.exit(import_module("keepbusy.cli").main(["run", *command]))

    return _forked(count, run)


def _forked(count: int, run: Callable[[dict[str, str]], NoReturn]) -> int:
    """So many ranks; when one fails, the others are ended."""
    running, failed = set[int](), False
    with held_port() as port:
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": str(os.getpid())}
        for rank in range(count):
            child = os.fork()
            if not child:
                _end_early(lambda: run(meeting | size | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))  # noqa: B023
            running.add(child)
        while running:
            ended, status = os.wait()
            running.discard(ended)
            if status and not failed:
                failed = True
                for child in running:
                    os.kill(child, signal.SIGTERM)
    return int(failed)


def _end_early(run: Callable[[], NoReturn]) -> NoReturn:
    """Ends as Python does, except that objects are not destroyed.

    While Python destroys them, a thread of gloo's may free a tensor: PyTorch then aborts the process, or hangs.
    """
    code: object = 1
    try:
        run()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


_fork_exec = getattr(subprocess, "_fork_exec")  # noqa: B009


def _started(arguments: Sequence[str], executables: object, closes: bool, kept: object, *rest: Any) -> int:
    """Stands in for what `subprocess` starts a program with, where that is `keepbusy`."""
    if [*arguments[:3]] != [sys.executable, "-m", "keepbusy"]:
        return int(_fork_exec(arguments, executables, closes, kept, *rest))
    child = os.fork()
    if child:
        return child
    folder, environment, *ends = rest[:8]
    for number, end in enumerate((ends[0], ends[3], ends[5])):  # of its standard input, output and error
        if end >= 0:
            os.dup2(end, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    vars(weakref.finalize)["_registry"].clear()  # what its parent has still to tidy up is not its own
    getattr(atexit, "_clear")()  # noqa: B009
    if environment is not None:
        os.environ.clear()
        os.environb.update(entry.split(b"=", 1) for entry in environment)
    os.chdir(folder or ".")
    sys.argv, code = ["keepbusy", *arguments[3:]], 1
    try:
        code = import_module("keepbusy.cli").main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(
    command: Sequence[str], folder: str, paths: Sequence[str], environment: dict[str, str], rank: dict[str, str]
) -> NoReturn:
    for number, path in enumerate(("/dev/null", *paths)):
        opened = os.open(path, os.O_RDWR | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    _be(command, folder, environment | rank)


def _be(command: Sequence[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Of what a fresh Python reads at its start: the environment, the import path, sitecustomize."""
    os.chdir(folder)
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(environment)
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    how = command[0] if command[0] in ("-m", "-c") else ""
    first = folder if how else str(Path(command[0]).parent)
    sys.path[:] = list(dict.fromkeys([first, *given, *sys.path[1:]]))
    sys.argv = [how, *command[2:]] if how else [*command]
    if given and Path(given[0], "sitecustomize.py").exists():
        runpy.run_path(str(Path(given[0], "sitecustomize.py")))
    if how == "-c":
        exec(compile(command[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
    elif not how:
        runpy.run_path(command[0], run_name="__main__")
    elif command[1] == "keepbusy":  # without reading its `__main__` anew
        sys.argv[0] = "keepbusy"
        sys.exit(import_module("keepbusy.cli").main(sys.argv[1:]))
    else:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    program: Callable[[], object] = int
    try:
        _serve()
    except _Fork as fork:
        (program,) = fork.args
    sys.exit(program())
