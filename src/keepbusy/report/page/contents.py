"""The words of a page: what was explained, as JSON. Times are nanoseconds; the page formats them as reports do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from keepbusy import __version__
from keepbusy.explain.comparison import Change, Comparison
from keepbusy.explain.diagnosis import PLACES, Cause, Diagnosis, PlannedFix, Where
from keepbusy.explain.edit import Edit
from keepbusy.explain.turns import Turns
from keepbusy.report import run_report, words
from keepbusy.report.paper import look
from keepbusy.report.source import fix_line, source_of, text_of
from keepbusy.report.words import tame
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import Part, PlainRun

LONGEST_TEXT = 2_000
LINES_AROUND = 14
"""So many lines of the program stand above and below each line that is spoken of."""
LONGEST_LINE, MOST_LINES = 240, 6_000


def of(diagnosis: Diagnosis, source: str) -> dict[str, Any]:
    """The run, and what is said of it as a whole."""
    run, turns = diagnosis.run, diagnosis.turns
    return {
        "version": __version__,
        "source": text(source or words.files(diagnosis.sources)),
        "device": text(diagnosis.device),
        "ranks": list(diagnosis.ranks),
        "looks": {one: {"name": look(one).name, "sentence": look(one).sentence} for one in PLACES},
        "run": None if run is None else _part(run),
        "headline": run_report.headline(run) if run is not None else "",
        "shares": run.shares if run is not None else (),
        "recorded": (turns.timeline.facts.recorded or ()) if turns is not None else (),
        "told": [
            turn(diagnosis) | {"place": "", "turns": 0},
            *(turn(one.diagnosis) | {"place": text(one.place), "turns": one.turns} for one in diagnosis.loops),
        ],
        "plain_runs": [
            {"rank": rank, "steps": one.steps, "step": one.step, "course": _course(one, run)}
            for rank, one in sorted(diagnosis.plain_runs.items())
        ],
        "asides": [[label, text(said)] for label, said in run_report.asides(diagnosis.plain_runs, diagnosis.rare)],
        "rare": [
            {"step": one.step, "time": one.plain_step, "ledger": [*map(list, one.ledger.items())]}
            for one in diagnosis.rare
        ],
        "sources": sources(diagnosis),
    }


def text(value: str) -> str:
    return tame(value, LONGEST_TEXT)


def turn(diagnosis: Diagnosis) -> dict[str, Any]:
    """What is said of a turn: where it goes, why the GPU waits, what to do."""
    return {
        "step": diagnosis.plain_step,
        "plain": diagnosis.plain_given,
        "steps": diagnosis.steps,
        "noise": diagnosis.noise,
        "script": diagnosis.one_turn,
        "ledger": [[place, diagnosis.ledger[place]] for place in PLACES if diagnosis.ledger.get(place, 0) > 0],
        "reasons": [_cause(one) for one in diagnosis.causes],
        "all": [diagnosis.predicted.step, diagnosis.predicted.low, diagnosis.predicted.high],
        "plan": list(_plan(diagnosis)),
        "harmless": [
            {"cause": one.cause, "where": place(one.where), "count": one.count, "why": text(one.why)}
            for one in diagnosis.harmless
        ],
        "late": [
            {"rank": one.rank, "late": one.late, "cause": one.cause, "where": place(one.where)}
            for one in diagnosis.late
        ],
        "notes": [text(note) for note in diagnosis.notes],
    }


def place(where: Where) -> dict[str, Any]:
    """`file` and `line` only where the recording knows them exactly enough to show the line."""
    source = source_of(where) if where.file else None
    return {
        "text": words.spot(where, 80),
        "file": text(where.file),
        "line": source.line if source else where.line,
        "function": tame(where.function, 120),
        "exact": where.exact,
        "source": source.text[:LONGEST_LINE] if source else "",
    }


def _cause(one: Cause) -> dict[str, Any]:
    return {
        "cause": one.cause,
        "wait": one.wait,
        "count": one.count,
        "sites": [{"where": place(site.where), "wait": site.wait} for site in one.sites],
        "what": text(one.what),
        "advice": text(one.advice),
        "code": text(fix_line(one)),
        "predicted": [one.predicted.step, one.predicted.low, one.predicted.high],
        "same": one.same_wait_as,
    }


def _plan(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    saved = 0
    for number, one in enumerate(diagnosis.plan):
        before, saved = saved, saved + max(0, one.run_gain)
        late = [run_report.lateness(late, diagnosis.given) for late in one.late]
        others = {other.named: str(place) for place, other in enumerate(diagnosis.plan, 1) if other is not one}
        yield {
            "number": number,
            "fix": text(words.fix(one.fix)),
            "where": [place(where) for where in one.where[:6]],
            "causes": list(one.causes),
            "before": one.predicted.step + one.gain,
            "predicted": [one.predicted.step, one.predicted.low, one.predicted.high],
            "turns": text(run_report.turns_meant(one)),
            "run": [before, saved] if diagnosis.run is not None and saved else None,
            "alone": one.alone,
            "needs": [others.get(name) or text(words.fix(name)) for name in dict.fromkeys(one.needs)],
            "instead": [text(words.fix(other)) for other in one.instead],
            "says": [text(said) for said in (one.reason, *late, one.advice) if said],
            "code": text(one.code),
            "loop": text(one.loop),
            "replayed": edit_in(diagnosis.turns, one) is not None,
        }


def edit_in(turns: Turns | None, fix: PlannedFix) -> Edit | None:
    """What the fix changes in these turns: nothing, where it is a fix of others."""
    edit = fix.edit
    if turns is None or edit is None or fix.loop or fix.every or len(edit.drop) != len(turns.timeline):
        return None
    return edit


def compared(done: Comparison) -> dict[str, Any]:
    """What changed from one run to the other; a change is the time before, the time after, and if it is no noise."""
    run, foretold = done.run, done.foretold
    return {
        "step": _change(done.step),
        "ledger": [[name, *_change(change)] for name, change in done.ledger.items()],
        "plan": [
            {
                "fix": text(words.fix(one.fix.fix)),
                "where": words.spot(one.fix.where[0], 80) if one.fix.where else "",
                "made": one.made,
                "gain": one.fix.gain,
            }
            for one in done.plan
        ],
        "foretold": None if foretold is None else [foretold.step, foretold.low, foretold.high],
        "run": None if run is None else [run.before, run.after, done.run_foretold],
        "notes": [text(note) for note in done.notes],
    }


def _change(change: Change) -> list[Any]:
    return [change.before, change.after, change.significant]


def _course(plain: PlainRun, run: Part | None) -> dict[str, Any]:
    """`ended` counts from the run's first moment; where its clock is not known, steps fill the likeliest loop."""
    course = plain.course
    took = [course.each * step for step in course.step]
    ended = [*accumulate(took)]
    if run is not None and run.clock != NONE and course.ended:
        ended = [end - run.clock for end in course.ended]
    elif run is not None and ended:
        loop = min(run.within(), key=lambda part: abs(part.turns - plain.steps - plain.warm_up))
        stretched = loop.time / max(1, ended[-1])
        ended = [loop.began + round(stretched * end) for end in ended]
    return asdict(course) | {"ended": ended}


