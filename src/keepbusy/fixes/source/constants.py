"""What a function makes of numbers alone, such as positions, labels and masks: it is the same at each call."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keepbusy.fixes.source.name_flow import imported_names, own_nodes

COUNTING = {"nonzero", "argwhere", "where", "masked_select", "unique", "bincount", "repeat_interleave", "one_hot"}
"""Functions that wait for the number of their results."""
_MAKERS = {"arange", "eye", "full", "linspace", "ones", "tril_indices", "triu_indices", "zeros"}
_OTHER_EACH_TIME = ("rand", "normal", "bernoulli", "multinomial", "poisson", "empty", "from_numpy")
_OF_NUMBERS = {"shape", "ndim", "device", "dtype", "size", "numel", "dim"}
"""Attributes and methods of a tensor that its values have no part in."""
_ANY_ARGUMENTS = {
    *("to", "cuda", "cpu", "type", "type_as", "view", "view_as", "reshape", "expand", "expand_as", "repeat"),
    *("squeeze", "unsqueeze", "permute", "transpose", "flatten"),
}
"""Methods whose arguments are no values."""
_ORDERS = {"arange", "permutation", "randperm"}
"""Functions of NumPy and PyTorch that number all samples."""
_SENDING_OR_READING = {"to", "cuda", "type", "item", "tolist", "cpu", "nonzero", "unique", "argwhere"}
_NUMBERS_OF_PYTHON = {"int", "float", "bool"}
_OF_PARTS = (
    *(ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp),
    *(ast.Tuple, ast.List, ast.Subscript, ast.Slice),
)
"""Expressions that are constants where their parts are."""


class ConstantsAtLine(NamedTuple):
    """How many values a statement sends to the GPU, reads of it or chooses by."""

    constant: int
    other: int


def constants_at(source: str) -> dict[int, ConstantsAtLine]:
    """For each line of a statement that does so with a constant. What was made before a loop is none in it. The indices
    of a minibatch count as one: they are sent over once, in front of a graph."""
    try:
        file = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return {}
    found = dict[int, ConstantsAtLine]()
    for region in (node for node in file if isinstance(node, ast.FunctionDef | ast.Module | ast.For | ast.While)):
        own, constants = own_nodes(region), _Constants(region)
        indices = minibatch_indices(own, file)
        inner = {id(node) for loop in own if isinstance(loop, ast.For | ast.While) for node in own_nodes(loop)}
        for statement in (node for node in own if isinstance(node, ast.stmt) and id(node) not in inner):
            lines, values = _values_used(statement)
            others = [value for value in values if not (isinstance(value, ast.Name) and value.id in indices)]
            constant = len(values) - len(others) + sum(map(constants.include_tensor, others))
            if constant:
                other = sum(not constants.include(value) for value in others)
                found |= dict.fromkeys(lines, ConstantsAtLine(constant, other))
    return found


def _values_used(statement: ast.stmt) -> tuple[set[int], list[ast.expr]]:
    """Its lines, without those of a block in it, and what it sends, reads or chooses by."""
    parts = [
        part for field in ast.iter_child_nodes(statement) if isinstance(field, ast.expr) for part in ast.walk(field)
    ]
    values = [value for part in parts for value in _used_by(part)]
    values += [statement.test] if isinstance(statement, ast.If | ast.Assert) else []
    return {part.lineno for part in parts if isinstance(part, ast.expr)}, values


def _used_by(part: ast.AST) -> Iterator[ast.expr]:
    match part:
        case ast.Subscript(slice=chosen):
            each = chosen.elts if isinstance(chosen, ast.Tuple) else [chosen]
            yield from (index for index in each if not isinstance(index, ast.Slice))
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _SENDING_OR_READING:
            if not _is_module(value):
                yield value
        case ast.Call(func=ast.Attribute(attr="tensor" | "as_tensor" | "new_tensor"), args=[_, *_]):
            yield part
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument, *_]):
            if name in COUNTING or name in _NUMBERS_OF_PYTHON:
                yield argument


def minibatch_indices(nodes: Sequence[ast.AST], file: Sequence[ast.AST]) -> set[str]:
    """Names that stand for parts of an order of all samples alone, as `chosen = order[begin : begin + 32]`, and by
    which these nodes do nothing but choose. `file`: where the order is made; without `torch`, none is sent over."""
    if not any(isinstance(node, ast.Import) and "torch" in imported_names(node) for node in file):
        return set()
    orders, parts = set[str](), list[str]()
    for node in file:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr=called))):
                orders |= {name} if called in _ORDERS else set()
    for node in nodes:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id=order), slice=ast.Slice())
            ):
                parts += [name] if order in orders else []
    choosing = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    used = [node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in choosing]
    return {name for name in parts if used.count(name) == parts.count(name)}  # where they are assigned


def _is_module(node: ast.expr) -> bool:
    return ast.unparse(node) in ("torch", "F", "torch.nn.functional", "functional")


class _Constants:
    """The names of a function, or of a loop's body, that stand for constants, and expressions of these."""

    def __init__(self, region: ast.AST) -> None:
        own, given = own_nodes(region), dict[str, list[ast.expr]]()
        for node in own:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AugAssign(target=ast.Name(id=name), value=value)
                ):
                    given.setdefault(name, []).append(value)
        stored = [node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self._names = {name for name, values in given.items() if stored.count(name) == len(values)}
        size = -1
        while len(self._names) != size:
            size = len(self._names)
            self._names = {name for name in self._names if all(map(self.include, given[name]))}
            self._names -= {name for node in own for name in self._written_by(node)}
        self._tensors = set[str]()
        while size != len(self._tensors):
            size = len(self._tensors)
            self._tensors |= {name for name in self._names if any(map(self.include_tensor, given[name]))}

    def _written_by(self, node: ast.AST) -> Iterator[str]:
        """Names of tensors to which it writes what is no constant: `mask[rows] = True`, `mask.scatter_(1, rows, 1)`."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr), args=values):
                if attr.endswith("_") and not all(map(self.include, values)):
                    yield name

    def include_tensor(self, node: ast.expr) -> bool:
        """Whether it is a constant, and a tensor."""
        makes = any(
            (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and _is_module(part.func.value))
            or (isinstance(part, ast.Name) and part.id in self._tensors)
            for part in ast.walk(node)
        )
        return makes and self.include(node)

    def include(self, node: ast.expr | None) -> bool:
        """Whether it is a constant."""
        match node:
            case None | ast.Constant():
                return True
            case ast.Name(id=name):
                return name in self._names
            case ast.Attribute(attr=attr, value=value):
                return attr in _OF_NUMBERS or self.include(value)
            case ast.Call():
                return self._is_made(node)
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.Starred(value=value):
                return self.include(value)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return isinstance(node, _OF_PARTS) and all(map(self.include, parts))

    def _is_made(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Name(id=name):
                return name in ("len", "range") or (name in _NUMBERS_OF_PYTHON and all(map(self.include, call.args)))
            case ast.Attribute(value=value, attr=attr) if _is_module(value):
                is_other = attr.startswith(_OTHER_EACH_TIME)
                return attr in _MAKERS or (not is_other and all(map(self.include, call.args)))
            case ast.Attribute(value=value, attr=attr):
                has_values = attr not in _OF_NUMBERS | _ANY_ARGUMENTS
                is_other = attr.startswith(_OTHER_EACH_TIME) or attr in ("uniform_", "exponential_")
                held = attr in _OF_NUMBERS or self.include(value)
                return held and not is_other and (not has_values or all(map(self.include, call.args)))
        return False
