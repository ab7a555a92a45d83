"""The verdict: what the run was, why the GPU is idle, what to do, and the next command, in at most twelve lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
from keepbusy.report import labels, race_words, run_report
from keepbusy.report.labels import ledger_place, tame
from keepbusy.report.paper import BROKEN, FAINT, GAIN, PLACE, STRONG, WITHOUT_END, laid_out, link_to
from keepbusy.report.run_report import PlanRow
from keepbusy.report.source import source_of
from keepbusy.timeline.figures import change, duration, figure, share, span_of, transition
from keepbusy.timeline.model import NONE

HEIGHT, WIDTH = 12, 80
"""The most lines and columns of a verdict."""
LONGEST_PLACE = 28
MOST_LEFT = 3
"""So many fixes that were left to the author are listed."""
_LAYOUTS = (
    *((listed, side_by_side, [Text()]) for listed in (3, 2) for side_by_side in (False, True)),
    (2, True, []),
    (1, True, []),
)
"""How many fixes are listed, if commands stand side by side, and what follows the header; the first that fits."""
_UNEXPLAINED = 0.1
"""Share of an iteration: if more is unknown, the verdict does not say that nothing can be saved."""


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
    """The verdict as text. A command is never broken, so that it can be pasted."""
    texts = lines(diagnosis, commands, min(width, WIDTH))
    return laid_out(texts, WITHOUT_END, colour, unicode, links=colour)


def fixed_lines(made: Mapping[str, Any], graphs: Sequence[str], diagnosis: Diagnosis) -> list[str]:
    """For a run with fixes: the fixes made, the graphs, the fixes left to the author, and the time of an iteration."""
    rows = [f"made          {labels.fix(fix)} at {where}" for fix, where in made["written"]]
    rows = rows or ["made          nothing"]
    rows += [f"graph         {tame(sentence)}" for sentence in (graphs[0].splitlines() if graphs else ())]
    rows += [f"              in one of {len(graphs)} processes"] * bool(graphs[1:])
    rows += [f"left to you   {labels.fix(fix)}{where}: {why}" for fix, where, why in made["left"][:MOST_LEFT]]
    if made["written"]:
        is_comparable = diagnosis.command == tuple(made["command"]) and diagnosis.cut_short is None
        of_run = made["length"], diagnosis.run.time if diagnosis.run is not None and is_comparable else 0
        for what, (before, now) in (("an iteration", _iteration(made, diagnosis)), ("the run", of_run)):
            if before > 0 and now > 0 and before != now:
                rows.append(f"{what:13} {transition(before, now)}, {change(before, now)}")
    return rows


def _iteration(made: Mapping[str, Any], diagnosis: Diagnosis) -> tuple[int, int]:
    """An iteration before and now, of the loop of the plan: with the fixes another loop may be the main loop."""
    now = diagnosis.iteration_of(made["loop"])
    if now != NONE:
        return made["usual"], now
    return (made["step"], diagnosis.plain_step) if made["loop"] and made["loop"] == diagnosis.loop else (0, 0)


def render_fixed(
    diagnosis: Diagnosis, fixed: list[str], commands: Commands, width: int, *, colour: bool, unicode: bool
) -> str:
    """The verdict of a run with fixes: what they did takes the place of the plan."""
    width = min(width, WIDTH)
    why = [Text(line) for line in textwrap.wrap(statement(diagnosis), width)]
    above = [*alarms(diagnosis, width), header(diagnosis, width), Text(), *why, Text()]
    below = next_commands(commands, width, side_by_side=True)
    return laid_out([*above, *map(Text, fixed), Text(), *below], WITHOUT_END, colour, unicode, links=colour)


def lines(diagnosis: Diagnosis, commands: Commands, width: int) -> list[Text]:
    """One text per line. If there are too many, fewer fixes are listed, and commands stand side by side."""
    rows = run_report.planned_rows(diagnosis)
    above = [*alarms(diagnosis, width), header(diagnosis, width)]
    why = [Text(line) for line in textwrap.wrap(statement(diagnosis), width)]
    without_fixes = commands._replace(fix_now="", write_fix="")
    if diagnosis.cut_short is not None:  # it would fail again
        commands = without_fixes
    if not rows:
        return [*above, *why, *next_commands(without_fixes, width, side_by_side=True)]
    for listed, side_by_side, blank in _LAYOUTS:
        items = _items(diagnosis, rows, listed, width)
        below = next_commands(commands, width, side_by_side)
        texts = [*above, *blank, *why, Text(), *items, *([Text(), *below] if below else [])]
        if len(texts) <= HEIGHT:
            break
    return texts


def alarms(diagnosis: Diagnosis, width: int) -> list[Text]:
    """The first lines: that the program was cut short, and its data races."""
    race = broken(race_words.in_short(diagnosis.races), width)
    return [*broken(run_report.cut_short(diagnosis), width), *race, *([Text()] if race else [])]


def broken(sentence: str, width: int) -> list[Text]:
    return [Text(line, BROKEN) for line in textwrap.wrap(sentence, width)]


def header(diagnosis: Diagnosis, width: int) -> Text:
    """`keepbusy · train.py · NVIDIA H100 · 19.4 s, 1,200 iterations of train.py:670`; with less of it if narrow."""
    ranks = len(diagnosis.given)
    device = re.sub(r"[ -]\d+GB\b.*", "", tame(diagnosis.device, 40))  # `NVIDIA H100 80GB HBM3` is shown as H100
    facts = [labels.files(diagnosis.sources), device, f"{ranks:,} ranks" if ranks > 1 else ""]
    length = _length(diagnosis)
    short = re.sub(rf" of (?:\S*/)?{re.escape(facts[0])}:", " of line ", length) if facts[0] else length
    shortest = length.partition(" of ")[0]
    for shown in ([*facts, length], [*facts, short], [*facts, shortest], [facts[0], facts[2], shortest], [shortest]):
        text = "".join(f" · {fact}" for fact in shown if fact)
        if len("keepbusy" + text) <= width:
            break
    return Text.assemble(("keepbusy", STRONG), (tame(text, width - len("keepbusy")), FAINT))


def _length(diagnosis: Diagnosis) -> str:
    """The time of the run and the iterations of its main loop, or how many iterations a trace shows."""
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
        whole = "the script" if diagnosis.one_turn else "an iteration"
        busy = f"The GPU is busy {share(at_work, diagnosis.plain_step)} of {whole}."
    why = _reason(diagnosis, rows[0].fix) if rows else _nothing_to_save(diagnosis)
    return f"{busy} {why}".strip()


def _reason(diagnosis: Diagnosis, first: PlannedFix) -> str:
    """Why the GPU is idle where the first fix helps."""
    if first.late:
        return run_report.lateness(first.late[0], diagnosis.given)
    name = first.causes[0] if first.causes else ""
    cause = next((cause for cause in diagnosis.causes if cause.cause == name), None)
    if name == "launch_bound" and cause is not None and round(cause.count) > 1:
        per = "" if diagnosis.one_turn else " per iteration"
        return f"Python launches {cause.count:,.0f} kernels{per}, and the GPU finishes each before the next arrives."
    sentence = ledger_place(name).sentence if name else ""
    sentence = sentence.removesuffix(" in the loop") if diagnosis.one_turn else sentence
    where = f"In the loop at {short_place(Where.of(first.loop.partition(' (')[0]))}: " if first.loop else ""
    return f"{where}{sentence}." if sentence else tame(first.reason)


def _nothing_to_save(diagnosis: Diagnosis) -> str:
    """Why there is no fix. If much idle time is unexplained, the verdict says that instead."""
    step, limit = diagnosis.plain_step, max(diagnosis.noise, _UNEXPLAINED * diagnosis.plain_step)
    unknown, launches = (diagnosis.ledger.get(cause, 0) for cause in ("unknown", "launch_bound"))
    if not step and diagnosis.run is not None and diagnosis.run.busy == NONE:
        return "Too few of its kernels were timed to say when the GPU was idle; a longer run would show it."
    if not step:
        return "No fix was found."
    if unknown > limit:
        return f"It is idle for {duration(unknown, step)} for reasons that this recording does not show."
    if diagnosis.ledger.get("pipeline_bubble", 0) > diagnosis.noise:
        return "Pipeline stages wait for each other, and no line is to blame."
    if launches > limit:
        return f"It waits {duration(launches, step)} for launches, and no fix is predicted to save them."
    for cause in diagnosis.causes:
        # a graph was found to save too little of `launch_bound`
        if cause.cause != "launch_bound" and step - cause.predicted.step > diagnosis.noise:
            return f"{ledger_place(cause.cause).sentence}."
    noise = f" ({duration(diagnosis.noise)})" if diagnosis.noise else ""
    return f"No fix saves more than the noise{noise}."


def _items(diagnosis: Diagnosis, rows: list[PlanRow], listed: int, width: int) -> list[Text]:
    """One line per fix, or two if that is too wide: the fix with its prediction, then its place."""
    shown = rows[:listed]
    while len(shown) > 1 and _shows_no_difference(shown[-1]):
        del shown[-1]
    names, predictions = [labels.fix(row.fix.fix) for row in shown], [_in_short(row) for row in shown]
    room = width - 3 - 2 - 2 - max(map(len, names)) - max(map(len, predictions))
    places = [_region(row.fix) or _place(row.fix.where) for row in shown]
    if max(map(len, places)) > room:
        places = [_region(row.fix) or _place(row.fix.where, most_lines=1) for row in shown]
    widest = max(map(len, places))
    items = list[Text]()
    for number, (row, place, name, prediction) in enumerate(zip(shown, places, names, predictions, strict=True), 1):
        style = PLACE + (link_to(row.fix.where[0]) if place else "")
        if widest > room:
            text = Text.assemble((f"{number}  ", STRONG), (tame(name, width - 5 - len(prediction)), STRONG))
            code = _code(row.fix, width - 5 - len(place))
            below = [Text.assemble("   ", (place, style), (f"  {code}".rstrip(), FAINT))]
        else:
            text = Text(f"{number}  ", STRONG)
            if widest:
                text.append(place.ljust(widest), style).append("  ")
            text.append(name, STRONG)
            code = _code(row.fix, width - 5) if len(shown) == 1 or row.fix.first else ""
            below = [Text(f"     {code}", FAINT)] if code else []
        text.append(" " * max(2, width - text.cell_len - len(prediction)))
        items += [text.append(prediction, GAIN), *below]
    if total := _total(diagnosis, rows):
        items.append(Text(f"   {total}", GAIN))
    return items


def _prediction(row: PlanRow) -> str:
    """`8.5 → 1.4 ms (1.3–1.6)`, or `only with 2`."""
    if row.only_with:
        return f"only with {row.only_with}"
    return f"{transition(row.before, row.after)} ({span_of(row.low, row.high, row.before)})"


def _in_short(row: PlanRow) -> str:
    """The prediction for the run if the fix is in another loop, whose iterations the verdict does not mention."""
    if row.fix.loop and row.run_after != NONE and not row.only_with:
        return f"the run {transition(row.run_before, row.run_after)}"
    return _prediction(row)


def _shows_no_difference(row: PlanRow) -> bool:
    """True for a prediction such as `the run 116 → 116 ms`."""
    is_of_run = row.fix.loop and row.run_after != NONE
    before, after = (row.run_before, row.run_after) if is_of_run else (row.before, row.after)
    return not row.only_with and figure(before, before) == figure(after, before)


def _total(diagnosis: Diagnosis, rows: list[PlanRow]) -> str:
    """What all fixes of the plan save together, per iteration and in the run."""
    rows_of_steps = [row for row in rows if not row.fix.is_beside_steps and not row.only_with]
    savings = []
    if rows_of_steps and rows_of_steps[-1].after and len(rows) > 1 and not diagnosis.one_turn:
        factor = rows_of_steps[0].before / rows_of_steps[-1].after
        if factor >= 1.05:
            savings.append(f"{factor:.1f}x as fast per iteration")
    run_after = next((row.run_after for row in reversed(rows) if row.run_after != NONE), NONE)
    if diagnosis.run is not None and run_after != NONE:
        savings.append(f"this run {transition(diagnosis.run.time, run_after)}")
    together = {1: "", 2: "both: "}.get(len(rows), f"all {len(rows)}: ")
    return f"{together}{', '.join(savings)}" if savings else ""


def _region(fix: PlannedFix) -> str:
    """`train.py:31-38`: the lines captured in the function that launches most; "" if no line is known exactly."""
    files = {place.file for place in fix.where if place.exact}
    captured = [function for function in fix.captured if function.file in files and function.launching]
    if not captured:
        return ""
    lines = [line for line, _ in captured[0].launching]
    last, more = f"-{lines[-1]}" if lines[1:] else "", f" +{len(captured) - 1}" if captured[1:] else ""
    return f"{short_place(Where(file=captured[0].file, line=lines[0], exact=True))}{last}{more}"


def _place(where: tuple[Where, ...], most_lines: int = 3) -> str:
    """`train.py:31, 35 +2`: lines of one file, and how many more there are."""
    known = list(dict.fromkeys(place for place in where if place.file))
    if not known:
        return labels.cut(labels.spot(where[0], LONGEST_PLACE), LONGEST_PLACE) if where else ""
    shown, listed = short_place(known[0]), 1
    for place in known[1:most_lines]:
        if place.file != known[0].file or len(f"{shown}, {place.line}") > LONGEST_PLACE - 3:
            break
        shown, listed = f"{shown}, {place.line}", listed + 1
    return f"{shown} +{len(known) - listed}" if len(known) > listed else shown


def short_place(where: Where) -> str:
    """`train.py:31`, with its folders if there is room; the file's name is never cut off."""
    if not where.file:
        return labels.cut(str(where), LONGEST_PLACE)
    path, line = where.file.replace("\\", "/"), f":{where.line}" if where.line else ""
    near = "" if where.exact or not where.line else "near "
    room = LONGEST_PLACE - len(line) - len(near)
    if len(path) > room:
        folders, _, name = path.rpartition("/")
        first = folders.partition("/")[0]
        path = next((cut for cut in (f"{first}/…/{name}", f"…/{name}") if first and len(cut) <= room), name)
    return f"{near}{tame(path, room)}{line}"


