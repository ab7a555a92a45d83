"""Shared memory that a worker fills again and again, and that the training process pins once.

A buffer's first byte tells whose it is. The worker that made it sets it and fills the rest; the training process clears
it when the batch within is let go, which is after the device has read it. Nothing else passes between them: where a
batch is kept its worker takes another buffer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.prefetch.packed_layout import ALIGNMENT

BUFFERS = 8
"""Of a worker: what it has under way, what the loop has, and what is on its way to the device."""
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


class WorkerBuffers:
    """Those that this worker made."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self, size: int) -> Tensor:
        """Memory for so many bytes, which nobody reads until it is sent."""
        free = [place for place, buffer in enumerate(self._buffers) if not buffer[0]]
        fitting = next((place for place in free if len(self._buffers[place]) >= ALIGNMENT + size), None)
        if fitting is not None:
            buffer = self._buffers[fitting]
        else:
            buffer = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(ALIGNMENT + size))
            if free:  # batches have grown
                self._buffers[free[0]] = buffer
            elif len(self._buffers) < BUFFERS:
                self._buffers.append(buffer)
        buffer[0] = 1
        return buffer[ALIGNMENT : ALIGNMENT + size]


class ReceivedBuffers:
    """Those that batches came in. Kept, so that one that comes again is the same memory, which is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._registered: list[int] = []

    def pin(self, joined: Tensor) -> None:
        """The buffer that it stands in, unless that is pinned already."""
        storage = joined.untyped_storage()
        place = storage.data_ptr()
        if place not in self._storages:
            self._storages[place] = storage
            self._register(place, storage.nbytes())

    def close(self, copy_stream: Any) -> None:
        """Let them go once nothing is copied from them any more."""
        if self._registered:
            copy_stream.synchronize()
        for place in self._registered:
            torch.cuda.cudart().cudaHostUnregister(place)
        self._registered.clear()
        self._storages.clear()

    def _register(self, place: int, size: int) -> None:
        cudart: Any = torch.cuda.cudart()
        if cudart is None:  # a build without CUDA
            return
        if int(cudart.cudaHostRegister(place, size, _FOR_ALL_DEVICES)) == 0:
            self._registered.append(place)
            return
        with suppress(RuntimeError):  # the next kernel would be blamed for it
            torch.zeros(1, device=self._device)


def give_back(storage: torch.UntypedStorage) -> None:
    """To the worker that made it."""
    storage[0] = 0
