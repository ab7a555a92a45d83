"""The plan of a whole run: what saves most comes first, and the fixes of one loop stay together, as they build on each
other. A loop's duration, its number of iterations and its idle time limit what its fixes can save.
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
"""The median of what compiling took the four programs of COMPILED_AWAY: 11 to 63 seconds."""
A_SECOND = 1_000_000_000
"""Nanoseconds. A shorter loop without the GPU is not planned, since many try a short run first."""
UNUSED = 0.001
"""A GPU that works for less than this share of a loop is not used there."""
CAPTURING = 3
"""Iterations that run uncaptured: the runtime rehearses two, and captures the third."""
_ON_THE_GPU = ComputeOnGpu().says(ComputeOnGpu.of_idle_line)


def plan_of_run(diagnosis: Diagnosis, uses: Sequence[LoaderUse], uneven: Sequence[UnevenLoop] = ()) -> Plan:
    """The plans of all explained loops, as one. `diagnosis.plan` is that of the steps. `uneven` holds the loops around
    these, if ranks do not meet in a step."""
    parts = [with_loader(diagnosis.plan, uses, diagnosis)]
    for loop in diagnosis.loops:
        plan = (_saved_in_all_steps(fix, loop.turns) if loop.turns else fix for fix in loop.diagnosis.plan)
        parts.append(tuple(replace(fix, loop=loop.place) for fix in plan))
    parts += [*_idle_lines(diagnosis), *_idle_loops(diagnosis), *_prepared(diagnosis)]
    parts.sort(key=lambda part: -sum(max(0, fix.run_gain) for fix in part))
    fixes = _without_repeats(chain(*parts), diagnosis)
    rows = _shared_evenly([*_limited_by_loops(fixes, diagnosis)], uneven, diagnosis)
    rows = [_side_by_side(_at_other_thread(fix, diagnosis), diagnosis) for fix in rows]
    return tuple(_as_trainer_setting(fix, diagnosis) for fix in rows)


def _shared_evenly(rows: list[PlannedFix], uneven: Sequence[UnevenLoop], diagnosis: Diagnosis) -> list[PlannedFix]:
    """Adds a fix for a loop that one rank takes longest for, if ranks meet only after it. Its GPU need never wait."""
    enclosing = _enclosing_loops(diagnosis.loop, _loops_of(diagnosis))
    candidates = [loop for loop in uneven if loop.place in enclosing]
    if not candidates or diagnosis.run is None:
        return rows
    loop = max(candidates, key=lambda loop: loop.longest - loop.mean)
    saved, before, after = (time // loop.turns for time in (loop.longest - loop.mean, loop.longest, loop.mean))
    if saved * loop.turns <= NOISE * diagnosis.run.time:
        return rows
    places = [place for row in rows if row.fix == "align_ranks" for place in row.where]
    longest, mean = fixed(loop.longest, "s", 1), fixed(loop.mean, "s", 1)
    row = planned_fix(
        BY_NAME["align_ranks"].usually("peer_late"),
        [*dict.fromkeys([Where.of(place_of_loop(loop.place)), *places])],
        ("peer_late",),
        saved,
        Prediction(after, after, before),
        run_gain=loop.longest - loop.mean,
        loop=loop.place,
        reason=f"The loop takes rank {loop.rank} {longest} s, and {mean} s in the mean of all ranks, which meet only "
        "after it.",
    )
    others = [other for other in rows if other.fix != "align_ranks"]
    larger = [other for other in others if other.run_gain > row.run_gain]
    return [*larger, row, *(other for other in others if other not in larger)]


def _without_repeats(fixes: Iterable[PlannedFix], diagnosis: Diagnosis) -> Iterator[PlannedFix]:
    """Leaves out fixes at a line that are planned for a loop within or around this one: they save the same time. In an
    unrelated loop it is the same change, and what it saves there is shown, too."""
    planned: dict[tuple[str, str], str] = {}  # the loop for which a fix at a place was planned first
    for fix in fixes:
        loop = planned.get((fix.fix, str(fix.where[0])), fix.loop) if fix.where else fix.loop
        is_same_change = loop != fix.loop
        if is_same_change and _is_nested(loop or diagnosis.loop, fix.loop or diagnosis.loop, diagnosis):
            continue
        yield replace(fix, reason=f"{fix.reason} {SAME_CHANGE}".strip()) if is_same_change else fix
        for place in fix.where:
            planned.setdefault((fix.fix, str(place)), fix.loop)


SAME_CHANGE = "This is the same change as above, and what it saves in this loop."


def _is_nested(first: str, second: str, diagnosis: Diagnosis) -> bool:
    """Whether one loop is within the ordinary iterations of the other, or the run's tree does not know one of them."""
    loops = {part.named: part for part in _loops_of(diagnosis)}
    return first not in loops or second not in loops or _holds(loops[first], second) or _holds(loops[second], first)


