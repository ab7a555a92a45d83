"""`torch.cuda.set_sync_debug_mode`: a warning wherever the host is about to wait for the device, or an error instead.

PyTorch sees copies that block, reads, and `Stream.synchronize`; not events, nor `torch.cuda.synchronize`, nor what the
driver makes of a copy that was asked not to block. So do we.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

DEFAULT, WARN, ERROR = range(3)
_TEXT = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
_OURS = str(Path(__file__).parent)
_mode = [DEFAULT]
_said: list[bool] = []


def set_mode(mode: int) -> None:
    if mode not in (DEFAULT, WARN, ERROR):
        raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
    if not _said:
        _said.append(True)
        _warn(_PROTOTYPE)
    _mode[0] = mode


def mode() -> int:
    return _mode[0]


def about_to_wait() -> None:
    """The host will wait for the device; nothing is copied yet."""
    if _mode[0] == ERROR:
        raise RuntimeError(_TEXT)
    if _mode[0] == WARN:
        _warn(_TEXT)


def _warn(text: str) -> None:
    """At the line that called PyTorch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)
