"""How a program ends that we look on at: as it would alone, whatever comes in its last moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import PATIENCE

SOURCES = Path(__file__).parents[2] / "src"
BEGINS = """\
import atexit, os, signal, sys, threading, time
from keepbusy.program.script import Ending
"""
FINISHES = "Ending(lambda: print('finished', flush=True), in_handler=%s)\n"


def ended(program: str, in_handler: bool = True, before: str = "") -> subprocess.CompletedProcess[str]:
    source = BEGINS + before + FINISHES % in_handler + program
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    quiet = "-Wignore::DeprecationWarning"  # since Python 3.12, of each fork beside a thread
    return subprocess.run(
        [sys.executable, quiet, "-c", source], capture_output=True, text=True, env=environment, timeout=PATIENCE
    )


def said(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


TERMINATES = "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)\n"
both = pytest.mark.parametrize("in_handler", [True, False])


@both
def test_what_is_done_last_comes_after_the_programs_own_handlers(in_handler: bool) -> None:
    done = ended("atexit.register(print, 'its own')\nsys.exit(3)\n", in_handler)
    assert said(done) == (3, "its own\nfinished\n", "")


@both
def test_a_signal_ends_it_once_all_is_done(in_handler: bool) -> None:
    assert said(ended(TERMINATES, in_handler)) == (-signal.SIGTERM, "finished\n", "")


@both
def test_a_signal_within_its_exit_handlers_ends_it_too(in_handler: bool) -> None:
    """Python starts no thread by then."""
    handler = "def last():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(20)\natexit.register(last)\n"
    assert said(ended(handler, in_handler)) == (-signal.SIGTERM, "finished\n", "")


def test_what_goes_wrong_in_the_signals_handler_keeps_no_program_alive() -> None:
    done = ended(TERMINATES, before="Ending(lambda: 1 // 0)\n")
    assert done.returncode == -signal.SIGTERM


OURS = """\
import keepbusy
source = '''
def write(half):
    print("begun", flush=True)
    half()
    print("written", flush=True)
'''
names = {}
exec(compile(source, keepbusy.__file__, "exec"), names)
"""


def test_a_signal_waits_for_a_call_of_ours_and_for_no_more() -> None:
    """A program may spend all of its time in these."""
    calls = OURS + "names['write'](lambda: os.kill(os.getpid(), signal.SIGTERM))\nprint('not reached', flush=True)\n"
    assert said(ended(calls, in_handler=False)) == (-signal.SIGTERM, "begun\nwritten\nfinished\n", "")


def test_a_second_signal_ends_it_in_the_middle_of_a_call_of_ours() -> None:
    calls = OURS + "def half():\n    for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\nnames['write'](half)\n"
    assert said(ended(calls, in_handler=False)) == (-signal.SIGTERM, "begun\n", "")


HANGS = """\
import ctypes
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
waiters = ctypes.c_int.from_buffer(mutex)
libc.pthread_mutex_lock(mutex)
def strike():
    while waiters.value != 2:  # so glibc notes that somebody waits
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=strike).start()
libc.pthread_mutex_lock(mutex)  # never comes back, and no signal gets it out
"""


@both
def test_a_program_that_hangs_in_a_call_is_ended_by_the_signal_as_it_would_be_alone(in_handler: bool) -> None:
    """As a rank that waits for a peer which has died."""
    soon = "import keepbusy.program.script as script\nscript._PATIENCE = script._PATIENCE_WITH_US = 0.2\n"
    assert said(ended(HANGS, in_handler, before=soon)) == (-signal.SIGTERM, "", "")


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    own = "def own(*_):\n    print('saved', flush=True)\n    sys.exit(5)\n"
    assert said(ended(f"{own}signal.signal(signal.SIGTERM, own)\n{TERMINATES}")) == (5, "saved\nfinished\n", "")


def test_the_program_is_not_told_of_our_handler() -> None:
    """One that finds a handler there may call it before it has ended well."""
    asks = (
        "BEGAN_WITH = signal.default_int_handler, signal.SIG_IGN\n"  # as where a shell begins it in the background
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.getsignal(signal.SIGINT) in BEGAN_WITH)\n"
        "print(signal.signal(signal.SIGTERM, signal.SIG_IGN) is signal.SIG_DFL)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)\n"
    )
    assert ended(asks).stdout == "True True\nTrue\nTrue\nfinished\n"


def test_the_program_is_not_told_where_we_hear_of_signals() -> None:
    """Who finds a descriptor there takes it for another library's, and warns."""
    asks = (
        "print(signal.set_wakeup_fd(-1))\n"
        "heard, own = os.pipe()\nos.set_blocking(own, False)\n"
        "print(signal.set_wakeup_fd(own, warn_on_full_buffer=False))\n"
        "signal.signal(signal.SIGUSR1, print)\nsignal.raise_signal(signal.SIGUSR1)\n"
        "print(os.read(heard, 9)[0] == signal.SIGUSR1, signal.set_wakeup_fd(-1) == own)\n"
    )
    done = ended(asks)
    assert done.stdout.splitlines()[:2] == ["-1", "-1"], done.stderr
    assert done.stdout.splitlines()[-2:] == ["True True", "finished"]


