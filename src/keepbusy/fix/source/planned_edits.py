"""A fix of the plan, written into the files at whose lines it stands, on top of those that are written already."""

from __future__ import annotations

import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix
from keepbusy.fixes.definition import CapturedLines
from keepbusy.fixes.source.graphs import lines_in_graphs, with_graphs
from keepbusy.fixes.source.rewriting import changed_lines, edited, moved_lines
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
        begins = [at.line for at in map(Where.of, loops) if at.file == lines.file]
        new = with_graphs(own, changed.get(lines.file, held.get(lines.file, own)), lines, begins)
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
        places += [Where(file=file, line=line) for line in lines_in_graphs(own, held.get(file, own), candidate[file])]
    return places
