"""Where reports are laid out: rich's console as a sheet of paper, and a fallback for terminals that know ASCII only."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# What each place of the ledger is called, and how it looks.


class Look(NamedTuple):
    """One place: its short name, its name as a sentence, its colour, and its letter where there is none."""

    name: str
    sentence: str
    colour: str
    letter: str = "·"


LOOKS = {
    "computing": Look("computing", "The GPU computes", "#4fa870", "█"),
    "copying": Look("copying", "The GPU copies and computes nothing meanwhile", "#45a0a8", "▓"),
    "collective": Look("collective", "A collective is on the wire and nothing computes", "#5b8fd4", "▒"),
    "host_sync": Look("host sync", "The host waits for the GPU, then the GPU for the host", "#e06c62"),
    "blocking_copy": Look("blocking copy", "A copy holds up the host and the GPU", "#e69a4c"),
    "copy_not_overlapped": Look("copy in line", "A copy stands in line with the computing", "#d8bb55"),
    "input_late": Look("late input", "The input comes late", "#c07fd0"),
    "made_on_host": Look("made on host", "Tensors are made on the host and sent over", "#e288b0"),
    "launch_bound": Look("launch-bound", "The host launches more slowly than the GPU computes", "#cf8064"),
    "allocator": Look("allocator", "Memory is fetched from the driver again and again", "#b0a06a"),
    "host_work": Look("host work", "The host is busy with something else", "#b58b70"),
    "peer_late": Look("late peer", "A rank arrives late and its peers wait", "#9d90dc"),
    "exposed_collective": Look("exposed collective", "A collective runs while nothing computes", "#7aa5e2"),
    "pipeline_bubble": Look("bubble", "Stages of a pipeline wait for each other", "#b7c7dd", "o"),
    "unknown": Look("unknown", "Nobody knows", "#8b9099", "?"),
}


def look(place: str) -> Look:
    """Also of a place that a later version may know."""
    return LOOKS.get(place) or Look(place, place, "#8b9099")


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
