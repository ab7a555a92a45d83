"""How often a program waits for the GPU, held against how often it may: while it runs, and in a run that is kept.

Here stand the kinds of waits, and the places that may wait, each with its reason: `train.py:42: read once an epoch`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from keepbusy.timeline.files import BadInput

SYNC, BLOCKING_COPY, RACE = "sync", "blocking copy", "data race"
PLURALS = {SYNC: "syncs", BLOCKING_COPY: "blocking copies"}


def several(count: int, kind: str) -> str:
    return f"{count} {kind if count == 1 else PLURALS[kind]}"


_ENTRY = re.compile(r"^(?:(?P<file>[^:()]+\.py)(?::(?P<line>\d+))?|(?P<function>[\w.<>]+)\(\)):\s+(?P<reason>\S.*)$")


@dataclass(frozen=True)
class AllowedPlace:
    """A file, a line of it, or a function of that name in any file."""

    file: str
    line: int
    function: str
    reason: str

    @classmethod
    def read(cls, text: str) -> AllowedPlace:
        found = _ENTRY.match(text)
        if found is None:
            raise BadInput(
                f"{text!r} allows nothing: name a place and the reason, as in 'train.py:42: read once an epoch', "
                "'metrics.py: ...' or 'log_metrics(): ...'."
            )
        return cls(found["file"] or "", int(found["line"] or 0), found["function"] or "", found["reason"])

    def holds(self, file: str, line: int, function: str) -> bool:
        if self.function:
            return function.rpartition(".")[2] == self.function.rpartition(".")[2]
        same = file == self.file or file.endswith(f"/{self.file}")
        return same and self.line in (0, line)


class AllowList:
    """All of them, and which were of use."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._places = [AllowedPlace.read(entry) for entry in entries]

    def reason(self, places: Iterable[tuple[str, int, str]]) -> str:
        """Why one of these places, a stack's, may wait; "" if none may."""
        for place in places:
            for allowed in self._places:
                if allowed.holds(*place):
                    return allowed.reason
        return ""
