"""A program in a child process of its own, so that whatever ends it, its report is still made."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


def supervise(program: Callable[[], int], meanwhile: AbstractContextManager[object] | None = None) -> int:
    """Run `program` in a child to its end; returns how that went, as `os.waitpid` tells it."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if not child:
        _die_with(parent)
        sys.exit(program())
    before = {number: signal.signal(number, _to(child)) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the child itself
    try:
        with meanwhile or nullcontext():
            return os.waitpid(child, 0)[1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_as(status: int) -> None:
    """End this process as the child ended: with its exit code, or by the signal that ended it."""
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of this process would tell nobody anything
    sys.stdout.flush()
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _to(child: int) -> Callable[[int, FrameType | None], None]:
    def forward(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    return forward


def _die_with(parent: int) -> None:
    """Nobody else would end the child of a supervisor that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
