"""The plan: what to do first, what then, and where the step stands after each.

What is predicted is a fix at a place, not a cause. Two waits behind one another gain nothing alone and everything
together, so sets of fixes are replayed, not only single ones; and only what gains nothing in any set costs nothing.

Besides the fixes of causes there are those of a loop that, within one turn, does the same to one small thing after
another, a launch for each. Where no round needs what another one computed, one call does all of them. Of an
optimizer's parameters, of tables and of what only travels that is certain; of others only who wrote them knows. Layers
of a network, which do need each other, multiply matrices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keepbusy.explain.capture import frames_around, outwards
from keepbusy.explain.causes import USUAL_BANDWIDTH, Draft, Finding, Scene, without_messages
from keepbusy.explain.diagnosis import CapturedLines, Edit, PlannedFix, Prediction, Where, named
from keepbusy.explain.ledger import Forecast
from keepbusy.explain.remedies import (
    PARTICULAR,
    Remedy,
    allocator_told,
    by_place,
    capture_of,
    kept_on_host,
    places_of,
    remedy_for,
    writes_checkpoint,
)
from keepbusy.timeline.figures import amount
from keepbusy.timeline.frame_roles import Role
from keepbusy.timeline.model import NONE, STAGED_BYTES, Direction, FrameKind, Ints, Kind, Mask
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
GENERAL = {"host_work": 1, "launch_bound": 2}
"""Fixes that change the program more than others do: what is nearly as good without them comes first."""
COMPILED_AWAY = 0.2
"""Of what launches hold up, what `torch.compile` took away in the mean of four programs measured on an H200: nothing of
two, a fifth, and three fifths. What calls no module, the backward pass and the optimizer are launched as before."""
MERGED_WORK = 0.5
"""Of what the GPU does in rounds that become one, the middle of what could stay: nobody knows how full each of them
keeps it. The range goes from none of it to all."""
FEWEST_ROUNDS = 8
"""Of less nobody makes one call."""
MOST_OF_IT = 0.95
"""Of the launches: with more of them in graphs, nobody asks for the rest."""
_SMALLER_PIECES = "Smaller micro-batches use the GPU less efficiently. Try how many are best."
_BOTH_WAYS = "It needs the value that is read there, and the GPU needs its result, so the two cannot overlap."
_ONE_FIX = (
    *("prefetch", "accumulate", "average_once", "align_ranks", "keep_parameters_on_gpu", "keep_activations"),
    "drop_checks",
)
"""Remedies that are one change however many lines they concern: a share of the work given to one rank is another's."""
_WHOLE_LOOP = ("launch_bound", "input_late", "allocator", "host_work")
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
    captured: tuple[CapturedLines, ...] = ()
    first: str = ""  # what has to be done elsewhere before

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

    def is_made_by(self, fixes: Collection[Candidate]) -> bool:
        """Whether another one does this as well: DistributedDataParallel lays small gradients together, too."""
        if self.remedy.fix != "send_together":
            return False
        lines = {(place.file, place.line) for place in self.where}
        overlapped = [place for one in fixes if one.remedy.fix == "overlap_collectives" for place in one.where]
        return any((place.file, place.line) in lines for place in overlapped)

    def at_best(self) -> Edit:
        return self.bounds[0] if self.bounds else self.edit

    def at_worst(self) -> Edit:
        return self.bounds[1] if self.bounds else self.edit

    def joined(self, other: Candidate) -> Candidate:
        known = {str(place) for place in self.where}
        places = [*self.where, *(place for place in other.where if str(place) not in known)]
        causes = dict.fromkeys([*self.causes, *other.causes])
        middle = self.in_the_middle or other.in_the_middle
        bounds = (self.at_best() | other.at_best(), self.at_worst() | other.at_worst())
        return replace(
            self,
            where=tuple(places),
            causes=tuple(causes),
            edit=self.edit | other.edit,
            in_the_middle=middle,
            bounds=bounds if self.bounds or other.bounds else (),
        )


Fixes: TypeAlias = frozenset[Candidate]


