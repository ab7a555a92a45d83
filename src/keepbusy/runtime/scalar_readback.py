"""Single numbers on their way home: the device writes them straight into pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.pinned_pages import SLOT_DOUBLES, PinnedSlot, give_back, take

_ONE_DOUBLE = (
    torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
_DOUBLES = {**dict.fromkeys(_ONE_DOUBLE, 1), torch.int64: 2, torch.float64: 2}
"""A double holds each value of most types; two hold the halves of the others."""
_STREAMS: dict[tuple[int, int, int], Any] = {}
_LOCK = Lock()


class ScalarReadback:
    """Numbers as they are now, brought home by no copy: a kernel writes them into the host's memory.

    It runs in the order of the current stream, so it reads what the program meant, whatever happens to the tensors
    afterwards. Converting to double is what makes it a kernel: a plain copy, and the stream with it, would wait for
    the copy engine whenever something large is on its way home.
    """

    __slots__ = ("_arrived", "_device", "_doubles", "_places", "_slot")

    def __init__(self, device: torch.device, slot: PinnedSlot) -> None:
        self._device, self._slot, self._arrived = device, slot, False
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        self._doubles: list[float] = []

    @classmethod
    def send(cls, tensors: Sequence[Tensor], device: torch.device) -> ScalarReadback | None:
        """None where they are no numbers, or the device cannot write home. Called every step: each operation counts."""
        count = 0
        for tensor in tensors:
            size = _DOUBLES.get(tensor.dtype, SLOT_DOUBLES + 1)
            if tensor.numel() != 1 or (size == 2 and tensor.is_neg()):
                return None
            count += size
        if count > SLOT_DOUBLES:
            return None
        slot = take(device)
        if slot.on_device is None:
            give_back(device, slot)
            return None
        sent = cls(device, slot)
        start = 0
        for tensor in tensors:
            dtype, bare = tensor.dtype, tensor.detach() if tensor.requires_grad else tensor
            sent._places.append((start, dtype, tensor.shape))
            if _DOUBLES[dtype] == 1:
                slot.double(start).copy_(bare.view(()) if bare.ndim else bare)
                start += 1
            else:
                slot.on_device[start : start + 2].copy_(bare.view(1).view(torch.int32))
                start += 2
        slot.event.record(_current_stream(device))
        return sent

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        if not self._arrived:
            self._arrived = bool(self._slot.event.query())
        return self._arrived

    def land(self) -> None:
        """Wait for them, if it must, and leave the pinned memory to others."""
        if not self.ready:
            self._slot.event.synchronize()
            self._arrived = True
        if not self._doubles:
            with _LOCK:
                if not self._doubles:
                    self._doubles = self._slot.on_host.tolist()
                    give_back(self._device, self._slot)

    def open(self, place: int) -> Tensor:
        """One of the numbers, as a tensor of the host."""
        self.land()
        start, dtype, shape = self._places[place]
        if _DOUBLES[dtype] == 1:
            return torch.tensor(self._doubles[start], dtype=dtype, device="cpu").view(shape)
        halves = [int(half) for half in self._doubles[start : start + 2]]
        return torch.tensor(halves, dtype=torch.int32, device="cpu").view(dtype).view(shape)


def _current_stream(device: torch.device) -> Any:
    """The same object for the same stream: PyTorch makes a new one at each call, which takes as long as a launch."""
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(device)
    return stream
