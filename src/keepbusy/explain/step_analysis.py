"""Where the nanoseconds of a step go, which causes they are to blame on, and what fixing those gives.

A prediction is an edit made and replayed. A steady run repeats itself, so the last round of a replay is laid on a
circle as long as the round. What a command does there counts once: computing before copying before the wire. The rest
is waiting, of which each cause takes what fixing it takes away, alone and beside others.
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
    """A step of one timeline, the mean of its ranks. Together with `waiting` it is the whole step."""

    step: float
    computing: float
    copying: float
    wire: float
    paced_by: SideLane = SideLane.STAY  # the lane for moved work that sets the pace, if one does

    def scaled(self, ratio: float) -> StepParts:
        return StepParts(
            self.step * ratio, self.computing * ratio, self.copying * ratio, self.wire * ratio, self.paced_by
        )

    @property
    def held_up(self) -> float:
        """The GPU computes nothing: it waits, copies, or exchanges data with no compute beside it."""
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
    is_copy = (spans.kind == Kind.COPY) | (spans.kind == Kind.FILL)  # also within the device: nothing is computed
    is_compute = timeline.on_device & ~is_copy & ~is_wire
    reached = np.zeros((len(timeline.ranks), 3))
    for place, rank in enumerate(timeline.ranks):
        mine = timeline.rank_of_rows == rank
        for layer, rows in enumerate((is_compute, is_compute | is_copy, is_compute | is_copy | is_wire)):
            taken = rows & mine
            reached[place, layer] = covered(start[taken], steady.end[taken], steady.pace * steps)
    computing, copying, wire = (np.diff(reached, axis=1, prepend=0.0).mean(axis=0) / steps).tolist()
    return StepParts(steady.pace, computing, copying, wire, _side_lane(slowest))


def _side_lane(lane: Lane) -> SideLane:
    """A loader's own workers count as the ones that a fix would add."""
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
    """The plain run, and the same run under another view of what recording cost. Their difference is the range."""

    plain: PlainTimeline
    other: PlainTimeline
    nothing: Edit  # that leaves the run as it was
    _spent: dict[bytes, StepParts] = field(default_factory=dict)  # by what the edit changes: each is replayed once
    _predicted: dict[bytes, Prediction] = field(default_factory=dict)

    @cached_property
    def noise(self) -> int:
        """Of a logged run at least what the rebuilt times of its kernels are wrong by."""
        unsure = self.plain.timeline.facts.rebuilt_within * self.spent(self.nothing).computing
        return round(max(NOISE * self.plain.step, unsure))

    def spent(self, edit: Edit) -> StepParts:
        """How the fixed step is spent on the device."""
        if edit.digest not in self._spent:
            timeline, ratio = apply(self.plain.timeline, edit), self.plain.ratio
            known = busy(timeline, steady(timeline)).scaled(ratio)
            self._spent[edit.digest] = replace(known, step=known.step + self.plain.unseen)
        return self._spent[edit.digest]

    def step(self, edit: Edit) -> int:
        return min(self.plain.step, max(self._least(edit), round(self.spent(edit).step)))

    def _least(self, edit: Edit) -> int:
        """Of a step that a sample stands for: what the run's GPU is at work in it, without what the fix takes away."""
        if not self.plain.at_work:
            return 0
        before, after = (one.computing + one.copying + one.wire for one in map(self.spent, (self.nothing, edit)))
        return max(0, self.plain.at_work - round(before - after))

    def gain(self, edit: Edit) -> int:
        return self.plain.step - self.step(edit)

    def predict(self, edit: Edit) -> Prediction:
        if edit.digest not in self._predicted:
            step, spread = self.step(edit), self.noise // 2
            other = round(self.other.ratio * pace(apply(self.other.timeline, edit))) + self.other.unseen
            other = min(self.plain.step, other)
            low, high = min(step, other) - spread, min(self.plain.step, max(step, other) + spread)
            if (alike := self.plain.alike) < 1:  # what was not seen may gain nothing, or go altogether
                low = max(min(step, self._least(edit)), round(alike * low))
                high = self.plain.step - round(alike * (self.plain.step - high))
            self._predicted[edit.digest] = Prediction(step, max(0, low), high)
        return self._predicted[edit.digest]


