"""A diagnosis as JSON. Times are milliseconds a step; `docs/reference/json.md` describes every field."""

from __future__ import annotations

import json
from typing import Any

from keepbusy.explain.diagnosis import Cause, Diagnosis, Harmless, Late, Later, LoopDiagnosis, Rare, Site, Where
from keepbusy.report import cluster, run_report
from keepbusy.report.fix_line import fix_line
from keepbusy.report.whole_run import called_at, where_of
from keepbusy.timeline.model import NONE
from keepbusy.timeline.plain_run import PlainRun, RareStall

VERSION = 1


def render(diagnosis: Diagnosis) -> str:
    """One JSON object, in the order in which a reader wants it."""
    return json.dumps(as_object(diagnosis), indent=1, allow_nan=False)


def as_object(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "version": VERSION,
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
        "harmless": [_harmless(one) for one in diagnosis.harmless],
        "late": [_late(one) for one in diagnosis.late],
        "fixed": list(diagnosis.fixed),
        "predicted_step": milliseconds(diagnosis.predicted.step),
        "predicted_low": milliseconds(diagnosis.predicted.low),
        "predicted_high": milliseconds(diagnosis.predicted.high),
        "notes": list(diagnosis.notes),
        "plan": run_report.planned(diagnosis),
        "run": run_report.run_as_json(diagnosis.run),
        "loops": [_loop(one) for one in diagnosis.loops],
        "plain_runs": [_plain_run(rank, run) for rank, run in sorted(diagnosis.plain_runs.items())],
        "rare": [_rare(one) for one in diagnosis.rare],
        "later": _later(diagnosis.later) if diagnosis.later else None,
        "cluster": cluster.as_object(diagnosis.cluster) if diagnosis.cluster else None,
    }


def _loop(one: LoopDiagnosis) -> dict[str, Any]:
    return {"where": one.place, "turns": one.turns or None, "diagnosis": as_object(one.diagnosis)}


def milliseconds(time: int) -> float:
    """To the nanosecond, so that sums hold."""
    return round(int(time) / 1e6, 6)


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.cause,
        "wait": milliseconds(cause.wait),
        "count": _count(cause.count),
        **spot(cause.where),
        "sites": [_site(site) for site in cause.sites],
        "what": cause.what,
        "fix": cause.fix,
        "advice": cause.advice,
        "remedy": cause.api,
        "code": fix_line(cause),
        "predicted_step": milliseconds(cause.predicted.step),
        "predicted_low": milliseconds(cause.predicted.low),
        "predicted_high": milliseconds(cause.predicted.high),
        "same_wait_as": cause.same_wait_as,
    }


def _site(site: Site) -> dict[str, Any]:
    return {
        **spot(site.where),
        "count": _count(site.count),
        "wait": milliseconds(site.wait),
    }


def spot(where: Where) -> dict[str, Any]:
    """A place as a text, and all that is known of it."""
    return {"where": str(where), "place": place(where)}


def place(where: Where) -> dict[str, Any]:
    """All that is known of a place; `exact` tells whether the line is the call's own."""
    return {
        "file": where.file,
        "line": int(where.line),
        "function": where.function,
        "exact": bool(where.exact),
        "operator": where.operator,
        "around": where.around,
        "library": where.library,
    }


def _harmless(one: Harmless) -> dict[str, Any]:
    return {
        "cause": one.cause,
        **spot(one.where),
        "count": _count(one.count),
        "why": one.why,
    }


def _late(one: Late) -> dict[str, Any]:
    return {
        "rank": int(one.rank),
        "late": milliseconds(one.late),
        "cause": one.cause,
        **spot(one.where),
    }


def _plain_run(rank: int, run: PlainRun) -> dict[str, Any]:
    return {
        "rank": int(rank),
        "marked_by": run.marked_by,
        "steps": run.steps,
        "step": milliseconds(run.step),
        "low": milliseconds(run.low),
        "high": milliseconds(run.high),
        "warm_up": run.warm_up,
        "warm_up_time": milliseconds(run.warm_up_time),
        "host": _known(run.host),
        "lead": _known(run.lead),
        "no_lead": round(run.no_lead, 3),
        "input": milliseconds(run.input),
        "collector": milliseconds(run.collector),
        "requests": _count(run.requests),
        "retries": run.retries,
        "delayed": round(run.delayed, 3),
        "stalls": [_rare_stall(stall) for stall in run.stalls],
        "course": {
            "each": run.course.each,
            "step": [_known(time) for time in run.course.step],
            "longest": [_known(time) for time in run.course.longest],
            "lead": [_known(time) for time in run.course.lead],
        },
        "fault": run.fault,
    }


def _rare_stall(stall: RareStall) -> dict[str, Any]:
    where, caller = where_of(stall), called_at(stall)
    return {
        "what": stall.what,
        "where": str(where) if where.file else "",
        "place": place(where),
        "called_at": str(caller) if caller.file else "",
        "count": stall.count,
        "every": _count(stall.every),
        "regular": stall.regular,
        "time": milliseconds(stall.time),
        "share": round(stall.share, 4),
    }


def _rare(one: Rare) -> dict[str, Any]:
    return {
        "stall": _rare_stall(one.stall),
        "step": one.step,
        "plain_step": milliseconds(one.plain_step),
        "ledger": {place: milliseconds(time) for place, time in one.ledger.items()},
        "causes": [_cause(cause) for cause in one.causes],
        "predicted_step": milliseconds(one.predicted.step),
        "predicted_low": milliseconds(one.predicted.low),
        "predicted_high": milliseconds(one.predicted.high),
        "predicted_gain": milliseconds(one.gain_of(one.predicted)),
    }


def _later(later: Later) -> dict[str, Any]:
    now = later.diagnosis
    return {
        "since": later.since,
        "plain_step": milliseconds(now.plain_step),
        "ledger": {place: milliseconds(time) for place, time in now.ledger.items()},
        "causes": [_cause(cause) for cause in now.causes],
        "predicted_step": milliseconds(now.predicted.step),
    }


def _known(time: int) -> float | None:
    return None if time == NONE else milliseconds(time)


def _count(count: float) -> float:
    return round(float(count), 3)
