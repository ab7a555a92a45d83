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
from keepbusy.fixes.source.graphs import origins_of
from keepbusy.fixes.source.rewriting import edit_of, ways_of
from keepbusy.report.source import fix_line
from keepbusy.timeline.files import BadInput


@dataclass
class Rewriting:
    """By whole paths, what is to stand in files and which of their own lines these lines are; what was written, and
    what was not."""

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
    """The fixes of the plan in its order, each on top of those before it. One whose results may differ is made only
    where it is named in `also`; a graph, which checks itself as it runs, always."""
    made, held = Rewriting(loop=kept.loop, length=kept.length, command=kept.command), dict[str, str]()
    made.step, made.usual = kept.plain_step, kept.usual
    loops = kept.loop, *(one.loop for one in kept.plan if one.loop)
    for planned in kept.plan:
        if planned.first:
            name, _, place = planned.first.partition(" at ")
            made.left.append((name, f" at {place}", "by hand; a graph can be captured then"))
            continue
        ways = [way for way in ways_of(planned.fix) if _name(way) not in without]
        allowed = [way for way in ways if _name(way) not in ASKED_FOR or _name(way) in also]
        if found := next(_changes(planned, allowed, held, loops), None):
            way, sources = found
            places = captured_at(held, sources) if way == "graph" else changed_at(held, sources)
            made.written.append((way, ", ".join(_stretches(places or planned.where))))
            held = sources
        elif ways:
            where = f" at {planned.where[0]}" if planned.where else ""
            others = _changes(planned, [way for way in ways if way not in allowed], held, loops)
            made.left.append((planned.fix, where, _why(planned, [way for way, _ in others])))
    for file, source in held.items():
        whole = str(Path(file).resolve())
        made.sources[whole], made.origins[whole] = source, origins_of(source, source_of(file))
    return made


def changes(planned: PlannedFix, loops: Sequence[str], in_memory: bool) -> bool:
    """Whether the fix changes anything. `in_memory`: without being asked for it."""
    ways = (way for way in ways_of(planned.fix) if not in_memory or _name(way) not in ASKED_FOR)
    return not (in_memory and planned.first) and any(edited_files(planned, way, {}, loops) for way in ways)


def _changes(
    planned: PlannedFix, ways: Sequence[str], held: Sources, loops: Sequence[str]
) -> Iterator[tuple[str, Sources]]:
    """The ways that would change something, and to what."""
    for way in ways:
        sources = held | edited_files(planned, way, held, loops)
        if sources != held:
            yield way, sources


def _name(way: str) -> str:
    """`num_workers` of `num_workers=8 without persistent_workers`."""
    return way.partition("=")[0].partition(" ")[0]


def _why(planned: PlannedFix, ways: Sequence[str]) -> str:
    """Why it was not made. `ways`: those that would change the source, and may change results."""
    if planned.fix not in ways:
        return fix_line(planned.fix, (planned.where or (Where(),))[0], planned.code or planned.advice)
    edit = edit_of(planned.fix)
    because = f", for {edit.why}" if edit and edit.why else ""
    return f"results may differ{because}; `--also {_name(planned.fix)}` makes it"


def _stretches(where: Sequence[Where]) -> Iterator[str]:
    """`train.py:31-38`."""
    for file, places in groupby(sorted(where, key=lambda one: (one.file, one.line)), lambda one: one.file):
        lines = [one.line for one in places]
        for _, group in groupby(enumerate(lines), lambda one: one[1] - one[0]):
            stretch = [line for _, line in group]
            yield f"{file}:{stretch[0]}" + (f"-{stretch[-1]}" if stretch[1:] else "")
