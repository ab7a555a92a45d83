"""How a process that runs somebody's program ends: as Python would end it, with one thing done last."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from keepbusy.instrument.lines import PROGRAM_CODE, is_ours, kind_of
from keepbusy.instrument.patches import Function, Patches
from keepbusy.instrument.script import as_before, flush
from keepbusy.instrument.threads import UnseenThread

_set, _get = signal.signal, signal.getsignal
_RETRY = 0.002
"""Seconds after which the signal is sent again where it came at a bad moment."""
_PATIENCE = 3.0
"""Seconds after which a program that stands in a call which does not come back is ended without us."""


class Ending:
    """Made before the program begins: then `finish` comes after its threads have ended and its exit handlers ran.

    The first SIGTERM ends the program, as ever, but after `finish`; another one ends it at once. In a process that
    the program forks nothing is finished, and all else is as if we were not there. The program is not told of our
    handler: one that means to end well on a SIGTERM would call it, too.
    """

    def __init__(self, finish: Callable[[], None], in_handler: bool = True) -> None:
        """`in_handler`: whether `finish` may run wherever a signal comes; else it has a thread of its own, and the
        program stands at a line of its own meanwhile."""
        self._finish, self._in_handler, self._process = finish, in_handler, os.getpid()
        self._signal, self._depth = 0, sys.getrecursionlimit()
        self._handled, self._wakeup, self._patches = threading.Event(), -1, Patches()
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread() and _get(signal.SIGTERM) is signal.SIG_DFL:
            _set(signal.SIGTERM, self._terminated)
            for name in ("signal", "getsignal"):
                self._patches.replace(signal, name, self._without_ours)
            if in_handler:
                self._hear_signals()
            os.register_at_fork(after_in_child=self._let_go)

    def by(self, number: int) -> None:
        """Once all is done the process is to die of this signal, as Python dies of a KeyboardInterrupt."""
        self._signal = number

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._let_go()
            if threading.current_thread() is threading.main_thread():
                _set(signal.SIGINT, signal.SIG_IGN)  # it would show a traceback of ours, of a program that has ended
            self._last()
        if self._signal:
            _die_of(self._signal)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._handled.set()
        if os.getpid() == self._process and not self._in_handler and _is_within_us(frame):
            self._handled.clear()
            if _starts(threading.Timer(_RETRY, signal.pthread_kill, (threading.main_thread().ident, number))):
                return  # what is being written down is half written: this waits until it is done
        _set(number, signal.SIG_DFL)
        try:
            if os.getpid() == self._process:
                report = threading.Thread(target=self._last, name="keepbusy report")
                if self._in_handler or not _starts(report):
                    self._last()
                else:
                    report.join()
        finally:
            os.kill(os.getpid(), number)

    def _last(self) -> None:
        """`finish`, in the interpreter as it was before the program, which may have limited its stack, too."""
        its_own = sys.getrecursionlimit()
        sys.setrecursionlimit(max(its_own, self._depth))
        try:
            with as_before():
                self._finish()
        finally:
            sys.setrecursionlimit(its_own)

    def _without_ours(self, original: Function) -> Function:
        def told(*args: Any, **kwargs: Any) -> Any:
            handler = original(*args, **kwargs)
            return signal.SIG_DFL if handler == self._terminated else handler

        return told

    def _hear_signals(self) -> None:
        """Python's handlers run between two lines of the program, and on a real GPU it may hang in one, as a rank does
        whose peer has died."""
        heard, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        UnseenThread(lambda: self._hear(heard))

    def _hear(self, heard: int) -> None:
        while came := os.read(heard, 1):
            if came[0] == signal.SIGTERM and not self._handled.wait(_PATIENCE) and self._is_ours():
                ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python would have this said in the main thread
                os.kill(self._process, signal.SIGTERM)

    def _is_ours(self) -> bool:
        return bool(_get(signal.SIGTERM) == self._terminated)

    def _let_go(self) -> None:
        """At the program's end, and in a child that it forks."""
        self._patches.undo()
        if self._is_ours():
            _set(signal.SIGTERM, signal.SIG_DFL)
        if self._wakeup >= 0 and (now := signal.set_wakeup_fd(-1)) not in (-1, self._wakeup):
            signal.set_wakeup_fd(now)  # the program's own


def _starts(thread: threading.Thread) -> bool:
    """Not once Python has begun to end."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _is_within_us(frame: FrameType | None) -> bool:
    """Whether the program's innermost line has called us, or is importing."""
    while frame is not None and kind_of(frame.f_code.co_filename) not in PROGRAM_CODE:
        if is_ours(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _die_of(number: int) -> None:
    flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
