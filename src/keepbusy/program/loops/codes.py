"""The code objects of a program, by number, and how another process finds them again: from their sources."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from types import CodeType
from typing import Any, NamedTuple

from keepbusy.program.lines import OURS, TEXTS, USER, compiled_as_written, is_importing, kind_of, shown

IMPORTING = -1
"""The kind of Python's own code that imports."""


class Line(NamedTuple):
    """A line of a code object, which is given by its number."""

    code: int
    line: int


Chain = tuple[Line, ...]
"""Where the program is, from the outside in."""
NO_LINE = Line(-1, 0)


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """With how many equal entries both chains begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


class ProgramCodes:
    """Numbers for code objects, by identity: Python takes the same words in two files for equal."""

    def __init__(self) -> None:
        self.objects: list[CodeType] = []
        self.kinds: list[int] = []
        """As `kind_of` has it of the file, or `IMPORTING`."""
        self._numbers: dict[int, int] = {}
        self._files: dict[int, str] = {}

    def number(self, code: CodeType) -> int:
        number = self._numbers.get(id(code))
        if number is None:
            number = self._numbers[id(code)] = len(self.objects)
            self.objects.append(code)
            self.kinds.append(IMPORTING if is_importing(code.co_filename) else kind_of(code.co_filename))
        return number

    def is_users(self, line: Line) -> bool:
        return self.kinds[line.code] == USER

    def function(self, line: Line) -> str:
        """As its author would call it: of our own code the function that a program calls."""
        code = self.objects[line.code]
        return "keepbusy.graph" if code.co_filename.startswith(OURS) else code.co_name

    def file(self, number: int) -> str:
        if number not in self._files:
            self._files[number] = shown(self.objects[number].co_filename)
        return self._files[number]

    def place(self, line: Line) -> str:
        """As `file:line`."""
        return f"{self.file(line.code)}:{line.line}" if line != NO_LINE else ""


def read_source(file: str) -> str:
    """What runs as this file, which `keepbusy fix` may have put in its place; "" where there is none."""
    return TEXTS[file] if file in TEXTS else "".join(linecache.getlines(file))


_UNKNOWN = compile("0", "", "eval")


class CodeObjects:
    """The code objects of a program that ran in another process: its sources are compiled once more."""

    def __init__(
        self, read: Callable[[str], str], compiled: Callable[[bytes, str], CodeType] = compiled_as_written
    ) -> None:
        """`compiled`: how the program's process made code of a source: a run with fixes does so of another one."""
        self._read, self._compiled = read, compiled
        self._found: dict[tuple[str, str, int], CodeType] = {}
        self._in_file: dict[str, dict[str, list[CodeType]]] = {}
        self._placeholders: dict[tuple[str, str], CodeType] = {}

    def of(self, file: str, name: str, line: int) -> CodeType:
        """The one with this qualified name that holds the line; one without loops where there is no such source."""
        key = file, name, line
        found = self._found.get(key)
        if found is None:
            holding = [code for code in self._of_file(file).get(name, ()) if line in _lines_of(code)]
            latest = max(holding, key=lambda code: code.co_firstlineno, default=None)
            found = self._found[key] = latest or self._placeholder(file, name)
        return found

    def _placeholder(self, file: str, name: str) -> CodeType:
        """The same one for each line of a function, as for a real one."""
        made = _UNKNOWN.replace(co_filename=file, co_name=name.rpartition(".")[2], co_qualname=name)
        return self._placeholders.setdefault((file, name), made)

    def _of_file(self, file: str) -> dict[str, list[CodeType]]:
        known = self._in_file.get(file)
        if known is None:
            known = self._in_file[file] = defaultdict(list)
            with suppress(SyntaxError, ValueError):
                if text := self._read(file):
                    for code in _within(self._compiled(text.encode(), file)):
                        known[code.co_qualname].append(code)
        return known


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


@cache
def _lines_of(code: CodeType) -> frozenset[int]:
    return frozenset(line for _, _, line in code.co_lines() if line is not None) | {code.co_firstlineno}
