"""The whole run: what it took, its loops, the plan; and in the margin of a report its steps, the host's lead, rare
stalls, what changed, and what is not worth touching.

Also in a few lines, while it is on: the tree as far as it has grown, the first row of the plan, and how its steps go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, TypeAlias

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepbusy.causes.late_ranks import LateRank
from keepbusy.explain.diagnosis import CAUSES, COMPUTING, Diagnosis, Harmless, PlannedFix
from keepbusy.report import words
from keepbusy.report.paper import FAINT, GAIN, PLACE, STRONG, laid_out, line, link_to
from keepbusy.report.words import look, tame
from keepbusy.timeline.figures import count, duration, every, listing, share, span_of, transition, unit_of
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import FIRST_USE, IMPORTS, LOOP, Part, PlainRun, SlowTurns

WORTH_A_LINE = 0.02
"""Of the run: parts that take less stand together in one line."""
MOST_PARTS = 12
WORTH_A_ROW = 0.003
"""Of the run: a fix that saves less of it is no row of the plan, nor are parts that take less a row of the tree."""
_NAMES = {IMPORTS: "imports", FIRST_USE: "first use of the GPU"}
MATTERS = 0.02
"""Of a step: what takes less of it is not told."""
LESSON_MATTERS = 0.01
"""Of a script: a line that holds Python for less teaches nothing."""
DELAY_MATTERS = 0.03
"""The same, of the run."""
AMONG_RANKS = {"peer_late", "exposed_collective"}
"""Causes beside which it is told which ranks are late."""
NO_LEAD, SOME_LEAD = 0.9, 0.1
"""Shares of the steps in which the host has no lead."""


def cut_short(diagnosis: Diagnosis) -> str:
    """What ended the program before its own end; "" where nothing did."""
    ended = diagnosis.cut_short
    if ended is None:
        return ""
    who = "The script" if ended.rank == NONE else f"Rank {ended.rank}"
    said = {"failed": f"failed with {tame(ended.by, 80)}", "interrupted": "was interrupted"}
    what = said.get(ended.how, f"was killed by {tame(ended.by, 80)}")
    where = f" at {_short(ended.place)}" if ended.place else ""
    after = f" after {duration(diagnosis.run.time)}" if diagnosis.run is not None else ""
    return f"{who} {what}{where}{after}."


def headline(run: Part) -> str:
    busy = "" if run.busy else " The GPU computed nothing."
    if run.busy and run.busy != NONE:
        busy = f" The GPU was busy for {duration(run.busy)} ({share(run.busy, run.time)})."
    return f"The run took {duration(run.time)}.{busy}"


def tree(run: Part, width: int) -> Iterator[RenderableType]:
    """What comes before the first loop in one line, then every part that matters in the order of the run."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify != "left", overflow="fold")
    first_loop = min((part.began for part in run.parts if part.kind == LOOP), default=0)
    start = [part for part in run.parts if part.kind != LOOP and part.began < first_loop]
    rest = [part for part in run.parts if part not in start]
    if start:
        table.add_row("start-up", "", duration(sum(part.time for part in start), run.time), Text(_named(start), FAINT))
    small = [part for part in rest if part.time < WORTH_A_LINE * run.time]
    for part in [part for part in rest if part not in small][:MOST_PARTS]:
        _rows(table, part, run, run, 0, width)
    if (time := sum(part.time for part in small)) >= WORTH_A_ROW * run.time:
        table.add_row("the rest", "", duration(time, run.time), Text(_named(small), FAINT))
    yield table


def _named(parts: Sequence[Part]) -> str:
    """`imports 5.1 s, first use of the GPU 2.2 s, train.py:31 0.4 s`."""
    ordered = sorted(parts, key=lambda part: -part.time)[:3]
    told = [part for part in ordered if part.time >= WORTH_A_LINE * ordered[0].time]
    return ", ".join(f"{_place(part)} {duration(part.time)}" for part in told)


def _place(part: Part) -> str:
    """Beside all lines of the program is what the GPU still does once they are through."""
    return _NAMES.get(part.kind) or _short(part.place) or "the end"


