"""The whole run on a few lines: what it took, its tree of loops, and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepbusy.explain.diagnosis import COMPUTING, Diagnosis, Late, PlannedFix
from keepbusy.report import words
from keepbusy.report.paper import FAINT, GAIN, PLACE, STRONG, line, link_to, look
from keepbusy.report.words import duration, share, tame
from keepbusy.timeline.model import NONE
from keepbusy.timeline.run_tree import FIRST_USE, IMPORTS, LOOP, Part, SlowTurns

WORTH_A_LINE = 0.02
"""Of the run: parts that take less stand together in one line."""
MOST_PARTS = 12
_NAMES = {IMPORTS: "imports", FIRST_USE: "first use of the GPU"}


def headline(run: Part) -> str:
    """`26.1 s, of which the GPU computed 4.3 s (16%)`."""
    if run.busy == NONE:
        return f"The run took {duration(run.time)}."
    at_work = f"{duration(run.busy)} of it ({share(run.busy, run.time)})"
    return f"The run took {duration(run.time)}, and the GPU was at work for {at_work}."


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
        _rows(table, part, run, 0, width)
    if small:
        table.add_row("the rest", "", duration(sum(part.time for part in small), run.time), Text(_named(small), FAINT))
    yield table


def _named(parts: Sequence[Part]) -> str:
    """`imports 5.1 s, first use of the GPU 2.2 s, train.py:31 0.4 s`."""
    ordered = sorted(parts, key=lambda part: -part.time)[:3]
    told = [part for part in ordered if part.time >= WORTH_A_LINE * ordered[0].time]
    return ", ".join(f"{_place(part)} {duration(part.time)}" for part in told)


def _place(part: Part) -> str:
    """Beside all lines of the program is what the GPU still does once they are through."""
    return _NAMES.get(part.kind) or _short(part.place) or "the end"


def _rows(table: Table, part: Part, run: Part, depth: int, width: int) -> None:
    turns = f"×{part.turns:,}{'+' if part.at_least else ''}" if part.turns and part.kind == LOOP else ""
    place = Text.assemble("  " * depth, (_place(part), PLACE), "  ", tame(_heading(part), max(12, width // 3)))
    table.add_row(place, turns, duration(part.time, run.time), _about(part))
    for more in _sentences(part):
        table.add_row("", "", "", Text(more, FAINT))
    for inner in part.parts:
        if inner.time >= WORTH_A_LINE * run.time:
            _rows(table, inner, run, depth + 1, width)


def _heading(part: Part) -> str:
    """The line's own text; of a loop that a library holds, where that is."""
    held = f"  in {part.function}" if part.kind == LOOP and ":" in part.function else ""
    return f"{part.source.removesuffix(':')}{held}"


def _about(part: Part) -> str:
    found = []
    if part.kind == LOOP and part.turn != NONE:
        among = f" ({words.span_of(part.low, part.high, part.turn)})" if part.low != NONE else ""
        found.append(f"{duration(part.turn)} a turn{among}")
    if part.busy != NONE:
        found.append(f"GPU at work {share(part.busy, part.time)}")
    return ", ".join(found)


def _sentences(part: Part) -> Iterator[str]:
    """What is out of the ordinary in a loop: turns that take longer, the first ones, a line where the GPU is idle."""
    if part.kind != LOOP:
        return
    for slow in part.kinds:
        if slow.total > (WORTH_A_LINE if slow.regular else 0.1) * part.time:
            where = f", at {_short(slow.place)}" if slow.place else ""
            yield f"{_how_often(slow)} {duration(slow.longer)} longer{where}"
    if part.warm_up_time > 0.05 * part.time:
        turns = f"{part.warm_up} turns" if part.warm_up > 1 else "turn"
        yield f"warm-up: {duration(part.warm_up_time)} more in the first {turns}"
    idlest = max(part.lines, key=lambda one: one.idle, default=None)
    if idlest is not None and idlest.idle > 0.1 * part.time and not part.parts:
        call = f" (in {tame(idlest.call, 30)})" if idlest.call else ""
        where = f"{_short(idlest.place)}{call}"
        yield f"the GPU had nothing to do for {duration(idlest.idle)} while the host was at {where}"


def _how_often(slow: SlowTurns) -> str:
    """`every second turn takes`, `3 turns take`."""
    if slow.regular and slow.every >= 1.5:
        return f"every {_ordinal(round(slow.every))} turn takes"
    return "one turn takes" if slow.count == 1 else f"{slow.count} turns take"


