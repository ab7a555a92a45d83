"""The lines at the bottom of the terminal while a program runs, and how they leave alone what it prints.

The terminal is told to scroll all rows but the last ones. Whatever the program prints, native code and progress bars
included, goes on as ever above. Ours are the run's tree as far as it has grown, the first row of the plan, and a line
on its steps, which is all there is in a small terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from rich.text import Text

from keepbusy.explain.diagnosis import COMPUTING, Diagnosis
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, laid_out
from keepbusy.report.words import duration, look, share
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import LOOP, Figures, Part

MOST_LINES, ROWS_A_LINE, ROOM_FOR_A_TREE = 8, 4, (60, 16)
"""Lines that are ours, and rows of the terminal for each; a smaller terminal than this has one."""
WORTH_A_LINE = 0.02
"""Of the run so far: loops that take less are left out."""
LEAST_LEAD = 100_000
"""Below this the host has no lead."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


def lines(
    figures: Figures | None,
    run: Part | None,
    diagnosis: Diagnosis | None,
    now: int,
    size: tuple[int, int],
    colour: bool = True,
) -> list[str]:
    """The same as the report while it grows: the tree, the first row of the plan, and last how the steps go."""
    width, rows = size
    last = line(figures, diagnosis, now, width, colour)
    if run is None or width < ROOM_FOR_A_TREE[0] or rows < ROOM_FOR_A_TREE[1]:
        return [last]
    plan = [_first_fix(diagnosis)] if diagnosis is not None and diagnosis.plan else []
    said = [*_tree(run, min(MOST_LINES, rows // ROWS_A_LINE) - 1 - len(plan)), *plan]
    for text in said:
        text.truncate(width - 1, overflow="ellipsis")
    return [*(laid_out([text], width, colour) for text in said), last]


def _tree(run: Part, room: int) -> Iterator[Text]:
    """The run and its longest loops, in its order."""
    loops = [(depth, part) for depth, part in _with_depth(run, 0) if part.time >= WORTH_A_LINE * run.time]
    shortest = sorted((part.time for _, part in loops), reverse=True)[: max(0, room - 1)]
    at_work = f", GPU at work {share(run.busy, run.time)}" if run.busy != NONE else ""
    yield Text.assemble((f"{duration(run.time)} so far{at_work}", FAINT))
    for depth, part in loops:
        if shortest and part.time >= shortest[-1]:
            turns = f"  ×{part.turns:,}" if part.turns else ""
            turn = f"  {duration(part.turn)} a turn" if part.turn != NONE else ""
            busy = f"  GPU at work {share(part.busy, part.time)}" if part.busy != NONE else ""
            place = words.tame(part.place.rpartition("/")[2], 30)
            yield Text.assemble(f"{'  ' * depth}{place}{turns}  ", (duration(part.time, run.time), STRONG), turn, busy)


def _with_depth(part: Part, depth: int) -> Iterator[tuple[int, Part]]:
    for inner in part.parts:
        if inner.kind == LOOP:
            yield depth, inner
            yield from _with_depth(inner, depth + 1)


def _first_fix(diagnosis: Diagnosis) -> Text:
    first = diagnosis.plan[0]
    where = f" at {words.spot(first.where[0], 30)}" if first.where else ""
    gain = words.transition(first.predicted.step + first.gain, first.predicted.step)
    return Text.assemble((f"1  {words.fix(first.fix)}{where}", STRONG), f"  {gain} a turn")


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


class Surface(Protocol):
    """A terminal: it shows what is written, and knows how large it is."""

    def write(self, text: str) -> object: ...

    def size(self) -> tuple[int, int]:
        """Columns and rows."""


class BottomLines:
    """The last rows of a terminal. Each change is one write, so that nothing of the program's gets between."""

    def __init__(self, screen: Surface) -> None:
        self._screen = screen
        self._rows = self._count = 0

    def show(self, texts: Sequence[str]) -> None:
        """Put these lines there; also after the terminal has changed its size."""
        _, rows = self._screen.size()
        room = "" if (rows, len(texts)) == (self._rows, self._count) else self._room(rows, len(texts))
        self._rows, self._count = rows, len(texts)
        self._screen.write(f"{room}{_SAVE}{self._written(texts)}{_RESTORE}")

    def end(self) -> None:
        """Give the rows back."""
        if self._rows:
            self._screen.write(f"{_SAVE}\x1b[r{self._written([''] * self._count)}{_RESTORE}")
            self._rows = self._count = 0

    def _written(self, texts: Sequence[str]) -> str:
        first = self._rows - len(texts) + 1
        return "".join(f"\x1b[{first + number};1H{_CLEAR}{text}" for number, text in enumerate(texts))

    def _room(self, rows: int, count: int) -> str:
        """Should the program stand where our lines are to be, all goes up; then all rows but those scroll. What is no
        longer ours is empty."""
        more = count - self._count if rows == self._rows or not self._rows else 0
        up = "\x1bD" * more + f"\x1b[{more}A" if more > 0 else ""
        freed = self._written([""] * self._count) if more < 0 else ""
        return f"{up}{_SAVE}{freed}\x1b[1;{rows - count}r{_RESTORE}"
