"""The ledger as one bar and a few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepbusy.explain.diagnosis import COMPUTING, PLACES
from keepbusy.report.paper import FAINT
from keepbusy.report.places import look
from keepbusy.report.words import duration, share

_BESIDES = {"copying", "computing", "collective"}
_FOLDED = 0.01


class Row(NamedTuple):
    """One place of the ledger, as bar and rows show it."""

    place: str
    time: int
    mark: str  # the number of its cause in the report, or the place's own letter


def rows_of(ledger: Mapping[str, int], causes: Sequence[str]) -> list[Row]:
    """What the device does first, then the causes as the report numbers them, then the rest."""
    numbered = [cause for cause in causes if cause not in _BESIDES]
    order = [place for place in PLACES if place in _BESIDES]
    order += [*numbered, *(place for place in PLACES if place not in order and place not in numbered)]
    return [Row(place, ledger[place], _mark(place, numbered)) for place in order if ledger.get(place, 0) > 0]


def _mark(place: str, numbered: list[str]) -> str:
    return str(numbered.index(place) + 1) if place in numbered[:9] else look(place).letter


def bar(rows: Sequence[Row], width: int, colour: bool, whole: int = 0) -> Text:
    """One line of `width` cells, or as much of it as the rows are of `whole`; a row that is there gets a cell."""
    own = sum(row.time for row in rows)
    whole = whole or own
    drawn = Text(no_wrap=True)
    for row, cells in zip(rows, _cells([row.time for row in rows], whole, width), strict=True):
        if colour:
            label = share(row.time, own)
            drawn.append(
                label.center(cells) if len(label) + 2 <= cells else " " * cells, f"#16181d on {look(row.place).colour}"
            )
        else:
            drawn.append(row.mark * cells)
    return drawn


def _cells(times: Sequence[int], whole: int, width: int) -> list[int]:
    """Cells that sum to the width that the times have of the whole; whoever has 1% keeps one."""
    if not whole:
        return [0] * len(times)
    exact = [width * time / whole for time in times]
    cells = [max(int(part), 1 if time >= _FOLDED * whole else 0) for part, time in zip(exact, times, strict=True)]
    target = round(sum(exact))
    while sum(cells) != target:
        off = [part - cell for part, cell in zip(exact, cells, strict=True)]
        short = sum(cells) < target
        index = off.index(max(off)) if short else max(range(len(cells)), key=lambda one: (cells[one] > 1, -off[one]))
        cells[index] += 1 if short else -1
    return cells


def legend(rows: Sequence[Row], colour: bool, whole: int, width: int) -> RenderableType:
    """Name, time and share; what is under 1% stands in one row."""
    shown = [row for row in rows if row.time >= _FOLDED * whole or row.place == COMPUTING]
    small = [row for row in rows if row not in shown]
    entries = [_entry(row, colour, whole) for row in shown]
    if small:
        time = sum(row.time for row in small)
        names = look(small[0].place).name if len(small) == 1 else f"{len(small)} smaller ones"
        entries.append(
            [Text(" "), Text(names, FAINT), Text(duration(time, whole), FAINT), Text(share(time, whole), FAINT)]
        )
    return _table(entries, 2 if width >= 84 and len(entries) > 3 else 1)


def _entry(row: Row, colour: bool, whole: int) -> list[Text]:
    shown = look(row.place)
    key = Text("■" if not row.mark.isdigit() else row.mark, f"bold {shown.colour}") if colour else Text(row.mark)
    return [key, Text(shown.name), Text(duration(row.time, whole)), Text(share(row.time, whole))]


def _table(entries: list[list[Text]], columns: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        for justify in ("right", "left", "right", "right"):
            table.add_column(justify=justify, no_wrap=True, min_width=20 if justify == "left" else None)
    height = -(-len(entries) // columns)
    for index in range(height):
        table.add_row(*[cell for entry in entries[index::height] for cell in entry])
    return table
