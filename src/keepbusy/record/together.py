"""The ranks of one recorded run in one timeline, the same steps of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from keepbusy.record.left import RECORDED
from keepbusy.timeline.model import Timeline
from keepbusy.timeline.ranks import merge


def together(timelines: Sequence[Timeline]) -> Timeline:
    """A rank that ended early has fewer steps than the others: what is told of all are the steps that all took."""
    numbers = [list(one.facts.get("recorded", ())) for one in timelines]
    shared = sorted(set.intersection(*map(set, numbers)))
    notes = dict.fromkeys(note for one in timelines for note in _notes(one, first=one is timelines[0]))
    whole = merge([_with_steps(one, mine, shared) for one, mine in zip(timelines, numbers, strict=True)])
    facts = {key: value for key, value in whole.facts.items() if key != "sources"}  # it is one program
    told = {**facts, "recorded": shared, "notes": list(notes)}
    return whole.change(facts=told, further=tuple(_further(timelines)))


def _further(timelines: Sequence[Timeline]) -> Iterator[Timeline]:
    """Each rank decides for itself where it looks again; those that saw the same steps saw the same."""
    alike: dict[tuple[int, ...], list[Timeline]] = {}
    for one in timelines:
        for again in one.further:
            alike.setdefault(tuple(again.facts["recorded"]), []).append(again)
    for ranks in alike.values():
        whole = merge(ranks)
        yield whole.change(facts={key: value for key, value in whole.facts.items() if key != "sources"})


def _notes(timeline: Timeline, first: bool) -> list[str]:
    """Which steps were recorded is said once."""
    notes = [str(note) for note in timeline.facts.get("notes", ())]
    return notes if first else [note for note in notes if not note.startswith(RECORDED)]


def _with_steps(timeline: Timeline, numbers: Sequence[int], wanted: Sequence[int]) -> Timeline:
    if len(numbers) != len(timeline.marks) or len(wanted) < 3:
        return timeline
    return timeline.change(marks=timeline.marks[np.isin(numbers, wanted)])
