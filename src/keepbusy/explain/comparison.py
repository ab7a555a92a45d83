"""Two runs held against each other: what changed, cause by cause, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import PurePath
from statistics import stdev, variance

from keepbusy.causes import LEDGER
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Cause, Diagnosis, PlannedFix, Prediction

GONE, SMALLER, UNCHANGED, LARGER, NEW = "gone", "smaller", "unchanged", "larger", "new"
_LEAST_NOISE = 0.01
"""Of the longer step: two runs of one program differ by this much on the quietest machine."""
_TWO_SIDED = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 19 of 20 cases, by degrees of freedom from 1 on."""


@dataclass(frozen=True)
class Change:
    """A time before and after, and how much of a difference is noise."""

    before: int
    after: int
    noise: int

    @property
    def difference(self) -> int:
        return self.after - self.before

    @property
    def significant(self) -> bool:
        return abs(self.difference) > self.noise


@dataclass(frozen=True)
class CauseChange:
    """One cause in both runs."""

    cause: str
    verdict: str  # gone, smaller, unchanged, larger or new: of what fixing it gains
    predicted_gain: Change
    wait: Change
    where: Where  # where it is; of one that is gone, where it was


@dataclass(frozen=True)
class FixOutcome:
    """A fix of the plan before, and whether it was made: whether the plan after no longer asks for it there, and the
    step has not become longer. Else it may be that something new stands in its way."""

    fix: PlannedFix
    made: bool


@dataclass(frozen=True)
class Comparison:
    """What changed from one run to the other."""

    before: Diagnosis
    after: Diagnosis
    step: Change
    ledger: Mapping[str, Change]  # places that either run has
    causes: tuple[CauseChange, ...]  # the largest change first
    predicted: Prediction | None  # what the run before said of fixing exactly what is gone
    notes: tuple[str, ...]
    plan: tuple[FixOutcome, ...] = ()
    foretold: Prediction | None = None  # the step, by the fixes that were made
    run: Change | None = None  # the whole run, where both were watched
    run_foretold: int = 0
    runs: tuple[int, int] = (1, 1)  # how many of the program before and of the one after

    @property
    def knows_runs_differ(self) -> bool:
        """Whether it is known what runs of the same program differ by: more than one was given, or all are the same."""
        return self.runs != (1, 1) or (self.before.is_modelled and self.after.is_modelled)

    @property
    def made(self) -> tuple[PlannedFix, ...]:
        return tuple(one.fix for one in self.plan if one.made)


def compare(before: Diagnosis | Sequence[Diagnosis], after: Diagnosis | Sequence[Diagnosis]) -> Comparison:
    """Hold the run after against the run before; of several runs of one program the one in the middle, with what they
    differ by for its noise."""
    befores, afters = ([one] if isinstance(one, Diagnosis) else [*one] for one in (before, after))
    before, after = _middle(befores), _middle(afters)
    noise, runs = _noise_between(befores, afters), (len(befores), len(afters))
    ledger = {
        place: Change(before.ledger.get(place, 0), after.ledger.get(place, 0), noise)
        for place in LEDGER
        if before.ledger.get(place) or after.ledger.get(place)
    }
    causes = _causes(before, after, ledger, noise)
    step = Change(before.plain_step, after.plain_step, noise)
    is_slower = step.significant and step.difference > 0
    plan = tuple(
        FixOutcome(fix, not _asked_for(fix, before, after) and (fix.is_beside_steps or not is_slower))
        for fix in before.plan
    )
    run = None
    if before.run is not None and after.run is not None:
        longer = max(before.run.time, after.run.time)
        run = Change(before.run.time, after.run.time, round(_LEAST_NOISE * longer))
    saved = sum(max(0, one.fix.run_gain) - one.fix.once for one in plan if one.made)
    return Comparison(
        before,
        after,
        step,
        ledger,
        causes,
        _predicted(before, {change.cause for change in causes if change.verdict == GONE}),
        tuple(_notes(before, after, runs)),
        plan,
        _by_what_was_made(before, [one.fix for one in plan if one.made]),
        run,
        run.before - saved if run else 0,
        runs,
    )


