"""A thread of ours that the program does not find among its own: it may count them, or wait for them all to end."""

from __future__ import annotations

import _thread
from collections.abc import Callable


class UnseenThread:
    """Runs at once, and is no reason for the process not to end. `threading` does not know of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._at_work = _thread.allocate_lock()
        self._at_work.acquire()
        _thread.start_new_thread(self._run, ())

    def join(self, patience: float) -> None:
        """Wait for its end, but no more than so many seconds."""
        if self._at_work.acquire(timeout=patience):
            self._at_work.release()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._at_work.release()
