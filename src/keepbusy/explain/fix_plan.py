"""The plan: what to do first, what then, and where the step stands after each.

What is predicted is a fix at a place, not a cause. Two waits behind one another gain nothing alone and everything
together, so sets of fixes are replayed, not only single ones; and only what gains nothing in any set costs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, combinations
from typing import Any, TypeAlias

import numpy as np

from keepbusy.explain.causes.peers import Pipeline, is_message, without_messages
from keepbusy.explain.causes.rounds import CallRounds, as_one, rounds_of
from keepbusy.explain.diagnosis import (
    COMPUTING,
    Diagnosis,
    Harmless,
    LoopDiagnosis,
    PlannedFix,
    Prediction,
    Rare,
    Where,
    named,
)
from keepbusy.explain.edit import Edit, Finding
from keepbusy.explain.ledger import NOISE, Forecast
from keepbusy.explain.places import by_place
from keepbusy.explain.remedies import PARTICULAR, REMEDIES, Remedy, remedy_for, setting_of
from keepbusy.explain.scene import Scene
from keepbusy.timeline.frame_roles import Role, source_line
from keepbusy.timeline.model import NONE, Ints, Kind
from keepbusy.timeline.plain_run import RareStall
from keepbusy.timeline.replay import MOST_ROWS
from keepbusy.timeline.run_tree import FIRST_USE, LINE, LOOP, LoaderUse, Part, SlowTurns

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
GENERAL = {"host_work": 1, "launch_bound": 2}
"""Fixes that change the program more than others do: what is nearly as good without them comes first."""
COMPILED_AWAY = 0.2
"""Of what launches hold up, what `torch.compile` took away in the mean of four programs measured on an H200: nothing of
two, a fifth, and three fifths. What calls no module, the backward pass and the optimizer are launched as before."""
COMPILING = 20_000_000_000
"""What it took them once, in the median: 11 to 63 seconds."""
MERGED_WORK = 0.5
"""Of what the GPU does in rounds that become one, the middle of what could stay: nobody knows how full each of them
keeps it. The range goes from none of it to all."""
SMALLER_PIECES = "Smaller micro-batches keep the GPU less busy while it computes: try how many are best."
BOTH_WAYS = (
    "It needs the value that is read there, and the GPU needs what comes of it: the two cannot go on side by side."
)
OF_STALLS = {"checkpoint": PARTICULAR["checkpoint"], "garbage collection": PARTICULAR["collect_between"]}
"""Remedies of stalls whose reason was seen."""
ONE_FIX = ("prefetch", "accumulate", "average_once", "align_ranks")
"""Remedies that are one change however many lines they concern: a share of the work given to one rank is another's."""
WHOLE_LOOP = ("launch_bound", "input_late", "allocator", "host_work")
"""Remedies of a whole loop, and causes that have no other: wherever it waits, it is one change."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A remedy at the lines that it changes, and exactly what it changes there."""

    remedy: Remedy
    where: tuple[Where, ...]
    causes: tuple[str, ...]
    edit: Edit
    in_the_middle: bool = False  # waits between the launches of one step, so that these cannot be captured together
    share: float = 1.0  # of what the edit gains, as much as is expected of the fix
    bounds: tuple[Edit, ...] = ()  # the same at best and at worst, where that is not only a matter of recording
    reason: str = ""

    @property
    def named(self) -> str:
        return named(self.remedy.fix, self.where)

    @property
    def is_uncertain(self) -> bool:
        """Whether some programs gain nothing by it: compiling leaves most launches, small pieces fill no GPU, and of
        rounds each may need the one before it."""
        return self.remedy.fix in ("compile", "cut_into_micro_batches", "do_at_once")

    @property
    def captures(self) -> bool:
        """Whether launches are captured as a graph, between which nothing may wait."""
        return self.remedy.fix == "graph"

    @property
    def generality(self) -> int:
        return 0 if self.bounds else max(GENERAL.get(cause, 0) for cause in self.causes)

    def bound(self, end: int) -> Edit:
        """At best (0) and at worst (1)."""
        return self.bounds[end] if self.bounds else self.edit

    def joined(self, other: Candidate) -> Candidate:
        known = {str(place) for place in self.where}
        places = [*self.where, *(place for place in other.where if str(place) not in known)]
        causes = dict.fromkeys([*self.causes, *other.causes])
        middle = self.in_the_middle or other.in_the_middle
        bounds = tuple(self.bound(end) | other.bound(end) for end in range(2)) if self.bounds or other.bounds else ()
        return replace(
            self,
            where=tuple(places),
            causes=tuple(causes),
            edit=self.edit | other.edit,
            in_the_middle=middle,
            bounds=bounds,
        )


