"""The verdict: what the run was, why the GPU is idle, what to do, and the next command, in at most twelve lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
from keepbusy.report import race_words, run_report, words
from keepbusy.report.paper import BROKEN, FAINT, GAIN, PLACE, STRONG, WITHOUT_END, laid_out, link_to
from keepbusy.report.run_report import PlanRow
from keepbusy.report.source import source_of
from keepbusy.report.words import look, tame
from keepbusy.timeline.figures import change, duration, figure, share, span_of, transition
from keepbusy.timeline.model import NONE

HEIGHT, WIDTH = 12, 80
"""Lines and columns of a verdict at most."""
LONGEST_PLACE = 28
MOST_LEFT = 3
"""Fixes that a run with fixes leaves to its author, the first of the plan."""
_LAYOUTS = (
    *((listed, side_by_side, [Text()]) for listed in (3, 2) for side_by_side in (False, True)),
    (2, True, []),
    (1, True, []),
)
"""The first that fits: fixes that are listed, whether commands stand side by side, and what follows the header."""
_UNEXPLAINED = 0.1
"""Of an iteration: if more of it is unknown, nobody can say that nothing can be saved."""


class Commands(NamedTuple):
    """What the reader can do next; empty where it is not possible."""

    fix_now: str = ""
    write_fix: str = ""
    page: str = ""
    full: str = ""


def render(
    diagnosis: Diagnosis,
    commands: Commands = Commands(),  # noqa: B008 -- it cannot change
    width: int = WIDTH,
    *,
    colour: bool = False,
    unicode: bool = True,
) -> str:
    """The verdict as text. A command is never broken: it is there to be pasted."""
    shown = lines(diagnosis, commands, min(width, WIDTH))
    return laid_out(shown, WITHOUT_END, colour, unicode, links=colour)


def fixed_lines(made: Mapping[str, Any], graphs: Sequence[str], diagnosis: Diagnosis) -> list[str]:
    """What a run with fixes made of its plan, what not, what became of the graphs, and what an iteration takes now."""
    rows = [f"made          {words.fix(way)} at {where}" for way, where in made["written"]] or ["made          nothing"]
    rows += [f"graph         {tame(one)}" for one in (graphs[0].splitlines() if graphs else ())]
    rows += [f"              in one of {len(graphs)} processes"] * bool(graphs[1:])
    rows += [f"left to you   {words.fix(fix)}{where}: {why}" for fix, where, why in made["left"][:MOST_LEFT]]
    if made["written"] and (iteration := _iteration(made, diagnosis)):
        before, now = iteration
        rows.append(f"an iteration  {transition(before, now)}, {change(before, now)}")
    return rows


def _iteration(made: Mapping[str, Any], diagnosis: Diagnosis) -> tuple[int, int] | None:
    """Of the loop that the plan is about, before and now: fewer launches may make another one the run's main loop."""
    if made["loop"] and made["loop"] == diagnosis.loop:
        return made["step"], diagnosis.plain_step
    now = diagnosis.usual_of(made["loop"])
    return (made["usual"], now) if made["usual"] > 0 and now > 0 else None


def render_fixed(
    diagnosis: Diagnosis, fixed: list[str], commands: Commands, width: int, *, colour: bool, unicode: bool
) -> str:
    """Of a run with fixes: what it was, and what they did. A plan of what is left is that of the next plain run."""
    width = min(width, WIDTH)
    why = [Text(line) for line in textwrap.wrap(statement(diagnosis), width)]
    first = [*alarms(diagnosis, width), header(diagnosis, width), Text(), *why, Text()]
    below = next_commands(commands, width, side_by_side=True)
    return laid_out([*first, *map(Text, fixed), Text(), *below], WITHOUT_END, colour, unicode, links=colour)


def lines(diagnosis: Diagnosis, commands: Commands, width: int) -> list[Text]:
    """One text a line. If there are too many, fewer fixes are listed, and commands stand side by side."""
    rows = run_report.planned_rows(diagnosis)
    first = [*alarms(diagnosis, width), header(diagnosis, width)]
    why = [Text(line) for line in textwrap.wrap(statement(diagnosis), width)]
    without_fixes = commands._replace(fix_now="", write_fix="")
    if diagnosis.cut_short is not None:  # it would fail again
        commands = without_fixes
    if not rows:
        return [*first, *why, *next_commands(without_fixes, width, side_by_side=True)]
    for listed, side_by_side, blank in _LAYOUTS:
        items = _items(diagnosis, rows, listed, width)
        below = next_commands(commands, width, side_by_side)
        whole = [*first, *blank, *why, Text(), *items, *([Text(), *below] if below else [])]
        if len(whole) <= HEIGHT:
            break
    return whole