def _part(part: Part) -> dict[str, Any]:
    """A part of the run, with all that it contains."""
    slow = next(iter(part.kinds), None)
    return {
        "kind": part.kind,
        "place": text(part.place),
        "source": tame(part.source, LONGEST_LINE),
        "function": tame(part.function, 120),
        "began": part.began,
        "time": part.time,
        "busy": None if part.busy == NONE else part.busy,
        "turns": part.turns,
        "least": part.at_least,
        "turn": None if part.turn == NONE else [part.turn, part.low, part.high],
        "slow": None if slow is None else [slow.count, slow.every, slow.regular, slow.longer, text(slow.place)],
        "lines": [[text(one.place), one.time, one.idle, tame(one.call, 80)] for one in part.lines[:8]],
        "parts": [_part(one) for one in part.parts],
    }


def sources(diagnosis: Diagnosis) -> dict[str, list[list[Any]]]:
    """Of each file that lies where the recording says, the lines around those that are spoken of: `[number, text]`."""
    wanted: dict[str, set[int]] = {}
    for where in _spoken_of(diagnosis):
        wanted.setdefault(where.file, set()).add(where.line)
    shown, room = {}, MOST_LINES
    for file, lines in wanted.items():
        kept = _around(text_of(Where(file)).splitlines(), lines)[:room]
        room -= len(kept)
        if kept:
            shown[text(file)] = kept
    return shown


def _spoken_of(diagnosis: Diagnosis) -> Iterator[Where]:
    for one in (diagnosis, *(loop.diagnosis for loop in diagnosis.loops)):
        yield from (site.where for cause in one.causes for site in cause.sites)
        yield from (where for fix in one.plan for where in fix.where)
        yield from one.turns.places if one.turns is not None else ()
    for part in diagnosis.run.within() if diagnosis.run is not None else ():
        file, _, line = part.place.rpartition(":")
        if line.isdecimal():
            yield Where(file, int(line))


def _around(lines: list[str], wanted: Iterable[int]) -> list[list[Any]]:
    near = {line + step for line in wanted for step in range(-LINES_AROUND, LINES_AROUND + 1)}
    return [
        [line, tame(lines[line - 1].expandtabs(4)[:LONGEST_LINE])] for line in sorted(near) if 0 < line <= len(lines)
    ]
