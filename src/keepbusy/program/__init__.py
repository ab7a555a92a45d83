"""A user's program, run as it is: as `__main__`, with its children, its lines and its steps.

The log of a real GPU and the virtual GPU are both built on this room.
"""

from __future__ import annotations

from collections.abc import Callable

ENDED: list[Callable[[], object]] = []
"""Functions to call when a step has ended. Empty unless keepbusy records the run."""


def step() -> None:
    """Announce the end of a step. Does nothing unless keepbusy records the run."""
    for end_of_step in ENDED:
        end_of_step()
