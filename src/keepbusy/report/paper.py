"""Where reports are laid out: rich's console as a sheet of paper, and a fallback for terminals that know ASCII only."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_ASCII = str.maketrans(
    {"→": "->", "–": "-", "µ": "u", "·": "-", "…": "...", "█": "#", "▓": "=", "▒": "~", "×": "x", "�": "?", "−": "-"}
)
CLEAR = ""
STRONG = "bold"
FAINT = "dim"


def laid_out(parts: Iterable[RenderableType], width: int, colour: bool, unicode: bool = True) -> str:
    """The sheet as text, without spaces at the ends of its lines."""
    sheet = console(width, colour, io.StringIO())
    for part in parts:
        sheet.print(part)
    text = "\n".join(line.rstrip() for line in sheet.file.getvalue().splitlines())  # type: ignore[attr-defined]
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def console(width: int, colour: bool, file: io.StringIO | None = None, record: bool = False) -> Console:
    """One that interprets nothing: names of a trace may hold what looks like markup."""
    return Console(
        file=file,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system=("truecolor" if record else "auto") if colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        record=record,
    )


def label(word: str) -> str:
    """What stands in the margin."""
    return f"{word:8}"


def labelled(asides: Iterable[tuple[str, str]]) -> RenderableType:
    """Sentences, each with a word in the margin."""
    rows = Table.grid()
    for word, text in asides:
        rows.add_row(Text(label(word), FAINT), Text(text))
    return rows


def line(*pieces: tuple[str, str] | str, indent: int = 0) -> RenderableType:
    """Styled pieces in one paragraph, wrapped under its indent."""
    return Padding(Text.assemble(*pieces), (0, 0, 0, indent))
