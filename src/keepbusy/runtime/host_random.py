"""The random numbers of the host: Python's, NumPy's where it is in use, and PyTorch's on the CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def drawn() -> tuple[Any, ...]:
    """How far they have been drawn, as a value that can be compared."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy and (of_numpy[1].tolist(), of_numpy[2:])


def kept() -> Callable[[], None]:
    """What sets them back to where they are now."""
    numpy = sys.modules.get("numpy")
    python, host = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.random.get_state() if numpy else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy:
            numpy.random.set_state(of_numpy)

    return restore
