"""The plan: what to do first, what then, and where the step stands after each.

What is predicted is a fix at a place, not a cause. Two waits behind one another gain nothing alone and everything
together, so sets of fixes are replayed, not only single ones; and only what gains nothing in any set costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from keepbusy.fixes.rounds import rounds_at_once, shards_of_blocks
from keepbusy.timeline.edit import Edit
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, Ints
from keepbusy.timeline.replay import MOST_ROWS

Plan = tuple[PlannedFix, ...]
LARGEST_SET = 3
"""Fixes that are tried together. Of more nobody would know which to begin with."""
CANDIDATES = 9
PLACES_APART = 3
"""Of one remedy, so many places are fixes of their own; what is left is one more."""
REPLAYED_ROWS = 4_000_000
"""In all: some seconds."""
AS_GOOD = 0.8
"""A fix that would save this share of what the chosen one saves, and little beyond it, could stand in its place."""

Fixes: TypeAlias = frozenset[Candidate]


def plan_of(inputs: CauseInputs, forecast: Forecast, found: Mapping[str, Finding]) -> tuple[PlannedFix, ...]:
    """Fixes in the order in which to do them."""
    search = Search.of(forecast, candidates(inputs, found))
    done, plan = Fixes(), list[PlannedFix]()
    while len(plan) < CANDIDATES:
        chosen = search.best_set(done)
        if not chosen:
            break
        chosen = search.with_joined(chosen)
        goes_first = any(one.fix.name == "graph" for one in chosen) and any(one.blocks_capture for one in chosen)
        for one in search.in_order_of_gain(chosen, done):
            before, done = search.gain(done), done | {one}
            gained = search.gain(done) - before
            if gained > forecast.noise or not goes_first:  # else it is named with the graph
                plan.append(search.planned(one, done, gained, chosen))
    return tuple(plan)


@dataclass(eq=False)
class Search:
    """Sets of fixes, replayed; each set once, and in all no more than some seconds."""

    forecast: Forecast
    candidates: list[Candidate]
    _whole: dict[Fixes, int] = field(default_factory=dict)
    _left: int = 0

    @staticmethod
    def of(forecast: Forecast, found: Sequence[Candidate]) -> Search:
        each = max(1, min(MOST_ROWS, 12 * len(forecast.plain.timeline)))
        search = Search(forecast, list(found), _left=max(24, REPLAYED_ROWS // each))
        best = sorted(found, key=lambda one: -search.gain(frozenset([one])))[:CANDIDATES]
        search.candidates = search.in_order(best)
        return search

    def in_order(self, fixes: Collection[Candidate]) -> list[Candidate]:
        return [one for one in self.candidates if one in fixes]

    def with_joined(self, chosen: Fixes) -> Fixes:
        """The same fix at several places, which gains nothing at one of them alone, is one fix."""
        by_fix = defaultdict[str, list[Candidate]](list)
        for one in self.in_order(chosen):
            if self.gain(frozenset([one])) <= self.forecast.noise:
                by_fix[one.fix.name].append(one)
        for same in by_fix.values():
            if len(same) > 1:
                joined = reduce(Candidate.joined, same)
                self.candidates = [joined if one is same[0] else one for one in self.candidates if one not in same[1:]]
                chosen = chosen.difference(same) | {joined}
        return chosen

    def in_order_of_gain(self, chosen: Fixes, done: Fixes) -> list[Candidate]:
        """What gains most first. To capture launches and to take away what waits between them is one step."""
        waits = [one for one in self.in_order(chosen) if one.blocks_capture]
        steps = [[*waits, one] if one.fix.name == "graph" else [one] for one in self.in_order(chosen)]
        steps.sort(key=lambda step: -self.gain(done.union(step)))
        return list(dict.fromkeys(chain.from_iterable(steps)))

    def gain(self, fixes: Fixes) -> int:
        """What is expected: of what an edit gains on top of the others, the share that its fix gives."""
        part = next((one for one in self.in_order(fixes) if one.share < 1), None)
        if part is None:
            return self._at_best(fixes)
        others = fixes - {part}
        return self.gain(others) + max(0, round(part.share * (self._at_best(fixes) - self._at_best(others))))

    def _at_best(self, fixes: Fixes) -> int:
        if not fixes:
            return 0
        if fixes not in self._whole:
            self._left -= 1
            self._whole[fixes] = self.forecast.gain(self._edit_of(fixes, lambda one: one.edit))
        return self._whole[fixes]

    def _edit_of(self, fixes: Fixes, edit: Callable[[Candidate], Edit]) -> Edit:
        return Edit.of([edit(one) for one in self.in_order(fixes)], self.forecast.plain.timeline)

    def predict(self, fixes: Fixes) -> Prediction:
        """From all that the edits give to what they give without those that may give nothing."""
        plain, edits = self.forecast.plain, [self._edit_of(fixes, lambda one: one.edit)]
        if any(one.bounds for one in fixes):
            edits += [self._edit_of(fixes, Candidate.at_best), self._edit_of(fixes, Candidate.at_worst)]
        best, *others = map(self.forecast.predict, edits)
        best = replace(best, low=min(one.low for one in (best, *others)), high=max(one.high for one in (best, *others)))
        sure = frozenset(one for one in fixes if not one.fix.is_uncertain)
        step = plain.step - self.gain(fixes)
        high = self.predict(sure).high if sure != fixes else min(plain.step, step + best.high - best.step)
        return Prediction(step, min(best.low, step), max(step, high))

    def best_set(self, done: Fixes) -> Fixes:
        """What may gain nothing comes last."""
        return self._best_of(done, uncertain=False) or self._best_of(done, uncertain=True)

    def _best_of(self, done: Fixes, uncertain: bool) -> Fixes:
        """On top of what is done: what gains most for the least change. Each fix has to gain more than the noise.

        Small sets are tried from below. From above, all that makes no difference leaves: more may stand behind one
        another than can be tried in all combinations.
        """
        noise, before = self.forecast.noise, self.gain(done)
        rest = [one for one in self.candidates if one not in done and (uncertain or not one.fix.is_uncertain)]
        everything = self.gain(done.union(rest)) - before
        if everything <= noise:
            return frozenset()
        gained: dict[Fixes, int] = {}
        worth: dict[Fixes, int] = {}
        alone = [frozenset([one]) for one in rest]
        for some in chain(alone, self._larger_sets(rest, done, worth, everything)):
            whole = self._with_what_it_needs(some, done)
            if any(_is_made_by(one, done | whole) for one in done | whole):
                continue
            gained[whole] = self.gain(done | whole) - before
            worth[whole] = gained[whole] - noise * len(whole)
        best = max(worth, key=lambda some: worth[some], default=frozenset())
        good = [
            some
            for some in worth
            if worth[some] >= AS_GOOD * worth[best]
            or (_generality(some) < _generality(best) and gained[some] >= AS_GOOD * gained[best])
        ]
        good = [some for some in good if worth[some] > 0]
        return min(good, key=lambda some: (_generality(some), -worth[some]), default=frozenset())

    def _needed_of(self, rest: Sequence[Candidate], done: Fixes) -> Fixes:
        """All that is left, but for one after the other that makes no difference to the others; general ones first."""
        kept = frozenset(rest)
        for one in sorted(rest, key=lambda one: (-one.generality, self.gain(frozenset([one])))):
            if self.gain(done | kept) - self.gain(done | kept - {one}) <= self.forecast.noise:
                kept -= {one}
        return kept

    def _larger_sets(
        self, rest: Sequence[Candidate], done: Fixes, worth: Mapping[Fixes, int], everything: int
    ) -> Iterator[Fixes]:
        """The one from above, then of two and three, as long as they could be worth more than what `worth` holds."""
        noise, before = self.forecast.noise, self.gain(done)
        for size in range(2, LARGEST_SET + 1):
            best = max(worth.values(), default=0)
            if best + noise * size >= everything:  # nothing larger could be worth more, only be less general
                rest = [one for one in rest if not one.generality]
                special = max((worth[some] for some in worth if not _generality(some)), default=0)
                if not special < AS_GOOD * best <= self.gain(done.union(rest)) - before:
                    return
            if size == 2:
                yield self._needed_of(rest, done)
            yield from (frozenset(some) for some in combinations(rest, size) if self._left > 0)

    def _with_what_it_needs(self, some: Fixes, done: Fixes) -> Fixes:
        """Launches are captured together only where nothing waits between them, so these waits go first."""
        if not any(one.fix.name == "graph" for one in some):
            return some
        return some.union(one for one in self.candidates if one.blocks_capture and one not in done)

    def planned(self, one: Candidate, done: Fixes, gain: int, together: Fixes) -> PlannedFix:
        """With what belongs to it: of a capture the waits that go before it, else what it gains nothing without."""
        alone, noise = self.gain(frozenset([one])), self.forecast.noise
        partners = self.in_order(together - {one})
        needs = [other for other in partners if other.blocks_capture] if one.fix.name == "graph" else partners
        names = [one.first] * bool(one.first) + [other.named for other in needs]
        return planned_fix(
            one.remedy,
            one.where,
            one.causes,
            max(0, gain),
            self.predict(done),
            alone=alone,
            needs=tuple(dict.fromkeys(names)) if one.fix.name == "graph" or alone <= noise else (),
            instead=tuple(self._instead(one, done)),
            edit=one.edit if one.share == 1 else None,
            reason=one.reason,
            captured=one.captured,
        )

    def _instead(self, one: Candidate, done: Fixes) -> Iterator[str]:
        """Other fixes of the same wait: either of the two, not both."""
        mine, noise = self.gain(frozenset([one])), self.forecast.noise
        for other in self.candidates if mine > noise else ():
            as_good = other not in done and self.gain(frozenset([other])) >= AS_GOOD * mine
            if as_good and self.gain(frozenset([one, other])) - mine <= noise:
                yield other.named


def _is_made_by(candidate: Candidate, fixes: Collection[Candidate]) -> bool:
    """Whether another one does this as well: DistributedDataParallel lays small gradients together, too."""
    if candidate.fix.name != "send_together":
        return False
    lines = {(place.file, place.line) for place in candidate.where}
    overlapped = [place for other in fixes if other.fix.name == "overlap_collectives" for place in other.where]
    return any((place.file, place.line) in lines for place in overlapped)


def _generality(some: Fixes) -> int:
    return max((one.generality for one in some), default=0)


def planned_fix(
    remedy: Remedy, where: Sequence[Where], causes: tuple[str, ...], gain: int, predicted: Prediction, **more: Any
) -> PlannedFix:
    said: dict[str, Any] = {"alone": gain, **remedy._asdict(), "fix": remedy.fix.name}
    return PlannedFix(where=tuple(where), causes=causes, gain=gain, predicted=predicted, **(said | more))


def candidates(inputs: CauseInputs, found: Mapping[str, Finding]) -> list[Candidate]:
    """Every remedy that something seen here asks for."""
    named = defaultdict[str, list[Candidate]](list)
    facts = inputs.timeline.facts  # compiled, it launches less: nobody knows how much less; once, nothing pays for that
    as_it_is = ("launch_bound",) if facts.compiled_eagerly or facts.runs_once else ()
    of_causes = (
        one for cause, finding in found.items() if cause not in as_it_is for one in _of_cause(inputs, finding, found)
    )
    for one in chain(of_causes, () if as_it_is else rounds_at_once(inputs)):
        same = named[one.fix.name]
        whole = one.fix.is_one_change or (not one.bounds and one.causes[0] in WHOLE_LOOP)
        # the same fix at the same place is one, however it was found
        alike = same[:1] if whole else [other for other in same if other.named == one.named]
        named[one.fix.name] = [
            *(other for other in same if other not in alike),
            reduce(Candidate.joined, [*alike, one]),
        ]
    found_here = list[Candidate]()
    for same in named.values():  # of one remedy not more than a few; the last of them takes in the rest
        rest = same[PLACES_APART:]
        found_here += [*same[:PLACES_APART], *([reduce(Candidate.joined, rest)] if rest else [])]
    among_ranks = (*pipeline_stages(inputs), *shards_of_blocks(inputs)) if inputs.among_ranks else ()
    return [*found_here, *among_ranks]


def _of_cause(inputs: CauseInputs, finding: Finding, found: Mapping[str, Finding]) -> Iterator[Candidate]:
    """Of each remedy that its places ask for the changes to be made, each with what it changes in the timeline."""
    groups = finding.places
    remedies = {place: remedy_for(inputs, finding, place, groups[place]) for place in groups}
    for remedy in dict.fromkeys(remedies.values()):
        mine = [place for place in groups if remedies[place] == remedy]
        for places, beside in _changed_together(mine, finding.cause in WHOLE_LOOP or remedy.fix.is_one_change):
            rows = np.concatenate([groups[place] for place in (*places, *beside)])
            edit = finding.edit if len(places) + len(beside) == len(groups) else finding.only(rows)
            if finding.cause == "made_on_host" and "blocking_copy" in found:
                edit = edit | _copied_there(inputs, found["blocking_copy"], places)
            middle = finding.cause == "host_sync" and bool(2 * capture_of(inputs, FIXES).waits[rows].sum() > len(rows))
            usual = Candidate(remedy, tuple(places), (finding.cause,), edit, middle, reason=_comes_back(inputs, rows))
            first = PlacedCause(inputs, finding, mine[0], groups[mine[0]], FIXES)
            yield remedy.fix.candidate(first, usual)


def _comes_back(inputs: CauseInputs, rows: Ints) -> str:
    """Of copies that these rows wait for or launch: that as much leaves the GPU as comes to it, in pieces of the same
    sizes, like a state that is kept on the host between two turns. Whether it is the same data nobody knows."""
    spans, large = inputs.timeline.spans, inputs.is_copy & (inputs.timeline.spans.size > STAGED_BYTES)
    home, inbound = (large & (spans.direction == way) for way in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE))
    both = np.intersect1d(spans.size[home], spans.size[inbound])
    mine = np.where(inputs.copy_of_sync[rows] != NONE, inputs.copy_of_sync[rows], inputs.command[rows])
    mine = mine[(mine != NONE) & (home | inbound)[mine]]
    if not len(mine) or not np.isin(spans.size[mine], both).all():
        return ""
    return "Copies of the same size leave the GPU and come back. If it is the same data, keep it there."


def _changed_together(places: list[Where], is_one: bool) -> Iterator[tuple[list[Where], list[Where]]]:
    """Of one remedy, the costliest first: the places of each change, and what was seen at no line of the program, which
    goes with the costliest line."""
    lines = [place for place in places if place.is_known] if any(place.file for place in places) else places
    beside = [place for place in places if place not in lines]
    changes = [lines] if is_one else [*([place] for place in lines[:PLACES_APART]), lines[PLACES_APART:]]
    for number, change in enumerate(filter(None, changes)):
        yield change, [] if number else beside


def _copied_there(inputs: CauseInputs, copies: Finding, places: Sequence[Where]) -> Edit:
    """What is made on the device in the first place is not copied to it."""
    lines = {(place.file, place.line) for place in places if place.line}
    rows = [rows for place, rows in copies.places.items() if place.line and (place.file, place.line) in lines]
    return copies.only(np.concatenate(rows)) if rows else Edit.nothing(inputs.timeline)