def candidates(scene: Scene, found: Mapping[str, Finding]) -> list[Candidate]:
    """Every remedy that something seen here asks for."""
    named = defaultdict[str, list[Candidate]](list)
    facts = scene.timeline.facts  # compiled, it launches less: nobody knows how much less; once, nothing pays for that
    as_it_is = ("launch_bound",) if facts.compiled_eagerly or facts.runs_once else ()
    for cause, finding in found.items():
        for one in () if cause in as_it_is else _of_cause(scene, cause, finding, found):
            same = named[one.remedy.fix]
            _add(same, one, same[:1] if one.remedy.fix in ONE_FIX or cause in WHOLE_LOOP else [])
    for one in () if as_it_is else _of_rounds(scene):  # the same fix at the same place is one, however it was found
        same = named[one.remedy.fix]
        _add(same, one, [other for other in same if other.named == one.named])
    return [*chain(*map(_few, named.values())), *_of_pipeline(scene)]


def _add(same: list[Candidate], one: Candidate, joined_to: Sequence[Candidate]) -> None:
    for other in joined_to:
        one = other.joined(one)
        same.remove(other)
    same.append(one)


def _few(same: Sequence[Candidate]) -> list[Candidate]:
    """Of one remedy not more than a few; the last of them takes in the rest."""
    rest = same[PLACES_APART:]
    return [*same[:PLACES_APART], *([reduce(Candidate.joined, rest)] if rest else [])]


def _of_cause(scene: Scene, cause: str, finding: Finding, found: Mapping[str, Finding]) -> Iterator[Candidate]:
    groups = by_place(scene, finding.rows, cause)
    remedies = {place: remedy_for(scene, finding, place, groups[place]) for place in groups}
    for remedy in dict.fromkeys(remedies.values()):
        mine = [place for place in groups if remedies[place] == remedy]
        mine.sort(key=lambda place: -finding.held_at(scene.timeline, groups[place]))
        for places, beside in _changed_together(mine, cause in WHOLE_LOOP or remedy.fix in ONE_FIX):
            rows = np.concatenate([groups[place] for place in (*places, *beside)])
            edit = finding.edit if len(places) + len(beside) == len(groups) else finding.only(rows)
            if cause == "made_on_host" and "blocking_copy" in found:
                edit = edit | _copied_there(scene, found["blocking_copy"], places)
            middle = cause == "host_sync" and _in_the_middle(scene, rows)
            share = COMPILED_AWAY if remedy.fix == "compile" else 1.0
            bounds = tuple[Edit, ...]()
            if remedy.fix in ("compute_on_gpu", "decide_on_gpu"):  # nobody knows how much of it a GPU can do
                bounds = (edit, Edit.nothing(scene.timeline))
            reason = BOTH_WAYS if remedy.fix == "compute_on_gpu" else ""
            yield Candidate(remedy, tuple(places), (cause,), edit, middle, share, bounds, reason)


def _changed_together(places: list[Where], is_one: bool) -> Iterator[tuple[list[Where], list[Where]]]:
    """Of one remedy, the costliest first: the places of each change, and what was seen at no line of the program, which
    goes with the costliest line."""
    lines = [place for place in places if place.is_known] if any(place.file for place in places) else places
    beside = [place for place in places if place not in lines]
    changes = [lines] if is_one else [*([place] for place in lines[:PLACES_APART]), lines[PLACES_APART:]]
    for number, change in enumerate(filter(None, changes)):
        yield change, [] if number else beside


def _of_pipeline(scene: Scene) -> Iterator[Candidate]:
    """Stages that wait for each other's micro-batches: replayed is what they would take if they never did."""
    pipeline = Pipeline.of(scene)
    if pipeline is None:
        return
    remedy = PARTICULAR["pieces_together" if pipeline.pieces_after == pipeline.pieces else "more_pieces"]
    remedy = remedy._replace(code=remedy.code.format(pieces=pipeline.pieces_after))
    messages = scene.launch[is_message(scene)]
    receives = messages[scene.within(Role.RECEIVES)[messages]]
    places = by_place(scene, receives if len(receives) else messages)
    edit, share = without_messages(scene), 1.0 - pipeline.stays
    reason = SMALLER_PIECES if remedy.fix == "cut_into_micro_batches" else ""
    yield Candidate(remedy, tuple(places), ("pipeline_bubble",), edit, share=share, reason=reason)


