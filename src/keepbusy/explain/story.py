"""What one recorded moment tells: its causes, ordered and mended one after the other, told as a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

import numpy as np

from keepbusy.explain.diagnosis import CAUSES, COMPUTING, COPYING, PLACES, WIRE, Cause, Diagnosis, Harmless
from keepbusy.explain.edit import Edit
from keepbusy.explain.fixes import Finding, findings
from keepbusy.explain.fixes.peers import without_messages
from keepbusy.explain.forecast import Forecast
from keepbusy.explain.late import late_ranks
from keepbusy.explain.ledger import Busy
from keepbusy.explain.notes import notes_of
from keepbusy.explain.plain import Plain, other_view, plain_run
from keepbusy.explain.remedies import remedy_for
from keepbusy.explain.scene import Scene
from keepbusy.explain.seen import seen
from keepbusy.explain.sentences import what_happened, why_harmless
from keepbusy.explain.sites import gathered, sites_of
from keepbusy.timeline.model import WORKERS, Timeline
from keepbusy.timeline.plain_run import plain_runs

RESIDUAL = ("launch_bound", "host_work")
"""Causes that every program has a little of; in the ledger they take what the others leave."""
GENERAL = ("blocking_copy", "copy_not_overlapped", *RESIDUAL)
"""Causes that come after others of the same gain, which say more of what to do."""
HELD_BY = {
    WORKERS: ("input_late",),
    "workers": ("input_late",),
    "fetching": ("blocking_copy", "copy_not_overlapped"),
    "bringing home": ("blocking_copy",),
    "wire": ("exposed_collective",),
}
"""Lanes on which the mended work goes on, and whose work it is."""
SHARED = 0.2
"""A cause that keeps less than this share of its gain beside another one recovers the same wait."""
SILENT = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not worth a line when they cost nothing."""


@dataclass(eq=False)
class Story:
    """Whole steps, replayed as they were and mended."""

    scene: Scene
    forecast: Forecast
    found: dict[str, Finding]
    mended: tuple[str, ...]

    @staticmethod
    def of(window: Timeline, plain_step: int | None, workers: int, mended: Sequence[str] = ()) -> Story:
        plain = plain_run(window, plain_step)
        scene = Scene(plain.timeline, workers)
        return Story(scene, Forecast(plain, other_view(window, plain)), findings(scene), tuple(mended))

    @property
    def plain(self) -> Plain:
        return self.forecast.plain

    @cached_property
    def unchanged(self) -> Busy:
        return self.forecast.spent(Edit.nothing(self.scene.timeline))

    def gain(self, cause: str) -> int:
        return self.forecast.gain(self.found[cause].edit)

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
            causes=tuple(self._cause(cause, named[:place]) for place, cause in enumerate(named)),
            harmless=self._harmless(named, share),
            predicted=self.forecast.predict(self._together(self.mended) if self.mended else self._all(named)),
            noise=self.forecast.noise,
            ranks=tuple(timeline.ranks),
            late=late_ranks(self.scene, self.found.get("peer_late") if "peer_late" in named else None),
            mended=self.mended,
            device=str(timeline.facts.get("device", "")),
            sources=_sources(timeline),
            notes=(*notes_of(whole, self.scene, self.plain, plain_given), *self._unseen()),
            plain_runs=plain_runs(timeline.facts, timeline.ranks[0]),
        )

    def _unseen(self) -> list[str]:
        return [f"{cause} was not seen in this run." for cause in self.mended if cause not in self.found]

    def _named(self) -> list[str]:
        """Causes whose mending gains more than the noise, the largest gain first; among equals the more specific."""
        claimed = [cause for cause in self.found if self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in GENERAL))

    def _together(self, causes: Sequence[str]) -> Edit:
        edits = [self.found[cause].edit for cause in causes if cause in self.found]
        return reduce(or_, edits, Edit.nothing(self.scene.timeline))

    def _all(self, named: Sequence[str]) -> Edit:
        """All that are named, or the first alone where the others would only crowd the lane that it moves to."""
        return min([self._together(named), *(self.found[cause].edit for cause in named[:1])], key=self.forecast.step)

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """Mend one cause after the other: the time it gives back is its row. What then is left has no cause we know."""
        order = [*named, *(cause for cause in self.found if cause not in named)]
        order.sort(key=lambda cause: cause in RESIDUAL)
        waits, left, edit = {}, self.unchanged.held_up, Edit.nothing(self.scene.timeline)
        for cause in order:
            edit = edit | self.found[cause].edit
            after = min(left, self.forecast.spent(edit).held_up)
            waits[cause], left = left - after, after
        waits["pipeline_bubble"] = self._bubble(edit, left)
        left -= waits["pipeline_bubble"]
        last = self.forecast.spent(edit)
        copying = min(left, last.copying)
        wire = min(left - copying, last.wire)
        left -= copying + wire
        # where even the mended lane is the slowest, what is left is its cause's, too: workers can only do so much
        still = next((cause for cause in order if cause in HELD_BY.get(last.paced_by, ())), "unknown")
        rest = {COPYING: copying, WIRE: wire, still: waits.get(still, 0.0) + left}
        return _rounded(self.plain.step, {COMPUTING: self.unchanged.computing, **waits, **rest})

    def _bubble(self, edit: Edit, left: float) -> float:
        """Of what is left once all is mended, how long stages of a pipeline wait for each other."""
        messages = without_messages(self.scene)
        if not messages.beside.any():
            return 0.0
        waiting, without = (self.forecast.spent(one).waiting for one in (edit, edit | messages))
        return min(left, max(0.0, waiting - without))

    def _cause(self, cause: str, earlier: Sequence[str]) -> Cause:
        finding = self.found[cause]
        sites = sites_of(self.scene, finding, self.forecast, self.gain(cause))
        remedy = remedy_for(cause, sites[0].where, seen(self.scene, finding))
        count = finding.seen / self.scene.steps / len(self.scene.timeline.ranks)
        return Cause(
            cause=cause,
            wait=round(max(0.0, self.unchanged.held_up - self.forecast.spent(finding.edit).held_up)),
            count=count,
            sites=sites,
            what=what_happened(self.scene, finding),
            fix=remedy.fix,
            advice=remedy.advice,
            remedy=remedy.code.format(workers=self.scene.workers),
            api=remedy.api,
            predicted=self.forecast.predict(finding.edit),
            same_wait_as=self._same_wait_as(cause, earlier),
        )

    def _same_wait_as(self, cause: str, earlier: Sequence[str]) -> str:
        """The first cause before this one on top of which it gains little more."""
        for other in earlier:
            together = self.forecast.gain(self.found[other].edit | self.found[cause].edit)
            if together - self.gain(other) < max(SHARED * self.gain(cause), self.forecast.noise):
                return other
        return ""

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.scene.steps * len(self.scene.timeline.ranks)
        rows = []
        for cause, finding in self.found.items():
            if cause in named or cause in SILENT:
                continue
            why = why_harmless(set(named), waiting_share)
            for place, mine in gathered(self.scene, finding.rows).items():
                rows.append(Harmless(cause, place, len(mine) / per_step, why, max(0, self.gain(cause))))
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
    left_out = whole.facts.get("left_out", {}).get("time", 0)
    return int((spans.end[rows].max() - spans.start[marks[0]] - left_out) / len(marks))


def _sources(timeline: Timeline) -> tuple[str, ...]:
    several = timeline.facts.get("sources")
    return tuple(map(str, several)) if several else tuple(filter(None, [str(timeline.facts.get("source", ""))]))
