"""Batches of a loader's workers: the host waits for them, and they become a lane whose spans are batches."""

from __future__ import annotations

from collections.abc import Callable

from keepbusy.timeline.model import NONE, WORKERS, Kind, Lane
from keepbusy.virtual.device import Device
from keepbusy.virtual.host_thread import Host
from keepbusy.virtual.program import Program

STARVED = 300_000
"""Taking a batch that is ready costs less than this."""
_SYNC, _WORK = int(Kind.SYNC), int(Kind.WORK)


class Batches(Program):
    """What the program waits for that other processes of it make."""

    def __init__(self, device: Device, rank: int = 0, real: Callable[[], int] | None = None) -> None:
        super().__init__(device, rank, real)
        self._workers, self._batched = NONE, 0  # their lane, and when they had finished their last batch

    def await_batch(self) -> None:
        """A loader's workers are asked for a batch. Until it is taken, real time does not count."""
        self.come().passing.awaits = True

    def take_batch(self, name: str, done: int | None = None) -> None:
        """It has come: what the host waited for it, it waited for them.

        `done`: when they were done with it, by our clock; where nobody knows, it was really waited for.
        """
        host = self.host()
        with self.lock:
            if not host.passing.awaits:
                return
            host.passing.awaits = False
            waited = host.passing.away() if done is None else done - host.now
            if not host.depth and waited >= (STARVED if done is None else 1):
                self._wait_for_workers(host, name, host.now + waited)
            elif done is None:
                host.passing.excuse(-waited)
        self.go(host)

    def _wait_for_workers(self, host: Host, name: str, until: int) -> None:
        if self._workers == NONE:
            self._workers, self._batched = self.rows.lane(Lane(self.rank, None, NONE, WORKERS)), host.now
        begun, self._batched = self._batched, until
        number, work = self.rows.name(name), until - begun
        self.rows.add((self._workers, _WORK, number, NONE, begun, until, work, 0, NONE, NONE, 0, 0, NONE, NONE, 0))
        self._host_row(host, _SYNC, name, host.now, until, 0, self._workers)
