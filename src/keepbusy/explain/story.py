"""What recorded moments tell: one moment's causes, fixed alone and together; then those of further windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_

import numpy as np

from keepbusy.explain.causes import Finding, findings
from keepbusy.explain.causes.peers import without_messages
from keepbusy.explain.diagnosis import (
    CAUSES,
    COMPUTING,
    COPYING,
    PLACES,
    WIRE,
    Cause,
    Diagnosis,
    Harmless,
    Later,
    Prediction,
    Rare,
    Where,
)
from keepbusy.explain.edit import Edit, SideLane
from keepbusy.explain.ledger import NOISE, Busy, Forecast, mean_over_orders
from keepbusy.explain.places import by_place, late_ranks, sites_of
from keepbusy.explain.plain import Plain, fed_as_usual, other_view, plain_run
from keepbusy.explain.remedies import CHECKPOINT, lesson, remedy_for, what_happened
from keepbusy.explain.rules import rule
from keepbusy.explain.scene import Scene
from keepbusy.explain.turns import Blame, Turns, turns_of
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Ints, Kind, Timeline
from keepbusy.timeline.plain_run import PlainRun, RareStall
from keepbusy.timeline.run_facts import DRIFT, STALL
from keepbusy.timeline.steps import sample, step_alone, whole_steps, without_steps

RESIDUAL = ("launch_bound", "host_work")
"""Causes that every program has a little of; in the ledger they take what the others leave."""
GENERAL = ("blocking_copy", "copy_not_overlapped", *RESIDUAL)
"""Causes that come after others of the same gain, which say more of what to do."""
CAUSES_OF = {
    SideLane.FETCH: ("blocking_copy", "copy_not_overlapped"),
    SideLane.RETURN: ("blocking_copy",),
    SideLane.WIRE: ("exposed_collective",),
    SideLane.WORKERS: ("input_late",),
}
"""Whose work it is that moves to a side lane."""
SAME_WAIT_SHARE = 0.2
"""A cause that keeps less than this share of its gain beside another one recovers the same wait."""
SILENT = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not worth a line when they cost nothing."""
SHARE_IN_LEDGER = 0.005
"""Of the step: causes that change less of it, fixed alone or last, take what the others leave in the ledger."""


