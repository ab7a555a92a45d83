"""A Python that has imported PyTorch and keepbusy already: each command runs in a fork of it.

Starting Python and importing PyTorch takes two seconds of the processor, and some hundred tests would pay for it each.
What is asked for goes in and comes out as lines of JSON; what the command prints goes to files, as it would to a pipe.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

SOURCES = Path(__file__).parents[1] / "src"
IMPORTED = (
    *("keepbusy.cli.run", "keepbusy.explain", "keepbusy.recording.recorder", "keepbusy.report.terminal"),
    *("keepbusy.virtual.bring_up", "keepbusy.virtual.virtual_run", "sympy", "torch._dynamo", "torch.profiler"),
)
"""What most commands would import. PyTorch imports sympy and dynamo once the shape of a result is computed."""


class WarmPython:
    """One for a whole session of tests, in a process of its own: in that of the tests there are virtual GPUs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        )

    def keepbusy(
        self, *arguments: str, cwd: Path, env: Mapping[str, str], timeout: int = 120
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `python -m keepbusy`, with its output captured as text."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, error)]
            asked = {"arguments": arguments, "cwd": str(cwd), "env": {**env}, "paths": paths, "timeout": timeout}
            assert self._process.stdin
            assert self._process.stdout
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            status = json.loads(self._process.stdout.readline())
            if status is None:
                raise subprocess.TimeoutExpired(["keepbusy", *arguments], timeout)
            for file in (out, error):
                file.seek(0)
            return subprocess.CompletedProcess(
                ["keepbusy", *arguments], os.waitstatus_to_exitcode(status), out.read(), error.read()
            )

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.stdout
        self._process.stdout.close()
        self._process.wait()


def _serve() -> None:
    for module in IMPORTED:
        import_module(module)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")  # closed in each fork, as standard output is replaced
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            answers.close()
            _run(asked["arguments"], asked["cwd"], asked["env"], asked["paths"])
        print(json.dumps(_status(child, asked["timeout"])), file=answers, flush=True)


def _status(child: int, timeout: int) -> int | None:
    """How it ended, or None if it had to be killed."""
    pidfd = os.pidfd_open(child)
    ended, _, _ = select.select([pidfd], [], [], timeout)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(pidfd)
    _, status = os.waitpid(child, 0)
    return status if ended else None


def _run(arguments: Sequence[str], folder: str, environment: Mapping[str, str], paths: Sequence[str]) -> NoReturn:
    """Of what a fresh Python reads at its start: the environment, the import path, sitecustomize."""
    os.chdir(folder)
    for number, path in enumerate(("/dev/null", *paths)):
        opened = os.open(path, os.O_RDWR | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = list(dict.fromkeys([folder, *given, *sys.path[1:]]))
    sys.argv = ["keepbusy", *arguments]
    if given and Path(given[0], "sitecustomize.py").exists():
        runpy.run_path(str(Path(given[0], "sitecustomize.py")))
    sys.exit(import_module("keepbusy.cli").main(arguments))


if __name__ == "__main__":
    _serve()
