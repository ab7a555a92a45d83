"""Which virtual device is current: of each thread its own, as in CUDA."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Current(threading.local):
    """The current device of the calling thread."""

    count = 1  # of all devices; the same in every thread
    device = 0

    def change(self, device: int) -> int:
        """Make `device` current and return the one before; a negative one changes nothing."""
        before = self.device
        if device >= 0:
            self.device = self._known(device)
        return before

    def index(self, device: torch.device | int | str | None) -> int:
        """The number that PyTorch means by `device`: none, or one without a number, is the current one."""
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.device if number is None or number < 0 else self._known(number)

    def _known(self, device: int) -> int:
        if device >= self.count:
            raise ACCELERATOR_ERROR("CUDA error: invalid device ordinal")
        return device


ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", RuntimeError)
CURRENT = Current()
