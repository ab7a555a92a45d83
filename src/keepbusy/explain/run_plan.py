"""The plan of a whole run: what saves it most comes first, and the fixes of one loop stay together, as they build on
each other. What a loop took, how often it turned and where its GPU was idle bounds what its fixes save.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from keepbusy.explain.diagnosis import COMPUTING, Diagnosis, PlannedFix, Prediction, Where
from keepbusy.explain.fix_plan import Plan, planned_fix
from keepbusy.explain.ledger import NOISE
from keepbusy.explain.remedies import PARTICULAR, REMEDIES, WORTH_NAMING, Remedy, setting_of
from keepbusy.timeline.figures import fixed
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import (
    FIRST_USE,
    LINE,
    LOOP,
    LineTime,
    LoaderUse,
    Part,
    UnevenLoop,
    place_of_loop,
)

COMPILING = 20_000_000_000
"""What it took the four programs of COMPILED_AWAY once, in the median: 11 to 63 seconds."""
A_SECOND = 1_000_000_000
"""Nanoseconds: a loop without the GPU that takes less is not planned, for many try a short run first."""
UNUSED = 0.001
"""Of a loop: a GPU that works for less of it is not used there."""
CAPTURING = 3
"""Iterations that stay as they are: the runtime rehearses two, and captures what it would have run."""
_SAYS_UNCAPTURED = re.compile(rf" ?The first {CAPTURING} iterations run uncaptured[^.]*\.")


def plan_of_run(told: Diagnosis, uses: Sequence[LoaderUse], uneven: Sequence[UnevenLoop] = ()) -> Plan:
    """All that was explained, as one list. `told.plan` is that of its steps; in `uneven` are loops around these, if
    ranks do not meet in a step."""
    parts = [with_loader(told.plan, uses, told)]
    for one in told.loops:
        fixes = (_of_all_steps(fix, one.turns) if one.turns else fix for fix in one.diagnosis.plan)
        parts.append(tuple(replace(fix, loop=one.place) for fix in fixes))
    parts += [*_idle_lines(told), *_idle_loops(told), *_prepared(told)]
    parts.sort(key=lambda part: -sum(max(0, one.run_gain) for one in part))
    rows = _shared_evenly([*_as_far_as_loops_took(_told_once(chain(*parts), told), told)], uneven, told)
    return tuple(_set(_side_by_side(_held_by_another(fix, told), told), told) for fix in rows)


def _shared_evenly(rows: list[PlannedFix], uneven: Sequence[UnevenLoop], told: Diagnosis) -> list[PlannedFix]:
    """Ranks that meet only after a loop wait there for the one that it takes longest, whose GPU need never wait."""
    mine = [one for one in uneven if one.place in _around(told.loop, _loops_of(told))]
    for one in sorted(mine, key=lambda one: one.mean - one.longest)[:1]:
        saved, turn, after = (time // one.turns for time in (one.longest - one.mean, one.longest, one.mean))
        if told.run is None or saved * one.turns <= NOISE * told.run.time:
            continue
        known = [place for row in rows if row.fix == "align_ranks" for place in row.where]
        row = planned_fix(
            REMEDIES["peer_late"],
            [*dict.fromkeys([Where.of(place_of_loop(one.place)), *known])],
            ("peer_late",),
            saved,
            Prediction(after, after, turn),
            run_gain=one.longest - one.mean,
            loop=one.place,
            reason=f"The loop takes rank {one.rank} {fixed(one.longest, 's', 1)} s, and {fixed(one.mean, 's', 1)} s in "
            "the mean of all ranks, which meet only after it.",
        )
        others = [other for other in rows if other.fix != "align_ranks"]
        before = [other for other in others if other.run_gain > row.run_gain]
        rows = [*before, row, *(other for other in others if other not in before)]
    return rows


def _told_once(fixes: Iterable[PlannedFix], told: Diagnosis) -> Iterator[PlannedFix]:
    """A loop within a step is a part of it: what is fixed at a line in one of the two is fixed in the other. Of another
    loop it is the same change, and what it gains there is told, too."""
    seen: dict[tuple[str, str], str] = {}
    for one in fixes:
        loops = [seen.get((one.fix, str(place)), one.loop) for place in one.where[:1]]
        if any(loop != one.loop and _is_part(loop or told.loop, one.loop or told.loop, told) for loop in loops):
            continue
        same = any(loop != one.loop for loop in loops)
        yield replace(one, reason=f"{one.reason} {SAME_CHANGE}".strip()) if same else one
        for place in one.where:
            seen.setdefault((one.fix, str(place)), one.loop)


SAME_CHANGE = "This is the same change as above, and what it saves in this loop."


def _is_part(one: str, other: str, told: Diagnosis) -> bool:
    """Whether one of two loops stands within the ordinary turns of the other; also where nobody knows."""
    loops = {part.named: part for part in _loops_of(told)}
    return one not in loops or other not in loops or _holds(loops[one], other) or _holds(loops[other], one)


def _holds(loop: Part, name: str) -> bool:
    usual = (one for one in loop.parts if one.kind == LOOP and not one.comes_rarely(loop))
    return any(one.named == name or _holds(one, name) for one in usual)


def _held_by_another(fix: PlannedFix, told: Diagnosis) -> PlannedFix:
    """At the other thread's line, where most of what it saves was that thread's: this one had no processor meanwhile,
    for it waited to run Python, and the lines at which it did are not to blame. While the GPU was at work it may have
    waited for that."""
    run = told.run
    if run is None or not run.beside or run.ran == NONE or fix.causes != ("host_work",):
        return fix
    others = sum(line.time for line in run.beside)
    held = min(others, run.time - run.ran - max(0, run.busy))
    if 2 * held < max(1, fix.run_gain):
        return fix
    remedy, place = PARTICULAR["another_process"], run.beside[0].place
    reason = (
        f"Other threads of the program ran for {fixed(others, 's', 1)} s, mostly there, and this one for "
        f"{fixed(run.ran, 's', 1)} of {fixed(run.time, 's', 1)} s: only one thread at a time runs Python."
    )
    gain = min(fix.run_gain, held)  # no more than the other thread held it up
    named = replace(fix, fix=remedy.fix, where=(Where.of(place),), advice=remedy.advice, code=remedy.code, api="")
    return replace(named, run_gain=gain, reason=reason)


def _side_by_side(fix: PlannedFix, told: Diagnosis) -> PlannedFix:
    """What waits for each value of the GPU might do so once for several turns of the loop around, as for environments
    that are stepped one after another. Whether they need each other nobody knows, so what is told is only the best."""
    loops = _loops_of(told)
    inner = next((part for part in loops if part.named == (fix.loop or told.loop)), None)
    around = next((part for part in loops if inner in part.parts), None)
    trains = not fix.loop and any(run.marked_by == "optimizer" for run in told.plain_runs.values())
    if fix.fix not in ("compute_on_gpu", "decide_on_gpu") or inner is None or around is None or trains:
        return fix
    times = around.turns // max([1, *(part.turns for part in loops if around in part.parts)])
    if times < 2:
        return fix
    took, best = fixed(inner.time, "s", 1), fixed(inner.time / times, "s", 1)
    reason = f"If its iterations are independent, the {times} of the loop at {around.place} could run as one batch: "
    return replace(fix, reason=f"{fix.reason} {reason}at best {took} → {best} s.".strip())


def _set(fix: PlannedFix, told: Diagnosis) -> PlannedFix:
    """As a setting of the trainer that holds the loop, where the fix is one."""
    places = {str(place) for place in fix.where}
    setting = setting_of(fix.causes, [part.function for part in _loops_of(told) if part.place in places])
    if not setting or setting == fix.code:  # which a loop's own plan holds already
        return fix
    return replace(fix, code=setting, reason=f"{fix.reason} The trainer sets it: {setting}".strip())


def with_loader(plan: Sequence[PlannedFix], uses: Sequence[LoaderUse], told: Diagnosis) -> Plan:
    """The plan of the steps, whose batches come no faster than the loader's workers prepare them.

    The loader that the run waited for longest gets as many workers as keep up with its loop: where that saves time by
    itself, and where the loop would be held up by it once the other fixes are made.
    """
    steps, use = told.steps_of_run, _awaited(uses, told)
    known = list(plan)
    if steps:
        known = [_of_all_steps(one, steps, _largest_gain(told)) for one in plan]
    if use is None:
        return tuple(known)
    rest = [one for one in known if one.fix != "prepare_in_workers"]
    least, shorter = 1, 0
    if _feeds_steps(use, told):
        # however soon batches come, a turn takes what the GPU computes in it, on whichever rank that is most
        least, shorter = told.ledger.get(COMPUTING, 0), sum(one.gain for one in rest)
    enough = use.workers if use.idle else use.enough(shorter, least)
    saved = min(use.saved_with(enough, least), _largest_gain(told))
    if not _worth_more_workers(use, enough, saved, max(least, use.turn - shorter), told):
        return tuple(_no_faster_than(known, use, use.workers, told))
    edit = next((one.edit for one in plan if one.fix == "prepare_in_workers"), None)
    fed = _no_faster_than(rest, use, enough, told)
    return replace(_more_workers(use, enough, max(0, saved), told), edit=edit), *fed


def _awaited(uses: Sequence[LoaderUse], told: Diagnosis) -> LoaderUse | None:
    """The loader that the run waited for longest; what the program prepares itself was seen in its steps, if any were
    recorded."""
    known = [one for one in uses[:1] if one.in_worker != NONE and (one.workers or not told.steps)]
    return known[0] if known and told.run is not None else None


def _worth_more_workers(use: LoaderUse, enough: int, saved: int, shortest: float, told: Diagnosis) -> bool:
    """By themselves, or once other fixes make a turn as short as it can be, which batches would hold up then."""
    if told.run is None or (enough == use.workers and not use.idle):
        return False
    held_up = shortest + NOISE * told.plain_step < min(use.pace(use.workers), use.turn)
    return held_up or saved >= NOISE * told.run.time


def _feeds_steps(use: LoaderUse, told: Diagnosis) -> bool:
    """Else the steps of this plan are others than those that take the loader's batches."""
    return told.plain_given and 2 * use.batches >= told.steps_of_run > 0


