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
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import (
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
)

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


# Which lines read what nobody looks at yet


def late_lines(tree: ast.Module) -> list[int]:
    scopes: list[ast.Module | ast.FunctionDef] = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    declared = {name for one in ast.walk(tree) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    return sorted(line for scope in (tree, *scopes) for line in _Scope(scope, declared).late_lines())


class _LateStatement(NamedTuple):
    """A statement that can be put off, and the name that it is about."""

    statement: ast.stmt
    name: str
    into_list: bool = False


class _Scope:
    """The code of one function, or of the script itself."""

    def __init__(self, scope: ast.Module | ast.FunctionDef, declared: Set[str]) -> None:
        """`declared`: names that the source says are global or nonlocal anywhere."""
        self.node, self._declared = scope, declared
        self.own = list(_own_nodes(scope))

    def late_lines(self) -> list[int]:
        if not any(map(_is_read, self.own)):  # most of a large source reads nothing
            return []
        if any(isinstance(one, ast.Name) and one.id in _LOOKING for one in self.own):
            return []
        self._parents = {id(child): node for node in ast.walk(self.node) for child in ast.iter_child_nodes(node)}
        by_name: dict[str, list[_LateStatement]] = {}
        for statement in _statements_in_loops(self.node):
            late = _late_statement(statement)
            if late is not None:
                by_name.setdefault(late.name, []).append(late)
        shared = self._shared_names()
        chosen = (found for name, found in by_name.items() if name not in shared and self._may_wait(name, found))
        return [late.statement.lineno for found in chosen for late in found]

    def _shared_names(self) -> set[str]:
        """What code outside of this scope's own can see."""
        inner = [one for one in ast.walk(self.node) if isinstance(one, _SCOPES) and one is not self.node]
        return {name for one in inner for name in _used_in(one)} | self._declared

    def _may_wait(self, name: str, found: list[_LateStatement]) -> bool:
        if any(self._is_looked_at_each_time(name, one.statement) or self._is_tried(one.statement) for one in found):
            return False
        stored = [
            one for one in self.own if isinstance(one, ast.Name) and one.id == name and one not in _targets(found)
        ]
        stored = [one for one in stored if not isinstance(one.ctx, ast.Load)]
        is_float = bool(stored) and all(type(_constant(self._assigned(one))) is float for one in stored)
        sums = all(isinstance(one.statement, ast.AugAssign) for one in found)
        if not (is_float and sums) and not all(self._is_of_known_type(one.statement) for one in found):
            return False  # a whole number is to be one afterwards, too
        if any(one.into_list for one in found):
            return self._is_private_list(name, found)
        ends = max(self._outermost_loop(one.statement).end_lineno or 0 for one in found)
        numbers = (type(_constant(self._assigned(one))) in (int, float) for one in stored if one.lineno <= ends)
        return all(numbers) and not self._is_asked_elsewhere(name, found)

    def _is_tried(self, statement: ast.stmt) -> bool:
        """Whether its loop may be left by an error that is caught here."""
        node: ast.AST = statement
        while node is not self.node:
            node = self._parents[id(node)]
            if isinstance(node, ast.Try):
                return True
        return False

    def _is_of_known_type(self, statement: ast.stmt) -> bool:
        """Whether what it reads is a loss that goes back, or how often something is so."""
        called = [one.func for one in self.own if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
        losses = {one.value.id for one in called if one.attr == "backward" and isinstance(one.value, ast.Name)}
        for read in filter(_is_read, ast.walk(statement)):
            match read:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in losses:
                    continue
                case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=of, attr="sum"), args=[]))):
                    compares = isinstance(of, ast.Call) and getattr(of.func, "attr", "") in _COMPARING
                    if compares or isinstance(of, ast.Compare):
                        continue
            return False
        return True

    def _is_asked_elsewhere(self, name: str, found: list[_LateStatement]) -> bool:
        """In front of its loop, where another loop comes to again, or as `f"{name=}"`."""
        for late in found:
            outer, inner = self._outermost_loop(late.statement), self._parents[id(late.statement)]
            while not isinstance(inner, _LOOPS):
                inner = self._parents[id(inner)]
            asked = (one.lineno for one in _names(outer, name) if isinstance(one.ctx, ast.Load))
            if any(line < inner.lineno for line in asked):
                return True
        texts = [one.values for one in self.own if isinstance(one, ast.JoinedStr)]
        spelled = (one.value for parts in texts for one in parts if isinstance(one, ast.Constant))
        return any(str(one).endswith(f"{name}=") for one in spelled)

    def _is_looked_at_each_time(self, name: str, statement: ast.stmt) -> bool:
        """Then the wait would come anyway, a moment later."""
        loop = self._parents[id(statement)]
        while not isinstance(loop, _LOOPS):
            loop = self._parents[id(loop)]
        return _looks(loop, name, statement)

    def _is_private_list(self, name: str, found: list[_LateStatement]) -> bool:
        """Made here, of numbers at most, and handed to nobody before the loops that fill it have ended."""
        filled = max(self._outermost_loop(one.statement).end_lineno or 0 for one in found)
        made = False
        for node in self.own:
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if isinstance(node.ctx, ast.Load):
                if node.lineno <= filled and not self._only_looks(node):
                    return False
            elif _is_list_of_numbers(self._assigned(node)):
                made = True
            else:
                return False
        return made

    def _outermost_loop(self, node: ast.AST) -> ast.stmt:
        found: ast.stmt | None = None
        while node is not self.node:
            node = self._parents[id(node)]
            if isinstance(node, _LOOPS):
                found = node
        assert found is not None
        return found

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