def plan_of(scene: Scene, forecast: Forecast, found: Mapping[str, Finding]) -> tuple[PlannedFix, ...]:
    """Fixes in the order in which to do them."""
    search = Search.of(forecast, candidates(scene, found))
    done, plan = Fixes(), list[PlannedFix]()
    while len(plan) < CANDIDATES:
        chosen = search.best_set(done)
        if not chosen:
            break
        chosen = search.with_joined(chosen)
        goes_first = any(one.captures for one in chosen) and any(one.in_the_middle for one in chosen)
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
                by_fix[one.remedy.fix].append(one)
        for same in by_fix.values():
            if len(same) > 1:
                joined = reduce(Candidate.joined, same)
                self.candidates = [joined if one is same[0] else one for one in self.candidates if one not in same[1:]]
                chosen = chosen.difference(same) | {joined}
        return chosen

    def in_order_of_gain(self, chosen: Fixes, done: Fixes) -> list[Candidate]:
        """What gains most first. To capture launches and to take away what waits between them is one step."""
        waits = [one for one in self.in_order(chosen) if one.in_the_middle]
        steps = [[*waits, one] if one.captures else [one] for one in self.in_order(chosen)]
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
        sure = frozenset(one for one in fixes if not one.is_uncertain)
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
        rest = [one for one in self.candidates if one not in done and (uncertain or not one.is_uncertain)]
        everything = self.gain(done.union(rest)) - before
        if everything <= noise:
            return frozenset()
        gained: dict[Fixes, int] = {}
        worth: dict[Fixes, int] = {}
        alone = [frozenset([one]) for one in rest]
        for some in chain(alone, self._larger_sets(rest, done, worth, everything)):
            whole = self._with_what_it_needs(some, done)
            if any(one.is_made_by(done | whole) for one in done | whole):
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
        if not any(one.captures for one in some):
            return some
        return some.union(one for one in self.candidates if one.in_the_middle and one not in done)

    def planned(self, one: Candidate, done: Fixes, gain: int, together: Fixes) -> PlannedFix:
        """With what belongs to it: of a capture the waits that go before it, else what it gains nothing without."""
        alone, noise = self.gain(frozenset([one])), self.forecast.noise
        partners = self.in_order(together - {one})
        needs = [other for other in partners if other.in_the_middle] if one.captures else partners
        names = [one.first] * bool(one.first) + [other.named for other in needs]
        return planned_fix(
            one.remedy,
            one.where,
            one.causes,
            max(0, gain),
            self.predict(done),
            alone=alone,
            needs=tuple(dict.fromkeys(names)) if one.captures or alone <= noise else (),
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


def _generality(some: Fixes) -> int:
    return max((one.generality for one in some), default=0)


def planned_fix(
    remedy: Remedy, where: Sequence[Where], causes: tuple[str, ...], gain: int, predicted: Prediction, **more: Any
) -> PlannedFix:
    told: dict[str, Any] = {"alone": gain, **remedy._asdict()}
    return PlannedFix(where=tuple(where), causes=causes, gain=gain, predicted=predicted, **(told | more))


def candidates(scene: Scene, found: Mapping[str, Finding]) -> list[Candidate]:
    """Every remedy that something seen here asks for."""
    named = defaultdict[str, list[Candidate]](list)
    facts = scene.timeline.facts  # compiled, it launches less: nobody knows how much less; once, nothing pays for that
    as_it_is = ("launch_bound",) if facts.compiled_eagerly or facts.runs_once else ()
    of_causes = (
        one for cause, finding in found.items() if cause not in as_it_is for one in _of_cause(scene, finding, found)
    )
    for one in chain(of_causes, () if as_it_is else _of_rounds(scene)):
        same = named[one.remedy.fix]
        whole = one.remedy.fix in _ONE_FIX or (not one.bounds and one.causes[0] in _WHOLE_LOOP)
        # the same fix at the same place is one, however it was found
        alike = same[:1] if whole else [other for other in same if other.named == one.named]
        named[one.remedy.fix] = [
            *(other for other in same if other not in alike),
            reduce(Candidate.joined, [*alike, one]),
        ]
    found_here = list[Candidate]()
    for same in named.values():  # of one remedy not more than a few; the last of them takes in the rest
        rest = same[PLACES_APART:]
        found_here += [*same[:PLACES_APART], *([reduce(Candidate.joined, rest)] if rest else [])]
    among_ranks = (*_of_pipeline(scene), *_of_small_shards(scene)) if scene.among_ranks else ()
    return [*found_here, *among_ranks]


def _of_cause(scene: Scene, finding: Finding, found: Mapping[str, Finding]) -> Iterator[Candidate]:
    """Of each remedy that its places ask for the changes to be made, each with what it changes in the timeline."""
    groups = finding.places
    remedies = {place: remedy_for(scene, finding, place, groups[place]) for place in groups}
    for remedy in dict.fromkeys(remedies.values()):
        mine = [place for place in groups if remedies[place] == remedy]
        set_apart = SET_APART.get(remedy.fix)
        for places, beside in _changed_together(mine, finding.cause in _WHOLE_LOOP or remedy.fix in _ONE_FIX):
            rows = np.concatenate([groups[place] for place in (*places, *beside)])
            edit = finding.edit if len(places) + len(beside) == len(groups) else finding.only(rows)
            if finding.cause == "made_on_host" and "blocking_copy" in found:
                edit = edit | _copied_there(scene, found["blocking_copy"], places)
            middle = finding.cause == "host_sync" and bool(2 * capture_of(scene).waits[rows].sum() > len(rows))
            usual = Candidate(remedy, tuple(places), (finding.cause,), edit, middle, reason=_comes_back(scene, rows))
            yield set_apart(scene, usual) if set_apart else usual


def _all_or_nothing(scene: Scene, usual: Candidate) -> tuple[Edit, Edit]:
    """The bounds of what nobody knows how much of it a GPU can do."""
    return usual.edit, Edit.nothing(scene.timeline)


def _as_graphs(scene: Scene, usual: Candidate) -> Candidate:
    """What graphs hold is launched at once; the rest is launched as before."""
    capture = capture_of(scene)
    usual = replace(usual, edit=usual.edit.only(capture.rows), captured=capture.lines, first=capture.first)
    if capture.share > MOST_OF_IT:
        return usual
    reason = f"Graphs hold {capture.share:.0%} of the launches."
    places = by_place(scene, np.flatnonzero(capture.stays))
    if places:
        first, *others = sorted(places, key=lambda place: -len(places[place]))
        more = f" and {len(others)} other line{'s' if len(others) > 1 else ''} do" if others else " does"
        reason += f" What {first}{more} stays outside."
    return replace(usual, reason=reason)


SET_APART: dict[str, Callable[[Scene, Candidate], Candidate]] = {
    "graph": _as_graphs,
    "compile": lambda _, usual: replace(usual, share=COMPILED_AWAY),
    "compute_on_gpu": lambda scene, usual: replace(usual, bounds=_all_or_nothing(scene, usual), reason=_BOTH_WAYS),
    "decide_on_gpu": lambda scene, usual: replace(usual, bounds=_all_or_nothing(scene, usual)),
    "call_less_often": lambda scene, usual: replace(usual, bounds=_all_or_nothing(scene, usual)),
    "keep_activations": lambda scene, usual: replace(usual, edit=_kept_on_device(scene), reason=_room_needed(scene)),
    "expand_segments": lambda scene, usual: replace(usual, reason=allocator_told(scene.timeline.facts)),
}
"""By the name of a fix, what is other about it than its cause's edit at its places."""


def _kept_on_device(scene: Scene) -> Edit:
    """What the backward pass needs does not leave the device."""
    edit, copies = Edit.nothing(scene.timeline), np.flatnonzero(kept_on_host(scene))
    edit.drop[copies] = edit.drop[scene.launch[copies]] = True
    syncs = np.isin(scene.copy_of_sync, copies)
    edit.drop_wait[syncs] = True
    edit.work[syncs] = 0
    return edit


def _comes_back(scene: Scene, rows: Ints) -> str:
    """Of copies that these rows wait for or launch: that as much leaves the GPU as comes to it, in pieces of the same
    sizes, like a state that is kept on the host between two turns. Whether it is the same data nobody knows."""
    spans, large = scene.timeline.spans, scene.is_copy & (scene.timeline.spans.size > STAGED_BYTES)
    home, inbound = (large & (spans.direction == way) for way in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE))
    both = np.intersect1d(spans.size[home], spans.size[inbound])
    mine = np.where(scene.copy_of_sync[rows] != NONE, scene.copy_of_sync[rows], scene.command[rows])
    mine = mine[(mine != NONE) & (home | inbound)[mine]]
    if not len(mine) or not np.isin(spans.size[mine], both).all():
        return ""
    return "Copies of the same size leave the GPU and come back. If it is the same data, keep it there."


