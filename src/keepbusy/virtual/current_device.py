"""Which virtual device is current: of each thread its own, as in CUDA."""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Thread(threading.local):
    device: int = 0


class Current:
    """The current device of the calling thread, and how many there are."""

    def __init__(self) -> None:
        self.count = 1
        self._thread = _Thread()

    @property
    def device(self) -> int:
        return self._thread.device

    def change(self, device: int) -> int:
        """Make `device` current and return the one before; a negative one changes nothing."""
        before = self._thread.device
        if device >= 0:
            self._thread.device = self._known(device)
        return before

    def index(self, device: torch.device | int | str | None) -> int:
        """The number that PyTorch means by `device`: none, or one without a number, is the current one."""
        if device is None:
            return self._thread.device
        number = device if isinstance(device, int) else torch.device(device).index
        return self._thread.device if number is None or number < 0 else self._known(number)

    def _known(self, device: int) -> int:
        if device >= self.count:
            raise ACCELERATOR_ERROR("CUDA error: invalid device ordinal")
        return device


ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", RuntimeError)
CURRENT = Current()