@dataclass(eq=False)
class Story:
    """Whole steps, replayed as they were and fixed."""

    scene: Scene
    forecast: Forecast
    found: dict[str, Finding]
    what_if: tuple[str, ...] = ()
    _edits: dict[frozenset[str], Edit] = field(default_factory=dict)

    @staticmethod
    def of(window: Timeline, plain_step: int | None, workers: int, what_if: Sequence[str] = ()) -> Story:
        window = fed_as_usual(window, plain_step)
        plain = plain_run(window, plain_step)
        scene = Scene(plain.timeline, workers)
        return Story(scene, Forecast(plain, other_view(window, plain)), findings(scene), tuple(what_if))

    @property
    def plain(self) -> Plain:
        return self.forecast.plain

    @cached_property
    def unchanged(self) -> Busy:
        return self.forecast.spent(self.edit_of([]))

    def gain(self, cause: str) -> int:
        return self.forecast.gain(self.found[cause].edit)

    def edit_of(self, causes: Iterable[str]) -> Edit:
        """All of these fixed together. One object for each set, so that each set is replayed once."""
        key = frozenset(causes).intersection(self.found)
        if key not in self._edits:
            edits = [finding.edit for cause, finding in self.found.items() if cause in key]
            self._edits[key] = edits[0] if len(edits) == 1 else reduce(or_, edits, Edit.nothing(self.scene.timeline))
        return self._edits[key]

    def diagnosis(self, whole: Timeline, plain_given: bool) -> Diagnosis:
        named = self._named()
        ledger = self._ledger(named)
        share = sum(ledger[cause] for cause in CAUSES if cause in ledger) / self.plain.step
        timeline = self.scene.timeline
        unseen = [f"{cause} was not seen in this run." for cause in self.what_if if cause not in self.found]
        return Diagnosis(
            plain_step=self.plain.step,
            plain_given=plain_given,
            traced_step=_traced_step(whole),
            steps=len(whole.marks_of(whole.ranks[0])),
            ledger=ledger,
            causes=tuple(self._cause(cause, named[:place]) for place, cause in enumerate(named)),
            harmless=self._harmless(named, share),
            predicted=self.forecast.predict(self.edit_of(self.what_if) if self.what_if else self._all(named)),
            noise=self.forecast.noise,
            ranks=tuple(timeline.ranks),
            late=late_ranks(self.scene, self.found["peer_late"]) if "peer_late" in named else (),
            fixed=self.what_if,
            device=timeline.facts.device,
            sources=sources_of(timeline),
            notes=(*notes_of(whole, self.scene, self.plain, plain_given), *unseen),
            plain_runs=timeline.facts.plain_runs,
            cluster=timeline.facts.cluster,
        )

    def _named(self) -> list[str]:
        """Causes whose fixing gains more than the noise, the largest gain first; among equals the more specific."""
        known = set(self.found) - ({"launch_bound"} if self.scene.timeline.facts.compiled_eagerly else set())
        claimed = [cause for cause in self.found if cause in known and self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in GENERAL))

    def turns(self) -> Turns:
        """The turns that were replayed, for who draws them. The causes that gain something come first."""
        causes = dict.fromkeys([*self._named(), *self.found])
        blames = [Blame(cause, self.found[cause].edit, self.found[cause].rows) for cause in causes]
        return turns_of(self.scene.timeline, self.plain.ratio, blames)

    def _all(self, named: Sequence[str]) -> Edit:
        """All that are named, or the first alone where the others would only crowd the lane that it moves to."""
        together = self.edit_of(named)
        first = self.edit_of(named[:1])
        crowded = self.forecast.step(first) < self.forecast.step(together)
        return first if crowded and rule("one_fix_alone") else together

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """What each cause takes of the time in which nothing is computed; what then is left has no cause we know."""
        everything = self.edit_of(self.found)
        waits: dict[str, float] = {}
        left = self.unchanged.held_up
        for causes in self._in_tiers(named):
            taken = self._waits(causes, list(waits), left)
            waits, left = waits | taken, max(0.0, left - sum(taken.values()))
        waits["pipeline_bubble"] = self._bubble(everything, left)
        left -= waits["pipeline_bubble"]
        last = self.forecast.spent(everything)
        copying = min(left, last.copying)
        wire = min(left - copying, last.wire)
        left -= copying + wire
        # where even the moved work is the slowest, what is left is its cause's, too: workers can only do so much
        whose = [cause for cause in (*named, *self.found) if cause in CAUSES_OF.get(last.paced_by, ())]
        still = whose[0] if whose and rule("moved_work") else "unknown"
        rest = {COPYING: copying, WIRE: wire, still: waits.get(still, 0.0) + left}
        return _rounded(self.plain.step, {COMPUTING: self.unchanged.computing, **waits, **rest})

    def _in_tiers(self, named: Sequence[str]) -> Iterator[list[str]]:
        """Which causes share a wait as equals, and which take theirs first.

        What ranks wait for in a collective is the late one's, whatever else would end that wait. Then come causes
        that gain something alone, those that only gain behind them, and last what every program has a little of.
        """
        tier = {cause: 4 if cause in RESIDUAL else 3 for cause in self.found} | {"peer_late": 1}
        tier |= {cause: 2 for cause in named if tier[cause] == 3}
        for number in range(1, 5):
            yield [cause for cause in self.found if tier[cause] == number]

    def _waits(self, causes: Sequence[str], fixed: Sequence[str], left: float) -> dict[str, float]:
        """Of each cause its mean over the orders of fixing, once others are fixed. The small ones come last."""

        def left_after(subset: frozenset[str]) -> float:
            return min(left, self.forecast.spent(self.edit_of([*fixed, *subset])).held_up)

        if len(causes) < 2:
            start = left_after(frozenset())
            return {cause: start - min(start, left_after(frozenset(causes))) for cause in causes}
        start, end = left_after(frozenset()), left_after(frozenset(causes))
        least = SHARE_IN_LEDGER * self.plain.step
        large = []
        for cause in causes:
            alone = start - left_after(frozenset([cause]))
            last = left_after(frozenset(causes) - {cause}) - end if alone < least else alone
            large += [cause] if max(alone, last) >= least else []
        waits = mean_over_orders(large, left_after)
        rest = start - sum(waits.values())
        for place, cause in enumerate(small := [cause for cause in causes if cause not in large], 1):
            after = min(rest, left_after(frozenset([*large, *small[:place]])))
            waits[cause], rest = rest - after, after
        return waits

    def _bubble(self, edit: Edit, left: float) -> float:
        """Of what is left once all is fixed, how long stages of a pipeline wait for each other."""
        messages = without_messages(self.scene)
        if not messages.touched.any():
            return 0.0
        waiting, without = (self.forecast.spent(one).waiting for one in (edit, edit | messages))
        return min(left, max(0.0, waiting - without))

    def _cause(self, cause: str, earlier: Sequence[str]) -> Cause:
        finding = self.found[cause]
        sites = sites_of(self.scene, finding, self.forecast, self.gain(cause))
        remedy = remedy_for(self.scene, finding, sites[0].where)
        return Cause(
            cause=cause,
            wait=round(max(0.0, self.unchanged.held_up - self.forecast.spent(finding.edit).held_up)),
            count=finding.count / self.scene.steps / len(self.scene.timeline.ranks),
            sites=sites,
            what=what_happened(self.scene, finding),
            fix=remedy.fix,
            advice=remedy.advice,
            remedy=remedy.code,
            api=remedy.api,
            predicted=self.forecast.predict(finding.edit),
            same_wait_as=self._same_wait_as(cause, earlier),
        )

    def _same_wait_as(self, cause: str, earlier: Sequence[str]) -> str:
        """The first cause before this one on top of which it gains little more."""
        for other in earlier:
            together = self.forecast.gain(self.edit_of([other, cause]))
            if together - self.gain(other) < max(SAME_WAIT_SHARE * self.gain(cause), self.forecast.noise):
                return other
        return ""

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.scene.steps * len(self.scene.timeline.ranks)
        if waiting_share < 0.05:
            why = "the GPU has work all the time"
        elif "launch_bound" in named:
            why = "the step is launch-bound, so the host would not have been ahead anyway"
        else:
            why = "something else holds the step up at the same time"
        rows, spans = [], self.scene.timeline.spans
        for cause, finding in self.found.items():
            if cause not in named and cause not in SILENT:
                for place, mine in by_place(self.scene, self._seen_in_vain(finding)).items():
                    told = lesson(cause, place) if self.scene.timeline.facts.runs_once else why
                    held = round((spans.end[mine] - spans.start[mine]).sum() / per_step)
                    rows.append(Harmless(cause, place, len(mine) / per_step, told, max(0, self.gain(cause)), held))
        return tuple(sorted(rows, key=lambda one: -one.count))

    def _seen_in_vain(self, finding: Finding) -> Ints:
        """A copy on a stream where nothing is computed is no copy in line, if it costs nothing."""
        if finding.cause != "copy_not_overlapped":
            return finding.rows
        spans = self.scene.timeline.spans
        computes = np.bincount(spans.lane, spans.kind == Kind.KERNEL, len(self.scene.timeline.lanes)) > 0
        return finding.rows[computes[spans.lane[self.scene.command[finding.rows]]]]


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
    left_out = whole.facts.left_out_time
    return int((spans.end[rows].max() - spans.start[marks[0]] - left_out) / len(marks))


