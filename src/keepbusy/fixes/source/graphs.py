"""Graphs written into a source that other fixes may have changed before, and the lines that they hold then."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from keepbusy.fixes.capture import FEWEST_LAUNCHES
from keepbusy.fixes.definition import LIFTED, CapturedLines
from keepbusy.fixes.reading import TakeIndicesOnce
from keepbusy.fixes.source.rewriting import edited, lines_of, moved_lines, replaced_lines, with_lines_captured


def with_graphs(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> str | None:
    """What `now` becomes. `lines` and `loops` are the user's own file's."""
    found = _graphs_in(own, now, lines, loops)
    return found and found[0]


def _graphs_in(own: str, now: str, lines: CapturedLines, loops: Iterable[int]) -> tuple[str, set[int]] | None:
    """And which of the user's lines that launch they hold."""
    moved = moved_lines(own, now)
    launching = moved | replaced_lines(own, now)  # what stood there may stay no more; it launches as before
    there = lines._replace(
        launching=tuple(sorted((launching[line], count) for line, count in lines.launching if line in launching)),
        staying=tuple(moved[line] for line in lines.staying if line in moved),
        fed=tuple(moved[line] for line in lines.fed if line in moved),
        masked=tuple(moved[line] for line in lines.masked if line in moved),
    )
    found = with_lines_captured(now, there, [moved[line] for line in loops if line in moved])
    return found and (found[0], {line for line, to in launching.items() if to in found[1]})


def reached_lines(
    own: str, edits: Iterable[tuple[str, Sequence[int]]], captured: Iterable[CapturedLines], loops: Sequence[int]
) -> list[int]:
    """The user's lines that launch and are in graphs once these edits are made, and then these lines are captured."""
    now, captured, held = own, [*captured], set[int]()
    for way, lines in (*edits, *((TakeIndicesOnce.name, one.masked) for one in captured)):
        moved = moved_lines(own, now)
        now = edited(now, way, [moved[line] for line in lines if line in moved]) or now
    for one in (one for one in captured if sum(count for _, count in one.launching) >= FEWEST_LAUNCHES):
        if found := _graphs_in(own, now, one, loops):
            now, held = found[0], held | found[1]
    return sorted(held)


def lines_in_graphs(own: str, before: str, now: str) -> list[int]:
    """The user's lines that stand in captured functions now, and did not before."""
    known = {one.name for one in _captured_functions(before)}
    functions = [one for one in _captured_functions(now) if one.name not in known]
    body = [at for one in functions for at in range(one.body[0].lineno, (one.end_lineno or 0) + 1)]
    if not body:
        return []
    origins, new, old = origins_of(now, own), lines_of(now), lines_of(own)
    return sorted({origins[at - 1] for at in body if _moved(new[at - 1]) == _moved(old[origins[at - 1] - 1])})


def _captured_functions(source: str) -> list[ast.FunctionDef]:
    return [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name.startswith(LIFTED)]


def origins_of(source: str, own: str) -> list[int]:
    """Of each line of a rewritten source the line that it is in the user's own. Of a statement that moved, the line
    where it stood; of what is new, the first line that it stands for or that follows it."""
    new, old = lines_of(source), lines_of(own)
    steps = SequenceMatcher(None, new, old, autojunk=False).get_opcodes()
    found = {at: at - begin + to for what, begin, end, to, _ in steps if what == "equal" for at in range(begin, end)}
    free: dict[str, list[int]] = {}
    for at in sorted({*range(len(old))} - {*found.values()}, reverse=True):
        free.setdefault(_moved(old[at]), []).append(at)
    for at in (one for one in range(len(new)) if one not in found):
        if free.get(_moved(new[at])):
            found[at] = free[_moved(new[at])].pop()
    for what, begin, end, to, _ in steps:
        if what == "replace":
            found = dict.fromkeys(range(begin, end), to) | found
    origins, following = list[int](), max(0, len(old) - 1)
    for at in reversed(range(len(new))):
        following = found.get(at, following)
        origins.append(following + 1)
    return origins[::-1]


def _moved(line: str) -> str:
    """The same of a line in both places: in a captured function it stands further left, and `self.loss` is `loss`."""
    return line.strip().replace("self.", "")
