"""Values on their way home: set aside on the device, copied to pinned memory beside the compute, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from keepbusy.runtime.pinned_pages import WORDS, Slot, give_back, take

_TINY = 8 * WORDS
"""Bytes. A slot holds so much."""
_SMALL = 1 << 20
"""Bytes. Tensors below travel as one."""
_UNASKED = 64 << 20
"""So many bytes are set aside without asking how much room there is."""
_LANDING = Lock()


class Sent(Protocol):
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


class Arrived:
    """Values that need no way home, as they were at the call."""

    ready = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def send(self) -> Arrived:
        return self

    def land(self) -> None: ...

    def open(self, place: int) -> Tensor:
        return self._tensors[place]


class Parcel:
    """Tensors of one CUDA device as they are now, whatever the program does to them afterwards.

    They are copied on the device first, in the order of the current stream. A copy that is nobody else's can be neither
    overwritten nor freed on its way home, so nothing has to wait for it; it is kept until it is known to be there.
    Where the device has no room for copies, the current stream, and nobody else, waits until the tensors are home.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        self._side = side_stream(self._device)
        plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        self._looks = [_Look(tensor.nbytes, tensor.dtype, tensor.shape) for tensor in plain]
        small = _packed([tensor for tensor in plain if tensor.nbytes < _SMALL])
        self._pieces = [*small, *self._set_aside([tensor for tensor in plain if tensor.nbytes >= _SMALL])]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device))
        self._slots: list[Slot] = []
        self._tensors: list[Tensor] = []

    def _set_aside(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        room = _room(self._device, sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            room -= tensor.nbytes
            copied = _copied(tensor) if room >= 0 else None
            yield self._waited_for(tensor) if copied is None else copied

    def _waited_for(self, tensor: Tensor) -> Tensor:
        """Straight home. The current stream waits: whatever it does next finds the tensor read."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            home = tensor.to("cpu", non_blocking=True)
        current.wait_stream(self._side)
        return home

    def send(self) -> Parcel:
        """Bring them home, on a stream of their own."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._event)
            self._homes = [self._sent(piece) for piece in self._pieces]
            self._event = self._side.record_event()
        return self

    def _sent(self, piece: Tensor) -> Tensor:
        if piece.nbytes > _TINY:
            # asked not to wait, PyTorch takes pinned memory, which its caching allocator keeps for the next time
            return piece.to("cpu", non_blocking=True)
        self._slots.append(take(self._device))
        home = self._slots[-1].bytes[: piece.nbytes].view(piece.dtype).view(piece.shape)
        return home.copy_(piece, non_blocking=True)

    @property
    def ready(self) -> bool:
        """Whether they are all there."""
        return bool(self._tensors) or bool(self._event.query())

    def land(self) -> None:
        """Wait if it must: for them, and for nothing that was launched after them."""
        if not self._tensors and not self._event.query():
            self._event.synchronize()
        with _LANDING:
            if not self._tensors:
                self._tensors = list(_unpacked(self._homes, self._looks))
                for slot in self._slots:
                    give_back(self._device, slot)
                self._pieces, self._homes, self._slots = [], [], []

    def open(self, place: int) -> Tensor:
        """One of the tensors, on the host."""
        self.land()
        return self._tensors[place]


class _Look(NamedTuple):
    size: int
    dtype: torch.dtype
    shape: torch.Size


def _packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Small tensors of any types as one tensor of bytes, in a single launch; a single one keeps its type."""
    if len(tensors) < 2:
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])]


def _unpacked(homes: Sequence[Tensor], looks: Sequence[_Look]) -> Iterator[Tensor]:
    """Small ones go into memory of their own: the pinned memory is for what is still on its way."""
    remaining, start = iter(homes), 0
    small = [look for look in looks if look.size < _SMALL]
    pack = next(remaining) if small else None
    for look in looks:
        if pack is None or look.size >= _SMALL:
            yield next(remaining)
        elif len(small) == 1:
            yield pack.clone()
        else:
            yield pack[start : start + look.size].clone().view(look.dtype).view(look.shape)
            start += look.size


def _copied(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.clone()
    except torch.cuda.OutOfMemoryError:
        return None


def _room(device: torch.device, wanted: int) -> int:
    """Bytes to set aside: half of what this process at its peak and all others have left of the device."""
    if wanted <= _UNASKED:
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)) // 2


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