def _holds(loop: Part, name: str) -> bool:
    usual = (part for part in loop.parts if part.kind == LOOP and not part.comes_rarely(loop))
    return any(part.named == name or _holds(part, name) for part in usual)


def _at_other_thread(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """Moves a fix of host work to another thread's line, if most of what it saves is that thread's time. This thread
    waited to run Python meanwhile, so its own lines are not to blame. Time in which the GPU worked does not count, as
    this thread may have waited for that."""
    run = diagnosis.run
    if run is None or not run.beside or run.ran == NONE or fix.causes != ("host_work",):
        return fix
    others = sum(line.time for line in run.beside)
    waited = min(others, run.time - run.ran - max(0, run.busy))
    if 2 * waited < max(1, fix.run_gain):
        return fix
    remedy, place = UseProcesses().says(), run.beside[0].place
    reason = (
        f"Other threads of the program ran for {fixed(others, 's', 1)} s, mostly there, and this one for "
        f"{fixed(run.ran, 's', 1)} of {fixed(run.time, 's', 1)} s: only one thread at a time runs Python."
    )
    gain = min(fix.run_gain, waited)  # no more than this thread waited for the other
    named = replace(fix, fix=remedy.fix.name, where=(Where.of(place),), advice=remedy.advice, code=remedy.code, api="")
    return replace(named, run_gain=gain, reason=reason)


def _side_by_side(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """Adds that the iterations of an enclosing loop might run as one batch, as for environments that are stepped one
    after another. Whether these depend on each other is unknown, so it says "at best"."""
    loops = _loops_of(diagnosis)
    inner = next((part for part in loops if part.named == (fix.loop or diagnosis.loop)), None)
    outer = next((part for part in loops if inner in part.parts), None)
    trains = not fix.loop and any(run.marked_by == "optimizer" for run in diagnosis.plain_runs.values())
    if fix.fix not in ("compute_on_gpu", "decide_on_gpu") or inner is None or outer is None or trains:
        return fix
    times = outer.turns // max([1, *(part.turns for part in loops if outer in part.parts)])
    if times < 2:
        return fix
    now, best = fixed(inner.time, "s", 1), fixed(inner.time / times, "s", 1)
    reason = f"If its iterations are independent, the {times} of the loop at {outer.place} could run as one batch: "
    return replace(fix, reason=f"{fix.reason} {reason}at best {now} → {best} s.".strip())


def _as_trainer_setting(fix: PlannedFix, diagnosis: Diagnosis) -> PlannedFix:
    """Names the trainer's setting that makes the fix, if the loop is a trainer's and there is one."""
    places = {str(place) for place in fix.where}
    setting = setting_of(fix.causes, [part.function for part in _loops_of(diagnosis) if part.place in places])
    if not setting or setting == fix.code:  # the plan of a loop has it already
        return fix
    return replace(fix, code=setting, reason=f"{fix.reason} The trainer sets it: {setting}".strip())


def with_loader(plan: Sequence[PlannedFix], uses: Sequence[LoaderUse], diagnosis: Diagnosis) -> Plan:
    """The plan of the steps, limited to how fast the loader's workers prepare batches.

    The loader that the run waited for longest gets as many workers as keep up with its loop, if that saves time by
    itself, or if the loop would wait for batches once the other fixes are made.
    """
    steps, use = diagnosis.steps_of_run, _slowest_loader(uses, diagnosis)
    fixes = list(plan)
    if steps:
        fixes = [_saved_in_all_steps(fix, steps, _largest_gain(diagnosis)) for fix in plan]
    if use is None:
        return tuple(fixes)
    rest = [fix for fix in fixes if fix.fix != "prepare_in_workers"]
    least, shorter = 1, 0
    if _feeds_steps(use, diagnosis):
        # however soon batches come, an iteration takes what the GPU computes, on the rank where that is most
        least, shorter = diagnosis.ledger.get(COMPUTING, 0), sum(fix.gain for fix in rest)
    enough = use.workers if use.idle else use.enough(shorter, least)
    saved = min(use.saved_with(enough, least), _largest_gain(diagnosis))
    if not _worth_more_workers(use, enough, saved, max(least, use.iteration - shorter), diagnosis):
        return tuple(_no_faster_than(fixes, use, use.workers, diagnosis))
    edit = next((fix.edit for fix in plan if fix.fix == "prepare_in_workers"), None)
    fed = _no_faster_than(rest, use, enough, diagnosis)
    return replace(_more_workers(use, enough, max(0, saved), diagnosis), edit=edit), *fed


def _slowest_loader(uses: Sequence[LoaderUse], diagnosis: Diagnosis) -> LoaderUse | None:
    """The loader that the run waited for longest. One without workers counts only if no steps were recorded, as these
    show the preparing itself."""
    candidates = [use for use in uses[:1] if use.in_worker != NONE and (use.workers or not diagnosis.steps)]
    return candidates[0] if candidates and diagnosis.run is not None else None


def _worth_more_workers(use: LoaderUse, enough: int, saved: int, shortest: float, diagnosis: Diagnosis) -> bool:
    """Whether more workers save time by themselves, or once other fixes make an iteration as short as it can be."""
    if diagnosis.run is None or (enough == use.workers and not use.idle):
        return False
    held_up = shortest + NOISE * diagnosis.plain_step < min(use.pace(use.workers), use.iteration)
    return held_up or saved >= NOISE * diagnosis.run.time


def _feeds_steps(use: LoaderUse, diagnosis: Diagnosis) -> bool:
    """Whether the steps of this plan are those that take the loader's batches."""
    return diagnosis.plain_given and 2 * use.batches >= diagnosis.steps_of_run > 0


def _largest_gain(diagnosis: Diagnosis) -> int:
    """The time that the GPU waited in the run, which no fix can exceed. With several ranks it is known of the first
    alone, so the limit is the whole run."""
    if diagnosis.run is None:
        return 1 << 62
    return diagnosis.run.time if diagnosis.run.waits == NONE or len(diagnosis.ranks) > 1 else diagnosis.run.waits


def _saved_in_all_steps(fix: PlannedFix, steps: int, most: int = 1 << 62) -> PlannedFix:
    """The fix with what it saves in the whole run."""
    if fix.fix == "graph":
        replays, before = max(0, steps - CAPTURING), fix.predicted.step + fix.gain
        # a compared replay takes about twice as long as the step, and the capture about as long
        once = before + compared_replays(replays) * (fix.gain + before)
        return replace(fix, run_gain=min(fix.gain * replays, most), once=once)
    if fix.fix != "compile":
        return replace(fix, run_gain=min(fix.gain * steps, most))
    after = f"after {max(1, COMPILING // max(1, fix.gain)):,} steps" if fix.gain else "never"
    return replace(
        fix,
        run_gain=max(0, fix.gain * steps - COMPILING),
        reason="Programs differ in what compiling saves, from nothing to most of this. Try it. "
        f"Compiling takes about {fixed(COMPILING, 's', 0)} s once. It pays {after}; this run had {steps:,}.",
    )


def _no_faster_than(
    fixes: Iterable[PlannedFix], use: LoaderUse, workers: int, diagnosis: Diagnosis
) -> Iterator[PlannedFix]:
    """What remains of each fix of the steps if batches come only as fast as so many workers prepare them."""
    pace = use.pace(workers) if _feeds_steps(use, diagnosis) else 0.0
    before, least = diagnosis.plain_step, min(round(pace), diagnosis.plain_step)
    for fix in fixes:
        predicted = fix.predicted
        after = max(min(before, predicted.step), least)
        if after <= predicted.step:
            yield fix
        elif before - after > diagnosis.noise:
            held_up = Prediction(after, after, max(after, predicted.high))
            gain = before - after
            yield replace(fix, predicted=held_up, gain=gain, run_gain=min(fix.run_gain, gain * diagnosis.steps_of_run))
        before = after


def _more_workers(use: LoaderUse, enough: int, saved: int, diagnosis: Diagnosis) -> PlannedFix:
    """The fix that gives a loader more workers. Its prediction is of the mean iteration, waiting included."""
    batches = max(1, use.batches)
    now = round((use.looped or use.iteration * batches + use.waited) / batches)
    iteration = now - saved // batches
    rank = f" on rank {use.rank}" if len(diagnosis.ranks) > 1 else ""
    status = "is 1 worker" if use.workers == 1 else f"are {use.workers or 'no'} workers"
    status += f", {use.idle} of them without data," if use.idle else ""
    if use.idle:
        remedy, name = ShareAmongWorkers().says(), ShareAmongWorkers.name
    else:
        usual, sentence = PrepareInWorkers.usual["input_late"], f"Use {enough} loader workers. More would hardly help."
        code = usual.code.replace("{workers}", str(enough))
        remedy = PrepareInWorkers().says(usual._replace(advice=sentence, code=code))
        name = f"num_workers={enough}"
    return planned_fix(
        remedy,
        [Where.of(use.place)] if use.place else [],
        ("input_late",),
        saved // batches,
        Prediction(iteration, iteration, max(iteration, min(now, round((1 + NOISE) * iteration)))),
        fix=name,
        run_gain=saved,
        reason=f"The loop waited {fixed(use.waited - use.began, 's', 1)} s{rank} for its {use.batches:,} batches. "
        f"A batch takes a worker {fixed(use.in_worker, 'ms', 0)} ms, the rest of an iteration "
        f"{fixed(use.iteration, 'ms', 0)} ms. There {status} and {use.cores} cores.",
    )


def _loops_of(diagnosis: Diagnosis) -> list[Part]:
    return [part for part in (diagnosis.run.within() if diagnosis.run else ()) if part.kind == LOOP]


def _limited_by_loops(fixes: Iterable[PlannedFix], diagnosis: Diagnosis) -> Iterator[PlannedFix]:
    """Limits what fixes save to the idle time of their loop and of the loops around it, as each fix uses some of it up.

    The driver's count of the GPU's work gives no such limit: it includes copies, and waits of one rank for another.
    """
    loops = _loops_of(diagnosis)
    idle = _idle_time_by_loop(diagnosis, loops)
    for fix in fixes:
        enclosing = _enclosing_loops(fix.loop or diagnosis.loop, loops) if fix.loop or not diagnosis.one_turn else []
        saved = min([fix.run_gain, *(max(0, idle[place]) for place in enclosing)])
        yield replace(fix, run_gain=saved) if saved < fix.run_gain else fix
        for place in enclosing:
            idle[place] -= max(0, saved)


_ALL_LOOPS = ""
"""The key for all loops together, among keys that are places of loops."""


def _enclosing_loops(place: str, loops: Sequence[Part]) -> list[str]:
    """The loop at this place and those around it, and the key for all loops."""
    enclosing = [part.named for part in loops if any(inner.named == place for inner in part.within())]
    return [_ALL_LOOPS, *dict.fromkeys(enclosing)] if loops else []


def _idle_time_by_loop(diagnosis: Diagnosis, loops: Sequence[Part]) -> dict[str, int]:
    """Idle time by loop: its duration minus the GPU's computing time. `_ALL_LOOPS` sums the outermost loops."""
    computing = {loop.place: _computing_share(loop.diagnosis, loop.turns) for loop in diagnosis.loops}
    computing |= {diagnosis.loop: _computing_share(diagnosis, diagnosis.steps_of_run)} if diagnosis.steps else {}
    parts = diagnosis.run.parts if diagnosis.run is not None else ()
    if diagnosis.run is not None and diagnosis.run.kind == LOOP:  # the tree of a single loop
        parts = (diagnosis.run,)
    outermost = [part for part in parts if part.kind == LOOP]
    idle = Counter[str]()
    for place, part in [*((part.named, part) for part in loops), *((_ALL_LOOPS, part) for part in outermost)]:
        idle[place] += part.time - _computing_in(part, computing)
    behind = _done_behind_the_loops(diagnosis, loops)
    for place in _enclosing_loops(diagnosis.loop, loops):
        idle[place] += behind
    return idle


def _done_behind_the_loops(diagnosis: Diagnosis, loops: Sequence[Part]) -> int:
    """GPU work of the last steps that ran after the host had left all loops, since the host had run ahead."""
    looped = sum(part.time for part in loops if part.named == diagnosis.loop)
    if diagnosis.run is None or not looped:
        return 0
    ends = max(part.began + part.time for part in loops)
    return max(0, min(diagnosis.steps_of_run * diagnosis.plain_step - looped, diagnosis.run.time - ends))


def _computing_share(diagnosis: Diagnosis, iterations: int) -> tuple[float, int]:
    """What the GPU computes in a loop, or less if fixes reduce it: as a share of an iteration, and summed over all."""
    least = min([diagnosis.ledger.get(COMPUTING, 0), *(fix.predicted.step for fix in diagnosis.plan)])
    return min(1.0, least / max(1, diagnosis.plain_step)), least * iterations


def _computing_in(part: Part, computing: Mapping[str, tuple[float, int]]) -> int:
    """The GPU's computing time in a loop. If the loop was not explained, that of the loops in it, as far as known."""
    if part.named in computing:
        share, of_all = computing[part.named]
        return min(round(part.time * share), of_all)
    return sum(_computing_in(inner, computing) for inner in part.parts if inner.kind == LOOP)


def _idle_lines(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Lines of a script without steps at which the GPU waits, once it is in use, and which no recording explains."""
    run = diagnosis.run
    if run is None or diagnosis.steps_of_run or any(part.kind == LOOP for part in run.parts):
        return
    begun = min((part.began for part in run.parts if part.kind == FIRST_USE or part.busy > 0), default=run.time)
    seen = {str(site.where) for cause in diagnosis.causes for site in cause.sites}
    seen |= {str(harmless.where) for harmless in diagnosis.harmless}
    seen |= {diagnosis.cut_short.place} if diagnosis.cut_short is not None else set()
    for part in run.parts:
        if part.kind == LINE and part.place not in seen and part.began >= begun and part.waits > NOISE * run.time:
            yield _plan_for_idle_part(part, part.lines, part.waits)


def _idle_loops(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Loops with idle GPU time that no recorded window explains: neither they nor loops in or around them were
    recorded, or only iterations unlike the others."""
    loops, run = _loops_of(diagnosis), diagnosis.run
    recorded = {loop.place for loop in diagnosis.loops} | {diagnosis.loop}
    if run is None or run.kind == LOOP or diagnosis.loop not in {part.named for part in loops}:
        return  # it is unknown in which loop the recorded steps are
    covered = {inner.named for part in loops if part.named in recorded for inner in part.within()}
    covered -= set() if diagnosis.plain_given else {diagnosis.loop}
    for part in loops:
        waits = part.waits - part.warm_up_time - sum(inner.waits for inner in part.parts if inner.kind == LOOP)
        is_known = any(inner.named in covered for inner in part.within()) or part.busy <= NOISE * part.time
        if not is_known and waits > NOISE * run.time:
            yield _plan_for_idle_part(part, [line for line in part.lines if line.idle >= WORTH_NAMING * waits], waits)


def _prepared(diagnosis: Diagnosis) -> Iterator[Plan]:
    """Loops that take much of the run without using the GPU, before or between those that use it."""
    run, explained = diagnosis.run, {diagnosis.loop, *(loop.place for loop in diagnosis.loops)}
    if run is None or not diagnosis.steps_of_run:
        return
    for part in run.parts:
        is_unused = part.kind == LOOP and 0 <= part.busy <= UNUSED * part.time
        is_explained = any(inner.named in explained for inner in part.within())
        if is_unused and not is_explained and part.time > max(A_SECOND, NOISE * run.time):
            yield _plan_for_idle_part(part, part.lines, part.waits, PrepareOnce().says())


def _plan_for_idle_part(part: Part, lines: Sequence[LineTime], waits: int, remedy: Remedy = _ON_THE_GPU) -> Plan:
    """The fix for a part of which only duration and idle time are known: at best all idle time goes, at worst none. A
    loop in a library is placed at the program's own lines that call it."""
    is_loop, iterations, busy = part.kind == LOOP, max(1, part.turns), part.time - waits
    called = next((line.call for line in lines if line.call), "")
    places = [part.place]
    if is_loop and ":" not in part.function:
        places = [line.within or line.place for line in sorted(lines, key=lambda line: -line.idle)]
    return (
        planned_fix(
            remedy,
            list(map(Where.of, places)),
            ("host_work",),
            waits // iterations,
            Prediction(busy // iterations, busy // iterations, part.time // iterations),
            run_gain=waits,
            reason=f"CPU time{f' in {called}' if called else ' at this line'} (sampled).",
            loop=part.named if is_loop else "",
        ),
    )
