"""Reads of the device put off in the source: kept there while the loop runs, and read once it has ended.

    total += loss.item() * len(x)      total += loss.detach().double() * len(x), and total = float(total) after the loop
    correct += (y == z).sum().item()   correct += (y == z).sum()
    losses.append(loss.item())         losses.append(loss.detach().clone())
    value = loss.item()                value = loss.detach().clone()

Sums are made in double precision, as Python makes them, so they stay the same to the last bit. Where the loop looks at
the name now and then, `float(...)` stands around it. Only what `run --fix` would put off, too.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import (
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
)

from keepbusy.fix.syntax.rewriting import rewritten

_COMPARING = {"eq", "ne", "gt", "ge", "lt", "le", "isin", "isclose"}


def write_late_reads(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    _, safe = rewritten(ast.parse(wrapper.module.code), hands_on=False)
    survey = _Survey(lines & frozenset(safe))
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
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value) if is_item(value):
            return _LateName(name, _number(value))
        case cst.Expr(
            value=cst.Call(
                func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value="append")),
                args=[cst.Arg(value=value)],
            )
        ) if is_item(value):
            return _LateName(name, _number(value), is_list=True)
    return None


def _number(value: cst.BaseExpression) -> str:
    return "int" if _counts(value) else "float"


def is_item(value: cst.BaseExpression) -> bool:
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
        if not self._within or not is_item(original_node):
            return updated_node
        tensor = cst.ensure_type(updated_node.func, cst.Attribute).value
        if _counts(original_node):
            return tensor
        is_sum = isinstance(self._within[-1], cst.AugAssign)
        return _called(_called(tensor, "detach"), "double" if is_sum else "clone")


def _called(value: cst.BaseExpression, method: str) -> cst.Call:
    return cst.Call(cst.Attribute(value, cst.Name(method)))
