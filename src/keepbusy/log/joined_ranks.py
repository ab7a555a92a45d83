"""Several ranks' runs rebuilt together: a collective ends for all of them once the last one has arrived.

Their logs have the same clock, as those of processes on one machine do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from keepbusy.log.device_commands import collective_of, device_commands
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import DriverLog
from keepbusy.log.rebuild import Meeting, RebuiltRun, rebuild

_MOST_ROUNDS, _SETTLED = 12, 1_000
"""How often the ranks are rebuilt, and nanoseconds by which no collective moves any more."""
Place = tuple[int, int]
"""A communicator by its id, and the number of the collective on it."""


def rebuild_ranks(logs: Sequence[DriverLog], times: Sequence[KernelTimes]) -> list[RebuiltRun]:
    """Round by round, until no collective moves: when one rank arrives depends on when earlier ones ended."""
    places = [_collectives(log) for log in logs]
    wires = [taught.wires(log, device_commands(log)[1]) for log, taught in zip(logs, times, strict=True)]
    wire, ranks = defaultdict[Place, list[float]](list), Counter[Place]()
    for of_rank, times_alone in zip(places, wires, strict=True):
        for number, place in of_rank.items():
            wire[place].append(float(times_alone[number]))
            ranks[place] += 1
    ends = dict.fromkeys(wire, 0.0)
    runs = list[RebuiltRun]()
    for _ in range(_MOST_ROUNDS):
        runs = [
            rebuild(log, taught, {number: Meeting(min(wire[place]), ends[place]) for number, place in of_rank.items()})
            for log, taught, of_rank in zip(logs, times, places, strict=True)
        ]
        arrived = dict.fromkeys(wire, 0.0)
        for run, of_rank in zip(runs, places, strict=True):
            for number, place in of_rank.items():
                arrived[place] = max(arrived[place], run.arrivals[number])
        now = {place: arrived[place] + min(wire[place]) for place in wire if ranks[place] > 1}
        moved = max((abs(now[place] - ends[place]) for place in now), default=0.0)
        ends |= now
        if moved <= _SETTLED:
            break
    return runs


def _collectives(log: DriverLog) -> dict[int, Place]:
    """Of each command that is one, where it stands on its communicator; ranks know that by its id."""
    ids = {line["communicator"]: line["id"] for line in log.communicators if "id" in line}
    issuers, described = device_commands(log)
    collective = collective_of(log)[described]
    so_far, places = Counter[int](), dict[int, Place]()
    for number in np.flatnonzero(collective >= 0).tolist():
        communicator = ids.get(log.calls[int(log.rows["call"][collective[number]])].function)
        if communicator is not None and issuers[number] == described[number]:
            places[number] = communicator, so_far[communicator]
            so_far[communicator] += 1
    return places
