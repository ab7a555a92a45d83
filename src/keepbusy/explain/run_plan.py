"""The plan of a whole run: what saves it most comes first, and the fixes of one loop stay together, as they build on
each other. What a loop took, how often it turned and where its GPU was idle bounds what its fixes save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from keepbusy.causes.late_ranks import WORTH_NAMING
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import COMPUTING, Diagnosis, PlannedFix, Prediction
from keepbusy.explain.fix_search import Plan, planned_fix
from keepbusy.explain.step_analysis import NOISE
from keepbusy.fixes import BY_NAME
from keepbusy.fixes.capture import compared_replays
from keepbusy.fixes.cpu_work import ComputeOnGpu, UseProcesses
from keepbusy.fixes.definition import Remedy
from keepbusy.fixes.loading import PrepareInWorkers, PrepareOnce, ShareAmongWorkers
from keepbusy.fixes.trainers import setting_of
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
_ON_THE_GPU = ComputeOnGpu().says(ComputeOnGpu.of_idle_line)


def plan_of_run(diagnosis: Diagnosis, uses: Sequence[LoaderUse], uneven: Sequence[UnevenLoop] = ()) -> Plan:
    """All that was explained, as one list. `diagnosis.plan` is that of its steps; `uneven` holds loops around these, if
    ranks do not meet in a step."""
    parts = [with_loader(diagnosis.plan, uses, diagnosis)]
    for one in diagnosis.loops:
        fixes = (_saved_in_all_steps(fix, one.turns) if one.turns else fix for fix in one.diagnosis.plan)
        parts.append(tuple(replace(fix, loop=one.place) for fix in fixes))
    parts += [*_idle_lines(diagnosis), *_idle_loops(diagnosis), *_prepared(diagnosis)]
    parts.sort(key=lambda part: -sum(max(0, one.run_gain) for one in part))
    rows = _shared_evenly(
        [*_limited_by_loops(_without_repeats(chain(*parts), diagnosis), diagnosis)], uneven, diagnosis
    )
    return tuple(
        _as_trainer_setting(_side_by_side(_held_by_another(fix, diagnosis), diagnosis), diagnosis) for fix in rows
    )


def _shared_evenly(rows: list[PlannedFix], uneven: Sequence[UnevenLoop], diagnosis: Diagnosis) -> list[PlannedFix]:
    """Ranks that meet only after a loop wait there for the one that it takes longest, whose GPU need never wait."""
    mine = [one for one in uneven if one.place in _enclosing_loops(diagnosis.loop, _loops_of(diagnosis))]
    for one in sorted(mine, key=lambda one: one.mean - one.longest)[:1]:
        saved, turn, after = (time // one.turns for time in (one.longest - one.mean, one.longest, one.mean))
        if diagnosis.run is None or saved * one.turns <= NOISE * diagnosis.run.time:
            continue
        known = [place for row in rows if row.fix == "align_ranks" for place in row.where]
        row = planned_fix(
            BY_NAME["align_ranks"].usually("peer_late"),
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


def _without_repeats(fixes: Iterable[PlannedFix], diagnosis: Diagnosis) -> Iterator[PlannedFix]:
    """A loop within a step is a part of it: what is fixed at a line in one of the two is fixed in the other. Of another
    loop it is the same change, and what it gains there is shown, too."""
    seen: dict[tuple[str, str], str] = {}
    for one in fixes:
        loops = [seen.get((one.fix, str(place)), one.loop) for place in one.where[:1]]
        if any(
            loop != one.loop and _is_part(loop or diagnosis.loop, one.loop or diagnosis.loop, diagnosis)
            for loop in loops
        ):
            continue
        same = any(loop != one.loop for loop in loops)
        yield replace(one, reason=f"{one.reason} {SAME_CHANGE}".strip()) if same else one
        for place in one.where:
            seen.setdefault((one.fix, str(place)), one.loop)


SAME_CHANGE = "This is the same change as above, and what it saves in this loop."


def _is_part(one: str, other: str, diagnosis: Diagnosis) -> bool:
    """Whether one of two loops stands within the ordinary turns of the other; also where nobody knows."""
    loops = {part.named: part for part in _loops_of(diagnosis)}
    return one not in loops or other not in loops or _holds(loops[one], other) or _holds(loops[other], one)


def _holds(loop: Part, name: str) -> bool:
    usual = (one for one in loop.parts if one.kind == LOOP and not one.comes_rarely(loop))
    return any(one.named == name or _holds(one, name) for one in usual)


def _held_by_another(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """At the other thread's line, where most of what it saves was that thread's: this one had no processor meanwhile,
    for it waited to run Python, and the lines at which it did are not to blame. While the GPU was at work it may have
    waited for that."""
    run = diagnosis.run
    if run is None or not run.beside or run.ran == NONE or fix.causes != ("host_work",):
        return fix
    others = sum(line.time for line in run.beside)
    held = min(others, run.time - run.ran - max(0, run.busy))
    if 2 * held < max(1, fix.run_gain):
        return fix
    remedy, place = UseProcesses().says(), run.beside[0].place
    reason = (
        f"Other threads of the program ran for {fixed(others, 's', 1)} s, mostly there, and this one for "
        f"{fixed(run.ran, 's', 1)} of {fixed(run.time, 's', 1)} s: only one thread at a time runs Python."
    )
    gain = min(fix.run_gain, held)  # no more than the other thread held it up
    named = replace(fix, fix=remedy.fix.name, where=(Where.of(place),), advice=remedy.advice, code=remedy.code, api="")
    return replace(named, run_gain=gain, reason=reason)


def _side_by_side(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """What waits for each value of the GPU might do so once for several turns of the loop around, as for environments
    that are stepped one after another. Whether they need each other nobody knows, so what is said is only the best."""
    loops = _loops_of(diagnosis)
    inner = next((part for part in loops if part.named == (fix.loop or diagnosis.loop)), None)
    around = next((part for part in loops if inner in part.parts), None)
    trains = not fix.loop and any(run.marked_by == "optimizer" for run in diagnosis.plain_runs.values())
    if fix.fix not in ("compute_on_gpu", "decide_on_gpu") or inner is None or around is None or trains:
        return fix
    times = around.turns // max([1, *(part.turns for part in loops if around in part.parts)])
    if times < 2:
        return fix
    took, best = fixed(inner.time, "s", 1), fixed(inner.time / times, "s", 1)
    reason = f"If its iterations are independent, the {times} of the loop at {around.place} could run as one batch: "
    return replace(fix, reason=f"{fix.reason} {reason}at best {took} → {best} s.".strip())


def _as_trainer_setting(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """As a setting of the trainer that holds the loop, where the fix is one."""
    places = {str(place) for place in fix.where}
    setting = setting_of(fix.causes, [part.function for part in _loops_of(diagnosis) if part.place in places])
    if not setting or setting == fix.code:  # which a loop's own plan holds already
        return fix
    return replace(fix, code=setting, reason=f"{fix.reason} The trainer sets it: {setting}".strip())


def with_loader(plan: Sequence[PlannedFix], uses: Sequence[LoaderUse], diagnosis: Diagnosis) -> Plan:
    """The plan of the steps, whose batches come no faster than the loader's workers prepare them.

    The loader that the run waited for longest gets as many workers as keep up with its loop: where that saves time by
    itself, and where the loop would be held up by it once the other fixes are made.
    """
    steps, use = diagnosis.steps_of_run, _slowest_loader(uses, diagnosis)
    known = list(plan)
    if steps:
        known = [_saved_in_all_steps(one, steps, _largest_gain(diagnosis)) for one in plan]
    if use is None:
        return tuple(known)
    rest = [one for one in known if one.fix != "prepare_in_workers"]
    least, shorter = 1, 0
    if _feeds_steps(use, diagnosis):
        # however soon batches come, a turn takes what the GPU computes in it, on whichever rank that is most
        least, shorter = diagnosis.ledger.get(COMPUTING, 0), sum(one.gain for one in rest)
    enough = use.workers if use.idle else use.enough(shorter, least)
    saved = min(use.saved_with(enough, least), _largest_gain(diagnosis))
    if not _worth_more_workers(use, enough, saved, max(least, use.turn - shorter), diagnosis):
        return tuple(_no_faster_than(known, use, use.workers, diagnosis))
    edit = next((one.edit for one in plan if one.fix == "prepare_in_workers"), None)
    fed = _no_faster_than(rest, use, enough, diagnosis)
    return replace(_more_workers(use, enough, max(0, saved), diagnosis), edit=edit), *fed


def _slowest_loader(uses: Sequence[LoaderUse], diagnosis: Diagnosis) -> LoaderUse | None:
    """The loader that the run waited for longest; what the program prepares itself was seen in its steps, if any were
    recorded."""
    known = [one for one in uses[:1] if one.in_worker != NONE and (one.workers or not diagnosis.steps)]
    return known[0] if known and diagnosis.run is not None else None


def _worth_more_workers(use: LoaderUse, enough: int, saved: int, shortest: float, diagnosis: Diagnosis) -> bool:
    """By themselves, or once other fixes make a turn as short as it can be, which batches would hold up then."""
    if diagnosis.run is None or (enough == use.workers and not use.idle):
        return False
    held_up = shortest + NOISE * diagnosis.plain_step < min(use.pace(use.workers), use.turn)
    return held_up or saved >= NOISE * diagnosis.run.time


def _feeds_steps(use: LoaderUse, diagnosis: Diagnosis) -> bool:
    """Else the steps of this plan are others than those that take the loader's batches."""
    return diagnosis.plain_given and 2 * use.batches >= diagnosis.steps_of_run > 0


