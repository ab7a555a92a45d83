"""Gradients that travel between ranks once a step: written into a loop over micro-batches of a DDP model.

for i, (x, y) in enumerate(loader):
    model.require_backward_grad_sync = (i + 1) % 4 == 0      # this line is put in
    ...
    if (i + 1) % 4 == 0:
        optimizer.step()
"""

from __future__ import annotations

import ast

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from keepbusy.fix.syntax.last_turns import last_turn

_DDP = m.OneOf(*(m.Name(name) for name in ("DDP", "DistributedDataParallel")))
_WRAPS = m.Call(func=m.OneOf(_DDP, m.Attribute(attr=_DDP)))
_SETTLED = m.OneOf(m.Name("require_backward_grad_sync"), m.Name("no_sync"))


def write_last_travels(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    wraps = m.findall(wrapper.module, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=_WRAPS))
    models = {cst.ensure_type(cst.ensure_type(one, cst.Assign).targets[0].target, cst.Name).value for one in wraps}
    loops = [one for one in ast.walk(ast.parse(wrapper.module.code)) if isinstance(one, ast.For)]
    change = _LastTravels(lines, models, {one.lineno: ast.unparse(last) for one in loops if (last := last_turn(one))})
    module = wrapper.visit(change)
    return module if change.done else None


class _LastTravels(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, lines: frozenset[int], models: set[str], last_turns: dict[int, str]) -> None:
        """`last_turns`: of each loop, by its line, which turn is the last before an optimizer steps."""
        super().__init__()
        self._lines, self._models, self._last_turns, self.done = lines, models, last_turns, False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        place = self.get_metadata(PositionProvider, original_node)
        stands = any(place.start.line <= line <= place.end.line for line in self._lines)
        if self.done or not stands or m.findall(original_node, _SETTLED):
            return updated_node
        self.done = True  # the innermost loop comes first
        called = {cst.ensure_type(one.func, cst.Name).value for one in m.findall(original_node, m.Call(func=m.Name()))}  # type: ignore[attr-defined]
        models, last = sorted(called & self._models), self._last_turns.get(place.start.line, "")
        if len(models) != 1 or not last or not isinstance(updated_node.body, cst.IndentedBlock):
            self.done = False
            return updated_node
        line = cst.parse_statement(f"{models[0]}.require_backward_grad_sync = {last}")
        return updated_node.with_deep_changes(updated_node.body, body=[line, *updated_node.body.body])
