"""What stands between the host and the device: streams, and points in their order."""

from __future__ import annotations

from typing import NamedTuple

from keepbusy.timeline.model import NONE
from keepbusy.timeline.replay import NEVER
from keepbusy.virtual.graphs import Graph


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    rows: tuple[int, ...]  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to


BEGINNING = Moment(NEVER, NEVER, ())
"""What an event holds that was never recorded: nobody waits for it."""


class Stream:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "number", "place", "tail")

    def __init__(self, lane: int, device: int, number: int, limit: int) -> None:
        self.lane, self.device, self.number = lane, device, number
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: list[tuple[int, int]] = []  # row and end of what its next command waits for
        self.ends = [NEVER] * limit  # of the last so many commands, as `timeline/replay.py` keeps them
        self.place = 0

    def until(self) -> int:
        """When everything that stands in it now, or that it waits for, has ended."""
        return max([self.tail, *(end for _, end in self.awaited)]) if self.awaited else self.tail

    def before(self) -> tuple[int, ...]:
        """The rows that end by then."""
        own = () if self.last == NONE else (self.last,)
        return (*own, *(row for row, _ in self.awaited))

    def append(self, row: int, end: int) -> None:
        """A command at its end."""
        self.tail, self.last = end, row
        place = self.place
        self.ends[place] = end
        self.place = place + 1 if place + 1 < len(self.ends) else 0
