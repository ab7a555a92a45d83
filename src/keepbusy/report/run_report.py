"""The report's sections about the whole run: its time, the tree of its loops, the plan, and the notes in the margin.

Also the few lines that are shown while the program runs.
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
from keepbusy.report import labels
from keepbusy.report.labels import ledger_place, tame
from keepbusy.report.paper import FAINT, GAIN, PLACE, STRONG, laid_out, line, link_to
from keepbusy.timeline.figures import count, duration, every, listing, share, span_of, transition, unit_of
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_facts import FIRST_USE, IMPORTS, LOOP, Part, PlainRun, SlowIterations

WORTH_A_LINE = 0.02
"""Share of the run: shorter parts are summed in one line."""
MOST_PARTS = 12
WORTH_A_ROW = 0.003
"""Share of the run: fixes that save less have no row in the plan, and shorter parts none in the tree."""
_NAMES = {IMPORTS: "imports", FIRST_USE: "first use of the GPU"}
MATTERS = 0.02
"""Share of a step: the margin does not mention what takes less."""
LESSON_MATTERS = 0.01
"""Share of a script: the margin does not mention lines that block Python for less."""
DELAY_MATTERS = 0.03
"""Share of the run: the margin does not mention shorter delays by other processes."""
AMONG_RANKS = {"peer_late", "exposed_collective"}
"""Causes whose paragraphs name the late ranks."""
NO_LEAD, SOME_LEAD = 0.9, 0.1
"""Shares of steps without a lead: from the first on the host never has one, below the second it always has."""


def cut_short(diagnosis: Diagnosis) -> str:
    """How the program was ended before its own end; "" if it was not."""
    ended = diagnosis.cut_short
    if ended is None:
        return ""
    subject = "The script" if ended.rank == NONE else f"Rank {ended.rank}"
    verbs = {"failed": f"failed with {tame(ended.by, 80)}", "interrupted": "was interrupted"}
    verb = verbs.get(ended.how, f"was killed by {tame(ended.by, 80)}")
    where = f" at {_short(ended.place)}" if ended.place else ""
    after = f" after {duration(diagnosis.run.time)}" if diagnosis.run is not None else ""
    return f"{subject} {verb}{where}{after}."


def headline(run: Part) -> str:
    busy = "" if run.busy else " The GPU computed nothing."
    if run.busy and run.busy != NONE:
        busy = f" The GPU was busy for {duration(run.busy)} ({share(run.busy, run.time)})."
    return f"The run took {duration(run.time)}.{busy}"


def tree(run: Part, width: int) -> Iterator[RenderableType]:
    """The parts before the first loop in one line, then every part that matters, in order."""
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
    named = [part for part in ordered if part.time >= WORTH_A_LINE * ordered[0].time]
    return ", ".join(f"{_place(part)} {duration(part.time)}" for part in named)


def _place(part: Part) -> str:
    """The part's line, or a name: a part without a line is the GPU's work after the last one."""
    return _NAMES.get(part.kind) or _short(part.place) or "the end"


def _rows(table: Table, part: Part, enclosing: Part, run: Part, depth: int, width: int) -> None:
    iterations = f"×{part.turns:,}{'+' if part.at_least else ''}" if part.turns and part.kind == LOOP else ""
    place = Text.assemble("  " * depth, *_heading(part, enclosing, max(12, width // 3)))
    table.add_row(place, iterations, duration(part.time, run.time), _about(part))
    for sentence in _sentences(part) if part.kind == LOOP else ():
        table.add_row("", "", "", Text(sentence, FAINT))
    for inner in part.parts:
        if inner.time >= WORTH_A_LINE * run.time:
            _rows(table, inner, part, run, depth + 1, width)


def _heading(part: Part, enclosing: Part, room: int) -> Iterator[str | tuple[str, str]]:
    """The place and the line's source. A loop inside a library also has its line there, because one line of the program
    may call several loops of a library."""
    in_library = f"in {_line_in_library(part.function)}" if part.kind == LOOP and ":" in part.function else ""
    if in_library and part.place == enclosing.place:
        yield in_library
        return
    yield _place(part), PLACE
    source = tame(part.source.removesuffix(":"), max(12, room - len(in_library)))
    yield f"  {source}{'  ' if in_library else ''}{in_library}"


def _about(part: Part) -> str:
    facts = []
    if part.kind == LOOP and part.turn != NONE:
        span = span_of(part.low, part.high, part.usual)
        spread = f" ({span})" if part.low != NONE else ""
        with_mean = span_of(min(part.low, part.usual), max(part.high, part.usual), part.usual)
        if spread and span != with_mean:  # a few very long iterations move the mean out of the span
            spread = f" on average (mostly {span})"
        facts.append(f"{duration(part.usual)} per iteration{spread}")
    if part.busy != NONE:
        facts.append(f"GPU busy {share(part.busy, part.time)}")
    return ", ".join(facts)


def _sentences(part: Part) -> Iterator[str]:
    """What is unusual in a loop: slow iterations, the warm-up, the line with most idle time."""
    for slow in part.kinds:
        if slow.total > (WORTH_A_LINE if slow.regular else 0.1) * part.time:
            where = f", at {_short(slow.place)}" if slow.place else ""
            yield f"{_how_often(slow)} {duration(slow.longer)} longer{where}"
    if part.warm_up_time > 0.05 * part.time:
        iterations = f"{part.warm_up} iterations" if part.warm_up > 1 else "iteration"
        yield f"warm-up: {duration(part.warm_up_time)} more in the first {iterations}"
    idlest = max(part.lines, key=lambda line: line.idle, default=None)
    if idlest is not None and idlest.idle > 0.1 * part.time and not part.parts:
        within = f"at {_short(idlest.within)}" if idlest.within else ""
        details = ", ".join(detail for detail in (idlest.call and f"in {tame(idlest.call, 30)}", within) if detail)
        where = f"{_short(idlest.place)} ({details})" if details else _short(idlest.place)
        yield f"the GPU was idle for {duration(idlest.idle)} while Python was at {where}"


def _how_often(slow: SlowIterations) -> str:
    """`every second iteration takes`, `3 iterations take`."""
    if slow.regular and slow.every >= 1.5 and slow.count > 2:  # two are no pattern
        return f"{every(slow.every, 'iteration')} takes"
    return "one iteration takes" if slow.count == 1 else f"{slow.count} iterations take"


def _short(place: str) -> str:
    return labels.tame(place if len(place) <= 36 else f"…{place[-35:]}", 40)


class PlanRow(NamedTuple):
    """A fix of the plan, with an iteration's time before and after it, as if fixes without a row were not applied."""

    fix: PlannedFix
    before: int
    after: int
    low: int
    high: int
    partners: str  # numbers of the other rows that the fix needs
    only_with: str  # these numbers if the fix saves nothing alone; the last of these rows has the prediction
    run_before: int  # time of the run with all earlier fixes applied; NONE if unknown
    run_after: int


