"""Pinned memory for small values, a page at a time: pinning more of it makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor

WORDS = 32
"""Doubles in a slot."""
_PAGE = 1024
"""Slots that are pinned at once: about as many values as can be under way before a launch has to wait anyway."""
_LOCK = Lock()


class Slot:
    """A piece of pinned memory as the host sees it, and as the device does where it can write there itself."""

    __slots__ = ("_words", "bytes", "event", "home", "there")

    def __init__(self, home: Tensor, there: Tensor | None) -> None:
        self.home, self.bytes = home, home.view(torch.uint8)
        self.there = there
        self.event = torch.cuda.Event()
        self._words: dict[int, Tensor] = {}

    def word(self, place: int) -> Tensor:
        """One double, as the device sees it."""
        if place not in self._words:
            assert self.there is not None
            self._words[place] = self.there[place]
        return self._words[place]


class _Mapped:
    """Pinned memory, said to be an array of the device: CUDA lets kernels write there."""

    def __init__(self, page: Tensor) -> None:
        self.page = page  # kept for as long as tensors lie in it
        place, shape = (page.data_ptr(), False), tuple(page.shape)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": "<f8", "version": 2}


_FREE: dict[torch.device, list[Slot]] = {}
_NEW: dict[torch.device, Iterator[Slot]] = {}


def take(device: torch.device) -> Slot:
    """A slot that nothing travels to."""
    try:
        return _FREE[device].pop()
    except (KeyError, IndexError):
        with _LOCK:
            _FREE.setdefault(device, [])
            return next(_NEW.setdefault(device, _new(device)))


def give_back(device: torch.device, slot: Slot) -> None:
    _FREE[device].append(slot)


def _new(device: torch.device) -> Iterator[Slot]:
    while True:
        page, there = _page(device)
        for start in range(0, len(page), WORDS):
            yield Slot(page[start : start + WORDS], None if there is None else there[start : start + WORDS])


def _page(device: torch.device) -> tuple[Tensor, Tensor | None]:
    # whoever reads first during an evaluation will read during the next training
    with torch.inference_mode(False), torch.cuda.device(device):
        page = torch.zeros(_PAGE * WORDS, dtype=torch.float64, device="cpu", pin_memory=True)
        return page, _as_the_device_sees_it(page, device)


def _as_the_device_sees_it(page: Tensor, device: torch.device) -> Tensor | None:
    """None where this build of PyTorch or the driver does not offer it."""
    try:
        there = torch.as_tensor(_Mapped(page), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return there if there.data_ptr() == page.data_ptr() else None
