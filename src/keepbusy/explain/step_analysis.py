"""How a step is spent, which causes its idle time has, and what fixing them saves.

A prediction is an edit, replayed. A steady run repeats itself, so the last pass of a replay is laid on a circle of its
own length. Each moment there counts once: as computing, else copying, else the wire. The rest is waiting, and each
cause gets the part that fixing it removes, alone and after others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from random import Random

import numpy as np

from keepbusy.causes import KINDS, LEDGER, findings, what_happened
from keepbusy.causes.cause import Finding, places_of
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.collectives import without_messages
from keepbusy.causes.late_ranks import late_ranks
from keepbusy.causes.places import Where, places_of_rows
from keepbusy.explain.diagnosis import (
    CAUSES,
    COMPUTING,
    COPYING,
    RESIDUAL,
    WIRE,
    Cause,
    Diagnosis,
    Harmless,
    Prediction,
    Site,
    Turns,
)
from keepbusy.explain.plain import PlainTimeline, fed_as_usual, other_view, plain_run
from keepbusy.fixes import remedy_for
from keepbusy.timeline.edit import Edit, SideLane, apply
from keepbusy.timeline.model import NONE, WORKERS, Ints, Kind, Lane, Timeline
from keepbusy.timeline.replay import Replayed, at_work_from, pace, steady


@dataclass(frozen=True)
class StepParts:
    """How a step of one timeline is spent, as the mean of its ranks. With `waiting` the parts sum to the step."""

    step: float
    computing: float
    copying: float
    wire: float
    paced_by: SideLane = SideLane.STAY  # the lane for moved work that sets the pace, if one does

    def scaled(self, ratio: float) -> StepParts:
        computing, copying, wire = self.computing * ratio, self.copying * ratio, self.wire * ratio
        return StepParts(self.step * ratio, computing, copying, wire, self.paced_by)

    @property
    def held_up(self) -> float:
        """The time in which the GPU computes nothing: it waits, or copies or exchanges data without overlap."""
        return max(0.0, self.step - self.computing)

    @property
    def waiting(self) -> float:
        return max(0.0, self.held_up - self.copying - self.wire)


def busy(timeline: Timeline, steady: Replayed) -> StepParts:
    """How a step of this steady replay is spent on the device."""
    spans, steps = timeline.spans, len(timeline.marks_of(timeline.ranks[0]))
    start = at_work_from(spans.kind, steady.start, steady.end, np.maximum(spans.work, 0))
    slowest = timeline.lanes[steady.slowest]
    is_wire = spans.kind == Kind.COLLECTIVE
    is_copy = (spans.kind == Kind.COPY) | (spans.kind == Kind.FILL)  # also within the device
    is_compute = timeline.on_device & ~is_copy & ~is_wire
    reached = np.zeros((len(timeline.ranks), 3))
    for place, rank in enumerate(timeline.ranks):
        of_rank = timeline.rank_of_rows == rank
        for layer, rows in enumerate((is_compute, is_compute | is_copy, is_compute | is_copy | is_wire)):
            counted = rows & of_rank
            reached[place, layer] = covered(start[counted], steady.end[counted], steady.pace * steps)
    computing, copying, wire = (np.diff(reached, axis=1, prepend=0.0).mean(axis=0) / steps).tolist()
    return StepParts(steady.pace, computing, copying, wire, _side_lane(slowest))


def _side_lane(lane: Lane) -> SideLane:
    """The side lane that this lane is. A loader's own workers count as those that a fix would add."""
    if lane.device is None and lane.name == WORKERS:
        return SideLane.WORKERS
    return SideLane(-lane.number) if -lane.number in set(SideLane) else SideLane.STAY


def covered(start: Ints, end: Ints, around: float) -> float:
    """How much of a circle of this length the intervals cover together."""
    if not len(start) or around <= 0:  # commands of a damaged trace may overlap so much that no time passes
        return 0.0
    length = np.minimum(end - start, around)
    begin = np.mod(start, around).astype(np.float64)
    over = np.maximum(begin + length - around, 0)
    starts = np.concatenate([begin, np.zeros(int((over > 0).sum()))])
    ends = np.concatenate([begin + length - over, over[over > 0]])
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([[0.0], reached[:-1]])
    return float(np.maximum(reached - np.maximum(starts, before), 0).sum())


