"""Explain a timeline: which causes make the GPU wait, where they are, and what fixing them gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from keepbusy.causes import KINDS
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import CAUSES, Cause, Diagnosis, Harmless, LoopDiagnosis, PlannedFix, Prediction
from keepbusy.explain.fix_search import plan_of
from keepbusy.explain.plain import as_recorded, turn_of_part, within_its_loop
from keepbusy.explain.run_plan import plan_of_run
from keepbusy.explain.step_analysis import NOISE, StepAnalysis, sources_of
from keepbusy.timeline.figures import duration, times
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import source_line
from keepbusy.timeline.model import Kind, Timeline
from keepbusy.timeline.run_facts import LOOP, USUAL_WORKERS, Part, WindowReason
from keepbusy.timeline.steps import (
    marked_beside,
    rare_steps,
    sample,
    stretch_beside,
    whole_steps,
    within_loop,
    without_broken_off,
    without_timer_reads,
)

__all__ = ["CAUSES", "explain"]

Say = Callable[[str, float], Any]
"""Who wants to know how far it is: what is being done, and which share is done."""
_LONGEST_STEP = 1 << 62


def explain(
    timeline: Timeline,
    plain_step: int | None = None,
    what_if: Sequence[str] = (),
    workers: int | None = None,
    on_progress: Say | None = None,
    turns: bool = False,
) -> Diagnosis:
    """Why the GPU waits. `plain_step`: nanoseconds a step without a profiler; shares and gains refer to it.

    `what_if` names causes: the step is predicted with just these fixed. `turns`: what was
    explained is to be drawn, so the diagnosis holds it as well. `workers`: how many of a loader a prediction may count
    on; if None, 8, and no more than there were cores.

    A run that was recorded live knows its own plain step. Where that does not fit what was recorded, the recorded
    steps are explained as they are, and a note says so: better than to tell nothing.
    """
    _refuse_nonsense(timeline, plain_step, what_if, USUAL_WORKERS if workers is None else workers)
    if workers is None:
        cores = max((one.cores for one in timeline.facts.loaders), default=0)
        workers = min(USUAL_WORKERS, cores or USUAL_WORKERS)
    timeline = without_broken_off(timeline)
    if not len(timeline):
        return _without_turns(timeline)

    def explained(window: Timeline, step: int | None) -> Diagnosis:
        return _explained(window, step, what_if, workers, on_progress or (lambda *_: None), turns)

    if plain_step is not None:
        return explained(timeline, plain_step)
    timeline = within_its_loop(timeline)
    known = timeline.facts.plain_step or turn_of_part(timeline)
    loop = timeline.facts.own_loop
    if known is None and loop is not None and loop.turns and not timeline.facts.is_whole:
        known = loop.usual  # where no steps were timed, what a turn of the recorded loop usually takes
    try:
        return explained(timeline, known)
    except BadInput as misfit:
        if known is not None:
            with suppress(BadInput):
                return explained(as_recorded(timeline, misfit), None)
        if timeline.facts.run is None:
            raise
        return _without_turns(timeline, str(misfit))


def _without_turns(timeline: Timeline, *notes: str) -> Diagnosis:
    """A run of which no turn was recorded closely: its tree, what its loaders and its marks tell, and their plan."""
    facts = timeline.facts
    step = next((one.step for one in facts.plain_runs.values()), 0)
    diagnosis = Diagnosis(
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
        command=facts.command,
        folder=facts.folder,
        notes=(*facts.notes, *notes),
        plain_runs=facts.plain_runs,
        run=facts.run,
        one_turn=not step,
        cut_short=facts.cut_short,
        races=facts.races,
        stretches=_stretches(timeline),
    )
    return replace(diagnosis, plan=plan_of_run(diagnosis, facts.loaders))


def _explained(
    timeline: Timeline,
    plain_step: int | None,
    what_if: Sequence[str],
    workers: int,
    say: Say,
    turns: bool,
) -> Diagnosis:
    say("finding the steps", 0.0)
    timeline = _with_turn_around(timeline)
    whole = whole_steps(without_timer_reads(within_loop(timeline)), plain_step)
    loop = _loop_named(timeline.facts.run, timeline.facts.loop)
    window = sample(whole, apart=bool(loop))
    say("replaying the plain run", 0.2)
    analysis = StepAnalysis.of(window, plain_step, workers)
    say("fixing each cause", 0.5)
    # nothing was recorded on a virtual GPU at the cost of the host: that run is its own plain one
    diagnosis = analysis.diagnosis(whole, plain_step is not None or timeline.facts.is_whole, what_if)
    say("searching for the plan", 0.7)
    plan, run = plan_of(analysis.inputs, analysis.forecast, analysis.found), timeline.facts.run
    diagnosis = replace(
        diagnosis,
        loop=loop,
        run_steps=_steps_of_run(timeline, whole) if run is not None else 0,
        one_turn=whole.facts.runs_once,
        cut_short=timeline.facts.cut_short,
        races=timeline.facts.races,
        stretches=_stretches(timeline),
        is_modelled=timeline.facts.modelled,
        plan=plan,
        run=run,
        loops=(*_loops(timeline, workers, run, turns), *_rare(timeline, whole, loop, workers, turns)),
        turns=analysis.turns() if turns else None,
        draw=analysis.turns,
        notes=(
            *_notes(whole, analysis, diagnosis.plain_given),
            *diagnosis.notes,
            *_behind_others(analysis, plan),
        ),
    )
    if run is not None or diagnosis.plain_runs:  # of a trace only its steps are known: their plan is all there is
        plan = plan_of_run(diagnosis, timeline.facts.loaders, () if len(timeline.meetings) else timeline.facts.uneven)
    causes = tuple(_as_planned(one, plan) for one in diagnosis.causes)
    return replace(
        diagnosis, plan=plan, causes=causes, harmless=without_planned(diagnosis.harmless, (*diagnosis.plan, *plan))
    )


_STRETCHES = 8


def _stretches(timeline: Timeline) -> tuple[int, ...]:
    """The median step in each eighth of the run, where most of its steps were timed: how far the machine drifts."""
    facts, steps = timeline.facts, np.zeros(0, np.int64)
    if facts.plain_runs:
        steps = np.array(next(iter(facts.plain_runs.values())).course.step, np.int64)
    elif facts.is_whole and len(timeline.marks):
        steps = np.diff(timeline.spans.start[timeline.marks_of(timeline.ranks[0])])
    if len(steps) < 2 * _STRETCHES:
        return ()
    return tuple(round(float(np.median(part))) for part in np.array_split(steps, _STRETCHES))


def _notes(whole: Timeline, analysis: StepAnalysis, plain_given: bool) -> Iterator[str]:
    """What a reader should know before trusting the figures, a sentence each; first what the recorder says itself."""
    facts, steps = whole.facts, len(whole.marks_of(whole.ranks[0]))
    yield from facts.notes
    if not plain_given and facts.recorded is None:
        yield (
            "Profiling slows Python down: a trace shows two to three times the idle time of the plain run. "
            "Time a step without the profiler and pass it as --plain-step."
        )
    if not facts.values:
        yield "With --values none nothing is computed: every value that the program reads is 0."
    if facts.modelled:
        yield "CPU time is modelled: operators take time, but Python, files and loader workers take none."
    if not facts.stacks:
        yield "The trace has no stacks, so it names operators, not lines. Record with with_stack=True for lines."
    if facts.skipped:
        yield f"{facts.skipped} events of the trace could not be read and are missing."
    if facts.marks_a_step:
        yield f"{facts.marks_a_step} marked steps count as one, because the given plain step is that long."
    if analysis.inputs.steps < steps:
        yield f"{analysis.inputs.steps} of the {steps} steps were replayed, evenly from the fastest to the slowest."
    yield from _notes_on_missing_ranks(whole)
    plain = analysis.plain
    if plain.alike < 1 and facts.one_turn:
        yield "Savings are estimated from the recorded part of the step, so their ranges are wide."
    elif plain.alike < 1:
        yield (
            f"The recorded steps took {1 / plain.ratio:.1f} times as long as the plain step, more than recording "
            "explains. Savings are scaled to the plain step, and their ranges are wide."
        )
    elif plain_given and not 0.85 < plain.ratio < 1.15:
        # plain step and recording of one live run are of the same program: only that moment can have been another
        why = "the machine may have been busy. Record again, or with another --after."
        if facts.recorded is None:
            why = "are they of the same program and machine?"
        yield f"The plain step and the recorded steps differ by more than recording explains: {why}"


def _notes_on_missing_ranks(whole: Timeline) -> Iterator[str]:
    facts, given, spans = whole.facts, len(whole.ranks), whole.spans
    groups = np.unique(spans.group[spans.kind == Kind.COLLECTIVE]).tolist()
    if facts.cluster is not None:
        yield f"{given} ranks were kept whole, the latest among them. Step, causes and plan are those of these ranks."
    elif given > 1 and (facts.world or 0) > given:
        yield f"{given} of the run's {facts.world} ranks were recorded. Waiting for the others counts as communication."
    elif any(facts.groups.get(group, 2) > given for group in groups):
        yield "Other ranks were not recorded, so waiting for them counts as communication."


def _behind_others(analysis: StepAnalysis, plan: Sequence[PlannedFix]) -> Iterator[str]:
    """A sentence for each cause that is in no plan, gains nothing now, and would once others are gone. Not of ranks: by
    how little they differ shows once nothing else is left, and is noise."""
    planned = {"peer_late", *(cause for one in plan for cause in one.causes)}
    for cause, gain in analysis.behind_others().items():
        if cause not in planned:
            finding, per_step = analysis.found[cause], analysis.inputs.steps * len(analysis.inputs.timeline.ranks)
            place, *more = sorted(finding.places, key=lambda one: -len(finding.places[one]))
            there, often = f" and {len(more)} more" if more else "", finding.count / per_step
            yield (
                f"{cause} at {place}{there} ({times(often)}) costs nothing now, and {duration(gain)} once the other "
                "causes are fixed."
            )


def without_planned(harmless: Sequence[Harmless], plan: Sequence[PlannedFix]) -> tuple[Harmless, ...]:
    """What gains something in a set of fixes is not without cost, whatever it gains alone.

    Nor is a loader that the run waits for, though recorded steps may not have: it is planned where it is made.
    """
    planned = {(cause, str(place)) for one in plan for cause in one.causes for place in one.where}
    waits = any("input_late" in one.causes for one in plan)
    left = (one for one in harmless if not (waits and one.cause == "input_late"))
    return tuple(one for one in left if (one.cause, str(one.where)) not in planned)


def _as_planned(cause: Cause, plan: Sequence[PlannedFix]) -> Cause:
    """What to do is diagnosis once: the plan knows how many workers keep up, and which of several fixes gains most."""
    of_steps = [one for one in plan if cause.cause in one.causes and not one.loop]
    there = [one for one in of_steps if str(cause.where) in map(str, one.where) or one.api == cause.api]
    if not there:
        return cause
    return replace(cause, fix=there[0].fix, advice=there[0].advice, remedy=there[0].code, api=there[0].api)


def _steps_of_run(timeline: Timeline, whole: Timeline) -> int:
    """Of a run whose marks nobody counted. One step may be several of those that were marked."""
    facts = timeline.facts
    if facts.own_loop is not None and facts.own_loop.turns:
        return facts.own_loop.turns
    around = _loop_of_marks(timeline)
    if around is not None and facts.plain_step and (facts.loop or not facts.plain_runs):
        return around.time // facts.plain_step
    marked = max((one.steps + one.warm_up for one in facts.plain_runs.values()), default=0)
    if around is not None and 2 * around.turns < marked:  # most of them in another loop, which is not the one recorded
        return around.turns
    if not timeline.facts.is_whole or timeline.facts.plain_runs:
        return 0
    marked, steps = len(timeline.marks_of(timeline.ranks[0])), len(whole.marks_of(whole.ranks[0]))
    return round(steps * (timeline.facts.first_steps + marked) / (marked - 1)) if marked > steps > 1 else steps


def _with_turn_around(timeline: Timeline) -> Timeline:
    """With what was recorded between two runs of the loop as a window on the loop around it, where nothing else is."""
    run = timeline.facts.run
    if run is None or (inner := timeline.facts.own_loop) is None:
        return timeline
    around = next((part for part in run.within() if inner in part.parts), None)
    known = {one.facts.reason.place for one in timeline.further if one.facts.reason}
    if around is None or around.kind != LOOP or around.named in known:
        return timeline
    if any(one.comes_rarely(inner) for one in inner.parts):
        return timeline  # what came between two runs may be that, which is a loop of its own
    timeline = marked_beside(timeline)
    between = stretch_beside(timeline)
    if between is None:
        return timeline
    within = sum(part.time for part in around.parts if part.kind == LOOP) // max(1, around.turns)
    window = between.change(further=()).change_facts(
        plain_step=max(1, around.usual - within) + inner.usual,
        loop=around.named,
        reason=WindowReason(LOOP, place=around.named),
        notes=(),
    )
    return timeline.change(further=(*timeline.further, window))


def _loops(timeline: Timeline, workers: int, run: Part | None, drawn: bool) -> tuple[LoopDiagnosis, ...]:
    """Other loops of the run that were looked at, each explained by its own turns."""
    found = []
    for one in timeline.further:
        if one.facts.reason is None or one.facts.reason.why != LOOP:
            continue
        place = _loop_named(run, one.facts.reason.place)
        with suppress(BadInput):
            loop = run.loop_at(place) if run is not None else None
            mine = replace(loop, decides=run.decides) if loop is not None and run is not None else None
            diagnosis = explain(one.change_facts(run=mine), workers=workers, turns=drawn)
            if diagnosis.steps:
                turns = loop.turns if loop is not None else 0  # 0 where nobody counted
                found.append(LoopDiagnosis(place, turns, replace(diagnosis, run=None)))
    return tuple(found)


def _rare(timeline: Timeline, whole: Timeline, loop: str, workers: int, drawn: bool) -> Iterator[LoopDiagnosis]:
    """Steps that take far longer than others and are rare, as a loop of their own."""
    found = rare_steps(whole)
    if loop and found is not None:
        steps, recorded = found
        turns = round(recorded * max(1.0, _steps_of_run(timeline, whole) / len(whole.marks_of(whole.ranks[0]))))
        analysis = StepAnalysis.of(steps.change_facts(plain_step=None, plain_runs={}), None, workers)
        plan, drawing = plan_of(analysis.inputs, analysis.forecast, analysis.found), analysis.turns() if drawn else None
        diagnosis = replace(analysis.diagnosis(steps, True, ()), plan=plan, run=None, turns=drawing)
        yield LoopDiagnosis(f"{loop} (its {turns} longest iterations)", turns, diagnosis)


def _loop_named(run: Part | None, name: str) -> str:
    """As the run's tree calls it."""
    loop = run.loop_at(name) if run is not None and name else None
    return loop.named if loop is not None else name