def _middle(runs: Sequence[Diagnosis]) -> Diagnosis:
    return sorted(runs, key=lambda run: run.plain_step)[(len(runs) - 1) // 2]


def _noise_between(befores: Sequence[Diagnosis], afters: Sequence[Diagnosis]) -> int:
    """What two runs of the same program differ by, in 19 of 20 cases: by its repeated runs where there are any, else by
    what stretches of one run do. The first stretch is unlike the others in every run: there the host runs ahead."""
    least = _LEAST_NOISE * max(run.plain_step for run in (*befores, *afters))
    free = len(befores) + len(afters) - 2
    if free:
        squares = sum(
            variance([run.plain_step for run in runs]) * (len(runs) - 1) for runs in (befores, afters) if runs[1:]
        )
        spread = sqrt(squares / free * (1 / len(befores) + 1 / len(afters)))
        return round(max(_TWO_SIDED[min(free, len(_TWO_SIDED)) - 1] * spread, least))
    [before], [after] = befores, afters
    drift = [stdev(run.stretches[1:]) if run.stretches[2:] else 0.0 for run in (before, after)]
    return round(max(hypot(before.noise, after.noise), 2 * hypot(*drift), least))


def _asked_for(fix: PlannedFix, before: Diagnosis, after: Diagnosis) -> bool:
    """At one of its functions, since lines move when a program is changed."""
    places, causes = _functions(fix, before), set(fix.causes)
    return any(causes & set(one.causes) and places & _functions(one, after) for one in after.plan)


def _functions(fix: PlannedFix, run: Diagnosis) -> set[tuple[str, str]]:
    """Of the script itself without its name: the changed one may have another."""
    scripts = {PurePath(source).name for source in run.sources}
    return {("" if PurePath(place.file).name in scripts else place.file, place.function) for place in fix.where}


def _by_what_was_made(before: Diagnosis, made: Sequence[PlannedFix]) -> Prediction | None:
    """Of a single fix it is known what it gains alone; several of them build on each other, so their gains add up."""
    mine = [one for one in made if not one.loop]
    if not mine:
        return None
    step = before.plain_step - (mine[0].alone if len(mine) == 1 else sum(one.gain for one in mine))
    last = mine[-1].predicted
    return Prediction(step, step - (last.step - last.low), step + (last.high - last.step))


def _causes(before: Diagnosis, after: Diagnosis, ledger: Mapping[str, Change], noise: int) -> tuple[CauseChange, ...]:
    was, now = ({cause.cause: cause for cause in run.causes} for run in (before, after))
    changes = []
    for name in dict.fromkeys([*was, *now]):
        gain = Change(_gain(before, was.get(name)), _gain(after, now.get(name)), noise)
        wait, cause = ledger.get(name, Change(0, 0, noise)), now.get(name) or was[name]
        changes.append(CauseChange(name, _verdict(name in was, name in now, gain), gain, wait, cause.where))
    return tuple(sorted(changes, key=lambda change: -abs(change.predicted_gain.difference)))


def _gain(run: Diagnosis, cause: Cause | None) -> int:
    """What fixing it is predicted to save. The wait alone would miss what is copied in line."""
    return max(0, run.plain_step - cause.predicted.step) if cause else 0


def _verdict(was: bool, now: bool, gain: Change) -> str:
    if not gain.significant:
        return UNCHANGED
    if gain.difference > 0:
        return LARGER if was else NEW
    return SMALLER if now else GONE


def _predicted(before: Diagnosis, gone: set[str]) -> Prediction | None:
    """A prediction is held against the measurement where one was made: of one cause, or of all that was asked."""
    together = set(before.fixed) or {cause.cause for cause in before.causes}
    if gone and gone == together:
        return before.predicted
    return next((cause.predicted for cause in before.causes if {cause.cause} == gone), None)


def _notes(before: Diagnosis, after: Diagnosis, runs: tuple[int, int]) -> Iterator[str]:
    if not (before.plain_given and after.plain_given):
        one = "before" if after.plain_given else "after"
        neither = not before.plain_given and not after.plain_given
        unknown = "of neither run is known" if neither else f"of the run {one} is not known"
        yield (
            f"The plain step {unknown}, so these times include the profiler's own cost. "
            "Save both runs with --plain-step for a fair comparison."
        )
    for side, run in (("before", before), ("after", after)):
        if run.cut_short is not None:
            yield f"The run {side} was cut short by {run.cut_short.by}."
    if before.device != after.device:
        yield f"The runs were made on different devices: {before.device or 'unknown'}, {after.device or 'unknown'}."
    if len(before.ranks) != len(after.ranks):
        yield f"The runs have different numbers of ranks: {len(before.ranks)}, {len(after.ranks)}."
    if runs == (1, 1) and not (before.is_modelled and after.is_modelled):
        yield (
            "With one run each it is not known how much runs of the same program differ. On a busy machine that may be "
            "more than the noise within a run. Record each twice or more and give all of them: "
            "keepbusy compare a1.busy,a2.busy b1.busy,b2.busy"
        )