NOISE = 0.03
"""Gains below this share of the step are not claimed: plain steps of one program differ by as much from run to run."""


@dataclass(eq=False)
class Forecast:
    """The plain run, and the same run with another view of what recording cost. Their difference is the range."""

    plain: PlainTimeline
    other: PlainTimeline
    nothing: Edit  # leaves the run as it was
    _spent: dict[bytes, StepParts] = field(default_factory=dict)  # by the edit's digest: each is replayed once
    _predicted: dict[bytes, Prediction] = field(default_factory=dict)

    @cached_property
    def noise(self) -> int:
        """In a logged run at least the error of the rebuilt kernel times."""
        unsure = self.plain.timeline.facts.rebuilt_within * self.spent(self.nothing).computing
        return round(max(NOISE * self.plain.step, unsure))

    def spent(self, edit: Edit) -> StepParts:
        """How the fixed step is spent on the device."""
        if edit.digest not in self._spent:
            timeline, ratio = apply(self.plain.timeline, edit), self.plain.ratio
            parts = busy(timeline, steady(timeline)).scaled(ratio)
            self._spent[edit.digest] = replace(parts, step=parts.step + self.plain.unseen)
        return self._spent[edit.digest]

    def step(self, edit: Edit) -> int:
        return min(self.plain.step, max(self._least(edit), round(self.spent(edit).step)))

    def _least(self, edit: Edit) -> int:
        """The least that a step can take: the GPU's work in it by the run's tree, without what the fix removes."""
        if not self.plain.at_work:
            return 0
        before, after = (part.computing + part.copying + part.wire for part in map(self.spent, (self.nothing, edit)))
        return max(0, self.plain.at_work - round(before - after))

    def gain(self, edit: Edit) -> int:
        return self.plain.step - self.step(edit)

    def predict(self, edit: Edit) -> Prediction:
        if edit.digest not in self._predicted:
            step, spread = self.step(edit), self.noise // 2
            other = round(self.other.ratio * pace(apply(self.other.timeline, edit))) + self.other.unseen
            other = min(self.plain.step, other)
            low, high = min(step, other) - spread, min(self.plain.step, max(step, other) + spread)
            if (alike := self.plain.alike) < 1:  # of what was not recorded, all or nothing may be saved
                low = max(min(step, self._least(edit)), round(alike * low))
                high = self.plain.step - round(alike * (self.plain.step - high))
            self._predicted[edit.digest] = Prediction(step, max(0, low), high)
        return self._predicted[edit.digest]


EXACT_ORDERS = 5
"""Up to so many causes are fixed in every order; more of them in a sample of orders."""
SAMPLED_ORDERS = 6


