"""Single numbers on their way home: the device writes them straight into pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from keepbusy.runtime.pinned_pages import WORDS, Slot, give_back, take

_NARROW = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8)
)
"""A double holds each of their values."""
_WIDE = frozenset((torch.int64, torch.float64))
"""Two doubles hold their halves."""
_LANDING = Lock()


def note(tensors: Sequence[Tensor]) -> Note | None:
    """The numbers of one CUDA device, on their way; None where they are no numbers, or the device cannot write home."""
    sizes = [_words(tensor) for tensor in tensors]
    if sum(sizes) > WORDS:
        return None
    slot = take(tensors[0].device)
    if slot.there is None:
        give_back(tensors[0].device, slot)
        return None
    return Note(tensors, list(accumulate(sizes, initial=0)), slot, slot.there)


class Note:
    """Numbers as they are now, brought home by no copy: a kernel writes them into the host's memory.

    It runs in the order of the current stream, so it reads what the program meant, whatever happens to the tensors
    afterwards. Converting to double is what makes it a kernel: a plain copy, and the stream with it, would wait for
    the copy engine whenever something large is on its way home.
    """

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int], slot: Slot, there: Tensor) -> None:
        self._device, self._slot, self._starts = tensors[0].device, slot, starts
        self._looks = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._words: list[float] = []
        for start, tensor in zip(starts, tensors, strict=False):
            bare = tensor.detach()
            if tensor.dtype in _NARROW:
                slot.word(start).copy_(bare.view(()) if bare.ndim else bare)
            else:
                there[start : start + 2].copy_(bare.view(1).view(torch.int32))
        slot.event.record(torch.cuda.current_stream(self._device))

    @property
    def ready(self) -> bool:
        """Whether they are there."""
        return bool(self._words) or bool(self._slot.event.query())

    def land(self) -> None:
        """Wait for them, if it must, and leave the pinned memory to others."""
        if not self._words and not self._slot.event.query():
            self._slot.event.synchronize()
        with _LANDING:
            if not self._words:
                self._words = self._slot.home.tolist()
                give_back(self._device, self._slot)

    def open(self, place: int) -> Tensor:
        """One of the numbers, as a tensor of the host."""
        self.land()
        start, (dtype, shape) = self._starts[place], self._looks[place]
        if dtype in _NARROW:
            return torch.tensor(self._words[start], dtype=dtype, device="cpu").view(shape)
        halves = [int(word) for word in self._words[start : start + 2]]
        return torch.tensor(halves, dtype=torch.int32, device="cpu").view(dtype).view(shape)


def _words(tensor: Tensor) -> int:
    if tensor.numel() == 1 and tensor.dtype in _NARROW:
        return 1
    return 2 if tensor.numel() == 1 and tensor.dtype in _WIDE and not tensor.is_neg() else WORDS + 1
