"""A program's source as it is run: reads of the device whose result nobody looks at yet are put off.

What is rewritten, within a loop of a function or of the script itself:

    total += loss.item() * len(x)               a name that is only summed
    scores[label] += score.item()               numbers in a list of the function's own
    value = loss.item()                         a name that is looked at later, or now and then
    kept = {name: one.cpu() for name, one ...}  a list or a dictionary made at once
    losses.append(loss.item())                  a list of the function's own
    total += value * len(x)                     what is made of such a value

Every other place that reads the name becomes a place that waits for it, so no code but this function's ever sees
anything but a number. A name that other functions can see is left alone: one that is declared global or nonlocal, that
an inner function uses, or a script's own name that any of its functions mentions. So is a list that was not made here,
or that goes anywhere while the loop runs. Lines keep their numbers.

What is worked out later is a formula: reads (`x.item()`, `x.cpu().numpy()`, `start.elapsed_time(end)`), numbers, and
arithmetic; nothing that could have an effect, nothing that a later line could change, and nothing that fails only when
it is worked out. It is worked out from copies of the values. A number in it may itself be known only later.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

NAME = "__keepbusy_late__"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_LOOKING = {"locals", "globals", "vars", "eval", "exec", "dir", "compile"}
_ONLY_READ = {
    *("len", "sum", "min", "max", "print", "float", "str", "sorted", "mean", "fmean", "median", "average"),
    *("list", "tuple"),
}
"""Functions that keep nothing of a list that they are given."""
_READING = {"item", "cpu", "tolist"}
"""Methods of a tensor that bring it home."""
_HOST_METHODS = {
    *("numpy", "astype", "float", "double", "half", "long", "int", "bool", "detach", "clone", "flatten"),
    *("squeeze", "argmax", "sum", "mean", "item", "tolist", "copy"),
}
"""Methods of what came home that only compute."""
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_NONE = frozenset[str]()


class ReadsAtOnce:
    """What rewritten lines call while nothing is put off: before PyTorch is imported, and where there is no GPU."""

    def keep(self, formula: Callable[..., Any], values: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
        return formula(*values, *others)

    def add(self, total: Any, *formula: Any) -> Any:
        total += self.keep(*formula)
        return total

    def add_at(self, held: Any, place: Any, *formula: Any) -> None:
        held[place] += self.keep(*formula)

    def append(self, held: Any, *formula: Any) -> None:
        held.append(self.keep(*formula))

    def __call__(self, name: Any) -> Any:
        return name


def rewritten(tree: ast.Module, is_script: bool = True, hands_on: bool = True) -> tuple[ast.Module, list[int]]:
    """The program with its reads put off, and the lines at which that was done.

    Names of a module that others import are theirs, too; those of a script are its own, and hold numbers again as soon
    as a loop has ended. `hands_on`: what is made of a value that was put off is put off as well.
    """
    lines = [line for scope in scopes_of(tree, is_script) for line in scope.rewrite(hands_on)]
    return ast.fix_missing_locations(tree), sorted(lines)


def scopes_of(tree: ast.Module, is_script: bool) -> list[Scope]:
    """Every function, and of a script its own code, too."""
    nodes = list(ast.walk(tree))
    scopes: list[ast.Module | ast.FunctionDef] = [one for one in nodes if isinstance(one, ast.FunctionDef)]
    declared = {name for one in nodes if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    return [Scope(one, tree, declared) for one in ([tree, *scopes] if is_script else scopes)]


@dataclass(frozen=True)
class _LateStatement:
    """A statement that can be put off, and the name that it is about."""

    statement: ast.stmt
    name: str
    into_list: bool = False
    is_number: bool = False
    """Whether all that it makes of its name is a number that other statements may be made of."""


class Scope:
    """The code of one function, or of the script itself."""

    def __init__(self, scope: ast.Module | ast.FunctionDef, tree: ast.Module, declared: Set[str]) -> None:
        """`declared`: names that the source says are global or nonlocal anywhere."""
        self.node = scope
        self._tree, self._declared = tree, declared
        self.own = list(_own_nodes(scope))

    def rewrite(self, hands_on: bool) -> list[int]:
        """Put off what can be; the lines at which that was done."""
        if not any(map(_is_read, self.own)) or self.is_looked_into():  # most of a large source reads nothing
            return []
        self._parents = {id(child): node for node in ast.walk(self.node) for child in ast.iter_child_nodes(node)}
        chosen = self._chosen(hands_on)
        deferrals = [one for found in chosen.values() for one in found]
        if deferrals:
            loops = {id(self._outermost_loop(one.statement)) for one in deferrals}
            settled = loops if self.node is self._tree else set()
            _Rewriter(self._deferred, set(chosen), self._numbers, settled).rewrite(self.node)
        return [one.statement.lineno for one in deferrals]

    def _chosen(self, hands_on: bool) -> dict[str, list[_LateStatement]]:
        """By their names what may wait: a name that may not takes along what is made of it."""
        refused = self._shared_names()
        while True:
            chosen, self._numbers = self._deferrals(refused, hands_on)
            self._deferred = {id(one.statement) for found in chosen.values() for one in found}
            in_vain = {name for name, found in chosen.items() if not self._may_wait(name, found)}
            if not in_vain:
                return chosen
            refused |= in_vain

    def _deferrals(self, refused: Set[str], hands_on: bool) -> tuple[dict[str, list[_LateStatement]], set[str]]:
        """By their names, and those of these that are numbers: what is made of them can be put off as well."""
        numbers = set[str]()
        while True:
            by_name: dict[str, list[_LateStatement]] = {}
            for statement in _statements_in_loops(self.node):
                one = _deferral(statement, numbers)
                if one is not None and one.name not in refused:
                    by_name.setdefault(one.name, []).append(one)
            known = {name for name, found in by_name.items() if hands_on and all(one.is_number for one in found)}
            if known <= numbers:
                return by_name, numbers
            numbers |= known

    def is_looked_into(self) -> bool:
        """Whether its names may be asked for by what is no name in the source."""
        return any(isinstance(one, ast.Name) and one.id in _LOOKING for one in self.own)

    def _shared_names(self) -> set[str]:
        """What code outside of this scope's own can see."""
        inner = [one for one in ast.walk(self.node) if isinstance(one, _SCOPES) and one is not self.node]
        return {name for one in inner for name in _used_in(one)} | self._declared

    def _may_wait(self, name: str, deferrals: list[_LateStatement]) -> bool:
        if any(self._is_looked_at_each_turn(name, one.statement) for one in deferrals):
            return False
        if any(one.into_list for one in deferrals):
            return self._is_private_list(name, deferrals)
        return not any(isinstance(one, ast.Delete) and any(_names(one, name)) for one in self.own)

    def _is_looked_at_each_turn(self, name: str, statement: ast.stmt) -> bool:
        """Then the wait would come anyway, a moment later."""
        loop = self._parents[id(statement)]
        while not isinstance(loop, _LOOPS):
            loop = self._parents[id(loop)]
        return _looks(loop, name, self._deferred if name in self._numbers else {id(statement)})

    def _is_private_list(self, name: str, deferrals: list[_LateStatement]) -> bool:
        """Made here, of numbers at most, and handed to nobody before the loops that fill it have ended."""
        filled = max(self._outermost_loop(one.statement).end_lineno or 0 for one in deferrals)
        targets = {id(one.statement.target) for one in deferrals if isinstance(one.statement, ast.AugAssign)}
        made = False
        for node in self.own:
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if isinstance(node.ctx, ast.Load):
                is_target = id(self._parents[id(node)]) in targets
                if node.lineno <= filled and not is_target and not self._only_looks(node):
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


