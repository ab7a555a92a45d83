"""Values on their way home: set aside on the device, copied to pinned memory beside the compute, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_SMALL = 1 << 20
"""Bytes. Tensors below travel as one."""
_UNASKED = 64 << 20
"""So many bytes are set aside without asking how much room there is."""


class Sent(Protocol):
    """Values that arrive on the host."""

    @property
    def ready(self) -> bool: ...

    def open(self) -> list[Tensor]: ...


class Arrived:
    """Values that need no way home, as they were at the call."""

    ready = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def send(self) -> Arrived:
        return self

    def open(self) -> list[Tensor]:
        return self._tensors


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
        self._tensors: list[Tensor] | None = None

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
            # asked not to wait, PyTorch takes pinned memory, which its caching allocator keeps for the next time
            self._homes = [piece.to("cpu", non_blocking=True) for piece in self._pieces]
            self._event = self._side.record_event()
        return self

    @property
    def ready(self) -> bool:
        """Whether they are all there."""
        return self._tensors is not None or bool(self._event.query())

    def open(self) -> list[Tensor]:
        """The tensors on the host. Waits if it must: for them, and for nothing that was launched after them."""
        homes = self._homes  # first: another thread may open it too
        if self._tensors is None:
            if not self._event.query():
                self._event.synchronize()
            self._tensors = list(_unpacked(homes, self._looks))
            self._pieces, self._homes = [], []
        return self._tensors


class _Look(NamedTuple):
    size: int
    dtype: torch.dtype
    shape: torch.Size


def _packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Small tensors of any types as one tensor of bytes, in a single launch; a single one keeps its type."""
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
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
