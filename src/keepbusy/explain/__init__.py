"""Explain a timeline: which causes make the GPU wait, where they are, and what mending them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from keepbusy.explain.diagnosis import CAUSES, COMPUTING, COPYING, PLACES, WIRE, Cause, Diagnosis, Harmless
from keepbusy.explain.edit import Edit
from keepbusy.explain.fixes import FINDERS, Finding, findings
from keepbusy.explain.forecast import Forecast
from keepbusy.explain.late import late_ranks
from keepbusy.explain.notes import notes_of
from keepbusy.explain.plain import Plain, other_view, plain_run
from keepbusy.explain.remedies import REMEDIES
from keepbusy.explain.scene import Scene
from keepbusy.explain.sentences import what_happened, why_harmless
from keepbusy.explain.sites import gathered, sites_of
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.steps import sample, whole_steps

__all__ = ["CAUSES", "explain"]

RESIDUAL = ("launch_bound", "host_work")
"""Causes that every program has a little of; in the ledger they take what the others leave."""
SILENT = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not worth a line when they cost nothing."""


def explain(
    timeline: Timeline,
    plain_step: int | None = None,
    mend: Sequence[str] = (),
    workers: int = 8,
    on_progress: Callable[[str, float], Any] | None = None,
) -> Diagnosis:
    """Why the GPU waits. `plain_step`: nanoseconds a step without a profiler; shares and gains refer to it."""
    _refuse_unknown(mend)
    whole = whole_steps(timeline, plain_step)
    window = sample(whole)
    plain = plain_run(window, plain_step)
    scene = Scene(plain.timeline, workers)
    story = _Story(scene, Forecast(plain, other_view(window, plain)), findings(scene), tuple(mend))
    # nothing was recorded on a virtual GPU at the cost of the host: that run is its own plain one
    return story.told(whole, plain_step is not None or bool(timeline.facts.get("virtual")))


def _refuse_unknown(mend: Sequence[str]) -> None:
    for cause in mend:
        if cause not in FINDERS:
            raise BadInput(f"{cause!r} is no cause that can be mended; the causes are {', '.join(FINDERS)}.")


@dataclass(eq=False)
class _Story:
    scene: Scene
    forecast: Forecast
    found: dict[str, Finding]
    mended: tuple[str, ...]

    @property
    def plain(self) -> Plain:
        return self.forecast.plain

    def gain(self, cause: str) -> int:
        return self.plain.step - self.forecast.predict(self.found[cause].edit).step

    def told(self, whole: Timeline, plain_given: bool) -> Diagnosis:
        named = self._named()
        ledger = self._ledger(named)
        share = sum(ledger[cause] for cause in CAUSES if cause in ledger) / self.plain.step
        timeline = self.scene.timeline
        return Diagnosis(
            plain_step=self.plain.step,
            plain_given=plain_given,
            traced_step=_traced_step(whole),
            steps=len(whole.marks_of(whole.ranks[0])),
            ledger=ledger,
            causes=tuple(self._cause(cause, ledger) for cause in named),
            harmless=self._harmless(named, share),
            predicted=self.forecast.predict(self._together(self.mended or named)),
            noise=self.forecast.noise,
            ranks=tuple(timeline.ranks),
            late=late_ranks(self.scene, self.found.get("peer_late") if "peer_late" in named else None),
            mended=self.mended,
            device=str(timeline.facts.get("device", "")),
            sources=_sources(timeline),
            notes=notes_of(whole, self.scene, self.plain, plain_given),
        )

    def _named(self) -> list[str]:
        """Causes whose mending gains more than the noise, the largest gain first; among equals the more specific."""
        claimed = [cause for cause in self.found if self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in RESIDUAL))

    def _together(self, causes: Sequence[str]) -> Edit:
        edits = [self.found[cause].edit for cause in causes if cause in self.found]
        return reduce(or_, edits, Edit.nothing(self.scene.timeline))

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """Mend one cause after the other: what waiting each of them takes away is its row. The rest is unknown."""
        spent = self.forecast.spent(Edit.nothing(self.scene.timeline))
        rest = [cause for cause in self.found if cause not in named]
        order = [*(one for one in named if one not in RESIDUAL), *rest, *(one for one in named if one in RESIDUAL)]
        order.sort(key=lambda cause: cause in RESIDUAL)
        waits, left, edit = {}, spent.waiting, Edit.nothing(self.scene.timeline)
        for cause in order:
            edit = edit | self.found[cause].edit
            after = min(left, self.forecast.spent(edit).waiting)
            waits[cause], left = left - after, after
        return _rounded(
            self.plain.step, {COMPUTING: spent.computing, COPYING: spent.copying, WIRE: spent.wire, **waits, "unknown": left}
        )

    def _cause(self, cause: str, ledger: dict[str, int]) -> Cause:
        finding, remedy = self.found[cause], REMEDIES[cause]
        count = len(finding.rows) / self.scene.steps / len(self.scene.timeline.ranks)
        return Cause(
            cause=cause,
            wait=ledger.get(cause, 0),
            count=count,
            sites=sites_of(self.scene, finding, self.forecast, self.gain(cause)),
            what=what_happened(self.scene, finding),
            fix=remedy.fix,
            advice=remedy.advice,
            remedy=remedy.code.format(workers=self.scene.workers),
            api=remedy.api,
            predicted=self.forecast.predict(finding.edit),
        )

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.scene.steps * len(self.scene.timeline.ranks)
        rows = []
        for cause, finding in self.found.items():
            if cause in named or cause in SILENT:
                continue
            why = why_harmless(cause, set(named), waiting_share)
            for place, mine in gathered(self.scene, finding.rows).items():
                rows.append(Harmless(cause, place, len(mine) / per_step, why))
        return tuple(sorted(rows, key=lambda one: -one.count))


def _rounded(total: int, parts: dict[str, float]) -> dict[str, int]:
    """Whole nanoseconds that sum to the step; computing takes what rounding leaves."""
    whole = {place: round(parts[place]) for place in PLACES if place in parts}
    whole[COMPUTING] += total - sum(whole.values())
    return {place: time for place, time in whole.items() if time > 0 or place == COMPUTING}


def _traced_step(whole: Timeline) -> int:
    """As the host's marks show it, recording included."""
    rank = whole.ranks[0]
    rows = np.flatnonzero((whole.rank_of_rows == rank) & ~whole.on_device)
    spans, marks = whole.spans, whole.marks_of(rank)
    return int((spans.end[rows].max() - spans.start[marks[0]]) / len(marks))


def _sources(timeline: Timeline) -> tuple[str, ...]:
    several = timeline.facts.get("sources")
    return tuple(map(str, several)) if several else tuple(filter(None, [str(timeline.facts.get("source", ""))]))
