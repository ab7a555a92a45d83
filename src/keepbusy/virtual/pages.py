"""What comes home lands in memory of the host: touched before, or never.

The C library hands out again what was freed, which is fast. What was never touched the kernel maps first,
page by page, and that takes several times as long as the copy itself. Large blocks it maps anew each time.
"""

from __future__ import annotations

import weakref
from typing import Any


class Pages:
    """Bytes that results hold, and how many of them were touched at once so far."""

    def __init__(self, mapped: int) -> None:
        """`mapped`: so large blocks are never handed out again."""
        self.mapped = mapped
        self._held = self._touched = 0

    def take(self, size: int, holder: Any) -> int:
        """Memory that lasts as long as `holder`; returns how much of it is touched for the first time."""
        if size >= self.mapped:
            return size
        self._held += size
        weakref.finalize(holder, self._free, size)
        new = max(0, self._held - self._touched)
        self._touched += new
        return min(size, new)

    def _free(self, size: int) -> None:
        self._held -= size
