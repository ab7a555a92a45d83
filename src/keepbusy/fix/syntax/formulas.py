"""What a line makes of values of the device: formulas that can be worked out later, from copies of these values.

A formula is made of reads (`x.item()`, `x.cpu().numpy()`, `start.elapsed_time(end)`), of numbers, and of arithmetic:
nothing that could have an effect, nothing that a later line could change, and nothing that fails only when it is worked
out. A number may be one that is itself to be worked out later: `value = loss.item()`, and `total += value * len(x)`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Set

_READING = {"item", "cpu", "tolist"}
"""Methods of a tensor that bring it home."""
_HOST_METHODS = {
    *("numpy", "astype", "float", "double", "half", "long", "int", "bool", "detach", "clone", "flatten"),
    *("squeeze", "argmax", "sum", "mean", "item", "tolist", "copy"),
}
"""Methods of what came home that only compute."""
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_NONE = frozenset[str]()


def is_formula(value: ast.expr, late: Set[str] = _NONE) -> bool:
    """`late`: names of numbers that are themselves worked out later."""
    return is_late(value, late) and _computes(value, late)


def is_late(value: ast.AST, late: Set[str]) -> bool:
    """Whether anything in it is not known yet."""
    return any(is_read(one) or (isinstance(one, ast.Name) and one.id in late) for one in ast.walk(value))


def is_number(value: ast.expr) -> bool:
    """Whether a formula gives numbers, which nobody can change: all that it reads is by `item` or `elapsed_time`."""
    reads = [one for one in ast.walk(value) if is_read(one)]
    within = {id(inner) for one in reads for inner in ast.walk(one) if inner is not one}
    last = [getattr(getattr(one, "func", None), "attr", "") for one in reads if id(one) not in within]
    return {*last} <= {"item", "elapsed_time"}


def is_read(node: ast.AST) -> bool:
    """Whether it waits for the device: a read, and what is computed of it at home."""
    return bool(sources(node))


def sources(node: ast.AST) -> list[ast.expr]:
    """What a read is of."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in _READING:
            return sources(value) or [value]
        case ast.Call(func=ast.Attribute(value=start, attr="elapsed_time"), args=[end], keywords=[]):
            return [start, end]
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=given, keywords=[]) if name in _HOST_METHODS:
            return sources(value) if all(map(_is_setting, given)) else []
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
    parts = sources(value)
    if parts:
        return not any(is_late(one, late) or _binds(one) for one in parts)
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
    return is_plain(value) and not is_late(value, late)


def _binds(value: ast.expr) -> bool:
    """Whether anything in it has an effect of its own."""
    return any(isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for one in ast.walk(value))


def is_plain(value: ast.expr) -> bool:
    """A number or a length: it may be worked out after what stands behind it. What is called might change it."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(left=left, right=right, op=operator):
            return isinstance(operator, (*_ARITHMETIC, ast.Mod, ast.FloorDiv)) and is_plain(left) and is_plain(right)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name()], keywords=[]):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="size"), args=[ast.Constant()], keywords=[]):
            return True
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant()):
            return True
    return False


class FormulaParts:
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
        if is_read(value):
            return self._read(value)
        match value:
            case ast.Constant():
                return value
            case ast.BinOp() if is_late(value, self._late):
                if isinstance(value.op, ast.Div):  # what cannot be divided by is told at once
                    self._others.append(ast.BinOp(ast.Constant(1.0), ast.Div(), copy.deepcopy(value.right)))
                value.left, value.right = self._place(value.left), self._place(value.right)
                return value
            case ast.UnaryOp() if is_late(value, self._late):
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
                inner = is_read(method.value)
                method.value = self._read(method.value) if inner else self._value(method.value)
        return value

    def _value(self, value: ast.expr) -> ast.expr:
        self._values.append(value)
        return ast.Name(f"v{len(self._values) - 1}", ast.Load())
