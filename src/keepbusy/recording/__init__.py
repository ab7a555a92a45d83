"""A script on a real GPU -> `Timeline`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepbusy.recording.recorder import Session


def record(after: int | None = None, memory: bool = False) -> Session:
    """Record what runs in a `with` block on a real GPU, and explain it afterwards.

    `after`: how many steps to let pass before looking closely; without it eight, and until they are alike.
    `memory`: note what takes the device's memory, too; the page draws it.
    """
    from keepbusy.recording.recorder import Session

    return Session(after, memory)