def _targets(found: list[_LateStatement]) -> list[ast.expr]:
    """The names that these statements store."""
    statements = [one.statement for one in found]
    targets = [one.target for one in statements if isinstance(one, ast.AugAssign)]
    return targets + [target for one in statements if isinstance(one, ast.Assign) for target in one.targets]


def _constant(value: ast.AST | None) -> Any:
    return value.value if isinstance(value, ast.Constant) else None


def _late_statement(statement: ast.stmt) -> _LateStatement | None:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if _reads(value) and _computes(value):
            return _LateStatement(statement, name)
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_read(value) and _computes(value):
            return _LateStatement(statement, name)
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])
        ) if _is_read(value) and _computes(value):
            return _LateStatement(statement, name, into_list=True)
    return None


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """It, and all but what stands in inner functions; comprehensions run at once and count as its own."""
    yield scope
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield from _own_nodes(child)


def _used_in(scope: ast.AST) -> set[str]:
    """But for its own parameters and names; what is given by default is worked out where it stands."""
    names = [node for node in ast.walk(scope) if isinstance(node, ast.Name)]
    used = {node.id for node in names}
    if isinstance(scope, ast.ClassDef):
        return used
    if not any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(scope)):
        used -= {
            node.id for node in _own_nodes(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    given: ast.arguments = scope.args  # type: ignore[attr-defined]
    outside = [given, *getattr(scope, "decorator_list", ())]
    used -= {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}
    return used | {node.id for one in outside for node in ast.walk(one) if isinstance(node, ast.Name)}


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


def _names(node: ast.AST, name: str) -> Iterator[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name)


def _is_list_of_numbers(value: ast.AST | None) -> bool:
    match value:
        case ast.List(elts=parts):
            return all(isinstance(one, ast.Constant) for one in parts)
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


def _reads(value: ast.AST) -> bool:
    return any(map(_is_read, ast.walk(value)))


def _computes(value: ast.expr) -> bool:
    """Reads, numbers and arithmetic: nothing that could have an effect, and nothing that fails only when it is worked
    out: to divide by what is not known yet, or to raise to any power, is left to the line itself."""
    match value:
        case ast.Call(func=ast.Attribute(value=tensor)) if _is_read(value):
            binds = any(
                isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for one in ast.walk(tensor)
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
    survey = _Survey(lines & frozenset(late_lines(ast.parse(wrapper.module.code))))
    wrapper.visit(survey)
    return wrapper.visit(_LateReads(survey.loops)) if survey.loops else None


@dataclass(frozen=True)
class _LateName:
    """A name that holds a tensor while its loop runs, or a list of them, and what it is to hold afterwards."""

    name: str
    number: str  # float, or int of what is only counted
    is_list: bool = False


@dataclass
class _LoopReads:
    """What of one loop is put off."""

    statements: dict[cst.CSTNode, _LateName] = field(default_factory=dict)
    names: dict[str, _LateName] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)  # statements that follow it


class _Survey(cst.CSTVisitor):
    """Finds the statements at these lines, and which loop each stands in."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider, ExpressionContextProvider)

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__()
        self._lines = lines
        self.loops: dict[cst.CSTNode, _LoopReads] = {}
        self._found: dict[cst.CSTNode, dict[cst.CSTNode, _LateName]] = {}
        self._read: list[cst.Name] = []

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        if self.get_metadata(ExpressionContextProvider, node, None) is ExpressionContext.LOAD:
            self._read.append(node)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:  # noqa: N802
        if self.get_metadata(PositionProvider, node).start.line in self._lines and len(node.body) == 1:
            late, loop = _late_name(node.body[0]), self._around(node, cst.For, cst.While)
            if late is not None and loop is not None:
                self._found.setdefault(loop, {})[node.body[0]] = late

    def leave_Module(self, original_node: cst.Module) -> None:  # noqa: N802, ARG002
        reads = {loop: self._reads_of(loop) for loop in self._found}
        self.loops = {loop: one for loop, one in reads.items() if one.names}

    def _reads_of(self, loop: cst.CSTNode) -> _LoopReads:
        """A list is put off only where its loop does nothing else with it."""
        place, function = self.get_metadata(PositionProvider, loop), self._around(loop, cst.FunctionDef)
        reads = _LoopReads()
        for statement, late in self._found[loop].items():
            own = [one for one in self._read if one.value == late.name]
            own = [one for one in own if self._around(one, cst.FunctionDef) is function]
            at = [self.get_metadata(PositionProvider, one).start.line for one in own]
            within = sum(place.start.line <= one <= place.end.line for one in at)
            if late.is_list and within > sum(one.name == late.name for one in self._found[loop].values()):
                continue
            reads.statements[statement] = reads.names[late.name] = late
            value = f"[{late.number}(one) for one in {late.name}]" if late.is_list else f"{late.number}({late.name})"
            if any(one > place.end.line for one in at) and f"{late.name} = {value}" not in reads.after:
                reads.after.append(f"{late.name} = {value}")
        return reads

    def _around(self, node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> cst.CSTNode | None:
        parent: cst.CSTNode | None = self.get_metadata(ParentNodeProvider, node, None)
        while parent is not None and not isinstance(parent, kinds):
            parent = self.get_metadata(ParentNodeProvider, parent, None)
        return parent


def _late_name(statement: cst.CSTNode) -> _LateName | None:
    match statement:
        case cst.AugAssign(target=cst.Name(value=name), operator=cst.AddAssign(), value=value):
            return _LateName(name, _number(value))
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value) if _is_item(value):
            return _LateName(name, _number(value))
        case cst.Expr(
            value=cst.Call(
                func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value="append")),
                args=[cst.Arg(value=value)],
            )
        ) if _is_item(value):
            return _LateName(name, _number(value), is_list=True)
    return None


def _number(value: cst.BaseExpression) -> str:
    return "int" if _counts(value) else "float"


def _is_item(value: cst.BaseExpression) -> bool:
    match value:
        case cst.Call(func=cst.Attribute(attr=cst.Name(value="item")), args=[]):
            return True
    return False


def _counts(value: cst.BaseExpression) -> bool:
    """Whether it is how often something is so: `(a == b).sum().item()`. That is a whole number."""
    match value:
        case cst.Call(
            func=cst.Attribute(
                value=cst.Call(func=cst.Attribute(value=compared, attr=cst.Name(value="sum")), args=[]),
                attr=cst.Name(value="item"),
            )
        ):
            return isinstance(compared, cst.Comparison) or (
                isinstance(compared, cst.Call)
                and isinstance(compared.func, cst.Attribute)
                and compared.func.attr.value in _COMPARING
            )
    return False


class _LateReads(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (ExpressionContextProvider,)

    def __init__(self, loops: dict[cst.CSTNode, _LoopReads]) -> None:
        super().__init__()
        self._loops = loops
        self._statements = {one: late for reads in loops.values() for one, late in reads.statements.items()}
        self._open: list[dict[str, _LateName]] = []
        self._within: list[cst.CSTNode] = []  # of these statements the one that is gone through

    def on_visit(self, node: cst.CSTNode) -> bool:
        if node in self._loops:
            self._open.append(self._loops[node].names)
        if node in self._statements:
            self._within.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        made = super().on_leave(original_node, updated_node)
        if original_node in self._statements:
            self._within.pop()
        if original_node in self._loops:
            self._open.pop()
            after = [cst.parse_statement(one) for one in self._loops[original_node].after]
            return cst.FlattenSentinel([made, *after]) if after else made
        return made

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        """Who looks at it meanwhile waits."""
        late = next((names[original_node.value] for names in self._open if original_node.value in names), None)
        reads = self.get_metadata(ExpressionContextProvider, original_node, None) is ExpressionContext.LOAD
        if late is None or late.is_list or not reads or self._within:
            return updated_node
        return cst.Call(cst.Name(late.number), [cst.Arg(updated_node)])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        if not self._within or not _is_item(original_node):
            return updated_node
        tensor = cst.ensure_type(updated_node.func, cst.Attribute).value
        if _counts(original_node):
            return tensor
        is_sum = isinstance(self._within[-1], cst.AugAssign)
        return _called(_called(tensor, "detach"), "double" if is_sum else "clone")


def _called(value: cst.BaseExpression, method: str) -> cst.Call:
    return cst.Call(cst.Attribute(value, cst.Name(method)))
