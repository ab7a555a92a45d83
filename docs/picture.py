"""Draws the verdict that `keepbusy run` printed in colour as an SVG: `… | picture.py OUT.svg`. `make picture` calls it.

What the program itself printed, above the verdict, is no part of the picture.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from keepbusy.report.verdict import WIDTH

NORMAL = ["3c4048", "e06c62", "6fbe82", "d8bb55", "5b8fd4", "c07fd0", "62b4c8", "d6d9de"]
BRIGHT = ["5f646e", "ec8278", "82d296", "e6cd6e", "78aaeb", "d296e1", "78c8da", "f0f2f5"]


def rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue


THEME = TerminalTheme(rgb("16181d"), rgb("d6d9de"), [*map(rgb, NORMAL)], [*map(rgb, BRIGHT)])
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-ligatures: none; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>\
</clipPath>{lines}</defs>
<rect fill="#16181d" width="{width}" height="{height}" rx="10"/>
<g transform="translate(28, 26)"><g class="{unique_id}-matrix">{backgrounds}{matrix}</g></g>
</svg>
"""


def main(out: str) -> None:
    lines = Text.from_ansi(sys.stdin.read()).split()
    first = next(number for number, line in enumerate(lines) if line.plain.startswith("keepbusy · "))
    Path(out).write_text(drawn(Text("\n").join(lines[first:])), encoding="utf-8")


def drawn(verdict: Text) -> str:
    margin = 3  # columns, as the text stands away from the left edge
    sheet = Console(
        width=WIDTH + margin, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor"
    )
    sheet.print(verdict, width=WIDTH)
    return sheet.export_svg(theme=THEME, code_format=FORMAT, unique_id="report")


if __name__ == "__main__":
    main(*sys.argv[1:])
