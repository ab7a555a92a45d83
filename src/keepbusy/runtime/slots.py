"""Pinned memory for small values, a page at a time: pinning more of it can make the host wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 32
"""Doubles in a slot."""
_PAGE = 64
"""Slots that are pinned at once."""


class Slot:
    """A piece of pinned memory as the host sees it, and as the device does where it can write there itself."""

    __slots__ = ("bytes", "event", "home", "there", "words")

    def __init__(self, home: Tensor, there: Tensor | None) -> None:
        self.home, self.bytes = home, home.view(torch.uint8)
        self.there = there
        self.words = () if there is None else there.unbind()
        self.event = torch.cuda.Event()


_FREE: dict[torch.device, list[Slot]] = {}


def take(device: torch.device) -> Slot:
    """A slot that nothing travels to."""
    free = _FREE.setdefault(device, [])
    try:
        return free.pop()
    except IndexError:
        first, *others = _new_page(device)
        free += others
        return first


def give_back(device: torch.device, slot: Slot) -> None:
    _FREE[device].append(slot)


class _Mapped:
    """Pinned memory, said to be an array of the device: CUDA lets kernels write there."""

    def __init__(self, page: Tensor) -> None:
        self.page = page  # kept for as long as tensors lie in it
        place, shape = (page.data_ptr(), False), tuple(page.shape)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": "<f8", "version": 2}


def _new_page(device: torch.device) -> list[Slot]:
    # whoever reads first during an evaluation will read during the next training
    with torch.inference_mode(False), torch.cuda.device(device):
        page = torch.zeros(_PAGE * WORDS, dtype=torch.float64, device="cpu", pin_memory=True)
        there = _as_the_device_sees_it(page, device)
        theirs = [None] * _PAGE if there is None else there.split(WORDS)
        return [Slot(home, its) for home, its in zip(page.split(WORDS), theirs, strict=True)]


def _as_the_device_sees_it(page: Tensor, device: torch.device) -> Tensor | None:
    """None where this build of PyTorch or the driver does not offer it."""
    try:
        there = torch.as_tensor(_Mapped(page), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return there if there.data_ptr() == page.data_ptr() else None
