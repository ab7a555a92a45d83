"""The `for` and `while` loops of a program's source, and which jump of its code ends a turn of which."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterable, Iterator
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

    def turns_at(self, iterates: bool, position: Position) -> bool:
        """Whether a jump back to this instruction ends a turn. Others do not: a comprehension within a `for` has jumps
        of its own, and an `except` goes back to what follows its `try`."""
        first, last = self.begins
        return self.iterates == iterates and (position in self.begins if iterates else first <= position < last)


class SourceLoops:
    """The `for` and `while` loops of source files, and their decisions, by the function that holds them."""

    def __init__(self, read: Callable[[str], str]) -> None:
        """`read` gives the text of a file; OSError where there is none."""
        self._read = read
        self._loops: dict[tuple[str, int], list[SourceLoop]] = {}  # of each function, by file and first line
        self._trees: dict[tuple[str, int], ast.AST] = {}  # of functions of whose decisions nobody has asked yet
        self._deciding: dict[tuple[str, int], set[int]] = {}
        self._certain: dict[tuple[str, int], tuple[range, ...]] = {}
        self._lines: dict[str, list[str]] = {}

    def around(self, code: CodeType, line: int) -> list[SourceLoop]:
        """The loops of this code that the line is in, from the outside in."""
        return [loop for loop in self.of(code) if loop.first <= line <= loop.last]

    def of(self, code: CodeType) -> list[SourceLoop]:
        """All loops of this code, from the outside in; none where its file went, or was never one."""
        owner = code.co_filename, _first_line(code)
        if owner not in self._loops:
            tree = _tree_of(self._text(code.co_filename), code)
            self._loops[owner] = [loop for first, loop in _loops(tree, 0) if first == owner[1]]
            self._trees[owner] = tree
            functions = (one for one in ast.walk(tree) if owner[1] and _begins_at(one) == owner[1])
            body = getattr(next(functions, tree), "body", [])
            self._certain[owner] = tuple(_certain(body, ast.Return | ast.Raise))
        return self._loops[owner]

    def is_certain(self, code: CodeType, line: int) -> bool:
        """Whether each call of this function passes the line, whatever the program decides."""
        self.of(code)
        return any(line in one for one in self._certain[code.co_filename, _first_line(code)])

    def decides(self, code: CodeType, line: int) -> bool:
        """Whether this line works out by what the program chooses what it does next."""
        owner = code.co_filename, _first_line(code)
        if owner not in self._deciding:
            self.of(code)
            self._deciding[owner] = _deciding(self._trees.pop(owner))
        return line in self._deciding[owner]

    def of_jump(self, code: CodeType, target: int) -> SourceLoop | None:
        """The loop whose turns begin at this instruction: a `for` asks for its next item there, a `while` does not."""
        if target >= len(code.co_code):  # its source is not here, so this code stands for another
            return None
        while dis.opname[code.co_code[target]] == "EXTENDED_ARG":  # what belongs to the instruction after it
            target += 2
        iterates = dis.opname[code.co_code[target]] in ("FOR_ITER", "GET_ANEXT")
        position = _position_of(code, target)
        # the first statement of an outer `while` may be an inner one: whose test is jumped to from there is the outer's
        return next((loop for loop in self.around(code, position[0]) if loop.turns_at(iterates, position)), None)

    def text(self, file: str, line: int) -> str:
        lines = self._text(file)
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    def _text(self, file: str) -> list[str]:
        if file not in self._lines:
            try:
                self._lines[file] = self._read(file).splitlines()
            except (OSError, ValueError):
                self._lines[file] = []
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
        mine = _begins_at(child) or owner
        if isinstance(child, ast.For | ast.AsyncFor | ast.While):
            last = child.body[-1].end_lineno or child.lineno
            statements = tuple(one.lineno for one in _passed_in_order(child.body))
            certain = (_head(child), *_certain(child.body, ast.Continue))
            yield (
                owner,
                SourceLoop(child.lineno, last, not isinstance(child, ast.While), _begins(child), statements, certain),
            )
        yield from _loops(child, mine)


def _passed_in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those that a `with` holds."""
    for one in body:
        yield one
        if isinstance(one, ast.With):
            yield from _passed_in_order(one.body)


def _begins_at(node: ast.AST) -> int:
    """The first line of a function; of anything else 0."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return 0
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


_CHOICES = ast.IfExp | ast.BoolOp | ast.comprehension | ast.Lambda
_OWN_BODIES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def _certain(body: Any, leaves: Any) -> Iterator[range]:
    """Of these statements the lines that are passed each time, up to the first one that `leaves` before the end."""
    for one in _passed_in_order(body if isinstance(body, list) else [body]):
        if not any(isinstance(inner, _CHOICES) for part in _parts_of_head(one) for inner in ast.walk(part)):
            yield _head(one)
        if not isinstance(one, ast.Return | ast.With) and _leaves(one, leaves):
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
        return [one.context_expr for one in node.items]
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
    tests = list[ast.expr | ast.stmt]()
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) or _chooses(node):
            tests.append(node.test)
        for body in (getattr(node, part, ()) for part in ("body", "orelse", "finalbody")):
            for assignment, after in pairwise(body if isinstance(body, list) else ()):
                if isinstance(assignment, ast.Assign | ast.AnnAssign) and _chooses(after):
                    stored = {
                        name.id for name in ast.walk(assignment) if isinstance(name, ast.Name) and _is_stored(name)
                    }
                    if any(isinstance(name, ast.Name) and name.id in stored for name in ast.walk(after.test)):
                        tests.append(assignment)
    tested = [node for test in tests for node in ast.walk(test)]
    known = {id(node) for node in tested}
    read_beside = _reading_lines(node for node in ast.walk(tree) if id(node) not in known)
    lines = set[int]().union(*map(_lines_of, tests))
    return lines - (read_beside - _reading_lines(tested))


def _reading_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """The lines of calls that read a value of the GPU."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called_name(node) in _READS]
    return set[int]().union(*map(_lines_of, calls))


def _chooses(node: ast.AST) -> TypeGuard[ast.If | ast.While]:
    """What is only said, noted or raised comes as well a turn later."""
    return isinstance(node, ast.While) or (
        isinstance(node, ast.If) and not all(map(_can_wait, [*node.body, *node.orelse]))
    )


def _can_wait(statement: ast.stmt) -> bool:
    inner = list(ast.walk(statement))
    calls = {_called_name(one) for one in inner if isinstance(one, ast.Call)}
    waits = calls <= _SAYS | _READS and not any(isinstance(one, _JUMPS) for one in inner)
    return isinstance(statement, ast.Raise) or waits


def _called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _begins(loop: ast.For | ast.AsyncFor | ast.While) -> tuple[Position, Position]:
    here = loop.lineno, loop.col_offset
    if not isinstance(loop, ast.While):
        if isinstance(loop, ast.For) and sys.version_info >= (3, 13):  # it stands at what it iterates over
            here = loop.iter.lineno, loop.iter.col_offset
        return here, here
    inner = getattr(loop.body[0], "body", None)  # of a compound statement only its head comes first
    if inner:
        return here, (inner[0].lineno, inner[0].col_offset)
    return here, (loop.body[0].end_lineno or 0, loop.body[0].end_col_offset or 0)


def _position_of(code: CodeType, instruction: int) -> Position:
    line, _, column, _ = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    return line or code.co_firstlineno, column or 0