def _of_rounds(scene: Scene) -> Iterator[Candidate]:
    """What a loop does to one small thing after another, as one call. All tables are one change."""
    rounds = list(rounds_of(scene))
    expected, *bounds = (as_one(scene, rounds, stays) for stays in (MERGED_WORK, 0.0, 1.0))
    places = by_place(scene, expected.rows)
    table = scene.within(Role.TABLE)
    there = {place: [one for one in rounds if np.isin(one.first, places[place]).any()] for place in places}
    of_tables = [place for place in places if any(table[one.first].any() for one in there[place])]
    for mine in filter(None, [of_tables, *([place] for place in places if place not in of_tables)]):
        mine.sort(key=lambda place: -expected.held_at(scene.timeline, places[place]))
        rows = np.concatenate([places[place] for place in mine])
        edit, limits = expected.only(rows), tuple(one.only(rows) for one in bounds)
        said = _told_of(scene, [one for place in mine for one in there[place]])
        remedy = _as_one_call(mine[0], mine == of_tables)
        if remedy.fix == "do_at_once":
            # parameters and tables do not need each other; of others only their author knows, so nothing is expected
            # beyond what launching them takes
            edit = limits[1]
            said += " Where a round needs what the one before it computed, torch.compile is what is left."
        yield Candidate(remedy, tuple(mine), ("launch_bound",), edit, bounds=limits, reason=said)


def _as_one_call(place: Where, is_table: bool) -> Remedy:
    if is_table:
        return PARTICULAR["one_table"]
    return PARTICULAR["fused" if place.library.startswith("torch/optim/") else "all_at_once"]


def _told_of(scene: Scene, rounds: Sequence[CallRounds]) -> str:
    launches = sum((scene.command[[*one.first, *one.others]] != NONE).sum() for one in rounds)
    of_all, of_a_rank = (scene.command != NONE).sum(), scene.steps * len(scene.timeline.ranks)
    return (
        f"{launches / of_a_rank:,.0f} of the {of_all / of_a_rank:,.0f} launches a step are there, in "
        f"{max(one.times for one in rounds)} rounds that do the same."
    )


def _in_the_middle(scene: Scene, rows: Ints) -> bool:
    """Whether most of these waits stand between the launches of a step: nothing may wait while CUDA captures them."""
    timeline = scene.timeline
    spans, marks = timeline.spans, timeline.marks_of(timeline.ranks[0])
    rank = timeline.rank_of_rows
    launches = np.flatnonzero((spans.kind == Kind.LAUNCH) & (rank == timeline.ranks[0]))
    mine = rows[rank[rows] == timeline.ranks[0]]
    edges = np.append(np.searchsorted(launches, marks), len(launches))
    step = np.searchsorted(marks, mine, side="right") - 1
    mine, step = mine[step >= 0], step[step >= 0]
    before = np.searchsorted(launches, mine) - edges[step]
    return bool(len(mine)) and bool(((before > 0) & (before < edges[step + 1] - edges[step])).mean() > 0.5)


def _copied_there(scene: Scene, copies: Finding, places: Sequence[Where]) -> Edit:
    """What is made on the device in the first place is not copied to it."""
    lines = {(place.file, place.line) for place in places if place.line}
    rows = [
        rows for place, rows in by_place(scene, copies.rows).items() if place.line and (place.file, place.line) in lines
    ]
    return copies.only(np.concatenate(rows)) if rows else Edit.nothing(scene.timeline)


Fixes: TypeAlias = frozenset[Candidate]


@dataclass(eq=False)
class Search:
    """Sets of fixes, replayed; each set once, and in all no more than some seconds."""

    forecast: Forecast
    candidates: list[Candidate]
    uncertain: bool = False  # whether to look also at what gains something in some programs only
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
            self._whole[fixes] = self.forecast.gain(
                Edit.of([one.edit for one in self.in_order(fixes)], self.forecast.plain.timeline)
            )
        return self._whole[fixes]

    def predict(self, fixes: Fixes) -> Prediction:
        """From all that the edits give to what they give without those that may give nothing."""
        ordered, plain = self.in_order(fixes), self.forecast.plain
        edits = [Edit.of([one.edit for one in ordered], plain.timeline)]
        if any(one.bounds for one in ordered):  # at best and at worst
            edits += [Edit.of([one.bound(end) for one in ordered], plain.timeline) for end in range(2)]
        best, *others = map(self.forecast.predict, edits)
        best = replace(best, low=min(one.low for one in (best, *others)), high=max(one.high for one in (best, *others)))
        sure = frozenset(one for one in fixes if not one.is_uncertain)
        step = plain.step - self.gain(fixes)
        high = self.predict(sure).high if sure != fixes else min(plain.step, step + best.high - best.step)
        return Prediction(step, min(best.low, step), max(step, high))

    def best_set(self, done: Fixes) -> Fixes:
        """On top of what is done: what gains most for the least change. Each fix has to gain more than the noise.

        Small sets are tried from below. From above, all that makes no difference leaves: more may stand behind one
        another than can be tried in all combinations.
        """
        noise, before = self.forecast.noise, self.gain(done)
        rest = [one for one in self.candidates if one not in done and (self.uncertain or not one.is_uncertain)]
        everything = self.gain(done.union(rest)) - before
        if everything <= noise:
            return frozenset()
        gained: dict[Fixes, int] = {}
        worth: dict[Fixes, int] = {}
        alone = [frozenset([one]) for one in rest]
        for some in chain(alone, self._larger_sets(rest, done, worth, everything)):
            whole = self._with_what_it_needs(some, done)
            gained[whole] = self.gain(done | whole) - before
            worth[whole] = gained[whole] - noise * len(whole)
        best = max(worth, key=lambda some: worth[some])
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
        if not any(one.captures for one in some):
            return some
        return some.union(one for one in self.candidates if one.in_the_middle and one not in done)

    def planned(self, one: Candidate, done: Fixes, gain: int, together: Fixes) -> PlannedFix:
        """With what belongs to it: of a capture the waits that go before it, else what it gains nothing without."""
        alone, noise = self.gain(frozenset([one])), self.forecast.noise
        partners = self.in_order(together - {one})
        needs = [other for other in partners if other.in_the_middle] if one.captures else partners
        return _row(
            one.remedy,
            one.where,
            one.causes,
            max(0, gain),
            self.predict(done),
            alone=alone,
            needs=tuple(other.named for other in needs) if one.captures or alone <= noise else (),
            instead=tuple(self._instead(one, done)),
            edit=one.edit if one.share == 1 else None,
            reason=one.reason,
        )

    def _instead(self, one: Candidate, done: Fixes) -> Iterator[str]:
        """Other fixes of the same wait: either of the two, not both."""
        mine, noise = self.gain(frozenset([one])), self.forecast.noise
        for other in self.candidates if mine > noise else ():
            as_good = other not in done and self.gain(frozenset([other])) >= AS_GOOD * mine
            if as_good and self.gain(frozenset([one, other])) - mine <= noise:
                yield other.named