def _deferral(statement: ast.stmt, late: Set[str]) -> _LateStatement | None:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if _is_formula(value, late):
            return _LateStatement(statement, name)
        case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name), slice=place), op=ast.Add(), value=value) if (
            _is_plain(place) and _is_formula(value, late)
        ):
            return _LateStatement(statement, name, into_list=True)
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_formula(value, late):
            return _LateStatement(statement, name, is_number=_is_number(value))
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _element(value) is not None:
            return _LateStatement(statement, name)
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value], keywords=[])
        ) if _is_formula(value, late):
            return _LateStatement(statement, name, into_list=True)
    return None


def _element(value: ast.expr) -> ast.expr | None:
    """The formula of which a list or a dictionary is made at once."""
    match value:
        case ast.ListComp(elt=element) | ast.DictComp(value=element) if _is_formula(element):
            return element
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


def _looks(node: ast.AST, name: str, deferred: Set[int]) -> bool:
    """Whether each turn reads the name anyway, not only under a condition or in these statements."""
    if id(node) in deferred or isinstance(node, _SCOPES):
        return False
    if isinstance(node, ast.If):
        return _looks(node.test, name, deferred)
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    return any(_looks(child, name, deferred) for child in ast.iter_child_nodes(node))


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


class _Rewriter(ast.NodeTransformer):
    """Puts the chosen statements off, and makes every other place that reads their names wait."""

    def __init__(self, statements: set[int], names: set[str], numbers: set[str], settled: set[int]) -> None:
        self._statements, self._chosen, self._numbers, self._settled = statements, names, numbers, settled

    def rewrite(self, scope: ast.AST) -> None:
        self.generic_visit(scope)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _SCOPES):
            return node  # uses none of these names; its own are its own
        if id(node) in self._statements:
            return ast.copy_location(self._put_off(node), node)
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
        (made,) = ast.parse(f"if {name!r} in globals(): {name} = {NAME}({name})").body
        for node in ast.walk(made):
            ast.copy_location(node, loop)
        return made

    def _value(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(NAME, ast.Load()), [ast.Name(node.id, ast.Load())], []), node)

    def _put_off(self, node: ast.AST) -> ast.AST:
        """Names in the formula itself are read as everywhere."""
        match node:
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                total = [ast.Name(name, ast.Load()), *self._formula(value)]
                return ast.Assign([ast.Name(name, ast.Store())], _call("add", total))
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name), slice=place), value=value):
                return ast.Expr(_call("add_at", [ast.Name(name, ast.Load()), self.visit(place), *self._formula(value)]))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[value])):
                return ast.Expr(_call("append", [ast.Name(name, ast.Load()), *self._formula(value)]))
            case ast.Assign(targets=targets, value=value):
                return ast.Assign(targets, self._kept(value))
        raise AssertionError(node)

    def _kept(self, value: ast.expr) -> ast.expr:
        if _element(value) is None:
            return _call("keep", self._formula(value))
        match value:
            case ast.ListComp():
                value.elt = _call("keep", self._formula(value.elt))
            case ast.DictComp():
                value.key, value.value = self.visit(value.key), _call("keep", self._formula(value.value))
        for one in value.generators:  # type: ignore[attr-defined]
            self.generic_visit(one)
        return value

    def _formula(self, value: ast.expr) -> list[ast.expr]:
        formula, *given = _FormulaParts(copy.deepcopy(value), self._numbers).arguments()
        for part in given:
            part.elts = [one if self._is_handed_on(one) else self.visit(one) for one in part.elts]
        return [formula, *given]

    def _is_handed_on(self, value: ast.expr) -> bool:
        """Whether it may still be unknown when it gets there."""
        return isinstance(value, ast.Name) and value.id in self._numbers


