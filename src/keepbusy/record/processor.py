"""How long a thread was ready to go on and had no processor. Linux counts it; elsewhere nobody knows."""

from __future__ import annotations

from pathlib import Path

from keepbusy.timeline.model import NONE


def without_processor(thread: int) -> int:
    """Nanoseconds so far of the thread of this process with that native number; NONE where nobody knows."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return NONE