def sources_of(timeline: Timeline) -> tuple[str, ...]:
    return timeline.facts.sources or tuple(filter(None, [timeline.facts.source]))


def notes_of(whole: Timeline, scene: Scene, plain: Plain, plain_given: bool) -> tuple[str, ...]:
    """What a reader should know before trusting the figures, a sentence each; first what the recorder says itself."""
    facts, steps, given = whole.facts, len(whole.marks_of(whole.ranks[0])), len(whole.ranks)
    met = np.unique(whole.spans.group[whole.spans.kind == Kind.COLLECTIVE]).tolist()
    some, all_known = given > 1 and (facts.world or 0) > given, facts.cluster is not None
    left_out = f"step{'s' if len(facts.left_out_steps) > 1 else ''} {' and '.join(map(str, facts.left_out_steps))}"
    # plain step and recording of one live run are of the same program: only that moment can have been another
    why = (
        "were they of the same program and machine?"
        if facts.recorded is None
        else "the recorded steps may have met a busy moment of the machine: record again, or with another --after."
    )
    said: list[tuple[object, str]] = [
        (
            not plain_given and facts.recorded is None,
            "Profiling makes the host slower: a trace shows two to three times the idle time of the plain run. "
            "Time a step without the profiler and give it with --plain-step.",
        ),
        (not facts.values, "With --values none nothing is computed: whatever the program reads is 0."),
        (
            facts.modelled,
            "The CPU's time is modelled: operators take time; Python, files and loader workers take none.",
        ),
        (
            not facts.stacks,
            "The trace holds no stacks, so places are operators, not lines; for lines, record with with_stack=True.",
        ),
        (facts.skipped, f"{facts.skipped} events of the trace could not be read, and are missing here."),
        (
            facts.marks_a_step,
            f"{facts.marks_a_step} marked steps count as one: the plain step given is that long.",
        ),
        (
            facts.left_out_steps,
            f"Of these, {left_out} stalled, as steps do now and then: they are left out here and told beside `rarely`.",
        ),
        (
            scene.steps < steps,
            f"{scene.steps} of the {steps} steps were replayed, chosen evenly from the fastest to the slowest.",
        ),
        (all_known, f"{given} ranks were kept whole, the latest among them: what follows is of these."),
        (
            some and not all_known,
            f"Of the run's {facts.world} ranks {given} are here: whether another one comes late cannot be known, and "
            "waiting for it counts as communication.",
        ),
        (
            not some and not all_known and any(facts.groups.get(group, 2) > given for group in met),
            "Other ranks are not in the recording, so waiting for them counts as communication.",
        ),
        (
            plain_given and not 0.85 < plain.ratio < 1.15,
            f"The plain step and the recording differ by more than recording explains; {why}",
        ),
    ]
    return (*facts.notes, *(sentence for holds, sentence in said if holds))


