"""Gradients that travel with the last micro-batch, by DDP's own switch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
from libcst import matchers as m

from keepbusy.fixes.source.at_lines import AtLines, dotted, visiting

_DDP = m.OneOf(*(m.Name(name) for name in ("DDP", "DistributedDataParallel")))
_WRAPS = m.Call(func=m.OneOf(_DDP, m.Attribute(attr=_DDP)))
_SYNC_SETTINGS = m.OneOf(m.Name("require_backward_grad_sync"), m.Name("no_sync"))
_BACKWARD = m.Call(func=m.Attribute(attr=m.Name("backward")))


class _LastTravels(AtLines):
    """`model.require_backward_grad_sync = (i + 1) % 4 == 0`, DDP's own switch, at the top of a loop."""

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__(lines)
        self._models = set[str]()
        self._last_ones: dict[int, str] = {}  # of each loop, by its line, which is the last before an optimizer steps

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        wraps = m.findall(node, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=_WRAPS))
        self._models = {dotted(cst.ensure_type(assignment, cst.Assign).targets[0].target) for assignment in wraps}
        loops = [loop for loop in ast.walk(ast.parse(node.code)) if isinstance(loop, ast.For)]
        self._last_ones = {loop.lineno: ast.unparse(last) for loop in loops if (last := _last_one(loop))}

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        trains = bool(m.findall(original_node, _BACKWARD)) and not m.findall(original_node, _SYNC_SETTINGS)
        if not self._models or not self.stands(original_node) or not trains:
            return updated_node
        models = sorted(
            {dotted(cst.ensure_type(call, cst.Call).func) for call in m.findall(original_node, m.Call())} & self._models
        )
        last = self._last_ones.get(self.line(original_node), "")
        if len(models) != 1 or not last or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        self._models.clear()  # the innermost loop comes first, and is the only one
        line = cst.parse_statement(f"{models[0]}.require_backward_grad_sync = {last}")
        return updated_node.with_deep_changes(updated_node.body, body=[line, *updated_node.body.body])


def _last_one(loop: ast.For) -> ast.expr | None:
    """A condition that is true when an optimizer steps after this iteration; None if the loop does not tell."""
    for statement in loop.body:
        if isinstance(statement, ast.If) and not statement.orelse and _calls(statement.body, "step"):
            return (
                None
                if _names(statement.test, ast.Load) & _names(ast.Module(loop.body, []), ast.Store)
                else statement.test
            )
    if _calls(loop.body, "step"):
        return None
    text = ""
    match loop.target, loop.iter:
        case ast.Name(id=number), ast.Call(func=ast.Name(id="range"), args=[count]):
            text = f"{number} == {ast.unparse(count)} - 1"
        case ast.Tuple(elts=[ast.Name(id=number), *_]), ast.Call(
            func=ast.Name(id="enumerate"), args=[ast.Name(id=several)]
        ):
            text = f"{number} == len({several}) - 1"
    return ast.parse(text, mode="eval").body if text else None


def _calls(body: Sequence[ast.AST], name: str) -> list[ast.Call]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    return [call for call in nodes if isinstance(call, ast.Call) and _called(call) == name]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}


write_last_travels = visiting(_LastTravels)
