"""Explain a timeline: which causes make the GPU wait, where they are, and what fixing them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from keepbusy.explain.causes import FINDERS
from keepbusy.explain.diagnosis import CAUSES, Diagnosis, LoopDiagnosis, Prediction
from keepbusy.explain.fix_plan import plan_of, plan_of_run, turns_of, without_planned
from keepbusy.explain.ledger import NOISE
from keepbusy.explain.places import another_loop
from keepbusy.explain.plain import as_recorded
from keepbusy.explain.story import Story, later_of, left_unexplained, ordinary_steps, rare_of, sources_of
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import NONE, Timeline
from keepbusy.timeline.run_facts import LOOP
from keepbusy.timeline.run_tree import Part
from keepbusy.timeline.steps import sample, whole_steps

__all__ = ["CAUSES", "explain"]

Say = Callable[[str, float], Any]
"""Who wants to know how far it is: what is being done, and which share is done."""
LONGEST_STEP = 1 << 62


def explain(
    timeline: Timeline,
    plain_step: int | None = None,
    what_if: Sequence[str] = (),
    workers: int = 8,
    on_progress: Say | None = None,
    mend: Sequence[str] = (),
    turns: bool = False,
) -> Diagnosis:
    """Why the GPU waits. `plain_step`: nanoseconds a step without a profiler; shares and gains refer to it.

    `what_if` names causes: the step is predicted with just these fixed. (`mend` is its old name.) `turns`: what was
    explained is to be drawn, so the diagnosis holds it as well.

    A run that was recorded live knows its own plain step. Where that does not fit what was recorded, the recorded
    steps are explained as they are, and a note says so: better than to tell nothing.
    """
    what_if = what_if or mend
    _refuse_nonsense(plain_step, what_if, workers)
    if not len(timeline):
        return _without_turns(timeline)
    if loop := another_loop(timeline):
        timeline = _of_that_loop(timeline, loop)
    say, known = on_progress or _quiet, timeline.facts.plain_step
    if plain_step is not None:
        return _explained(timeline, plain_step, what_if, workers, say, turns)
    try:
        return _explained(timeline, known, what_if, workers, say, turns)
    except BadInput as misfit:
        if known is not None:
            with suppress(BadInput):
                return _explained(as_recorded(timeline, misfit), None, what_if, workers, say, turns)
        if timeline.facts.run is None:
            raise
        return _without_turns(timeline, str(misfit))


def _without_turns(timeline: Timeline, *notes: str) -> Diagnosis:
    """A run of which no turn was recorded closely: its tree, what its loaders and its marks tell, and their plan."""
    facts = timeline.facts
    step = next((one.step for one in facts.plain_runs.values()), 0)
    told = Diagnosis(
        plain_step=step,
        plain_given=True,
        traced_step=0,
        steps=0,
        ledger={},
        causes=(),
        harmless=(),
        predicted=Prediction(step, step, step),
        noise=round(NOISE * step),
        ranks=tuple(timeline.ranks),
        device=facts.device,
        sources=sources_of(timeline),
        notes=(*facts.notes, *notes),
        plain_runs=facts.plain_runs,
        run=facts.run,
        one_turn=not step,
    )
    return replace(told, plan=plan_of_run(told, facts.loaders))


def _of_that_loop(timeline: Timeline, loop: Part) -> Timeline:
    """Its own turns tell what a step takes; those of the other loop do not."""
    typical = (loop.low + loop.high) // 2 if loop.low != NONE else None
    note = (
        f"What was recorded is the loop at {loop.place}, of {loop.turns} turns; most steps were taken in another loop. "
        f"To look at that one, record again with --after {2 * loop.turns}."
    )
    return timeline.change_facts(plain_step=typical, notes=(*timeline.facts.notes, note))


def _explained(
    timeline: Timeline, plain_step: int | None, what_if: Sequence[str], workers: int, say: Say, turns: bool
) -> Diagnosis:
    say("finding the steps", 0.0)
    whole = whole_steps(ordinary_steps(timeline), plain_step)
    window = sample(whole)
    say("replaying the plain run", 0.2)
    story = Story.of(window, plain_step, workers, what_if)
    say("fixing each cause", 0.5)
    # nothing was recorded on a virtual GPU at the cost of the host: that run is its own plain one
    ordinary = story.diagnosis(whole, plain_step is not None or timeline.facts.virtual)
    say("searching for the plan", 0.7)
    run = timeline.facts.run
    loop = another_loop(timeline)
    ordinary = replace(
        ordinary,
        loop_turns=loop.turns if loop else 0,
        run_steps=_steps_of_run(timeline, whole) if timeline.facts.virtual and run is not None else 0,
        one_turn=whole.facts.runs_once,
        plan=plan_of(story.scene, story.forecast, story.found),
        run=run,
        loops=_loops(timeline, workers, run, turns),
        turns=story.turns() if turns else None,
        draw=story.turns,
    )
    rare = rare_of(timeline, ordinary, workers)
    told = replace(ordinary, rare=rare, later=later_of(timeline, workers))
    plan = plan_of_run(told, timeline.facts.loaders)
    return replace(
        told,
        plan=plan,
        harmless=without_planned(ordinary.harmless, (*ordinary.plan, *plan)),
        notes=(*ordinary.notes, *left_unexplained(timeline, rare)),
    )


def _steps_of_run(timeline: Timeline, whole: Timeline) -> int:
    """Of a run that was recorded from its beginning to its end. One step may be several of those that were marked."""
    marked, steps = len(timeline.marks_of(timeline.ranks[0])), len(whole.marks_of(whole.ranks[0]))
    return round(steps * (timeline.facts.first_steps + marked) / (marked - 1)) if marked > steps > 1 else steps


def _loops(timeline: Timeline, workers: int, run: Part | None, drawn: bool) -> tuple[LoopDiagnosis, ...]:
    """Other loops of the run that were looked at, each explained by its own turns."""
    found = []
    for one in timeline.further:
        if one.facts.reason is None or one.facts.reason.why != LOOP:
            continue
        place = one.facts.reason.place
        with suppress(BadInput):
            found.append(LoopDiagnosis(place, turns_of(run, place), explain(one, workers=workers, turns=drawn)))
    return tuple(found)


def _quiet(what: str, share: float) -> None:
    """Nobody asked to be told."""


def _refuse_nonsense(plain_step: int | None, what_if: Sequence[str], workers: int) -> None:
    if plain_step is not None and not 1 <= plain_step <= LONGEST_STEP:  # also of no number at all: nan is neither
        raise BadInput(f"plain_step={plain_step!r} is not the time of a step; give nanoseconds, 1 or more.")
    if not isinstance(workers, int) or workers < 1:
        raise BadInput(f"workers={workers!r} is no number of workers; give 1 or more.")
    if isinstance(what_if, str):
        raise BadInput(f"what_if={what_if!r} is one string; give a list of causes: what_if=[{what_if!r}].")
    for cause in what_if:
        if cause not in FINDERS:
            raise BadInput(f"{cause!r} is no cause that can be fixed; the causes are {', '.join(FINDERS)}.")