def _largest_gain(told: Diagnosis) -> int:
    """A run cannot become shorter by more than its GPU waited in it. Of several ranks the tree is the first one's."""
    if told.run is None:
        return 1 << 62
    return told.run.time if told.run.waits == NONE or len(told.ranks) > 1 else told.run.waits


def _of_all_steps(one: PlannedFix, steps: int, most: int = 1 << 62) -> PlannedFix:
    """With what it saves the run."""
    if one.fix == "graph":
        reason = _SAYS_UNCAPTURED.sub("", one.reason)  # a loop's own plan holds it already
        if NOISE * steps < CAPTURING:
            reason = f"{reason} The first {CAPTURING} iterations run uncaptured.".strip()
        return replace(one, run_gain=min(one.gain * max(0, steps - CAPTURING), most), reason=reason)
    if one.fix != "compile":
        return replace(one, run_gain=min(one.gain * steps, most))
    after = f"after {max(1, COMPILING // max(1, one.gain)):,} steps" if one.gain else "never"
    return replace(
        one,
        run_gain=max(0, one.gain * steps - COMPILING),
        reason="Programs differ in what compiling saves, from nothing to most of this. Try it. "
        f"Compiling takes about {fixed(COMPILING, 's', 0)} s once. It pays {after}; this run had {steps:,}.",
    )