def _room_needed(scene: Scene) -> str:
    """So much more memory would they take on the GPU, at most."""
    spans, kept = scene.timeline.spans, kept_on_host(scene)
    leaves = spans.size[kept & (spans.direction == Direction.DEVICE_TO_HOST)].sum()
    size = amount(float(leaves) / (scene.steps * len(scene.timeline.ranks)))
    return f"{size} per step leave the GPU and come back for the backward pass. It would need that much memory."


def _changed_together(places: list[Where], is_one: bool) -> Iterator[tuple[list[Where], list[Where]]]:
    """Of one remedy, the costliest first: the places of each change, and what was seen at no line of the program, which
    goes with the costliest line."""
    lines = [place for place in places if place.is_known] if any(place.file for place in places) else places
    beside = [place for place in places if place not in lines]
    changes = [lines] if is_one else [*([place] for place in lines[:PLACES_APART]), lines[PLACES_APART:]]
    for number, change in enumerate(filter(None, changes)):
        yield change, [] if number else beside


def _copied_there(scene: Scene, copies: Finding, places: Sequence[Where]) -> Edit:
    """What is made on the device in the first place is not copied to it."""
    lines = {(place.file, place.line) for place in places if place.line}
    rows = [rows for place, rows in copies.places.items() if place.line and (place.file, place.line) in lines]
    return copies.only(np.concatenate(rows)) if rows else Edit.nothing(scene.timeline)


