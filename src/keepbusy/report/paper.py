"""Lays out reports with rich's console, and falls back to ASCII for terminals that know nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepbusy.causes.places import Where

_ASCII = str.maketrans(
    {"→": "->", "–": "-", "µ": "u", "·": "-", "…": "...", "█": "#", "▓": "=", "▒": "~", "×": "x", "�": "?", "−": "-"}
)
STRONG = "bold"
FAINT = "dim"
PLACE, GAIN, BROKEN = "cyan", "bold green", "bold red"


WITHOUT_END = 5_000
"""A width at which no line is broken, for files and pipes."""


def laid_out(
    parts: Iterable[RenderableType], width: int, colour: bool, unicode: bool = True, links: bool = False
) -> str:
    """The report as text, without trailing spaces. `links` keeps the links that a terminal opens on a click."""
    written = io.StringIO()
    console = Console(  # it interprets nothing: names in a trace may look like markup
        file=written,
        width=width,
        force_terminal=colour,
        force_jupyter=False,  # a notebook gets text, too
        no_color=not colour,
        color_system="auto" if colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        # rich copies a text before printing and forgets its `no_wrap`
        no_wrap = isinstance(part, Text) and part.no_wrap
        console.print(part, crop=False, no_wrap=no_wrap, overflow="ignore" if no_wrap else None)
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
    text = text if links else _LINK.sub("", text)
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


_LINK = re.compile(r"\x1b\]8;[^\x1b]*\x1b\\")
"""OSC 8: a terminal's escape sequence for a link."""


def link_to(where: Where) -> str:
    """The part of a style that links to the place, empty if the file does not exist."""
    try:
        path = Path(where.file)
        return f" link {path.resolve().as_uri()}#{where.line}" if where.file and path.is_file() else ""
    except (OSError, ValueError):
        return ""


def labelled(asides: Iterable[tuple[str, str]]) -> RenderableType:
    """Sentences, each with a word in the margin. A line of code is never broken, so that it can be pasted."""
    rows: list[RenderableType] = []
    for word, text in asides:
        if text.startswith("fix: "):
            rows.append(unbroken((f"{word:8}", FAINT), text))
        else:
            row = Table.grid()
            row.add_row(Text(f"{word:8}", FAINT), Text(text))
            rows.append(row)
    return Group(*rows)


def unbroken(*pieces: tuple[str, str] | str) -> Text:
    """Styled pieces on one line, however long it is."""
    return Text.assemble(*pieces, no_wrap=True, overflow="ignore")


def line(*pieces: tuple[str, str] | str, indent: int = 0) -> RenderableType:
    """Styled pieces in one paragraph, wrapped under its indent."""
    text = Text.assemble(*pieces)
    return Padding(text, (0, 0, 0, indent), expand=False) if indent else text
