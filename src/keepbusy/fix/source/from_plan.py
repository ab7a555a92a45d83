"""What the plan of a recorded run makes of a program's sources, for `keepbusy run --fix`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix
from keepbusy.explain.kept_plan import KeptPlan
from keepbusy.fix.source.planned_edits import Sources, captured_at, changed_at, edited_files, source_of
from keepbusy.fixes import ASKED_FOR, WRITTEN
from keepbusy.fixes.source.at_lines import origins_of
from keepbusy.fixes.source.rewriting import edit_of, edits_for
from keepbusy.report.source import fix_line
from keepbusy.timeline.files import BadInput


@dataclass
class Rewriting:
    """The new sources by absolute path, and for each of their lines the line of the user's own file; which fixes were
    written, and which were not."""

    sources: dict[str, str] = field(default_factory=dict)
    origins: dict[str, list[int]] = field(default_factory=dict)
    written: list[tuple[str, str]] = field(default_factory=list)
    """Fixes by their names, and where."""
    left: list[tuple[str, str, str]] = field(default_factory=list)
    """Fixes, ` at train.py:31`, and why not."""
    step: int = 0
    """Of the recorded run, an iteration of its loop."""
    usual: int = 0
    """The same by the run's own clock, as the run with fixes is timed; 0 where nobody counted."""
    loop: str = ""
    length: int = 0
    """Of the whole recorded run; 0 where it is not known."""
    command: tuple[str, ...] = ()
    """Of that run."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def check_names(without: Sequence[str], also: Sequence[str]) -> None:
    known = sorted(WRITTEN)
    for name in (*without, *also):
        if name not in known:
            raise BadInput(f"Unknown fix {name!r}. Known fixes: {', '.join(known)}.")


def rewriting_of(kept: KeptPlan, without: Sequence[str] = (), also: Sequence[str] = ()) -> Rewriting:
    """The fixes of the plan in its order, each on top of those before it. One whose results may differ is made only if
    `also` names it. A graph checks itself as it runs, so it is always made."""
    rewriting, rewritten = Rewriting(loop=kept.loop, length=kept.length, command=kept.command), dict[str, str]()
    rewriting.step, rewriting.usual = kept.plain_step, kept.usual
    loops = kept.loop, *(fix.loop for fix in kept.plan if fix.loop)
    for planned in kept.plan:
        if planned.first:
            first, _, place = planned.first.partition(" at ")
            rewriting.left.append((first, f" at {place}", "by hand; a graph can be captured then"))
            continue
        edit_names = [name for name in edits_for(planned.fix) if _fix_name(name) not in without]
        allowed = [name for name in edit_names if _fix_name(name) not in ASKED_FOR or _fix_name(name) in also]
        if change := next(_changes(planned, allowed, rewritten, loops), None):
            edit_name, sources = change
            places = captured_at(rewritten, sources) if edit_name == "graph" else changed_at(rewritten, sources)
            rewriting.written.append((edit_name, ", ".join(_line_ranges(places or planned.where))))
            rewritten = sources
        elif edit_names:
            where = f" at {planned.where[0]}" if planned.where else ""
            others = _changes(planned, [name for name in edit_names if name not in allowed], rewritten, loops)
            rewriting.left.append((planned.fix, where, _reason(planned, [name for name, _ in others])))
    for file, source in rewritten.items():
        path = str(Path(file).resolve())
        rewriting.sources[path], rewriting.origins[path] = source, origins_of(source, source_of(file))
    return rewriting


def changes(planned: PlannedFix, loops: Sequence[str], in_memory: bool) -> bool:
    """Whether the fix changes anything. `in_memory`: without being asked for it."""
    edit_names = (name for name in edits_for(planned.fix) if not in_memory or _fix_name(name) not in ASKED_FOR)
    return not (in_memory and planned.first) and any(edited_files(planned, name, {}, loops) for name in edit_names)


def _changes(
    planned: PlannedFix, edit_names: Sequence[str], rewritten: Sources, loops: Sequence[str]
) -> Iterator[tuple[str, Sources]]:
    """The edits that would change something, and to what."""
    for edit_name in edit_names:
        sources = rewritten | edited_files(planned, edit_name, rewritten, loops)
        if sources != rewritten:
            yield edit_name, sources


def _fix_name(edit_name: str) -> str:
    """`num_workers` of `num_workers=8 without persistent_workers`."""
    return edit_name.partition("=")[0].partition(" ")[0]


def _reason(planned: PlannedFix, edit_names: Sequence[str]) -> str:
    """Why it was not made. `edit_names`: edits that would change the source, and may change results."""
    if planned.fix not in edit_names:
        return fix_line(planned.fix, (planned.where or (Where(),))[0], planned.code or planned.advice)
    edit = edit_of(planned.fix)
    because = f", for {edit.why}" if edit and edit.why else ""
    return f"results may differ{because}; `--also {_fix_name(planned.fix)}` makes it"


def _line_ranges(where: Sequence[Where]) -> Iterator[str]:
    """`train.py:31-38`."""
    for file, places in groupby(sorted(where, key=lambda place: (place.file, place.line)), lambda place: place.file):
        lines = [place.line for place in places]
        for _, group in groupby(enumerate(lines), lambda numbered: numbered[1] - numbered[0]):
            run = [line for _, line in group]
            yield f"{file}:{run[0]}" + (f"-{run[-1]}" if run[1:] else "")