def _largest_gain(diagnosis: Diagnosis) -> int:
    """A run cannot become shorter by more than its GPU waited in it. Of several ranks the tree is the first one's."""
    if diagnosis.run is None:
        return 1 << 62
    return diagnosis.run.time if diagnosis.run.waits == NONE or len(diagnosis.ranks) > 1 else diagnosis.run.waits


def _saved_in_all_steps(one: PlannedFix, steps: int, most: int = 1 << 62) -> PlannedFix:
    """With what it saves the run."""
    if one.fix == "graph":
        replays, before = max(0, steps - CAPTURING), one.predicted.step + one.gain
        # a replay that is compared takes about twice as long as the step did, and the capture about as long
        once = before + compared_replays(replays) * (one.gain + before)
        return replace(one, run_gain=min(one.gain * replays, most), once=once)
    if one.fix != "compile":
        return replace(one, run_gain=min(one.gain * steps, most))
    after = f"after {max(1, COMPILING // max(1, one.gain)):,} steps" if one.gain else "never"
    return replace(
        one,
        run_gain=max(0, one.gain * steps - COMPILING),
        reason="Programs differ in what compiling saves, from nothing to most of this. Try it. "
        f"Compiling takes about {fixed(COMPILING, 's', 0)} s once. It pays {after}; this run had {steps:,}.",
    )


