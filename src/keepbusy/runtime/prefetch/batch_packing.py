"""Batches on their way to the device.

Why none is overwritten while somebody may read it is argued in docs/explanation/prefetch.md. In short: its
memory belongs to the *loop's* stream, so whoever gets that memory next comes after the batch's readers in that
stream's order; and before the copy stream writes, it waits for all that the loop's stream held when the
memory was taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from threading import current_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.runtime.prefetch.batch_tree import Close, moves_itself, opened
from keepbusy.runtime.prefetch.nonpackable_moves import Moving, plain
from keepbusy.runtime.prefetch.overlap import Trip

# Many tensors in one piece of memory: where each of them stands, on the host and on the device.

ALIGNMENT = 512
"""Bytes. As the caching allocator aligns: no kernel sees the difference to a tensor that came alone."""
DIRECT = 256 << 10
"""Bytes from which a pinned tensor is copied from where it is. Measured on an H200: a copy of its own keeps the bus
two thirds busy at this size, a fifth at 64 KB; packing costs the host twice as much as issuing that copy."""
PACKERS = 4
"""Threads that pack, if there are many tensors; a large one PyTorch copies with all of its own."""
FEW = 32
"""Tensors that are not worth another thread."""
LITTLE = 256 << 10
"""Bytes that are packed before a thread is awake."""

Look = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]
"""Type, shape, and stride unless the tensor is contiguous."""


Form = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Shape and stride; None of a tensor with one dimension."""


class Stretch(NamedTuple):
    """Tensors of one type that stand one after the other."""

    dtype: torch.dtype
    begin: int  # bytes
    end: int
    sizes: list[int]  # in elements: a tensor, the gap after it, and so on; or the tensors, if there are no gaps
    forms: list[Form]


class Layout(NamedTuple):
    """Where all tensors of a batch stand: first those that travel together, then those that travel alone."""

    stretches: list[Stretch]
    order: list[int]  # which tensor stands first, which one second, and so on
    together: int  # how many travel together
    packed: int  # bytes up to the end of those
    pageable: int  # bytes of those that are large enough to travel alone, and only not pinned
    size: int  # bytes in all


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """The same object for batches that look the same."""
    looks = tuple([(one.dtype, one.shape, None if one.is_contiguous() else one.stride()) for one in tensors])
    large, known = _large(looks)
    pinned = tuple([index for index in large if tensors[index].is_pinned()])
    if pinned not in known:
        known[pinned] = _layout(looks, large, pinned)
    return known[pinned]