def _ordinal(number: int) -> str:
    named = {1: "", 2: "second", 3: "third", 4: "fourth", 5: "fifth"}
    return named.get(number) or f"{number}th"


def _short(place: str) -> str:
    return words.tame(place if len(place) <= 36 else f"…{place[-35:]}", 40)


def plan(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """What to do first, what then, and where the run stands after each."""
    if not diagnosis.plan:
        return
    yield line(("What to do", STRONG))
    saved = 0
    for number, one in enumerate(diagnosis.plan, 1):
        before, saved = saved, saved + max(0, one.run_gain)
        places = ", ".join(words.spot(place, 48) for place in one.where[:2])
        more = f" and {len(one.where) - 2} more" if len(one.where) > 2 else ""
        where = (" at ", (f"{places}{more}", PLACE + link_to(one.where[0]))) if places else ()
        others = _partners(diagnosis, one)
        waits = bool(others) and one.gain <= diagnosis.noise  # the last of them tells what they save together
        after = [(f"only with {others}", GAIN)] if waits else _after(diagnosis, one, before, saved)
        yield line(f"{number}  ", (words.fix(one.fix), STRONG), *where, "   ", *after)
        for sentence in _said_of(one, diagnosis, others, waits):
            yield line((sentence, FAINT), indent=3)


def _said_of(one: PlannedFix, diagnosis: Diagnosis, partners: str, waits: bool) -> Iterator[str]:
    """Why a fix is in the plan, and with which others it goes, unless it `waits` for the last of them to tell."""
    if one.reason:
        yield tame(one.reason)
    for late in one.late:
        yield tame(lateness(late, diagnosis.given))
    if one.needs and not waits:
        named = words.listing([tame(words.fix(other), 80) for other in dict.fromkeys(one.needs)])
        needed = f" {partners}" if partners else f": {named}"
        alone = "alone it gains nothing; " if one.alone <= diagnosis.noise else ""
        yield f"{alone}it goes together with{needed}"
    if one.instead:
        yield f"or {tame(words.fix(one.instead[0]), 80)} instead: either of the two"


def _partners(diagnosis: Diagnosis, one: PlannedFix) -> str:
    """Without which fixes it gains nothing, as the plan numbers them; nothing where one of them is not in it."""
    numbers = {other.named: number for number, other in enumerate(diagnosis.plan, 1)}
    known = all(other in numbers for other in one.needs)
    return words.listing([str(number) for number in sorted({numbers[other] for other in one.needs})]) if known else ""


def _after(diagnosis: Diagnosis, one: PlannedFix, before: int, saved: int) -> list[tuple[str, str] | str]:
    """A turn and the run once it is made; `before` and `saved`: of the run, without it and with it."""
    whole = words.transition(*_run(diagnosis, before, saved)) if diagnosis.run is not None and saved else ""
    turn = one.predicted.step + one.gain
    after = Text.assemble(
        (f"{words.transition(turn, one.predicted.step)} {turns_meant(one)}", GAIN),
        (f" ({words.span_of(one.predicted.low, one.predicted.high, turn)})", FAINT),
        (f" · the run {whole}" if whole else "", GAIN),
    )
    return _pieces(after)


def lateness(late: Late, ranks: Sequence[int]) -> str:
    """`Rank 0 arrives 66.6 ms late, and rank 1 waits for it: host work at train.py:46.`"""
    others = [rank for rank in ranks if rank != late.rank]
    who = f"rank {others[0]} waits" if len(others) == 1 else f"{len(others)} ranks wait"
    what = look(late.cause).name
    return f"Rank {late.rank} arrives {duration(late.late)} late, and {who} for it: {what}{words.at(late.where)}."


def of_a_long_run(diagnosis: Diagnosis, hours: float, price: float = 0.0) -> str:
    """What the plan saves of a run of so many hours: its start counts for nothing, its loops for all of it."""
    run, saved = diagnosis.run, sum(max(0, one.run_gain) for one in diagnosis.plan)
    looped = sum(part.time for part in run.parts if part.kind == LOOP) if run is not None else 0
    if not looped or not saved:
        steps = [one for one in diagnosis.plan if not one.loop and not one.every]
        saved, looped = sum(one.gain for one in steps), diagnosis.plain_step
    less, gpus = hours * min(1.0, saved / looped), len(diagnosis.given)
    if not less:
        return f"The plan is empty: it saves nothing of a run of {hours:g} hours."
    together = f", {less * gpus:,.1f} of its {gpus} GPUs together" if gpus > 1 else ""
    worth = f"; at {price:g} an hour of a GPU that is {less * gpus * price:,.2f}" if price else ""
    return f"The plan saves {less:,.1f} hours of a run of {hours:g} hours{together}{worth}."


def turns_meant(one: PlannedFix) -> str:
    """Of which turns the fix speaks."""
    if one.loop:
        return f"a turn of the loop at {_short(one.loop)}"
    if one.every:
        return f"every {_ordinal(round(one.every))} step".replace("  ", " ")
    return "a step"


def _pieces(text: Text) -> list[tuple[str, str] | str]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def _run(diagnosis: Diagnosis, *saved: int) -> tuple[int, int]:
    whole = diagnosis.run.time if diagnosis.run is not None else 0
    before, after = (max(0, whole - one) for one in saved)
    return before, after


def loops(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Other loops that were looked at: what a turn of each takes, and why the GPU waits in it."""
    for one in diagnosis.loops:
        inner = one.diagnosis
        often = f", {one.turns:,} of them" if one.turns else ""
        computing = share(inner.ledger.get(COMPUTING, 0), inner.plain_step)
        takes = f": a turn takes {duration(inner.plain_step)}{often}; the GPU computes {computing} of it."
        nothing = "" if inner.plan else " Nothing to gain there."
        yield line(("The loop at ", STRONG), (_short(one.place), PLACE), takes, nothing)
        yield line("")


def planned(diagnosis: Diagnosis) -> list[dict[str, object]]:
    """The plan as JSON: `step` in milliseconds, `run` in seconds, each as it stands after all fixes so far."""
    rows, saved = list[dict[str, object]](), 0
    for one in diagnosis.plan:
        saved += max(0, one.run_gain)
        rows.append(_planned(diagnosis, one, saved))
    return rows


def _planned(diagnosis: Diagnosis, one: PlannedFix, saved: int) -> dict[str, object]:
    known = diagnosis.run is not None and one.run_gain != NONE
    run = round(_run(diagnosis, 0, saved)[1] / 1e9, 3) if known else None
    return {
        "fix": one.fix,
        "where": [str(place) for place in one.where],
        "causes": list(one.causes),
        "gain": round(one.gain / 1e6, 6),
        "step": round(one.predicted.step / 1e6, 6),
        "low": round(one.predicted.low / 1e6, 6),
        "high": round(one.predicted.high / 1e6, 6),
        "run": run,
        "alone": round(one.alone / 1e6, 6),
        "needs": list(one.needs),
        "instead": list(one.instead),
        "remedy": one.api,
        "loop": one.loop,
        "every": round(one.every, 3),
    }


def run_as_json(run: Part | None) -> dict[str, object] | None:
    """The tree: times in seconds, of a turn in milliseconds."""
    if run is None:
        return None
    return {
        "kind": run.kind,
        "where": run.place,
        "source": run.source,
        "function": run.function,
        "began": round(run.began / 1e9, 6),
        "time": round(run.time / 1e9, 6),
        "busy": None if run.busy == NONE else round(run.busy / 1e9, 6),
        "turns": run.turns or None,
        "at_least": run.at_least,
        "turn": _milliseconds(run.turn),
        "low": _milliseconds(run.low),
        "high": _milliseconds(run.high),
        "warm_up": {"turns": run.warm_up, "time": round(run.warm_up_time / 1e9, 6)},
        "kinds": [
            {
                "count": one.count,
                "every": one.every,
                "regular": one.regular,
                "longer": _milliseconds(one.longer),
                "total": round(one.total / 1e9, 6),
                "where": one.place,
            }
            for one in run.kinds
        ],
        "lines": [
            {
                "where": one.place,
                "time": round(one.time / 1e9, 6),
                "idle": None if one.idle == NONE else round(one.idle / 1e9, 6),
                "call": one.call,
            }
            for one in run.lines
        ],
        "parts": [run_as_json(part) for part in run.parts],
    }


def _milliseconds(time: int) -> float | None:
    return None if time == NONE else round(time / 1e6, 6)
