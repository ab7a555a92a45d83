"""The line at the bottom of the terminal while a program runs, and how it stays there without touching what it prints.

The terminal is told to scroll all rows but the last one. Whatever the program prints, native code and progress bars
included, goes on as ever above; the last row is ours.
"""

from __future__ import annotations

from typing import Protocol

from rich.text import Text

from keepbusy.explain.diagnosis import COMPUTING, Diagnosis
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, laid_out
from keepbusy.report.places import look
from keepbusy.report.words import duration, share
from keepbusy.timeline.figures import Figures
from keepbusy.timeline.model import NONE

LEAST_LEAD = 100_000
"""Below this the host has no lead."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


def line(figures: Figures | None, diagnosis: Diagnosis | None, now: int, width: int, colour: bool = True) -> str:
    """What there is to say: the step, the lead, and once the window has been explained, the rest."""
    text = Text.assemble(("keepbusy", STRONG), *((f" · {part}", "") for part in _parts(figures, now)))
    for part in _explained(diagnosis):
        text.append(f" · {part}", FAINT if part.startswith("GPU") else "bold")
    text.truncate(width - 1, overflow="ellipsis")
    return laid_out([text], width, colour)


def _parts(figures: Figures | None, now: int) -> list[str]:
    if figures is None or not figures.step:
        return ["no steps yet"]
    steps, passed = f"step {figures.steps}", now - figures.ended
    if figures.limit and passed > max(figures.limit, 10**9):
        return [steps, f"the next one takes {duration(passed)} so far, instead of {duration(figures.step)}"]
    spread = words.span_of(figures.low, figures.high, figures.step)
    return [steps, f"{duration(figures.step)} ({spread})", *_lead(figures.lead)]


def _lead(lead: int) -> list[str]:
    if lead == NONE:
        return []
    return [f"lead {duration(lead)}" if lead >= LEAST_LEAD else "no lead"]


def _explained(diagnosis: Diagnosis | None) -> list[str]:
    if diagnosis is None:
        return []
    parts = [f"GPU computes {share(diagnosis.ledger.get(COMPUTING, 0), diagnosis.plain_step)}"]
    for cause in diagnosis.causes[:1]:
        place = words.spot(cause.where, 30)
        parts.append(f"{look(cause.cause).name} {place}: {duration(cause.wait, diagnosis.plain_step)} a step")
    return parts


class Screen(Protocol):
    """A terminal: it shows what is written, and knows how large it is."""

    def write(self, text: str) -> object: ...

    def size(self) -> tuple[int, int]:
        """Columns and rows."""


class BottomLine:
    """The last row of a terminal. Each change is one write, so that nothing of the program's gets between."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._rows = 0

    def show(self, text: str) -> None:
        """Put this line there; also after the terminal has changed its size."""
        _, rows = self._screen.size()
        room = "" if rows == self._rows else self._room(rows)
        self._rows = rows
        self._screen.write(f"{room}{_SAVE}\x1b[{rows};1H{_CLEAR}{text}{_RESTORE}")

    def end(self) -> None:
        """Give the row back."""
        if self._rows:
            self._screen.write(f"{_SAVE}\x1b[r\x1b[{self._rows};1H{_CLEAR}{_RESTORE}")
            self._rows = 0

    def _room(self, rows: int) -> str:
        """Should the program stand in the last row, all goes up by one; then all rows but that one scroll."""
        up = "" if self._rows else "\x1bD\x1b[1A"
        return f"{up}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}"
