"""Batches on their way to the device.

Why none is overwritten while somebody may read it is argued in docs/explanation/prefetch.md. In short: its
memory belongs to the *loop's* stream, so whoever gets that memory next comes after the batch's readers in that
stream's order; and before the copy stream writes, it waits for all that the loop's stream held when the
memory was taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.moving import Moving, is_plain
from keepbusy.runtime.overlap import Trip
from keepbusy.runtime.staging import Slot, layout_of, pieces
from keepbusy.runtime.trees import moves_itself, opened

Then = Callable[[Any], Any]


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
    """The way to a device: a stream, and pinned memory for as many batches as may be on it."""

    def __init__(self, device: torch.device, depth: int, then: Then | None) -> None:
        self.device, self._depth, self._then = device, depth, then
        self._side = torch.cuda.Stream(device)
        self.release()

    def release(self) -> None:
        """Give the pinned memory back. PyTorch keeps it until the copies out of it are done."""
        self._slots = [Slot() for _ in range(self._depth + 1)]

    def stage(self, batch: Any) -> Staged:
        """Issue its copies. The host waits only for pinned memory, when it is more than `depth` batches ahead."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.free()
        home = torch.cuda.current_stream(self.device)
        try:
            return self._send(batch, slot, home)
        except Exception:
            home.wait_stream(self._side)  # what was taken of its memory goes back now
            raise

    def _send(self, batch: Any, slot: Slot, home: Any) -> Staged:
        began = perf_counter_ns()
        leaves, close = opened(batch)
        sources = [leaf for leaf in leaves if is_plain(leaf)]
        layout = layout_of(sources)
        packed = slot.pack(layout, sources)
        memory = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        targets = pieces(memory, layout.places)
        leaves = self._on_device(leaves, targets)
        moving = Moving(self.device, self._side, home)
        self._side.wait_stream(home)
        with torch.cuda.stream(self._side):
            begun = timed(self._side)
            if layout.packed:
                memory[: layout.packed].copy_(packed, non_blocking=True)
            for index in layout.alone:
                targets[index].copy_(sources[index], non_blocking=True)
            copied = timed(self._side)
            slot.hold([sources[index] for index in layout.alone], copied)
            batch = self._finished(close, leaves, targets, moving)
            ready = timed(self._side)
        trip = Trip(begun, copied, ready, layout.size, layout.packed, perf_counter_ns() - began)
        return Staged(batch, [memory, *moving.made], home, trip)

    def _on_device(self, leaves: list[Any], targets: list[Tensor]) -> list[Any]:
        """The leaves with what is copied in its place. Tensors of unusual kinds move at once, on the loop's stream."""
        arriving = iter(targets)
        return [
            next(arriving)
            if is_plain(leaf)
            else leaf.to(self.device, non_blocking=True)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]

    def _settle(self, value: Any) -> Any:
        return value.to(self.device)

    def _finished(self, close: Any, leaves: list[Any], targets: list[Tensor], moving: Moving) -> Any:
        """The batch, with all that follows the copies on their stream."""
        batch = close(iter([moving.move(leaf) if moves_itself(leaf) else leaf for leaf in leaves]), self._settle)
        if self._then is not None:
            batch = self._then(batch)
            moving.note(batch, targets)
        return batch


def timed(stream: Any) -> Any:
    """An event of the stream that knows its time, and lets a host that waits for it sleep."""
    return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))