def alarms(diagnosis: Diagnosis, width: int) -> list[Text]:
    """Above all else: that the program did not come to its end, or that its results depend on who is faster."""
    race = broken(race_words.in_short(diagnosis.races), width)
    return [*broken(run_report.cut_short(diagnosis), width), *race, *([Text()] if race else [])]


def broken(sentence: str, width: int) -> list[Text]:
    return [Text(line, BROKEN) for line in textwrap.wrap(sentence, width)]


def header(diagnosis: Diagnosis, width: int) -> Text:
    """`keepbusy · train.py · NVIDIA H100 · 19.4 s, 1,200 iterations of train.py:670`; with less of it if narrow."""
    ranks = len(diagnosis.given)
    device = re.sub(r"[ -]\d+GB\b.*", "", tame(diagnosis.device, 40))  # `NVIDIA H100 80GB HBM3` is an H100 to people
    facts = [words.files(diagnosis.sources), device, f"{ranks:,} ranks" if ranks > 1 else ""]
    length = _length(diagnosis)
    short = re.sub(rf" of (?:\S*/)?{re.escape(facts[0])}:", " of line ", length) if facts[0] else length
    shortest = length.partition(" of ")[0]
    for shown in ([*facts, length], [*facts, short], [*facts, shortest], [facts[0], facts[2], shortest], [shortest]):
        text = "".join(f" · {fact}" for fact in shown if fact)
        if len("keepbusy" + text) <= width:
            break
    return Text.assemble(("keepbusy", STRONG), (tame(text, width - len("keepbusy")), FAINT))


def _length(diagnosis: Diagnosis) -> str:
    """How long the run took, and how many iterations its main loop had; of a trace, how many it shows."""
    run = diagnosis.run
    if run is None:
        iterations = f"{diagnosis.steps} iteration{'' if diagnosis.steps == 1 else 's'}"
        return "" if diagnosis.one_turn or not diagnosis.steps else f"{iterations} recorded"
    loop = run.loop_at(diagnosis.loop) if diagnosis.loop else None
    if loop is None or not loop.turns or loop.at_least:
        return duration(run.time)
    return f"{duration(run.time)}, {loop.turns:,} iterations of {short_place(Where.of(loop.place))}"


def statement(diagnosis: Diagnosis) -> str:
    """How busy the GPU is, and why it is not busier."""
    rows = run_report.planned_rows(diagnosis)
    busy, run = "", diagnosis.run
    if not diagnosis.steps:
        if run is not None and run.busy != NONE:
            busy = f"The GPU is busy {share(run.busy, run.time)} of the run."
            busy = busy if run.busy else "The GPU computed nothing in this run."
    elif diagnosis.plain_step:
        at_work = diagnosis.plain_step - diagnosis.waiting
        what = "the script" if diagnosis.one_turn else "an iteration"
        busy = f"The GPU is busy {share(at_work, diagnosis.plain_step)} of {what}."
    why = _reason(diagnosis, rows[0].fix) if rows else _nothing_to_save(diagnosis)
    return f"{busy} {why}".strip()


def _reason(diagnosis: Diagnosis, first: PlannedFix) -> str:
    """Why the GPU is idle where the first fix helps."""
    if first.late:
        return run_report.lateness(first.late[0], diagnosis.given)
    cause = first.causes[0] if first.causes else ""
    seen = next((one for one in diagnosis.causes if one.cause == cause), None)
    if cause == "launch_bound" and seen is not None and round(seen.count) > 1:
        per = "" if diagnosis.one_turn else " per iteration"
        return f"Python launches {seen.count:,.0f} kernels{per}, and the GPU finishes each before the next arrives."
    sentence = look(cause).sentence if cause else ""
    sentence = sentence.removesuffix(" in the loop") if diagnosis.one_turn else sentence
    where = f"In the loop at {short_place(Where.of(first.loop.partition(' (')[0]))}: " if first.loop else ""
    return f"{where}{sentence}." if sentence else tame(first.reason)


def _nothing_to_save(diagnosis: Diagnosis) -> str:
    """Why there is no fix; if much of the time is not explained, that is no proof that nothing can be saved."""
    step, much = diagnosis.plain_step, max(diagnosis.noise, _UNEXPLAINED * diagnosis.plain_step)
    unknown, launches = (diagnosis.ledger.get(cause, 0) for cause in ("unknown", "launch_bound"))
    if not step and diagnosis.run is not None and diagnosis.run.busy == NONE:
        return "Too few of its kernels were timed to say when the GPU was idle; a longer run would show it."
    if not step:
        return "No fix was found."
    if unknown > much:
        return f"It is idle for {duration(unknown, step)} for reasons that this recording does not show."
    if diagnosis.ledger.get("pipeline_bubble", 0) > diagnosis.noise:
        return "Pipeline stages wait for each other, and no line is to blame."
    if launches > much:
        return f"It waits {duration(launches, step)} for launches, and no fix is predicted to save them."
    known = [one for one in diagnosis.causes if one.cause != "launch_bound"]  # of which a graph holds too little
    if cause := next((one for one in known if step - one.predicted.step > diagnosis.noise), None):
        return f"{look(cause.cause).sentence}."
    noise = f" ({duration(diagnosis.noise)})" if diagnosis.noise else ""
    return f"No fix saves more than the noise{noise}."