def _mean_over_orders(causes: Sequence[str], left_after: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """What fixing each cause removes, as the mean over the orders in which they can be fixed (its Shapley value).

    `left_after` returns what remains once these are fixed. No fix adds to it. A sample of orders has each order also
    backwards, so that no cause is favoured.
    """
    if len(causes) <= EXACT_ORDERS:
        orders = list(permutations(causes))
    else:
        draw = Random(len(causes))
        forwards = [draw.sample(causes, len(causes)) for _ in range(SAMPLED_ORDERS)]
        orders = [tuple(order) for forward in forwards for order in (forward, forward[::-1])]
    shares = dict.fromkeys(causes, 0.0)
    for order in orders:
        remaining = left_after(frozenset())
        for place, cause in enumerate(order, 1):
            after = min(remaining, left_after(frozenset(order[:place])))
            shares[cause] += (remaining - after) / len(orders)
            remaining = after
    return shares


_LESS_PARTICULAR = ("blocking_copy", "copy_not_overlapped", *RESIDUAL)
"""Causes that come after others with the same gain, as these say more about what to do."""
_CAUSES_OF = {
    SideLane.FETCH: ("blocking_copy", "copy_not_overlapped"),
    SideLane.RETURN: ("blocking_copy",),
    SideLane.WIRE: ("exposed_collective",),
    SideLane.WORKERS: ("input_late",),
}
"""The causes whose edits move work to a side lane."""
_SILENT_CAUSES = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not named if they cost nothing."""
SHARE_IN_LEDGER = 0.005
"""Causes that change less than this share of the step, fixed alone or last, get what the others leave in the ledger."""
SITES_REPLAYED, SITES_SHOWN = 3, 8
"""So many of a cause's places are fixed alone to see what each saves, and so many are named."""
HALF_OF_A_GAP = 0.5
"""A gap has a specific cause rather than a residual one if the specific fix removes this share of it."""


@dataclass(eq=False)
class StepAnalysis:
    """Whole steps, replayed as they were and fixed."""

    inputs: CauseInputs
    forecast: Forecast
    findings: dict[str, Finding]
    everything: Edit  # fixes all findings
    _edits: dict[frozenset[str], Edit]

    @staticmethod
    def of(window: Timeline, plain_step: int | None, workers: int) -> StepAnalysis:
        window = fed_as_usual(window, plain_step)
        plain = plain_run(window, plain_step)
        forecast = Forecast(plain, other_view(window, plain), Edit.nothing(plain.timeline))
        inputs = CauseInputs(plain.timeline, workers)
        found = findings(inputs).items()
        placed = {cause: replace(finding, places=places_of(inputs, finding)) for cause, finding in found}
        everything = Edit.of([finding.edit for finding in placed.values()], inputs.timeline)
        edits = {frozenset(placed): everything, frozenset[str](): forecast.nothing}
        return StepAnalysis(inputs, forecast, placed, everything, edits)

    @property
    def plain(self) -> PlainTimeline:
        return self.forecast.plain

    @cached_property
    def unchanged(self) -> StepParts:
        return self.forecast.spent(self.forecast.nothing)

    def gain(self, cause: str) -> int:
        return self.forecast.gain(self.findings[cause].edit)

    def edit_of(self, causes: Iterable[str]) -> Edit:
        """The edit that fixes all of these. One object for each set, so that each set is replayed once."""
        key = frozenset(causes).intersection(self.findings)
        if key not in self._edits:
            edits = [finding.edit for cause, finding in self.findings.items() if cause in key]
            self._edits[key] = Edit.of(edits, self.inputs.timeline)
        return self._edits[key]

    def diagnosis(self, whole: Timeline, plain_given: bool, what_if: Sequence[str] = ()) -> Diagnosis:
        named = self._named()
        ledger = self._ledger(named)
        share = sum(ledger[cause] for cause in CAUSES if cause in ledger) / self.plain.step
        timeline = self.inputs.timeline
        unseen = [f"{cause} was not seen in this run." for cause in what_if if cause not in self.findings]
        return Diagnosis(
            plain_step=self.plain.step,
            plain_given=plain_given,
            traced_step=_traced_step(whole),
            steps=len(whole.marks_of(whole.ranks[0])),
            ledger=ledger,
            causes=tuple(self._cause(cause, named[:place]) for place, cause in enumerate(named)),
            harmless=self._harmless(named, share),
            predicted=self.forecast.predict(self.edit_of(what_if) if what_if else self._all(named)),
            noise=self.forecast.noise,
            ranks=tuple(timeline.ranks),
            late=late_ranks(self.inputs, self.findings["peer_late"]) if "peer_late" in named else (),
            fixed=tuple(what_if),
            device=timeline.facts.device,
            sources=sources_of(timeline),
            command=timeline.facts.command,
            folder=timeline.facts.folder,
            notes=tuple(unseen),
            plain_runs=timeline.facts.plain_runs,
            cluster=timeline.facts.cluster,
        )

    def _named(self) -> list[str]:
        """Causes whose fix saves more than the noise, the largest gain first, and of equal ones the most specific."""
        fixable = set(self.findings) - ({"launch_bound"} if self.inputs.timeline.facts.compiled_eagerly else set())
        claimed = [cause for cause in self.findings if cause in fixable and self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in _LESS_PARTICULAR))

    def turns(self) -> Turns:
        """The replayed iterations, to be drawn."""
        named = self._named()
        ordered = [self.findings[cause] for cause in dict.fromkeys([*named, *self.findings])]
        return turns_of(self.inputs.timeline, self.plain.ratio, ordered, len(named))

    def _all(self, named: Sequence[str]) -> Edit:
        """The edit of all these causes, or of the first alone if the others would only crowd its side lane."""
        together = self.edit_of(named)
        first = self.edit_of(named[:1])
        crowded = self.forecast.step(first) < self.forecast.step(together)
        return first if crowded else together

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """How much of the time without computing each cause gets. What remains is unknown."""
        waits: dict[str, float] = {}
        remaining = self.unchanged.held_up
        for causes in self._in_tiers(named):
            shares = self._waits(causes, list(waits), remaining)
            waits, remaining = waits | shares, max(0.0, remaining - sum(shares.values()))
        waits["pipeline_bubble"] = self._bubble(self.everything, remaining)
        remaining -= waits["pipeline_bubble"]
        last = self.forecast.spent(self.everything)
        copying = min(remaining, last.copying)
        wire = min(remaining - copying, last.wire)
        remaining -= copying + wire
        # if even moved work is the slowest, the rest is its cause's, too: workers can only do so much
        owners = [cause for cause in (*named, *self.findings) if cause in _CAUSES_OF.get(last.paced_by, ())]
        owner = owners[0] if owners else "unknown"
        rest = {COPYING: copying, WIRE: wire, owner: waits.get(owner, 0.0) + remaining}
        return _rounded(self.plain.step, {COMPUTING: self.unchanged.computing, **waits, **rest})

    def _in_tiers(self, named: Sequence[str]) -> Iterator[list[str]]:
        """Causes in the order in which they get their waits. Those of one tier share them as equals.

        A late rank comes first: waits in a collective are due to it, whatever else would end them. Then come causes
        that save something alone, those that save only after others, and last those that every program has.
        """
        tier = {cause: 4 if cause in RESIDUAL else 3 for cause in self.findings} | {"peer_late": 1}
        tier |= {cause: 2 for cause in named if tier[cause] == 3}
        for number in range(1, 5):
            yield [cause for cause in self.findings if tier[cause] == number]

    def _waits(self, causes: Sequence[str], fixed: Sequence[str], remaining: float) -> dict[str, float]:
        """The wait of each cause, once `fixed` are fixed: its mean over the orders of fixing. Small ones come last."""

        def left_after(subset: frozenset[str]) -> float:
            return min(remaining, self.forecast.spent(self.edit_of([*fixed, *subset])).held_up)

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
        waits = _mean_over_orders(large, left_after)
        rest = start - sum(waits.values())
        for place, cause in enumerate(small := [cause for cause in causes if cause not in large], 1):
            after = min(rest, left_after(frozenset([*large, *small[:place]])))
            waits[cause], rest = rest - after, after
        return waits

    def _bubble(self, edit: Edit, remaining: float) -> float:
        """How long stages of a pipeline still wait for each other once everything is fixed."""
        if not self.inputs.among_ranks or not (messages := without_messages(self.inputs)).touched.any():
            return 0.0
        waiting, without = (self.forecast.spent(each).waiting for each in (edit, edit | messages))
        return min(remaining, max(0.0, waiting - without))

    def _cause(self, cause: str, earlier: Sequence[str]) -> Cause:
        finding = self.findings[cause]
        sites = self._sites(finding)
        remedy = remedy_for(self.inputs, finding, sites[0].where, finding.places[sites[0].where])
        return Cause(
            cause=cause,
            wait=round(max(0.0, self.unchanged.held_up - self.forecast.spent(finding.edit).held_up)),
            count=finding.count / self.inputs.steps / len(self.inputs.timeline.ranks),
            sites=sites,
            what=what_happened(self.inputs, finding),
            fix=remedy.fix.name,
            advice=remedy.advice,
            remedy=remedy.code,
            api=remedy.api,
            predicted=self.forecast.predict(finding.edit),
            same_wait_as=self._same_wait_as(cause, earlier),
        )

    def _sites(self, finding: Finding) -> tuple[Site, ...]:
        """The costliest places first. The wait of a place is what fixing it alone saves."""
        groups = finding.places
        per_step = self.inputs.steps * len(self.inputs.timeline.ranks)
        ordered = list(groups)[:SITES_SHOWN]
        gain_of_place = dict.fromkeys(ordered, self.gain(finding.cause) if len(ordered) == 1 else 0)
        for place in ordered[:SITES_REPLAYED] if len(ordered) > 1 else ():
            gain_of_place[place] = self.forecast.gain(finding.only(groups[place]))
        ordered.sort(key=lambda place: -gain_of_place[place])
        return tuple(Site(place, len(groups[place]) / per_step, gain_of_place[place]) for place in ordered)

    def _same_wait_as(self, cause: str, earlier: Sequence[str]) -> str:
        """The first earlier cause on top of which this one saves only noise."""
        for other in earlier:
            together = self.forecast.gain(self.edit_of([other, cause]))
            if together - self.gain(other) < self.forecast.noise:
                return other
        return ""

    def behind_others(self) -> dict[str, int]:
        """What causes that save nothing alone save once all others are fixed: they do have a cost. Empty for a script
        that runs once, whose report says in any case what a loop would cost."""
        every_cause, noise = frozenset(self.findings), self.forecast.noise
        if self.inputs.timeline.facts.runs_once:
            return {}
        seen = [cause for cause in every_cause.difference(_SILENT_CAUSES) if self.gain(cause) <= noise]
        everything = self.forecast.gain(self.everything)
        last = {cause: everything - self.forecast.gain(self.edit_of(every_cause - {cause})) for cause in sorted(seen)}
        return {cause: gain for cause, gain in last.items() if gain > noise}

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.inputs.steps * len(self.inputs.timeline.ranks)
        if waiting_share < 0.05:
            reason = "the GPU has work all the time"
        elif "launch_bound" in named:
            reason = "the step is launch-bound, so the host would not have been ahead anyway"
        else:
            reason = "something else holds the step up at the same time"
        harmless, spans = [], self.inputs.timeline.spans
        excluded = {*named, *_SILENT_CAUSES, *self.behind_others()}
        for cause, finding in self.findings.items():
            if cause in excluded:
                continue
            for place, rows in self._harmless_places(finding).items():
                if self.inputs.timeline.facts.runs_once:
                    reason = KINDS[cause].lesson_at(self.inputs, int(rows[0]))
                blocked = round((spans.end[rows] - spans.start[rows]).sum() / per_step)
                gain = max(0, self.gain(cause))
                harmless.append(Harmless(cause, place, len(rows) / per_step, reason, gain, blocked))
        return tuple(sorted(harmless, key=lambda row: -row.count))

    def _harmless_places(self, finding: Finding) -> Mapping[Where, Ints]:
        """The places to report as harmless. Copies on a stream without kernels, which cost nothing, are left out."""
        if finding.cause != "copy_not_overlapped":
            return finding.places
        spans = self.inputs.timeline.spans
        computes = np.bincount(spans.lane, spans.kind == Kind.KERNEL, len(self.inputs.timeline.lanes)) > 0
        in_line = computes[spans.lane[self.inputs.command]]
        places = {place: rows[in_line[rows]] for place, rows in finding.places.items()}
        return {place: rows for place, rows in places.items() if len(rows)}