def _no_faster_than(fixes: Iterable[PlannedFix], use: LoaderUse, workers: int, told: Diagnosis) -> Iterator[PlannedFix]:
    """What of each fix of the steps remains where a batch comes only as often as so many workers prepare one."""
    pace = use.pace(workers) if _feeds_steps(use, told) else 0.0
    before, least = told.plain_step, min(round(pace), told.plain_step)
    for one in fixes:
        foretold = one.predicted
        after = max(min(before, foretold.step), least)
        if after <= foretold.step:
            yield one
        elif before - after > told.noise:
            held_up = Prediction(after, after, max(after, foretold.high))
            gain = before - after
            yield replace(one, predicted=held_up, gain=gain, run_gain=min(one.run_gain, gain * told.steps_of_run))
        before = after


def _more_workers(use: LoaderUse, enough: int, saved: int, told: Diagnosis) -> PlannedFix:
    """A turn of its loop is told as it is on average, waiting included."""
    batches = max(1, use.batches)
    now = round((use.looped or use.turn * batches + use.waited) / batches)
    turn = now - saved // batches
    rank = f" on rank {use.rank}" if len(told.ranks) > 1 else ""
    are = "is 1 worker" if use.workers == 1 else f"are {use.workers or 'no'} workers"
    are += f", {use.idle} of them without data," if use.idle else ""
    remedy = PARTICULAR["shared_among_workers" if use.idle else "more_workers"]
    if not use.idle:
        code = f"DataLoader(..., num_workers={enough}, pin_memory=True, persistent_workers=True)"
        advice = f"Use {enough} loader workers. More would hardly help."
        remedy = remedy._replace(fix=f"num_workers={enough}", code=code, advice=advice)
    return planned_fix(
        remedy,
        [Where.of(use.place)] if use.place else [],
        ("input_late",),
        saved // batches,
        Prediction(turn, turn, max(turn, min(now, round((1 + NOISE) * turn)))),
        run_gain=saved,
        reason=f"The loop waited {fixed(use.waited - use.began, 's', 1)} s{rank} for its {use.batches:,} batches. "
        f"A batch takes a worker {fixed(use.in_worker, 'ms', 0)} ms, the rest of an iteration "
        f"{fixed(use.turn, 'ms', 0)} ms. There {are} and {use.cores} cores.",
    )


