"""Where reports are laid out: rich's console as a sheet of paper, and a fallback for terminals that know ASCII only."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepbusy.explain.diagnosis import Where


class Look(NamedTuple):
    """How reports show one place of the ledger: its short name, a sentence, its colour, and a letter in its place."""

    name: str
    sentence: str
    colour: str
    letter: str = "·"


LOOKS = {
    "computing": Look("computing", "The GPU computes", "#4fa870", "█"),
    "copying": Look("copying", "The GPU copies, and computes nothing meanwhile", "#45a0a8", "▓"),
    "collective": Look("collective", "Ranks exchange data, and nothing is computed meanwhile", "#5b8fd4", "▒"),
    "host_sync": Look("host sync", "Python waits for the GPU, and then the GPU waits for Python", "#e06c62"),
    "blocking_copy": Look(
        "blocking copy", "Python waits for a copy, and the GPU does nothing but copy meanwhile", "#e69a4c"
    ),
    "copy_not_overlapped": Look(
        "copy in line", "The GPU copies first and computes afterwards, instead of doing both at once", "#d8bb55"
    ),
    "input_late": Look("late input", "The GPU waits for the next batch", "#c07fd0"),
    "made_on_host": Look("made on host", "Tensors are made on the CPU and copied to the GPU", "#e288b0"),
    "launch_bound": Look(
        "launch-bound", "The GPU finishes its kernels sooner than Python can launch new ones", "#cf8064"
    ),
    "allocator": Look("allocator", "PyTorch asks the driver for memory again and again", "#b0a06a"),
    "host_work": Look("host work", "Python does other work in the training loop, and the GPU waits for it", "#b58b70"),
    "peer_late": Look("late peer", "A rank is late and the others wait for it", "#9d90dc"),
    "exposed_collective": Look(
        "exposed collective", "Ranks exchange data, and nothing is computed meanwhile", "#7aa5e2"
    ),
    "pipeline_bubble": Look("bubble", "Stages of a pipeline wait for each other", "#b7c7dd", "o"),
    "unknown": Look("unknown", "Not explained", "#8b9099", "?"),
}


def look(place: str) -> Look:
    """Also of a place that a later version may know."""
    return LOOKS.get(place) or Look(place, place, "#8b9099")


_ASCII = str.maketrans(
    {"→": "->", "–": "-", "µ": "u", "·": "-", "…": "...", "█": "#", "▓": "=", "▒": "~", "×": "x", "�": "?", "−": "-"}
)
STRONG = "bold"
FAINT = "dim"
PLACE, GAIN = "cyan", "bold green"


WITHOUT_END = 5_000
"""The width of a sheet on which no line is broken: for files and pipes."""


def laid_out(
    parts: Iterable[RenderableType], width: int, colour: bool, unicode: bool = True, links: bool = False
) -> str:
    """The sheet as text, without spaces at the ends of its lines. `links`: terminals open places that are clicked."""
    sheet = console(width, colour, io.StringIO())
    for part in parts:
        # rich joins texts that it prints into one of its own, which is broken unless it is told so again
        no_wrap = isinstance(part, Text) and part.no_wrap
        sheet.print(part, crop=False, no_wrap=no_wrap, overflow="ignore" if no_wrap else None)
    text = "\n".join(line.rstrip() for line in sheet.file.getvalue().splitlines())  # type: ignore[attr-defined]
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


def console(width: int, colour: bool, file: io.StringIO) -> Console:
    """One that interprets nothing: names of a trace may hold what looks like markup."""
    return Console(
        file=file,
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


def label(word: str) -> str:
    """What stands in the margin."""
    return f"{word:8}"


def labelled(asides: Iterable[tuple[str, str]]) -> RenderableType:
    """Sentences, each with a word in the margin. A line of code is never broken: it is there to be pasted."""
    rows: list[RenderableType] = []
    for word, text in asides:
        if text.startswith("fix: "):
            rows.append(unbroken((label(word), FAINT), text))
        else:
            row = Table.grid()
            row.add_row(Text(label(word), FAINT), Text(text))
            rows.append(row)
    return Group(*rows)


def unbroken(*pieces: tuple[str, str] | str) -> Text:
    """Styled pieces on one line, however long it is."""
    return Text.assemble(*pieces, no_wrap=True, overflow="ignore")


def line(*pieces: tuple[str, str] | str, indent: int = 0) -> RenderableType:
    """Styled pieces in one paragraph, wrapped under its indent."""
    text = Text.assemble(*pieces)
    return Padding(text, (0, 0, 0, indent), expand=False) if indent else text
