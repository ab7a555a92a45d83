"""A user's program, run as it is: as `__main__`, with its children, its lines and its steps.

What records on a real GPU and what stands in for one both begin here.
"""

from __future__ import annotations

from collections.abc import Callable

ENDED: list[Callable[[], object]] = []
"""Who wants to know that a step has ended. Empty, but while somebody looks at the run."""


def step() -> None:
    """Say that a step ends here. Does nothing but while keepbusy looks at the run."""
    for tell in ENDED:
        tell()