def _generality(some: Fixes) -> int:
    return max((one.generality for one in some), default=0)


def _waits_for_others(one: Candidate, fixes: Fixes) -> bool:
    """Whether one of the others has to be made first: launches are captured once nothing waits between them."""
    return one.captures and any(other.in_the_middle for other in fixes)


def plan_of(scene: Scene, forecast: Forecast, found: Mapping[str, Finding]) -> tuple[PlannedFix, ...]:
    """Fixes in the order in which to do them."""
    search = Search.of(forecast, candidates(scene, found))
    done, plan = Fixes(), list[PlannedFix]()
    while len(plan) < CANDIDATES:
        chosen = search.best_set(done)
        if not chosen and search.uncertain:
            break
        search.uncertain = search.uncertain or not chosen
        order = search.in_order(chosen)
        order.sort(key=lambda one: (_waits_for_others(one, chosen), -search.gain(done | {one})))
        for one in order:
            before, done = search.gain(done), done | {one}
            gained = search.gain(done) - before
            if gained > forecast.noise or not any(_waits_for_others(other, chosen) for other in chosen):
                plan.append(search.planned(one, done, gained, chosen))
    return tuple(plan)


# the whole run: what saves it most comes first, and the fixes of one loop stay together, as they build on each other


def plan_of_run(told: Diagnosis, uses: Sequence[LoaderUse]) -> Plan:
    """All that was explained, as one list. `told.plan` is that of its steps."""
    parts = [with_loader(told.plan, uses, told)]
    parts += [_of_stall(one, told) for one in told.rare if not _in_a_loop(one.stall, told)]
    parts += [_of_timed_stall(some, told) for some in _by_what_holds_up(told)]
    parts += [_of_loop(one) for one in told.loops]
    parts += [_of_line(one) for one in _idle_lines(told)]
    parts.sort(key=lambda part: -sum(map(_saved, part)))
    return tuple(_set(fix, told) for fix in _as_far_as_loops_took(_told_once(chain(*parts)), told))


def _told_once(fixes: Iterable[PlannedFix]) -> Iterator[PlannedFix]:
    """A loop within a step is a part of it: what is fixed at a line in one of the two is fixed in the other."""
    seen: dict[tuple[str, str], str] = {}
    for one in fixes:
        if all(seen.setdefault((one.fix, str(place)), one.loop) == one.loop for place in one.where[:1]):
            yield one
            seen.update(((one.fix, str(place)), one.loop) for place in one.where)


def _set(fix: PlannedFix, told: Diagnosis) -> PlannedFix:
    """As a setting of the trainer that holds the loop, where the fix is one."""
    places = {str(place) for place in fix.where}
    setting = setting_of(fix.causes, [part.function for part in _loops_of(told) if part.place in places])
    return replace(fix, code=setting, reason=f"{fix.reason} The trainer sets it: {setting}".strip()) if setting else fix


def _row(
    remedy: Remedy, where: Sequence[Where], causes: tuple[str, ...], gain: int, predicted: Prediction, **more: Any
) -> PlannedFix:
    told: dict[str, Any] = {"alone": gain, "advice": remedy.advice, "code": remedy.code, "api": remedy.api}
    return PlannedFix(remedy.fix, tuple(where), causes, gain, predicted, **(told | more))


