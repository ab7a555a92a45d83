"""The plan: what to do first, what next, and how long the step is after each.

Fixes at places are predicted, not causes. Of two waits that overlap, removing one saves nothing and removing both saves
everything, so sets of fixes are replayed. Only what saves nothing in any set costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np

from keepbusy.causes.cause import Finding
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import PlannedFix, Prediction
from keepbusy.explain.step_analysis import Forecast
from keepbusy.fixes import FIXES, remedy_for
from keepbusy.fixes.among_ranks import pipeline_stages
from keepbusy.fixes.capture import capture_of
from keepbusy.fixes.definition import WHOLE_LOOP, Candidate, PlacedCause, Remedy
from keepbusy.fixes.repeated_calls import repeated_calls_at_once, shards_of_blocks
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, Ints
from keepbusy.timeline.replay import MOST_ROWS

Plan = tuple[PlannedFix, ...]
LARGEST_SET = 3
"""So many fixes are tried together. With more a reader would not know where to begin."""
CANDIDATES = 9
PLACES_APART = 3
"""So many places of one remedy are fixes of their own. The others together are one more."""
REPLAYED_ROWS = 4_000_000
"""In the whole search, which takes some seconds."""
AS_GOOD = 0.8
"""A fix that saves this share of what the chosen one saves, and little on top of it, is an alternative to it."""

Fixes: TypeAlias = frozenset[Candidate]


def plan_of(inputs: CauseInputs, forecast: Forecast, findings: Mapping[str, Finding]) -> tuple[PlannedFix, ...]:
    """Fixes in the order in which to do them."""
    search = Search.of(forecast, candidates(inputs, findings))
    planned, plan = Fixes(), list[PlannedFix]()
    while len(plan) < CANDIDATES and (chosen := search.best_set(planned)):
        chosen = search.with_joined(chosen)
        captures = any(candidate.fix.name == "graph" for candidate in chosen)
        goes_first = captures and any(candidate.blocks_capture for candidate in chosen)
        for candidate in search.in_order_of_gain(chosen, planned):
            before, planned = search.gain(planned), planned | {candidate}
            gained = search.gain(planned) - before
            if gained > forecast.noise or not goes_first:  # else it is among the needs of the graph
                plan.append(search.as_planned(candidate, planned, gained, chosen))
    return tuple(plan)


@dataclass(eq=False)
class Search:
    """Sets of fixes, each replayed once, in no more than some seconds altogether."""

    forecast: Forecast
    candidates: list[Candidate]
    _gains: dict[Fixes, int] = field(default_factory=dict)
    _replays_left: int = 0

    @staticmethod
    def of(forecast: Forecast, candidates: Sequence[Candidate]) -> Search:
        each = max(1, min(MOST_ROWS, 12 * len(forecast.plain.timeline)))
        search = Search(forecast, list(candidates), _replays_left=max(24, REPLAYED_ROWS // each))
        best = sorted(candidates, key=lambda candidate: -search.gain(frozenset([candidate])))[:CANDIDATES]
        search.candidates = search.in_order(best)
        return search

    def in_order(self, fixes: Collection[Candidate]) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate in fixes]

    def with_joined(self, chosen: Fixes) -> Fixes:
        """Joins the same fix at several places into one, if it saves nothing at any of them alone."""
        by_fix = defaultdict[str, list[Candidate]](list)
        for candidate in self.in_order(chosen):
            if self.gain(frozenset([candidate])) <= self.forecast.noise:
                by_fix[candidate.fix.name].append(candidate)
        for same in by_fix.values():
            if len(same) > 1:
                joined = reduce(Candidate.joined, same)
                self.candidates[self.candidates.index(same[0])] = joined
                self.candidates = [candidate for candidate in self.candidates if candidate not in same]
                chosen = chosen.difference(same) | {joined}
        return chosen

    def in_order_of_gain(self, chosen: Fixes, planned: Fixes) -> list[Candidate]:
        """The largest gain first. Capturing launches and removing the waits between them is one step."""
        ordered = self.in_order(chosen)
        waits = [candidate for candidate in ordered if candidate.blocks_capture]
        steps = [[*waits, candidate] if candidate.fix.name == "graph" else [candidate] for candidate in ordered]
        steps.sort(key=lambda step: -self.gain(planned.union(step)))
        return list(dict.fromkeys(chain.from_iterable(steps)))

    def gain(self, fixes: Fixes) -> int:
        """The expected gain. A fix with a share below 1 counts with that share of what its edit adds to the others."""
        part = next((candidate for candidate in self.in_order(fixes) if candidate.share < 1), None)
        if part is None:
            return self._at_best(fixes)
        others = fixes - {part}
        return self.gain(others) + max(0, round(part.share * (self._at_best(fixes) - self._at_best(others))))

    def _at_best(self, fixes: Fixes) -> int:
        if not fixes:
            return 0
        if fixes not in self._gains:
            self._replays_left -= 1
            self._gains[fixes] = self.forecast.gain(self._edit_of(fixes, lambda candidate: candidate.edit))
        return self._gains[fixes]

    def _edit_of(self, fixes: Fixes, edit: Callable[[Candidate], Edit]) -> Edit:
        return Edit.of([edit(candidate) for candidate in self.in_order(fixes)], self.forecast.plain.timeline)

    def predict(self, fixes: Fixes) -> Prediction:
        """The step with these fixes. The range ends at the step without the fixes that may save nothing."""
        plain, edits = self.forecast.plain, [self._edit_of(fixes, lambda candidate: candidate.edit)]
        if any(candidate.bounds for candidate in fixes):
            edits += [self._edit_of(fixes, Candidate.at_best), self._edit_of(fixes, Candidate.at_worst)]
        predictions = [self.forecast.predict(edit) for edit in edits]
        low, high = min(each.low for each in predictions), max(each.high for each in predictions)
        sure = frozenset(candidate for candidate in fixes if not candidate.fix.is_uncertain)
        step = plain.step - self.gain(fixes)
        high = self.predict(sure).high if sure != fixes else min(plain.step, step + high - predictions[0].step)
        return Prediction(step, min(low, step), max(step, high))

    def best_set(self, planned: Fixes) -> Fixes:
        """The next fixes to plan. Fixes that may save nothing come last."""
        return self._best_of(planned, uncertain=False) or self._best_of(planned, uncertain=True)

    def _best_of(self, planned: Fixes, uncertain: bool) -> Fixes:
        """The set that saves most on top of what is planned, with the least change. Each fix must save more than noise.

        Small sets are tried in all combinations. Larger ones are found from above, by dropping fixes that make no
        difference from the set of all.
        """
        noise, before = self.forecast.noise, self.gain(planned)
        rest = [candidate for candidate in self.candidates if candidate not in planned]
        rest = [candidate for candidate in rest if uncertain or not candidate.fix.is_uncertain]
        everything = self.gain(planned.union(rest)) - before
        if everything <= noise:
            return frozenset()
        gained: dict[Fixes, int] = {}
        worth: dict[Fixes, int] = {}
        alone = [frozenset([candidate]) for candidate in rest]
        for fixes in chain(alone, self._larger_sets(rest, planned, worth, everything)):
            needed = self._with_what_it_needs(fixes, planned)
            if any(_is_made_by(candidate, planned | needed) for candidate in planned | needed):
                continue
            gained[needed] = self.gain(planned | needed) - before
            worth[needed] = gained[needed] - noise * len(needed)
        best = max(worth, key=lambda fixes: worth[fixes], default=frozenset())
        good = [
            fixes
            for fixes in worth
            if worth[fixes] >= AS_GOOD * worth[best]
            or (_generality(fixes) < _generality(best) and gained[fixes] >= AS_GOOD * gained[best])
        ]
        good = [fixes for fixes in good if worth[fixes] > 0]
        return min(good, key=lambda fixes: (_generality(fixes), -worth[fixes]), default=frozenset())

    def _needed_of(self, rest: Sequence[Candidate], planned: Fixes) -> Fixes:
        """All remaining fixes without those that make no difference, dropped one by one, the most general first."""
        needed = frozenset(rest)
        for candidate in sorted(rest, key=lambda candidate: (-candidate.generality, self.gain(frozenset([candidate])))):
            if self.gain(planned | needed) - self.gain(planned | needed - {candidate}) <= self.forecast.noise:
                needed -= {candidate}
        return needed

    def _larger_sets(
        self, remaining: Sequence[Candidate], planned: Fixes, worth: Mapping[Fixes, int], everything: int
    ) -> Iterator[Fixes]:
        """The set found from above, then sets of two and three, as long as one could be worth more than any before."""
        noise, before = self.forecast.noise, self.gain(planned)
        for size in range(2, LARGEST_SET + 1):
            best = max(worth.values(), default=0)
            if best + noise * size >= everything:  # a larger set could only be less general
                remaining = [candidate for candidate in remaining if not candidate.generality]
                special = max((worth[fixes] for fixes in worth if not _generality(fixes)), default=0)
                if not special < AS_GOOD * best <= self.gain(planned.union(remaining)) - before:
                    return
            if size == 2:
                yield self._needed_of(remaining, planned)
            yield from (frozenset(fixes) for fixes in combinations(remaining, size) if self._replays_left > 0)

    def _with_what_it_needs(self, fixes: Fixes, planned: Fixes) -> Fixes:
        """Adds what a graph needs: launches are captured together only if nothing waits between them."""
        if not any(candidate.fix.name == "graph" for candidate in fixes):
            return fixes
        waits = {candidate for candidate in self.candidates if candidate.blocks_capture}
        return fixes | (waits - planned)

    def as_planned(self, candidate: Candidate, planned: Fixes, gain: int, together: Fixes) -> PlannedFix:
        """With its needs: for a graph the waits to remove first, else the fixes without which it saves nothing."""
        alone, noise = self.gain(frozenset([candidate])), self.forecast.noise
        partners = self.in_order(together - {candidate})
        needs = [other for other in partners if other.blocks_capture] if candidate.fix.name == "graph" else partners
        names = [candidate.first] * bool(candidate.first) + [other.named for other in needs]
        return planned_fix(
            candidate.remedy,
            candidate.where,
            candidate.causes,
            max(0, gain),
            self.predict(planned),
            alone=alone,
            needs=tuple(dict.fromkeys(names)) if candidate.fix.name == "graph" or alone <= noise else (),
            instead=tuple(self._instead(candidate, planned)),
            edit=candidate.edit if candidate.share == 1 else None,
            reason=candidate.reason,
            captured=candidate.captured,
        )

    def _instead(self, candidate: Candidate, planned: Fixes) -> Iterator[str]:
        """Other fixes of the same wait, any of which would do."""
        gain, noise = self.gain(frozenset([candidate])), self.forecast.noise
        for other in self.candidates if gain > noise else ():
            as_good = other not in planned and self.gain(frozenset([other])) >= AS_GOOD * gain
            if as_good and self.gain(frozenset([candidate, other])) - gain <= noise:
                yield other.named


def _is_made_by(candidate: Candidate, fixes: Collection[Candidate]) -> bool:
    """Whether another fix includes this one: DistributedDataParallel joins small gradients, too."""
    if candidate.fix.name != "send_together":
        return False
    lines = {(place.file, place.line) for place in candidate.where}
    overlapped = [place for other in fixes if other.fix.name == "overlap_collectives" for place in other.where]
    return any((place.file, place.line) in lines for place in overlapped)


def _generality(fixes: Fixes) -> int:
    return max((candidate.generality for candidate in fixes), default=0)


def planned_fix(
    remedy: Remedy, where: Sequence[Where], causes: tuple[str, ...], gain: int, predicted: Prediction, **more: Any
) -> PlannedFix:
    values: dict[str, Any] = {"alone": gain, **remedy._asdict(), "fix": remedy.fix.name}
    return PlannedFix(where=tuple(where), causes=causes, gain=gain, predicted=predicted, **(values | more))


def candidates(inputs: CauseInputs, findings: Mapping[str, Finding]) -> list[Candidate]:
    """Every remedy for these findings."""
    named = defaultdict[str, list[Candidate]](list)
    facts = inputs.timeline.facts
    # a program that was run uncompiled will launch less, by an unknown amount; in a single run a graph never pays off
    skipped = ("launch_bound",) if facts.compiled_eagerly or facts.runs_once else ()
    of_causes = [_of_cause(inputs, finding, findings) for cause, finding in findings.items() if cause not in skipped]
    for candidate in chain(*of_causes, () if skipped else repeated_calls_at_once(inputs)):
        same = named[candidate.fix.name]
        is_one = candidate.fix.is_one_change or (not candidate.bounds and candidate.causes[0] in WHOLE_LOOP)
        # the same fix at the same place is one, however it was found
        alike = same[:1] if is_one else [other for other in same if other.named == candidate.named]
        named[candidate.fix.name] = [
            *(other for other in same if other not in alike),
            reduce(Candidate.joined, [*alike, candidate]),
        ]
    limited = list[Candidate]()
    for same in named.values():  # at most four per remedy: the last joins the rest
        rest = same[PLACES_APART:]
        limited += [*same[:PLACES_APART], *([reduce(Candidate.joined, rest)] if rest else [])]
    among_ranks = (*pipeline_stages(inputs), *shards_of_blocks(inputs)) if inputs.among_ranks else ()
    return [*limited, *among_ranks]


def _of_cause(inputs: CauseInputs, finding: Finding, findings: Mapping[str, Finding]) -> Iterator[Candidate]:
    """The changes to make for one cause, by remedy, each with its edit of the timeline."""
    groups = finding.places
    remedies = {place: remedy_for(inputs, finding, place, groups[place]) for place in groups}
    for remedy in dict.fromkeys(remedies.values()):
        of_remedy = [place for place in groups if remedies[place] == remedy]
        for places, beside in _changed_together(of_remedy, finding.cause in WHOLE_LOOP or remedy.fix.is_one_change):
            rows = np.concatenate([groups[place] for place in (*places, *beside)])
            edit = finding.edit if len(places) + len(beside) == len(groups) else finding.only(rows)
            if finding.cause == "made_on_host" and "blocking_copy" in findings:
                edit = edit | _copied_there(inputs, findings["blocking_copy"], places)
            middle = finding.cause == "host_sync" and bool(2 * capture_of(inputs, FIXES).waits[rows].sum() > len(rows))
            usual = Candidate(remedy, tuple(places), (finding.cause,), edit, middle, reason=_comes_back(inputs, rows))
            first = PlacedCause(inputs, finding, of_remedy[0], groups[of_remedy[0]], FIXES)
            yield remedy.fix.candidate(first, usual)


def _comes_back(inputs: CauseInputs, rows: Ints) -> str:
    """A sentence if all copies of these rows have sizes that are copied in both directions, like a state that is on the
    host between iterations. Whether it is the same data is unknown."""
    spans, large = inputs.timeline.spans, inputs.is_copy & (inputs.timeline.spans.size > STAGED_BYTES)
    outbound = large & (spans.direction == Direction.DEVICE_TO_HOST)
    inbound = large & (spans.direction == Direction.HOST_TO_DEVICE)
    sizes = np.intersect1d(spans.size[outbound], spans.size[inbound])
    copies = np.where(inputs.copy_of_sync[rows] != NONE, inputs.copy_of_sync[rows], inputs.command[rows])
    copies = copies[(copies != NONE) & (outbound | inbound)[copies]]
    if not len(copies) or not np.isin(spans.size[copies], sizes).all():
        return ""
    return "Copies of the same size leave the GPU and come back. If it is the same data, keep it there."


def _changed_together(places: list[Where], is_one: bool) -> Iterator[tuple[list[Where], list[Where]]]:
    """The places of each change, the costliest first, and the places at no line of the program, which belong to the
    costliest change."""
    lines = [place for place in places if place.is_known] if any(place.file for place in places) else places
    beside = [place for place in places if place not in lines]
    changes = [lines] if is_one else [*([place] for place in lines[:PLACES_APART]), lines[PLACES_APART:]]
    for number, change in enumerate(filter(None, changes)):
        yield change, [] if number else beside


def _copied_there(inputs: CauseInputs, copies: Finding, places: Sequence[Where]) -> Edit:
    """Removes the copies to the GPU at these places: what is created on the GPU is not copied to it."""
    lines = {(place.file, place.line) for place in places if place.line}
    rows = [rows for place, rows in copies.places.items() if place.line and (place.file, place.line) in lines]
    return copies.only(np.concatenate(rows)) if rows else Edit.nothing(inputs.timeline)
