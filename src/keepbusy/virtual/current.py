"""Which virtual device is current: of each thread its own, as in CUDA."""

from __future__ import annotations

import threading

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
        if device >= self.count:
            raise torch.AcceleratorError(_NO_DEVICE) if hasattr(torch, "AcceleratorError") else RuntimeError(_NO_DEVICE)
        if device >= 0:
            self._thread.device = device
        return before

    def index(self, device: torch.device | int | str | None) -> int:
        """The number that PyTorch means by `device`: none, or one without a number, is the current one."""
        if device is None:
            return self._thread.device
        if isinstance(device, int):
            return device if device >= 0 else self._thread.device
        number = torch.device(device).index
        return self._thread.device if number is None else number


_NO_DEVICE = "CUDA error: invalid device ordinal"

CURRENT = Current()
