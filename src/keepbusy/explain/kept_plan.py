"""The plan of a run, kept in a file beside it: making it anew takes as long as explaining the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix, Prediction
from keepbusy.fixes.definition import CapturedLines


@dataclass(frozen=True)
class KeptPlan:
    """What is needed to make the fixes of a plan."""

    plan: tuple[PlannedFix, ...]
    loop: str
    plain_step: int
    usual: int
    """The usual iteration of that loop, by the run's own clock; 0 or less if it was not counted."""
    length: int
    """Of the whole run; 0 if it is not known."""
    folder: str
    command: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> KeptPlan:
        of_run = diagnosis.folder, diagnosis.command, tuple(diagnosis.sources)
        usual, length = diagnosis.usual_of(diagnosis.loop), diagnosis.run.time if diagnosis.run is not None else 0
        return cls(diagnosis.plan, diagnosis.loop, diagnosis.plain_step, usual, length, *of_run)

    def as_json(self) -> str:
        plan = [
            {
                "fix": fix.fix,
                "where": [[place.file, place.line, place.exact] for place in fix.where],
                "captured": fix.captured,
                "loop": fix.loop,
                "advice": fix.advice,
                "code": fix.code,
                "needs": fix.needs,
            }
            for fix in self.plan
        ]
        of_run = {"folder": self.folder, "command": self.command, "sources": self.sources}
        times = {"step": self.plain_step, "usual": self.usual, "length": self.length}
        return json.dumps({"plan": plan, "loop": self.loop, **times, **of_run})

    @classmethod
    def of_json(cls, text: str) -> KeptPlan:
        """Raises ValueError for what `as_json` did not give."""
        try:
            kept = json.loads(text)
            times = kept["step"], kept["usual"], kept["length"]
            of_run = kept["folder"], tuple(kept["command"]), tuple(kept["sources"])
            return cls(tuple(map(_planned, kept["plan"])), kept["loop"], *times, *of_run)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no plan ({error})") from None


def _planned(kept: Mapping[str, Any]) -> PlannedFix:
    where = tuple(Where(file, line, exact=exact) for file, line, exact in kept["where"])
    captured = tuple(
        CapturedLines(file, function, tuple(map(tuple, launching)), tuple(staying), tuple(fed), tuple(masked))
        for file, function, launching, staying, fed, masked, *_ in kept["captured"]
    )
    return PlannedFix(
        kept["fix"],
        where,
        (),
        0,
        Prediction(0, 0, 0),
        0,
        loop=kept["loop"],
        advice=kept["advice"],
        code=kept["code"],
        needs=tuple(kept["needs"]),
        captured=captured,
    )
