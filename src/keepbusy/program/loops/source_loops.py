"""The `for` and `while` loops of a program's source, and which jump of its code ends a turn of which."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

Position: TypeAlias = tuple[int, int]
"""A line, and the column in it."""


class SourceLoop(NamedTuple):
    """A loop as it is written, its `else` left out, which is no part of its turns."""

    first: int
    last: int
    iterates: bool  # a `for`, else a `while`
    begins: tuple[Position, Position]
    """Of a `for`: where the instruction stands that asks for the next item, twice. Of a `while`: from where to where
    the first instruction of a turn may stand: its test, or its first statement."""
    statements: tuple[int, ...] = ()
    """The first lines of those it holds."""
    certain: tuple[range, ...] = ()
    """Lines that each turn passes whatever the program decides, statement by statement."""


@dataclass
class _SourceFunction:
    """What the source of a function, or of a module, tells."""

    tree: ast.AST
    loops: list[SourceLoop]  # from the outside in
    certain: tuple[range, ...]  # lines that each call passes

    @cached_property
    def deciding(self) -> set[int]:
        return _deciding(self.tree)


class SourceLoops:
    """The `for` and `while` loops of source files, and their decisions, by the function that holds them."""

    def __init__(self, read: Callable[[str], str]) -> None:
        """`read` gives the text of a file; "" where there is none."""
        self._read = read
        self._functions: dict[tuple[str, int], _SourceFunction] = {}  # by file and first line
        self._lines: dict[str, list[str]] = {}

    def _function(self, code: CodeType) -> _SourceFunction:
        """Without loops where its file went, or was never one."""
        first = _first_line(code)
        found = self._functions.get((code.co_filename, first))
        if found is None:
            tree = _tree_of(self._text(code.co_filename), code)
            functions = (node for node in ast.walk(tree) if first and _begins_at(node) == first)
            certain = tuple(_certain(getattr(next(functions, tree), "body", []), ast.Return | ast.Raise))
            found = _SourceFunction(tree, [loop for owner, loop in _loops(tree, 0) if owner == first], certain)
            self._functions[code.co_filename, first] = found
        return found

    def around(self, code: CodeType, line: int) -> list[SourceLoop]:
        """The loops of this code that the line is in, from the outside in."""
        return [loop for loop in self._function(code).loops if loop.first <= line <= loop.last]

    def is_certain(self, code: CodeType, line: int) -> bool:
        """Whether each call of this function passes the line, whatever the program decides."""
        return any(line in lines for lines in self._function(code).certain)

    def decides(self, code: CodeType, line: int) -> bool:
        """Whether this line works out by what the program chooses what it does next."""
        return line in self._function(code).deciding

    def of_jump(self, code: CodeType, target: int) -> SourceLoop | None:
        """The loop whose turns begin at this instruction: a `for` asks for its next item there, a `while` does not.

        Other jumps end no turn: a comprehension within a `for` has jumps of its own, and an `except` goes back to what
        follows its `try`.
        """
        if target >= len(code.co_code):  # its source is not here, so this code stands for another
            return None
        while dis.opname[code.co_code[target]] == "EXTENDED_ARG":  # what belongs to the instruction after it
            target += 2
        iterates = dis.opname[code.co_code[target]] in ("FOR_ITER", "GET_ANEXT")
        line, _, column, _ = next(islice(code.co_positions(), target // 2, None))
        position = line or code.co_firstlineno, column or 0
        # the first statement of an outer `while` may be an inner one: whose test is jumped to from there is the outer's
        for loop in self.around(code, position[0]):
            first, last = loop.begins
            if loop.iterates == iterates and (position in loop.begins if iterates else first <= position < last):
                return loop
        return None

    def text(self, file: str, line: int) -> str:
        lines = self._text(file)
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    def _text(self, file: str) -> list[str]:
        if file not in self._lines:
            self._lines[file] = self._read(file).splitlines()
        return self._lines[file]


def _tree_of(text: list[str], code: CodeType) -> ast.AST:
    """Of a function its own lines alone are parsed: a file of thousands of lines takes a tenth of a second."""
    first = _first_line(code)
    for begin, end in ((first - 1, _end_of(text, code)), (0, len(text))) if first else ((0, len(text)),):
        own = text[begin:end]
        inside = bool(own) and own[0][:1].isspace()
        try:
            tree = ast.parse("\n".join(["if 1:"] * inside + own))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue  # a lambda may begin in the middle of something
        return ast.increment_lineno(tree, begin - inside)
    return ast.Module([], [])


def _end_of(text: list[str], code: CodeType) -> int:
    """The line after which the text is no further in than where the function begins."""
    inner = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    depth = _depth(text[code.co_firstlineno - 1]) if code.co_firstlineno <= len(text) else 0
    rest = range(inner, len(text))
    return next((row for row in rest if text[row].strip(" \t)]},:") and _depth(text[row]) <= depth), len(text))


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _first_line(code: CodeType) -> int:
    return 0 if code.co_name == "<module>" else code.co_firstlineno


def _loops(node: ast.AST, owner: int) -> Iterator[tuple[int, SourceLoop]]:
    """Loops, each with the first line of the function that it stands in (0: of the module), from the outside in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For | ast.AsyncFor | ast.While):
            last, iterates = child.body[-1].end_lineno or child.lineno, not isinstance(child, ast.While)
            statements = tuple(statement.lineno for statement in _passed_in_order(child.body))
            certain = (_head(child), *_certain(child.body, ast.Continue))
            yield owner, SourceLoop(child.lineno, last, iterates, _begins(child), statements, certain)
        yield from _loops(child, _begins_at(child) or owner)


