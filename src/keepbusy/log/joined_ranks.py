"""Several ranks' runs rebuilt together: a collective ends for all of them once the last one has arrived.

Those of one machine have the same clock; of others it is known by how much theirs is behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import DriverLog, collective_of
from keepbusy.log.rebuild import Meeting, Rebuilder, RebuiltRun

_MOST_ROUNDS = 12
_SETTLED, _STILL_SETTLES = 10_000, 0.7
"""Nanoseconds by which a collective moves from round to round when all is known, and the share of the round before by
which it does while more rounds tell more."""
Place = tuple[int, int]
"""A communicator by its id, and the number of the collective on it."""


def rebuild_ranks(
    logs: Sequence[DriverLog], times: Sequence[KernelTimes], clocks_behind: Sequence[int] = ()
) -> list[RebuiltRun]:
    """Round by round, until collectives hardly move: when one rank arrives depends on when earlier ones ended."""
    behind = clocks_behind or [0] * len(logs)
    rebuilders = [Rebuilder(log, taught) for log, taught in zip(logs, times, strict=True)]
    places = [_collectives(rebuilder) for rebuilder in rebuilders]
    wire = dict[Place, float]()
    for rebuilder, of_rank in zip(rebuilders, places, strict=True):
        alone = rebuilder.times.wires(rebuilder.log, rebuilder.described)
        for number, place in of_rank.items():
            wire[place] = min(wire.get(place, np.inf), float(alone[number]))
    arrivals, before = defaultdict[Place, _LastArrivals](_LastArrivals), np.inf
    runs = list[RebuiltRun]()
    for _ in range(_MOST_ROUNDS):
        runs = [
            rebuilder.run(
                {
                    number: Meeting(wire[place], arrivals[place].of_others(rank) - behind[rank] + wire[place])
                    for number, place in of_rank.items()
                }
            )
            for rank, (rebuilder, of_rank) in enumerate(zip(rebuilders, places, strict=True))
        ]
        now = defaultdict[Place, _LastArrivals](_LastArrivals)
        for rank, (run, of_rank) in enumerate(zip(runs, places, strict=True)):
            for number, place in of_rank.items():
                now[place].add(rank, float(run.begin[number]) + behind[rank])
        moved = sum(abs(arrival.last - arrivals[place].last) for place, arrival in now.items())
        arrivals = now
        if moved <= _SETTLED * len(now) or moved > _STILL_SETTLES * before:
            break
        before = moved
    return runs


@dataclass
class _LastArrivals:
    """When the last rank arrives at a collective, and the last but one."""

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


def _collectives(of_rank: Rebuilder) -> dict[int, Place]:
    """Of each command that is one, where it stands on its communicator; ranks know that by its id."""
    log, issuers, described = of_rank.log, of_rank.issuers, of_rank.described
    ids = {line["communicator"]: line["id"] for line in log.communicators if "id" in line}
    collective = collective_of(log)[described]
    so_far, places = Counter[int](), dict[int, Place]()
    for number in np.flatnonzero(collective >= 0).tolist():
        communicator = ids.get(log.calls[int(log.rows["call"][collective[number]])].function)
        if communicator is not None and issuers[number] == described[number]:
            places[number] = communicator, so_far[communicator]
            so_far[communicator] += 1
    return places
