"""Calls that are removed, get an argument or another name, or are computed in a shape that the host knows."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider

from keepbusy.fixes.source.at_lines import AtLines, dotted, keyword_of, text_of, visiting, with_keyword

_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}


class _WithoutCall(AtLines):
    """Statements that only call one function are taken out."""

    def __init__(self, lines: frozenset[int], name: str) -> None:
        super().__init__(lines)
        self._name = name

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if len(original_node.body) != 1 or self.line(original_node) not in self.lines:
            return updated_node
        statement = original_node.body[0]
        match statement:
            case cst.Expr(value=cst.Call(func=func)) if dotted(func) == self._name:
                return cst.RemoveFromParent()
        return updated_node


class _Fused(AtLines):
    """`fused=True` for optimizers that chose no implementation; what comes in a dictionary may choose one."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802, ARG002
        called = dotted(updated_node.func)
        chosen = any(keyword_of(updated_node, one) is not None for one in ("fused", "foreach", "differentiable"))
        chosen = chosen or any(one.star == "**" for one in updated_node.args)
        if called.rpartition(".")[2] not in _FUSED or "optim" not in called or chosen or not updated_node.args:
            return updated_node
        return with_keyword(updated_node, "fused", "True")


class _SavedLater(AtLines):
    """`torch.save(state, path)` becomes `keepbusy.save_later(state, path)`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if dotted(updated_node.func) != "torch.save" or not self.stands(original_node) or len(updated_node.args) != 2:
            return updated_node
        return updated_node.with_changes(func=cst.parse_expression("keepbusy.save_later"))


write_fused = visiting(_Fused)
write_save_later = visiting(_SavedLater)


def without_call(name: str) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return visiting(_WithoutCall, name=name)


class _MaskedSums(AtLines):
    """`x[mask].sum()` becomes `torch.where(mask, x, 0).sum()`, whose shape the host knows; so does `.mean()`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        if self.line(original_node) not in self.lines:
            return updated_node
        match updated_node:
            case cst.Call(
                func=cst.Attribute(
                    value=cst.Subscript(
                        value=cst.Name(value=of),
                        slice=[cst.SubscriptElement(slice=cst.Index(value=cst.Name(value=mask)))],
                    ),
                    attr=cst.Name(value="sum" | "mean" as method),
                ),
                args=[],
            ):
                count = f" / {mask}.sum()" if method == "mean" else ""
                made = cst.parse_expression(f"torch.where({mask}, {of}, 0).sum(){count}")
                is_whole = isinstance(self.get_metadata(ParentNodeProvider, original_node), cst.Assign | cst.AugAssign)
                return made if is_whole or not count else cst.parse_expression(f"({text_of(made)})")
        return updated_node


write_masked_sums = visiting(_MaskedSums)
