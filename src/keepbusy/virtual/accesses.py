"""Data races: two uses of the same memory, on different streams, that nothing orders.

Device memory is identified by its address in the modelled allocator. When a block is freed its uses are kept, and
compared with the uses by the next owner of the same memory. Pinned host memory is identified by its own address.
Two uses race if they touch the same bytes, one of them writes, and `StreamOrder` does not put the first before the
second. A graph's uses are kept while it is captured, and count at each replay, at the line that replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from keepbusy.virtual.clock.order import Command, Origin, StreamOrder
from keepbusy.virtual.memory_blocks import Block
from keepbusy.virtual.memory_views import Extent, Use

if TYPE_CHECKING:
    from torch import Tensor

HOST = -1
"""In place of a stream's number: the host itself uses its pinned memory."""
_MOST_USES = 256
"""Uses remembered for a piece of memory; the oldest are dropped first."""
_MOST_FREED = 4096
"""Uses remembered of memory that was freed while other streams may still use it."""
_MOST_RACES = 100


CapturedUses: TypeAlias = list[tuple[list[Use], Use]]
"""A graph's uses: the list of uses of the memory, and the use to add to it at each replay."""


class Race(NamedTuple):
    """Two uses of the same memory, the first of which may still be under way when the second begins."""

    first: Use
    second: Use
    size: int  # bytes that both uses share
    event: Origin | None  # an event that was recorded in between, and that the second could wait for


class Accesses:
    """All uses of memory in a process."""

    def __init__(self, order: StreamOrder) -> None:
        self.races: dict[tuple[int, int, bool, bool], Race] = {}
        """The first race for each pair of places, with whether the first and the second use write."""
        self.counts: dict[tuple[int, int, bool, bool], int] = {}
        self.private_streams = set[int]()
        """Streams of NCCL, which keeps the memory it uses until these streams are done with it."""
        self._order = order
        self.in_backward = 0
        """How many backward passes are under way."""
        # by the address of a storage: the owner of its memory, and its uses. Where another storage begins at the same
        # address, the allocator of pinned memory has waited until copies were done
        self.pinned: dict[int, tuple[object, list[Use]]] = {}
        self._freed: list[Use] = []
        self._captured: CapturedUses = []
        self._captures: Callable[[int], bool] | None = None

    # uses of memory

    def use_block(
        self, block: Block, tensor: Tensor, offset: int, writes: bool, command: Command, partial: bool
    ) -> None:
        """`offset`: bytes from the start of the block to the start of the tensor."""
        extent, uses = Extent.of(tensor, block.address + offset), block.uses
        use = Use(extent, command, writes, partial, self.in_backward > 0)
        is_alone = len(uses) == 1 and uses[0].command.stream == command.stream and uses[0].writes == writes
        if is_alone and uses[0].extent == extent and extent.view is None and not (partial or self._captures):
            uses[0] = use  # the usual case, which is quicker
        else:
            self._add(uses, use)

    def use_pinned(self, address: int, memory: object, extent: Extent, writes: bool, command: Command) -> None:
        """A command, or (`HOST`) the program, uses pinned memory. `address`: where its storage begins; `memory`: the
        object that identifies it."""
        owner, uses = self.pinned.get(address, (None, []))
        if owner is not memory:
            uses = []
        self.pinned[address] = memory, uses
        self._add(uses, Use(extent, command, writes))

    def is_in_use(self, address: int, memory: object) -> bool:
        """Whether the host has yet to wait for a copy from or to this pinned memory."""
        owner, uses = self.pinned.get(address, (None, []))
        return owner is memory and not all(self._order.is_known_to_host(use.command) for use in uses)

    # memory that is freed and allocated again

    def free(self, block: Block) -> None:
        """The block's own stream reuses it in order; streams that `record_stream` did not name may still use it."""
        for use in block.uses:
            is_safe = (use.in_backward and block.allocated_in_backward) or use.command.stream in self.private_streams
            if not is_safe and not self._order.comes_before(use.command, block.stream):
                self._freed.append(use._replace(is_freed=True))
        del self._freed[:-_MOST_FREED]
        block.uses = []

    def take(self, block: Block) -> None:
        """The block is allocated again: commands that used it before may still be running."""
        block.allocated_in_backward = self.in_backward > 0
        if self._freed:
            low, high = block.address, block.address + block.size
            freed = [use for use in self._freed if not self._order.is_known_to_host(use.command)]
            block.uses = [use for use in freed if use.extent.low < high and low < use.extent.high]
            self._freed = [use for use in freed if use.extent.low < low or high < use.extent.high]

    # graphs

    def begin_capture(self, is_capturing: Callable[[int], bool]) -> None:
        """`captures`: whether a stream takes part."""
        self._captured, self._captures = [], is_capturing

    def end_capture(self) -> CapturedUses:
        captured, self._captured, self._captures = self._captured, [], None
        unique_uses = {(id(uses), use.extent, use.writes): (uses, use) for uses, use in captured}
        return list(unique_uses.values())

    def replay(self, captured: Iterable[tuple[list[Use], Use]], stream: int, place: int) -> None:
        command = self._order.command(stream, place)
        for uses, use in captured:
            self._remember(uses, use._replace(command=command))

    # races

    def _add(self, uses: list[Use], new: Use) -> None:
        """`uses`: the earlier uses of the same memory."""
        stream = new.command.stream
        if self._captures is not None and stream != HOST and self._captures(stream):
            self._captured.append((uses, new))
        else:
            self._remember(uses, new)

    def _remember(self, uses: list[Use], new: Use) -> None:
        """Note races of the new use with earlier ones, and drop those that no later use must be compared with."""
        remaining = []
        for use in uses:
            if use.command.stream == new.command.stream:
                superseded = use.writes <= new.writes and new.covers(use)
            elif not use.conflicts_with(new):
                superseded = False
            elif self._order.comes_before(use.command, new.command.stream):
                superseded = new.writes and new.covers(use)
            else:
                superseded = use.extent.shares_bytes(new.extent)
                if superseded:
                    self._note_race(use, new)
            if not superseded:
                remaining.append(use)
        if new.command.stream != HOST:
            remaining.append(new)
        uses[:] = remaining[-_MOST_USES:]

    def _note_race(self, first: Use, second: Use) -> None:
        key = (first.command.place, second.command.place, first.writes, second.writes)
        if key not in self.races and len(self.races) < _MOST_RACES:
            event = None if first.is_freed else self._order.event_after(first.command)
            size = min(first.extent.high, second.extent.high) - max(first.extent.low, second.extent.low)
            self.races[key] = Race(first, second, size, event)
        if key in self.races:
            self.counts[key] = self.counts.get(key, 0) + 1
