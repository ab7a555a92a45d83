"""Who reads and writes which memory, on which stream, and which two of them nothing orders: data races.

Memory of the device is known by its address in the modelled allocator, so that a block keeps its readers when it is
freed, and whoever is given the same memory meets them. Pinned memory of the host is known by its own address. Two uses
race if they touch the same bytes, one of them writes, and `StreamOrder` does not put the first before the second. A
graph's uses are kept while it is captured, and count at each replay, at the line that replays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from keepbusy.virtual.clock.order import Made, StreamOrder

if TYPE_CHECKING:
    from torch import Tensor

    from keepbusy.virtual.device_memory import Block

HOST = -1
"""Stands for a stream: the host itself uses its pinned memory."""
_MOST_USES = 256
"""That are remembered of a piece of memory; the oldest go first."""
_MOST_FREED = 4096
"""The same of memory that was freed while other streams may still use it."""
_MOST_RACES = 100
_MOST_ELEMENTS = 1 << 18
"""Of two views that interleave, elements that are compared one by one. Of larger ones nothing is said."""


class View(NamedTuple):
    """Where the elements of a tensor lie that has gaps between them."""

    dimensions: tuple[tuple[int, int], ...]  # the length and the stride of each, the longest stride first
    size: int  # bytes an element

    def starts(self, low: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The address of each element, the first one being at `low`."""
        found = np.array([low], np.int64)
        for length, step in self.dimensions:
            found = (found[:, None] + np.arange(length, dtype=np.int64) * (step * self.size)).ravel()
        return found


class Use(NamedTuple):
    """One command's, or the host's, reading or writing of memory."""

    low: int  # its first byte, and the one behind its last
    high: int
    writes: bool
    stream: int
    number: int  # of the command on its stream
    place: int  # in the program
    view: View | None = None  # None for memory without gaps
    is_partial: bool = False  # of rows that an index chooses: which ones, nobody knows
    is_kept: bool = False  # within a backward pass, whose engine keeps gradients until all streams are done with them
    freed: bool = False  # whether the memory was given back since


class Race(NamedTuple):
    """Two uses of the same memory, the first of which may still be under way when the second begins."""

    first: Use
    second: Use
    size: int  # bytes that both use
    event: Made | None  # one that was recorded in between, and that the second could wait for


class Accesses:
    """Of all memory of a process."""

    def __init__(self, order: StreamOrder) -> None:
        self.races: dict[tuple[int, int, bool, bool], Race] = {}
        """By the places of the uses, and whether the first and the second write: the first race of each."""
        self.times: dict[tuple[int, int, bool, bool], int] = {}
        self.private_streams = set[int]()
        """Streams of a library that keeps what it uses until they are done with it."""
        self._order = order
        self.in_backward = 0
        """How many backward passes are under way."""
        # by the address of a storage: what stands for its memory, and its uses. Where another one begins at the same
        # address, the allocator of pinned memory has waited until copies were done
        self._pinned: dict[int, tuple[object, list[Use]]] = {}
        self._freed: list[Use] = []
        self._captured: list[tuple[list[Use], Use]] = []
        self._captures: Callable[[int], bool] | None = None

    # what is used

    def use_block(
        self,
        block: Block,
        tensor: Tensor,
        offset: int,
        writes: bool,
        stream: int,
        number: int,
        place: int,
        is_partial: bool = False,
    ) -> None:
        """`offset`: where the tensor begins, in bytes from the block's begin."""
        low, high, view = _extent(tensor, block.address + offset)
        uses = block.uses
        use = Use(low, high, writes, stream, number, place, view, is_partial, self.in_backward > 0)
        if self._is_captured(stream):
            self._captured.append((uses, use))
        elif not uses:
            uses.append(use)
        elif len(uses) == 1 and (last := uses[0]).stream == stream and last[:3] == use[:3] and not (view or is_partial):
            uses[0] = use
        else:
            self._meet(uses, use)

    def use_pinned(self, tensor: Tensor, memory: object, writes: bool, stream: int, number: int, place: int) -> None:
        """A command copies from or to pinned memory, or (`HOST`) the program itself reads or writes there. `memory`:
        what stands for it."""
        address = tensor.untyped_storage().data_ptr()
        low, high, view = _extent(tensor, tensor.data_ptr())
        self.use_pinned_bytes(address, memory, Use(low, high, writes, stream, number, place, view))

    def use_pinned_bytes(self, address: int, memory: object, use: Use) -> None:
        """The same of bytes, in the pinned memory that begins at an address."""
        known = self._pinned.get(address)
        uses = known[1] if known is not None and known[0] is memory else []
        self._pinned[address] = memory, uses
        if self._is_captured(use.stream):
            self._captured.append((uses, use))
        else:
            self._meet(uses, use)

    @property
    def has_pinned(self) -> bool:
        """Whether anything was copied from or to pinned memory."""
        return bool(self._pinned)

    def is_in_use(self, address: int, memory: object) -> bool:
        """Whether the host has not yet waited for all that was copied from or to this pinned memory."""
        known, uses = self._pinned.get(address, (None, []))
        is_done = self._order.is_known_to_host
        return known is memory and any(not is_done(one.stream, one.number) for one in uses)

    # memory that is freed, and taken again

    def free(self, block: Block) -> None:
        """Its own stream takes it again in order; others may still use it, unless `record_stream` said so."""
        for one in block.uses:
            is_kept = (one.is_kept and block.went_back) or one.stream in self.private_streams
            is_ordered = self._order.comes_before(one.stream, one.number, block.stream)
            if one.stream != block.stream and not is_kept and not is_ordered:
                self._freed.append(one._replace(freed=True))
        del self._freed[:-_MOST_FREED]
        block.uses = []

    def take(self, block: Block) -> None:
        """Memory is given out again: who used it before may still be at work."""
        block.went_back = self.in_backward > 0
        if self._freed:
            low, high = block.address, block.address + block.size
            is_known = self._order.is_known_to_host
            freed = [one for one in self._freed if not is_known(one.stream, one.number)]
            block.uses = [one for one in freed if one.low < high and low < one.high]
            self._freed = [one for one in freed if one.low < low or high < one.high]

    # graphs

    def begin_capture(self, captures: Callable[[int], bool]) -> None:
        """`captures`: whether a stream takes part."""
        self._captured, self._captures = [], captures

    def _is_captured(self, stream: int) -> bool:
        return self._captures is not None and stream != HOST and self._captures(stream)

    def end_capture(self) -> list[tuple[list[Use], Use]]:
        """What the graph uses."""
        captured, self._captured, self._captures = self._captured, [], None
        alike = {(id(uses), one.low, one.high, one.writes, one.view): (uses, one) for uses, one in captured}
        return list(alike.values())

    def replay(self, captured: Iterable[tuple[list[Use], Use]], stream: int, place: int) -> None:
        number = self._order.command(stream)
        for uses, one in captured:
            self._meet(uses, one._replace(stream=stream, number=number, place=place))

    # what comes of it

    def _meet(self, uses: list[Use], new: Use) -> None:
        """Find what the new use races with, and remember it; what it makes needless is forgotten."""
        kept = []
        for one in uses:
            is_same = (new.low, new.high, new.view) == (one.low, one.high, one.view)
            covers = is_same or (new.view is None and new.low <= one.low and one.high <= new.high)
            covers = covers and not new.is_partial
            if one.stream == new.stream:
                if covers and one.writes <= new.writes:
                    continue
            elif one.is_partial and new.is_partial:
                pass
            elif one.low < new.high and new.low < one.high and (one.writes or new.writes):
                if not self._is_before(one, new):
                    if _share_bytes(one, new):
                        self._note(one, new)
                        continue
                elif covers and new.writes:
                    continue
            kept.append(one)
        if new.stream != HOST:
            kept.append(new)
        uses[:] = kept[-_MOST_USES:]

    def _is_before(self, one: Use, new: Use) -> bool:
        if new.stream == HOST:
            return self._order.is_known_to_host(one.stream, one.number)
        return self._order.comes_before(one.stream, one.number, new.stream)

    def _note(self, one: Use, new: Use) -> None:
        key = (one.place, new.place, one.writes, new.writes)
        if key not in self.races and len(self.races) < _MOST_RACES:
            event = None if one.freed else self._order.event_after(one.stream, one.number)
            self.races[key] = Race(one, new, min(one.high, new.high) - max(one.low, new.low), event)
        if key in self.races:
            self.times[key] = self.times.get(key, 0) + 1


