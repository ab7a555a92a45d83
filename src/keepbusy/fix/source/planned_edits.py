"""A fix of the plan, written into the files at whose lines it stands, on top of those that are written already."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TypeAlias

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix
from keepbusy.fixes.definition import LIFTED, CapturedLines
from keepbusy.fixes.source.rewriting import changed_lines, edited, lines_of, moved_lines
from keepbusy.program.lines import USER, kind_of

Sources: TypeAlias = dict[str, str]
"""Of files, by their names in the plan, what is to stand in them."""


def edited_files(planned: PlannedFix, way: str, held: Mapping[str, str], loops: Sequence[str] = ()) -> Sources:
    """The files that this fix changes, and to what: the user's own, no library's. `way`: the edit that serves it;
    `held`: what others have changed so far; `loops`: those whose iterations are explained."""
    if way == "graph":
        return _with_graphs(planned.captured, held, loops)
    files: dict[str, list[int]] = {}
    for where in planned.where:
        files.setdefault(where.file, []).append(where.line)
    changed: Sources = {}
    for file in filter(_is_changeable, files):
        own = source_of(file)
        now = held.get(file, own)
        moved = moved_lines(own, now)
        new = edited(now, way, [moved[line] for line in files[file] if line in moved])
        if new is not None:
            changed[file] = new
    return changed


def _with_graphs(captured: Sequence[CapturedLines], held: Mapping[str, str], loops: Sequence[str]) -> Sources:
    changed: Sources = {}
    for lines in captured:
        if not _is_changeable(lines.file):
            continue
        own = source_of(lines.file)
        now = changed.get(lines.file, held.get(lines.file, own))
        moved = moved_lines(own, now)
        left = lines._replace(
            launching=tuple((moved[line], count) for line, count in lines.launching if line in moved),
            staying=tuple(moved[line] for line in lines.staying if line in moved),
        )
        begins = [moved[at.line] for at in map(Where.of, loops) if at.file == lines.file and at.line in moved]
        new = edited(now, "graph", [], left, begins)
        if new is not None:
            changed[lines.file] = new
    return changed


def _is_changeable(file: str) -> bool:
    if not file.endswith(".py") or not Path(file).is_file() or kind_of(file) != USER:
        return False
    try:
        with Path(file).open("rb") as opened:
            encoding, _ = tokenize.detect_encoding(opened.readline)
        source_of(file)
    except (SyntaxError, UnicodeDecodeError):
        return False
    return encoding.startswith("utf-8")  # few name another one


def source_of(file: str) -> str:
    """With the ends of its lines as they are, which a diff has to keep."""
    return Path(file).read_bytes().decode()


def changed_at(held: Mapping[str, str], candidate: Mapping[str, str]) -> list[Where]:
    """The places where a candidate changes the sources that hold, as the user's files number their lines."""
    places = []
    for file in (one for one in candidate if candidate[one] != held.get(one)):
        own = source_of(file)
        now = held.get(file, own)
        moved = moved_lines(now, own)
        places += [Where(file=file, line=moved[at]) for at in changed_lines(now, candidate[file]) if at in moved]
    return places


def captured_at(held: Mapping[str, str], candidate: Mapping[str, str]) -> list[Where]:
    """The lines that a candidate puts into captured functions, as the user's files number them."""
    places = []
    for file in candidate:
        own = source_of(file)
        known = {one.name for one in _captured_functions(held.get(file, own))}
        origins = origins_of(candidate[file], own)
        functions = [one for one in _captured_functions(candidate[file]) if one.name not in known]
        body = (at for one in functions for at in range(one.body[0].lineno, (one.end_lineno or 0) + 1))
        new, old = lines_of(candidate[file]), lines_of(own)
        lines = {origins[at - 1] for at in body if _moved(new[at - 1]) == _moved(old[origins[at - 1] - 1])}
        places += [Where(file=file, line=line) for line in sorted(lines)]
    return places


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