def _rows(table: Table, part: Part, around: Part, run: Part, depth: int, width: int) -> None:
    turns = f"×{part.turns:,}{'+' if part.at_least else ''}" if part.turns and part.kind == LOOP else ""
    place = Text.assemble("  " * depth, *_heading(part, around, max(12, width // 3)))
    table.add_row(place, turns, duration(part.time, run.time), _about(part))
    for more in _sentences(part) if part.kind == LOOP else ():
        table.add_row("", "", "", Text(more, FAINT))
    for inner in part.parts:
        if inner.time >= WORTH_A_LINE * run.time:
            _rows(table, inner, part, run, depth + 1, width)


def _heading(part: Part, around: Part, room: int) -> Iterator[str | tuple[str, str]]:
    """The place and the line's own text; of a loop that a library holds, where that is, which tells it from another
    one that it holds at the same line."""
    held = f"in {_holder(part.function)}" if part.kind == LOOP and ":" in part.function else ""
    if held and part.place == around.place:
        yield held
        return
    yield _place(part), PLACE
    source = tame(part.source.removesuffix(":"), max(12, room - len(held)))
    yield f"  {source}{'  ' if held else ''}{held}"


def _about(part: Part) -> str:
    found = []
    if part.kind == LOOP and part.turn != NONE:
        span = span_of(part.low, part.high, part.usual)
        among = f" ({span})" if part.low != NONE else ""
        with_mean = span_of(min(part.low, part.usual), max(part.high, part.usual), part.usual)
        if among and span != with_mean:  # a few turns that take very long are in the mean
            among = f" on average (mostly {span})"
        found.append(f"{duration(part.usual)} per iteration{among}")
    if part.busy != NONE:
        found.append(f"GPU busy {share(part.busy, part.time)}")
    return ", ".join(found)


def _sentences(part: Part) -> Iterator[str]:
    """What is out of the ordinary in a loop: turns that take longer, the first ones, a line where the GPU is idle."""
    for slow in part.kinds:
        if slow.total > (WORTH_A_LINE if slow.regular else 0.1) * part.time:
            where = f", at {_short(slow.place)}" if slow.place else ""
            yield f"{_how_often(slow)} {duration(slow.longer)} longer{where}"
    if part.warm_up_time > 0.05 * part.time:
        iterations = f"{part.warm_up} iterations" if part.warm_up > 1 else "iteration"
        yield f"warm-up: {duration(part.warm_up_time)} more in the first {iterations}"
    idlest = max(part.lines, key=lambda one: one.idle, default=None)
    if idlest is not None and idlest.idle > 0.1 * part.time and not part.parts:
        within = f"at {_short(idlest.within)}" if idlest.within else ""
        told = ", ".join(one for one in (idlest.call and f"in {tame(idlest.call, 30)}", within) if one)
        where = f"{_short(idlest.place)} ({told})" if told else _short(idlest.place)
        yield f"the GPU was idle for {duration(idlest.idle)} while Python was at {where}"


def _how_often(slow: SlowTurns) -> str:
    """`every second iteration takes`, `3 iterations take`."""
    if slow.regular and slow.every >= 1.5 and slow.count > 2:  # two of them are no rhythm
        return f"{every(slow.every, 'iteration')} takes"
    return "one iteration takes" if slow.count == 1 else f"{slow.count} iterations take"


def _short(place: str) -> str:
    return words.tame(place if len(place) <= 36 else f"…{place[-35:]}", 40)


class PlanRow(NamedTuple):
    """A fix of the plan, and an iteration before and after it. Fixes that are not listed count as not made."""

    fix: PlannedFix
    before: int
    after: int
    low: int
    high: int
    partners: str  # numbers of the rows that it needs, as the plan counts them
    only_with: str  # the same where it saves nothing alone, and the last of them has the prediction
    run_before: int  # the whole run, once all fixes before it are made; NONE if that is not known
    run_after: int


def planned_rows(diagnosis: Diagnosis) -> list[PlanRow]:
    """The fixes that are worth a row, in the order in which to make them."""
    worth_it = _worth_a_row(diagnosis)
    listed = {fix.named for fix in worth_it}
    rows = list[PlanRow]()
    run_after, not_listed = diagnosis.run.time if diagnosis.run is not None else 0, Counter[str]()
    for fix in diagnosis.plan:
        run_before, run_after = run_after, max(0, run_after - max(0, fix.run_gain) + fix.once)
        if fix not in worth_it:
            not_listed[turns_meant(fix, diagnosis)] += max(0, fix.gain)
            continue
        missing = not_listed[turns_meant(fix, diagnosis)]
        after, low, high = (time + missing for time in (fix.predicted.step, fix.predicted.low, fix.predicted.high))
        before = after + fix.gain
        partners = ""
        if listed.issuperset(fix.needs):
            others = [number for number, one in enumerate(worth_it, 1) if one.named in fix.needs and one is not fix]
            partners = listing([str(number) for number in others])
        is_run_known = diagnosis.run is not None and fix.run_gain != NONE and run_after < diagnosis.run.time
        rows.append(
            PlanRow(
                fix=fix,
                before=before,
                after=after,
                low=low,
                high=max(fix.predicted.high, min(high, before)),
                partners=partners,
                only_with=partners if fix.gain <= diagnosis.noise else "",
                run_before=run_before if is_run_known else NONE,
                run_after=run_after if is_run_known else NONE,
            )
        )
    return rows


def plan(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Each fix of the plan with its reason, and the run after it."""
    rows = planned_rows(diagnosis)
    if not rows:
        return
    yield line(("What to do", STRONG))
    for number, row in enumerate(rows, 1):
        yield line(f"{number}  ", (words.fix(row.fix.fix), STRONG), *_places(row.fix), "   ", *_after(row, diagnosis))
        for sentence in _said_of(row, diagnosis):
            yield line((sentence, FAINT), indent=3)
    listed = [row.fix for row in rows]
    yield from _too_small(diagnosis, [fix for fix in diagnosis.plan if fix not in listed])


def _too_small(diagnosis: Diagnosis, left: Sequence[PlannedFix]) -> Iterator[RenderableType]:
    """Fixes that are not listed, since they would hardly shorten this run."""
    if diagnosis.run is None or not left:
        return
    named = listing(list(dict.fromkeys(words.fix(one.fix) for one in left)))
    time = duration(round(WORTH_A_ROW * diagnosis.run.time))
    each = " each" if len(left) > 1 else ""
    yield line((f"{len(left)} more would save less than {time} of this run{each}: {named}.", FAINT))
    for one in left:  # this run may be a short one of a program that runs for days
        if one.fix == "compile" and one.gain > diagnosis.noise:
            saved = f"In a longer run it may save {duration(one.gain, diagnosis.plain_step)} per iteration."
            yield line((f"{saved} {one.reason}", FAINT), indent=3)


def _places(one: PlannedFix) -> tuple[str | tuple[str, str], ...]:
    """` at train.py:31, train.py:40 and 2 more`: lines before what is no line."""
    where = sorted(one.where, key=lambda place: not place.file)
    if not where:
        return ()
    alone = any(", " in words.spot(place, 48) for place in where[:2])  # `aten::mm, after aten::cat` is one place
    named = where[: 1 if alone else 2]
    places = ", ".join(words.spot(place, 48) for place in named)
    more = f" and {len(where) - len(named)} more" if len(where) > len(named) else ""
    return (words.leading(places), (f"{places}{more}", PLACE + link_to(named[0])))


def _worth_a_row(diagnosis: Diagnosis) -> list[PlannedFix]:
    """What saves something of the run, and what that needs; at lines of the program, where lines are known."""
    run, plan = diagnosis.run, diagnosis.plan
    if run is None:
        return list(plan)
    lines = any(place.is_known for one in plan for place in one.where)
    known = [one for one in plan if not (lines and one.where) or any(place.is_known for place in one.where)]
    rows = [one for one in known if one.run_gain == NONE or one.run_gain >= WORTH_A_ROW * run.time]
    needed = {name for one in rows for name in one.needs}
    return [one for one in plan if one in rows or one.named in needed]


def _said_of(row: PlanRow, diagnosis: Diagnosis) -> Iterator[str]:
    """Why a fix is in the plan, and with which others it goes."""
    fix = row.fix
    library = next((place.library for place in fix.where), "")
    if library and not library.startswith("torch/"):
        yield tame(f"in {library}")
    if fix.reason:
        yield tame(fix.reason)
    if fix.gain > 0 and diagnosis.run is not None and fix.once > WORTH_A_ROW * diagnosis.run.time:
        once, pays = duration(fix.once), fix.once // fix.gain + 1
        yield f"Capturing it and comparing its first replays takes {once}: it pays after {pays:,} iterations."
    for late in fix.late:
        yield tame(lateness(late, diagnosis.given))
    if fix.needs and not row.only_with:
        named = listing([tame(words.fix(other), 80) for other in dict.fromkeys(fix.needs)])
        needed = f" {row.partners}" if row.partners else f": {named}"
        alone = "alone it saves nothing; " if fix.alone <= diagnosis.noise else ""
        yield f"{alone}it goes together with{needed}"
    if fix.instead:
        yield f"alternatively, {tame(words.fix(fix.instead[0]), 80)}"


def _after(row: PlanRow, diagnosis: Diagnosis) -> list[tuple[str, str] | str]:
    """An iteration with the fix, and the run with it and all before it."""
    if row.only_with:
        return [(f"only with {row.only_with}", GAIN)]
    after: list[tuple[str, str] | str] = [
        (f"{transition(row.before, row.after)} {turns_meant(row.fix, diagnosis)}".rstrip(), GAIN),
        (f" ({span_of(row.low, row.high, row.before)})", FAINT),
    ]
    if row.run_after != NONE:
        after.append((f" · the run {transition(row.run_before, row.run_after)}", GAIN))
    return after


def lateness(late: LateRank, ranks: Sequence[int]) -> str:
    """`Rank 0 arrives 66.6 ms late, and rank 1 waits for it: host work at train.py:46.`"""
    others = [rank for rank in ranks if rank != late.rank]
    who = f"rank {others[0]} waits" if len(others) == 1 else f"{len(others)} ranks wait"
    what = look(late.cause).label
    return f"Rank {late.rank} arrives {duration(late.late)} late, and {who} for it: {what}{words.at(late.where)}."


def of_a_long_run(diagnosis: Diagnosis, hours: float, price: float = 0.0) -> str:
    """What the plan saves of a run of so many hours: its start counts for nothing, its loops for all of it."""
    run, saved = diagnosis.run, sum(max(0, one.run_gain) for one in diagnosis.plan)
    looped = sum(part.time for part in run.parts if part.kind == LOOP) if run is not None else 0
    if not looped or not saved:
        steps = [one for one in diagnosis.plan if not one.loop]
        saved, looped = sum(one.gain for one in steps), diagnosis.plain_step
    less, gpus = hours * min(1.0, saved / looped), len(diagnosis.given)
    if not less:
        return f"The plan is empty: it saves nothing in a run of {hours:g} hours."
    together = f", {less * gpus:,.1f} hours of {gpus} GPUs" if gpus > 1 else ""
    worth = f", worth {less * gpus * price:,.2f} at {price:g} per GPU hour" if price else ""
    return f"The plan saves {less:,.1f} of {hours:g} hours{together}{worth}."


def turns_meant(one: PlannedFix, diagnosis: Diagnosis) -> str:
    """Which iterations a fix makes shorter."""
    if diagnosis.one_turn and not one.loop:
        return "for the script" if diagnosis.steps else ""  # else it is the time of one line
    if one.loop:
        return f"per iteration of the loop at {_loop(one.loop)}"
    return "per iteration"


def loops(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Other loops that were looked at: what a turn of each takes, and why the GPU waits in it."""
    for one in diagnosis.loops:
        inner = one.diagnosis
        often = f", {one.turns:,} of them" if one.turns else ""
        computing = share(inner.ledger.get(COMPUTING, 0), inner.plain_step)
        alone = " without its inner loops" if _is_part(diagnosis.run, one.place, inner.plain_step) else ""
        takes = f": an iteration{alone} takes {duration(inner.plain_step)}{often}. The GPU computes {computing} of it."
        nothing = "" if inner.plan else " There is nothing to save."
        yield line(("The loop at ", STRONG), (_loop(one.place), PLACE), takes, nothing)
        yield line("")


def _loop(name: str) -> str:
    """`train.py:31`, or `train.py:31 (trainer.py:1842)` of one that a library holds."""
    place, _, holder = name.partition(" (")
    return _short(place) + (f" ({_holder(holder)})" if holder else "")


def _holder(function: str) -> str:
    """`trainer.py:1842` of `lib/trainer.py:1842 in fit`: several loops of a library may stand at one line."""
    return tame(function.removesuffix(")").partition(" in ")[0].rpartition("/")[2])


def _is_part(run: Part | None, place: str, turn: int) -> bool:
    """Whether what was explained is what a turn of this loop does beside the loops in it."""
    there = [part for part in (run.within() if run is not None else ()) if part.named == place and part.parts]
    return any(part.turn > 1.5 * turn and part.parts[0].kind == LOOP for part in there)


def margin(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """A label and a sentence each: the run as a whole, what is not worth touching, late ranks that no cause has shown,
    what one should know."""
    yield from asides(diagnosis.plain_runs)
    label, told = ("line", _lessons) if diagnosis.one_turn else ("ignore", _harmless)
    yield from ((label, one) for one in told(diagnosis.harmless, diagnosis.plain_step))
    bubble = diagnosis.ledger.get("pipeline_bubble", 0)
    if bubble > diagnosis.noise:
        lost = f"{duration(bubble, diagnosis.plain_step)} per iteration ({share(bubble, diagnosis.plain_step)})"
        yield "bubble", f"the pipeline stages wait {lost} for each other's messages"
    if not AMONG_RANKS & {cause.cause for cause in diagnosis.causes}:
        yield from (("late", lateness(late, diagnosis.given)) for late in diagnosis.late)
    yield from (("note", tame(note)) for note in diagnosis.notes)


def _harmless(seen: Iterable[Harmless], step: int) -> Iterator[str]:
    """`host sync at train.py:60 (12 a step) costs nothing here: …`: all places with the same reason in one sentence."""

    def key(one: Harmless) -> tuple[int, str]:
        return (CAUSES.index(one.cause) if one.cause in CAUSES else len(CAUSES), one.why)

    for (_, why), group in groupby(sorted(seen, key=key), key):
        places = list(group)
        total, name = sum(one.count for one in places), look(places[0].cause).label
        where = words.at(max(places, key=lambda one: one.count).where, 50)
        more = f" and {len(places) - 1} more place{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        often = f"{count(total)} per iteration" if count(total) != "0" else every(1 / total, "iteration")
        gain, cost = places[0].gain, "costs nothing here"
        if gain >= 0.005 * step:
            cost = f"costs less than the noise here ({duration(gain, step)})"
        yield f"{name}{where}{more} ({often}) {cost}: {tame(why)}"


def _lessons(seen: Iterable[Harmless], step: int) -> Iterator[str]:
    """Of a script without steps, line by line: what holds Python there, and what to learn of it."""
    for one in sorted(seen, key=lambda one: -one.held):
        if one.why and one.held >= LESSON_MATTERS * step:
            often = f", {count(one.count)} times" if one.count > 1 else ""
            yield f"{words.spot(one.where, 50)} blocks Python for {duration(one.held, step)}{often}: {tame(one.why)}"


def asides(runs: Mapping[int, PlainRun]) -> Iterator[tuple[str, str]]:
    """A label and a sentence each. With several ranks: of the first one."""
    if not runs:
        return
    run = runs[min(runs)]
    if run.steps:
        span = span_of(run.low, run.high, run.step)
        begun = f" The first {run.warm_up} took {duration(run.warm_up_time)} in total." if run.warm_up else ""
        yield "plain", f"80% of the {run.steps:,} steps that were not recorded take {span} {unit_of(run.step)}.{begun}"
    if run.lead != NONE:
        yield "lead", _lead(run)
    for time, what in ((run.input, "waits for input"), (run.collector, "collects garbage")):
        if time >= max(1, MATTERS * run.step):
            yield "plain", f"Python {what} for {duration(time)} of each step ({share(time, run.step)})."
    if run.delayed >= DELAY_MATTERS:
        lost = share(round(1000 * run.delayed), 1000)
        yield "plain", f"For {lost} of the run the program was ready to run, but other processes used the CPU cores."
    if run.requests >= MATTERS:
        often = count(run.requests)
        yield "plain", f"PyTorch requests memory from the driver {often} times per step, also after the warm-up."
    if run.retries:
        yield "plain", f"GPU memory was full {run.retries} times. PyTorch freed its cache and requested memory again."
    if run.fault:
        yield "note", tame(f"Step times were not measured to the end of the run ({run.fault}). Please report it.")


def _lead(run: PlainRun) -> str:
    if run.no_lead >= NO_LEAD:
        return "Python has no lead: when a step ends, the GPU is idle."
    seldom = f", but in {share(round(1000 * run.no_lead), 1000)} of the steps it has no lead"
    return f"When a step ends, Python is {duration(run.lead)} ahead{seldom if run.no_lead >= SOME_LEAD else ''}."


# While the program runs

_MOST_LINES, _ROWS_A_LINE, _ROOM_FOR_A_TREE = 8, 4, (60, 16)
"""Lines that are ours, and rows of the terminal for each; a smaller terminal than this has one."""


def live_lines(diagnosis: Diagnosis | None, size: tuple[int, int], colour: bool = True) -> list[str]:
    """The same as the report while it grows: the tree, the first row of the plan, and last how the iterations go."""
    width, rows = size
    last = live_line(diagnosis, width, colour)
    run = diagnosis.run if diagnosis is not None else None
    if diagnosis is None or run is None or width < _ROOM_FOR_A_TREE[0] or rows < _ROOM_FOR_A_TREE[1]:
        return [last]
    said = [*_loops_so_far(run, min(_MOST_LINES, rows // _ROWS_A_LINE) - 1 - bool(diagnosis.plan))]
    for first in diagnosis.plan[:1]:
        where = words.at(first.where[0], 30) if first.where else ""
        gain = transition(first.predicted.step + first.gain, first.predicted.step)
        said.append(Text.assemble((f"1  {words.fix(first.fix)}{where}", STRONG), f"  {gain} per iteration"))
    for text in said:
        text.truncate(width - 1, overflow="ellipsis")
    return [*(laid_out([text], width, colour) for text in said), last]


def _loops_so_far(run: Part, room: int) -> Iterator[Text]:
    """The run and its longest loops, in its order."""
    loops = [(depth, part) for depth, part in _with_depth(run, 0) if part.time >= WORTH_A_LINE * run.time]
    shortest = sorted((part.time for _, part in loops), reverse=True)[: max(0, room - 1)]
    at_work = f", GPU busy {share(run.busy, run.time)}" if run.busy != NONE else ""
    yield Text.assemble((f"{duration(run.time)} so far{at_work}", FAINT))
    for depth, part in loops:
        if shortest and part.time >= shortest[-1]:
            turns = f"  ×{part.turns:,}" if part.turns else ""
            turn = f"  {duration(part.turn)} per iteration" if part.turn != NONE else ""
            busy = f"  GPU busy {share(part.busy, part.time)}" if part.busy != NONE else ""
            place = words.tame(part.place.rpartition("/")[2], 30)
            yield Text.assemble(f"{'  ' * depth}{place}{turns}  ", (duration(part.time, run.time), STRONG), turn, busy)


def _with_depth(part: Part, depth: int) -> Iterator[tuple[int, Part]]:
    for inner in part.parts:
        if inner.kind == LOOP:
            yield depth, inner
            yield from _with_depth(inner, depth + 1)


_Piece: TypeAlias = tuple[str, str]
"""A text and its style."""


def live_line(diagnosis: Diagnosis | None, width: int, colour: bool = True) -> str:
    """The iteration, how busy the GPU is, and the worst line, which goes last on a narrow terminal."""
    time, computes, worst = list[_Piece](), list[_Piece](), list[_Piece]()
    if diagnosis is None:
        worst = [("recording", "")]
    else:
        if diagnosis.plain_step:
            time = [(f"{duration(diagnosis.plain_step)} per iteration", "")]
        computing = share(diagnosis.ledger.get(COMPUTING, 0), diagnosis.plain_step)
        computes = [(f"GPU computes {computing}", FAINT)]
        for cause in diagnosis.causes[:1]:
            where = replace(cause.where, file=cause.where.file.replace("\\", "/").rpartition("/")[2])
            wait = duration(cause.wait, diagnosis.plain_step)
            worst = [(f"{look(cause.cause).label} {words.spot(where, 30)}: {wait} per iteration", STRONG)]
    for pieces in ([*time, *computes, *worst], [*time, *worst], worst):
        text = Text.assemble(("keepbusy", STRONG), *((f" · {piece}", style) for piece, style in pieces))
        if text.cell_len < width:
            break
    text.truncate(width - 1, overflow="ellipsis")
    return laid_out([text], width, colour)