def _items(diagnosis: Diagnosis, rows: list[PlanRow], listed: int, width: int) -> list[Text]:
    """A fix a line; where that is too wide, the fix with its prediction, and its place below it."""
    shown = rows[:listed]
    while len(shown) > 1 and _shows_no_difference(shown[-1]):
        del shown[-1]
    names, predictions = [words.fix(row.fix.fix) for row in shown], [_in_short(row) for row in shown]
    room = width - 3 - 2 - 2 - max(map(len, names)) - max(map(len, predictions))
    places = [_region(row.fix) or _place(row.fix.where) for row in shown]
    if max(map(len, places)) > room:
        places = [_region(row.fix) or _place(row.fix.where, most_lines=1) for row in shown]
    is_narrow = max(map(len, places)) > room
    items = list[Text]()
    for number, (row, place, name, prediction) in enumerate(zip(shown, places, names, predictions, strict=True), 1):
        style = PLACE + (link_to(row.fix.where[0]) if place else "")
        if not is_narrow:
            text = Text(f"{number}  ", STRONG)
            if any(places):
                text.append(place.ljust(max(map(len, places))), style).append("  ")
            text.append(name, STRONG)
            below = (
                [Text(f"     {code}", FAINT)]
                if (len(shown) == 1 or row.fix.first) and (code := _code(row.fix, width - 5))
                else []
            )
        else:
            text = Text.assemble((f"{number}  ", STRONG), (tame(name, width - 5 - len(prediction)), STRONG))
            code = _code(row.fix, width - 5 - len(place))
            below = [Text.assemble("   ", (place, style), (f"  {code}".rstrip(), FAINT))]
        text.append(" " * max(2, width - text.cell_len - len(prediction)))
        items += [text.append(prediction, GAIN), *below]
    if total := _total(diagnosis, rows):
        items.append(Text(f"   {total}", GAIN))
    return items


def _prediction(row: PlanRow) -> str:
    """`8.5 → 1.4 ms (1.3–1.6)`, or with which others it goes."""
    if row.only_with:
        return f"only with {row.only_with}"
    return f"{transition(row.before, row.after)} ({span_of(row.low, row.high, row.before)})"


def _in_short(row: PlanRow) -> str:
    """The run where it is of another loop, whose iterations are named nowhere else."""
    if row.fix.loop and row.run_after != NONE and not row.only_with:
        return f"the run {transition(row.run_before, row.run_after)}"
    return _prediction(row)


def _shows_no_difference(row: PlanRow) -> bool:
    """`the run 116 → 116 ms` is no news to anybody."""
    of_run = row.fix.loop and row.run_after != NONE
    before, after = (row.run_before, row.run_after) if of_run else (row.before, row.after)
    return not row.only_with and figure(before, before) == figure(after, before)


def _total(diagnosis: Diagnosis, rows: list[PlanRow]) -> str:
    """What all of the plan's fixes save together, by iteration first."""
    of_steps = [row for row in rows if not row.fix.is_beside_steps and not row.only_with]
    together = {1: "", 2: "both: "}.get(len(rows), f"all {len(rows)}: ")
    faster = ""
    if of_steps and of_steps[-1].after and len(rows) > 1 and not diagnosis.one_turn:
        factor = of_steps[0].before / of_steps[-1].after
        faster = f"{factor:.1f}x as fast per iteration" if factor >= 1.05 else ""
    run_after = next((row.run_after for row in reversed(rows) if row.run_after != NONE), NONE)
    whole = ""
    if diagnosis.run is not None and run_after != NONE:
        whole = f"this run {transition(diagnosis.run.time, run_after)}"
    told = ", ".join(part for part in (faster, whole) if part)
    return f"{together}{told}" if told else ""


def _region(fix: PlannedFix) -> str:
    """`train.py:31-38`: from the first to the last line that a graph holds, in the function that launches most.

    "" where lines are not known exactly."""
    known = {place.file for place in fix.where if place.exact}
    held = [one for one in fix.captured if one.file in known and one.launching]
    if not held:
        return ""
    lines = [line for line, _ in held[0].launching]
    last, more = f"-{lines[-1]}" if lines[1:] else "", f" +{len(held) - 1}" if held[1:] else ""
    return f"{short_place(Where(file=held[0].file, line=lines[0], exact=True))}{last}{more}"