def _no_faster_than(
    fixes: Iterable[PlannedFix], use: LoaderUse, workers: int, diagnosis: Diagnosis
) -> Iterator[PlannedFix]:
    """What of each fix of the steps remains where a batch comes only as often as so many workers prepare one."""
    pace = use.pace(workers) if _feeds_steps(use, diagnosis) else 0.0
    before, least = diagnosis.plain_step, min(round(pace), diagnosis.plain_step)
    for one in fixes:
        foretold = one.predicted
        after = max(min(before, foretold.step), least)
        if after <= foretold.step:
            yield one
        elif before - after > diagnosis.noise:
            held_up = Prediction(after, after, max(after, foretold.high))
            gain = before - after
            yield replace(one, predicted=held_up, gain=gain, run_gain=min(one.run_gain, gain * diagnosis.steps_of_run))
        before = after


def _more_workers(use: LoaderUse, enough: int, saved: int, diagnosis: Diagnosis) -> PlannedFix:
    """A iteration of its loop is shown as it is on average, waiting included."""
    batches = max(1, use.batches)
    now = round((use.looped or use.turn * batches + use.waited) / batches)
    turn = now - saved // batches
    rank = f" on rank {use.rank}" if len(diagnosis.ranks) > 1 else ""
    are = "is 1 worker" if use.workers == 1 else f"are {use.workers or 'no'} workers"
    are += f", {use.idle} of them without data," if use.idle else ""
    if use.idle:
        remedy, name = ShareAmongWorkers().says(), ShareAmongWorkers.name
    else:
        code = f"DataLoader(..., num_workers={enough}, pin_memory=True, persistent_workers=True)"
        sentence = f"Use {enough} loader workers. More would hardly help."
        remedy = PrepareInWorkers().says(PrepareInWorkers.more._replace(advice=sentence, code=code))
        name = f"num_workers={enough}"
    return planned_fix(
        remedy,
        [Where.of(use.place)] if use.place else [],
        ("input_late",),
        saved // batches,
        Prediction(turn, turn, max(turn, min(now, round((1 + NOISE) * turn)))),
        fix=name,
        run_gain=saved,
        reason=f"The loop waited {fixed(use.waited - use.began, 's', 1)} s{rank} for its {use.batches:,} batches. "
        f"A batch takes a worker {fixed(use.in_worker, 'ms', 0)} ms, the rest of an iteration "
        f"{fixed(use.turn, 'ms', 0)} ms. There {are} and {use.cores} cores.",
    )