def planned_rows(diagnosis: Diagnosis) -> list[PlanRow]:
    """The fixes that are worth a row, in the order in which to apply them."""
    listed = _worth_a_row(diagnosis)
    names = {fix.named for fix in listed}
    rows = list[PlanRow]()
    run_after, not_saved = diagnosis.run.time if diagnosis.run is not None else 0, Counter[str]()
    for fix in diagnosis.plan:
        run_before, run_after = run_after, max(0, run_after - max(0, fix.run_gain) + fix.once)
        if fix not in listed:
            not_saved[iterations_meant(fix, diagnosis)] += max(0, fix.gain)
            continue
        missing = not_saved[iterations_meant(fix, diagnosis)]
        after, low, high = (time + missing for time in (fix.predicted.step, fix.predicted.low, fix.predicted.high))
        before = after + fix.gain
        partners = ""
        if names.issuperset(fix.needs):
            others = [number for number, other in enumerate(listed, 1) if other.named in fix.needs and other is not fix]
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
        yield line(f"{number}  ", (labels.fix(row.fix.fix), STRONG), *_places(row.fix), "   ", *_after(row, diagnosis))
        for sentence in _explanation(row, diagnosis):
            yield line((sentence, FAINT), indent=3)
    listed = [row.fix for row in rows]
    yield from _too_small(diagnosis, [fix for fix in diagnosis.plan if fix not in listed])