def _place(where: tuple[Where, ...], most_lines: int = 3) -> str:
    """`train.py:31, 35 +2`: lines of one file together, and how many more there are."""
    known = list(dict.fromkeys(place for place in where if place.file))
    if not known:
        return words.cut(words.spot(where[0], LONGEST_PLACE), LONGEST_PLACE) if where else ""
    shown, listed = short_place(known[0]), 1
    for place in known[1:most_lines]:
        if place.file != known[0].file or len(f"{shown}, {place.line}") > LONGEST_PLACE - 3:
            break
        shown, listed = f"{shown}, {place.line}", listed + 1
    return f"{shown} +{len(known) - listed}" if len(known) > listed else shown


def short_place(where: Where) -> str:
    """`train.py:31`, with its folder where there is room, cut in the middle and never in front of the file's name."""
    if not where.file:
        return words.cut(str(where), LONGEST_PLACE)
    path, line = where.file.replace("\\", "/"), f":{where.line}" if where.line else ""
    about = "" if where.exact or not where.line else "near "
    room = LONGEST_PLACE - len(line) - len(about)
    if len(path) > room:
        folders, _, name = path.rpartition("/")
        first = folders.partition("/")[0]
        path = next((cut for cut in (f"{first}/…/{name}", f"…/{name}") if first and len(cut) <= room), name)
    return f"{about}{tame(path, room)}{line}"


def _code(fix: PlannedFix, room: int) -> str:
    """What has to be done first, or the user's own line."""
    if fix.first and room > 8:
        return words.cut(f"first {words.fix(fix.first)}", room)
    source = source_of(fix.where[0]) if fix.where and fix.where[0].file else None
    return words.cut(source.text, room) if source and room > 8 else ""


def next_commands(commands: Commands, width: int, side_by_side: bool) -> list[Text]:
    """A command a line; two on one line, where that fits."""
    now, write = ("Try it now", commands.fix_now), ("Write it", commands.write_fix)
    page, full = ("Look at it", commands.page), ("More", commands.full)
    pairs = [(now, write), (page, full)] if side_by_side else [(now,), (write,), (page, full)]
    shown = list[Text]()
    for pair in pairs:
        entries = [(label, command) for label, command in pair if command]
        texts = [Text.assemble((f"{label:12}", FAINT), command) for label, command in entries]
        if len(texts) == 2:
            label, command = entries[1]
            together = Text.assemble(texts[0], "   ", (f"{label}  ", FAINT), command)
            texts = [together] if together.cell_len <= width else texts
        shown += texts
    return shown


class Item(NamedTuple):
    """A fix of the verdict, in words."""

    place: str
    fix: str
    prediction: str


class Summary(NamedTuple):
    """The verdict in parts, for reports that are not text."""

    header: str
    headline: str  # the largest saving: by iteration, or of the run if it is in another loop; empty if there is none
    largest: int  # the number of the item that saves it, from 0
    statement: str
    items: tuple[Item, ...]
    total: str


def summary(diagnosis: Diagnosis) -> Summary:
    """The same words and numbers as in `lines`, of all fixes."""
    rows = run_report.planned_rows(diagnosis)
    items = tuple(Item(_place(row.fix.where), words.fix(row.fix.fix), _prediction(row)) for row in rows)
    are_runs_known = all(row.run_after != NONE for row in rows)
    of_run = [row.run_before - row.run_after if are_runs_known else row.before - row.after for row in rows]
    savings = [0 if row.only_with else saved for row, saved in zip(rows, of_run, strict=True)]
    largest = max(range(len(rows)), key=savings.__getitem__, default=NONE)
    headline = ""
    if rows and savings[largest] > 0:
        row = rows[largest]
        headline = f"{transition(row.before, row.after)} per iteration"
        of_all = (row.run_before, row.run_after) if row.run_after != NONE else (row.before, row.after)
        if diagnosis.one_turn:
            headline = f"{transition(*of_all)} for the script"
        elif row.fix.loop and row.run_after != NONE:
            headline = f"{transition(*of_all)} for the run"
    first = header(diagnosis, WITHOUT_END).plain.removeprefix("keepbusy · ")
    alarming = (run_report.cut_short(diagnosis), race_words.in_short(diagnosis.races))
    why = " ".join(filter(None, (*alarming, statement(diagnosis))))
    return Summary(first, headline, largest, why, items, _total(diagnosis, rows))
