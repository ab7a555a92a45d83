"""The ranks of one recorded run in one timeline, the same steps of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keepbusy.recording.line_log import LineRecord, Stretch
from keepbusy.recording.recorder import FACTS
from keepbusy.recording.windows import LINES, TRACE, Tick
from keepbusy.timeline.figures import duration, fixed
from keepbusy.timeline.files import BadInput, typed
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.timeline.model import Ints, Lane, Mask, Spans, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.run_facts import LOOP, SCRIPT, CutShort, LoaderUse, Part, PlainRun, WindowReason, ran_nothing
from keepbusy.traces.kineto_names import Category
from keepbusy.traces.rank_timeline import timeline_of
from keepbusy.traces.trace_file import Events, Trace, read_trace


def facts_in(folder: Path) -> dict[str, Any]:
    """What the process knew of itself; nothing if it did not live to write it."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts


# What a recorded process left in its folder -> `Timeline`.

NOTE_OF_RECORDED = "Recorded were"
"""How the note on what was recorded begins."""


def timeline_in(folder: Path, facts: Mapping[str, Any]) -> Timeline:
    """The window, its lines and the plain run. Raises BadInput with the reason where there is no window."""
    left = _with_a_window(folder, facts_in(folder))
    trace = _trace(folder, left, str(facts.get("source", "the program")))
    timeline = timeline_of(trace, left.get("rank", 0))
    told = {**_facts_of_window(left, trace), **_of_the_run(left, timeline.ranks[0]), "notes": _notes(left), **facts}
    told |= {"reason": _reason(left)} if left.get("why") == SCRIPT else {}
    return timeline.change_facts(**told).change(further=tuple(_further(folder, left, facts)))


def without_turns(folder: Path, facts: Mapping[str, Any]) -> Timeline:
    """Of a run that was not recorded closely: no spans, but its tree, its marks and its loaders."""
    left = facts_in(folder)
    rank = left.get("rank", 0)
    nothing = Timeline((Lane(rank, None, 0),), (), Spans.of(0))
    return nothing.change_facts(**_of_the_run(left, rank), **facts)