def _rounded(total: int, parts: dict[str, float]) -> dict[str, int]:
    """Whole nanoseconds that sum to the step. Computing includes the error of rounding."""
    rounded = {place: round(parts[place]) for place in LEDGER if place in parts}
    rounded[COMPUTING] += total - sum(rounded.values())
    return {place: time for place, time in rounded.items() if time > 0 or place == COMPUTING}


def _traced_step(whole: Timeline) -> int:
    """The mean step by the host's marks, recording included."""
    spans, marks = whole.spans, whole.marks_of(whole.ranks[0])
    rows = np.flatnonzero((whole.rank_of_rows == whole.ranks[0]) & ~whole.on_device)
    ends = np.maximum.reduceat(spans.end[rows], np.searchsorted(rows, marks))  # a mark may begin a much later step
    return int((ends - spans.start[marks]).mean())


def turns_of(timeline: Timeline, ratio: float, ordered: Sequence[Finding], gaining: int) -> Turns:
    """What drawing needs. The first `gaining` of the ordered findings save something."""
    places, place, call = places_of_rows(timeline)
    cause, rest, culprit = _causes_of_gaps(timeline, ordered)
    aside = np.full(len(timeline), NONE, np.int64)
    moved_to = (SideLane.FETCH, SideLane.RETURN, SideLane.WIRE)
    for finding in reversed(ordered[:gaining]):
        aside[np.isin(finding.edit.lane, moved_to) & timeline.on_device] = CAUSES.index(finding.cause)
    return Turns(timeline, ratio, places, place, call, cause, rest, culprit, aside)