def _loops_of(diagnosis: Diagnosis) -> list[Part]:
    return [part for part in (diagnosis.run.within() if diagnosis.run else ()) if part.kind == LOOP]


def _limited_by_loops(fixes: Iterable[PlannedFix], diagnosis: Diagnosis) -> Iterator[PlannedFix]:
    """No loop becomes shorter, nor any around it, than what the GPU computes in those of its turns that were looked at,
    of the time that the run's tree has for it. Beside the loops nothing is saved by what is done in them.

    What the driver counts as the GPU's work is no such bound: it also counts copies, and waits of one rank for another.
    """
    loops = _loops_of(diagnosis)
    left = _idle_time_by_loop(diagnosis, loops)
    for one in fixes:
        around = _enclosing_loops(one.loop or diagnosis.loop, loops) if one.loop or not diagnosis.one_turn else []
        saved = min([one.run_gain, *(max(0, left[place]) for place in around)])
        yield replace(one, run_gain=saved) if saved < one.run_gain else one
        for place in around:
            left[place] -= max(0, saved)


_ALL_LOOPS = ""
"""What stands for all of them together, where others stand by their line."""


def _enclosing_loops(place: str, loops: Sequence[Part]) -> list[str]:
    """The loop there and those around it, and all loops together."""
    around = [part.named for part in loops if any(inner.named == place for inner in part.within())]
    return [_ALL_LOOPS, *dict.fromkeys(around)] if loops else []


def _idle_time_by_loop(diagnosis: Diagnosis, loops: Sequence[Part]) -> dict[str, int]:
    """Of each loop, what it took beside what its turns compute; of all of them, what those not within another took."""
    stays = {one.place: _computing_share(one.diagnosis, one.turns) for one in diagnosis.loops}
    stays |= {diagnosis.loop: _computing_share(diagnosis, diagnosis.steps_of_run)} if diagnosis.steps else {}
    parts = (
        () if diagnosis.run is None else (diagnosis.run,) if diagnosis.run.kind == LOOP else diagnosis.run.parts
    )  # a loop alone
    outermost = [part for part in parts if part.kind == LOOP]
    left: Counter[str] = Counter()
    for place, part in [*((part.named, part) for part in loops), *((_ALL_LOOPS, part) for part in outermost)]:
        left[place] += part.time - _computing_in(part, stays)
    behind = _done_behind_the_loops(diagnosis, loops)
    for place in _enclosing_loops(diagnosis.loop, loops):
        left[place] += behind
    return left