def _code(fix: PlannedFix, room: int) -> str:
    """The fix that must come first, or the line to change."""
    if fix.first and room > 8:
        return labels.cut(f"first {labels.fix(fix.first)}", room)
    source = source_of(fix.where[0]) if fix.where and fix.where[0].file else None
    return labels.cut(source.text, room) if source and room > 8 else ""


def next_commands(commands: Commands, width: int, side_by_side: bool) -> list[Text]:
    """One command per line, or two if they fit."""
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
    headline: str  # the largest saving: per iteration, or of the run if it is in another loop; empty if there is none
    largest: int  # index of the item that saves most
    statement: str
    items: tuple[Item, ...]
    total: str


def summary(diagnosis: Diagnosis) -> Summary:
    """The words and numbers of `lines`, for all fixes."""
    rows = run_report.planned_rows(diagnosis)
    items = tuple(Item(_place(row.fix.where), labels.fix(row.fix.fix), _prediction(row)) for row in rows)
    are_runs_known = all(row.run_after != NONE for row in rows)
    saved = [row.run_before - row.run_after if are_runs_known else row.before - row.after for row in rows]
    savings = [0 if row.only_with else time for row, time in zip(rows, saved, strict=True)]
    largest = max(range(len(rows)), key=savings.__getitem__, default=NONE)
    headline = ""
    if rows and savings[largest] > 0:
        row = rows[largest]
        headline = f"{transition(row.before, row.after)} per iteration"
        whole = (row.run_before, row.run_after) if row.run_after != NONE else (row.before, row.after)
        if diagnosis.one_turn:
            headline = f"{transition(*whole)} for the script"
        elif row.fix.loop and row.run_after != NONE:
            headline = f"{transition(*whole)} for the run"
    facts = header(diagnosis, WITHOUT_END).plain.removeprefix("keepbusy · ")
    sentences = (run_report.cut_short(diagnosis), race_words.in_short(diagnosis.races), statement(diagnosis))
    return Summary(facts, headline, largest, " ".join(filter(None, sentences)), items, _total(diagnosis, rows))
