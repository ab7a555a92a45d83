"""A program's source as it is run: reads of the device whose number nobody looks at yet are put off.

What is rewritten, within a loop of a function or of the script itself:

    total += loss.item() * len(x)       a name that is only summed
    value = loss.item()                 a name that is looked at later, or now and then
    losses.append(loss.item())          a list of the function's own

Every other place that reads the name becomes a place that waits for it, so no code but this function's ever sees
anything but a number. A name that other functions can see is left alone: one that is declared global or nonlocal, that
an inner function uses, or a script's own name that any of its functions mentions. So is a list that was not made here,
or that goes anywhere while the loop runs. Lines keep their numbers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

NAME = "__keepbusy_late__"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_LOOKING = {"locals", "globals", "vars", "eval", "exec", "dir", "compile"}
_ONLY_READ = {"len", "sum", "min", "max", "print", "float", "str", "sorted", "mean", "fmean", "median", "average"}
"""Functions that keep nothing of a list that they are given."""
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def rewritten(tree: ast.Module, is_script: bool = True) -> tuple[ast.Module, list[int]]:
    """The program with its reads put off, and the lines at which that was done.

    Names of a module that others import are theirs, too; those of a script are its own, and hold numbers again as soon
    as a loop has ended.
    """
    lines: list[int] = []
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    if is_script:
        lines += _in_scope(tree, tree)
    for one in functions:
        lines += _in_scope(one, tree)
    return ast.fix_missing_locations(tree), sorted(lines)


def _in_scope(scope: ast.Module | ast.FunctionDef, tree: ast.Module) -> list[int]:
    own = list(_own_nodes(scope))
    if any(isinstance(one, ast.Name) and one.id in _LOOKING for one in own):
        return []
    shared = _shared_names(scope, tree)
    found: dict[str, list[ast.stmt]] = {}
    kinds: dict[str, type] = {}
    for statement in _statements_in_loops(scope):
        read = _read_of(statement)
        if read is None:
            continue
        name, is_list = read
        if name in shared:
            continue
        found.setdefault(name, []).append(statement)
        kinds[name] = list if is_list else kinds.get(name, float)
    lists = {name for name, kind in kinds.items() if kind is list}
    parents = {id(child): node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
    chosen = {
        name
        for name, statements in found.items()
        if not any(_is_looked_at_each_turn(name, one, parents) for one in statements)
        and (_is_private_list(name, statements, own, parents, scope) if name in lists else not _is_deleted(name, own))
    }
    if not chosen:
        return []
    statements = {id(one): name for name in chosen for one in found[name]}
    loops = {id(_outermost_loop(one, parents, scope)) for name in chosen for one in found[name]}
    _Rewriter(statements, chosen, loops if scope is tree else set()).rewrite(scope)
    return [one.lineno for name in chosen for one in found[name]]


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All but what stands in inner functions; comprehensions run at once and count as its own."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _own_nodes(child)


def _shared_names(scope: ast.Module | ast.FunctionDef, tree: ast.Module) -> set[str]:
    """What code outside of this scope's own can see."""
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    for inner in ast.walk(scope):
        if isinstance(inner, _SCOPES) and inner is not scope:
            names |= {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
    return names


def _statements_in_loops(scope: ast.AST, inside: bool = False) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _SCOPES):
            continue
        if inside and isinstance(child, ast.stmt):
            yield child
        yield from _statements_in_loops(child, inside or isinstance(child, _LOOPS))


def _read_of(statement: ast.stmt) -> tuple[str, bool] | None:
    """Of a statement that can be put off: the name that it is about, and whether that is a list."""
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if _is_formula(value):
            return name, False
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_formula(value):
            return name, False
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])
        ) if _is_formula(value):
            return name, True
    return None


def _is_formula(value: ast.expr) -> bool:
    return any(_reads(value)) and _is_arithmetic(value)


def _reads(value: ast.AST) -> Iterator[ast.Call]:
    """The `x.item()` in it, the outermost first."""
    for node in ast.walk(value):
        if _is_read(node):
            yield node  # type: ignore[misc]