def _too_small(diagnosis: Diagnosis, not_listed: Sequence[PlannedFix]) -> Iterator[RenderableType]:
    """Fixes that are not listed because they would hardly shorten this run."""
    if diagnosis.run is None or not not_listed:
        return
    names = listing(list(dict.fromkeys(labels.fix(fix.fix) for fix in not_listed)))
    time = duration(round(WORTH_A_ROW * diagnosis.run.time))
    each = " each" if len(not_listed) > 1 else ""
    yield line((f"{len(not_listed)} more would save less than {time} of this run{each}: {names}.", FAINT))
    for fix in not_listed:  # other runs of this program may be much longer
        if fix.fix == "compile" and fix.gain > diagnosis.noise:
            saved = f"In a longer run it may save {duration(fix.gain, diagnosis.plain_step)} per iteration."
            yield line((f"{saved} {fix.reason}", FAINT), indent=3)


def _places(fix: PlannedFix) -> tuple[str | tuple[str, str], ...]:
    """` at train.py:31, train.py:40 and 2 more`: lines of files first, then operators."""
    where = sorted(fix.where, key=lambda place: not place.file)
    if not where:
        return ()
    has_comma = any(", " in labels.spot(place, 48) for place in where[:2])  # `aten::mm, after aten::cat` is one place
    shown = where[: 1 if has_comma else 2]
    places = ", ".join(labels.spot(place, 48) for place in shown)
    more = f" and {len(where) - len(shown)} more" if len(where) > len(shown) else ""
    return (labels.leading(places), (f"{places}{more}", PLACE + link_to(shown[0])))


def _worth_a_row(diagnosis: Diagnosis) -> list[PlannedFix]:
    """Fixes that shorten the run, and those that these need; at unknown lines only if no fix has a known one."""
    run, plan = diagnosis.run, diagnosis.plan
    if run is None:
        return list(plan)
    are_lines_known = any(place.is_known for fix in plan for place in fix.where)
    placed = [fix for fix in plan if not (are_lines_known and fix.where) or any(place.is_known for place in fix.where)]
    worth_it = [fix for fix in placed if fix.run_gain == NONE or fix.run_gain >= WORTH_A_ROW * run.time]
    needed = {name for fix in worth_it for name in fix.needs}
    return [fix for fix in plan if fix in worth_it or fix.named in needed]


def _explanation(row: PlanRow, diagnosis: Diagnosis) -> Iterator[str]:
    """Why a fix is in the plan, and which other fixes it needs."""
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
        names = listing([tame(labels.fix(other), 80) for other in dict.fromkeys(fix.needs)])
        needed = f" {row.partners}" if row.partners else f": {names}"
        alone = "alone it saves nothing; " if fix.alone <= diagnosis.noise else ""
        yield f"{alone}it goes together with{needed}"
    if fix.instead:
        yield f"alternatively, {tame(labels.fix(fix.instead[0]), 80)}"


def _after(row: PlanRow, diagnosis: Diagnosis) -> list[tuple[str, str] | str]:
    """The time of an iteration with the fix, and of the run with all fixes up to this one."""
    if row.only_with:
        return [(f"only with {row.only_with}", GAIN)]
    after: list[tuple[str, str] | str] = [
        (f"{transition(row.before, row.after)} {iterations_meant(row.fix, diagnosis)}".rstrip(), GAIN),
        (f" ({span_of(row.low, row.high, row.before)})", FAINT),
    ]
    if row.run_after != NONE:
        after.append((f" · the run {transition(row.run_before, row.run_after)}", GAIN))
    return after


def lateness(late: LateRank, ranks: Sequence[int]) -> str:
    """`Rank 0 arrives 66.6 ms late, and rank 1 waits for it: host work at train.py:46.`"""
    others = [rank for rank in ranks if rank != late.rank]
    waiting = f"rank {others[0]} waits" if len(others) == 1 else f"{len(others)} ranks wait"
    what = ledger_place(late.cause).label
    return f"Rank {late.rank} arrives {duration(late.late)} late, and {waiting} for it: {what}{labels.at(late.where)}."


