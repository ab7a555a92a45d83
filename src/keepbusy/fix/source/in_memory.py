"""Sources that stand in for a program's own as it is imported. No file is touched, and no PyTorch needed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from keepbusy.fixes.definition import LIFTED
from keepbusy.program import script
from keepbusy.program.patches import Function, Patches

_NO_COLUMN = -1


class StandIns:
    """The sources to take for files, by absolute path, and for each of their lines the line of that file."""

    def __init__(self, sources: Mapping[str, str], origins: Mapping[str, Sequence[int]]) -> None:
        self._sources, self._origins = sources, origins

    def begin(self) -> None:
        """From here on, for the script and for all that it imports."""
        script.COMPILE.append(self.compiled)
        Patches().replace(SourceFileLoader, "get_code", self._reading)

    def compiled(self, source: bytes, path: str) -> CodeType:
        resolved = str(Path(path).resolve())
        if resolved not in self._sources:
            return script.COMPILE[0](source, path)
        tree, origins = ast.parse(self._sources[resolved]), self._origins[resolved]
        lifted = _lifted_from(tree, source, origins)
        give_lines(tree, self._sources[resolved], source, origins)
        code = compile(tree, path, "exec", dont_inherit=True)
        constants = [
            _named(constant, lifted) if isinstance(constant, CodeType) else constant for constant in code.co_consts
        ]
        return code.replace(co_consts=tuple(constants))

    def _reading(self, plain: Function) -> Function:
        """Code that Python has cached is the file's own, so it is not used."""

        def get_code(loader: Any, name: str) -> CodeType | None:
            path = loader.get_filename(name)
            if str(Path(path).resolve()) in self._sources:
                return self.compiled(loader.get_data(path), path)
            return plain(loader, name)

        return get_code


def _lifted_from(tree: ast.Module, own: bytes, origins: Sequence[int]) -> dict[str, str]:
    """By the names of functions that statements were lifted into, the name of the function that they stand in."""
    functions = [
        function for function in ast.walk(ast.parse(own)) if isinstance(function, ast.FunctionDef)
    ]  # outer ones come first
    lifted = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith(LIFTED):
            line = origins[node.body[0].lineno - 1]
            around = [function.name for function in functions if function.lineno <= line <= (function.end_lineno or 0)]
            lifted[node.name] = (["<module>", *around])[-1]
    return lifted


def _named(code: CodeType, lifted: Mapping[str, str]) -> CodeType:
    """In tracebacks it has the name of the function around it, whose frame is left out: see `script.LIFTED`."""
    if code.co_name not in lifted:
        return code
    named = code.replace(co_name=lifted[code.co_name])
    script.LIFTED.add(named)
    return named


def give_lines(tree: ast.Module, source: str, own: bytes, origins: Sequence[int]) -> None:
    """Give the whole tree the lines of the user's file, so that tracebacks and reports name these. Where a line is the
    same there, perhaps further to the right, give it those columns, too."""
    new, old = source.encode().splitlines(), own.splitlines()
    for node in ast.walk(tree):
        if not isinstance(
            node, ast.expr | ast.stmt | ast.excepthandler | ast.pattern | ast.alias | ast.arg | ast.keyword
        ):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        begin, end = origins[first - 1], origins[last - 1]
        begins_alike = new[first - 1].strip() == old[begin - 1].strip()
        ends_alike = new[last - 1].strip() == old[end - 1].strip()
        holds_others = hasattr(node, "body") and isinstance(node, ast.stmt)  # which may have changed
        node.lineno, node.end_lineno = begin, end
        if begins_alike and ends_alike and (end - begin == last - first or holds_others):
            node.col_offset += _indent(old[begin - 1]) - _indent(new[first - 1])
            node.end_col_offset = (node.end_col_offset or 0) + _indent(old[end - 1]) - _indent(new[last - 1])
        elif begins_alike and holds_others:  # where its loop is looked for: see `source_loops`
            node.col_offset += _indent(old[begin - 1]) - _indent(new[first - 1])
            node.end_lineno, node.end_col_offset = begin, len(old[begin - 1])
        else:
            node.end_lineno, node.col_offset, node.end_col_offset = begin, _NO_COLUMN, _NO_COLUMN


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())
