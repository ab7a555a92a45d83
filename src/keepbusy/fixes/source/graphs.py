"""Graphs written into a source that other fixes may have changed before, and the lines that they hold then."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from keepbusy.fixes.capture import FEWEST_LAUNCHES
from keepbusy.fixes.definition import LIFTED, CapturedLines
from keepbusy.fixes.reading import TakeIndicesOnce
from keepbusy.fixes.source.at_lines import lines_of, moved_lines, replaced_lines
from keepbusy.fixes.source.rewriting import edited, with_lines_captured


def with_graphs(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> str | None:
    """What `now` becomes. `lines` and `loops` are the user's own file's."""
    result = _graphs_in(own, now, lines, loops)
    return result and result[0]


def _graphs_in(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> tuple[str, set[int]] | None:
    """What `now` becomes, and which of the user's lines that launch its new graphs hold."""
    moved = moved_lines(own, now)
    launching = moved | replaced_lines(own, now)  # what stood there may stay no more; it launches as before
    lines_now = lines._replace(
        launching=tuple(sorted((launching[line], count) for line, count in lines.launching if line in launching)),
        staying=tuple(moved[line] for line in lines.staying if line in moved),
        fed=tuple(moved[line] for line in lines.fed if line in moved),
        masked=tuple(moved[line] for line in lines.masked if line in moved),
    )
    result = with_lines_captured(now, lines_now, [moved[line] for line in loops if line in moved])
    return result and (result[0], {old for old, new in launching.items() if new in result[1]})


def reached_lines(
    own: str, edits: Iterable[tuple[str, Sequence[int]]], captured: Iterable[CapturedLines], loops: Sequence[int]
) -> list[int]:
    """The user's lines that launch and are in graphs once these edits are made, and then these lines are captured."""
    now, captured, reached = own, [*captured], set[int]()
    for edit_name, lines in (*edits, *((TakeIndicesOnce.name, captured_lines.masked) for captured_lines in captured)):
        moved = moved_lines(own, now)
        now = edited(now, edit_name, [moved[line] for line in lines if line in moved]) or now
    for captured_lines in captured:
        if sum(launches for _, launches in captured_lines.launching) < FEWEST_LAUNCHES:
            continue
        if result := _graphs_in(own, now, captured_lines, loops):
            now, reached = result[0], reached | result[1]
    return sorted(reached)


def lines_in_graphs(own: str, before: str, now: str) -> list[int]:
    """The user's lines that stand in captured functions now, and did not before."""
    names_before = {function.name for function in _captured_functions(before)}
    functions = [function for function in _captured_functions(now) if function.name not in names_before]
    body = [line for function in functions for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)]
    if not body:
        return []
    origins, new, old = origins_of(now, own), lines_of(now), lines_of(own)
    return sorted({origins[line - 1] for line in body if _text(new[line - 1]) == _text(old[origins[line - 1] - 1])})


def _captured_functions(source: str) -> list[ast.FunctionDef]:
    return [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name.startswith(LIFTED)
    ]


def origins_of(source: str, own: str) -> list[int]:
    """For each line of a rewritten source its line in the user's own. A statement that moved has the line where it
    stood; what is new has the first line that it replaces, or the one that follows."""
    new, old = lines_of(source), lines_of(own)
    steps = SequenceMatcher(None, new, old, autojunk=False).get_opcodes()
    equal = [(begin, end, to - begin) for kind, begin, end, to, _ in steps if kind == "equal"]
    old_rows = {row: row + offset for begin, end, offset in equal for row in range(begin, end)}
    free: dict[str, list[int]] = {}
    for row in sorted({*range(len(old))} - {*old_rows.values()}, reverse=True):
        free.setdefault(_text(old[row]), []).append(row)
    for row, line in enumerate(new):
        if row not in old_rows and free.get(_text(line)):
            old_rows[row] = free[_text(line)].pop()
    for kind, begin, end, to, _ in steps:
        if kind == "replace":
            old_rows = dict.fromkeys(range(begin, end), to) | old_rows
    origins, following = list[int](), max(0, len(old) - 1)
    for row in reversed(range(len(new))):
        following = old_rows.get(row, following)
        origins.append(following + 1)
    return origins[::-1]


def _text(line: str) -> str:
    """Equal for a line and its copy in a captured function, which is indented less, and where `self.loss` is `loss`."""
    return line.strip().replace("self.", "")
