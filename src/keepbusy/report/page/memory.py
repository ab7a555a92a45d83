"""What the device's memory held over the turns, where the recording knows: over time, and by line when it held most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from keepbusy.explain.turns import Turns
from keepbusy.timeline.model import NONE, Ints, Kind, MemoryUse

LINES = 8
"""That hold most of the peak; the others together."""


def table(turns: Turns, origin: int) -> Mapping[str, Ints]:
    """All that was taken and given back while the turns ran; times count from `origin`."""
    memory = turns.timeline.memory.take(_within(turns))
    return {
        "rank": _ranks(turns, memory),
        "device": memory.device.astype(np.int64),
        "time": memory.time - origin,
        "row": _rows(turns, memory),
        "allocated": memory.allocated,
        "reserved": memory.reserved,
    }


def peaks(turns: Turns) -> list[dict[str, Any]]:
    """Of each rank's devices the moment at which most was allocated, and the lines that had taken it.

    Of several such moments it is the last: of what it holds most was seen being taken.
    """
    memory, found = turns.timeline.memory, []
    ranks, places, within = _ranks(turns, memory), _places(turns, memory), _within(turns)
    for rank, device in sorted(set(zip(ranks[within].tolist(), memory.device[within].tolist(), strict=True))):
        mine = np.flatnonzero((ranks == rank) & (memory.device == device))
        seen = mine[np.isin(mine, within)]
        peak = int(seen[np.flatnonzero(memory.allocated[seen] == memory.allocated[seen].max())[-1]])
        held: Counter[int] = Counter()
        for row in _alive(memory, mine[mine <= peak]):
            held[int(places[row])] += int(memory.size[row])
        allocated = int(memory.allocated[peak])
        lines = [(place, size) for place, size in held.most_common() if place != NONE][:LINES]
        found.append(
            {
                "rank": rank,
                "device": device,
                "time": int(memory.time[peak]),
                "allocated": allocated,
                "reserved": int(memory.reserved[peak]),
                "lines": [[place, size] for place, size in lines],
                "rest": allocated - sum(size for _, size in lines),
            }
        )
    return found


def _within(turns: Turns) -> Ints:
    """Rows of the memory from the first row of the host to the last."""
    host, time = turns.timeline.spans.take(~turns.timeline.on_device), turns.timeline.memory.time
    return np.flatnonzero((time >= host.start.min(initial=1 << 62)) & (time <= host.end.max(initial=0)))


def _ranks(turns: Turns, memory: MemoryUse) -> Ints:
    return turns.timeline.rank_of_lanes[memory.lane]


def _rows(turns: Turns, memory: MemoryUse) -> Ints:
    """The row of its thread that ran then, or before; NONE before the first."""
    timeline, found = turns.timeline, np.full(len(memory), NONE, np.int64)
    for lane in np.unique(memory.lane).tolist():
        mine, rows = np.flatnonzero(memory.lane == lane), timeline.rows_of(lane)
        at = np.searchsorted(timeline.spans.start[rows], memory.time[mine], side="right") - 1
        found[mine] = np.where(at >= 0, rows[np.maximum(at, 0)], NONE) if len(rows) else NONE
    return found


def _places(turns: Turns, memory: MemoryUse) -> Ints:
    """Whose it is: memory is taken just before the command that is to fill it is launched."""
    spans, found = turns.timeline.spans, _rows(turns, memory)
    for lane in np.unique(memory.lane).tolist():
        launches = np.flatnonzero((spans.lane == lane) & (spans.kind == Kind.LAUNCH))
        mine = np.flatnonzero((memory.lane == lane) & (memory.time >= spans.start.min(initial=1 << 62)))
        at = np.searchsorted(spans.start[launches], memory.time[mine])
        known = at < len(launches)
        found[mine[known]] = launches[at[known]]
    return np.where(found == NONE, NONE, turns.place[found])


def _alive(memory: MemoryUse, rows: Ints) -> list[int]:
    """Which of these rows took what none of them has given back."""
    taken: dict[int, int] = {}
    for row, block, size in zip(rows.tolist(), memory.block[rows].tolist(), memory.size[rows].tolist(), strict=True):
        if size > 0:
            taken[block] = row
        else:
            taken.pop(block, None)
    return list(taken.values())