def _causes_of_gaps(timeline: Timeline, ordered: Sequence[Finding]) -> tuple[Ints, Ints, Ints]:
    gaps = idle_before(timeline, steady(timeline))
    cause, rest, culprit = (np.full(len(timeline), NONE, np.int64) for _ in range(3))
    ends = np.flatnonzero(gaps > 0)
    if not len(ends):
        return cause, rest, culprit
    removed = np.array([_removed_by(timeline, finding.edit, gaps)[ends] for finding in ordered], np.int64)
    removed = removed.reshape(len(ordered), len(ends))  # also if nothing was found
    numbers = np.array([CAUSES.index(finding.cause) for finding in ordered] + [CAUSES.index("unknown")], np.int64)
    first, second = _best_two(ordered, removed, gaps[ends])
    cause[ends], rest[ends] = numbers[first], numbers[second]
    for index, finding in enumerate(ordered):
        commands = ends[first == index]
        if len(commands) and len(rows := finding.rows):
            # the last of its rows before the command was issued; if there is none, the last of the previous iteration
            culprit[commands] = rows[np.searchsorted(rows, commands) - 1]
    return cause, rest, culprit


def _removed_by(timeline: Timeline, edit: Edit, gaps: Ints) -> Ints:
    """How much of each gap the edit removes."""
    changed = apply(timeline, edit)
    remaining = np.zeros(len(timeline), np.int64)
    remaining[~edit.drop] = idle_before(changed, steady(changed))
    return np.clip(gaps - remaining, 0, gaps)