def of_a_long_run(diagnosis: Diagnosis, hours: float, price: float = 0.0) -> str:
    """What the plan saves in a run of so many hours, if all of it is spent in the loops."""
    run, saved = diagnosis.run, sum(max(0, fix.run_gain) for fix in diagnosis.plan)
    looped = sum(part.time for part in run.parts if part.kind == LOOP) if run is not None else 0
    if not looped or not saved:
        steps = [fix for fix in diagnosis.plan if not fix.loop]
        saved, looped = sum(fix.gain for fix in steps), diagnosis.plain_step
    less, gpus = hours * min(1.0, saved / looped), len(diagnosis.given)
    if not less:
        return f"The plan is empty: it saves nothing in a run of {hours:g} hours."
    together = f", {less * gpus:,.1f} hours of {gpus} GPUs" if gpus > 1 else ""
    worth = f", worth {less * gpus * price:,.2f} at {price:g} per GPU hour" if price else ""
    return f"The plan saves {less:,.1f} of {hours:g} hours{together}{worth}."


def iterations_meant(fix: PlannedFix, diagnosis: Diagnosis) -> str:
    """Which iterations a fix makes shorter."""
    if diagnosis.one_turn and not fix.loop:
        return "for the script" if diagnosis.steps else ""  # else it is the time of one line
    if fix.loop:
        return f"per iteration of the loop at {_loop(fix.loop)}"
    return "per iteration"


