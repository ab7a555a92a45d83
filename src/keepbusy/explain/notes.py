"""What a reader should know before trusting the figures, a sentence each."""

from __future__ import annotations

import numpy as np

from keepbusy.explain.plain import Plain
from keepbusy.explain.scene import Scene
from keepbusy.timeline.model import Kind, Timeline


def notes_of(whole: Timeline, scene: Scene, plain: Plain, plain_given: bool) -> tuple[str, ...]:
    notes = [*map(str, whole.facts.get("notes", ()))]  # what the recorder has to say itself
    if not plain_given and "recorded" not in whole.facts:
        notes.append(
            "Profiling makes the host slower: a trace shows two to three times the idle time of the plain run. "
            "Time a step without the profiler and give it with --plain-step."
        )
    if not whole.facts.get("values", True):
        notes.append("The run computed nothing: what it would have computed reads as zero.")
    if whole.facts.get("modelled"):
        notes.append("The host's time is modelled: Python, files and loader workers take none, operators do.")
    if not whole.facts.get("stacks", True):
        notes.append("Without stacks the places are operators, not lines; record with with_stack=True for lines.")
    if whole.facts.get("skipped"):
        notes.append(f"{whole.facts['skipped']} events of the trace could not be read, and are missing here.")
    if whole.facts.get("marks_a_step"):
        notes.append(f"{whole.facts['marks_a_step']} marked steps count as one: the plain step given is that long.")
    if left_out := whole.facts.get("left_out", {}).get("steps"):
        which = f"step{'s' if len(left_out) > 1 else ''} {' and '.join(map(str, left_out))}"
        notes.append(f"Of these, {which} stalled as steps do now and then, and is told of apart.")
    steps = len(whole.marks_of(whole.ranks[0]))
    if scene.steps < steps:
        notes.append(f"Replayed were {scene.steps} of the {steps} steps, evenly from the fastest to the slowest.")
    if _peers_missing(whole):
        notes.append("Peers of this rank are not in the recording, so waiting for them counts as the wire.")
    if plain_given and not 0.85 < plain.ratio < 1.15:
        notes.append("The plain step and the recording differ by more than recording explains; " + _why_differ(whole))
    return tuple(notes)


def _why_differ(whole: Timeline) -> str:
    """Plain step and recording of one run are of the same program: only that moment can have been another."""
    if "recorded" in whole.facts:
        return "the recorded steps may have met a busy moment of the machine: record again, or with another --after."
    return "were they of the same program and machine?"


def _peers_missing(timeline: Timeline) -> bool:
    groups = timeline.facts.get("groups") or {}
    met = timeline.spans.group[timeline.spans.kind == Kind.COLLECTIVE]
    return any(groups.get(str(group), 2) > len(timeline.ranks) for group in np.unique(met).tolist())