REPLAYABLE = 150_000
"""Rows of a rare step: to replay more takes too long, since no part of it repeats itself."""
MATTERS = 0.05
"""Of a stall: what gains less of it is not told."""
_WRITES = ("host_work", "blocking_copy", "host_sync")


def ordinary_steps(timeline: Timeline) -> Timeline:
    """Without recorded steps that are known to be rare: neither the plain step nor what is said of it means them."""
    stalls = [stall for run in timeline.facts.plain_runs.values() for stall in run.stalls if stall.punctual]
    if not stalls:
        return timeline
    numbers = timeline.facts.recorded or ()
    return without_steps(timeline, {one for one in numbers if any(stall.comes_in(one) for stall in stalls)})


def rare_of(timeline: Timeline, ordinary: Diagnosis, workers: int) -> tuple[Rare, ...]:
    """Each rare stall around which a window was taken, and in which it came. `ordinary`: what every step has.

    Of windows on the same stall the one counts in which fixing gains most: what the stall is was seen best there.
    """
    windows = [one for one in timeline.further if one.facts.reason and one.facts.reason.why == STALL]
    seen = [found for window in windows if (found := _rare(window, ordinary, workers)) is not None]
    best: dict[RareStall, Rare] = {}
    for one in sorted(seen, key=lambda one: one.predicted.step):
        best.setdefault(one.stall, one)
    return tuple(one for one in seen if best[one.stall] is one)


