"""What further windows tell: of a stall that comes only now and then, and of steps that have changed for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from keepbusy.explain.diagnosis import Cause, Diagnosis, Later, Prediction, Rare, Where
from keepbusy.explain.ledger import NOISE
from keepbusy.explain.remedies import CHECKPOINT
from keepbusy.explain.story import Story
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.plain_run import PlainRun, RareStall
from keepbusy.timeline.run_facts import DRIFT, STALL
from keepbusy.timeline.steps import sample, step_alone, whole_steps, without_steps

MOST_ROWS = 150_000
"""Of a rare step: to replay more takes too long, since no part of it repeats itself."""
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
    """Each rare stall around which a window was taken, and in which it came. `ordinary`: what every step has."""
    looks = [one for one in timeline.further if one.facts.reason and one.facts.reason.why == STALL]
    return tuple(found for look in looks if (found := _rare(look, ordinary, workers)) is not None)


def left_unexplained(timeline: Timeline, rare: Sequence[Rare]) -> Iterator[str]:
    """A sentence for each look that told nothing."""
    told = {one.step for one in rare}
    for look in timeline.further:
        step = look.facts.reason.step if look.facts.reason else None
        if step is not None and step not in told:
            many = len(look) > MOST_ROWS
            why = "has too many spans to be replayed" if many else "was not in it, or not as the marks show it"
            yield f"A stall was foreseen for step {step}, and a window was open: it {why}."


def later_of(timeline: Timeline, workers: int) -> Later | None:
    """What steps are like since they have changed."""
    for look in timeline.further:
        reason = look.facts.reason
        if reason and reason.why == DRIFT and reason.began is not None and (plain := look.facts.plain_step):
            with suppress(BadInput):
                whole = whole_steps(look, plain)
                told = Story.of(sample(whole), plain, workers).told(whole, plain_given=True)
                return Later(reason.began, told)
    return None


def _rare(look: Timeline, ordinary: Diagnosis, workers: int) -> Rare | None:
    reason, usual = look.facts.reason, look.facts.plain_step or ordinary.plain_step
    if reason is None or reason.step is None:
        return None
    number = reason.step
    stall = _stall(ordinary.plain_runs, number) or reason.stall
    window = step_alone(look, range(number - 1, number + 2))
    if stall is None or window is None or len(window) > MOST_ROWS:
        return None
    with suppress(BadInput):
        plain = usual + stall.time
        told = Story.of(window, plain, workers).told(window, plain_given=True)
        causes = tuple(sorted(_beyond(told, ordinary, stall), key=lambda one: one.predicted.step))
        return Rare(stall, number, plain, told.ledger, causes, _together(told, ordinary, causes, stall))
    return None


def _stall(runs: Mapping[int, PlainRun], step: int) -> RareStall | None:
    """As the whole run shows it; of several ranks' the one that has a reason."""
    found = [stall for run in runs.values() for stall in run.stalls if stall.punctual and stall.comes_in(step)]
    return max(found, key=lambda one: (bool(one.what), one.share), default=None)


def _beyond(told: Diagnosis, ordinary: Diagnosis, stall: RareStall) -> Iterator[Cause]:
    """The causes of the stall itself: what every step has, too, was explained already."""
    every = {cause.cause: cause for cause in ordinary.causes}
    for cause in told.causes:
        usual = every.get(cause.cause)
        always = ordinary.plain_step - usual.predicted.step if usual else 0
        gain = min(stall.time, told.plain_step - cause.predicted.step - always)
        if gain > max(MATTERS * stall.time, NOISE * told.plain_step):
            mine = _elsewhere(cause, usual)
            yield replace(_remedied(mine, stall), predicted=_gaining(told, cause.predicted, gain))


def _elsewhere(cause: Cause, usual: Cause | None) -> Cause:
    """Without the places at which every step has it, if it has others."""
    known: set[Where] = {site.where for site in usual.sites} if usual else set()
    sites = tuple(site for site in cause.sites if site.where not in known)
    return replace(cause, sites=sites or cause.sites)


def _remedied(cause: Cause, stall: RareStall) -> Cause:
    if stall.what != "checkpoint" or cause.cause not in _WRITES:
        return cause
    return replace(cause, fix=CHECKPOINT.fix, advice=CHECKPOINT.advice, remedy=CHECKPOINT.code, api=CHECKPOINT.api)


def _together(told: Diagnosis, ordinary: Diagnosis, causes: Sequence[Cause], stall: RareStall) -> Prediction:
    """Such a step without the causes of its stall; what its other causes cost stays."""
    if not causes:
        return Prediction(told.plain_step, told.plain_step, told.plain_step)
    always = ordinary.plain_step - ordinary.predicted.step if ordinary.causes else 0
    gain = min(stall.time, told.plain_step - told.predicted.step - always)
    gain = max(gain, *(told.plain_step - cause.predicted.step for cause in causes), 0)
    return _gaining(told, told.predicted, gain)


def _gaining(told: Diagnosis, predicted: Prediction, gain: int) -> Prediction:
    step = told.plain_step - gain
    less = step - predicted.step
    return Prediction(step, predicted.low + less, min(told.plain_step, predicted.high + less))
