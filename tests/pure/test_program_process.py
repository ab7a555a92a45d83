"""Signals that reach the process beside the program: it hears of each as it would alone, and once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from warm_python import PATIENCE

SOURCES = Path(__file__).parents[2] / "src"
SUPERVISED = """\
import os, signal, sys, time
from keepbusy.cli import program as ours
ours._MOMENT, wait, forward = 0.01, signal.sigwait, ours.ProgramProcess._forward

def at_work(numbers):  # for longer than a moment, as on a busy machine
    number, until = wait(numbers), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    return number

def decided(*given):
    forward(*given)
    os.write(1, b"decided\\n")

signal.sigwait, ours.ProgramProcess._forward = at_work, decided

def program(_):
    came = []
    def told(*_):
        os.write(1, b"%d\\n" % len(came))
        sys.exit(5)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: came.append(1))
    signal.signal(signal.SIGCONT, told)  # its number is higher: it is heard last
    os.write(1, b"begun\\n")
    while True:
        signal.pause()

process = ours.ProgramProcess(program)
os.write(1, b"watched\\n")
process.wait_for_program()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True])
def test_the_program_hears_once_of_a_signal(number: int, to_all: bool) -> None:
    """Sent to the process that was started, as by `kill`, or to the whole group, as by a terminal or torchrun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCES)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert {line(process.stdout), line(process.stdout)} == {"begun", "watched"}
        send = os.killpg if to_all else os.kill
        send(process.pid, number)
        assert line(process.stdout) == "decided"
        send(process.pid, signal.SIGCONT)
        assert "1" in {line(process.stdout), line(process.stdout)}  # and that what is sent last is decided, too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("closed", [1, 2])
def test_a_program_is_run_where_a_standard_stream_is_closed(closed: int) -> None:
    source = (
        "from keepbusy.cli.program import ProgramProcess as Process\nimport os\nprocess = Process(lambda over: 5)\n"
    )
    source += "os._exit(os.waitstatus_to_exitcode(process.wait()))\n"
    command = ["sh", "-c", f'exec "$0" "$@" {closed}>&-', sys.executable, "-c", source]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCES)}, check=False, timeout=PATIENCE)
    assert done.returncode == 5


def line(stream: IO[str]) -> str:
    return stream.readline().strip()