def _loop_of_marks(timeline: Timeline) -> Part | None:
    """The innermost loop of the run's tree that the recorded turns stand in."""
    run, frames, lines = timeline.facts.run, timeline.frames, list[tuple[str, int, str]]()
    for frame in frames.around(int(timeline.spans.frame[timeline.marks[0]])) if len(timeline.marks) else ():
        lines += filter(None, [source_line(timeline.names[frames.name[frame]])])
    loops = [part for part in (run.within() if run is not None else ()) if part.kind == LOOP]
    for file, line, function in lines:
        here = [(Where.of(one.place), one) for one in loops if one.function == function]
        found = [(where.line, one.turns, one) for where, one in here if where.file == file and where.line <= line]
        if found:
            return max(found, key=lambda one: one[:2])[2]
    return None


def _refuse_nonsense(timeline: Timeline, plain_step: int | None, what_if: Sequence[str], workers: int) -> None:
    if not isinstance(timeline, Timeline):
        raise BadInput(f"explain was given {timeline!r:.80}; give what keepbusy.read or keepbusy.load returns.")
    if plain_step is not None and not (isinstance(plain_step, Real) and 1 <= plain_step <= _LONGEST_STEP):
        raise BadInput(f"plain_step={plain_step!r} is not the time of a step; give nanoseconds, 1 or more.")
    if not isinstance(workers, int) or workers < 1:
        raise BadInput(f"workers={workers!r} is no number of workers; give 1 or more.")
    if isinstance(what_if, str):
        raise BadInput(f"what_if={what_if!r} is one string; give a list of causes: what_if=[{what_if!r}].")
    for cause in what_if:
        if cause not in KINDS:
            raise BadInput(f"{cause!r} is no cause that can be fixed; the causes are {', '.join(KINDS)}.")
