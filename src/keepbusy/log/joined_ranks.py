"""Rebuilds the runs of several ranks together: a collective ends for all of them once the last one has arrived.

Ranks of one machine have the same clock. For other machines, the logs say by how much their clock is behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import DriverLog, collective_of
from keepbusy.log.rebuild import Meeting, Rebuilder, RebuiltRun

_MOST_PASSES = 12
_SETTLED, _STILL_SETTLES = 10_000, 0.7
"""Stop when collectives move by at most so many nanoseconds each, or by more than this share of the pass before."""
Place = tuple[int, int]
"""A communicator by its id, and the number of the collective on it."""


def rebuild_ranks(
    logs: Sequence[DriverLog], times: Sequence[KernelTimes], clocks_behind: Sequence[int] = ()
) -> list[RebuiltRun]:
    """Rebuild all ranks repeatedly until collectives hardly move: when a rank arrives at a collective depends on when
    earlier ones ended."""
    behind = clocks_behind or [0] * len(logs)
    rebuilders = [Rebuilder(log, times_of_rank) for log, times_of_rank in zip(logs, times, strict=True)]
    places = [_collectives(rebuilder) for rebuilder in rebuilders]
    wire = dict[Place, float]()
    for rebuilder, places_of_rank in zip(rebuilders, places, strict=True):
        wires = rebuilder.times.wires(rebuilder.log, rebuilder.described)
        for number, place in places_of_rank.items():
            wire[place] = min(wire.get(place, np.inf), float(wires[number]))
    arrivals, moved_before = defaultdict[Place, _LastArrivals](_LastArrivals), np.inf
    runs = list[RebuiltRun]()
    for _ in range(_MOST_PASSES):
        runs = []
        for rank, (rebuilder, places_of_rank) in enumerate(zip(rebuilders, places, strict=True)):
            meetings = {
                number: Meeting(wire[place], arrivals[place].of_others(rank) - behind[rank] + wire[place])
                for number, place in places_of_rank.items()
            }
            runs.append(rebuilder.run(meetings))
        now = defaultdict[Place, _LastArrivals](_LastArrivals)
        for rank, (run, places_of_rank) in enumerate(zip(runs, places, strict=True)):
            for number, place in places_of_rank.items():
                now[place].add(rank, float(run.begin[number]) + behind[rank])
        moved = sum(abs(arrival.last - arrivals[place].last) for place, arrival in now.items())
        arrivals = now
        if moved <= _SETTLED * len(now) or moved > _STILL_SETTLES * moved_before:
            break
        moved_before = moved
    return runs


@dataclass
class _LastArrivals:
    """The last rank to arrive at a collective, when it arrives, and when the last but one does."""

    rank: int = -1
    last: float = 0.0
    last_but_one: float = 0.0

    def add(self, rank: int, moment: float) -> None:
        if moment > self.last:
            self.rank, self.last, self.last_but_one = rank, moment, self.last
        else:
            self.last_but_one = max(self.last_but_one, moment)

    def of_others(self, rank: int) -> float:
        return self.last_but_one if rank == self.rank else self.last


def _collectives(rebuilder: Rebuilder) -> dict[int, Place]:
    """The place of each collective on its communicator, by the number of its command."""
    log, issuers, described = rebuilder.log, rebuilder.issuers, rebuilder.described
    ids = {line["communicator"]: line["id"] for line in log.communicators if "id" in line}
    collective = collective_of(log)[described]
    counts, places = Counter[int](), dict[int, Place]()
    for number in np.flatnonzero(collective >= 0).tolist():
        communicator = ids.get(log.calls[int(log.rows["call"][collective[number]])].function)
        if communicator is not None and issuers[number] == described[number]:
            places[number] = communicator, counts[communicator]
            counts[communicator] += 1
    return places
