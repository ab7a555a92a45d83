"""Explain a timeline: which causes make the GPU wait, where they are, and what fixing them saves."""

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
from keepbusy.explain.plain import as_recorded, iteration_of_part, within_its_loop
from keepbusy.explain.run_plan import plan_of_run
from keepbusy.explain.step_analysis import NOISE, StepAnalysis, sources_of
from keepbusy.timeline.figures import duration, times
from keepbusy.timeline.files import BadInput
from keepbusy.timeline.frame_roles import source_line
from keepbusy.timeline.model import Kind, Timeline
from keepbusy.timeline.run_facts import LOOP, USUAL_WORKERS, Part, WindowReason
from keepbusy.timeline.steps import (
    enclosing_iteration,
    marked_beside,
    rare_steps,
    sample,
    whole_steps,
    within_loop,
    without_broken_off,
    without_timer_reads,
)

__all__ = ["CAUSES", "explain"]

Say = Callable[[str, float], Any]
"""Receives progress: what is being done, and which share is done."""
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

    `what_if` names causes: the step is predicted with just these fixed. `turns`: the diagnosis also holds what is
    needed to draw the iterations. `workers`: how many loader workers a prediction may count on; if None, 8, and no more
    than there were cores.

    A run that was recorded live knows its own plain step. If the recorded steps do not fit it, they are explained as
    they are, and a note says so.
    """
    _refuse_nonsense(timeline, plain_step, what_if, USUAL_WORKERS if workers is None else workers)
    if workers is None:
        cores = max((loader.cores for loader in timeline.facts.loaders), default=0)
        workers = min(USUAL_WORKERS, cores or USUAL_WORKERS)
    timeline = without_broken_off(timeline)
    if not len(timeline):
        return _without_iterations(timeline)

    def explained(window: Timeline, step: int | None) -> Diagnosis:
        return _explained(window, step, what_if, workers, on_progress or (lambda *_: None), turns)

    if plain_step is not None:
        return explained(timeline, plain_step)
    timeline = within_its_loop(timeline)
    known_step = timeline.facts.plain_step or iteration_of_part(timeline)
    loop = timeline.facts.own_loop
    if known_step is None and loop is not None and loop.turns and not timeline.facts.is_whole:
        known_step = loop.usual  # no steps were timed: the usual iteration of the recorded loop
    try:
        return explained(timeline, known_step)
    except BadInput as misfit:
        if known_step is not None:
            with suppress(BadInput):
                return explained(as_recorded(timeline, misfit), None)
        if timeline.facts.run is None:
            raise
        return _without_iterations(timeline, str(misfit))


def _without_iterations(timeline: Timeline, *notes: str) -> Diagnosis:
    """The diagnosis of a run without a recorded iteration: its tree of loops, and a plan from its loaders and marks."""
    facts = timeline.facts
    step = next((marks.step for marks in facts.plain_runs.values()), 0)
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
    drawn: bool,
) -> Diagnosis:
    say("finding the steps", 0.0)
    timeline = _with_enclosing_loop(timeline)
    whole = whole_steps(without_timer_reads(within_loop(timeline)), plain_step)
    loop = _loop_named(timeline.facts.run, timeline.facts.loop)
    window = sample(whole, apart=bool(loop))
    say("replaying the plain run", 0.2)
    analysis = StepAnalysis.of(window, plain_step, workers)
    say("fixing each cause", 0.5)
    # recording a whole run does not slow it down: that run is its own plain one
    diagnosis = analysis.diagnosis(whole, plain_step is not None or timeline.facts.is_whole, what_if)
    say("searching for the plan", 0.7)
    plan, run = plan_of(analysis.inputs, analysis.forecast, analysis.findings), timeline.facts.run
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
        loops=(*_loops(timeline, workers, run, drawn), *_rare(timeline, whole, loop, workers, drawn)),
        turns=analysis.turns() if drawn else None,
        draw=analysis.turns,
        notes=(
            *_notes(whole, analysis, diagnosis.plain_given),
            *diagnosis.notes,
            *_behind_others(analysis, plan),
        ),
    )
    if run is not None or diagnosis.plain_runs:  # a trace has only steps, and their plan is all there is
        plan = plan_of_run(diagnosis, timeline.facts.loaders, () if len(timeline.meetings) else timeline.facts.uneven)
    causes = tuple(_as_planned(cause, plan) for cause in diagnosis.causes)
    return replace(
        diagnosis, plan=plan, causes=causes, harmless=without_planned(diagnosis.harmless, (*diagnosis.plan, *plan))
    )


_STRETCHES = 8


def _stretches(timeline: Timeline) -> tuple[int, ...]:
    """The median step in each eighth of the run, which shows how the machine drifts. Empty if too few were timed."""
    facts, steps = timeline.facts, np.zeros(0, np.int64)
    if facts.plain_runs:
        steps = np.array(next(iter(facts.plain_runs.values())).course.step, np.int64)
    elif facts.is_whole and len(timeline.marks):
        steps = np.diff(timeline.spans.start[timeline.marks_of(timeline.ranks[0])])
    if len(steps) < 2 * _STRETCHES:
        return ()
    return tuple(round(float(np.median(part))) for part in np.array_split(steps, _STRETCHES))


def _notes(whole: Timeline, analysis: StepAnalysis, plain_given: bool) -> Iterator[str]:
    """What a reader should know before trusting the figures, a sentence each. The recorder's own notes come first."""
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
        # in a live run the plain step and the recording are of the same program, so only the machine can differ
        explanation = "the machine may have been busy. Record again, or with another --after."
        if facts.recorded is None:
            explanation = "are they of the same program and machine?"
        yield f"The plain step and the recorded steps differ by more than recording explains: {explanation}"


