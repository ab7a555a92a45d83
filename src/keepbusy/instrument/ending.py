"""How a process that runs somebody's program ends: as Python would end it, with one thing done last."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from keepbusy.instrument.lines import PROGRAM_CODE, is_ours, kind_of
from keepbusy.instrument.script import flush

_AGAIN = 0.002
"""Seconds after which the signal is sent again where it came at a bad moment."""


class Ending:
    """Made before the program begins: then `finish` comes after its threads have ended and its exit handlers ran.

    The first SIGTERM ends the program, as ever, but after `finish`; another one ends it at once. In a process that
    the program forks nothing is finished, and all else is as if we were not there.
    """

    def __init__(self, finish: Callable[[], None], in_handler: bool = True) -> None:
        """`in_handler`: whether `finish` may run wherever a signal comes; else it has a thread of its own, and the
        program stands at a line of its own meanwhile."""
        self._finish, self._in_handler, self._process = finish, in_handler, os.getpid()
        self._signal, self._depth = 0, sys.getrecursionlimit()
        atexit.register(self._at_exit)
        self._takes_term = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._takes_term:
            signal.signal(signal.SIGTERM, self._terminated)
            os.register_at_fork(after_in_child=self._forked)

    def by(self, number: int) -> None:
        """Once all is done the process is to die of this signal, as Python dies of a KeyboardInterrupt."""
        self._signal = number

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            if self._takes_term and signal.getsignal(signal.SIGTERM) == self._terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._last()
        if self._signal:
            _die_of(self._signal)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._in_handler or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            if os.getpid() == self._process:
                self._last()
        elif _is_within_us(frame):  # what is being written down is half written: this waits until it is done
            main = threading.main_thread().ident
            threading.Timer(_AGAIN, lambda: signal.pthread_kill(main or 0, number)).start()
            return
        else:
            signal.signal(number, signal.SIG_DFL)
            report = threading.Thread(target=self._last, name="keepbusy report")
            report.start()
            report.join()
        os.kill(os.getpid(), number)

    def _last(self) -> None:
        """`finish`, with as deep a stack as when this was made: the program may have limited its own."""
        its_own = sys.getrecursionlimit()
        sys.setrecursionlimit(max(its_own, self._depth))
        try:
            self._finish()
        finally:
            sys.setrecursionlimit(its_own)

    def _forked(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_within_us(frame: FrameType | None) -> bool:
    """Whether the program's innermost line has called us, or is importing."""
    while frame is not None and kind_of(frame.f_code.co_filename) not in PROGRAM_CODE:
        if is_ours(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _die_of(number: int) -> None:
    flush(sys.stdout, sys.stderr)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