def _passed_in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those that a `with` holds."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.With):
            yield from _passed_in_order(statement.body)


def _begins_at(node: ast.AST) -> int:
    """The first line of a function; of anything else 0."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return 0
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


_CHOICES = ast.IfExp | ast.BoolOp | ast.comprehension | ast.Lambda
_OWN_BODIES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def _certain(body: Any, leaves: Any) -> Iterator[range]:
    """Of these statements the lines that are passed each time, up to the first one that `leaves` before the end."""
    for statement in _passed_in_order(body if isinstance(body, list) else [body]):
        if not any(isinstance(inner, _CHOICES) for part in _parts_of_head(statement) for inner in ast.walk(part)):
            yield _head(statement)
        if not isinstance(statement, ast.Return | ast.With) and _leaves(statement, leaves):
            return


def _head(node: Any) -> range:
    """Its lines; of a compound statement those that are passed before what it holds."""
    parts = _parts_of_head(node)
    return range(node.lineno, (parts[-1].end_lineno or node.lineno) + 1) if parts else range(0)


def _parts_of_head(node: Any) -> list[Any]:
    """What is worked out each time: of a loop what it iterates over, of a choice its test, of a statement all."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return [node.iter]
    if isinstance(node, ast.If | ast.While):
        return [node.test]
    if isinstance(node, ast.With | ast.AsyncWith):
        return [item.context_expr for item in node.items]
    return [] if hasattr(node, "body") else [node]


def _leaves(node: ast.AST, leaves: Any) -> bool:
    """Whether something in it leaves the turn or the call; a `continue` of an inner loop is that loop's."""
    if isinstance(node, leaves):
        return True
    if isinstance(node, _OWN_BODIES) or (
        leaves is ast.Continue and isinstance(node, ast.For | ast.AsyncFor | ast.While)
    ):
        return False
    return any(_leaves(child, leaves) for child in ast.iter_child_nodes(node))


_SAYS = {"append", "critical", "debug", "error", "exception", "info", "log", "print", "warn", "warning", "write"}
_READS = {"bool", "cpu", "float", "int", "item", "numpy", "tolist"}
_JUMPS = ast.Break | ast.Continue | ast.Return | ast.Yield


def _deciding(tree: ast.AST) -> set[int]:
    """The lines of tests, and of what the statement after them tests; but none on which only other code reads values,
    as in `if i % 2 == 0: print(float(loss))`."""
    nodes = list(ast.walk(tree))
    tests: list[ast.AST] = [node.test for node in nodes if isinstance(node, ast.IfExp) or _chooses(node)]
    bodies = [body for node in nodes for _, body in ast.iter_fields(node) if isinstance(body, list)]
    for statement, after in (pair for body in bodies for pair in pairwise(body)):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and _chooses(after):
            names = (name for name in ast.walk(statement) if isinstance(name, ast.Name))
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if any(isinstance(name, ast.Name) and name.id in stored for name in ast.walk(after.test)):
                tests.append(statement)
    tested = {node for test in tests for node in ast.walk(test)}
    read_beside = _reading_lines(node for node in nodes if node not in tested)
    lines = set[int]().union(*map(_lines_of, tests))
    return lines - (read_beside - _reading_lines(tested))


def _reading_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """The lines of calls that read a value of the GPU."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called_name(node) in _READS]
    return set[int]().union(*map(_lines_of, calls))


def _chooses(node: ast.AST) -> TypeGuard[ast.If | ast.While]:
    """What is only said, noted or raised comes as well a turn later."""
    is_choice = isinstance(node, ast.If) and not all(map(_can_wait, [*node.body, *node.orelse]))
    return is_choice or isinstance(node, ast.While)


def _can_wait(statement: ast.stmt) -> bool:
    inner = list(ast.walk(statement))
    calls = {_called_name(node) for node in inner if isinstance(node, ast.Call)}
    waits = calls <= _SAYS | _READS and not any(isinstance(node, _JUMPS) for node in inner)
    return isinstance(statement, ast.Raise) or waits


def _called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _lines_of(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _begins(loop: ast.For | ast.AsyncFor | ast.While) -> tuple[Position, Position]:
    head = loop.lineno, loop.col_offset
    if isinstance(loop, ast.While):
        inner = getattr(loop.body[0], "body", None)  # of a compound statement only its head comes first
        if inner:
            return head, (inner[0].lineno, inner[0].col_offset)
        return head, (loop.body[0].end_lineno or 0, loop.body[0].end_col_offset or 0)
    if isinstance(loop, ast.For) and sys.version_info >= (3, 13):  # it stands at what it iterates over
        head = loop.iter.lineno, loop.iter.col_offset
    return head, head