def _best_two(ordered: Sequence[Finding], removed: Ints, gaps: Ints) -> tuple[Ints, Ints]:
    """For each gap, the first specific cause that removes half of it, else the one that removes most; and the next."""
    none = len(ordered)
    general = np.array([finding.cause in RESIDUAL for finding in ordered], bool)[:, None]
    weight = np.where(removed >= HALF_OF_A_GAP * gaps, removed + np.where(general, 0, gaps), removed).astype(np.float64)
    weight = np.concatenate([np.where(removed > 0, weight, 0.0), np.full((1, len(gaps)), 0.5)])
    order = np.argsort(-weight, axis=0, kind="stable")
    second = order[1] if none else order[0]
    return order[0], np.where(order[0] == none, none, second)


def idle_before(timeline: Timeline, replayed: Replayed) -> Ints:
    """How long the GPU was idle before each command; for a collective, before it was on the wire."""
    gaps = np.zeros(len(timeline), np.int64)
    spans, rank_of_rows = timeline.spans, timeline.rank_of_rows
    start = at_work_from(spans.kind, replayed.start, replayed.end, spans.work)
    for rank in timeline.ranks:
        rows = np.flatnonzero(timeline.on_device & (rank_of_rows == rank))
        rows = rows[np.argsort(start[rows], kind="stable")]
        reached = np.maximum.accumulate(replayed.end[rows])
        gaps[rows[1:]] = np.maximum(start[rows[1:]] - reached[:-1], 0)
        if len(rows) and len(timeline.marks):  # an iteration begins when the one before it ended
            around = round(replayed.pace * len(timeline.marks_of(timeline.ranks[0])))
            gaps[rows[0]] = 0 if timeline.facts.one_turn else max(0, int(start[rows[0]]) + around - int(reached[-1]))
    return gaps


def sources_of(timeline: Timeline) -> tuple[str, ...]:
    return timeline.facts.sources or tuple(filter(None, [timeline.facts.source]))
