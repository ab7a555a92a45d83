"""Reads of the device that are put off: values stay there while a loop runs, and are read once it has ended.

    total += loss.item() * len(x)      total += loss.detach().double() * len(x); total = float(total) after the loop
    correct += (y == z).sum().item()   correct += (y == z).sum()
    losses.append(loss.item())         losses.append(loss.detach().clone())
    value = loss.item()                value = loss.detach().clone()

Sums are made in double precision, as Python makes them, so they stay the same to the last bit. Where the loop looks at
the name now and then, `float(...)` stands around it. A name that each iteration looks at is left alone, and so is one
that other code can see: one that is declared global or nonlocal, that an inner function uses, or a script's own name
that any of its functions mentions; a list that was not made here, or that goes anywhere while the loop runs.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import ExpressionContext, ExpressionContextProvider, MetadataWrapper, PositionProvider

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_LOOKING = {"locals", "globals", "vars", "eval", "exec", "dir", "compile"}
_ONLY_READ = {
    *("len", "sum", "min", "max", "print", "float", "str", "sorted", "mean", "fmean", "median", "average"),
    *("list", "tuple"),
}
"""Functions that keep nothing of a list that they are given."""
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Mod, ast.FloorDiv)
_COMPARING = {"eq", "ne", "gt", "ge", "lt", "le", "isin", "isclose"}


class _LateRead(NamedTuple):
    """A statement that can be put off, and the name that it is about."""

    statement: ast.AugAssign | ast.Assign | ast.Expr
    name: str
    number: str
    """What the name is to be afterwards: `float`, or `int` of what is only counted."""
    into_list: bool = False

    @property
    def read_after(self) -> str:
        """The statement that reads it after the loop."""
        value = f"[{self.number}(one) for one in {self.name}]" if self.into_list else f"{self.number}({self.name})"
        return f"{self.name} = {value}"


class _Scope:
    """The code of one function, or of the script itself."""

    def __init__(self, scope: ast.Module | ast.FunctionDef, declared: Set[str]) -> None:
        """`declared`: names that the source says are global or nonlocal anywhere."""
        self.node, self._declared = scope, declared
        self.own = list(_own_nodes(scope))

    def late_reads(self) -> list[_LateRead]:
        """What reads values that nobody looks at yet."""
        if not any(map(_is_read, self.own)):  # most of a large source reads nothing
            return []
        if any(isinstance(node, ast.Name) and node.id in _LOOKING for node in self.own):
            return []
        self._parents = {id(child): node for node in ast.walk(self.node) for child in ast.iter_child_nodes(node)}
        by_name: dict[str, list[_LateRead]] = {}
        for statement in _statements_in_loops(self.node):
            late = _late_read(statement)
            if late is not None:
                by_name.setdefault(late.name, []).append(late)
        shared = self._shared_names()
        return [
            late
            for name, late_reads in by_name.items()
            if name not in shared and self._may_wait(name, late_reads)
            for late in late_reads
        ]

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | ast.AsyncFor:
        """The innermost one."""
        while not isinstance(node := self._parents[id(node)], _LOOPS):
            pass
        return node

    def lines_reading(self, name: str) -> list[int]:
        loads = [node for node in self.own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        return [node.lineno for node in loads if node.id == name]

    def _shared_names(self) -> set[str]:
        """What code outside of this scope's own can see."""
        inner = [node for node in ast.walk(self.node) if isinstance(node, _SCOPES) and node is not self.node]
        return {name for scope in inner for name in _used_in(scope)} | self._declared

    def _may_wait(self, name: str, late_reads: list[_LateRead]) -> bool:
        statements = [late.statement for late in late_reads]
        for statement in statements:
            # else the wait would come anyway, a moment later; or its loop may be left by an error that is caught here
            if _looks(self.loop_around(statement), name, statement) or self._is_tried(statement):
                return False
        targets = _targets(statements)
        stored = [node for node in self.own if isinstance(node, ast.Name) and node.id == name and node not in targets]
        stored = [node for node in stored if not isinstance(node.ctx, ast.Load)]
        begins_as_float = bool(stored) and all(type(_constant(self._assigned(node))) is float for node in stored)
        is_float = begins_as_float and all(isinstance(statement, ast.AugAssign) for statement in statements)
        if not is_float and not all(map(self._is_of_known_type, statements)):
            return False  # a whole number is to be one afterwards, too
        ends = max(self._outermost_loop(statement).end_lineno or 0 for statement in statements)
        if any(late.into_list for late in late_reads):
            return self._is_private_list(name, ends)
        before = [node for node in stored if node.lineno <= ends]
        begin_as_numbers = all(type(_constant(self._assigned(node))) in (int, float) for node in before)
        return begin_as_numbers and not self._is_asked_elsewhere(name, statements)

    def _is_tried(self, node: ast.AST) -> bool:
        while node is not self.node:
            node = self._parents[id(node)]
            if isinstance(node, ast.Try):
                return True
        return False

    def _is_of_known_type(self, statement: ast.stmt) -> bool:
        """Whether what it reads is a loss that goes back, or how often something is so."""
        calls = [node.func for node in self.own if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        losses = {func.value.id for func in calls if func.attr == "backward" and isinstance(func.value, ast.Name)}
        for read in filter(_is_read, ast.walk(statement)):
            match read:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in losses:
                    continue
            if not _is_count(read):
                return False
        return True

    def _is_asked_elsewhere(self, name: str, statements: Sequence[ast.stmt]) -> bool:
        """In front of its loop, where another loop comes to again, or as `f"{name=}"`."""
        for statement in statements:
            first = self.loop_around(statement).lineno
            names = [node for node in ast.walk(self._outermost_loop(statement)) if isinstance(node, ast.Name)]
            if any(node.id == name and isinstance(node.ctx, ast.Load) and node.lineno < first for node in names):
                return True
        texts = [part for node in self.own if isinstance(node, ast.JoinedStr) for part in node.values]
        return any(isinstance(part, ast.Constant) and str(part.value).endswith(f"{name}=") for part in texts)

    def _is_private_list(self, name: str, filled: int) -> bool:
        """Made here, of numbers at most, and handed to nobody before the loops that fill it have ended."""
        is_created = False
        for node in self.own:
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if isinstance(node.ctx, ast.Load):
                if node.lineno <= filled and not self._only_looks(node):
                    return False
            elif _is_list_of_numbers(self._assigned(node)):
                is_created = True
            else:
                return False
        return is_created

    def _outermost_loop(self, node: ast.AST) -> ast.stmt:
        loop: ast.stmt | None = None
        while node is not self.node:
            node = self._parents[id(node)]
            if isinstance(node, _LOOPS):
                loop = node
        assert loop is not None
        return loop

    def _only_looks(self, node: ast.Name) -> bool:
        """Whether it is certain that what reads the list here keeps nothing of it."""
        parent = self._parents[id(node)]
        match parent:
            case ast.Attribute(attr="append"):
                return isinstance(self._parents[id(parent)], ast.Call)
            case ast.Subscript(value=value, ctx=ast.Load()):
                return value is node  # one of its numbers, or a copy
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                return called in _ONLY_READ
            case ast.FormattedValue():
                return True
        return False

    def _assigned(self, node: ast.Name) -> ast.AST | None:
        """What the name is given, also as one of several."""
        parent = self._parents[id(node)]
        if isinstance(parent, ast.Assign) and node in parent.targets and len(parent.targets) == 1:
            return parent.value
        if isinstance(parent, ast.AnnAssign):
            return parent.value
        above = self._parents[id(parent)] if isinstance(parent, ast.Tuple) else None
        match parent, above:
            case ast.Tuple(elts=names), ast.Assign(targets=[_], value=ast.Tuple(elts=given)) if len(names) == len(
                given
            ):
                return given[names.index(node)]
        return None


def _targets(statements: Sequence[ast.stmt]) -> list[ast.expr]:
    """The names that these statements store."""
    targets: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.AugAssign):
            targets.append(statement.target)
        elif isinstance(statement, ast.Assign):
            targets += statement.targets
    return targets


