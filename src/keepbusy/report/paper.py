"""Where reports are laid out: rich's console as a sheet of paper, and a fallback for terminals that know ASCII only."""

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
"""The width of a sheet on which no line is broken: for files and pipes."""


def laid_out(
    parts: Iterable[RenderableType], width: int, colour: bool, unicode: bool = True, links: bool = False
) -> str:
    """The sheet as text, without spaces at the ends of its lines. `links`: terminals open places that are clicked."""
    written = io.StringIO()
    sheet = Console(  # it interprets nothing: names of a trace may hold what looks like markup
        file=written,
        width=width,
        force_terminal=colour,
        force_jupyter=False,  # in a notebook, too, a report is the text that it returns
        no_color=not colour,
        color_system="auto" if colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        # rich joins texts that it prints into one of its own, which is broken unless it is told so again
        no_wrap = isinstance(part, Text) and part.no_wrap
        sheet.print(part, crop=False, no_wrap=no_wrap, overflow="ignore" if no_wrap else None)
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
    text = text if links else _LINK.sub("", text)
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


_LINK = re.compile(r"\x1b\]8;[^\x1b]*\x1b\\")
"""OSC 8, as terminals know it."""


def link_to(where: Where) -> str:
    """What a place's style has in addition, where its file is there."""
    try:
        path = Path(where.file)
        return f" link {path.resolve().as_uri()}#{where.line}" if where.file and path.is_file() else ""
    except (OSError, ValueError):
        return ""


def labelled(asides: Iterable[tuple[str, str]]) -> RenderableType:
    """Sentences, each with a word in the margin. A line of code is never broken: it is there to be pasted."""
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
