"""Which names statements read and store, and in which order: what a function needs to be given, and has to return."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property


class Uses(ast.NodeVisitor):
    """Names that code reads and stores, attributes among them: `self.rate`."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.loads: dict[str, None] = {}
        self.stores: dict[str, None] = {}
        self.called: set[str] = set()
        self.attributes: set[str] = set()
        """The first names of attributes and items that are stored."""
        self.written: set[str] = set()
        """The first names of what a method such as `add_` writes to."""
        self._bound = frozenset[str]()
        """Variables of the comprehensions and lambdas around."""
        for node in nodes:
            self.visit(node)

    def all_written(self) -> set[str]:
        """Names that are stored, and those of objects that are written to."""
        return {*self.stores} | self.attributes | self.written | {name.partition(".")[0] for name in self.stores}

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self._bound:
            (self.loads if isinstance(node.ctx, ast.Load) else self.stores)[node.id] = None

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.attributes.add(base_name(node))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit_Attribute(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.loads[node.target.id] = self.stores[node.target.id] = None
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self.called.add(node.func.attr)
            if node.func.attr.endswith("_"):
                self.written.add(base_name(node.func))
        else:
            self.called.add(base_name(node.func))
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        names = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self._visit_with({name.arg for name in names}, [node.body])

    def generic_visit(self, node: ast.AST) -> None:
        parts = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            targets = [part for generator in node.generators for part in ast.walk(generator.target)]
            self._visit_with({part.id for part in targets if isinstance(part, ast.Name)}, parts)
        else:
            self._visit_with(set(), parts)

    def _visit_with(self, bound: set[str], parts: Iterable[ast.AST]) -> None:
        outer, self._bound = self._bound, self._bound | bound
        for part in parts:
            self.visit(part)
        self._bound = outer


class Flow(ast.NodeVisitor):
    """What statements need from before, and what they store, in the order in which they run."""

    def __init__(self, nodes: Iterable[ast.stmt]) -> None:
        self.needed: dict[str, None] = {}
        self.stored: dict[str, None] = {}
        self.defined: set[str] = set()
        """Names that are stored in any case."""
        self._visit_all(nodes)

    def visit_If(self, node: ast.If) -> None:
        self._read(node.test)
        before = set(self.defined)
        self._visit_all(node.body)
        after, self.defined = self.defined, before
        self._visit_all(node.orelse)
        if _goes_on(node.body):
            self.defined = self.defined & after if _goes_on(node.orelse) else after

    def visit_For(self, node: ast.For) -> None:
        self._read(node.iter)
        before = set(self.defined)
        self._write([node.target])
        self._read(node.target)
        self._visit_all(node.body)
        self.defined = set(before)
        self._visit_all(node.orelse)
        self.defined = before

    def visit_With(self, node: ast.With) -> None:
        self._read(*[item.context_expr for item in node.items])
        self._write([item.optional_vars for item in node.items if item.optional_vars])
        self._visit_all(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        before = set(self.defined)
        self._visit_all([*node.body, *node.orelse])
        after, self.defined = self.defined, before
        for handler in node.handlers:
            self.defined = set(before)
            if handler.type is not None:
                self._read(handler.type)
            self._visit_all(handler.body)
            after = after & self.defined if _goes_on(handler.body) else after
        self.defined = after
        self._visit_all(node.finalbody)

    def generic_visit(self, node: ast.AST) -> None:
        self._read(node)
        if isinstance(node, ast.While | ast.Match | ast.FunctionDef | ast.ClassDef):
            self.stored |= Uses([node]).stores  # perhaps
        else:
            self._write([node])

    def _visit_all(self, nodes: Iterable[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _read(self, *nodes: ast.AST) -> None:
        self.needed |= {name: None for name in Uses(nodes).loads if name not in self.defined}

    def _write(self, nodes: Iterable[ast.AST]) -> None:
        names = Uses(nodes).stores
        self.stored |= names
        self.defined |= set(names)


def surely_read(node: ast.AST) -> set[str]:
    """Names that are read whatever happens."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            return {name}
        case ast.IfExp(test=first) | ast.If(test=first) | ast.While(test=first) | ast.For(iter=first):
            return surely_read(first)
        case ast.BoolOp(values=[first, *_]):
            return surely_read(first)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return surely_read(node.generators[0].iter)
        case ast.AugAssign(target=ast.Name(id=name)):
            return {name} | surely_read(node.value)
        case ast.Lambda() | ast.FunctionDef() | ast.Try():
            return set()
    return {name for child in ast.iter_child_nodes(node) for name in surely_read(child)}


def _goes_on(block: Sequence[ast.stmt]) -> bool:
    """Whether what follows it may run after it."""
    return not block or not isinstance(block[-1], ast.Raise | ast.Return | ast.Continue | ast.Break)


class Statement:
    """A line's statement, or the statements that share a line."""

    def __init__(self, nodes: Sequence[ast.stmt]) -> None:
        self.nodes = nodes
        self.first = nodes[0].lineno
        self.last = max(node.end_lineno or node.lineno for node in nodes)

    def has(self, lines: Iterable[int]) -> bool:
        return any(self.first <= line <= self.last for line in lines)

    @cached_property
    def parts(self) -> list[ast.AST]:
        return [part for node in self.nodes for part in ast.walk(node)]

    @cached_property
    def uses(self) -> Uses:
        return Uses(self.nodes)

    @property
    def called(self) -> set[str]:
        """Functions and methods that it calls, by their last names."""
        return self.uses.called


def statements_of(block: Sequence[ast.stmt]) -> list[Statement]:
    by_line: dict[int, list[ast.stmt]] = {}
    for node in block:
        by_line.setdefault(node.lineno, []).append(node)
    return [Statement(nodes) for nodes in by_line.values()]


def base_name(node: ast.AST) -> str:
    """The name at which it begins: `a` of `a.b[0].c()`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def own_nodes(scope: ast.AST) -> list[ast.AST]:
    """Everything in it, without what stands in other functions, but with these functions."""
    nodes: list[ast.AST] = []
    for part in ast.iter_child_nodes(scope):
        nodes.append(part)
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            nodes += own_nodes(part)
    return nodes


def shared_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Those that are declared global or nonlocal."""
    return {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def local_names(function: ast.AST) -> dict[str, None]:
    """A function's parameters, then the names that it gives a value; none of a module."""
    if not isinstance(function, ast.FunctionDef):
        return {}
    own = own_nodes(function)
    names = [*parameters_of(function), *[name for node in own for name in _bound_by(node)]]
    shared = shared_names(own)
    return {name: None for name in names if name not in shared}


def parameters_of(function: ast.FunctionDef) -> list[str]:
    args = function.args
    parameters = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [parameter.arg for parameter in parameters if parameter is not None]


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Names that it gives a value, in the function that it stands in."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from imported_names(node)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [(name.asname or name.name).partition(".")[0] for name in node.names]


def free_names(function: ast.AST) -> set[str]:
    """Names that it reads of the code around it."""
    parts = [*ast.walk(function)]
    given = {part.arg for part in parts if isinstance(part, ast.arg)}
    uses = Uses([function])
    return {*uses.loads} - given - ({*uses.stores} - shared_names(parts))