def _saved(fix: PlannedFix) -> int:
    return max(0, fix.run_gain)


def with_loader(plan: Sequence[PlannedFix], uses: Sequence[LoaderUse], told: Diagnosis) -> Plan:
    """The plan of the steps, whose batches come no faster than the loader's workers prepare them.

    The loader that the run waited for longest gets as many workers as keep up with its loop: where that saves time by
    itself, and where the loop would be held up by it once the other fixes are made.
    """
    known, use, run = _over_the_run(plan, told), _loader_known(uses, told), told.run
    if use is None or run is None:
        return tuple(known)
    rest = [one for one in known if one.fix != "prepare_in_workers"]
    # however soon batches come, a turn takes what the GPU computes in it, on whichever rank that is most
    least, shorter = (
        (told.ledger.get(COMPUTING, 0), sum(one.gain for one in rest)) if _feeds_steps(use, told) else (1, 0)
    )
    enough = use.workers if use.idle else use.enough(shorter, least)
    saved = min(use.saved_with(enough, least), _largest_gain(told))
    held_up = max(least, use.turn - shorter) + NOISE * told.plain_step < min(use.pace(use.workers), use.turn)
    if (enough == use.workers and not use.idle) or (saved < NOISE * run.time and not held_up):
        return tuple(_no_faster_than(known, use, use.workers, told))
    edit = next((one.edit for one in plan if one.fix == "prepare_in_workers"), None)
    fed = _no_faster_than(rest, use, enough, told)
    return replace(_more_workers(use, enough, max(0, saved), told), edit=edit), *fed


def _loader_known(uses: Sequence[LoaderUse], told: Diagnosis) -> LoaderUse | None:
    """What the program prepares itself was seen in its steps, if any were recorded."""
    for use in uses[:1]:
        if use.in_worker != NONE and (use.workers or not told.steps):
            return use
    return None


def _feeds_steps(use: LoaderUse, told: Diagnosis) -> bool:
    """Else the steps of this plan are others than those that take the loader's batches."""
    return told.plain_given and 2 * use.batches >= told.steps_of_run > 0


def _largest_gain(told: Diagnosis) -> int:
    """A run cannot become shorter by more than its GPU waited in it. Of several ranks the tree is the first one's."""
    if told.run is None:
        return 1 << 62
    return told.run.time if told.run.waits == NONE or len(told.ranks) > 1 else told.run.waits


def _over_the_run(plan: Iterable[PlannedFix], told: Diagnosis) -> list[PlannedFix]:
    """What each fix of its steps saves the run, where it is known how many there were."""
    steps, most = told.steps_of_run, _largest_gain(told)
    return [_of_all_steps(one, steps, most) for one in plan] if steps else list(plan)


def _of_all_steps(one: PlannedFix, steps: int, most: int = 1 << 62) -> PlannedFix:
    if one.fix != "compile":
        return replace(one, run_gain=min(one.gain * steps, most))
    after = f"after {max(1, COMPILING // max(1, one.gain)):,} steps" if one.gain else "never"
    return replace(
        one,
        run_gain=max(0, one.gain * steps - COMPILING),
        reason="Programs differ in what they gain by it, from nothing to most of this; try it. "
        f"Compiling takes some {COMPILING // 10**9} s, once: it pays {after}, and this run took {steps:,}.",
    )


def _no_faster_than(fixes: Iterable[PlannedFix], use: LoaderUse, workers: int, told: Diagnosis) -> Iterator[PlannedFix]:
    """What of each fix of the steps remains where a batch comes only as often as so many workers prepare one."""
    pace = use.pace(workers) if _feeds_steps(use, told) else 0.0
    before, least = told.plain_step, min(round(pace), told.plain_step)
    for one in fixes:
        foretold = one.predicted
        after = max(min(before, foretold.step), least)
        if after <= foretold.step:
            yield one
        elif before - after > told.noise:
            held_up = Prediction(after, after, max(after, foretold.high))
            gain = before - after
            yield replace(one, predicted=held_up, gain=gain, run_gain=min(one.run_gain, gain * told.steps_of_run))
        before = after


