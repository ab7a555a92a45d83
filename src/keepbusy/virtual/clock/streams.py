"""What stands between the host and the device: streams, and points in their order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from keepbusy.timeline.model import NONE
from keepbusy.timeline.replay import NEVER
from keepbusy.virtual.clock.captured_graphs import Graph

Awaited: TypeAlias = Mapping[int, tuple[int, int]]
"""Of each lane that is waited for the latest such command, row and end. What comes before it in its lane ends first."""
_NOTHING: Mapping[int, tuple[int, int]] = MappingProxyType({})


class Moment(NamedTuple):
    """A point in the order of a stream, as an event records it."""

    time: int  # when the device passes it
    until: int  # when the last command before it ends
    awaited: Awaited = _NOTHING  # the commands that it waits for
    graph: Graph | None = None  # the capture that it belongs to
    reached: Mapping[int, int] = MappingProxyType({})  # how many of its commands come before


BEGINNING = Moment(NEVER, NEVER)
"""What an event holds that was never recorded: nobody waits for it."""


class StreamQueue:
    """An in-order queue of commands."""

    __slots__ = ("awaited", "device", "ends", "lane", "last", "launch", "number", "place", "tail")

    def __init__(self, lane: int, device: int, number: int, limit: int) -> None:
        self.lane, self.device, self.number = lane, device, number
        self.tail = NEVER  # when its last command ends
        self.last = NONE  # that command's row
        self.awaited: dict[int, tuple[int, int]] = {}  # what its next command waits for: see `Awaited`
        self.ends = [NEVER] * limit  # of the last so many commands, as `timeline/replay.py` keeps them
        self.place = 0  # of the next one
        self.launch = NONE  # that came last with commands of its own

    def until(self) -> int:
        """When everything that stands in it now, or that it waits for, has ended."""
        return max([self.tail, *(end for _, end in self.awaited.values())]) if self.awaited else self.tail

    def pending(self) -> Awaited:
        """What must have ended by then."""
        if self.last == NONE:
            return dict(self.awaited)
        return {self.lane: (self.last, self.tail), **self.awaited}

    def wait_for(self, awaited: Awaited) -> None:
        """Its next command comes after these. Of each lane only the latest counts; its own are in order anyway."""
        for lane, command in awaited.items():
            if lane != self.lane and command > self.awaited.get(lane, (NONE, NEVER)):
                self.awaited[lane] = command
