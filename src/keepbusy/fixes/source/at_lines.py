"""Changes of a source at given lines, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider


class AtLines(cst.CSTTransformer):
    """Knows where each node stands."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, lines: frozenset[int]) -> None:
        super().__init__()
        self.lines = lines

    def stands(self, node: cst.CSTNode) -> bool:
        """Whether one of the lines is its own."""
        place = self.get_metadata(PositionProvider, node)
        return any(place.start.line <= line <= place.end.line for line in self.lines)

    def line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


def visiting(change: type[AtLines], **settings: Any) -> Callable[[MetadataWrapper, frozenset[int]], cst.Module]:
    return lambda wrapper, lines: wrapper.visit(change(lines, **settings))


def dotted(node: cst.BaseExpression) -> str:
    """`torch.cuda.empty_cache` of an expression that is names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def text_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def keyword_of(call: cst.Call, name: str) -> cst.Arg | None:
    return next((one for one in call.args if one.keyword is not None and one.keyword.value == name), None)


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    """One more argument, written as the others are."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    made = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
    if not call.args:
        return call.with_changes(args=[made])
    last = call.args[-1]
    if isinstance(last.comma, cst.Comma) and isinstance(last.comma.whitespace_after, cst.ParenthesizedWhitespace):
        ending = last.comma.whitespace_after  # one argument a line, and a comma after the last; a comment stays with it
        others = call.args[-2].comma if len(call.args) > 1 else None
        above = others.whitespace_after if isinstance(others, cst.Comma) else call.whitespace_before_args
        indent = above.last_line if isinstance(above, cst.ParenthesizedWhitespace) else ending.last_line
        last = last.with_changes(comma=cst.Comma(whitespace_after=ending.with_changes(last_line=indent)))
        bare = ending.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
        return call.with_changes(
            args=[*call.args[:-1], last, made.with_changes(comma=cst.Comma(whitespace_after=bare))]
        )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=comma), made])