def _more_workers(use: LoaderUse, enough: int, saved: int, told: Diagnosis) -> PlannedFix:
    """A turn of its loop is told as it is on average, waiting included."""
    batches = max(1, use.batches)
    now = round((use.looped or use.turn * batches + use.waited) / batches)
    turn = now - saved // batches
    rank = f" on rank {use.rank}" if len(told.ranks) > 1 else ""
    are = "is 1 worker" if use.workers == 1 else f"are {use.workers or 'no'} workers"
    are += f", {use.idle} of them without anything to prepare," if use.idle else ""
    remedy = PARTICULAR["shared_among_workers" if use.idle else "more_workers"]
    if not use.idle:
        code = f"DataLoader(..., num_workers={enough}, pin_memory=True, persistent_workers=True)"
        advice = f"Give the loader {enough} workers: more would hardly wait less."
        remedy = remedy._replace(fix=f"num_workers={enough}", code=code, advice=advice)
    return _row(
        remedy,
        [Where.of(use.place)] if use.place else [],
        ("input_late",),
        saved // batches,
        Prediction(turn, turn, max(turn, min(now, round((1 + NOISE) * turn)))),
        run_gain=saved,
        reason=f"The program waited {(use.waited - use.began) / 1e9:.1f} s{rank} for its {use.batches:,} batches: "
        f"a batch takes a worker {use.in_worker / 1e6:.0f} ms, the rest of a turn {use.turn / 1e6:.0f} ms, "
        f"and there {are} and {use.cores} cores.",
    )


def _of_stall(rare: Rare, told: Diagnosis) -> Plan:
    """The fixes of a stall, in its own step: the one that gains most, then the others, as far as they add to it."""
    steps, every = told.steps_of_run, rare.stall.every
    often = steps / every if rare.stall.regular and every else rare.stall.count
    before, rows = rare.plain_step, list[PlannedFix]()
    for number, cause in enumerate(rare.causes):
        after = min(before, cause.predicted.step) if not number else min(before, rare.predicted.step)
        if before - after <= NOISE * rare.plain_step:
            break
        rows.append(
            _row(
                Remedy(cause.fix, cause.advice, cause.remedy, cause.api),
                [site.where for site in cause.sites[:3]],
                (cause.cause,),
                before - after,
                cause.predicted if not number else rare.predicted,
                alone=rare.plain_step - cause.predicted.step,
                run_gain=round((before - after) * often) if steps else NONE,
                every=every or steps,
                late=rare.late if cause.cause == "peer_late" else (),
            )
        )
        before = after
    return tuple(_once_each(rows))


def _once_each(rows: Sequence[PlannedFix]) -> Iterator[PlannedFix]:
    """One remedy that two causes of a stall ask for is one change."""
    for name in dict.fromkeys(one.fix for one in rows):
        first, *more = [one for one in rows if one.fix == name]
        for one in more:
            first = replace(
                first,
                where=tuple(dict.fromkeys([*first.where, *one.where])),
                causes=(*first.causes, *one.causes),
                gain=first.gain + one.gain,
                predicted=one.predicted,
                run_gain=first.run_gain + one.run_gain if first.run_gain != NONE else NONE,
            )
        yield first


def _only_timed(told: Diagnosis) -> list[RareStall]:
    """Stalls that came again and again where no window was open, of one rank, for its peers only wait in them.

    It is the one that was seen doing something, or whose stalls are at one line: peers wait now here, now there.
    """
    seen = {one.stall.lines for one in told.rare if one.causes}
    beats = {round(one.stall.every) for one in told.rare if one.causes} if len(told.ranks) > 1 else set()
    of_ranks = [
        [
            one
            for one in run.stalls
            if one.count > 1 and one.what != "input" and _seen_at(one, told)
            if one.lines not in seen and round(one.every) not in beats  # its peers wait in the same steps
        ]
        for run in told.plain_runs.values()
    ]
    worst = max(
        of_ranks, key=lambda stalls: max(((bool(one.what), one.total) for one in stalls), default=()), default=[]
    )
    enough = NOISE * told.plain_step * told.steps_of_run
    return [
        one for one in worst if one.total > enough > 0 and 2 * _idle_at(_place_of(one, told), one, told) >= one.time
    ]


def _idle_at(place: str, stall: RareStall, told: Diagnosis) -> int:
    """How much of a stall the GPU had nothing to do, as the whole run shows this line; all of it where nobody knows.

    Of several ranks the tree is the first one's, whose GPU may be the one at work for which the others wait.
    """
    parts = told.run.within() if told.run and len(told.ranks) == 1 else ()
    here = [line for part in parts for line in part.lines if line.idle != NONE and line.time and line.place == place]
    seen = max(here, key=lambda line: line.time, default=None)
    return round(stall.time * seen.idle / seen.time) if seen else stall.time


def _place_of(stall: RareStall, told: Diagnosis) -> str:
    """Of the lines at which it was seen, the first one at which the GPU waits for most of it."""
    places = _seen_at(stall, told)
    return next((place for place in places if 2 * _idle_at(place, stall, told) >= stall.time), places[0])


def _seen_at(stall: RareStall, told: Diagnosis) -> list[str]:
    """The innermost line that marks saw, then those that looks found for as long.

    Marks look at the few steps that stall, and the tree at all that the program did.
    """
    return [*map(_place, stall.lines[-1:]), *(kind.place for kind in _in_the_tree(stall, told))]


