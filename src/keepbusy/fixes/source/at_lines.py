"""Changes of a source at given lines, what they share, and where its lines stand afterwards."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from io import StringIO
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
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    """The call with one more argument, written as the others are."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    argument = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
    if not call.args:
        return call.with_changes(args=[argument])
    last = call.args[-1]
    if isinstance(last.comma, cst.Comma) and isinstance(last.comma.whitespace_after, cst.ParenthesizedWhitespace):
        ending = last.comma.whitespace_after  # one argument a line, and a comma after the last; a comment stays with it
        others = call.args[-2].comma if len(call.args) > 1 else None
        above = others.whitespace_after if isinstance(others, cst.Comma) else call.whitespace_before_args
        indent = above.last_line if isinstance(above, cst.ParenthesizedWhitespace) else ending.last_line
        last = last.with_changes(comma=cst.Comma(whitespace_after=ending.with_changes(last_line=indent)))
        bare = ending.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
        return call.with_changes(
            args=[*call.args[:-1], last, argument.with_changes(comma=cst.Comma(whitespace_after=bare))]
        )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=comma), argument])


# Where the lines of a source stand in a changed one


def lines_of(source: str) -> list[str]:
    """As Python numbers them, each with its end: `splitlines` would end one at a form feed, too."""
    return StringIO(source).readlines()


def moved_lines(source: str, changed: str) -> dict[int, int]:
    """Where each line stands once other fixes have moved it; those that were changed themselves are no longer there."""
    same = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_matching_blocks()
    return {block.a + offset: block.b + offset for block in same for offset in range(1, block.size + 1)}


def replaced_lines(source: str, changed: str) -> dict[int, int]:
    """Where the lines stand that were changed themselves, each into one."""
    steps = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_opcodes()
    spans = [span for kind, *span in steps if kind == "replace" and span[1] - span[0] == span[3] - span[2]]
    return {begin + offset: to + offset for begin, end, to, _ in spans for offset in range(1, end - begin + 1)}


def changed_lines(source: str, changed: str) -> list[int]:
    """The lines of the source that a changed one lacks; where it only has more, the lines that these stand before."""
    steps = SequenceMatcher(None, lines_of(source), lines_of(changed), autojunk=False).get_opcodes()
    removed = [row + 1 for kind, *span, _, _ in steps if kind in ("replace", "delete") for row in range(*span)]
    return removed or [begin + 1 for kind, begin, *_ in steps if kind == "insert"]


def origins_of(source: str, own: str) -> list[int]:
    """For each line of a rewritten source its line in the user's own. A statement that moved has the line where it
    stood; what is new has the first line that it replaces, or the one that follows."""
    new, old = lines_of(source), lines_of(own)
    steps = SequenceMatcher(None, new, old, autojunk=False).get_opcodes()
    equal = [(begin, end, to - begin) for kind, begin, end, to, _ in steps if kind == "equal"]
    old_rows = {row: row + offset for begin, end, offset in equal for row in range(begin, end)}
    free: dict[str, list[int]] = {}
    for row in sorted({*range(len(old))} - {*old_rows.values()}, reverse=True):
        free.setdefault(bare(old[row]), []).append(row)
    for row, line in enumerate(new):
        if row not in old_rows and free.get(bare(line)):
            old_rows[row] = free[bare(line)].pop()
    for kind, begin, end, to, _ in steps:
        if kind == "replace":
            old_rows = dict.fromkeys(range(begin, end), to) | old_rows
    origins, following = list[int](), max(0, len(old) - 1)
    for row in reversed(range(len(new))):
        following = old_rows.get(row, following)
        origins.append(following + 1)
    return origins[::-1]


def bare(line: str) -> str:
    """Equal for a line and its copy in a captured function, which is indented less, and where `self.loss` is `loss`."""
    return line.strip().replace("self.", "")
