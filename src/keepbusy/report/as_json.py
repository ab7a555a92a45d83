"""Diagnoses and comparisons as JSON, in the order in which a reader wants it; `docs/reference/json.md` has every field.

Times are milliseconds, of the whole run seconds.
"""

from __future__ import annotations

import json
from typing import Any

from keepbusy.causes.places import Where
from keepbusy.explain.comparison import Change, Comparison
from keepbusy.explain.diagnosis import Cause, Diagnosis, PlannedFix, Prediction
from keepbusy.report import labels, race_words, verdict
from keepbusy.report.run_report import PlanRow, planned_rows
from keepbusy.report.source import fix_line
from keepbusy.timeline.model import NONE
from keepbusy.timeline.races import DataRace
from keepbusy.timeline.run_facts import Cluster, Part, PlainRun

VERSION = 2
"""2: the verdict comes first, and each fix of the plan has `name`, `code`, `predicted`, `run` and `blockers`."""
COMPARISON_VERSION = 1


def render(diagnosis: Diagnosis) -> str:
    return json.dumps(as_object(diagnosis), indent=1, allow_nan=False)


def render_comparison(comparison: Comparison) -> str:
    return json.dumps(_comparison(comparison), indent=1, allow_nan=False)


def as_object(diagnosis: Diagnosis) -> dict[str, Any]:
    ended = diagnosis.cut_short
    return {
        "version": VERSION,
        "verdict": verdict.statement(diagnosis),
        "plan": planned(diagnosis),
        "plain_step": milliseconds(diagnosis.plain_step),
        "plain_given": diagnosis.plain_given,
        "traced_step": milliseconds(diagnosis.traced_step),
        "steps": int(diagnosis.steps),
        "ranks": [int(rank) for rank in diagnosis.ranks],
        "device": diagnosis.device,
        "sources": list(diagnosis.sources),
        "ledger": {place: milliseconds(time) for place, time in diagnosis.ledger.items()},
        "waiting": milliseconds(diagnosis.waiting),
        "noise": milliseconds(diagnosis.noise),
        "causes": [_cause(cause) for cause in diagnosis.causes],
        "harmless": [
            {"cause": harmless.cause, **_spot(harmless.where), "count": _count(harmless.count), "why": harmless.why}
            for harmless in diagnosis.harmless
        ],
        "late": [
            {"rank": int(late.rank), "late": milliseconds(late.late), "cause": late.cause, **_spot(late.where)}
            for late in diagnosis.late
        ],
        "fixed": list(diagnosis.fixed),
        **_predicted(diagnosis.predicted),
        "notes": list(diagnosis.notes),
        "run": run_as_json(diagnosis.run),
        "loops": [
            {"where": loop.place, "turns": loop.turns or None, "diagnosis": as_object(loop.diagnosis)}
            for loop in diagnosis.loops
        ],
        "plain_runs": [_plain_run(rank, run) for rank, run in sorted(diagnosis.plain_runs.items())],
        "cluster": _cluster(diagnosis.cluster) if diagnosis.cluster else None,
        "cut_short": {
            **_same(ended, "how", "by"),
            "where": ended.place,
            "rank": None if ended.rank == NONE else ended.rank,
        }
        if ended
        else None,
        "races": [_race(race) for race in diagnosis.races],
    }


def milliseconds(time: int) -> float:
    """Rounded to the nanosecond, so that sums stay exact."""
    return round(int(time) / 1e6, 6)


def _known(time: int) -> float | None:
    return None if time == NONE else milliseconds(time)


def _seconds(time: int) -> float | None:
    return None if time == NONE else round(time / 1e9, 6)


def _count(count: float) -> float:
    return round(float(count), 3)


def _same(source: object, *names: str) -> dict[str, Any]:
    """Attributes under their own names."""
    return {name: getattr(source, name) for name in names}


def _times(source: object, *names: str) -> dict[str, float | None]:
    """Attributes that are times, under their own names, in milliseconds."""
    return {name: _known(getattr(source, name)) for name in names}


def _predicted(prediction: Prediction | None) -> dict[str, float | None]:
    return {f"predicted_{name}": _known(getattr(prediction, name, NONE)) for name in ("step", "low", "high")}


def _spot(where: Where) -> dict[str, Any]:
    """A place as a text and as an object."""
    return {"where": str(where), "place": _place(where)}


def _place(where: Where) -> dict[str, Any]:
    """`exact`: the line is the call's own."""
    facts = _same(where, "file", "function", "operator", "around", "library")
    return facts | {"line": int(where.line), "exact": bool(where.exact)}


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.cause,
        "wait": milliseconds(cause.wait),
        "count": _count(cause.count),
        **_spot(cause.where),
        "sites": [
            {**_spot(site.where), "count": _count(site.count), "wait": milliseconds(site.wait)} for site in cause.sites
        ],
        **_same(cause, "what", "fix", "advice"),
        "remedy": cause.api,
        "code": fix_line(cause.fix, cause.where, cause.remedy),
        **_predicted(cause.predicted),
        "same_wait_as": cause.same_wait_as,
    }


