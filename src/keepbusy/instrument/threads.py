"""Threads: one of ours that the program does not find among its own, which it may count or wait for, and what the
processors gave to any of this process."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from pathlib import Path


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


def processor_times(thread: int) -> tuple[int, int] | None:
    """Nanoseconds so far in which the thread of this native number had a processor, and in which it waited for one;
    None where nobody knows, as of a thread that ended."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)