def _loops_of(told: Diagnosis) -> list[Part]:
    return [part for part in (told.run.within() if told.run else ()) if part.kind == LOOP]


def _as_far_as_loops_took(fixes: Iterable[PlannedFix], told: Diagnosis) -> Iterator[PlannedFix]:
    """No loop becomes shorter, nor any around it, than what the GPU computes in those of its turns that were looked at,
    of the time that the run's tree has for it. Beside the loops nothing is saved by what is done in them.

    What the driver counts as the GPU's work is no such bound: it also counts copies, and waits of one rank for another.
    """
    loops = _loops_of(told)
    left = _left_to_save(told, loops)
    for one in fixes:
        around = _around(one.loop or told.loop, loops) if one.loop or not told.one_turn else []
        saved = min([one.run_gain, *(max(0, left[place]) for place in around)])
        yield replace(one, run_gain=saved) if saved < one.run_gain else one
        for place in around:
            left[place] -= max(0, saved)


_ALL_LOOPS = ""
"""What stands for all of them together, where others stand by their line."""


def _around(place: str, loops: Sequence[Part]) -> list[str]:
    """The loop there and those around it, and all loops together."""
    around = [part.named for part in loops if any(inner.named == place for inner in part.within())]
    return [_ALL_LOOPS, *dict.fromkeys(around)] if loops else []


def _left_to_save(told: Diagnosis, loops: Sequence[Part]) -> dict[str, int]:
    """Of each loop, what it took beside what its turns compute; of all of them, what those not within another took."""
    stays = {one.place: _stays(one.diagnosis, one.turns) for one in told.loops}
    stays |= {told.loop: _stays(told, told.steps_of_run)} if told.steps else {}
    parts = () if told.run is None else (told.run,) if told.run.kind == LOOP else told.run.parts  # a loop alone
    outermost = [part for part in parts if part.kind == LOOP]
    left: Counter[str] = Counter()
    for place, part in [*((part.named, part) for part in loops), *((_ALL_LOOPS, part) for part in outermost)]:
        left[place] += part.time - _computed_in(part, stays)
    behind = _done_behind_the_loops(told, loops)
    for place in _around(told.loop, loops):
        left[place] += behind
    return left


def _done_behind_the_loops(told: Diagnosis, loops: Sequence[Part]) -> int:
    """What of the steps the GPU did, or a rank waited for, when the host had left all loops: it had run ahead."""
    took = sum(part.time for part in loops if part.named == told.loop)
    if told.run is None or not took:
        return 0
    ends = max(part.began + part.time for part in loops)
    return max(0, min(told.steps_of_run * told.plain_step - took, told.run.time - ends))


