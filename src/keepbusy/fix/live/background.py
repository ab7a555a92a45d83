"""A thread for work that the program is not to wait for. It begins with the first call and ends with the program."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from keepbusy.instrument.processes import UnseenThread

_AT_THE_END = 5
"""Seconds that the program's end waits for what is under way."""


class Background:
    """Calls, one after the other. A child that the program forks has none: its calls are made at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: UnseenThread | None = None
        self._process = 0

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        promised: Future[Any] = Future()
        if self._thread is None:
            self._process = os.getpid()
            self._thread = UnseenThread(self._work)
            atexit.register(self.stop)
        if self._process == os.getpid():
            self._queue.put((work, promised))
        else:
            _do(work, promised)
        return promised

    def stop(self) -> None:
        if self._thread is not None and self._process == os.getpid():
            self._queue.put(None)
            self._thread.join(_AT_THE_END)
            self._thread = None

    def _work(self) -> None:
        while (given := self._queue.get()) is not None:
            _do(*given)


def _do(work: Callable[[], Any], promised: Future[Any]) -> None:
    try:
        promised.set_result(work())
    except BaseException as error:  # told to whoever asks for the result
        promised.set_exception(error)
