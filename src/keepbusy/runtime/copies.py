"""Batches on their way to the device.

Why none is overwritten while somebody may read it is argued in docs/explanation/prefetch.md. In short: its
memory belongs to the *loop's* stream, so whoever gets that memory next comes after the batch's readers in that
stream's order; and before the copy stream writes, it waits for all that the loop's stream held when the
memory was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import current_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepbusy.runtime.moving import Moving, plain
from keepbusy.runtime.overlap import Trip
from keepbusy.runtime.staging import PACKERS, Layout, Slot, layout_of, pieces
from keepbusy.runtime.trees import Close, moves_itself, opened

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
