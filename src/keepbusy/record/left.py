"""What a recorded process left in its folder -> `Timeline`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.record.events import Category, Trace
from keepbusy.record.files import read_trace
from keepbusy.record.folder import LINES, TRACE, facts_in
from keepbusy.record.kineto import timeline_of
from keepbusy.record.placed import Tick, placed
from keepbusy.record.seen import Seen
from keepbusy.timeline.errors import BadInput
from keepbusy.timeline.model import Timeline

RECORDED = "Recorded were"
"""How the note on what was recorded begins."""


def timeline_in(folder: Path, facts: Mapping[str, Any]) -> Timeline:
    """The window, its lines and the plain run. Raises BadInput with the reason where there is no window."""
    left = facts_in(folder)
    trace = _trace(folder, left, str(facts.get("source", "the program")))
    timeline = timeline_of(trace, left.get("rank", 0))
    return timeline.change(facts={**timeline.facts, **_told(left, trace), **facts})


def _trace(folder: Path, left: Mapping[str, Any], source: str) -> Trace:
    if not (folder / TRACE).exists():
        raise BadInput(_why_not(left, source))
    trace = read_trace(folder / TRACE)
    if not (trace.events.category <= Category.FILL).any():
        raise BadInput(_no_commands(trace, source))
    ticks = [Tick(*tick) for tick in left.get("ticks", ())]
    seen = Seen.load(folder / LINES) if (folder / LINES).exists() else Seen.nothing()
    return placed(trace, seen, ticks)


def _told(left: Mapping[str, Any], trace: Trace) -> dict[str, Any]:
    has_lines = bool((trace.events.category == Category.LINE).any())
    told = {"stacks": has_lines, "marks": left.get("marks", {}), "notes": _notes(left)}
    plain = left.get("plain_step")
    return told | {"recorded": [tick[0] for tick in left.get("ticks", ())]} | ({"plain_step": plain} if plain else {})


def _notes(left: Mapping[str, Any]) -> list[str]:
    notes = list(left.get("notes", ()))
    ticks = left.get("ticks", ())
    if len(ticks) > 1:
        notes.insert(
            0,
            f"{RECORDED} steps {ticks[0][0] + 1} to {ticks[-1][0]} of {left['steps']}; opening and closing the "
            f"recorder held the program up for {left['cost'] / 1e9:.1f} s, once.",
        )
    if not left.get("plain_step"):
        notes.append("Too few steps were taken without the recorder to know what a plain step takes: let it take 20.")
    return notes


def _why_not(left: Mapping[str, Any], source: str) -> str:
    if not left:
        return f"{source} ended before keepbusy could write down anything."
    if left.get("notes"):
        return f"{source} was not recorded. {' '.join(left['notes'])}"
    steps, after = left.get("steps", 0), left.get("after", 0)
    if not steps:
        return (
            f"{source} took no step: none of its optimizers stepped; "
            "call keepbusy.step() at the end of each step, wherever the program has one."
        )
    return (
        f"{source} ended after {steps} steps, and recording begins after {after}; "
        "let it take 20 steps, or give --after with a smaller number."
    )


def _no_commands(trace: Trace, source: str) -> str:
    if np.count_nonzero(trace.events.category == Category.RUNTIME):
        return (
            f"{source} launched work, but CUPTI reported nothing of it: another tool (Nsight, DCGM) holds the GPU's "
            "counters, or this user may not read them; stop the other tool, or ask for the permission."
        )
    return f"{source} ran nothing on the GPU while it was recorded."