def _notes_on_missing_ranks(whole: Timeline) -> Iterator[str]:
    facts, ranks, spans = whole.facts, len(whole.ranks), whole.spans
    groups = np.unique(spans.group[spans.kind == Kind.COLLECTIVE]).tolist()
    if facts.cluster is not None:
        yield f"{ranks} ranks were kept whole, the latest among them. Step, causes and plan are those of these ranks."
    elif ranks > 1 and (facts.world or 0) > ranks:
        yield f"{ranks} of the run's {facts.world} ranks were recorded. Waiting for the others counts as communication."
    elif any(facts.groups.get(group, 2) > ranks for group in groups):
        yield "Other ranks were not recorded, so waiting for them counts as communication."


def _behind_others(analysis: StepAnalysis, plan: Sequence[PlannedFix]) -> Iterator[str]:
    """A sentence for each cause that no plan fixes, that costs nothing now, and would once other causes are fixed. Late
    ranks are left out: without other causes even noise between ranks shows."""
    planned = {"peer_late", *(cause for fix in plan for cause in fix.causes)}
    for cause, gain in analysis.behind_others().items():
        if cause not in planned:
            finding, per_step = analysis.findings[cause], analysis.inputs.steps * len(analysis.inputs.timeline.ranks)
            place, *more = sorted(finding.places, key=lambda candidate: -len(finding.places[candidate]))
            others, often = f" and {len(more)} more" if more else "", finding.count / per_step
            yield (
                f"{cause} at {place}{others} ({times(often)}) costs nothing now, and {duration(gain)} once the other "
                "causes are fixed."
            )


def without_planned(harmless: Sequence[Harmless], plan: Sequence[PlannedFix]) -> tuple[Harmless, ...]:
    """Leaves out what some fix of the plan removes: it saves time together with others, if not alone.

    Also leaves out a loader that the run waits for. The plan names it where it is created, and recorded steps may not
    have waited.
    """
    planned = {(cause, str(place)) for fix in plan for cause in fix.causes for place in fix.where}
    waits = any("input_late" in fix.causes for fix in plan)
    candidates = (candidate for candidate in harmless if not (waits and candidate.cause == "input_late"))
    return tuple(candidate for candidate in candidates if (candidate.cause, str(candidate.where)) not in planned)


def _as_planned(cause: Cause, plan: Sequence[PlannedFix]) -> Cause:
    """The cause with the plan's fix: the plan knows how many workers keep up, and which of several fixes saves most."""
    fixes_of_steps = [fix for fix in plan if cause.cause in fix.causes and not fix.loop]
    matching = [fix for fix in fixes_of_steps if str(cause.where) in map(str, fix.where) or fix.api == cause.api]
    if not matching:
        return cause
    return replace(cause, fix=matching[0].fix, advice=matching[0].advice, remedy=matching[0].code, api=matching[0].api)


