"""A terminal on paper: as much of one as the bottom line and ordinary programs need."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b(?:7|8|D|\[([\d;]*)([A-Za-z]))|\n|\r|[^\x1b\n\r]")


class PaperScreen:
    """Rows of text, a cursor, and a region that scrolls."""

    def __init__(self, columns: int = 80, rows: int = 6) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""] * rows
        self.row, self.column = 0, 0
        self.top, self.bottom = 0, rows - 1
        self.saved = (0, 0)
        self.scrolled: list[str] = []
        self.writes = 0

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows

    def write(self, text: str) -> None:
        self.writes += 1
        for part in _PART.finditer(text):
            self._do(part.group(), part[1], part[2])

    def resize(self, rows: int) -> None:
        self.lines = (self.lines + [""] * rows)[:rows]
        self.rows, self.top, self.bottom = rows, 0, rows - 1
        self.row = min(self.row, rows - 1)

    def _do(self, part: str, numbers: str | None, command: str | None) -> None:
        if part == "\x1b7":
            self.saved = (self.row, self.column)
        elif part == "\x1b8":
            self.row, self.column = self.saved
        elif command is not None:
            self._control([int(one) for one in (numbers or "").split(";") if one], command)
        elif part == "\x1bD":
            self._down()
        elif part == "\n":
            self._down()
            self.column = 0
        elif part == "\r":
            self.column = 0
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        if self.row == self.bottom:
            self.scrolled.append(self.lines.pop(self.top))
            self.lines.insert(self.bottom, "")
        elif self.row < self.rows - 1:
            self.row += 1

    def _control(self, numbers: list[int], command: str) -> None:
        if command == "H":
            self.row, self.column = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, 0)
        elif command == "A":
            self.row = max(self.top, self.row - (numbers[0] if numbers else 1))
        elif command == "K":
            self.lines[self.row] = ""
        elif command == "r":
            self.top, self.bottom = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, self.rows - 1)
            self.row = self.column = 0
        else:
            assert command == "m", command  # colours
