"""Single numbers on their way home: the device writes them straight into pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from keepbusy.runtime.pinned_pages import SLOT_DOUBLES, PinnedSlot, give_back, take

_ONE_DOUBLE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8)
)
"""A double holds each of their values."""
_TWO_DOUBLES = frozenset((torch.int64, torch.float64))
"""Two doubles hold their halves."""
_LOCK = Lock()


class ScalarReadback:
    """Numbers as they are now, brought home by no copy: a kernel writes them into the host's memory.

    It runs in the order of the current stream, so it reads what the program meant, whatever happens to the tensors
    afterwards. Converting to double is what makes it a kernel: a plain copy, and the stream with it, would wait for
    the copy engine whenever something large is on its way home.
    """

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int], slot: PinnedSlot, on_device: Tensor) -> None:
        self._device, self._slot, self._starts = tensors[0].device, slot, starts
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._doubles: list[float] = []
        for start, tensor in zip(starts, tensors, strict=False):
            bare = tensor.detach()
            if tensor.dtype in _ONE_DOUBLE:
                slot.double(start).copy_(bare.view(()) if bare.ndim else bare)
            else:
                on_device[start : start + 2].copy_(bare.view(1).view(torch.int32))
        slot.event.record(torch.cuda.current_stream(self._device))

    @classmethod
    def send(cls, tensors: Sequence[Tensor]) -> ScalarReadback | None:
        """None where they are no numbers, or the device cannot write home."""
        sizes = [_doubles_for(tensor) for tensor in tensors]
        if sum(sizes) > SLOT_DOUBLES:
            return None
        slot = take(tensors[0].device)
        if slot.on_device is None:
            give_back(tensors[0].device, slot)
            return None
        return cls(tensors, list(accumulate(sizes, initial=0)), slot, slot.on_device)

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        return bool(self._doubles) or bool(self._slot.event.query())

    def land(self) -> None:
        """Wait for them, if it must, and leave the pinned memory to others."""
        if not self._doubles and not self._slot.event.query():
            self._slot.event.synchronize()
        with _LOCK:
            if not self._doubles:
                self._doubles = self._slot.on_host.tolist()
                give_back(self._device, self._slot)

    def open(self, place: int) -> Tensor:
        """One of the numbers, as a tensor of the host."""
        self.land()
        start, (dtype, shape) = self._starts[place], self._kinds[place]
        if dtype in _ONE_DOUBLE:
            return torch.tensor(self._doubles[start], dtype=dtype, device="cpu").view(shape)
        halves = [int(half) for half in self._doubles[start : start + 2]]
        return torch.tensor(halves, dtype=torch.int32, device="cpu").view(dtype).view(shape)


def _doubles_for(tensor: Tensor) -> int:
    if tensor.numel() == 1 and tensor.dtype in _ONE_DOUBLE:
        return 1
    return 2 if tensor.numel() == 1 and tensor.dtype in _TWO_DOUBLES and not tensor.is_neg() else SLOT_DOUBLES + 1