def _steps_of_run(timeline: Timeline, whole: Timeline) -> int:
    """The number of steps of a run whose marks were not counted. One step may be several marked ones."""
    facts = timeline.facts
    if facts.own_loop is not None and facts.own_loop.turns:
        return facts.own_loop.turns
    enclosing = _loop_of_marks(timeline)
    if enclosing is not None and facts.plain_step and (facts.loop or not facts.plain_runs):
        return enclosing.time // facts.plain_step
    marked = max((marks.steps + marks.warm_up for marks in facts.plain_runs.values()), default=0)
    if enclosing is not None and 2 * enclosing.turns < marked:  # most marks are in a loop that was not recorded
        return enclosing.turns
    if not timeline.facts.is_whole or timeline.facts.plain_runs:
        return 0
    marked, steps = len(timeline.marks_of(timeline.ranks[0])), len(whole.marks_of(whole.ranks[0]))
    return round(steps * (timeline.facts.first_steps + marked) / (marked - 1)) if marked > steps > 1 else steps


def _with_enclosing_loop(timeline: Timeline) -> Timeline:
    """Adds a window on the enclosing loop, from what was recorded between two runs of the loop, if there is none."""
    run = timeline.facts.run
    if run is None or (inner := timeline.facts.own_loop) is None:
        return timeline
    enclosing = next((part for part in run.within() if inner in part.parts), None)
    recorded = {window.facts.reason.place for window in timeline.further if window.facts.reason}
    if enclosing is None or enclosing.kind != LOOP or enclosing.named in recorded:
        return timeline
    if any(part.comes_rarely(inner) for part in inner.parts):
        return timeline  # between two runs of the loop may be that rare part, which is a loop of its own
    timeline = marked_beside(timeline)
    between = enclosing_iteration(timeline)
    if between is None:
        return timeline
    within = sum(part.time for part in enclosing.parts if part.kind == LOOP) // max(1, enclosing.turns)
    window = between.change(further=()).change_facts(
        plain_step=max(1, enclosing.usual - within) + inner.usual,
        loop=enclosing.named,
        reason=WindowReason(LOOP, place=enclosing.named),
        notes=(),
    )
    return timeline.change(further=(*timeline.further, window))


def _loops(timeline: Timeline, workers: int, run: Part | None, drawn: bool) -> tuple[LoopDiagnosis, ...]:
    """Other loops of the run that were recorded, each explained by its own iterations."""
    diagnoses = []
    for window in timeline.further:
        if window.facts.reason is None or window.facts.reason.why != LOOP:
            continue
        place = _loop_named(run, window.facts.reason.place)
        with suppress(BadInput):
            loop = run.loop_at(place) if run is not None else None
            part = replace(loop, decides=run.decides) if loop is not None and run is not None else None
            diagnosis = explain(window.change_facts(run=part), workers=workers, turns=drawn)
            if diagnosis.steps:
                iterations = loop.turns if loop is not None else 0  # 0 if they were not counted
                diagnoses.append(LoopDiagnosis(place, iterations, replace(diagnosis, run=None)))
    return tuple(diagnoses)


def _rare(timeline: Timeline, whole: Timeline, loop: str, workers: int, drawn: bool) -> Iterator[LoopDiagnosis]:
    """Steps that take far longer than others and are rare, as a loop of their own."""
    rare = rare_steps(whole)
    if loop and rare is not None:
        steps, recorded = rare
        iterations = round(recorded * max(1.0, _steps_of_run(timeline, whole) / len(whole.marks_of(whole.ranks[0]))))
        analysis = StepAnalysis.of(steps.change_facts(plain_step=None, plain_runs={}), None, workers)
        plan = plan_of(analysis.inputs, analysis.forecast, analysis.findings)
        drawing = analysis.turns() if drawn else None
        diagnosis = replace(analysis.diagnosis(steps, True, ()), plan=plan, run=None, turns=drawing)
        yield LoopDiagnosis(f"{loop} (its {iterations} longest iterations)", iterations, diagnosis)


def _loop_named(run: Part | None, name: str) -> str:
    """The name by which the run's tree calls it."""
    loop = run.loop_at(name) if run is not None and name else None
    return loop.named if loop is not None else name


def _loop_of_marks(timeline: Timeline) -> Part | None:
    """The innermost loop of the run's tree that encloses the recorded iterations."""
    run, frames, lines = timeline.facts.run, timeline.frames, list[tuple[str, int, str]]()
    for frame in frames.around(int(timeline.spans.frame[timeline.marks[0]])) if len(timeline.marks) else ():
        lines += filter(None, [source_line(timeline.names[frames.name[frame]])])
    loops = [part for part in (run.within() if run is not None else ()) if part.kind == LOOP]
    for file, line, function in lines:
        places = [(Where.of(loop.place), loop) for loop in loops if loop.function == function]
        above = [(where.line, loop.turns, loop) for where, loop in places if where.file == file and where.line <= line]
        if above:
            return max(above, key=lambda candidate: candidate[:2])[2]
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
