"""Shared memory that a worker fills again and again, and that the training process pins once.

A buffer's first byte tells whose it is. The worker that made it sets it and fills the rest; the training process clears
it when the batch within is let go, which is after the device has read it. Where a batch is kept its worker takes
another buffer. The second byte says that the training process holds the buffer: then its name is sent in its place,
and no file is passed between processes, which takes a fifth of a millisecond.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.prefetch.packed_layout import ALIGNMENT, DIRECT_COPY_BYTES

BUFFERS = 8
"""Of a worker: what it has under way, what the loop has, and what is on its way to the device."""
_HELD, _NAME = 1, slice(16, 32)
_BY_NAME: dict[bytes, torch.UntypedStorage] = {}
"""The buffers that this process holds."""
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
            buffer[_NAME] = torch.tensor(list(os.urandom(_NAME.stop - _NAME.start)), dtype=torch.uint8)
            if free:  # batches have grown
                self._buffers[free[0]] = buffer
            elif len(self._buffers) < BUFFERS:
                self._buffers.append(buffer)
        buffer[0] = 1
        return buffer[ALIGNMENT : ALIGNMENT + size]


class ReceivedBuffers:
    """Those that batches came in. Held, so that one that comes again is the same memory, which is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[bytes] = []
        self._registered: list[int] = []

    def hold(self, joined: Tensor) -> None:
        """The buffer that it stands in, and pin it if it is large, unless that is done."""
        storage = joined.untyped_storage()
        if not storage[_HELD]:
            name = name_of(joined)
            self._names.append(name)
            _BY_NAME[name] = storage
            if joined.nbytes >= DIRECT_COPY_BYTES:
                self._register(storage.data_ptr(), storage.nbytes())
            storage[_HELD] = 1

    def close(self, copy_stream: Any) -> None:
        """Let them go once nothing is copied from them any more."""
        if self._registered:
            copy_stream.synchronize()
        for place in self._registered:
            torch.cuda.cudart().cudaHostUnregister(place)
        for name in self._names:
            _BY_NAME.pop(name)[_HELD] = 0
        self._registered.clear()
        self._names.clear()

    def _register(self, place: int, size: int) -> None:
        cudart: Any = torch.cuda.cudart()
        if cudart is None:  # a build without CUDA
            return
        if int(cudart.cudaHostRegister(place, size, _FOR_ALL_DEVICES)) == 0:
            self._registered.append(place)
            return
        with suppress(RuntimeError):  # the next kernel would be blamed for it
            torch.zeros(1, device=self._device)


def name_of(joined: Tensor) -> bytes:
    """Of its buffer."""
    return bytes(torch.empty(0, dtype=torch.uint8).set_(joined.untyped_storage())[_NAME].tolist())


def is_held(joined: Tensor) -> bool:
    """Whether the training process knows its buffer by name."""
    return bool(joined.untyped_storage()[_HELD])


def joined_in(name: bytes, size: int) -> Tensor | None:
    """What stands in the buffer of that name; None once it was let go, as after the pass that the batch was for."""
    storage = _BY_NAME.get(name)
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage, ALIGNMENT, (size,))


def give_back(storage: torch.UntypedStorage) -> None:
    """To the worker that made it."""
    storage[0] = 0
