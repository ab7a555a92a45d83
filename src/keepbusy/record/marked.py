"""The marks of a run so far, in columns: a million steps take forty megabytes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from keepbusy.record.device_marks import DeviceMarks
from keepbusy.record.lead import leads
from keepbusy.record.pauses import CHECKPOINT, COLLECTOR, INPUT, Pauses
from keepbusy.record.rounds import ENDS
from keepbusy.timeline.model import NONE, Ints, Mask

MOST = 1 << 20
"""Marks that are kept; of a longer run the older half goes."""
MOSTLY = 0.8
"""Where so many of the steps that are over are known on the device, those that are not are passed over."""
ASIDE = 3
"""What a mark says beside the verdicts of `Rounds`: a step ends that was looked at closely."""


class Marked:
    """Row by row: when the host set a mark, what it says of the step before it, and that step's pauses."""

    def __init__(self) -> None:
        self.first = 0
        self.host = array("q")
        self.says = array("b")
        self.input = array("q")
        self.collector = array("q")
        self.saves: dict[int, int] = {}  # what checkpoints took, by mark: they are rare

    @property
    def count(self) -> int:
        """Marks so far, with those that are not kept any more."""
        return self.first + len(self.host)

    @property
    def last(self) -> int:
        return self.host[-1] if self.host else 0

    def add(self, now: int, says: int, pauses: Pauses) -> None:
        saved = pauses.take(CHECKPOINT)
        if saved:
            self.saves[self.count] = saved
        self.says.append(says)
        self.input.append(pauses.take(INPUT))
        self.collector.append(pauses.take(COLLECTOR))
        self.host.append(now)

    def columns(self) -> tuple[array[int], ...]:
        """A row a mark: when it was set, what it says, the input and the collector before it."""
        return self.host, self.says, self.input, self.collector

    def halve(self) -> int:
        """Forget the older half, once there are too many; returns how many."""
        if len(self.host) < MOST:
            return 0
        count = MOST // 2
        for column in self.columns():
            del column[:count]
        self.first += count
        return count

    def recent(self, count: int) -> Ints:
        """How long the last plain steps took, the newest last. Any thread may ask: only copies are looked at."""
        host, says = array("q", self.host[-count - 1 :]), array("b", self.says[-count - 1 :])
        rows = min(len(host), len(says))
        took = np.diff(np.array(host[len(host) - rows :], np.int64))
        return took[np.array(says[len(says) - rows :], np.int8)[1:] == ENDS]


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a run, a row each; it ends with the mark of that number.

    A step takes what passes between its marks on the device, for there a host that is ahead loses nothing by a pause;
    where the device's marks are not known, it takes what passes on the host. The two are never mixed: while
    the device's queue fills, the host's steps are much too short.
    """

    mark: Ints
    took: Ints
    plain: Mask  # else somebody looked closely
    input: Ints
    collector: Ints
    lead: Ints  # at its end, NONE where nobody knows
    host: Ints  # what passes between its marks on the host

    def __len__(self) -> int:
        return len(self.mark)

    def take(self, rows: Ints | Mask) -> Steps:
        return Steps(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def steps_of(marked: Marked, device: DeviceMarks | None, last: int = 0) -> Steps:
    """Whole steps: what ends with a mark that says so. `last`: only of so many marks at the end.

    Any thread may ask: only copies are looked at, and a mark that is being set meanwhile is left out.
    """
    on_device = device.columns() if device is not None else ()
    end = min(len(column) for column in (*marked.columns(), *on_device))
    part = slice(max(0, end - last) if last else 0, end)
    host, says, waited, collector = (np.array(column[part], np.int64) for column in marked.columns())
    times = lead = np.full(len(host), NONE, np.int64)
    if on_device:
        times, earliest, latest = (np.array(column[part], np.int64) for column in on_device)
        lead = leads(host, times, earliest, latest)
    rows = np.flatnonzero((says == ENDS) | (says == ASIDE))
    rows = rows[rows > 0]
    known = rows[(times[rows] != NONE) & (times[rows - 1] != NONE)]
    over = np.count_nonzero(rows <= known[-1]) if len(known) else 0  # the device is still busy with those after it
    passed, rows = (times, known) if over and len(known) >= MOSTLY * over else (host, rows)
    return Steps(
        mark=rows + marked.first + part.start,
        took=passed[rows] - passed[rows - 1],
        plain=says[rows] == ENDS,
        input=waited[rows],
        collector=collector[rows],
        lead=lead[rows],
        host=host[rows] - host[rows - 1],
    )
