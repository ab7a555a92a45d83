"""The program's own source: the line that a place speaks of, and the line to write for a cause, if the file is there.

A profiler's trace knows the function, not the line. Where that function calls what was seen in one line only, that line
is offered as the likely one, and said to be no more than that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

from keepbusy.causes.places import Where
from keepbusy.report.words import tame

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
"""What a program may have written where the trace shows this operator; of others, their own name."""
_BUILTIN = re.compile(r"<built-in (?:function|method) (\w+)")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A line of the program."""

    line: int
    text: str
    likely: bool  # found by reading the function, not recorded


def source_of(where: Where) -> Source | None:
    """The line itself, or none. A trace may name any file: only Python sources are opened."""
    text = text_of(where)
    line = where.line if where.exact else _likely_line(text, where)
    lines = text.splitlines()
    shown = tame(lines[line - 1].strip()) if 0 < line <= len(lines) else ""
    return Source(line, shown, not where.exact) if shown else None


def text_of(where: Where) -> str:
    """The whole file, if it is there and a Python source."""
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
    found = _lines_calling(_loop_around(function, where.line) or function, where.operator)
    return found.pop() if len(found) == 1 else 0


def _loop_around(function: ast.AST, line: int) -> ast.AST | None:
    """A function that was running when recording began is known by the line it stood at: what recurs is in its loop."""
    loops = [node for node in without_inner_functions(function) if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _lines_calling(node: ast.AST, operator: str) -> set[int]:
    if operator.startswith("enumerate(DataLoader)"):
        inside = (node, *without_inner_functions(node))
        return {one.lineno for one in inside if isinstance(one, ast.For) and not _counts(one)}
    builtin = _BUILTIN.match(operator)
    name = builtin[1] if builtin else operator.rpartition("::")[2]
    calls = [
        one
        for one in without_inner_functions(node)
        if isinstance(one, ast.Call) and _name_of(one) in _CALLS.get(name, {name})
    ]
    return {call.end_lineno or 0 for call in calls}


def _counts(loop: ast.For) -> bool:
    return isinstance(loop.iter, ast.Call) and _name_of(loop.iter) == "range"


def function_at(tree: ast.Module, where: Where, line: int) -> _Function | ast.Module | None:
    """The innermost function of that name around that line; none where the file is another one by now."""
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
    """A decorated function begins with its decorators, for Python as for us."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


def without_inner_functions(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in it, without the functions defined inside it: they have frames of their own."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from without_inner_functions(child)


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def fix_line(fix: str, where: Where, usual: str) -> str:
    """The line as `keepbusy fix` would write it; where it knows none, the usual one of the fix."""
    source = source_of(where) if where.file else None
    if source is None or find_spec("libcst") is None:
        return tame(usual)
    from keepbusy.fixes.source.rewriting import line_to_write

    return tame(line_to_write(text_of(where), fix, source.line) or usual)