EXACT_ORDERS = 5
"""So many causes are fixed in every order that there is; of more, in a sample of orders."""
SAMPLED_ORDERS = 6


def _mean_over_orders(causes: Sequence[str], left_after: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """What each cause takes away of what is left, whichever of the others were fixed before it (its Shapley value).

    `left_after` tells what is left once these are fixed. No fix gives back what another one took. A sample of orders
    holds each one also backwards, so that nobody has the better end of it.
    """
    if len(causes) <= EXACT_ORDERS:
        orders = list(permutations(causes))
    else:
        draw = Random(len(causes))
        forwards = [draw.sample(causes, len(causes)) for _ in range(SAMPLED_ORDERS)]
        orders = [tuple(order) for one in forwards for order in (one, one[::-1])]
    taken = dict.fromkeys(causes, 0.0)
    for order in orders:
        left = left_after(frozenset())
        for place, cause in enumerate(order, 1):
            after = min(left, left_after(frozenset(order[:place])))
            taken[cause] += (left - after) / len(orders)
            left = after
    return taken


_LESS_PARTICULAR = ("blocking_copy", "copy_not_overlapped", *RESIDUAL)
"""Causes that come after others of the same gain, which say more of what to do."""
_CAUSES_OF = {
    SideLane.FETCH: ("blocking_copy", "copy_not_overlapped"),
    SideLane.RETURN: ("blocking_copy",),
    SideLane.WIRE: ("exposed_collective",),
    SideLane.WORKERS: ("input_late",),
}
"""Whose work it is that moves to a side lane."""
_SILENT_CAUSES = (*RESIDUAL, "exposed_collective", "made_on_host")
"""Causes that are not worth a line when they cost nothing."""
SHARE_IN_LEDGER = 0.005
"""Of the step: causes that change less of it, fixed alone or last, take what the others leave in the ledger."""
SITES_REPLAYED, SITES_SHOWN = 3, 8
"""So many of a cause's places are fixed alone to see what each gains, and so many are named."""
HALF_OF_A_GAP = 0.5
"""What a particular cause's fix takes of a gap that bears its name and not that of a residual one."""


@dataclass(eq=False)
class StepAnalysis:
    """Whole steps, replayed as they were and fixed."""

    inputs: CauseInputs
    forecast: Forecast
    found: dict[str, Finding]
    everything: Edit  # all that was found, fixed
    _edits: dict[frozenset[str], Edit]

    @staticmethod
    def of(window: Timeline, plain_step: int | None, workers: int) -> StepAnalysis:
        window = fed_as_usual(window, plain_step)
        plain = plain_run(window, plain_step)
        forecast = Forecast(plain, other_view(window, plain), Edit.nothing(plain.timeline))
        inputs = CauseInputs(plain.timeline, workers)
        found = findings(inputs)
        everything = Edit.of([one.edit for one in found.values()], inputs.timeline)
        found = {cause: replace(one, places=places_of(inputs, one)) for cause, one in found.items()}
        edits = {frozenset(found): everything, frozenset[str](): forecast.nothing}
        return StepAnalysis(inputs, forecast, found, everything, edits)

    @property
    def plain(self) -> PlainTimeline:
        return self.forecast.plain

    @cached_property
    def unchanged(self) -> StepParts:
        return self.forecast.spent(self.forecast.nothing)

    def gain(self, cause: str) -> int:
        return self.forecast.gain(self.found[cause].edit)

    def edit_of(self, causes: Iterable[str]) -> Edit:
        """All of these fixed together. One object for each set, so that each set is replayed once."""
        key = frozenset(causes).intersection(self.found)
        if key not in self._edits:
            edits = [finding.edit for cause, finding in self.found.items() if cause in key]
            self._edits[key] = Edit.of(edits, self.inputs.timeline)
        return self._edits[key]

    def diagnosis(self, whole: Timeline, plain_given: bool, what_if: Sequence[str] = ()) -> Diagnosis:
        named = self._named()
        ledger = self._ledger(named)
        share = sum(ledger[cause] for cause in CAUSES if cause in ledger) / self.plain.step
        timeline = self.inputs.timeline
        unseen = [f"{cause} was not seen in this run." for cause in what_if if cause not in self.found]
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
            late=late_ranks(self.inputs, self.found["peer_late"]) if "peer_late" in named else (),
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
        """Causes whose fixing gains more than the noise, the largest gain first; among equals the more specific."""
        known = set(self.found) - ({"launch_bound"} if self.inputs.timeline.facts.compiled_eagerly else set())
        claimed = [cause for cause in self.found if cause in known and self.gain(cause) > self.forecast.noise]
        return sorted(claimed, key=lambda cause: (-self.gain(cause), cause in _LESS_PARTICULAR))

    def turns(self) -> Turns:
        """The turns that were replayed, for who draws them. The causes that gain something come first."""
        named = self._named()
        found = [self.found[cause] for cause in dict.fromkeys([*named, *self.found])]
        return turns_of(self.inputs.timeline, self.plain.ratio, found, len(named))

    def _all(self, named: Sequence[str]) -> Edit:
        """All that are named, or the first alone where the others would only crowd the lane that it moves to."""
        together = self.edit_of(named)
        first = self.edit_of(named[:1])
        crowded = self.forecast.step(first) < self.forecast.step(together)
        return first if crowded else together

    def _ledger(self, named: Sequence[str]) -> dict[str, int]:
        """What each cause takes of the time in which nothing is computed; what then is left has no cause we know."""
        waits: dict[str, float] = {}
        left = self.unchanged.held_up
        for causes in self._in_tiers(named):
            taken = self._waits(causes, list(waits), left)
            waits, left = waits | taken, max(0.0, left - sum(taken.values()))
        waits["pipeline_bubble"] = self._bubble(self.everything, left)
        left -= waits["pipeline_bubble"]
        last = self.forecast.spent(self.everything)
        copying = min(left, last.copying)
        wire = min(left - copying, last.wire)
        left -= copying + wire
        # where even the moved work is the slowest, what is left is its cause's, too: workers can only do so much
        whose = [cause for cause in (*named, *self.found) if cause in _CAUSES_OF.get(last.paced_by, ())]
        still = whose[0] if whose else "unknown"
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
        waits = _mean_over_orders(large, left_after)
        rest = start - sum(waits.values())
        for place, cause in enumerate(small := [cause for cause in causes if cause not in large], 1):
            after = min(rest, left_after(frozenset([*large, *small[:place]])))
            waits[cause], rest = rest - after, after
        return waits

    def _bubble(self, edit: Edit, left: float) -> float:
        """Of what is left once all is fixed, how long stages of a pipeline wait for each other."""
        if not self.inputs.among_ranks or not (messages := without_messages(self.inputs)).touched.any():
            return 0.0
        waiting, without = (self.forecast.spent(one).waiting for one in (edit, edit | messages))
        return min(left, max(0.0, waiting - without))

    def _cause(self, cause: str, earlier: Sequence[str]) -> Cause:
        finding = self.found[cause]
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
        """The costliest first. The wait of a place is what fixing it alone recovers."""
        groups = finding.places
        per_step = self.inputs.steps * len(self.inputs.timeline.ranks)
        ordered = list(groups)[:SITES_SHOWN]
        gains = dict.fromkeys(ordered, self.gain(finding.cause) if len(ordered) == 1 else 0)
        for place in ordered[:SITES_REPLAYED] if len(ordered) > 1 else ():
            gains[place] = self.forecast.gain(finding.only(groups[place]))
        ordered.sort(key=lambda place: -gains[place])
        return tuple(Site(place, len(groups[place]) / per_step, gains[place]) for place in ordered)

    def _same_wait_as(self, cause: str, earlier: Sequence[str]) -> str:
        """The first cause before this one on top of which it gains little more."""
        for other in earlier:
            together = self.forecast.gain(self.edit_of([other, cause]))
            if together - self.gain(other) < self.forecast.noise:
                return other
        return ""

    def behind_others(self) -> dict[str, int]:
        """Of causes that gain nothing alone, what each gains once all else is fixed: they are not without cost. A
        script that runs once is told what a loop would cost in any case."""
        found, noise = frozenset(self.found), self.forecast.noise
        if self.inputs.timeline.facts.runs_once:
            return {}
        seen = [cause for cause in found.difference(_SILENT_CAUSES) if self.gain(cause) <= noise]
        everything = self.forecast.gain(self.everything)
        last = {cause: everything - self.forecast.gain(self.edit_of(found - {cause})) for cause in sorted(seen)}
        return {cause: gain for cause, gain in last.items() if gain > noise}

    def _harmless(self, named: Sequence[str], waiting_share: float) -> tuple[Harmless, ...]:
        per_step = self.inputs.steps * len(self.inputs.timeline.ranks)
        if waiting_share < 0.05:
            why = "the GPU has work all the time"
        elif "launch_bound" in named:
            why = "the step is launch-bound, so the host would not have been ahead anyway"
        else:
            why = "something else holds the step up at the same time"
        rows, spans = [], self.inputs.timeline.spans
        told = {*named, *_SILENT_CAUSES, *self.behind_others()}
        for cause, finding in self.found.items():
            if cause not in told:
                for place, mine in self._seen_in_vain(finding).items():
                    taught = (
                        KINDS[cause].lesson_at(self.inputs, int(mine[0]))
                        if self.inputs.timeline.facts.runs_once
                        else why
                    )
                    held = round((spans.end[mine] - spans.start[mine]).sum() / per_step)
                    rows.append(Harmless(cause, place, len(mine) / per_step, taught, max(0, self.gain(cause)), held))
        return tuple(sorted(rows, key=lambda one: -one.count))

    def _seen_in_vain(self, finding: Finding) -> Mapping[Where, Ints]:
        """A copy on a stream where nothing is computed is no copy in line, if it costs nothing."""
        if finding.cause != "copy_not_overlapped":
            return finding.places
        spans = self.inputs.timeline.spans
        computes = np.bincount(spans.lane, spans.kind == Kind.KERNEL, len(self.inputs.timeline.lanes)) > 0
        in_line = computes[spans.lane[self.inputs.command]]
        places = {place: rows[in_line[rows]] for place, rows in finding.places.items()}
        return {place: rows for place, rows in places.items() if len(rows)}


def _rounded(total: int, parts: dict[str, float]) -> dict[str, int]:
    """Whole nanoseconds that sum to the step; computing takes what rounding leaves."""
    whole = {place: round(parts[place]) for place in LEDGER if place in parts}
    whole[COMPUTING] += total - sum(whole.values())
    return {place: time for place, time in whole.items() if time > 0 or place == COMPUTING}


def _traced_step(whole: Timeline) -> int:
    """As the host's marks show it, recording included."""
    spans, marks = whole.spans, whole.marks_of(whole.ranks[0])
    rows = np.flatnonzero((whole.rank_of_rows == whole.ranks[0]) & ~whole.on_device)
    ends = np.maximum.reduceat(spans.end[rows], np.searchsorted(rows, marks))  # steps may have been left out between
    return int((ends - spans.start[marks]).mean())


def turns_of(timeline: Timeline, ratio: float, found: Sequence[Finding], gaining: int) -> Turns:
    """`found`: of each cause that was found; the first so many of them gain something."""
    places, place, call = places_of_rows(timeline)
    cause, rest, culprit = _causes_of_gaps(timeline, found)
    aside = np.full(len(timeline), NONE, np.int64)
    moved_to = (SideLane.FETCH, SideLane.RETURN, SideLane.WIRE)
    for one in reversed(found[:gaining]):
        aside[np.isin(one.edit.lane, moved_to) & timeline.on_device] = CAUSES.index(one.cause)
    return Turns(timeline, ratio, places, place, call, cause, rest, culprit, aside)


def _causes_of_gaps(timeline: Timeline, found: Sequence[Finding]) -> tuple[Ints, Ints, Ints]:
    gaps = idle_before(timeline, steady(timeline))
    cause, rest, culprit = (np.full(len(timeline), NONE, np.int64) for _ in range(3))
    ends = np.flatnonzero(gaps > 0)
    if not len(ends):
        return cause, rest, culprit
    taken = np.array([_taken(timeline, one.edit, gaps)[ends] for one in found], np.int64).reshape(len(found), len(ends))
    numbers = np.array([CAUSES.index(one.cause) for one in found] + [CAUSES.index("unknown")], np.int64)
    first, second = _two_best(found, taken, gaps[ends])
    cause[ends], rest[ends] = numbers[first], numbers[second]
    for index, one in enumerate(found):
        mine = ends[first == index]
        if len(mine) and len(rows := one.rows):
            # the last of its rows before the command was issued; before the first of them, the last of the turn before
            culprit[mine] = rows[np.searchsorted(rows, mine) - 1]
    return cause, rest, culprit


def _taken(timeline: Timeline, edit: Edit, gaps: Ints) -> Ints:
    """How much of each gap the edit takes away."""
    changed = apply(timeline, edit)
    left = np.zeros(len(timeline), np.int64)
    left[~edit.drop] = idle_before(changed, steady(changed))
    return np.clip(gaps - left, 0, gaps)


def _two_best(found: Sequence[Finding], taken: Ints, gaps: Ints) -> tuple[Ints, Ints]:
    """The first of the particular causes that takes half of a gap, else the one that takes most; and the next one."""
    none = len(found)
    general = np.array([one.cause in RESIDUAL for one in found], bool)[:, None]
    weight = np.where(taken >= HALF_OF_A_GAP * gaps, taken + np.where(general, 0, gaps), taken).astype(np.float64)
    weight = np.concatenate([np.where(taken > 0, weight, 0.0), np.full((1, len(gaps)), 0.5)])
    order = np.argsort(-weight, axis=0, kind="stable")
    second = order[1] if none else order[0]
    return order[0], np.where(order[0] == none, none, second)


def idle_before(timeline: Timeline, replayed: Replayed) -> Ints:
    """Of each command, how long its GPU had nothing to do before it; of a collective, before it was on the wire."""
    gaps = np.zeros(len(timeline), np.int64)
    spans, rank = timeline.spans, timeline.rank_of_rows
    start = at_work_from(spans.kind, replayed.start, replayed.end, spans.work)
    for one in timeline.ranks:
        rows = np.flatnonzero(timeline.on_device & (rank == one))
        rows = rows[np.argsort(start[rows], kind="stable")]
        reached = np.maximum.accumulate(replayed.end[rows])
        gaps[rows[1:]] = np.maximum(start[rows[1:]] - reached[:-1], 0)
        if len(rows) and len(timeline.marks):  # a turn begins where the one before it ended
            around = round(replayed.pace * len(timeline.marks_of(timeline.ranks[0])))
            gaps[rows[0]] = 0 if timeline.facts.one_turn else max(0, int(start[rows[0]]) + around - int(reached[-1]))
    return gaps


def sources_of(timeline: Timeline) -> tuple[str, ...]:
    return timeline.facts.sources or tuple(filter(None, [timeline.facts.source]))
