"""What stands between the host and the device: streams, and points in their order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from keepbusy.timeline.model import NONE
from keepbusy.timeline.replay import NEVER
from keepbusy.virtual.clock.captured_graphs import Graph


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    rows: tuple[int, ...]  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before


BEGINNING = Moment(NEVER, NEVER, ())
"""What an event holds that was never recorded: nobody waits for it."""


class Stream:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "launch", "number", "place", "tail")

    def __init__(self, lane: int, device: int, number: int, limit: int) -> None:
        self.lane, self.device, self.number = lane, device, number
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: list[tuple[int, int]] = []  # row and end of what its next command waits for
        self.ends = [NEVER] * limit  # of the last so many commands, as `timeline/replay.py` keeps them
        self.place = 0  # of the next one
        self.launch = NONE  # that came last with commands of its own

    def until(self) -> int:
        """When everything that stands in it now, or that it waits for, has ended."""
        return max([self.tail, *(end for _, end in self.awaited)]) if self.awaited else self.tail

    def before(self) -> tuple[int, ...]:
        """The rows that end by then."""
        own = () if self.last == NONE else (self.last,)
        return (*own, *(row for row, _ in self.awaited))

    def append(self, row: int, end: int, launch: int) -> None:
        """A command at its end. All commands of one launch, a graph's, take one place in the queue."""
        self.tail, self.last = end, row
        if launch != self.launch:
            self.place, self.launch = (self.place + 1) % len(self.ends), launch
        self.ends[self.place - 1] = end
