"""Pinned memory for small values, a page at a time: pinning more of it makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import torch
from torch import Tensor

SLOT_DOUBLES = 32
_SLOTS_PER_PAGE = 1024
"""They are pinned at once: about as many values as can be under way before a launch has to wait anyway."""
_LOCK = Lock()


class PinnedSlot:
    """A piece of pinned memory as the host sees it, and as the device does where it can write there itself."""

    __slots__ = ("_doubles", "bytes", "event", "on_device", "on_host")

    def __init__(self, on_host: Tensor, on_device: Tensor | None) -> None:
        self.on_host, self.bytes, self.on_device = on_host, on_host.view(torch.uint8), on_device
        self.event = torch.cuda.Event()
        self._doubles: dict[int, Tensor] = {}

    def double(self, place: int) -> Tensor:
        """One double, as the device sees it."""
        double = self._doubles.get(place)
        if double is None:
            assert self.on_device is not None
            double = self._doubles[place] = self.on_device[place]
        return double


class _DeviceArray:
    """Pinned memory, said to be an array of the device: CUDA lets kernels write there."""

    def __init__(self, page: Tensor) -> None:
        self.page = page  # kept for as long as tensors lie in it
        place, shape = (page.data_ptr(), False), tuple(page.shape)
        self.__cuda_array_interface__ = {"data": place, "shape": shape, "typestr": "<f8", "version": 2}


_UNUSED: dict[torch.device, list[PinnedSlot]] = {}
_FRESH: dict[torch.device, Iterator[PinnedSlot]] = {}


def take(device: torch.device) -> PinnedSlot:
    """A slot that nothing travels to."""
    try:
        return _UNUSED[device].pop()
    except (KeyError, IndexError):
        with _LOCK:
            _UNUSED.setdefault(device, [])
            return next(_FRESH.setdefault(device, _fresh(device)))


def give_back(device: torch.device, slot: PinnedSlot) -> None:
    _UNUSED[device].append(slot)


def _fresh(device: torch.device) -> Iterator[PinnedSlot]:
    while True:
        # whoever reads first during an evaluation will read during the next training
        with torch.inference_mode(False), torch.cuda.device(device):
            page = torch.zeros(_SLOTS_PER_PAGE * SLOT_DOUBLES, dtype=torch.float64, device="cpu", pin_memory=True)
            on_device = _as_the_device_sees_it(page, device)
        for start in range(0, len(page), SLOT_DOUBLES):
            piece = slice(start, start + SLOT_DOUBLES)
            yield PinnedSlot(page[piece], None if on_device is None else on_device[piece])


def _as_the_device_sees_it(page: Tensor, device: torch.device) -> Tensor | None:
    """None where this build of PyTorch or the driver does not offer it."""
    try:
        on_device = torch.as_tensor(_DeviceArray(page), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return on_device if on_device.data_ptr() == page.data_ptr() else None
