"""How a process that runs somebody's program ends: as Python would end it, with one thing done last."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from keepbusy.instrument.script import flush


class Ending:
    """Made before the program begins: then `finish` comes after its threads have ended and its exit handlers ran.

    The first SIGTERM ends the program, as ever, but after `finish`; another one ends it at once. In a process that
    the program forks nothing is finished, and all else is as if we were not there.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish, self._process = finish, os.getpid()
        self._signal = 0
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
            self._finish()
        if self._signal:
            _die_of(self._signal)

    def _terminated(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process:
            self._finish()
        os.kill(os.getpid(), number)

    def _forked(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_of(number: int) -> None:
    flush(sys.stdout, sys.stderr)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
