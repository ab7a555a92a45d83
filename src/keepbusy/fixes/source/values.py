"""Values computed in a shape that the host knows."""

from __future__ import annotations

import libcst as cst
from libcst.metadata import ParentNodeProvider

from keepbusy.fixes.source.at_lines import AtLines, text_of, visiting


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
