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
THEME = TerminalTheme(
    (22, 24, 29),
    (214, 217, 222),
    [(60, 64, 72), (224, 108, 98), (111, 190, 130), (216, 187, 85), (91, 143, 212), (192, 127, 208), (98, 180, 200), (214, 217, 222)],
    [(95, 100, 110), (236, 130, 120), (130, 210, 150), (230, 205, 110), (120, 170, 235), (210, 150, 225), (120, 200, 218), (240, 242, 245)],
)  # fmt: skip
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