def _stays(told: Diagnosis, turns: int) -> tuple[float, int]:
    """What the GPU computes in a loop, or less where fixes leave it less: the share of a turn, and the sum of all."""
    least = min([told.ledger.get(COMPUTING, 0), *(one.predicted.step for one in told.plan)])
    return min(1.0, least / max(1, told.plain_step)), least * turns


def _computed_in(part: Part, stays: Mapping[str, tuple[float, int]]) -> int:
    """Of a loop's time; where it was not looked at, what is known of the loops in it."""
    if part.named in stays:
        share, of_all = stays[part.named]
        return min(round(part.time * share), of_all)
    return sum(_computed_in(inner, stays) for inner in part.parts if inner.kind == LOOP)


def _idle_lines(told: Diagnosis) -> Iterator[Plan]:
    """Of a script that takes no steps the lines at which the GPU waits, once it is in use, and that nobody recorded."""
    run = told.run
    if run is None or told.steps_of_run or any(part.kind == LOOP for part in run.parts):
        return
    begun = min((part.began for part in run.parts if part.kind == FIRST_USE or part.busy > 0), default=run.time)
    seen = {str(site.where) for cause in told.causes for site in cause.sites}
    seen |= {str(one.where) for one in told.harmless}
    seen |= {told.cut_short.place} if told.cut_short is not None else set()
    for part in run.parts:
        if part.kind == LINE and part.place not in seen and part.began >= begun and part.waits > NOISE * run.time:
            yield _of_idle_part(part, part.lines, part.waits)


def _idle_loops(told: Diagnosis) -> Iterator[Plan]:
    """Loops in which the GPU is used and waits, and of which no turn was recorded, nor of what they are in or hold; or
    only turns unlike the others."""
    loops, run = _loops_of(told), told.run
    recorded = {one.place for one in told.loops} | {told.loop}
    if run is None or run.kind == LOOP or told.loop not in {part.named for part in loops}:
        return  # nobody knows in which of them the recorded steps are
    known = {inner.named for part in loops if part.named in recorded for inner in part.within()}
    known -= set() if told.plain_given else {told.loop}
    for part in loops:
        waits = part.waits - part.warm_up_time - sum(one.waits for one in part.parts if one.kind == LOOP)
        is_known = any(one.named in known for one in part.within()) or part.busy <= NOISE * part.time
        if not is_known and waits > NOISE * run.time:
            yield _of_idle_part(part, [one for one in part.lines if one.idle >= WORTH_NAMING * waits], waits)


def _prepared(told: Diagnosis) -> Iterator[Plan]:
    """Loops that take much of the run and do not use the GPU, before or between those that do."""
    run, explained = told.run, {told.loop, *(one.place for one in told.loops)}
    if run is None or not told.steps_of_run:
        return
    for part in run.parts:
        idle = part.kind == LOOP and 0 <= part.busy <= UNUSED * part.time
        if (
            idle
            and part.time > max(A_SECOND, NOISE * run.time)
            and not any(one.named in explained for one in part.within())
        ):
            yield _of_idle_part(part, part.lines, part.waits, PARTICULAR["prepared"])


def _of_idle_part(part: Part, lines: Sequence[LineTime], waits: int, remedy: Remedy = PARTICULAR["on_the_gpu"]) -> Plan:
    """What it takes is known, and how long the GPU was idle meanwhile: at worst nothing of that can go. Where a library
    holds a loop, the program's own line is where that is called."""
    in_a_loop, turns, left = part.kind == LOOP, max(1, part.turns), part.time - waits
    called = next((one.call for one in lines if one.call), "")
    places = [part.place]
    if in_a_loop and ":" not in part.function:
        places = [one.within or one.place for one in sorted(lines, key=lambda one: -one.idle)]
    return (
        planned_fix(
            remedy,
            list(map(Where.of, places)),
            ("host_work",),
            waits // turns,
            Prediction(left // turns, left // turns, part.time // turns),
            run_gain=waits,
            reason=f"CPU time{f' in {called}' if called else ' at this line'} (sampled).",
            loop=part.named if in_a_loop else "",
        ),
    )