def _extent(tensor: Tensor, low: int) -> tuple[int, int, View | None]:
    """From a tensor's first byte to its last, and where its elements lie if there are gaps between them."""
    size = tensor.element_size()
    if tensor.is_contiguous():
        return low, low + tensor.nbytes, None
    dimensions = [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[1] and pair[0] > 1]
    span = 1 + sum((length - 1) * step for length, step in dimensions)
    if span <= math.prod(length for length, _ in dimensions):
        return low, low + span * size, None
    dimensions.sort(key=lambda pair: -pair[1])
    return low, low + span * size, View(tuple(dimensions), size)


def _share_bytes(one: Use, other: Use) -> bool:
    """Of two uses whose ranges overlap, whether any byte is in both: columns of a matrix interleave."""
    if one.view is None and other.view is None:
        return True
    if one.view is not None and other.view is not None and _are_other_columns(one, one.view, other, other.view):
        return False
    ranges = [_ranges(use) for use in (one, other)]
    if any(found is None for found in ranges):
        return False  # nobody knows
    (starts, size), (others, other_size) = ranges  # type: ignore[misc]
    # the last start of the one before the end of each of the other
    at = np.searchsorted(starts, others + other_size) - 1
    return bool((starts[np.maximum(at, 0)] + size > others)[at >= 0].any())


def _are_other_columns(one: Use, view: View, other: Use, other_view: View) -> bool:
    """Whether two views take different columns of the same rows, which needs no look at their elements."""
    if len(view.dimensions) != 2 or len(other_view.dimensions) != 2 or view.size != other_view.size:
        return False
    (row, step), (other_row, other_step) = (
        (dimensions[0][1], dimensions[1][1]) for dimensions in (view.dimensions, other_view.dimensions)
    )
    if (row, step) != (other_row, other_step):
        return False
    after, columns, others = (other.low - one.low) // view.size, view.dimensions[1][0], other_view.dimensions[1][0]
    if after < 0:
        after, columns, others = -after, others, columns
    begins = after % row  # the second view, in a row of the first
    return columns * step <= begins and begins + others * step <= row


def _ranges(use: Use) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int] | None:
    """Where its pieces begin, in order, and the length of each."""
    if use.view is None:
        return np.array([use.low], np.int64), use.high - use.low
    if math.prod(length for length, _ in use.view.dimensions) > _MOST_ELEMENTS:
        return None
    return np.sort(use.view.starts(use.low)), use.view.size
