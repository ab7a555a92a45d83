"""The whole run in a few lines: its steps, the host's lead, rare stalls, and steps that have changed for good."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from keepbusy.explain.diagnosis import COMPUTING, Cause, Diagnosis, Later, Rare, Where
from keepbusy.report import words
from keepbusy.report.fix_line import fix_line
from keepbusy.report.paper import look
from keepbusy.report.source import source_of
from keepbusy.report.words import duration, share, tame
from keepbusy.timeline.model import NONE
from keepbusy.timeline.plain_run import PlainRun, RareStall

MATTERS = 0.02
"""Of a step: what takes less of it is not told."""
DELAY_MATTERS, STALL_MATTERS = 0.03, 0.01
"""The same, of the run."""
STALLS_SHOWN, CAUSES_SHOWN = 3, 2
"""So many stalls are told, and so many causes of each."""
JITTER = 0.1
"""Of the steps between two stalls: a rank that waits for another one sees the stall a step early or late."""
NO_LEAD, SOME_LEAD = 0.9, 0.1
"""Shares of the steps in which the host has no lead."""
_INTERRUPTIONS = {
    "checkpoint": "a checkpoint",
    "garbage collection": "garbage collection",
    "input": "waiting for input",
}
_LINE = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")


def asides(runs: Mapping[int, PlainRun], looked_at: Sequence[Rare] = ()) -> Iterator[tuple[str, str]]:
    """A label and a sentence each. With several ranks: of the first one, and the rare stalls of all of them."""
    if not runs:
        return
    run = runs[min(runs)]
    if run.steps:
        yield "plain", _steps(run)
    if run.lead != NONE:
        yield "lead", _lead(run)
    for sentence in _of_each_step(run):
        yield "plain", sentence
    left = list(looked_at)
    for rank, stall in _rare(runs):
        yield "rarely", _stall(stall, rank if len(runs) > 1 else NONE)
        mine = next((rare for rare in left if _is_of(rare, stall)), None)
        if mine is not None:
            left.remove(mine)
            yield from (("", sentence) for sentence in of_stall(mine))
    if run.fault:
        yield "note", tame(f"The marks ended before the run did ({run.fault}); report it, please.")


def where_of(stall: RareStall) -> Where:
    """The innermost of its lines."""
    return replace(_where(stall.lines[-1:]), library=stall.library)


def called_at(stall: RareStall) -> Where:
    """The line of the program's loop that led there, if that is another one."""
    return _where(stall.lines[:-1][stall.loop : stall.loop + 1])


def _where(lines: tuple[str, ...]) -> Where:
    known = _LINE.fullmatch(lines[0]) if lines else None
    return Where(known["file"], int(known["line"]), known["function"], exact=True) if known else Where()


def _steps(run: PlainRun) -> str:
    span = words.span_of(run.low, run.high, run.step)
    unit = duration(run.step).partition(" ")[2]
    begun = f" The first {run.warm_up} took {duration(run.warm_up_time)} in all." if run.warm_up else ""
    return f"Eight in ten of {run.steps} plain steps take {span} {unit}.{begun}"


def _lead(run: PlainRun) -> str:
    if run.no_lead >= NO_LEAD:
        return "The host has no lead: when a step ends, the GPU has nothing left to do."
    seldom = f", but in {share(round(1000 * run.no_lead), 1000)} of the steps it has no lead"
    return f"When a step ends, the host is {duration(run.lead)} ahead{seldom if run.no_lead >= SOME_LEAD else ''}."


def _of_each_step(run: PlainRun) -> Iterator[str]:
    """What holds up the host in every step, or in any."""
    for time, what in ((run.input, "waits for input"), (run.collector, "is held up by the garbage collector")):
        if time >= max(1, MATTERS * run.step):
            yield f"The host {what} for {duration(time)} of each step ({share(time, run.step)})."
    if run.delayed >= DELAY_MATTERS:
        lost = share(round(1000 * run.delayed), 1000)
        yield f"For {lost} of the run the program was ready to go on, but other work had the host's processors."
    if run.requests >= MATTERS:
        yield f"PyTorch asks the driver for memory {words.count(run.requests)} times a step, also after the warm-up."
    if run.retries:
        yield f"The memory was full {run.retries} times: PyTorch gave back what it had cached and asked again."


