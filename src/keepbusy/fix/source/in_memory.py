"""Sources that stand in for a program's own as it is imported. No file is touched, and no PyTorch needed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from keepbusy.instrument import script
from keepbusy.instrument.patches import Function, Patches

_NO_COLUMN = -1


class StandIns:
    """By whole paths, which sources to take for which files, and of each of their lines the line that it is there."""

    def __init__(self, sources: Mapping[str, str], origins: Mapping[str, Sequence[int]]) -> None:
        self._sources, self._origins = sources, origins

    def begin(self) -> None:
        """From here on, for the script and for all that it imports."""
        script.COMPILE.append(self._compiled)
        Patches().replace(SourceFileLoader, "get_code", self._reading)

    def _compiled(self, source: bytes, path: str) -> CodeType:
        whole = str(Path(path).resolve())
        if whole not in self._sources:
            return script.COMPILE[0](source, path)
        tree = ast.parse(self._sources[whole])
        give_lines(tree, self._sources[whole], source, self._origins[whole])
        return compile(tree, path, "exec", dont_inherit=True)

    def _reading(self, plain: Function) -> Function:
        """What Python has kept of a file's code is the file's own."""

        def get_code(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if str(Path(path).resolve()) in self._sources:
                return self._compiled(loader.get_data(path), path)
            return plain(loader, name)

        return get_code


def give_lines(tree: ast.Module, source: str, own: bytes, origins: Sequence[int]) -> None:
    """To all of the tree the lines of the user's file, so that tracebacks and reports name these. Columns stay where a
    line is the same there."""
    new, old = source.encode().splitlines(), own.splitlines()
    for node in ast.walk(tree):
        if not isinstance(
            node, ast.expr | ast.stmt | ast.excepthandler | ast.pattern | ast.alias | ast.arg | ast.keyword
        ):
            continue
        ends = (node.lineno, node.end_lineno or node.lineno)
        begin, end = (origins[line - 1] for line in ends)
        is_there = all(new[at - 1] == old[to - 1] for at, to in zip(ends, (begin, end), strict=True) if to <= len(old))
        node.lineno, node.end_lineno = begin, end
        if not is_there or end - begin != ends[1] - ends[0]:
            node.end_lineno, node.col_offset, node.end_col_offset = begin, _NO_COLUMN, _NO_COLUMN
