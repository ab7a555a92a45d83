"""Calls that are removed, get an argument or another name, or are computed in a shape that the host knows."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from keepbusy.fixes.source.at_lines import AtLines, dotted, keyword_of, text_of, visiting, with_keyword

_COUNTING = {"nonzero", "argwhere", "where", "masked_select", "unique", "bincount", "repeat_interleave", "one_hot"}
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


class ConstantMask(NamedTuple):
    """A mask by which elements are chosen, and that is the same in all iterations."""

    text: str
    """`train_mask`, or `data.train_mask`."""
    made: int
    """The line at which it has its value, at last."""

    @property
    def indices(self) -> str:
        return f"{self.text.replace('.', '_')}_indices"

    @property
    def once(self) -> str:
        return f"{self.indices} = {self.text}.nonzero(as_tuple=True)"


def constant_mask(source: str, line: int) -> ConstantMask | None:
    """That of `output[train_mask]` at this line, which is written to nowhere after the loops have begun. None if there
    is another index beside it: which of them is a mask is not known."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    nodes = [*ast.walk(tree)]
    around = [node for node in nodes if isinstance(node, ast.stmt) and _spans(node, line)]
    statement = max(around, key=lambda node: node.lineno, default=None)
    masks = {*_chosen_in(statement)} if statement is not None and not hasattr(statement, "body") else set[str]()
    if len(masks) != 1 or "" in masks:
        return None
    [text] = masks
    base = text.partition(".")[0]
    scopes = [node for node in nodes if isinstance(node, ast.Module | ast.FunctionDef)]
    functions = [one for one in scopes if isinstance(one, ast.FunctionDef) and _spans(one, line)]
    # in other functions it is another name
    shared = any(base in node.names for node in nodes if isinstance(node, ast.Global | ast.Nonlocal))
    is_given = any(isinstance(node, ast.arg) and node.arg == base for one in functions for node in ast.walk(one.args))
    writes = [
        node
        for node in nodes
        if isinstance(node, ast.stmt)
        and _scope_of(scopes, node.lineno) in (scopes[0], *functions)
        and _writes_to(node, text)
    ]
    last = max(writes, key=lambda node: node.lineno, default=None)
    if last is None or last.lineno >= line or is_given or shared:
        return None
    home = next((scope for scope in scopes if last in scope.body), None)
    loops = [node for node in nodes if isinstance(node, ast.For | ast.While)]
    is_made_before = all(
        _scope_of(scopes, node.lineno) is home and not any(_spans(loop, node.lineno) for loop in loops)
        for node in writes
    )
    comes_often = any(_spans(one, line) and not _spans(one, last.lineno) for one in (*functions, *loops))
    is_plain = isinstance(last, ast.Assign | ast.AnnAssign | ast.Expr) and not _is_handed_on(nodes, text, last.lineno)
    return ConstantMask(text, last.lineno) if is_plain and is_made_before and comes_often else None


def _is_handed_on(nodes: list[ast.AST], text: str, after: int) -> bool:
    """Whether anybody else gets it behind this line, who might write to it: it only chooses, or is asked for a sum."""
    asked = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    asked |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    named = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and node.lineno > after]
    return any(ast.unparse(node) == text for node in named if id(node) not in asked)


def _scope_of(scopes: list[ast.Module | ast.FunctionDef], line: int) -> ast.Module | ast.FunctionDef:
    """The innermost one."""
    return max(scopes, key=lambda scope: getattr(scope, "lineno", 0) if _spans(scope, line) else 0)


def _spans(node: ast.AST, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0) if isinstance(node, ast.stmt | ast.expr) else False


def _chosen_in(node: ast.AST) -> Iterator[str]:
    """What stands in brackets behind values, but for plain numbers: as text where it is a name or an attribute of one,
    else "", as for functions that wait for the number of their results."""
    for part in ast.walk(node):
        match part:
            case ast.Subscript(slice=ast.Name() | ast.Attribute(value=ast.Name()) as mask):
                yield ast.unparse(mask)
            case ast.Subscript(slice=index) if any(isinstance(one, ast.Name) for one in ast.walk(index)):
                yield ""
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in _COUNTING:
                yield ""


def _writes_to(node: ast.stmt, text: str) -> bool:
    """Whether this statement itself binds the mask or its object, or writes to it."""
    base, _, attribute = text.partition(".")
    for part in ast.walk(node) if not hasattr(node, "body") else ():
        match part:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if name == base:
                return True
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if attribute and name == attribute:
                return True
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if ast.unparse(value) == text:
                return True
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if ast.unparse(value) == text:
                if method.endswith("_"):
                    return True
    names = {base} & {
        alias.asname or alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)
    }
    targets = [node.target] if isinstance(node, ast.For) else []
    targets += [item.optional_vars for item in getattr(node, "items", []) if item.optional_vars is not None]
    stored = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return bool(names) or base in stored


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
        made = [cst.parse_statement(mask.once) for mask in self._new if mask.made == self.line(original_node)]
        return cst.FlattenSentinel([updated_node, *made])


def write_indices_once(wrapper: MetadataWrapper, lines: frozenset[int]) -> cst.Module | None:
    source = wrapper.module.code
    masks = {line: mask for line in lines if (mask := constant_mask(source, line)) is not None}
    taken = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    known = {mask for mask in masks.values() if mask.once in source}  # another line has needed them before
    masks = {line: mask for line, mask in masks.items() if mask in known or mask.indices not in taken}
    new = dict.fromkeys(masks[line] for line in sorted(masks) if masks[line] not in known)
    return wrapper.visit(_IndicesOnce(lines, masks, new)) if masks else None