def _of_the_run(left: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What is known of the whole run, wherever its windows were."""
    marks = PlainRun.of_fact(left.get("marks"))
    return {
        "plain_runs": {rank: marks} if marks else {},
        "run": typed(Part, left["run"]) if left.get("run") else None,
        "loaders": tuple(typed(LoaderUse, one) for one in left.get("loaders", ())),
        "allocator": left.get("allocator"),
        "cut_short": typed(CutShort, left["cut_short"]) if left.get("cut_short") else None,
    }


def _with_a_window(folder: Path, left: dict[str, Any]) -> dict[str, Any]:
    """Where the program took no steps, the loop that was looked at first stands for them; where there is no loop
    either, the script."""
    looks = [look for look in left.get("further", ()) if (folder / look["folder"] / TRACE).exists()]
    loops = [look for look in looks if look["why"] == LOOP and len(look["ticks"]) > 2]
    left["further"] = [look for look in left.get("further", ()) if look["why"] != SCRIPT]
    loops += [look for look in looks if look["why"] == SCRIPT]
    if (folder / TRACE).exists() or not loops:
        return left
    within = folder / loops[0]["folder"]
    (within / TRACE).replace(folder / TRACE)
    if (within / LINES).exists():
        (within / LINES).replace(folder / LINES)
    rest = [look for look in left["further"] if look is not loops[0]]
    first = {name: loops[0][name] for name in ("ticks", "cost", "plain_step", "cut", "part", "why", "about")}
    return {**left, **first, "further": rest, "opened": 1, "closed": True}


def _further(folder: Path, left: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[Timeline]:
    """What the other windows saw. One that the program's end has cut off tells nothing."""
    for look in left.get("further", ()):
        within = folder / look["folder"]
        with suppress(BadInput):
            trace = _trace(within, look, str(facts.get("source", "")))
            timeline = timeline_of(trace, left.get("rank", 0))
            told = {"reason": _reason(look), "allocator": left.get("allocator")}
            yield timeline.change_facts(**{**_facts_of_window(look, trace), **told, **facts})


def _reason(look: Mapping[str, Any]) -> WindowReason:
    return typed(WindowReason, {"why": look["why"], **look["about"]})


def _trace(folder: Path, left: Mapping[str, Any], source: str) -> Trace:
    if not (folder / TRACE).exists():
        raise BadInput(_why_not(left, source))
    trace = read_trace(folder / TRACE)
    if not (trace.events.category <= Category.FILL).any():
        raise BadInput(_no_commands(trace, left, source))
    ticks = [Tick(*tick) for tick in left.get("ticks", ())]
    lines = LineRecord.load(folder / LINES) if (folder / LINES).exists() else LineRecord.nothing()
    return placed(trace, lines, ticks)


def _facts_of_window(left: Mapping[str, Any], trace: Trace) -> dict[str, Any]:
    has_lines = bool((trace.events.category == Category.LINE).any())
    told = {"stacks": has_lines, "recorded": tuple(tick[0] for tick in left.get("ticks", ()))}
    loop = left.get("about", {}).get("place") or left.get("loop", "")
    told |= {"loop": loop, "beside": tuple(left.get("beside", ()))}
    if left.get("cut"):
        told |= {"one_turn": True, "recorded": None}
    known = left.get("plain_step") and not left.get("part")
    return told | ({"plain_step": left["plain_step"]} if known else {})


def _notes(left: Mapping[str, Any]) -> tuple[str, ...]:
    notes = list(left.get("notes", ()))
    looks = [look for look in (left, *left.get("further", ())) if len(look.get("ticks", ())) > 1]
    if left.get("why") == SCRIPT:
        return (_part_of_a_script(left), *notes)
    if left.get("part"):
        notes.insert(0, _part_of_a_turn(left))
    elif looks:
        notes.insert(0, _what_was_recorded(looks, left["steps"], left.get("held_up", 0)))
    if not left.get("plain_step"):
        notes.append("Too few steps were taken without the recorder to know what a plain step takes: let it take 20.")
    return tuple(notes)


def _part_of_a_turn(left: Mapping[str, Any]) -> str:
    """To close a window takes as long as all that it has seen, so a long step is not recorded to its end."""
    (number, began, _), (_, _, ended) = left["ticks"]
    takes = f"takes {duration(left['plain_step'])}" if left.get("plain_step") else "is long"
    return (
        f"{NOTE_OF_RECORDED} the first {duration(ended - began)} of step {number + 1}. A step {takes}: "
        "what is said here of its causes is said of that part alone."
    )


def _part_of_a_script(left: Mapping[str, Any]) -> str:
    (_, began, _), (_, _, ended) = left["ticks"]
    return (
        f"{NOTE_OF_RECORDED} {fixed(ended - began, 's', 1)} s of the script, from "
        f"{fixed(left['about']['since'], 's', 1)} s on; opening and closing the recorder held the program "
        f"up for {fixed(left['cost'], 's', 1)} s."
    )


def _what_was_recorded(looks: Sequence[Mapping[str, Any]], steps: int, held_up: int) -> str:
    first, *further = [f"{look['ticks'][0][0] + 1} to {look['ticks'][-1][0]}" for look in looks]
    again = f", and again {' and '.join(further)}" if further else ""
    which = f"steps {first} of {steps}" if steps else f"turns {first} of the loop"  # nobody marked any step
    cost = held_up or sum(look["cost"] for look in looks)
    return (
        f"{NOTE_OF_RECORDED} {which}{again}; opening and closing the recorder held the program up "
        f"for {fixed(cost, 's', 1)} s{' in all' if further else ', once'}."
    )


def _why_not(left: Mapping[str, Any], source: str) -> str:
    if not left:
        return f"{source} ended before keepbusy could write down anything."
    if left.get("notes"):
        return f"{source} was not recorded. {' '.join(left['notes'])}"
    steps, after = left.get("steps", 0), left.get("after", 0)
    if not steps and not left.get("uses_gpu", True):
        return f"{source} used no GPU, so there is nothing that one could have waited for."
    if not steps:
        return (
            f"{source} took no step: none of its optimizers stepped; "
            "call keepbusy.step() at the end of each step, wherever the program has one."
        )
    if left.get("opened", 0) > 0:
        return (
            f"{source} ended while its steps were recorded, which began after {left['opened']}; "
            "what they showed is lost with it; give --after to record earlier or later."
        )
    return (
        f"{source} ended after {steps} steps, and recording begins after {after}; "
        "let it take 20 steps, or give --after with a smaller number."
    )


def _no_commands(trace: Trace, left: Mapping[str, Any], source: str) -> str:
    if left.get("blind") or np.count_nonzero(trace.events.category == Category.RUNTIME):
        return (
            f"{source} launched work, but CUPTI reported nothing of it. Another tool (Nsight, DCGM) may hold the GPU's "
            "counters, or this user may not read them. Or the process profiled its CPU alone before, after which "
            "PyTorch 2.13 records no GPU. Stop the other tool, ask for the permission, or leave that profile out."
        )
    if not left.get("uses_gpu", True):
        return ran_nothing(source, bool((trace.events.category == Category.OPERATOR).any()))
    return f"{source} ran nothing on the GPU while it was recorded."


MAIN_SHARE = 0.5
"""Of the time of all steps: where more of it has passed since they changed, these are the ones to explain."""


def together(timelines: Sequence[Timeline]) -> Timeline:
    """All ranks of one program, in each of its windows; the principal one shows what most of the run was like."""
    whole = _of_all(timelines)
    notes = dict.fromkeys(note for one in timelines for note in _notes_of_all(one, first=one is timelines[0]))
    whole = whole.change_facts(notes=tuple(dict.fromkeys([*notes, *whole.facts.notes])))
    further = []
    for one in _further_of_all(timelines):
        share = one.facts.reason.share if one.facts.reason else None
        if share is not None and share > MAIN_SHARE and one.ranks == whole.ranks:
            whole = _since_the_change(whole, one)
        elif share != 0:
            further.append(one)
    return whole.change(further=tuple(further))


def _of_all(timelines: Sequence[Timeline]) -> Timeline:
    """A rank may have closed its window early: what is told of all are the steps that all took."""
    numbers = [one.facts.recorded or () for one in timelines]
    shared = sorted(set.intersection(*map(set, numbers)))
    whole = merge([_with_steps(one, mine, shared) for one, mine in zip(timelines, numbers, strict=True)])
    return whole.change_facts(sources=(), recorded=tuple(shared) if any(numbers) else None)  # it is one program


def _further_of_all(timelines: Sequence[Timeline]) -> Iterator[Timeline]:
    """Those of the first rank, each with that of every other rank that heard of it in time."""

    def number(window: Timeline) -> int:
        return window.facts.reason.number if window.facts.reason else 0

    for mine in timelines[0].further:
        others = [one for rank in timelines[1:] for one in rank.further if number(one) == number(mine) != 0]
        yield _of_all([mine, *others])


def _since_the_change(first: Timeline, later: Timeline) -> Timeline:
    """The window in which steps were as in most of the run, with all that is known of the run itself."""
    assert later.facts.reason is not None  # for which it was chosen
    now, before = (duration(one.facts.plain_step) if one.facts.plain_step else "?" for one in (later, first))
    since = f"Since step {later.facts.reason.began} a step takes {now}, and {before} before"
    note = f"{since}: what is explained are the later ones, in which most of the run's time passed."
    own = replace(later.facts, reason=None, notes=(*first.facts.notes, note))
    of_run = ("source", "plain_runs", "run", "loaders", "loop")
    facts = replace(own, **{name: getattr(first.facts, name) for name in of_run})
    return later.change(facts=facts)


def _notes_of_all(timeline: Timeline, first: bool) -> list[str]:
    """Which steps were recorded is said once."""
    notes = list(timeline.facts.notes)
    return notes if first else [note for note in notes if not note.startswith(NOTE_OF_RECORDED)]


def _with_steps(timeline: Timeline, numbers: Sequence[int], wanted: Sequence[int]) -> Timeline:
    if len(numbers) != len(timeline.marks) or len(wanted) < 3:
        return timeline
    kept = np.isin(numbers, wanted)
    number = np.cumsum(kept) - 1
    beside = tuple(int(number[one]) for one in timeline.facts.beside if kept[one])
    return timeline.change(marks=timeline.marks[kept]).change_facts(beside=beside)


# The lines seen, as events of the trace and in its own time, so that they enclose its operators.

_TRIAL_STEP = 100
_TRIALS = 64
SHORTEST_LINE = 20_000
"""A shorter line that called nothing of PyTorch's tells nothing: pure Python has a hundred thousand of them."""


def placed(trace: Trace, record: LineRecord, ticks: Sequence[Tick]) -> Trace:
    """The trace with the lines seen, and with our marks as what they are: the profiler takes them for operators."""
    ours = trace.begins(OWN_STEP)
    category = np.where(ours, Category.ANNOTATION, trace.events.category)
    trace = replace(trace, events=trace.events.change(category=category))
    number = {thread.number: index for index, thread in enumerate(trace.threads)}
    stretches = [one for one in record.stretches() if str(one.thread) in number]
    if not stretches or not ours.any():
        return trace
    thread = np.array([number[str(one.thread)] for one in stretches], np.int64)
    start, end = (
        np.array(column, np.int64) for column in zip(*((one.start, one.end) for one in stretches), strict=True)
    )
    shift = trace_offset(trace, ticks, {one: start[thread == one] for one in np.unique(thread).tolist()})
    tells = (end - start >= SHORTEST_LINE) | _holds_something(trace, thread, start + shift, end + shift)
    told = [one for one, kept in zip(stretches, tells.tolist(), strict=True) if kept]
    return _with_lines(trace, record, told, thread[tells], shift)


def _holds_something(trace: Trace, thread: Ints, start: Ints, end: Ints) -> Mask:
    """Whether anything that the profiler saw of the thread began meanwhile."""
    found = np.zeros(len(thread), bool)
    for one in np.unique(thread).tolist():
        mine = thread == one
        begins = np.sort(trace.events.start[trace.events.thread == one])
        found[mine] = np.searchsorted(begins, start[mine]) < np.searchsorted(begins, end[mine])
    return found


def _with_lines(trace: Trace, record: LineRecord, stretches: Sequence[Stretch], thread: Ints, shift: int) -> Trace:
    number: dict[str, int] = {}
    names = [record.written(one.code, one.line) for one in stretches]
    lines = Events.of(
        len(stretches),
        category=np.array([Category.LINE if one.line else Category.PYTHON for one in stretches], np.int64),
        name=np.array([number.setdefault(name, len(trace.names) + len(number)) for name in names], np.int64),
        thread=thread,
        start=np.array([one.start for one in stretches], np.int64) + shift,
        end=np.array([one.end for one in stretches], np.int64) + shift,
    )
    events = Events.concatenate([trace.events, lines])
    return replace(trace, names=(*trace.names, *number), events=events)


def trace_offset(trace: Trace, ticks: Sequence[Tick], begins: dict[int, Ints]) -> int:
    """From the host's clock to the trace's: as the marks allow, and such that lines begin between operators."""
    rows = np.flatnonzero(trace.begins(OWN_STEP))
    noted = {trace.names[trace.events.name[row]]: int(trace.events.start[row]) for row in rows.tolist()}
    pairs = [(noted[f"{OWN_STEP}{tick.number}"], tick) for tick in ticks if f"{OWN_STEP}{tick.number}" in noted]
    low, high = sorted((max(at - tick.after for at, tick in pairs), min(at - tick.before for at, tick in pairs)))
    trials = np.linspace(low, high, 1 + min(_TRIALS, (high - low) // _TRIAL_STEP)).astype(np.int64)
    within = sum(_begun_within(trace, thread, times, trials) for thread, times in begins.items())
    best = trials[within == np.min(within)]
    return int(best[len(best) // 2])


def _begun_within(trace: Trace, thread: int, times: Ints, trials: Ints) -> Ints:
    """Under each shift, how many lines begin within an operator of their thread."""
    events = trace.events
    rows = np.flatnonzero((events.category == Category.OPERATOR) & (events.thread == thread))
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    start, end = events.start[rows], np.maximum.accumulate(events.end[rows])
    found = [np.searchsorted(start, times + shift, side="right") for shift in trials.tolist()]
    ends = np.concatenate([[np.iinfo(np.int64).min], end])
    return np.array([(times + shift < ends[place]).sum() for place, shift in zip(found, trials.tolist(), strict=True)])