def _constant(value: ast.AST | None) -> Any:
    return value.value if isinstance(value, ast.Constant) else None


def _late_read(statement: ast.stmt) -> _LateRead | None:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
            reads, into_list = _reads(value), False
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            reads, into_list = _is_read(value), False
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])
        ):
            reads, into_list = _is_read(value), True
        case _:
            return None
    number = "int" if _is_count(value) else "float"
    return _LateRead(statement, name, number, into_list) if reads and _computes(value) else None


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The scope and all in it, but not what stands in inner functions; comprehensions run at once and belong to it."""
    yield scope
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield from _own_nodes(child)


def _used_in(scope: ast.AST) -> set[str]:
    """Names that it uses of the code around it. What its parameters are by default is computed there, too."""
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name)]
    used = {node.id for node in names}
    if isinstance(scope, ast.ClassDef):
        return used
    if not any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(scope)):
        used -= {
            node.id for node in _own_nodes(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    arguments: ast.arguments = scope.args  # type: ignore[attr-defined]
    outside = [arguments, *getattr(scope, "decorator_list", ())]
    used -= {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
    return used | {node.id for part in outside for node in ast.walk(part) if isinstance(node, ast.Name)}


def _statements_in_loops(scope: ast.AST, inside: bool = False) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _SCOPES):
            continue
        if inside and isinstance(child, ast.stmt):
            yield child
        yield from _statements_in_loops(child, inside or isinstance(child, _LOOPS))


def _looks(node: ast.AST, name: str, late: ast.stmt) -> bool:
    """Whether each iteration reads the name anyway, not only under a condition or in the statement that is put off."""
    if node is late or isinstance(node, _SCOPES):
        return False
    if isinstance(node, ast.If):
        return _looks(node.test, name, late)
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    return any(_looks(child, name, late) for child in ast.iter_child_nodes(node))


def _is_list_of_numbers(value: ast.AST | None) -> bool:
    match value:
        case ast.List(elts=parts):
            return all(isinstance(part, ast.Constant) for part in parts)
        case ast.Call(func=ast.Name(id="list"), args=[], keywords=[]):
            return True
        case ast.BinOp(left=ast.List() as numbers, op=ast.Mult()):
            return _is_list_of_numbers(numbers)
    return False


def _is_read(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="item"), args=[], keywords=[]):
            return True
    return False


def _is_count(value: ast.AST) -> bool:
    """Whether it is how often something is so: `(a == b).sum().item()`. That is a whole number."""
    match value:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=counted, attr="sum"), args=[]), attr="item"),
            args=[],
        ):
            compares = isinstance(counted, ast.Call) and getattr(counted.func, "attr", "") in _COMPARING
            return compares or isinstance(counted, ast.Compare)
    return False


def _reads(value: ast.AST) -> bool:
    return any(map(_is_read, ast.walk(value)))


def _computes(value: ast.expr) -> bool:
    """Reads, numbers and arithmetic: nothing that could have an effect, and nothing that fails only when it is worked
    out: to divide by what is not known yet, or to raise to any power, is left to the line itself."""
    match value:
        case ast.Call(func=ast.Attribute(value=tensor)) if _is_read(value):
            binds = any(
                isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(tensor)
            )
            return not binds and not _reads(tensor)
        case ast.BinOp(left=left, op=ast.Div(), right=right) if _reads(value):
            return _computes(left) and _is_plain(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=1 | 2 | 0.5)):
            return _computes(left)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            return _computes(left) and _computes(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _computes(operand)
    return _is_plain(value)


def _is_plain(value: ast.expr) -> bool:
    """A number or a length: it may be worked out after what stands behind it. What is called might change it."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(left=left, right=right, op=operator):
            return isinstance(operator, _ARITHMETIC) and _is_plain(left) and _is_plain(right)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name()], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="size"), args=[ast.Constant()], keywords=[]):
            return True
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant()):
            return True
    return False