def _call(method: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(NAME, ast.Load()), method, ast.Load()), [*arguments], [])


def _is_formula(value: ast.expr, late: Set[str] = _NONE) -> bool:
    """`late`: names of numbers that are themselves worked out later."""
    return _is_late(value, late) and _computes(value, late)


def _is_late(value: ast.AST, late: Set[str]) -> bool:
    """Whether anything in it is not known yet."""
    return any(_is_read(one) or (isinstance(one, ast.Name) and one.id in late) for one in ast.walk(value))


def _is_number(value: ast.expr) -> bool:
    """Whether a formula gives numbers, which nobody can change: all that it reads is by `item` or `elapsed_time`."""
    reads = [one for one in ast.walk(value) if _is_read(one)]
    within = {id(inner) for one in reads for inner in ast.walk(one) if inner is not one}
    last = [getattr(getattr(one, "func", None), "attr", "") for one in reads if id(one) not in within]
    return {*last} <= {"item", "elapsed_time"}


def _is_read(node: ast.AST) -> bool:
    """Whether it waits for the device: a read, and what is computed of it at home."""
    return bool(_sources(node))


def _sources(node: ast.AST) -> list[ast.expr]:
    """What a read is of."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in _READING:
            return _sources(value) or [value]
        case ast.Call(func=ast.Attribute(value=start, attr="elapsed_time"), args=[end], keywords=[]):
            return [start, end]
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=given, keywords=[]) if name in _HOST_METHODS:
            return _sources(value) if all(map(_is_setting, given)) else []
    return []


def _is_setting(value: ast.expr) -> bool:
    """A constant, or a name such as `torch.uint8`."""
    match value:
        case ast.Constant() | ast.UnaryOp(operand=ast.Constant()):
            return True
        case ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy")):
            return True
    return False


def _computes(value: ast.expr, late: Set[str]) -> bool:
    parts = _sources(value)
    if parts:
        return not any(_is_late(one, late) or _binds(one) for one in parts)
    match value:
        case ast.Name():
            return True
        case ast.BinOp():
            return _combines(value, late)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _computes(operand, late)
        case ast.Tuple(elts=elements):
            return all(_computes(one, late) for one in elements)
    return _is_known(value, late)


def _combines(value: ast.BinOp, late: Set[str]) -> bool:
    """What may fail is left to the line itself: to divide by what is not known yet, or to raise to any power."""
    match value.op, value.right:
        case ast.Div(), right:
            return _computes(value.left, late) and _is_known(right, late)
        case ast.Pow(), ast.Constant(value=1 | 2 | 0.5):
            return _computes(value.left, late)
        case ((ast.Add() | ast.Sub() | ast.Mult()), right):
            return _computes(value.left, late) and _computes(right, late)
    return _is_known(value, late)


def _is_known(value: ast.expr, late: Set[str]) -> bool:
    return _is_plain(value) and not _is_late(value, late)


def _binds(value: ast.expr) -> bool:
    """Whether anything in it has an effect of its own."""
    return any(isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for one in ast.walk(value))


def _is_plain(value: ast.expr) -> bool:
    """A number or a length: it may be worked out after what stands behind it. What is called might change it."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(left=left, right=right, op=operator):
            return isinstance(operator, (*_ARITHMETIC, ast.Mod, ast.FloorDiv)) and _is_plain(left) and _is_plain(right)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name()], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="size"), args=[ast.Constant()], keywords=[]):
            return True
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant()):
            return True
    return False


