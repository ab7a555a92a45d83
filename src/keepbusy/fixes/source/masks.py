"""Elements that a mask chooses: how many there are, only the GPU knows. Sums that the host knows the shape of, and
indices that are taken once."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from keepbusy.fixes.source.at_lines import AtLines, dotted, text_of, visiting
from keepbusy.fixes.source.constants import COUNTING
from keepbusy.fixes.source.name_flow import Uses, own_nodes


class _MaskedSums(AtLines):
    """`x[mask].sum()` becomes `torch.where(mask, x, 0).sum()`, whose shape the host knows; so does `.mean()`."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        if self.line(original_node) not in self.lines:
            return updated_node
        match updated_node:
            case cst.Call(
                func=cst.Attribute(
                    value=cst.Subscript(
                        value=cst.Name(value=values),
                        slice=[cst.SubscriptElement(slice=cst.Index(value=cst.Name(value=mask)))],
                    ),
                    attr=cst.Name(value="sum" | "mean" as method),
                ),
                args=[],
            ):
                count = f" / {mask}.sum()" if method == "mean" else ""
                total = cst.parse_expression(f"torch.where({mask}, {values}, 0).sum(){count}")
                is_whole = isinstance(self.get_metadata(ParentNodeProvider, original_node), cst.Assign | cst.AugAssign)
                return total if is_whole or not count else cst.parse_expression(f"({text_of(total)})")
        return updated_node


write_masked_sums = visiting(_MaskedSums)


class ConstantMask(NamedTuple):
    """A mask by which elements are chosen, and that is the same in all iterations."""

    text: str
    """`train_mask`, or `data.train_mask`."""
    made_at: int
    """The line at which it has its value, at last."""

    @property
    def indices(self) -> str:
        return f"{self.text.replace('.', '_')}_indices"

    @property
    def once(self) -> str:
        return f"{self.indices} = {self.text}.nonzero(as_tuple=True)"