def _is_read(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="item"), args=[], keywords=[]):
            return True
    return False


def _is_arithmetic(value: ast.expr) -> bool:
    """Numbers, reads and what is computed of them, in a tuple at most: nothing that could have an effect."""
    match value:
        case ast.Call() if _is_read(value):
            return not any(_is_read(one) for one in ast.walk(value.func)) and not any(map(_binds, ast.walk(value)))
        case ast.BinOp(left=left, right=right, op=operator):
            return isinstance(operator, _ARITHMETIC) and _is_arithmetic(left) and _is_arithmetic(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_arithmetic(operand)
        case ast.Tuple(elts=parts):
            return all(map(_is_arithmetic, parts))
    return not any(_reads(value)) and _is_plain(value)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)


def _is_plain(value: ast.expr) -> bool:
    """A number or a length: it may be worked out after what stands behind it. What is called might change it."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name()], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="size"), args=[ast.Constant()], keywords=[]):
            return True
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant()):
            return True
    return False


def _is_deleted(name: str, own: list[ast.AST]) -> bool:
    return any(isinstance(one, ast.Delete) and any(_names(one, name)) for one in own)


def _is_looked_at_each_turn(name: str, statement: ast.stmt, parents: dict[int, ast.AST]) -> bool:
    """Then the wait would come anyway, a moment later."""
    loop = parents[id(statement)]
    while not isinstance(loop, _LOOPS):
        loop = parents[id(loop)]
    return _looks(loop, name, statement)


def _looks(node: ast.AST, name: str, statement: ast.stmt) -> bool:
    """Whether each turn reads the name anyway, not only under a condition or in the statement itself."""
    if node is statement or isinstance(node, _SCOPES):
        return False
    if isinstance(node, ast.If):
        return _looks(node.test, name, statement)
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    return any(_looks(child, name, statement) for child in ast.iter_child_nodes(node))


def _names(node: ast.AST, name: str) -> Iterator[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name)


def _is_private_list(
    name: str, statements: list[ast.stmt], own: list[ast.AST], parents: dict[int, ast.AST], scope: ast.AST
) -> bool:
    """Made here as an empty list, and handed to nobody before the loops that fill it have ended."""
    filled = max(_outermost_loop(one, parents, scope).end_lineno or 0 for one in statements)
    made = False
    for node in own:
        if not isinstance(node, ast.Name) or node.id != name:
            continue
        if isinstance(node.ctx, ast.Load):
            if node.lineno <= filled and not _only_looks(node, parents):
                return False
        elif _is_empty_list(_assigned(node, parents)):
            made = True
        else:
            return False
    return made


def _outermost_loop(node: ast.AST, parents: dict[int, ast.AST], scope: ast.AST) -> ast.stmt:
    found: ast.stmt | None = None
    while node is not scope:
        node = parents[id(node)]
        if isinstance(node, _LOOPS):
            found = node
    assert found is not None
    return found


def _only_looks(node: ast.Name, parents: dict[int, ast.AST]) -> bool:
    """Whether it is certain that what reads the list here keeps nothing of it."""
    parent = parents[id(node)]
    match parent:
        case ast.Attribute(attr="append"):
            return isinstance(parents[id(parent)], ast.Call)
        case ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp(), ctx=ast.Load()):
            return value is node
        case ast.Subscript(value=value, slice=ast.Slice(), ctx=ast.Load()):
            return value is node  # a copy
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            return called in _ONLY_READ
        case ast.FormattedValue():
            return True
    return False


def _assigned(node: ast.Name, parents: dict[int, ast.AST]) -> ast.AST | None:
    """What the name is given, also as one of several."""
    parent = parents[id(node)]
    if isinstance(parent, ast.Assign) and node in parent.targets and len(parent.targets) == 1:
        return parent.value
    if isinstance(parent, ast.AnnAssign):
        return parent.value
    above = parents[id(parent)] if isinstance(parent, ast.Tuple) else None
    match parent, above:
        case ast.Tuple(elts=names), ast.Assign(targets=[_], value=ast.Tuple(elts=given)) if len(names) == len(given):
            return given[names.index(node)]
    return None


def _is_empty_list(value: ast.AST | None) -> bool:
    match value:
        case ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id="list"), args=[], keywords=[]):
            return True
    return False


class _Rewriter(ast.NodeTransformer):
    """Puts the chosen statements off, and makes every other place that reads their names wait."""

    def __init__(self, statements: dict[int, str], names: set[str], settled: set[int]) -> None:
        self._statements, self._chosen, self._settled = statements, names, settled

    def rewrite(self, scope: ast.AST) -> None:
        self.generic_visit(scope)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _SCOPES):
            return node  # uses none of these names; its own are its own
        if id(node) in self._statements:
            return self._put_off(node)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self._chosen:
            settled = ast.Assign([ast.Name(node.target.id, ast.Store())], self._value(node.target))
            return [ast.copy_location(settled, node), self.generic_visit(node)]
        if isinstance(node, ast.Name) and node.id in self._chosen and isinstance(node.ctx, ast.Load):
            return self._value(node)
        if id(node) in self._settled:
            return [self.generic_visit(node), *(self._settle(name, node) for name in sorted(self._chosen))]
        return self.generic_visit(node)

    def _settle(self, name: str, loop: ast.AST) -> ast.stmt:
        """After a loop of the script itself, whose names anybody may look up; it may never have come to name it."""
        (made,) = ast.parse(f"if {name!r} in globals(): {name} = {NAME}.value({name})").body
        for node in ast.walk(made):
            ast.copy_location(node, loop)
        return made

    def _value(self, node: ast.Name) -> ast.expr:
        read = ast.Name(node.id, ast.Load())
        return ast.copy_location(_call("value", [read]), node)

    def _put_off(self, node: ast.AST) -> ast.AST:
        """Names in the formula itself are read as everywhere."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                made: ast.stmt = ast.Assign(
                    [ast.Name(name, ast.Store())], _call("add", [ast.Name(name, ast.Load()), *self._formula(value)])
                )
            case ast.Assign(targets=targets, value=value):
                made = ast.Assign(targets, _call("keep", self._formula(value)))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[value])):
                made = ast.Expr(_call("append", [ast.Name(name, ast.Load()), *self._formula(value)]))
        return ast.copy_location(made, node)

    def _formula(self, value: ast.expr) -> list[ast.expr]:
        """As a function of the values read and of all else, which is worked out at once."""
        leaves: list[ast.expr] = []
        reads: list[bool] = []
        body = self._with_places(copy.deepcopy(value), leaves, reads)
        order = [at for at, read in enumerate(reads) if read] + [at for at, read in enumerate(reads) if not read]
        names = [f"v{at}" for at in order]
        arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        parts = [self.visit(leaf) for leaf in leaves]
        values = [parts[at] for at in order if reads[at]]
        others = [parts[at] for at in order if not reads[at]]
        return [
            ast.Lambda(arguments, body),
            ast.Tuple(values, ast.Load()),
            ast.Tuple(others, ast.Load()),
        ]

    def _with_places(self, value: ast.expr, leaves: list[ast.expr], reads: list[bool]) -> ast.expr:
        if isinstance(value, ast.Constant):
            return value
        if isinstance(value, ast.BinOp) and list(_reads(value)):
            value.left = self._with_places(value.left, leaves, reads)
            value.right = self._with_places(value.right, leaves, reads)
            return value
        if isinstance(value, ast.UnaryOp) and list(_reads(value)):
            value.operand = self._with_places(value.operand, leaves, reads)
            return value
        if isinstance(value, ast.Tuple):
            value.elts = [self._with_places(one, leaves, reads) for one in value.elts]
            return value
        is_read = _is_read(value)
        leaves.append(value.func.value if is_read else value)  # type: ignore[attr-defined]
        reads.append(is_read)
        return ast.Name(f"v{len(leaves) - 1}", ast.Load())


def _call(method: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(NAME, ast.Load()), method, ast.Load()), arguments, [])
