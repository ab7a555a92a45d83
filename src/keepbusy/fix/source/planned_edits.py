"""A fix of the plan, written into the files at whose lines it stands, on top of those that are written already."""

from __future__ import annotations

import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix
from keepbusy.fixes.definition import CapturedLines
from keepbusy.fixes.source.at_lines import changed_lines, moved_lines
from keepbusy.fixes.source.rewriting import edited, lines_in_graphs, with_graphs
from keepbusy.program.lines import USER, kind_of

Sources: TypeAlias = dict[str, str]
"""Of files, by their names in the plan, what is to stand in them."""


def edited_files(
    planned: PlannedFix, edit_name: str, rewritten: Mapping[str, str], loops: Sequence[str] = ()
) -> Sources:
    """The files that this fix changes, and to what: the user's own, no library's. `edit_name`: the edit that
    serves it; `rewritten`: what others have changed so far; `loops`: those whose iterations are explained."""
    if edit_name == "graph":
        return _with_graphs(planned.captured, rewritten, loops)
    files: dict[str, list[int]] = {}
    for where in planned.where:
        files.setdefault(where.file, []).append(where.line)
    changed: Sources = {}
    for file in filter(_is_changeable, files):
        own = source_of(file)
        now = rewritten.get(file, own)
        moved = moved_lines(own, now)
        new = edited(now, edit_name, [moved[line] for line in files[file] if line in moved])
        if new is not None:
            changed[file] = new
    return changed


def _with_graphs(captured: Sequence[CapturedLines], rewritten: Mapping[str, str], loops: Sequence[str]) -> Sources:
    changed: Sources = {}
    for lines in captured:
        if not _is_changeable(lines.file):
            continue
        own = source_of(lines.file)
        begins = [place.line for place in map(Where.of, loops) if place.file == lines.file]
        new = with_graphs(own, changed.get(lines.file, rewritten.get(lines.file, own)), lines, begins)
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


def changed_at(rewritten: Mapping[str, str], candidate: Mapping[str, str]) -> list[Where]:
    """The places where a candidate changes the sources so far, as the user's files number their lines."""
    places = []
    for file, source in candidate.items():
        if source == rewritten.get(file):
            continue
        own = source_of(file)
        now = rewritten.get(file, own)
        moved = moved_lines(now, own)
        places += [Where(file=file, line=moved[line]) for line in changed_lines(now, source) if line in moved]
    return places


def captured_at(rewritten: Mapping[str, str], candidate: Mapping[str, str]) -> list[Where]:
    """The lines that a candidate puts into captured functions, as the user's files number them."""
    places = []
    for file, source in candidate.items():
        own = source_of(file)
        places += [Where(file=file, line=line) for line in lines_in_graphs(own, rewritten.get(file, own), source)]
    return places