def _of_pipeline(scene: Scene) -> Iterator[Candidate]:
    """Stages that wait for each other's micro-batches: replayed is what they would take if they never did."""
    pipeline = Pipeline.of(scene)
    if pipeline is None:
        return
    remedy = PARTICULAR["pieces_together" if pipeline.pieces_after == pipeline.pieces else "more_pieces"]
    remedy = remedy._replace(code=remedy.code.format(pieces=pipeline.pieces_after))
    messages = scene.launch[scene.is_message]
    receives = messages[scene.within(Role.RECEIVES)[messages]]
    places = by_place(scene, receives if len(receives) else messages)
    edit, share = without_messages(scene), 1.0 - pipeline.stays
    reason = _SMALLER_PIECES if remedy.fix == "cut_into_micro_batches" else ""
    yield Candidate(remedy, tuple(places), ("pipeline_bubble",), edit, share=share, reason=reason)


class Pipeline(NamedTuple):
    """The micro-batches of a step, as the first stage sends them: how many there are, how many at once under way."""

    pieces: int
    together: int

    @staticmethod
    def of(scene: Scene) -> Pipeline | None:
        """None where ranks exchange messages, and none of them begins its steps with waiting for one.

        Which way those of PyTorch's own schedules go is not told: half of them forward, all of these first.
        """
        role, rank = np.append(scene.timeline.frames.role, 0)[scene.timeline.spans.frame], scene.timeline.rank_of_rows
        rows = scene.launch[scene.is_message]
        sent = np.where(role[rows] & Role.RECEIVES, -1, 1)
        of_rank = [sent[rank[rows] == one] for one in scene.timeline.ranks]
        if scene.frames_with(Role.PIECE).any():
            pieces = max(1, min(map(len, of_rank)) // scene.steps // 2)
            return Pipeline(pieces, pieces)
        first = next((one for one in of_rank if len(one) and one[0] > 0), None)
        if first is None or not any(len(one) and one[0] < 0 for one in of_rank):
            return None
        return Pipeline(max(1, round((first > 0).sum() / scene.steps)), int(np.cumsum(first).max()))

    @property
    def pieces_after(self) -> int:
        """By the remedy: as many as there are, where they only have to follow each other; else twice as many."""
        return self.pieces if self.together == 1 < self.pieces else 2 * max(self.pieces, 2)

    @property
    def stays(self) -> float:
        """The share of the wait that is left: what the stages wait while the pipeline fills and drains."""
        return self.together / self.pieces_after


def _of_rounds(scene: Scene) -> Iterator[Candidate]:
    """What a loop does to one small thing after another, as one call. All tables are one change. A checkpoint is
    written tensor by tensor, whoever writes it."""
    rounds = list(rounds_of(scene))
    expected, *bounds = (as_one(scene, rounds, stays) for stays in (MERGED_WORK, 0.0, 1.0))
    of_places = places_of(scene, expected).items()
    places = {place: rows for place, rows in of_places if not writes_checkpoint(scene, rows)}
    there = {place: [one for one in rounds if np.isin(one.first, places[place]).any()] for place in places}
    asked = {place: _asked_of_rounds(scene, there[place]) for place in places}
    of_tables = [place for place in places if asked[place].fix == "one_table"]
    for mine in filter(None, [of_tables, *([place] for place in places if place not in of_tables)]):
        rows = np.concatenate([places[place] for place in mine])
        edit, limits = expected.only(rows), tuple(one.only(rows) for one in bounds)
        said, remedy = _told_of(scene, [one for place in mine for one in there[place]]), asked[mine[0]]
        if remedy.fix == "do_at_once":
            # parameters and tables do not need each other; of others only their author knows, so nothing is expected
            # beyond what launching them takes
            edit = limits[1]
            said += " Where a round needs what the one before it computed, torch.compile is what is left."
        cause = "exposed_collective" if remedy.fix == "send_together" else "launch_bound"
        yield Candidate(remedy, tuple(mine), (cause,), edit, bounds=limits, reason=said)


_SHARDS_OF = re.compile(r"FSDP::.*?(?:\(| for )((?:.+\.)?\d+)\.([^)]+)\)?$")
"""What FSDP does for one of its groups of parameters: the block, of those that a model has several of, and the part."""


def _of_small_shards(scene: Scene) -> Iterator[Candidate]:
    """FSDP over each layer of a block, as one group for the whole block: what is done for the first of its layers is
    done once for all of them, and what travels, travels together."""
    groups = list(_shards_of_blocks(scene))
    if not groups:
        return
    expected, *bounds = (as_one(scene, groups, stays) for stays in (MERGED_WORK, 0.0, 1.0))
    places = places_of(scene, expected)
    per_step = scene.steps * len(scene.timeline.ranks)
    reason = f"{sum(one.times for one in groups) / per_step:,.0f} groups of parameters are gathered for "
    reason += f"{len(groups) / per_step:,.0f} blocks."
    limits = tuple(one.edit for one in bounds)
    yield Candidate(
        PARTICULAR["whole_blocks"], tuple(places), ("launch_bound",), expected.edit, bounds=limits, reason=reason
    )


def _shards_of_blocks(scene: Scene) -> Iterator[CallRounds]:
    """Of each block in each step, whose layers are groups of their own: the host's rows for each."""
    timeline = scene.timeline
    parts = [_SHARDS_OF.match(name) for name in timeline.names]
    number = {part: place for place, part in enumerate(dict.fromkeys(one.groups() for one in parts if one))}
    if not number:
        return
    of_name = np.array([NONE if one is None else number[one.groups()] for one in parts], np.int64)
    part_of_frame = of_name[timeline.frames.name].tolist()
    for frame, parent in enumerate(timeline.frames.parent.tolist()):  # parents stand before what they hold
        if part_of_frame[frame] == NONE != parent:
            part_of_frame[frame] = part_of_frame[parent]
    of_row = np.array([*part_of_frame, NONE], np.int64)[timeline.spans.frame]
    part = np.where(timeline.on_device, NONE, of_row)
    blocks = list(dict.fromkeys(block for block, _ in number))
    block_of_part = np.array([blocks.index(block) for block, _ in number], np.int64)
    for rank in timeline.ranks:
        rows = np.flatnonzero((part != NONE) & (timeline.rank_of_rows == rank))
        step = np.searchsorted(timeline.marks_of(rank), rows, side="right")
        step_and_block = step * len(blocks) + block_of_part[part[rows]]
        for key in np.unique(step_and_block).tolist():
            rows_of_block = rows[step_and_block == key]
            layers, earliest = np.unique(part[rows_of_block], return_index=True)
            is_first = part[rows_of_block] == layers[np.argmin(earliest)]
            first, others = rows_of_block[is_first], rows_of_block[~is_first]
            if len(layers) > 1 and (scene.command[first] != NONE).any():
                yield CallRounds(len(layers), first, others, np.zeros(0, np.int64))


def _asked_of_rounds(scene: Scene, rounds: Sequence[CallRounds]) -> Remedy:
    if any(scene.within(Role.TABLE)[one.first].any() for one in rounds):
        return PARTICULAR["one_table"]
    if all(one.sends(scene) for one in rounds):
        return PARTICULAR["sent_together"]
    updates = all((scene.library_role[one.first] & Role.UPDATES != 0).any() for one in rounds)
    return PARTICULAR["fused" if updates else "all_at_once"]


def _told_of(scene: Scene, rounds: Sequence[CallRounds]) -> str:
    launches = sum((scene.command[[*one.first, *one.others]] != NONE).sum() for one in rounds)
    of_all, of_a_rank = (scene.command != NONE).sum(), scene.steps * len(scene.timeline.ranks)
    return (
        f"{launches / of_a_rank:,.0f} of the {of_all / of_a_rank:,.0f} launches per iteration are there, in "
        f"{max(one.times for one in rounds)} equal rounds."
    )


class CallRounds(NamedTuple):
    """What one call does over and over, along a few paths, each as often as there are rounds, or so many times."""

    times: int
    first: Ints  # the host's rows of the first round
    others: Ints
    between: Ints  # rows of the call itself

    def sends(self, scene: Scene) -> bool:
        """Whether nothing is done in it but to let values travel, and to scale or move them."""
        launches = self.first[scene.command[self.first] != NONE]
        travels = scene.timeline.spans.kind[scene.command[launches]] == Kind.COLLECTIVE
        beside = scene.within(Role.SCALES | Role.MOVES)[launches]
        return bool(travels.any() and (travels | beside).all())


def as_one(scene: Scene, rounds: Sequence[CallRounds], stays: float) -> Finding:
    """All rounds in one call: of what the GPU does in all but the first, this share stays.

    What travels together takes the time of its bytes, and what a collective takes besides only once; at worst, where
    all else stays, no less than it took.
    """
    draft, spans = Draft("launch_bound", scene.timeline), scene.timeline.spans
    travels = spans.kind == Kind.COLLECTIVE
    rate = _fastest_link(scene)
    for one in rounds:
        leaves = np.union1d(one.others, one.between)
        commands, leaving = _commands(scene, one.first), _commands(scene, leaves)
        draft.edit.drop[leaves] = draft.edit.drop[leaving] = True
        computes, more = commands[~travels[commands]], leaving[~travels[leaving]]
        draft.edit.scale[computes] = 1.0 + stays * spans.work[more].sum() / max(1, spans.work[computes].sum())
        sent = commands[travels[commands]]
        if len(sent):
            all_sent = np.concatenate([sent, leaving[travels[leaving]]])
            took = np.maximum(spans.work[all_sent], 0)
            together = len(sent) * took.min() + spans.size[all_sent].sum() / rate
            together = took.sum() if stays == 1.0 else min(together, took.sum())
            draft.edit.scale[sent] = together / max(1, took[: len(sent)].sum())
        launch = one.first[scene.command[one.first] != NONE][0]
        draft.culprit[np.concatenate([leaves, leaving, commands])] = int(launch)
    return draft.finding()


def _fastest_link(scene: Scene) -> float:
    """Bytes a nanosecond, as any collective has shown them to travel; small ones show little but their own price."""
    spans = scene.timeline.spans
    rows = np.flatnonzero((spans.kind == Kind.COLLECTIVE) & (spans.work > 0))
    return max(USUAL_BANDWIDTH, float((spans.size[rows] / spans.work[rows]).max(initial=0.0)))


def _commands(scene: Scene, rows: Ints) -> Ints:
    launched = np.append(np.zeros(len(scene.timeline), bool), False)
    launched[rows] = True
    return np.flatnonzero(launched[scene.launch])


def rounds_of(scene: Scene) -> list[CallRounds]:
    """The outermost ones of each call."""
    found = list(_frames_of_rounds(scene))
    first, others = _rows_in(scene, [one.first for one in found]), _rows_in(scene, [one.others for one in found])
    outer = list(dict.fromkeys(one.call for one in found))  # a call may go on for several turns
    around = dict(zip(outer, _rows_in(scene, [np.array([call]) for call in outer]), strict=True))
    launches = scene.command != NONE
    rounds = []
    for one, begins, goes_on in zip(found, first, others, strict=True):
        inside = around[one.call]
        inside = inside[(inside > begins[-1]) & (inside < goes_on[-1])]
        rounds.append(CallRounds(one.times, begins, goes_on, inside[~launches[inside]]))
    return _with_backward(scene, rounds)


_BACKWARD_OF = re.compile(r"(\w+?)Backward\d*$")
"""The backward pass of an operator, as PyTorch calls it: of `aten::index`, IndexBackward0."""


def _with_backward(scene: Scene, rounds: Sequence[CallRounds]) -> list[CallRounds]:
    """Each with its backward pass: in the same step, one of its operators has as many backward calls as there are
    rounds. The backward pass goes through the rounds one after the other, so all rows from the first to the last of
    these calls belong to it."""
    timeline, frames, spans = scene.timeline, scene.timeline.frames, scene.timeline.spans
    forward_names = [name.removeprefix("aten::").replace("_", "") for name in timeline.names]
    matches = [_BACKWARD_OF.fullmatch(name) for name in timeline.names]
    backward_names = ["" if match is None else match[1].lower() for match in matches]
    backward_calls = np.flatnonzero(np.array([*map(bool, backward_names)], bool)[frames.name])
    extended = list[CallRounds]()
    for call in rounds:
        last_row, rank = int(np.append(call.first, call.others).max()), int(timeline.rank_of_rows[call.first[0]])
        marks = timeline.marks_of(rank)
        next_mark = np.searchsorted(marks, last_row, side="right")
        step_end = spans.start[marks[next_mark]] if next_mark < len(marks) else spans.end.max()
        innermost = np.unique(spans.frame[call.first])
        operators = {
            forward_names[frames.name[frame]]
            for start in innermost[innermost != NONE].tolist()
            for frame in frames.around(start)
        }
        later = (frames.start[backward_calls] >= spans.end[last_row]) & (frames.end[backward_calls] <= step_end)
        later &= timeline.rank_of_lanes[frames.lane[backward_calls]] == rank
        in_step = backward_calls[later]
        by_name = (in_step[frames.name[in_step] == name] for name in np.unique(frames.name[in_step]).tolist())
        as_often = (calls for calls in by_name if len(calls) == call.times)
        calls = next((one for one in as_often if backward_names[frames.name[one[0]]] in operators), None)
        if calls is None:
            extended.append(call)
            continue
        starts, end = np.sort(frames.start[calls]), frames.end[calls].max()
        rows = np.flatnonzero((spans.lane == frames.lane[calls[0]]) & ~timeline.on_device)
        rows = rows[(spans.start[rows] >= starts[0]) & (spans.end[rows] <= end)]
        is_first = spans.start[rows] < starts[1]
        first, others = np.append(call.first, rows[is_first]), np.append(call.others, rows[~is_first])
        extended.append(CallRounds(call.times, first, others, call.between))
    return extended


def _rows_in(scene: Scene, of_frames: Sequence[Ints]) -> list[Ints]:
    """Of each of these groups of frames, none of which stands in another, the rows of the host, at any depth."""
    which = np.full(len(scene.timeline.frames) + 1, NONE, np.int64)
    for index, frames in enumerate(of_frames):
        which[frames] = index
    of_row = which[scene.outermost(which[:-1] != NONE)]
    return _grouped(of_row, len(of_frames))


def _grouped(which: Ints, count: int) -> list[Ints]:
    """Where each of these numbers stands; NONE is left out."""
    order = np.argsort(which, kind="stable")
    return np.split(order, np.searchsorted(which[order], np.arange(count + 1)))[1:-1]


class _Frames(NamedTuple):
    call: int
    times: int
    first: Ints
    others: Ints


def _frames_of_rounds(scene: Scene) -> Iterator[_Frames]:
    frames, launching = scene.timeline.frames, _launching(scene)
    written = np.append(np.isin(frames.kind, (FrameKind.PYTHON, FrameKind.LINE)), False)  # no operator's own loop
    known = np.flatnonzero((launching > 0) & written[frames.parent] & ~_dependent(scene))
    taken = np.zeros(len(frames), bool)
    for mine in _together(scene, known):
        call = int(frames.parent[mine[0]])
        if len(mine) >= FEWEST_ROUNDS and not any(taken[one] for one in frames.around(call)):
            found = _of_call(scene, call, mine, launching)
            if found is not None:
                taken[mine] = True
                yield found


def _together(scene: Scene, known: Ints) -> list[Ints]:
    """These frames by the call and the turn that they stand in, the call first that began first. Operators and lines,
    and calls in which ranks meet, are parted by what is multiplied between two of them: as in the layers of a network,
    laid out over ranks or called by one line, the second needs what came of the first."""
    frames, timeline = scene.timeline.frames, scene.timeline
    rank = timeline.rank_of_lanes[frames.lane]
    products, starts = np.flatnonzero(scene.frames_with(Role.LAYER)), timeline.spans.start
    turn, before = np.zeros(len(frames), np.int64), np.zeros(len(frames), np.int64)
    for one in timeline.ranks:
        turn[rank == one] = np.searchsorted(np.sort(starts[timeline.marks_of(one)]), frames.start[rank == one], "right")
    for one in np.unique(frames.lane[products]).tolist():
        begun = np.sort(frames.start[products[frames.lane[products] == one]])
        before[frames.lane == one] = np.searchsorted(begun, frames.start[frames.lane == one])
    meets = np.zeros(len(frames) + 1, bool)
    meets[frames.parent[known[_in_which_ranks_meet(scene)[known]]]] = True
    call = frames.parent[known]
    is_parted = meets[call] | np.isin(frames.kind[known], (FrameKind.OPERATOR, FrameKind.LINE))
    where = np.stack([frames.start[call], call, turn[known], np.where(is_parted, before[known], 0)])
    places, which = np.unique(where, axis=1, return_inverse=True)
    return [known[mine] for mine in _grouped(which.ravel(), places.shape[1])]


def _of_call(scene: Scene, call: int, mine: Ints, launching: Ints) -> _Frames | None:
    """The number of rounds is the one that explains most of what is launched there."""
    _, which, entered = np.unique(scene.path[mine], return_inverse=True, return_counts=True)
    often = [count for count in sorted(set(entered.tolist())) if count >= FEWEST_ROUNDS]
    if not often:
        return None
    weight = np.bincount(which, launching[mine])
    times = max(often, key=lambda one: (weight[entered % one == 0].sum(), one))
    order = np.concatenate([np.arange(count) for count in entered])[np.argsort(np.argsort(which, kind="stable"))]
    whole = entered[which] % times == 0
    begins = whole & (order < entered[which] // times)
    return _Frames(call, times, mine[begins], mine[whole & ~begins])


def _launching(scene: Scene) -> Ints:
    """Of each frame, how many commands are launched within it, at any depth."""
    frames = scene.timeline.frames
    count = np.zeros(len(frames) + 1, np.int64)
    for frame in outwards(frames, scene.timeline.spans.frame[scene.command != NONE]):
        np.add.at(count, frame, 1)
    return count[:-1]


def _dependent(scene: Scene) -> Mask:
    """Frames in backward passes, and those within which matrices are multiplied, or what comes is needed at once:
    messages, and parameters that FSDP gathers."""
    frames, launch = scene.timeline.frames, scene.launch
    inner = [np.flatnonzero(scene.frames_with(Role.LAYER))]
    if scene.among_ranks:
        needed = scene.is_message | np.append(scene.within(Role.SHARDS), False)[launch]
        needed &= (scene.timeline.spans.kind == Kind.COLLECTIVE) & (launch != NONE)
        inner.append(scene.timeline.spans.frame[launch[needed]])
    backward = np.append(scene.frames_with(Role.BACKWARD), False)
    for mine in scene.frames_by_depth:
        backward[mine] |= backward[frames.parent[mine]]
    return frames_around(frames, np.concatenate(inner)) | backward[:-1]


def _in_which_ranks_meet(scene: Scene) -> Mask:
    launch = scene.launch[scene.timeline.spans.kind == Kind.COLLECTIVE]
    return frames_around(scene.timeline.frames, scene.timeline.spans.frame[launch[launch != NONE]])