def planned(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The plan, with the time of an iteration (milliseconds) and of the run (seconds) before and after each fix."""
    rows = {row.fix.named: row for row in planned_rows(diagnosis)}
    return [_fix(fix, rows.get(fix.named)) for fix in diagnosis.plan]


def _fix(fix: PlannedFix, row: PlanRow | None) -> dict[str, Any]:
    """`row` is None if the fix saves too little of the run to be listed in reports."""
    predicted, before = fix.predicted, fix.predicted.step + fix.gain
    after, low, high = (
        (predicted.step, predicted.low, predicted.high) if row is None else (row.after, row.low, row.high)
    )
    is_run_known = row is not None and row.run_after != NONE
    return {
        "fix": fix.fix,
        "name": labels.fix(fix.fix),
        "where": [str(place) for place in fix.where],
        "code": fix.code,
        "predicted": {
            "before": milliseconds(before),
            "after": milliseconds(after),
            "low": milliseconds(low),
            "high": milliseconds(high),
        },
        "run": {"before": _seconds(row.run_before), "after": _seconds(row.run_after)} if row and is_run_known else None,
        "blockers": [str(place) for place in fix.blockers],
        "is_listed": row is not None,
        "causes": list(fix.causes),
        **_times(fix, "gain", "alone"),
        "needs": list(fix.needs),
        "instead": list(fix.instead),
        "remedy": fix.api,
        "loop": fix.loop,
    }


def run_as_json(run: Part | None) -> dict[str, Any] | None:
    """The tree of the run's parts. Times are seconds; those of an iteration are milliseconds."""
    if run is None:
        return None
    return {
        "kind": run.kind,
        "where": run.place,
        "source": run.source,
        "function": run.function,
        "began": _seconds(run.began),
        "time": _seconds(run.time),
        "busy": _seconds(run.busy),
        "turns": run.turns or None,
        "at_least": run.at_least,
        **_times(run, "turn", "low", "high"),
        "warm_up": {"turns": run.warm_up, "time": _seconds(run.warm_up_time)},
        "kinds": [
            _same(slow, "count", "every", "regular")
            | {"longer": _known(slow.longer), "total": _seconds(slow.total), "where": slow.place}
            for slow in run.kinds
        ],
        "lines": [
            {"where": line.place, "time": _seconds(line.time), "idle": _seconds(line.idle), "call": line.call}
            for line in run.lines
        ],
        "parts": [run_as_json(part) for part in run.parts],
    }


def _plain_run(rank: int, run: PlainRun) -> dict[str, Any]:
    return {
        "rank": int(rank),
        **_same(run, "marked_by", "steps", "warm_up", "retries", "fault"),
        **_times(run, "step", "low", "high", "warm_up_time", "host", "lead", "input", "collector"),
        **{name: _count(getattr(run, name)) for name in ("no_lead", "requests", "delayed")},
        "course": {
            "each": run.course.each,
            **{name: [*map(_known, getattr(run.course, name))] for name in ("step", "longest", "lead")},
        },
    }


def _race(race: DataRace) -> dict[str, Any]:
    first, second = (_same(use, "place", "writes", "stream") for use in (race.first, race.second))
    said = {"sentence": race_words.sentence(race), "remedy": race_words.remedy(race)}
    return {**_same(race, "kind", "size", "times"), "first": first, "second": second, **said}


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "world": cluster.world,
        **_times(cluster, "step", "typical"),
        "stragglers": [
            {
                "host": straggler.host,
                "ranks": list(straggler.ranks),
                "late": milliseconds(straggler.late),
                "cause": "computing" if straggler.computing else "host_work",
                "step_without": milliseconds(straggler.left),
            }
            for straggler in cluster.stragglers
        ],
        "ranks": [
            _same(rank, "rank", "host", "last", "kind") | _times(rank, "own", "computing", "waits", "behind")
            for rank in cluster.ranks
        ],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    run = comparison.run
    return {
        "version": COMPARISON_VERSION,
        "before": _side(comparison.before, comparison.runs[0]),
        "after": _side(comparison.after, comparison.runs[1]),
        "step": _change(comparison.step),
        "ledger": {name: _change(change) for name, change in comparison.ledger.items()},
        "causes": [
            _same(change, "cause", "verdict")
            | {"predicted_gain": _change(change.predicted_gain), "wait": _change(change.wait)}
            | _spot(change.where)
            for change in comparison.causes
        ],
        **_predicted(comparison.predicted),
        "notes": list(comparison.notes),
        "plan": [
            {
                "fix": outcome.fix.fix,
                "where": [str(where) for where in outcome.fix.where],
                "gain": milliseconds(outcome.fix.gain),
                "step": milliseconds(outcome.fix.predicted.step),
                "made": outcome.made,
            }
            for outcome in comparison.plan
        ],
        "foretold_step": milliseconds(comparison.foretold.step) if comparison.foretold else None,
        "run": {
            "before": round(run.before / 1e9, 3),
            "after": round(run.after / 1e9, 3),
            "foretold": round(comparison.run_foretold / 1e9, 3),
        }
        if run
        else None,
    }


def _side(side: Diagnosis, runs: int) -> dict[str, Any]:
    return {
        "runs": runs,
        "sources": list(side.sources),
        "device": side.device,
        "ranks": [int(rank) for rank in side.ranks],
        "plain_given": side.plain_given,
    }


def _change(change: Change) -> dict[str, Any]:
    return {**_times(change, "before", "after", "noise"), "significant": change.significant}
