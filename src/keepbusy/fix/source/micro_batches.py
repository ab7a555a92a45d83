"""Gradients that travel between ranks once a step: written into a loop over micro-batches of a DDP model.

for i, (x, y) in enumerate(loader):
    model.require_backward_grad_sync = (i + 1) % 4 == 0      # this line is put in
    ...
    if (i + 1) % 4 == 0:
        optimizer.step()
"""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

_DDP = m.OneOf(*(m.Name(name) for name in ("DDP", "DistributedDataParallel")))
_WRAPS = m.Call(func=m.OneOf(_DDP, m.Attribute(attr=_DDP)))
_STEPS = m.Call(func=m.Attribute(attr=m.Name("step")), args=[])
_SETTLED = m.OneOf(m.Name("require_backward_grad_sync"), m.Name("no_sync"))


def write_last_travels(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    wraps = m.findall(wrapper.module, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=_WRAPS))
    models = {cst.ensure_type(cst.ensure_type(one, cst.Assign).targets[0].target, cst.Name).value for one in wraps}
    change = _LastTravels(lines, models)
    module = wrapper.visit(change)
    return module if change.done else None


class _LastTravels(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, lines: frozenset[int], models: set[str]) -> None:
        super().__init__()
        self._lines, self._models, self.done = lines, models, False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        place = self.get_metadata(PositionProvider, original_node)
        stands = any(place.start.line <= line <= place.end.line for line in self._lines)
        if self.done or not stands or m.findall(original_node, _SETTLED):
            return updated_node
        self.done = True  # the innermost loop comes first
        called = {cst.ensure_type(one.func, cst.Name).value for one in m.findall(original_node, m.Call(func=m.Name()))}  # type: ignore[attr-defined]
        models, last = sorted(called & self._models), _last_turn(original_node)
        if len(models) != 1 or not last or not isinstance(updated_node.body, cst.IndentedBlock):
            self.done = False
            return updated_node
        line = cst.parse_statement(f"{models[0]}.require_backward_grad_sync = {last}")
        return updated_node.with_deep_changes(updated_node.body, body=[line, *updated_node.body.body])


def _last_turn(loop: cst.For) -> str:
    """A condition that is true when an optimizer steps after this turn; "" if the loop does not tell."""
    code = cst.Module([]).code_for_node
    for one in loop.body.body:
        if isinstance(one, cst.If) and one.orelse is None and m.findall(one.body, _STEPS):
            names = {cst.ensure_type(name, cst.Name).value for name in m.findall(one.test, m.Name())}
            return "" if names & _assigned(loop.body) else code(one.test)
    if m.findall(loop.body, _STEPS):
        return ""
    match loop.target, loop.iter:
        case cst.Name(value=turn), cst.Call(func=cst.Name(value="range"), args=[cst.Arg(value=count)]):
            return f"{turn} == {code(count)} - 1"
        case cst.Tuple(elements=[cst.Element(value=cst.Name(value=turn)), *_]), cst.Call(
            func=cst.Name(value="enumerate"), args=[cst.Arg(value=cst.Name(value=several))]
        ):
            return f"{turn} == len({several}) - 1"
    return ""


def _assigned(body: cst.CSTNode) -> set[str]:
    targets = [
        *(cst.ensure_type(one, cst.AssignTarget).target for one in m.findall(body, m.AssignTarget())),
        *(cst.ensure_type(one, cst.AugAssign).target for one in m.findall(body, m.AugAssign())),
    ]
    return {cst.ensure_type(name, cst.Name).value for one in targets for name in m.findall(one, m.Name())}