def loops(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Other loops that were explained: the time of an iteration, and how much of it the GPU computes."""
    for loop in diagnosis.loops:
        inner = loop.diagnosis
        often = f", {loop.turns:,} of them" if loop.turns else ""
        computing = share(inner.ledger.get(COMPUTING, 0), inner.plain_step)
        alone = " without its inner loops" if _is_part(diagnosis.run, loop.place, inner.plain_step) else ""
        takes = f": an iteration{alone} takes {duration(inner.plain_step)}{often}. The GPU computes {computing} of it."
        nothing = "" if inner.plan else " There is nothing to save."
        yield line(("The loop at ", STRONG), (_loop(loop.place), PLACE), takes, nothing)
        yield line("")


def _loop(name: str) -> str:
    """`train.py:31`, or `train.py:31 (trainer.py:1842)` for a loop inside a library."""
    place, _, function = name.partition(" (")
    return _short(place) + (f" ({_line_in_library(function)})" if function else "")


def _line_in_library(function: str) -> str:
    """`trainer.py:1842` of `lib/trainer.py:1842 in fit`."""
    return tame(function.removesuffix(")").partition(" in ")[0].rpartition("/")[2])


def _is_part(run: Part | None, place: str, iteration_time: int) -> bool:
    """True if the explained time is an iteration of this loop without its inner loops."""
    same_loop = [part for part in (run.within() if run is not None else ()) if part.named == place and part.parts]
    return any(part.turn > 1.5 * iteration_time and part.parts[0].kind == LOOP for part in same_loop)


def margin(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a sentence: the run as a whole, harmless lines, late ranks that no cause names, notes."""
    yield from asides(diagnosis.plain_runs)
    label, describe = ("line", _lessons) if diagnosis.one_turn else ("ignore", _harmless)
    yield from ((label, sentence) for sentence in describe(diagnosis.harmless, diagnosis.plain_step))
    bubble = diagnosis.ledger.get("pipeline_bubble", 0)
    if bubble > diagnosis.noise:
        lost = f"{duration(bubble, diagnosis.plain_step)} per iteration ({share(bubble, diagnosis.plain_step)})"
        yield "bubble", f"the pipeline stages wait {lost} for each other's messages"
    if not AMONG_RANKS & {cause.cause for cause in diagnosis.causes}:
        yield from (("late", lateness(late, diagnosis.given)) for late in diagnosis.late)
    yield from (("note", tame(note)) for note in diagnosis.notes)


def _harmless(seen: Iterable[Harmless], step: int) -> Iterator[str]:
    """`host sync at train.py:60 (12 per iteration) costs nothing here: …`; places with the same reason share it."""

    def key(harmless: Harmless) -> tuple[int, str]:
        return (CAUSES.index(harmless.cause) if harmless.cause in CAUSES else len(CAUSES), harmless.why)

    for (_, why), group in groupby(sorted(seen, key=key), key):
        places = list(group)
        total, name = sum(harmless.count for harmless in places), ledger_place(places[0].cause).label
        where = labels.at(max(places, key=lambda harmless: harmless.count).where, 50)
        more = f" and {len(places) - 1} more place{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        often = f"{count(total)} per iteration" if count(total) != "0" else every(1 / total, "iteration")
        gain, cost = places[0].gain, "costs nothing here"
        if gain >= 0.005 * step:
            cost = f"costs less than the noise here ({duration(gain, step)})"
        yield f"{name}{where}{more} ({often}) {cost}: {tame(why)}"


def _lessons(seen: Iterable[Harmless], step: int) -> Iterator[str]:
    """For a script without steps: the lines that block Python, and why."""
    for harmless in sorted(seen, key=lambda harmless: -harmless.held):
        if harmless.why and harmless.held >= LESSON_MATTERS * step:
            often = f", {count(harmless.count)} times" if harmless.count > 1 else ""
            blocked = f"blocks Python for {duration(harmless.held, step)}{often}"
            yield f"{labels.spot(harmless.where, 50)} {blocked}: {tame(harmless.why)}"


def asides(runs: Mapping[int, PlainRun]) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a sentence about the steps that were not recorded, of the first rank."""
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
"""The live report has at most so many lines, one for so many rows of the terminal; a small terminal has one line."""


def live_lines(diagnosis: Diagnosis | None, size: tuple[int, int], colour: bool = True) -> list[str]:
    """The longest loops, the first fix of the plan, and the line about iterations."""
    width, rows = size
    last = live_line(diagnosis, width, colour)
    run = diagnosis.run if diagnosis is not None else None
    if diagnosis is None or run is None or width < _ROOM_FOR_A_TREE[0] or rows < _ROOM_FOR_A_TREE[1]:
        return [last]
    texts = [*_loops_so_far(run, min(_MOST_LINES, rows // _ROWS_A_LINE) - 1 - bool(diagnosis.plan))]
    for first in diagnosis.plan[:1]:
        where = labels.at(first.where[0], 30) if first.where else ""
        gain = transition(first.predicted.step + first.gain, first.predicted.step)
        texts.append(Text.assemble((f"1  {labels.fix(first.fix)}{where}", STRONG), f"  {gain} per iteration"))
    for text in texts:
        text.truncate(width - 1, overflow="ellipsis")
    return [*(laid_out([text], width, colour) for text in texts), last]


def _loops_so_far(run: Part, room: int) -> Iterator[Text]:
    """The run and its longest loops, in the order of the run."""
    loops = [(depth, part) for depth, part in _with_depth(run, 0) if part.time >= WORTH_A_LINE * run.time]
    shortest = sorted((part.time for _, part in loops), reverse=True)[: max(0, room - 1)]
    at_work = f", GPU busy {share(run.busy, run.time)}" if run.busy != NONE else ""
    yield Text.assemble((f"{duration(run.time)} so far{at_work}", FAINT))
    for depth, part in loops:
        if shortest and part.time >= shortest[-1]:
            iterations = f"  ×{part.turns:,}" if part.turns else ""
            iteration_time = f"  {duration(part.turn)} per iteration" if part.turn != NONE else ""
            busy = f"  GPU busy {share(part.busy, part.time)}" if part.busy != NONE else ""
            place = labels.tame(part.place.rpartition("/")[2], 30)
            yield Text.assemble(
                f"{'  ' * depth}{place}{iterations}  ", (duration(part.time, run.time), STRONG), iteration_time, busy
            )


def _with_depth(part: Part, depth: int) -> Iterator[tuple[int, Part]]:
    for inner in part.parts:
        if inner.kind == LOOP:
            yield depth, inner
            yield from _with_depth(inner, depth + 1)


_Piece: TypeAlias = tuple[str, str]
"""A text and its style."""


def live_line(diagnosis: Diagnosis | None, width: int, colour: bool = True) -> str:
    """The time of an iteration, how busy the GPU is, and the worst line; a narrow terminal shows only the last."""
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
            worst = [(f"{ledger_place(cause.cause).label} {labels.spot(where, 30)}: {wait} per iteration", STRONG)]
    for pieces in ([*time, *computes, *worst], [*time, *worst], worst):
        text = Text.assemble(("keepbusy", STRONG), *((f" · {piece}", style) for piece, style in pieces))
        if text.cell_len < width:
            break
    text.truncate(width - 1, overflow="ellipsis")
    return laid_out([text], width, colour)
