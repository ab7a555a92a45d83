"""Draws the terminal report of a trace as an SVG: `picture.py TRACE MS OUT.svg`. `make picture` calls it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.terminal_theme import TerminalTheme

import keepbusy
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.report import paper, terminal

WIDTH = 100
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


def main(trace: str, plain_step: str, out: str) -> None:
    diagnosis = keepbusy.explain(keepbusy.read([Path(trace)]), plain_step=round(float(plain_step) * 1e6))
    Path(out).write_text(drawn(diagnosis), encoding="utf-8")


def drawn(diagnosis: Diagnosis) -> str:
    sheet = paper.console(WIDTH + 3, colour=True, file=io.StringIO(), record=True)
    for part in terminal.parts(diagnosis, WIDTH, colour=True):
        sheet.print(part, width=WIDTH)
    return sheet.export_svg(theme=THEME, code_format=FORMAT, unique_id="report")


if __name__ == "__main__":
    main(*sys.argv[1:])