# How they are written


def write_late_reads(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    loops = _late_loops(wrapper.module.code, lines)
    return wrapper.visit(_LateReads(loops)) if loops else None


@dataclass
class _LateLoop:
    """What of one loop is put off."""

    reads: dict[int, _LateRead] = field(default_factory=dict)  # by line
    names: dict[str, _LateRead] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)  # statements that follow it


def _late_loops(source: str, lines: frozenset[int]) -> dict[int, _LateLoop]:
    """By the lines at which loops begin. A list is put off only where its loop does nothing else with it."""
    nodes = [*ast.walk(ast.parse(source))]
    declared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    alone = _lone_statements(nodes, source)
    loops: dict[int, _LateLoop] = {}
    for scope in (_Scope(node, declared) for node in nodes if isinstance(node, ast.Module | ast.FunctionDef)):
        late_reads = [late for late in scope.late_reads() if late.statement.lineno in lines and late.statement in alone]
        with_loops = [(late, scope.loop_around(late.statement)) for late in late_reads]
        count = Counter((late.name, loop) for late, loop in with_loops)
        for late, loop in with_loops:
            first, last, read_at = loop.lineno, loop.end_lineno or 0, scope.lines_reading(late.name)
            if late.into_list and sum(first <= line <= last for line in read_at) > count[late.name, loop]:
                continue
            late_loop = loops.setdefault(first, _LateLoop())
            late_loop.reads[late.statement.lineno] = late_loop.names[late.name] = late
            if any(line > last for line in read_at) and late.read_after not in late_loop.after:
                late_loop.after.append(late.read_after)
    return loops


