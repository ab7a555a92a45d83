"""Statements moved into functions of their own, and called where they stood."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider

from keepbusy.fixes.source.name_flow import Statement


@dataclass
class LiftedLines:
    """Statements of one block, one after the other, that are captured; and those between them that move."""

    captured: list[Statement]
    before: list[Statement] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
    """Those of the results that are tensors of which only values are read: no backward pass goes through them."""
    indices: set[str] = field(default_factory=set)
    """Those of the arguments that are arrays of indices, which a graph takes as tensors."""
    name: str = ""

    @property
    def lines(self) -> set[int]:
        return {statement.first for statement in (*self.captured, *self.before, *self.after)}


class LiftRegions(cst.CSTTransformer):
    """Moves regions into functions of their own, in front of the module's statement that they stand in."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, regions: Sequence[LiftedLines]) -> None:
        super().__init__()
        self._regions = {line: region for region in regions for line in region.lines}
        self._functions: list[tuple[LiftedLines, cst.FunctionDef]] = []

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802, ARG002
        return False  # there are no blocks in it

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:  # noqa: N802
        """The block with its regions called."""
        lines = [self.get_metadata(PositionProvider, statement).start.line for statement in original_node.body]
        by_line: dict[int, Any] = dict(zip(lines, updated_node.body, strict=True))
        body: list[Any] = []
        called: list[LiftedLines] = []
        for line, statement in by_line.items():
            region = self._regions.get(line)
            if region is None:
                body.append(statement)
            elif not any(region is earlier for earlier in called):
                called.append(region)
                body += self._call(region, by_line)
        return updated_node.with_changes(body=body)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        body: list[Any] = []
        apart = cst.EmptyLine(indent=False)
        functions = sorted(self._functions, key=lambda lifted: lifted[0].captured[0].first)
        for original, statement in zip(original_node.body, updated_node.body, strict=True):
            place = self.get_metadata(PositionProvider, original)
            within = range(place.start.line, place.end.line + 1)
            lifted = [function for region, function in functions if not region.lines.isdisjoint(within)]
            for function in lifted:
                body.append(function.with_changes(leading_lines=[apart, apart] if body else []))
            comments = [*statement.leading_lines]
            while lifted and comments and comments[0].comment is None:
                del comments[0]
            body.append(statement.with_changes(leading_lines=[apart, apart, *comments] if lifted else comments))
        return updated_node.with_changes(body=body)

    def _call(self, region: LiftedLines, by_line: dict[int, Any]) -> list[Any]:
        first, *others = [by_line[statement.first] for statement in region.captured]
        arguments = [f"torch.as_tensor({name})" if name in region.indices else name for name in region.arguments]
        arguments_text, results_text = ", ".join(arguments), ", ".join(region.results)
        names = _PlainNames(region)
        inner = [statement.visit(names) for statement in (first.with_changes(leading_lines=[]), *others)]
        inner += [cst.parse_statement(f"return {names.listed(region.results, region.values)}")] if results_text else []
        function = cst.parse_statement(
            f"@keepbusy.graph\ndef {region.name}({names.listed(region.arguments)}):\n    pass\n"
        )
        body = cst.IndentedBlock(inner)
        self._functions.append((region, cst.ensure_type(function, cst.FunctionDef).with_changes(body=body)))
        call = cst.parse_statement(f"{f'{results_text} = ' if results_text else ''}{region.name}({arguments_text})")
        call = cst.ensure_type(call, cst.SimpleStatementLine).with_changes(leading_lines=first.leading_lines)
        before, after = ([by_line[statement.first] for statement in moved] for moved in (region.before, region.after))
        return [*before, call, *after]


class _PlainNames(cst.CSTTransformer):
    """Within a captured function a name such as `self.loss` is one without a dot."""

    def __init__(self, region: LiftedLines) -> None:
        super().__init__()
        parts = [part for statement in region.captured for part in statement.parts]
        used_names = {part.id for part in parts if isinstance(part, ast.Name)} | {*region.arguments}
        self._names: dict[str, str] = {}
        for name in dict.fromkeys((*region.arguments, *region.results)):
            base, _, attribute = name.rpartition(".")
            self._names[name] = f"{base}_{attribute}" if base and attribute in used_names else attribute
            used_names.add(self._names[name])

    def listed(self, names: Iterable[str], detached: Set[str] = frozenset()) -> str:
        return ", ".join(f"{self._names[name]}.detach()" if name in detached else self._names[name] for name in names)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:  # noqa: N802
        match original_node:
            case cst.Attribute(value=cst.Name(value=base), attr=cst.Name(value=attribute)):
                name = self._names.get(f"{base}.{attribute}")
                return updated_node if name is None else cst.Name(name)
        return updated_node
