"""Explain a timeline: which causes make the GPU wait, where they are, and what mending them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keepbusy.explain.causes import FINDERS
from keepbusy.explain.diagnosis import CAUSES, Diagnosis
from keepbusy.explain.further import later_of, left_unexplained, ordinary_steps, rare_of
from keepbusy.explain.plain import as_recorded
from keepbusy.explain.story import Story
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.steps import sample, whole_steps

__all__ = ["CAUSES", "explain"]

Say = Callable[[str, float], Any]
"""Who wants to know how far it is: what is being done, and which share is done."""


def explain(
    timeline: Timeline,
    plain_step: int | None = None,
    mend: Sequence[str] = (),
    workers: int = 8,
    on_progress: Say | None = None,
) -> Diagnosis:
    """Why the GPU waits. `plain_step`: nanoseconds a step without a profiler; shares and gains refer to it.

    A run that was recorded live knows its own. Where that does not fit what was recorded, the recorded steps are
    explained as they are, and a note says so: better than to tell nothing.
    """
    _refuse_unknown(mend)
    say, own = on_progress or _quiet, timeline.facts.plain_step
    if plain_step is not None or own is None:
        return _explained(timeline, plain_step, mend, workers, say)
    try:
        return _explained(timeline, own, mend, workers, say)
    except BadInput as misfit:
        return _explained(as_recorded(timeline, misfit), None, mend, workers, say)


def _explained(timeline: Timeline, plain_step: int | None, mend: Sequence[str], workers: int, say: Say) -> Diagnosis:
    say("finding the steps", 0.0)
    whole = whole_steps(ordinary_steps(timeline), plain_step)
    window = sample(whole)
    say("replaying the plain run", 0.2)
    story = Story.of(window, plain_step, workers, mend)
    say("mending each cause", 0.5)
    # nothing was recorded on a virtual GPU at the cost of the host: that run is its own plain one
    told = story.told(whole, plain_step is not None or timeline.facts.virtual)
    rare = rare_of(timeline, told, workers)
    notes = (*told.notes, *left_unexplained(timeline, rare))
    return replace(told, rare=rare, later=later_of(timeline, workers), notes=notes)


def _quiet(what: str, share: float) -> None:
    """Nobody asked to be told."""


def _refuse_unknown(mend: Sequence[str]) -> None:
    for cause in mend:
        if cause not in FINDERS:
            raise BadInput(f"{cause!r} is no cause that can be mended; the causes are {', '.join(FINDERS)}.")
