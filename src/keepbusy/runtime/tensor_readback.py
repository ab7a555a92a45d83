"""Values on their way home: set aside on the device, copied to pinned memory beside the compute, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from keepbusy.runtime.pinned_pages import SLOT_DOUBLES, PinnedSlot, give_back, take

_SLOT_BYTES = 8 * SLOT_DOUBLES
_PACKED_BELOW = 1 << 20
"""Bytes. Tensors below travel as one."""
_COPIED_UNASKED = 64 << 20
"""So many bytes are set aside without asking how much room there is."""
_LOCK = Lock()


class Arriving(Protocol):
    """Values that arrive on the host."""

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        ...

    def land(self) -> None:
        """Wait for them, if it must, and leave the memory that they travelled in to others."""
        ...

    def open(self, place: int) -> Tensor:
        """One of the values, on the host."""
        ...


class HostReadback:
    """Values that need no way home, as they were at the call."""

    ready = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def send(self) -> HostReadback:
        return self

    def land(self) -> None: ...

    def open(self, place: int) -> Tensor:
        return self._tensors[place]


class TensorReadback:
    """Tensors of one CUDA device as they are now, whatever the program does to them afterwards.

    They are copied on the device first, in the order of the current stream. A copy that is nobody else's can be neither
    overwritten nor freed on its way home, so nothing has to wait for it; it is kept until it is known to be there.
    Where the device has no room for copies, the current stream, and nobody else, waits until the tensors are home.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device, self._inference = tensors[0].device, torch.is_inference_mode_enabled()
        self._stream = readback_stream(self._device)
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        self._kinds = [_Kind(tensor.nbytes, tensor.dtype, tensor.shape) for tensor in plain]
        small = [tensor for tensor in plain if tensor.nbytes < _PACKED_BELOW]
        if len(small) < 2:  # a single one keeps its type
            packed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in small]
        else:  # small tensors of any types travel as one tensor of bytes, made by a single launch
            packed = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in small])]
        self._pieces = [*packed, *self._copies_of([tensor for tensor in plain if tensor.nbytes >= _PACKED_BELOW])]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._slots: list[PinnedSlot] = []
        self._tensors: list[Tensor] = []

    def _copies_of(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        room = _room(self._device, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            room -= tensor.nbytes
            copied = None
            if room >= 0:
                with suppress(torch.cuda.OutOfMemoryError):
                    copied = tensor.clone()
            yield self._straight_home(tensor) if copied is None else copied

    def _straight_home(self, tensor: Tensor) -> Tensor:
        """Straight home. The current stream waits: whatever it does next finds the tensor read."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host = tensor.to("cpu", non_blocking=True)
        current.wait_stream(self._stream)
        return host

    def send(self) -> TensorReadback:
        """Bring them home, on a stream of their own."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event)
            self._on_host = [self._send_piece(piece) for piece in self._pieces]
            self._event = self._stream.record_event()
        return self

    def _send_piece(self, piece: Tensor) -> Tensor:
        if piece.nbytes > _SLOT_BYTES:
            # asked not to wait, PyTorch takes pinned memory, which its caching allocator keeps for the next time
            return piece.to("cpu", non_blocking=True)
        self._slots.append(take(self._device))
        host = self._slots[-1].bytes[: piece.nbytes].view(piece.dtype).view(piece.shape)
        return host.copy_(piece, non_blocking=True)

    @property
    def ready(self) -> bool:
        """Whether they are all there."""
        return bool(self._tensors) or bool(self._event.query())

    def land(self) -> None:
        """Wait if it must: for them, and for nothing that was launched after them."""
        if not self._tensors and not self._event.query():
            self._event.synchronize()
        with _LOCK:
            if not self._tensors:
                with torch.inference_mode(self._inference):  # of when they were sent
                    self._tensors = list(_unpacked(self._on_host, self._kinds))
                for slot in self._slots:
                    give_back(self._device, slot)
                self._pieces, self._on_host, self._slots = [], [], []

    def open(self, place: int) -> Tensor:
        """One of the tensors, on the host."""
        self.land()
        return self._tensors[place]


class _Kind(NamedTuple):
    size: int
    dtype: torch.dtype
    shape: torch.Size


def _unpacked(on_host: Sequence[Tensor], kinds: Sequence[_Kind]) -> Iterator[Tensor]:
    """Small ones go into memory of their own: the pinned memory is for what is still on its way."""
    remaining, start = iter(on_host), 0
    small = [kind for kind in kinds if kind.size < _PACKED_BELOW]
    pack = next(remaining) if small else None
    for kind in kinds:
        if pack is None or kind.size >= _PACKED_BELOW:
            yield next(remaining)
        elif len(small) == 1:
            yield pack.clone()
        else:
            yield pack[start : start + kind.size].clone().view(kind.dtype).view(kind.shape)
            start += kind.size


def _room(device: torch.device, wanted: int) -> int:
    """Bytes to set aside: half of what this process at its peak and all others have left of the device."""
    if wanted <= _COPIED_UNASKED:
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)) // 2


@cache
def readback_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
