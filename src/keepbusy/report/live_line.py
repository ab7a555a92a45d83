"""The line at the bottom of the terminal while a program runs, and how it stays there without touching what it prints.

The terminal is told to scroll all rows but the last one. Whatever the program prints, native code and progress bars
included, goes on as ever above; the last row is ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from rich.text import Text

from keepbusy.explain.diagnosis import COMPUTING, Diagnosis
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, laid_out, look
from keepbusy.report.words import duration, share
from keepbusy.timeline.model import NONE
from keepbusy.timeline.plain_run import Figures

LEAST_LEAD = 100_000
"""Below this the host has no lead."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


def line(figures: Figures | None, diagnosis: Diagnosis | None, now: int, width: int, colour: bool = True) -> str:
    """What there is to say: the step, the lead, and once the window has been explained, the rest.

    On a narrow terminal it is said with less: the worst line is what it is all about, and goes last.
    """
    said = _parts(figures, now) + _explained(diagnosis)
    for dropped in _DROPPED:
        text = _assembled([part for part in said if part.name not in dropped])
        if text.cell_len < width:
            break
    text.truncate(width - 1, overflow="ellipsis")
    return laid_out([text], width, colour)


class _Part(NamedTuple):
    name: str
    text: str
    style: str = ""


_ORDER = ("spread", "computes", "lead", "step")
_DROPPED = [set(_ORDER[:count]) for count in range(len(_ORDER) + 1)]
"""What is left out where there is no room: nothing, then more and more."""


def _assembled(parts: list[_Part]) -> Text:
    text = Text.assemble(("keepbusy", STRONG))
    for part in parts:
        text.append(f"{' ' if part.name == 'spread' else ' · '}{part.text}", part.style)
    return text


def _parts(figures: Figures | None, now: int) -> list[_Part]:
    if figures is None or not figures.step:
        return [_Part("none", "no steps yet")]
    steps, passed = _Part("step", f"step {figures.steps}"), now - figures.ended
    if figures.limit and passed > max(figures.limit, 10**9):
        late = f"the next one takes {duration(passed)} so far, instead of {duration(figures.step)}"
        return [steps, _Part("late", late)]
    spread = words.span_of(figures.low, figures.high, figures.step)
    return [steps, _Part("time", duration(figures.step)), _Part("spread", f"({spread})"), *_lead(figures.lead)]


def _lead(lead: int) -> list[_Part]:
    if lead == NONE:
        return []
    return [_Part("lead", f"lead {duration(lead)}" if lead >= LEAST_LEAD else "no lead")]


def _explained(diagnosis: Diagnosis | None) -> list[_Part]:
    if diagnosis is None:
        return []
    computes = share(diagnosis.ledger.get(COMPUTING, 0), diagnosis.plain_step)
    parts = [_Part("computes", f"GPU computes {computes}", FAINT)]
    for cause in diagnosis.causes[:1]:
        where = replace(cause.where, file=cause.where.file.replace("\\", "/").rpartition("/")[2])
        wait = duration(cause.wait, diagnosis.plain_step)
        parts.append(_Part("worst", f"{look(cause.cause).name} {words.spot(where, 30)}: {wait} a step", STRONG))
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