class _FormulaParts:
    """A formula with a parameter in place of each value that it reads, and of each plain part."""

    def __init__(self, value: ast.expr, late: Set[str]) -> None:
        self._late = late
        self._values: list[ast.expr] = []
        self._others: list[ast.expr] = []
        self._body = self._place(value)

    def arguments(self) -> tuple[ast.Lambda, ast.Tuple, ast.Tuple]:
        """The formula as a function, the values that it reads, and the rest: these are worked out at once."""
        given = [*self._named("v", self._values), *self._named("o", self._others)]
        parameters = ast.arguments([], given, None, [], [], None, [])
        values, others = ast.Tuple(self._values, ast.Load()), ast.Tuple(self._others, ast.Load())
        return ast.Lambda(parameters, self._body), values, others

    @staticmethod
    def _named(letter: str, parts: list[ast.expr]) -> Iterator[ast.arg]:
        return (ast.arg(f"{letter}{at}") for at, _ in enumerate(parts))

    def _place(self, value: ast.expr) -> ast.expr:
        if _is_read(value):
            return self._read(value)
        match value:
            case ast.Constant():
                return value
            case ast.BinOp() if _is_late(value, self._late):
                if isinstance(value.op, ast.Div):  # what cannot be divided by is told at once
                    self._others.append(ast.BinOp(ast.Constant(1.0), ast.Div(), copy.deepcopy(value.right)))
                value.left, value.right = self._place(value.left), self._place(value.right)
                return value
            case ast.UnaryOp() if _is_late(value, self._late):
                value.operand = self._place(value.operand)
                return value
            case ast.Tuple():
                value.elts = [self._place(one) for one in value.elts]
                return value
        self._others.append(value)
        return ast.Name(f"o{len(self._others) - 1}", ast.Load())

    def _read(self, value: ast.expr) -> ast.expr:
        """The calls stay, and get a copy of what they read."""
        match value:
            case ast.Call(func=ast.Attribute(attr="elapsed_time") as method, args=[end]):
                value.args = [self._value(end)]
                method.value = self._value(method.value)
            case ast.Call(func=ast.Attribute() as method):
                inner = _is_read(method.value)
                method.value = self._read(method.value) if inner else self._value(method.value)
        return value

    def _value(self, value: ast.expr) -> ast.expr:
        self._values.append(value)
        return ast.Name(f"v{len(self._values) - 1}", ast.Load())