def pieces(memory: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors that stand there, in the order in which they stand. The memory may end where the packed ones end.

    None is a view of another in autograd's eyes: writing into one must not look like a change of its neighbours.
    """
    return [piece for stretch in layout.stretches if stretch.end <= memory.numel() for piece in _cut(memory, stretch)]


def _cut(memory: Tensor, stretch: Stretch) -> list[Tensor]:
    stretched = memory[stretch.begin : stretch.end].view(stretch.dtype)
    rows = torch.unsafe_split_with_sizes(stretched, stretch.sizes)[:: len(stretch.sizes) // len(stretch.forms)]
    return [row if form is None else row.as_strided(*form) for row, form in zip(rows, stretch.forms, strict=True)]


@lru_cache(maxsize=64)
def _large(looks: tuple[Look, ...]) -> tuple[list[int], dict[tuple[int, ...], Layout]]:
    """Which tensors are large enough to travel alone, and the layouts there were, by those that did."""
    return [index for index, look in enumerate(looks) if _size(look) >= DIRECT and _dense(look) == look[2]], {}


def _size(look: Look) -> int:
    return math.prod(look[1]) * look[0].itemsize


def _dense(look: Look) -> tuple[int, ...] | None:
    """The stride that `Tensor.to` would give it: channels last stay so, gaps are closed."""
    dtype, shape, stride = look
    if stride is None:
        return None
    dense = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return None if dense.is_contiguous() else tuple(dense.stride())


def _form(look: Look) -> Form:
    if len(look[1]) == 1:
        return None
    return look[1], _dense(look) or tuple(torch.empty(look[1], device="meta").stride())


def _layout(looks: tuple[Look, ...], large: list[int], alone: tuple[int, ...]) -> Layout:
    def kind(index: int) -> tuple[bool, str]:
        return index in alone, str(looks[index][0])

    order = sorted(range(len(looks)), key=kind)
    stretches: list[Stretch] = []
    packed = size = 0
    for (apart, _), group in groupby(order, kind):
        stretches.append(_stretch([looks[index] for index in group], size))
        size = stretches[-1].end
        packed = packed if apart else size
    pageable = sum(_size(looks[index]) for index in large if index not in alone)
    return Layout(stretches, order, len(looks) - len(alone), packed, pageable, size)


def _stretch(looks: list[Look], begin: int) -> Stretch:
    dtype, sizes, end = looks[0][0], [], begin
    for look in looks:
        taken = -(-_size(look) // ALIGNMENT) * ALIGNMENT
        count = math.prod(look[1])
        sizes += [count, taken // dtype.itemsize - count]
        end += taken
    forms = [_form(look) for look in looks]
    return Stretch(dtype, begin, end, sizes if any(sizes[1::2]) else sizes[::2], forms)


class Slot:
    """One batch's pinned memory, kept for the next batch. `free` waits until the device has read it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._pieces: list[Tensor] = []
        self._packing: list[Future[Any]] = []
        self._read: torch.cuda.Event | None = None
        self._held: Any = None

    def free(self) -> None:
        """Wait for the copies out of it, by their event alone."""
        wait(self._packing)
        if self._read is not None:
            self._read.synchronize()
        self._packing, self._read, self._held = [], None, None

    def hold(self, sources: Any, read: torch.cuda.Event) -> None:
        """Until `read` has passed, what is copied from stays: pinned memory that is let go may be given out again."""
        self._held, self._read = sources, read

    def pack(self, layout: Layout, tensors: Sequence[Tensor], threads: Executor) -> None:
        """Write what travels together, or let threads begin to."""
        if layout is not self._layout:
            self._arrange(layout)
        sources = [tensors[index] for index in layout.order[: layout.together]]
        if layout.packed > LITTLE:
            step = min(PACKERS, -(-len(sources) // FEW))
            parts = [(self._pieces[first::step], sources[first::step]) for first in range(step)]
            self._packing = [threads.submit(torch._foreach_copy_, *part) for part in parts]
        elif sources:
            torch._foreach_copy_(self._pieces, sources)

    def packed(self) -> Tensor:
        """The pinned memory, once all is written."""
        for part in self._packing:
            part.result()
        return self._memory

    def _arrange(self, layout: Layout) -> None:
        if layout.packed > self._memory.numel():
            self._memory = torch.empty(layout.packed, dtype=torch.uint8, pin_memory=True)
        self._pieces = pieces(self._memory[: layout.packed], layout)
        self._layout = layout


Then = Callable[[Any], Any]
_THREADS = "keepbusy.prefetch"


class Apart(NamedTuple):
    """A batch taken apart, while its bytes are packed."""

    leaves: list[Any]
    close: Close
    places: list[int]  # of the leaves that travel as bytes
    others: list[int]
    layout: Layout
    slot: Slot


@dataclass
class Staged:
    """A batch whose copies are issued. Before it is dropped, a stream must `admit` it."""

    batch: Any
    memory: list[Tensor]
    home: Any  # the stream that was the loop's
    trip: Trip

    def admit(self, stream: Any) -> None:
        """What the stream does from here on may read the batch."""
        self.home.wait_event(self.trip.ready)
        if stream != self.home:
            stream.wait_event(self.trip.ready)
        for tensor in self.memory:
            tensor.record_stream(stream)  # the allocator ignores it for memory that is the stream's own


class Copies:
    """The way to a device: pinned memory for the batches that are on it, threads that fill it, and a stream.

    The threads copy from host memory to host memory and do nothing else. The rest happens in the loop's thread,
    so a program does the same things in the same order every time.
    """

    def __init__(self, device: torch.device, side: Any, depth: int, then: Then | None) -> None:
        self.device, self._side, self._then = device, side, then
        self._slots = deque(Slot() for _ in range(depth + 2))  # the batches ahead, the loop's, and one being packed
        self._threads = ThreadPoolExecutor(PACKERS, _THREADS)

    def pack(self, batch: Any) -> Apart:
        """Take it apart and begin to pack it. The host waits for pinned memory if it is too far ahead of the device."""
        self._slots.rotate()
        slot = self._slots[0]
        slot.free()
        leaves, close = opened(batch)
        places = plain(leaves)
        others = sorted(set(range(len(leaves))).difference(places)) if len(places) < len(leaves) else []
        sources = [leaves[place] for place in places]
        layout = layout_of(sources)
        slot.pack(layout, sources, self._threads)
        return Apart(leaves, close, places, others, layout, slot)

    def send(self, apart: Apart) -> Staged:
        """Issue its copies, once it is packed."""
        packed, home = apart.slot.packed(), torch.cuda.current_stream(self.device)
        memory = torch.empty(apart.layout.size, dtype=torch.uint8, device=self.device)
        try:
            return self._send(apart, packed, memory, home)
        except Exception:
            home.wait_stream(self._side)  # the memory goes back to it now
            raise

    def close(self) -> None:
        """End the threads. PyTorch keeps pinned memory until the copies out of it are done."""
        self._threads.shutdown(wait=not current_thread().name.startswith(_THREADS), cancel_futures=True)
        self._slots.clear()

    def _send(self, apart: Apart, packed: Tensor, memory: Tensor, home: Any) -> Staged:
        layout, targets = apart.layout, pieces(memory, apart.layout)
        alone = [apart.leaves[apart.places[index]] for index in layout.order[layout.together :]]
        leaves = self._replaced(apart, targets)
        self._side.wait_stream(home)
        with torch.cuda.stream(self._side):
            begun = timed(self._side)
            if layout.packed:
                memory[: layout.packed].copy_(packed[: layout.packed], non_blocking=True)
            for target, source in zip(targets[layout.together :], alone, strict=True):
                target.copy_(source, non_blocking=True)
            copied = timed(self._side)
            apart.slot.hold(alone, copied)
            batch, made = self._finished(apart, leaves, targets, home)
            ready = timed(self._side) if apart.others or self._then else copied
        trip = Trip(begun, copied, ready, layout.size, layout.packed, layout.pageable)
        return Staged(batch, [memory, *made], home, trip)

    def _replaced(self, apart: Apart, targets: list[Tensor]) -> list[Any]:
        """The leaves with their copies in place. Tensors of unusual kinds move at once, on the loop's stream."""
        leaves = list(apart.leaves)
        for index, target in zip(apart.layout.order, targets, strict=True):
            leaves[apart.places[index]] = target
        for place in apart.others:
            if isinstance(leaves[place], Tensor):
                leaves[place] = leaves[place].to(self.device, non_blocking=True)
        return leaves

    def _finished(self, apart: Apart, leaves: list[Any], targets: list[Tensor], home: Any) -> tuple[Any, list[Tensor]]:
        """The batch after all that follows its copies on their stream, and what lies in memory of that stream."""
        moving = Moving(self.device, self._side, home)
        for place in apart.others:
            if moves_itself(leaves[place]):
                leaves[place] = moving.move(leaves[place])
        batch = apart.close(iter(leaves), self._settle)
        if self._then is not None:
            batch = self._then(batch)
            moving.note(batch, targets)
        return batch, moving.made

    def _settle(self, value: Any) -> Any:
        return value.to(self.device)


def timed(stream: Any) -> Any:
    """An event of the stream that knows its time, and lets a host that waits for it sleep."""
    return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))
