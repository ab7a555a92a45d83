"""Two runs compared: what changed, cause by cause, and whether it is more than noise."""

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
"""A share of the longer step: two runs of one program differ by this much even on the quietest machine."""
_TWO_SIDED = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 19 of 20 cases, by degrees of freedom, beginning with 1."""


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
    verdict: str  # whether what fixing it saves is gone, smaller, unchanged, larger or new
    predicted_gain: Change
    wait: Change
    where: Where  # where it is, or was if it is gone


@dataclass(frozen=True)
class FixOutcome:
    """A fix of the plan before, and whether it was made: the plan after does not ask for it there, and the step is no
    longer than before. If the step is longer, something new may only hide the need for the fix."""

    fix: PlannedFix
    made: bool


@dataclass(frozen=True)
class Comparison:
    """What changed from one run to the other."""

    before: Diagnosis
    after: Diagnosis
    step: Change
    ledger: Mapping[str, Change]  # the entries that either run has
    causes: tuple[CauseChange, ...]  # the largest change first
    predicted: Prediction | None  # what the run before predicted for fixing exactly the causes that are gone
    notes: tuple[str, ...]
    plan: tuple[FixOutcome, ...] = ()
    foretold: Prediction | None = None  # the step, by the fixes that were made
    run: Change | None = None  # the whole run, if both were watched
    run_foretold: int = 0
    runs: tuple[int, int] = (1, 1)  # how many runs before and after

    @property
    def knows_runs_differ(self) -> bool:
        """Whether the noise between runs of one program is known: several were given, or all are modelled."""
        return self.runs != (1, 1) or (self.before.is_modelled and self.after.is_modelled)

    @property
    def made(self) -> tuple[PlannedFix, ...]:
        return tuple(outcome.fix for outcome in self.plan if outcome.made)


def compare(before: Diagnosis | Sequence[Diagnosis], after: Diagnosis | Sequence[Diagnosis]) -> Comparison:
    """Compares the run after with the run before. Several runs of one program count as their middle one, and their
    differences as noise."""
    befores, afters = ([side] if isinstance(side, Diagnosis) else [*side] for side in (before, after))
    before, after = _middle(befores), _middle(afters)
    noise, counts = _noise_between(befores, afters), (len(befores), len(afters))
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
    saved = sum(max(0, outcome.fix.run_gain) - outcome.fix.once for outcome in plan if outcome.made)
    return Comparison(
        before,
        after,
        step,
        ledger,
        causes,
        _predicted(before, {change.cause for change in causes if change.verdict == GONE}),
        tuple(_notes(before, after, counts)),
        plan,
        _by_what_was_made(before, [outcome.fix for outcome in plan if outcome.made]),
        run,
        run.before - saved if run else 0,
        counts,
    )


def _middle(runs: Sequence[Diagnosis]) -> Diagnosis:
    return sorted(runs, key=lambda run: run.plain_step)[(len(runs) - 1) // 2]


def _noise_between(befores: Sequence[Diagnosis], afters: Sequence[Diagnosis]) -> int:
    """How much two runs of the same program differ in 19 of 20 cases: judged by repeated runs, or else by parts of one
    run. The first part differs in every run, since the host runs ahead there, so it is left out."""
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
    """Whether the plan after asks for the fix in one of its functions. Lines move when a program is changed."""
    places, causes = _functions(fix, before), set(fix.causes)
    return any(causes & set(other.causes) and places & _functions(other, after) for other in after.plan)


def _functions(fix: PlannedFix, run: Diagnosis) -> set[tuple[str, str]]:
    """File and function of each place. The script's own file is left out, since its copy may have another name."""
    scripts = {PurePath(source).name for source in run.sources}
    return {("" if PurePath(place.file).name in scripts else place.file, place.function) for place in fix.where}


def _by_what_was_made(before: Diagnosis, made: Sequence[PlannedFix]) -> Prediction | None:
    """The step by the fixes that were made. One fix saves its `alone`; several build on each other, so gains add up."""
    of_steps = [fix for fix in made if not fix.loop]
    if not of_steps:
        return None
    step = before.plain_step - (of_steps[0].alone if len(of_steps) == 1 else sum(fix.gain for fix in of_steps))
    last = of_steps[-1].predicted
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
    """What fixing it is predicted to save. The wait alone leaves out copies on the computing stream."""
    return max(0, run.plain_step - cause.predicted.step) if cause else 0


def _verdict(was: bool, now: bool, gain: Change) -> str:
    if not gain.significant:
        return UNCHANGED
    if gain.difference > 0:
        return LARGER if was else NEW
    return SMALLER if now else GONE


def _predicted(before: Diagnosis, gone_causes: set[str]) -> Prediction | None:
    """The prediction for fixing exactly these causes, if there is one: for a single cause, or for all together."""
    together = set(before.fixed) or {cause.cause for cause in before.causes}
    if gone_causes and gone_causes == together:
        return before.predicted
    return next((cause.predicted for cause in before.causes if {cause.cause} == gone_causes), None)


def _notes(before: Diagnosis, after: Diagnosis, runs: tuple[int, int]) -> Iterator[str]:
    if not (before.plain_given and after.plain_given):
        unknown = "of neither run is known"
        if before.plain_given or after.plain_given:
            unknown = f"of the run {'after' if before.plain_given else 'before'} is not known"
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
