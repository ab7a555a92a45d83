"""What further windows have shown, in a few lines: of a rare stall, and of steps that have changed for good."""

from __future__ import annotations

from collections.abc import Iterator

from keepbusy.explain.diagnosis import COMPUTING, Cause, Diagnosis, Later, Rare
from keepbusy.report import words
from keepbusy.report.places import look
from keepbusy.report.source import source_of
from keepbusy.report.words import duration, share, tame

MOST = 2
"""Causes of one stall that are told."""


def of_stall(rare: Rare) -> Iterator[str]:
    """Why such a step takes long, and what mending it gains a step, averaged over those between that do not stall."""
    if not rare.causes:
        yield _no_cause(rare)
    for number, cause in enumerate(rare.causes[:MOST]):
        before, after = rare.plain_step, cause.predicted.step
        mended = f"mended, such a step takes {words.transition(before, after)}"
        yield f"{_place(cause)} · {mended}: {duration(rare.gain_of(cause.predicted))} less a step on average"
        if cause.remedy not in [one.remedy for one in rare.causes[:number]]:
            yield f"mend: {tame(cause.remedy)}"


def _no_cause(rare: Rare) -> str:
    busy = share(rare.ledger.get(COMPUTING, 0), rare.plain_step)
    return f"In step {rare.step}, which was looked at, the GPU computes for {busy} of it: no mending gains much there."


def _place(cause: Cause) -> str:
    source = source_of(cause.where)
    text = f": {words.cut(source.text, 60)}" if source else ""
    return f"{look(cause.cause).name}{words.at(cause.where, 50)}{text}"


def of_change(first: Diagnosis, later: Later) -> Iterator[str]:
    """Since when, by how much, and what has changed most; with what to do where that is a cause that grew."""
    now = later.diagnosis
    step = f"{duration(now.plain_step)} instead of {duration(first.plain_step, now.plain_step)}"
    new, place = _new(first, now), _changed_most(first, now)
    what = _without(new) if new else _what_changed(place, first, now)
    yield f"Since step {later.since} a step takes {step}, {words.change(first.plain_step, now.plain_step)}: {what}"
    grew = now.ledger.get(place, 0) > first.ledger.get(place, 0)
    grown = next((one for one in now.causes if grew and one.cause == place), None)
    if cause := new or grown:
        yield f"mend: {tame(cause.remedy)}"


def _new(first: Diagnosis, now: Diagnosis) -> Cause | None:
    """A cause that was not there before, and whose mending gives back most of what was lost since."""
    before, lost = {one.cause for one in first.causes}, now.plain_step - first.plain_step
    new = [one for one in now.causes if one.cause not in before]
    return next((one for one in new if lost > 0 and 2 * (now.plain_step - one.predicted.step) >= lost), None)


def _without(cause: Cause) -> str:
    return f"{_place(cause)}, which cost nothing before; without it {duration(cause.predicted.step)}"


def _changed_most(first: Diagnosis, now: Diagnosis) -> str:
    """Of the places that a step's time goes to, the one that has moved the way the step has."""
    longer = 1 if now.plain_step >= first.plain_step else -1
    places = dict.fromkeys([*now.ledger, *first.ledger])
    return max(places, key=lambda place: longer * (now.ledger.get(place, 0) - first.ledger.get(place, 0)))


def _what_changed(place: str, first: Diagnosis, now: Diagnosis) -> str:
    was, is_now = first.ledger.get(place, 0), now.ledger.get(place, 0)
    cause = next((one for run in (now, first) for one in run.causes if one.cause == place), None)
    where = _place(cause) if cause else look(place).name
    return f"{where}, {words.transition(was, is_now)} of it"
