"""Lines of the program's source: the line of a place, and the line to write for a fix, if the file exists.

A profiler's trace knows the function, not the line. If only one line of that function calls the recorded operator,
reports show that line as the likely one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

from keepbusy.causes.places import Where
from keepbusy.report.labels import tame

_LARGEST = 4_000_000
_MOVES = {"to", "cuda", "cpu", "copy_"}
_CALLS = {
    "item": {"item", "tolist", "float", "int", "bool"},
    "_local_scalar_dense": {"item", "tolist", "float", "int", "bool"},
    "to": _MOVES,
    "_to_copy": _MOVES,
    "copy_": _MOVES,
    "cudaDeviceSynchronize": {"synchronize"},
    "cudaStreamSynchronize": {"synchronize"},
    "cudaEventSynchronize": {"synchronize"},
}
"""Names under which a program may have called an operator; other operators are called by their own name."""
_BUILTIN = re.compile(r"<built-in (?:function|method) (\w+)")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A line of the program."""

    line: int
    text: str
    likely: bool  # inferred from the function's source, not recorded


def source_of(where: Where) -> Source | None:
    """The line of a place, or None. A trace may name any file, so only Python sources are opened."""
    text = text_of(where)
    line = where.line if where.exact else _likely_line(text, where)
    lines = text.splitlines()
    shown = tame(lines[line - 1].strip()) if 0 < line <= len(lines) else ""
    return Source(line, shown, not where.exact) if shown else None


def text_of(where: Where) -> str:
    """The whole file, or "" if it is no Python source or cannot be read."""
    try:
        path = Path(where.file)
        fits = path.suffix == ".py" and path.is_file() and path.stat().st_size <= _LARGEST
        return path.read_text(encoding="utf-8", errors="replace") if fits else ""
    except (OSError, ValueError):
        return ""


def _likely_line(text: str, where: Where) -> int:
    """The only line of the function that may call the operator, or 0."""
    try:
        function = function_at(ast.parse(text), where, where.line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    if function is None:
        return 0
    lines = _lines_calling(_loop_around(function, where.line) or function, where.operator)
    return lines.pop() if len(lines) == 1 else 0


def _loop_around(function: ast.AST, line: int) -> ast.AST | None:
    """The innermost loop around the line. If recording began within a function, the place is the line that ran then,
    and the operator recurs in the loop around it."""
    loops = [node for node in without_inner_functions(function) if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _lines_calling(node: ast.AST, operator: str) -> set[int]:
    if operator.startswith("enumerate(DataLoader)"):
        nodes = (node, *without_inner_functions(node))
        return {loop.lineno for loop in nodes if isinstance(loop, ast.For) and not _counts(loop)}
    builtin = _BUILTIN.match(operator)
    name = builtin[1] if builtin else operator.rpartition("::")[2]
    return {
        call.end_lineno or 0
        for call in without_inner_functions(node)
        if isinstance(call, ast.Call) and _name_of(call) in _CALLS.get(name, {name})
    }


def _counts(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and _name_of(loop.iter) == "range"


def function_at(tree: ast.Module, where: Where, line: int) -> _Function | ast.Module | None:
    """The innermost function of that name around the line; None if the file has changed since."""
    if where.function == "<module>":
        return tree
    name = where.function.rpartition(".")[2]
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Function) and node.name == name and _first_line(node) <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=_first_line, default=None)


def _first_line(function: _Function) -> int:
    """The line of its first decorator, if it has any."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def without_inner_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Its nodes, without the bodies of inner functions: those have frames of their own."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from without_inner_functions(child)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def fix_line(fix: str, where: Where, usual: str) -> str:
    """The line as `keepbusy fix` would write it, or else the fix's usual line."""
    source = source_of(where) if where.file else None
    if source is None or find_spec("libcst") is None:
        return tame(usual)
    from keepbusy.fixes.source.rewriting import line_to_write

    return tame(line_to_write(text_of(where), fix, source.line) or usual)
