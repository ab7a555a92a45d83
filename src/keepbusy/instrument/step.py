"""`keepbusy.step()`: the program's own word that a step has ended."""

from __future__ import annotations

from collections.abc import Callable

ENDED: list[Callable[[], object]] = []
"""Who wants to know. Empty, but while somebody looks at the run."""


def step() -> None:
    """Say that a step ends here. Does nothing but while keepbusy looks at the run."""
    for tell in ENDED:
        tell()
