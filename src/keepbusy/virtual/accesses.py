"""Who reads and writes which memory, on which stream, and which two uses nothing orders: data races.

Memory of the device is known by its address in the modelled allocator: a block keeps its uses when it is freed, and
they are compared with those of whoever is given the same memory. Pinned memory of the host is known by its own address.
Two uses race if they touch the same bytes, one of them writes, and `StreamOrder` does not put the first before the
second. A graph's uses are kept while it is captured, and count at each replay, at the line that replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from keepbusy.virtual.clock.order import Command, Made, StreamOrder
from keepbusy.virtual.memory_blocks import Block
from keepbusy.virtual.memory_views import Extent, Use

if TYPE_CHECKING:
    from torch import Tensor

HOST = -1
"""Stands for a stream: the host itself uses its pinned memory. Nothing waits in it."""
_MOST_USES = 256
"""How many uses of a piece of memory are remembered; the oldest go first."""
_MOST_FREED = 4096
"""The same of memory that was freed while other streams may still use it."""
_MOST_RACES = 100


CapturedUses: TypeAlias = list[tuple[list[Use], Use]]
"""What a graph uses: the uses of that memory, and the one to add at each replay."""


class Race(NamedTuple):
    """Two uses of the same memory, the first of which may still be under way when the second begins."""

    first: Use
    second: Use
    size: int  # bytes that both use
    event: Made | None  # an event that was recorded in between, and that the second could wait for


class Accesses:
    """All uses of memory in a process."""

    def __init__(self, order: StreamOrder) -> None:
        self.races: dict[tuple[int, int, bool, bool], Race] = {}
        """By the places of the uses, and whether the first and the second write: the first race of each."""
        self.times: dict[tuple[int, int, bool, bool], int] = {}
        self.private_streams = set[int]()
        """Streams of a library that keeps what it uses until they are done with it."""
        self._order = order
        self.in_backward = 0
        """How many backward passes are under way."""
        # by the address of a storage: what stands for its memory, and its uses. Where another storage begins at the
        # same address, the allocator of pinned memory has waited until copies were done
        self.pinned: dict[int, tuple[object, list[Use]]] = {}
        self._freed: list[Use] = []
        self._captured: CapturedUses = []
        self._captures: Callable[[int], bool] | None = None

    # what is used

    def use_block(
        self, block: Block, tensor: Tensor, offset: int, writes: bool, command: Command, partial: bool
    ) -> None:
        """`offset`: where the tensor begins, in bytes from the block's begin."""
        extent, uses = Extent.of(tensor, block.address + offset), block.uses
        use = Use(extent, command, writes, partial, self.in_backward > 0)
        is_alone = len(uses) == 1 and uses[0].command.stream == command.stream and uses[0].writes == writes
        if is_alone and uses[0].extent == extent and extent.view is None and not (partial or self._captures):
            uses[0] = use  # the usual case, which is quicker
        else:
            self._add(uses, use)

    def use_pinned(self, address: int, memory: object, extent: Extent, writes: bool, command: Command) -> None:
        """A command, or (`HOST`) the program, uses pinned memory. `address`: where its storage begins; `memory`: what
        stands for it."""
        known, uses = self.pinned.get(address, (None, []))
        if known is not memory:
            uses = []
        self.pinned[address] = memory, uses
        self._add(uses, Use(extent, command, writes))

    def is_in_use(self, address: int, memory: object) -> bool:
        """Whether the host has not yet waited for all that was copied from or to this pinned memory."""
        known, uses = self.pinned.get(address, (None, []))
        return known is memory and not all(self._order.is_known_to_host(use.command) for use in uses)

    # memory that is freed, and taken again

    def free(self, block: Block) -> None:
        """Its own stream takes it again in order; others may still use it, unless `record_stream` said so."""
        for use in block.uses:
            is_kept = (use.is_kept and block.went_back) or use.command.stream in self.private_streams
            if not is_kept and not self._order.comes_before(use.command, block.stream):
                self._freed.append(use._replace(is_freed=True))
        del self._freed[:-_MOST_FREED]
        block.uses = []

    def take(self, block: Block) -> None:
        """Memory is given out again: who used it before may still be at work."""
        block.went_back = self.in_backward > 0
        if self._freed:
            low, high = block.address, block.address + block.size
            freed = [use for use in self._freed if not self._order.is_known_to_host(use.command)]
            block.uses = [use for use in freed if use.extent.low < high and low < use.extent.high]
            self._freed = [use for use in freed if use.extent.low < low or high < use.extent.high]

    # graphs

    def begin_capture(self, captures: Callable[[int], bool]) -> None:
        """`captures`: whether a stream takes part."""
        self._captured, self._captures = [], captures

    def end_capture(self) -> CapturedUses:
        captured, self._captured, self._captures = self._captured, [], None
        alike = {(id(uses), use.extent, use.writes): (uses, use) for uses, use in captured}
        return list(alike.values())

    def replay(self, captured: Iterable[tuple[list[Use], Use]], stream: int, place: int) -> None:
        command = self._order.command(stream, place)
        for uses, use in captured:
            self._remember(uses, use._replace(command=command))

    # what follows from it

    def _add(self, uses: list[Use], new: Use) -> None:
        """`uses`: those of the same memory so far."""
        stream = new.command.stream
        if self._captures is not None and stream != HOST and self._captures(stream):
            self._captured.append((uses, new))
        else:
            self._remember(uses, new)

    def _remember(self, uses: list[Use], new: Use) -> None:
        """Note with which earlier uses the new one races, and forget those that no later one need be compared with."""
        kept = []
        for use in uses:
            if use.command.stream == new.command.stream:
                is_needless = use.writes <= new.writes and new.covers(use)
            elif not use.conflicts_with(new):
                is_needless = False
            elif self._order.comes_before(use.command, new.command.stream):
                is_needless = new.writes and new.covers(use)
            else:
                is_needless = use.extent.shares_bytes(new.extent)
                if is_needless:
                    self._note_race(use, new)
            if not is_needless:
                kept.append(use)
        if new.command.stream != HOST:
            kept.append(new)
        uses[:] = kept[-_MOST_USES:]

    def _note_race(self, first: Use, second: Use) -> None:
        key = (first.command.place, second.command.place, first.writes, second.writes)
        if key not in self.races and len(self.races) < _MOST_RACES:
            event = None if first.is_freed else self._order.event_after(first.command)
            size = min(first.extent.high, second.extent.high) - max(first.extent.low, second.extent.low)
            self.races[key] = Race(first, second, size, event)
        if key in self.races:
            self.times[key] = self.times.get(key, 0) + 1