def _lone_statements(nodes: Sequence[ast.AST], source: str) -> set[ast.stmt]:
    """Statements without a block that have their lines to themselves: no other statement, no `if ...:` before them."""
    text = source.splitlines()
    simple = [
        node
        for node in nodes
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Match) and not hasattr(node, "body")
    ]
    count = Counter(line for node in simple for line in {node.lineno, node.end_lineno})
    return {
        node
        for node in simple
        if count[node.lineno] == count[node.end_lineno] == 1
        and not text[node.lineno - 1].encode()[: node.col_offset].strip()
    }


class _LateReads(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (ExpressionContextProvider, PositionProvider)

    def __init__(self, loops: dict[int, _LateLoop]) -> None:
        super().__init__()
        self._loops = loops
        self._lines = {line for loop in loops.values() for line in loop.reads}
        self._open: list[_LateLoop] = []
        self._within: list[cst.CSTNode] = []  # of these statements the one that is gone through

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.For | cst.While) and self._line(node) in self._loops:
            self._open.append(self._loops[self._line(node)])
        elif isinstance(node, cst.SimpleStatementLine) and self._line(node) in self._lines:
            self._within.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        result = super().on_leave(original_node, updated_node)
        if self._within and original_node is self._within[-1]:
            self._within.pop()
        elif isinstance(original_node, cst.For | cst.While) and self._line(original_node) in self._loops:
            after = [cst.parse_statement(statement) for statement in self._open.pop().after]
            return cst.FlattenSentinel([result, *after]) if after else result
        return result

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        """What reads the name within the loop waits for its value."""
        name = original_node.value
        late = next((loop.names[name] for loop in self._open if name in loop.names), None)
        reads = self.get_metadata(ExpressionContextProvider, original_node, None) is ExpressionContext.LOAD
        if late is None or late.into_list or not reads or self._within:
            return updated_node
        return cst.Call(cst.Name(late.number), [cst.Arg(updated_node)])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        match original_node:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="item")), args=[]) if self._within:
                tensor = cst.ensure_type(updated_node.func, cst.Attribute).value
            case _:
                return updated_node
        statement = cst.ensure_type(self._within[-1], cst.SimpleStatementLine)
        if _is_count(ast.parse(cst.Module([]).code_for_node(original_node), mode="eval").body):
            return tensor
        is_sum = isinstance(statement.body[0], cst.AugAssign)
        return _called(_called(tensor, "detach"), "double" if is_sum else "clone")


def _called(value: cst.BaseExpression, method: str) -> cst.Call:
    return cst.Call(cst.Attribute(value, cst.Name(method)))