def left_unexplained(timeline: Timeline, rare: Sequence[Rare]) -> Iterator[str]:
    """A sentence for each further window that told nothing."""
    explained_steps = {one.step for one in rare}
    for window in timeline.further:
        step = window.facts.reason.step if window.facts.reason else None
        if step is not None and step not in explained_steps:
            many = len(window) > REPLAYABLE
            why = "has too many spans to be replayed" if many else "was not in it, or not as the marks show it"
            yield f"A stall was foreseen for step {step}, and a window was open: it {why}."


def later_of(timeline: Timeline, workers: int) -> Later | None:
    """What steps are like since they have changed."""
    for window in timeline.further:
        reason = window.facts.reason
        if reason and reason.why == DRIFT and reason.began is not None and (plain := window.facts.plain_step):
            with suppress(BadInput):
                whole = whole_steps(window, plain)
                now = Story.of(sample(whole), plain, workers).diagnosis(whole, plain_given=True)
                return Later(reason.began, now)
    return None


def _rare(further: Timeline, ordinary: Diagnosis, workers: int) -> Rare | None:
    reason, usual = further.facts.reason, further.facts.plain_step or ordinary.plain_step
    if reason is None or reason.step is None:
        return None
    number = reason.step
    stall = _stall(ordinary.plain_runs, number) or reason.stall
    window = step_alone(further, range(number - 1, number + 2))
    if stall is None or window is None or len(window) > REPLAYABLE:
        return None
    with suppress(BadInput):
        plain = usual + stall.time
        stalled = Story.of(window, plain, workers).diagnosis(window, plain_given=True)
        causes = tuple(sorted(_beyond(stalled, ordinary, stall), key=lambda one: one.predicted.step))
        together = _together(stalled, ordinary, causes, stall)
        return Rare(stall, number, plain, stalled.ledger, causes, together, stalled.late)
    return None


def _stall(runs: Mapping[int, PlainRun], step: int) -> RareStall | None:
    """As the whole run shows it; of several ranks' the one that has a reason."""
    found = [stall for run in runs.values() for stall in run.stalls if stall.punctual and stall.comes_in(step)]
    return max(found, key=lambda one: (bool(one.what), one.share), default=None)


def _beyond(stalled: Diagnosis, ordinary: Diagnosis, stall: RareStall) -> Iterator[Cause]:
    """The causes of the stall itself: what every step has, too, was explained already."""
    every = {cause.cause: cause for cause in ordinary.causes}
    for cause in stalled.causes:
        usual = every.get(cause.cause)
        always = ordinary.plain_step - usual.predicted.step if usual else 0
        gain = min(stall.time, stalled.plain_step - cause.predicted.step - always)
        if gain > max(MATTERS * stall.time, NOISE * stalled.plain_step):
            known: set[Where] = {site.where for site in usual.sites} if usual else set()
            sites = tuple(site for site in cause.sites if site.where not in known) or cause.sites
            one = replace(cause, sites=sites, predicted=_prediction_with(stalled, cause.predicted, gain))
            if stall.what == "checkpoint" and cause.cause in _WRITES:
                fix = CHECKPOINT
                one = replace(one, fix=fix.fix, advice=fix.advice, remedy=fix.code, api=fix.api)
            yield one


def _together(stalled: Diagnosis, ordinary: Diagnosis, causes: Sequence[Cause], stall: RareStall) -> Prediction:
    """Such a step without the causes of its stall; what its other causes cost stays."""
    if not causes:
        return Prediction(stalled.plain_step, stalled.plain_step, stalled.plain_step)
    always = ordinary.plain_step - ordinary.predicted.step if ordinary.causes else 0
    gain = min(stall.time, stalled.plain_step - stalled.predicted.step - always)
    gain = max(gain, *(stalled.plain_step - cause.predicted.step for cause in causes), 0)
    return _prediction_with(stalled, stalled.predicted, gain)


def _prediction_with(stalled: Diagnosis, predicted: Prediction, gain: int) -> Prediction:
    step = stalled.plain_step - gain
    less = step - predicted.step
    return Prediction(step, predicted.low + less, min(stalled.plain_step, predicted.high + less))