def _in_the_tree(stall: RareStall, told: Diagnosis) -> list[SlowTurns]:
    """Turns that stall as long in the run's tree, as often or at the same line: it misses none where a window was
    open."""
    here = {*map(_place, stall.lines[-1:])}
    kinds = [kind for part in (told.run.within() if told.run else ()) for kind in part.kinds if kind.place]
    alike = [
        kind for kind in kinds if kind.count > 1 and (round(kind.every) == round(stall.every) or kind.place in here)
    ]
    return [kind for kind in alike if max(kind.longer, stall.time) <= 2 * min(kind.longer, stall.time)]


def _place(name: str) -> str:
    """`train.py:264` of a line's name."""
    known = source_line(name)
    return f"{known[0]}:{known[1]}" if known else name


def _by_what_holds_up(told: Diagnosis) -> list[list[RareStall]]:
    """Stalls that are one. Where a rank of several stands at this line and that for no reason that was seen, it is no
    line that holds it up: it waits for another rank."""
    stalls = [one for one in _only_timed(told) if not _in_a_loop(one, told)]
    waits = [one for one in stalls if not one.what and len(told.ranks) > 1]
    together = [waits] if len({one.lines for one in waits}) > 2 else [[one] for one in waits]
    return [*([one] for one in stalls if one not in waits), *together]