def _rare(runs: Mapping[int, PlainRun]) -> list[tuple[int, RareStall]]:
    """The largest first. Ranks wait for each other, so of those that stall together the one with a reason is told."""
    every = [
        (rank, stall) for rank, run in sorted(runs.items()) for stall in run.stalls if stall.share >= STALL_MATTERS
    ]
    every.sort(key=lambda one: (-bool(one[1].what), -bool(one[1].lines), -one[1].share))
    kept: list[tuple[int, RareStall]] = []
    for rank, stall in every:
        if not any(_comes_with(stall, other) for _, other in kept):
            kept.append((rank, stall))
    return sorted(kept, key=lambda one: -one[1].share)[:STALLS_SHOWN]


def _comes_with(stall: RareStall, other: RareStall) -> bool:
    """Whether it is the other one, seen once apart or by another rank, which waits meanwhile."""
    if stall.count == other.count and round(stall.every) == round(other.every):
        return True
    as_often = stall.count == 1 or abs(stall.every - other.every) <= JITTER * other.every
    return other.punctual and as_often and not stall.what and other.comes_in(stall.last)


def _is_of(rare: Rare, stall: RareStall) -> bool:
    return round(rare.stall.every) == round(stall.every) and stall.comes_in(rare.step)


def _stall(stall: RareStall, rank: int) -> str:
    where = where_of(stall)
    source = source_of(where) if where.file else None
    place = f" at {words.spot(where, 50)}" if where.file else ""
    place += f" ({tame(where.library, 50)})" if where.library else ""
    text = f": {words.cut(source.text, 50)}" if source else ""
    caller = called_at(stall)
    text += f", called{words.at(caller, 50)}" if caller.file else ""
    on = f" on rank {rank}" if rank != NONE else ""
    what = f" of {_INTERRUPTIONS[stall.what]}" if stall.what in _INTERRUPTIONS else ""
    return f"{_when(stall)} {duration(stall.time)}{what}{on}{place}{text} · {_of_the_run(stall)}"


def _when(stall: RareStall) -> str:
    if stall.count == 1:
        return "Once"
    if stall.regular:
        return f"Every {words.count(stall.every)} steps"
    return f"{stall.count} times"


def _of_the_run(stall: RareStall) -> str:
    return f"{share(round(1e6 * stall.share), 10**6)} of the run"


def of_stall(rare: Rare) -> Iterator[str]:
    """Why such a step takes long, and what fixing it gains a step, averaged over those between that do not stall."""
    if not rare.causes:
        yield _no_cause(rare)
    for number, cause in enumerate(rare.causes[:CAUSES_SHOWN]):
        before, after = rare.plain_step, cause.predicted.step
        fixed = f"fixed, such a step takes {words.transition(before, after)}"
        yield f"{_place(cause)} · {fixed}: {duration(rare.gain_of(cause.predicted))} less a step on average"
        code = fix_line(cause)
        if code and code not in [fix_line(one) for one in rare.causes[:number]]:
            yield f"fix: {code}"


def _no_cause(rare: Rare) -> str:
    busy = share(rare.ledger.get(COMPUTING, 0), rare.plain_step)
    return f"In step {rare.step}, which was looked at, the GPU computes for {busy} of it: no fix gains much there."


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
    if (cause := new or grown) and (code := fix_line(cause)):
        yield f"fix: {code}"


def _new(first: Diagnosis, now: Diagnosis) -> Cause | None:
    """A cause that was not there before, and whose fixing gives back most of what was lost since."""
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