def constant_mask(source: str, line: int) -> ConstantMask | None:
    """The mask of `output[train_mask]` at this line, if nothing writes to it once the loops have begun."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    nodes = [*ast.walk(tree)]
    if not (text := _mask_at(nodes, line)):
        return None
    base = text.partition(".")[0]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    around = [function for function in functions if _spans(function, line)]  # elsewhere the name is another's
    is_shared = any(base in node.names for node in nodes if isinstance(node, ast.Global | ast.Nonlocal))
    is_given = any(part.arg == base for node in around for part in ast.walk(node.args) if isinstance(part, ast.arg))
    statements = [node for node in nodes if isinstance(node, ast.stmt) and _writes_to(node, text)]
    writes = [node for node in statements if _scope_of([tree, *functions], node) in (tree, *around)]
    if not writes or is_shared or is_given:
        return None
    last = max(writes, key=lambda node: node.lineno)
    loops = [node for node in nodes if isinstance(node, ast.For | ast.While)]
    home = _scope_of([tree, *functions], last)
    is_made_before = (
        last.lineno < line and last in home.body and isinstance(last, ast.Assign | ast.AnnAssign | ast.Expr)
    )
    for node in writes:
        is_made_before &= _scope_of([tree, *functions], node) is home
        is_made_before &= not any(_spans(loop, node.lineno) for loop in loops)
    comes_often = any(_spans(block, line) and not _spans(block, last.lineno) for block in (*around, *loops))
    is_constant = is_made_before and comes_often and not _is_handed_on(nodes, text, last.lineno)
    return ConstantMask(text, last.lineno) if is_constant else None


def _mask_at(nodes: list[ast.AST], line: int) -> str:
    """What stands alone in brackets behind the values of a statement, by name; "" where there is another index beside
    it, or a call that counts: what waits there is not known to be the mask."""
    around = [node for node in nodes if isinstance(node, ast.stmt) and _spans(node, line)]
    statement = max(around, key=lambda node: node.lineno, default=None)
    texts = set[str]()
    for part in ast.walk(statement) if statement is not None and not hasattr(statement, "body") else ():
        match part:
            case ast.Subscript(slice=ast.Name() | ast.Attribute(value=ast.Name()) as mask):
                texts.add(ast.unparse(mask))
            case ast.Subscript(slice=index) if Uses([index]).loads:
                return ""
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in COUNTING:
                return ""
    return texts.pop() if len(texts) == 1 else ""


def _is_handed_on(nodes: list[ast.AST], text: str, after: int) -> bool:
    """Whether anything else gets the mask behind this line and might write to it: it only chooses, or is asked for a
    sum."""
    harmless = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    harmless |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        match loop:
            case ast.For(target=ast.Name(id=name), iter=ast.List(elts=masks) | ast.Tuple(elts=masks)):
                used = [part for part in own_nodes(loop) if isinstance(part, ast.Name) and part.id == name]
                if all(part is loop.target or id(part) in harmless for part in used):
                    harmless |= {id(mask) for mask in masks}  # each only chooses, by the name of the loop
    named = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and node.lineno > after]
    return any(ast.unparse(node) == text for node in named if id(node) not in harmless)


def _scope_of(scopes: list[ast.Module | ast.FunctionDef], statement: ast.stmt) -> ast.Module | ast.FunctionDef:
    """The innermost one around it. `scopes`: first the module."""
    within = [scope for scope in scopes[1:] if _spans(scope, statement.lineno)]
    return max(within, key=lambda scope: getattr(scope, "lineno", 0), default=scopes[0])


def _spans(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)


def _writes_to(statement: ast.stmt, text: str) -> bool:
    """Whether the statement itself, without the block in it, binds the mask or its object, or writes to either."""
    base, _, attribute = text.partition(".")
    head = [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.expr | ast.withitem)]
    parts = [part for expression in head for part in ast.walk(expression)]
    return base in Uses(head).all_written() or any(
        isinstance(part, ast.Attribute) and part.attr == attribute and not isinstance(part.ctx, ast.Load)
        for part in parts
    )


class _IndicesOnce(AtLines):
    """`output[train_mask]` becomes `output[train_mask_indices]`, which are taken where the mask is made."""

    def __init__(self, lines: frozenset[int], masks: dict[int, ConstantMask], new: Collection[ConstantMask]) -> None:
        """`masks`: at each line. `new`: those whose indices nobody has taken yet."""
        super().__init__(lines)
        self._masks, self._new = masks, new

    def leave_Subscript(  # noqa: N802
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.Subscript:
        match updated_node.slice:
            case [cst.SubscriptElement(slice=cst.Index(value=cst.Name() | cst.Attribute() as value))]:
                for line, mask in self._masks.items():
                    if dotted(value) == mask.text and self._stands_at(original_node, line):
                        index = cst.SubscriptElement(cst.Index(cst.Name(mask.indices)))
                        return updated_node.with_changes(slice=[index])
        return updated_node

    def _stands_at(self, node: cst.CSTNode, line: int) -> bool:
        while not isinstance(node, cst.SimpleStatementLine | cst.Module):
            node = self.get_metadata(ParentNodeProvider, node)
        return self.line(node) <= line <= self.get_metadata(PositionProvider, node).end.line

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        made = [cst.parse_statement(mask.once) for mask in self._new if mask.made_at == self.line(original_node)]
        return cst.FlattenSentinel([updated_node, *made])


def write_indices_once(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    source = wrapper.module.code
    masks = {line: mask for line in lines if (mask := constant_mask(source, line)) is not None}
    used_names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    known = {mask for mask in masks.values() if mask.once in source}  # another line has needed them before
    masks = {line: mask for line, mask in masks.items() if mask in known or mask.indices not in used_names}
    new = dict.fromkeys(masks[line] for line in sorted(masks) if masks[line] not in known)
    return wrapper.visit(_IndicesOnce(lines, masks, new)) if masks else None