def _of_timed_stall(stalls: Sequence[RareStall], told: Diagnosis) -> Plan:
    """What they take is known of the whole run, not what they do: at worst nothing of it can go."""
    ranks, first, count = len(told.ranks), stalls[0], sum(one.count for one in stalls)
    place = _place_of(first, told)
    remedy = OF_STALLS.get(first.what) or (PARTICULAR["one_for_all"] if ranks > 1 else REMEDIES["host_work"])
    within = _loops_called(place, told) if remedy.fix in ("share_among_ranks", "move_off_the_loop") else []
    remedy = PARTICULAR["on_the_gpu"] if within else remedy
    known, time, idle = _in_the_tree(first, told), first.time, _idle_at(place, first, told)
    every = max([first.every or told.steps_of_run, *(kind.every for kind in known if kind.regular)])
    total = max([first.total, *(kind.total for kind in known)])
    if len(stalls) > 1:
        remedy, total, every = PARTICULAR["in_turn"], sum(one.total for one in stalls), told.steps_of_run / count
        time = idle = total // count
    gain = idle - (idle // ranks if remedy.fix in ("share_among_ranks", "work_a_round_ahead") else 0)
    after = told.plain_step + time - gain
    return (
        _row(
            remedy,
            [Where.of(one) for one in (_idlest(within) or [_place_of(one, told) for one in stalls])],
            ("peer_late" if ranks > 1 else "host_work",),
            gain,
            Prediction(after, after, told.plain_step + time),
            run_gain=round(total * gain / max(1, time)),
            reason="It was timed over the whole run, and not recorded closely.",
            every=every,
        ),
    )


def _loops_called(place: str, told: Diagnosis) -> list[Part]:
    """The loops of the function that this line calls, where the line's time passes in them: each rank goes through its
    own, over one small thing after another."""
    for part in _loops_of(told):
        line = next((line for line in part.lines if line.place == place and line.call), None)
        inner = [one for one in part.parts if line is not None and one.function == line.call]
        if line is not None and 2 * sum(one.time for one in inner) >= line.time:
            return inner
    return []


def _idlest(parts: Sequence[Part]) -> list[str]:
    lines = sorted((line for part in parts for line in part.lines), key=lambda line: -line.idle)
    return [line.place for line in lines[:PLACES_APART] if line.idle > 0]


def _in_a_loop(stall: RareStall, told: Diagnosis) -> bool:
    """Whether the stall is a loop that was explained by its own turns."""
    lines, explained = set(map(_place, stall.lines)), {one.place for one in told.loops}
    called = (loop.place for line in lines for loop in _loops_called(line, told))
    loops = [part for part in _loops_of(told) if part.place in explained]
    within = (line.place for part in loops for inner in part.within() for line in inner.lines)
    return not lines.isdisjoint(within) or not explained.isdisjoint(called)


def _loops_of(told: Diagnosis) -> list[Part]:
    return [part for part in (told.run.within() if told.run else ()) if part.kind == LOOP]


def _of_loop(one: LoopDiagnosis) -> Plan:
    fixes = one.diagnosis.plan
    return tuple(replace(_of_all_steps(fix, one.turns) if one.turns else fix, loop=one.place) for fix in fixes)


def _as_far_as_loops_took(fixes: Iterable[PlannedFix], told: Diagnosis) -> Iterator[PlannedFix]:
    """No loop becomes shorter, nor any around it, than what the GPU computes in those of its turns that were looked at,
    of the time that the run's tree has for it. Beside the loops nothing is saved by what is done in them.

    What the driver counts as the GPU's work is no such bound: it also counts copies, and waits of one rank for another.
    """
    loops = _loops_of(told)
    left = _left_to_save(told, loops)
    for one in fixes:
        around = _around(one.loop or told.loop, loops) if one.loop or not told.one_turn else []
        saved = min([one.run_gain, *(max(0, left[place]) for place in around)])
        yield replace(one, run_gain=saved) if saved < one.run_gain else one
        for place in around:
            left[place] -= max(0, saved)


ALL_LOOPS = ""


def _around(place: str, loops: Sequence[Part]) -> list[str]:
    """The loop there and those around it, and all loops together."""
    around = [part.place for part in loops if any(inner.place == place for inner in part.within())]
    return [ALL_LOOPS, *dict.fromkeys(around)] if loops else []


def _left_to_save(told: Diagnosis, loops: Sequence[Part]) -> dict[str, int]:
    """Of each loop, what it took beside what its turns compute; of all of them, what those not within another took."""
    stays = {one.place: _stays(one.diagnosis, one.turns) for one in told.loops}
    stays |= {told.loop: _stays(told, told.steps_of_run)} if told.steps else {}
    parts = (
        () if told.run is None else (told.run,) if told.run.kind == LOOP else told.run.parts
    )  # a loop explained alone
    outermost = [part for part in parts if part.kind == LOOP]
    left: Counter[str] = Counter()
    for place, part in [*((part.place, part) for part in loops), *((ALL_LOOPS, part) for part in outermost)]:
        left[place] += part.time - _computed_in(part, stays)
    behind = _done_behind_the_loops(told, loops)
    for place in _around(told.loop, loops):
        left[place] += behind
    return left


def _done_behind_the_loops(told: Diagnosis, loops: Sequence[Part]) -> int:
    """What of the steps the GPU did, or a rank waited for, when the host had left all loops: it had run ahead."""
    took = sum(part.time for part in loops if part.place == told.loop)
    if told.run is None or not took:
        return 0
    ends = max(part.began + part.time for part in loops)
    return max(0, min(told.steps_of_run * told.plain_step - took, told.run.time - ends))


def _stays(told: Diagnosis, turns: int) -> tuple[float, int]:
    """What the GPU computes in a loop, or less where fixes leave it less: the share of a turn, and the sum of all."""
    least = min([told.ledger.get(COMPUTING, 0), *(one.predicted.step for one in told.plan)])
    return min(1.0, least / max(1, told.plain_step)), least * turns


def _computed_in(part: Part, stays: Mapping[str, tuple[float, int]]) -> int:
    """Of a loop's time; where it was not looked at, what is known of the loops in it."""
    if part.place in stays:
        share, of_all = stays[part.place]
        return min(round(part.time * share), of_all)
    return sum(_computed_in(inner, stays) for inner in part.parts if inner.kind == LOOP)


def _idle_lines(told: Diagnosis) -> list[Part]:
    """Of a script that takes no steps the lines at which the GPU waits, once it is in use, and that nobody recorded."""
    run = told.run
    if run is None or told.steps_of_run or any(part.kind == LOOP for part in run.parts):
        return []
    begun = min((part.began for part in run.parts if part.kind == FIRST_USE or part.busy > 0), default=run.time)
    seen = {str(site.where) for cause in told.causes for site in cause.sites} | {
        str(one.where) for one in told.harmless
    }
    lines = [part for part in run.parts if part.kind == LINE and part.place not in seen and part.began >= begun]
    return [part for part in lines if part.waits > NOISE * run.time]


def _of_line(part: Part) -> Plan:
    """What it takes is known, and how long the GPU was idle meanwhile: at worst nothing of that can go."""
    after, called = part.time - part.waits, next((one.call for one in part.lines if one.call), "")
    return (
        _row(
            PARTICULAR["on_the_gpu"],
            [Where.of(part.place)],
            ("host_work",),
            part.waits,
            Prediction(after, after, part.time),
            run_gain=part.waits,
            reason=f"The host was there{f', in {called}' if called else ''}; that was timed, and not recorded closely.",
        ),
    )


def without_planned(harmless: Sequence[Harmless], plan: Sequence[PlannedFix]) -> tuple[Harmless, ...]:
    """What gains something in a set of fixes is not without cost, whatever it gains alone.

    Nor is a loader that the run waits for, though recorded steps may not have: it is planned where it is made.
    """
    planned = {(cause, str(place)) for one in plan for cause in one.causes for place in one.where}
    waits = any("input_late" in one.causes for one in plan)
    left = (one for one in harmless if not (waits and one.cause == "input_late"))
    return tuple(one for one in left if (one.cause, str(one.where)) not in planned)
