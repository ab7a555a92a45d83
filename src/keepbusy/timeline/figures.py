"""How a running program is doing: a few numbers that it leaves in a file for whoever looks on."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from keepbusy.timeline.model import NONE

_FORM = struct.Struct("<8s7q")
_MAGIC = b"busylive"


class Figures(NamedTuple):
    """Of the last steps. Times are nanoseconds; the last two are on the machine's steady clock."""

    steps: int  # so far
    step: int  # the median
    low: int
    high: int
    lead: int = NONE  # of the host, where the device is known
    ended: int = 0  # when the last step did
    limit: int = 0  # a step is overdue when it takes longer; 0 where nobody knows


class FiguresFile:
    """One small file that always holds the latest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, figures: Figures) -> None:
        """A single write of a few bytes, so that no reader finds half of them."""
        with self._path.open("r+b" if self._path.exists() else "wb", buffering=0) as file:
            file.write(_FORM.pack(_MAGIC, *figures))

    def read(self) -> Figures | None:
        """None before there are any."""
        try:
            magic, *figures = _FORM.unpack(self._path.read_bytes())
        except (OSError, struct.error):
            return None
        return Figures(*figures) if magic == _MAGIC else None