def _done_behind_the_loops(diagnosis: Diagnosis, loops: Sequence[Part]) -> int:
    """What of the steps the GPU did, or a rank waited for, when the host had left all loops: it had run ahead."""
    took = sum(part.time for part in loops if part.named == diagnosis.loop)
    if diagnosis.run is None or not took:
        return 0
    ends = max(part.began + part.time for part in loops)
    return max(0, min(diagnosis.steps_of_run * diagnosis.plain_step - took, diagnosis.run.time - ends))


def _computing_share(diagnosis: Diagnosis, turns: int) -> tuple[float, int]:
    """What the GPU computes in a loop, or less where fixes leave it less: the share of a turn, and the sum of all."""
    least = min([diagnosis.ledger.get(COMPUTING, 0), *(one.predicted.step for one in diagnosis.plan)])
    return min(1.0, least / max(1, diagnosis.plain_step)), least * turns


def _computing_in(part: Part, stays: Mapping[str, tuple[float, int]]) -> int:
    """Of a loop's time; where it was not looked at, what is known of the loops in it."""
    if part.named in stays:
        share, of_all = stays[part.named]
        return min(round(part.time * share), of_all)
    return sum(_computing_in(inner, stays) for inner in part.parts if inner.kind == LOOP)


def _idle_lines(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Of a script that takes no steps the lines at which the GPU waits, once it is in use, and that nobody recorded."""
    run = diagnosis.run
    if run is None or diagnosis.steps_of_run or any(part.kind == LOOP for part in run.parts):
        return
    begun = min((part.began for part in run.parts if part.kind == FIRST_USE or part.busy > 0), default=run.time)
    seen = {str(site.where) for cause in diagnosis.causes for site in cause.sites}
    seen |= {str(one.where) for one in diagnosis.harmless}
    seen |= {diagnosis.cut_short.place} if diagnosis.cut_short is not None else set()
    for part in run.parts:
        if part.kind == LINE and part.place not in seen and part.began >= begun and part.waits > NOISE * run.time:
            yield _plan_for_idle_part(part, part.lines, part.waits)


def _idle_loops(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Loops in which the GPU is used and waits, and of which no turn was recorded, nor of what they are in or hold; or
    only turns unlike the others."""
    loops, run = _loops_of(diagnosis), diagnosis.run
    recorded = {one.place for one in diagnosis.loops} | {diagnosis.loop}
    if run is None or run.kind == LOOP or diagnosis.loop not in {part.named for part in loops}:
        return  # nobody knows in which of them the recorded steps are
    known = {inner.named for part in loops if part.named in recorded for inner in part.within()}
    known -= set() if diagnosis.plain_given else {diagnosis.loop}
    for part in loops:
        waits = part.waits - part.warm_up_time - sum(one.waits for one in part.parts if one.kind == LOOP)
        is_known = any(one.named in known for one in part.within()) or part.busy <= NOISE * part.time
        if not is_known and waits > NOISE * run.time:
            yield _plan_for_idle_part(part, [one for one in part.lines if one.idle >= WORTH_NAMING * waits], waits)


def _prepared(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Loops that take much of the run and do not use the GPU, before or between those that do."""
    run, explained = diagnosis.run, {diagnosis.loop, *(one.place for one in diagnosis.loops)}
    if run is None or not diagnosis.steps_of_run:
        return
    for part in run.parts:
        idle = part.kind == LOOP and 0 <= part.busy <= UNUSED * part.time
        if (
            idle
            and part.time > max(A_SECOND, NOISE * run.time)
            and not any(one.named in explained for one in part.within())
        ):
            yield _plan_for_idle_part(part, part.lines, part.waits, PrepareOnce().says())


def _plan_for_idle_part(part: Part, lines: Sequence[LineTime], waits: int, remedy: Remedy = _ON_THE_GPU) -> Plan:
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