CLOSES = """\
signal.signal(signal.SIGUSR1, lambda *_: None)
for _ in range(3):
    os.closerange(3, 4096)
    signal.raise_signal(signal.SIGUSR1)
"""


@both
def test_a_program_may_close_all_descriptors(in_handler: bool) -> None:
    """As daemons do: Python would complain of ours at each signal."""
    own = "".join(f"own{number} = open(os.devnull)\n" for number in range(3)) + "print(own2.fileno())\n"
    assert said(ended(CLOSES + own + TERMINATES, in_handler)) == (-signal.SIGTERM, "5\nfinished\n", "")
    soon = "import keepbusy.program.script as script\nscript._PATIENCE = script._PATIENCE_WITH_US = 0.2\n"
    assert said(ended(CLOSES + HANGS, in_handler, before=soon)) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize("closes", ["os.closerange(3, 4096)", "library.closefrom(3)"])
def test_a_program_may_close_all_descriptors_again_and_again_while_it_traces(closes: str) -> None:
    """Python 3.11 never comes back from a function that it calls for a thread, and traces, when another one waits."""
    own = (
        "import ctypes\nlibrary = ctypes.CDLL(None)\n"
        "library.closefrom = getattr(library, 'closefrom', lambda first: os.closerange(first, 4096))\n"
        f"sys.settrace(lambda *_: None)\nfor _ in range(2000): {closes}\n"
    )
    assert said(ended(own)) == (0, "finished\n", "")


def test_a_program_may_close_descriptors_one_by_one() -> None:
    closes = (
        "ending = Ending(lambda: None)\nmiddle = ending._pipe\n"
        "for end in middle: os.close(end.copy)\n"
        "def closed(pipe): return pipe in (None, middle) or None in [end.descriptor() for end in pipe]\n"
        "while closed(ending._pipe): time.sleep(0.001)\n"  # a new one may get the number that is closed here
        "signal.signal(signal.SIGUSR1, lambda *_: None)\nsignal.raise_signal(signal.SIGUSR1)\n"
    )
    assert said(ended("", before=closes)) == (0, "finished\n", "")


def test_what_the_program_opens_has_the_number_that_it_would_have() -> None:
    assert ended("print(os.open(os.devnull, os.O_RDONLY))\n").stdout == "3\nfinished\n"


SOON = "import keepbusy.program.script as script\nscript._PATIENCE = 0\n"
"""A signal that has no effect ends the program at once, where it would be after seconds."""


@pytest.mark.parametrize(
    ("own", "ends"), [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", 7)]
)
def test_signals_to_a_forked_child_are_none_of_its_parents(own: str, ends: int) -> None:
    """Both hold the same pipe."""
    forks = (
        "heard, says = os.pipe()\n"
        "child = os.fork()\n"
        f"if not child:\n    {own}\n    os.write(says, b'.')\n    time.sleep(20)\n"
        "os.read(heard, 1)\nos.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\ntime.sleep(0.3)\n"
    )
    assert said(ended(forks, before=SOON)) == (0, f"{ends}\nfinished\n", "")


def test_a_signal_that_a_forked_child_gets_at_once_is_its_own() -> None:
    """Before it has begun to be a child: as where a pool ends workers that it has just begun."""
    first = "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    forks = (
        "for _ in range(9):\n"
        "    child = os.fork()\n"
        "    if not child:\n        time.sleep(20)\n        os._exit(0)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=' ')\n"
        "time.sleep(0.3)\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)\n"
    )
    for before in (SOON, SOON + first):
        assert said(ended(forks, before=before)) == (0, "-15 " * 9 + "set()\nfinished\n", "")


def test_an_interrupt_while_all_is_done_shows_no_traceback() -> None:
    done = ended("", before="Ending(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))\n")
    assert said(done) == (0, "finished\n", "")


@both
@pytest.mark.parametrize("call", ["_get", "_set_wakeup"])
def test_a_signal_between_the_program_and_what_is_done_last_waits_for_that(in_handler: bool, call: str) -> None:
    """As torchrun ends a rank just when that ends by itself."""
    before = (
        "from keepbusy.program import script\n"
        f"call = script.{call}\n"
        "def late(*given):\n"
        f"    script.{call} = call\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return call(*given)\n"
    )
    assert said(ended(f"script.{call} = late\n", in_handler, before=before)) == (-signal.SIGTERM, "finished\n", "")
