"""A diagnosis on one screen: the step, where it goes, what makes the GPU wait, and what fixing that gives.

Also very many ranks on a few lines, and two runs held against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepbusy.causes import LEDGER
from keepbusy.explain.comparison import GONE, LARGER, NEW, SMALLER, Change, Comparison
from keepbusy.explain.diagnosis import COMPUTING, COPYING, WIRE, Cause, Diagnosis, Prediction
from keepbusy.report import race_words, run_report, verdict, words
from keepbusy.report.paper import (
    BROKEN,
    FAINT,
    GAIN,
    PLACE,
    STRONG,
    WITHOUT_END,
    labelled,
    laid_out,
    line,
    link_to,
    unbroken,
)
from keepbusy.report.source import fix_line, source_of
from keepbusy.report.words import look, tame
from keepbusy.timeline import figures
from keepbusy.timeline.figures import duration, listing, share
from keepbusy.timeline.run_facts import Cluster, Straggler

_BLANK = line("")
_WORTH_A_PLACE = 0.05
"""Of a cause's idle time: a place with less is not named."""


def render_full(
    diagnosis: Diagnosis,
    width: int = 100,
    *,
    colour: bool = False,
    unicode: bool = True,
    commands: verdict.Commands = verdict.Commands(),  # noqa: B008 -- it cannot change
    wrap: bool = True,
) -> str:
    """The full report as text. Without `wrap` no line is broken."""
    sheet = width if wrap else WITHOUT_END
    return laid_out(_paragraphs(diagnosis, width, colour, commands), sheet, colour, unicode, links=wrap)


def _paragraphs(diagnosis: Diagnosis, width: int, colour: bool, commands: verdict.Commands) -> Iterator[RenderableType]:
    yield from verdict.broken(run_report.cut_short(diagnosis), width)
    yield verdict.header(diagnosis, width)
    yield _BLANK
    for race in diagnosis.races:
        yield from map(line, race_words.paragraph(race))
        yield _BLANK
    yield line((verdict.statement(diagnosis), STRONG))
    yield _BLANK
    if diagnosis.cluster is not None:
        yield from _late_ranks(diagnosis.cluster)
        yield _BLANK
    yield from run_report.plan(diagnosis)
    if diagnosis.plan:
        yield _BLANK
    if diagnosis.run is not None:
        yield line(run_report.headline(diagnosis.run))
        yield _BLANK
        yield from run_report.tree(diagnosis.run, width)
        yield _BLANK
    if diagnosis.steps:
        yield from _step(diagnosis, width, colour)
        yield _BLANK
        for number, cause in enumerate(diagnosis.causes, 1):
            yield from _cause(diagnosis, number, cause, width)
            yield _BLANK
        yield from _all_fixed(diagnosis)
    elif diagnosis.plain_step:
        yield line("An iteration takes ", (duration(diagnosis.plain_step), STRONG), ".")
        yield _BLANK
    yield from run_report.loops(diagnosis)
    if margin := list(run_report.margin(diagnosis)):
        yield labelled(margin)
        yield _BLANK
    can_fix = bool(run_report.planned_rows(diagnosis)) and diagnosis.cut_short is None
    possible = commands._replace(full="") if can_fix else verdict.Commands(page=commands.page)
    yield from verdict.next_commands(possible, width, side_by_side=False)


def _step(diagnosis: Diagnosis, width: int, colour: bool) -> Iterator[RenderableType]:
    """Where the time of one iteration goes."""
    whole, ledger = diagnosis.plain_step, diagnosis.ledger
    what = "From its first launch on, the script takes " if diagnosis.one_turn else "An iteration takes "
    # `computes for 8.0 ms of it (25%), copies for 22.7 ms (72%) and is idle for 0.7 ms (2%)`
    done = [("computes", ledger.get(COMPUTING, 0)), ("copies", ledger.get(COPYING, 0))]
    done += [("exchanges data", ledger.get(WIRE, 0)), ("is idle", diagnosis.waiting)]
    shown = [(verb, time) for verb, time in done if verb in ("computes", "is idle") or time >= 0.01 * whole]
    texts = [f"{verb} for {duration(time, whole)} ({share(time, whole)})" for verb, time in shown]
    does = listing(texts).replace(" (", " of it (", 1)
    seen = ". " if diagnosis.plain_given else " in this recording. "
    yield line(what, (duration(whole), STRONG), seen, f"The GPU {does}.")
    rows = rows_of(ledger, [cause.cause for cause in diagnosis.causes])
    yield _BLANK
    yield bar(rows, width, colour)
    yield _BLANK
    yield _legend(rows, colour, whole, width)


def _cause(diagnosis: Diagnosis, number: int, cause: Cause, width: int) -> Iterator[RenderableType]:
    """A cause with its code: what happened, what it costs, and what to write instead."""
    step, shown = diagnosis.plain_step, look(cause.cause)
    said = words.of_a_script if diagnosis.one_turn else str
    per = "" if diagnosis.one_turn else " per iteration"
    idle = f"GPU idle {duration(cause.wait, step)}{per} ({share(cause.wait, step)})"
    yield line((f"{number}  ", f"bold {shown.colour}"), (shown.sentence, STRONG), (f" · {cause.cause}", FAINT))
    if cause.fix == "compile":  # how much compiling saves is not known before it is tried
        yield line(idle, indent=3)
    else:
        yield line(f"{idle} · without it ", *_prediction(step, cause.predicted), indent=3)
    if cause.same_wait_as:
        yield line(_same_wait(diagnosis, cause), indent=3)
    yield _place(cause, width)
    yield line(tame(said(cause.what)), indent=3)
    if others := _other_sites(cause):
        yield line((others, FAINT), indent=3)
    for late in diagnosis.late if cause.cause in run_report.AMONG_RANKS else ():
        yield line(run_report.lateness(late, diagnosis.given), indent=3)
    if cause.advice:
        yield line(tame(said(cause.advice)), indent=3)
    if code := fix_line(cause.fix, cause.where, cause.remedy):
        yield unbroken(("   fix: ", FAINT), (said(code), STRONG))


def _same_wait(diagnosis: Diagnosis, cause: Cause) -> str:
    number = [other.cause for other in diagnosis.causes].index(cause.same_wait_as)
    alike = abs(diagnosis.causes[number].predicted.step - cause.predicted.step) <= diagnosis.noise
    rest = "fix either of them" if alike else "fixing that one removes this as well"
    return f"This is the same idle time as in {number + 1}: {rest}."


def _prediction(step: int, predicted: Prediction) -> list[tuple[str, str] | str]:
    """`31.3 → 8.9 ms (8.4–10.1)`."""
    return [
        (figures.transition(step, predicted.step), GAIN),
        (f" ({figures.span_of(predicted.low, predicted.high, step)})", FAINT),
    ]


def _place(cause: Cause, width: int) -> RenderableType:
    """Where it is, what it calls, the library it stands in, and the line itself."""
    where = cause.where
    operator = where.operator if where.file and where.file not in where.operator else ""
    inside = [part for part in (operator, where.library) if part]
    beside = " · ".join(tame(part, 50) for part in inside)
    source = source_of(where)
    known = f"likely line {source.line}: " if source and source.likely else ""
    return line(
        (words.spot(where, max(24, width - 40)), PLACE + link_to(where)),
        (f" · {beside}" if beside else "", FAINT),
        *((("\n", ""), (known, FAINT), words.cut(source.text, width - 3 - len(known))) if source else ()),
        indent=3,
    )


def _other_sites(cause: Cause) -> str:
    """The other places that matter, two of them by name."""
    waits: dict[str, int] = {}
    for site in cause.sites:
        place = words.spot(site.where, 40)
        waits[place] = waits.get(place, 0) + site.wait
    here = words.spot(cause.where, 40)
    others = [place for place, wait in waits.items() if place != here and wait >= _WORTH_A_PLACE * cause.wait]
    named = [f"{place} ({duration(waits[place])})" for place in others[:2]]
    if len(others) > 2:
        named.append(f"{len(others) - 2} more place{'s' if len(others) > 3 else ''}")
    return f"also {listing(named)}" if named else ""


def _all_fixed(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """What fixing everything saves."""
    step, after = diagnosis.plain_step, diagnosis.predicted
    noise = (f" · noise: ±{duration(diagnosis.noise)}" if diagnosis.noise else "", FAINT)
    if diagnosis.fixed:
        yield line((f"With {listing(list(diagnosis.fixed))} fixed: ", STRONG), *_prediction(step, after), noise)
    elif len(diagnosis.causes) > 1:
        yield line(("All of this fixed: ", STRONG), *_prediction(step, after), noise)
    else:
        return
    yield _BLANK


# Where a step goes: a bar, and what its cells mean

_WORK_OF_THE_DEVICE = {"copying", "computing", "collective"}
_FOLDED = 0.01


class Row(NamedTuple):
    """One place of the ledger, as bar and rows show it."""

    place: str
    time: int
    mark: str  # the number of its cause in the report, or the place's own letter


def rows_of(ledger: Mapping[str, int], causes: Sequence[str]) -> list[Row]:
    """What the device does first, then the causes as the report numbers them, then the rest."""
    numbered = [cause for cause in causes if cause not in _WORK_OF_THE_DEVICE]
    order = [place for place in LEDGER if place in _WORK_OF_THE_DEVICE]
    order += [*numbered, *(place for place in LEDGER if place not in order and place not in numbered)]
    return [Row(place, ledger[place], _mark(place, numbered)) for place in order if ledger.get(place, 0) > 0]


def _mark(place: str, numbered: list[str]) -> str:
    return str(numbered.index(place) + 1) if place in numbered[:9] else look(place).letter


def bar(rows: Sequence[Row], width: int, colour: bool, whole: int = 0) -> Text:
    """One line of `width` cells, or as much of it as the rows are of `whole`; a row that is there gets a cell."""
    own = sum(row.time for row in rows)
    whole = whole or own
    drawn = Text(no_wrap=True)
    for row, cells in zip(rows, _cells([row.time for row in rows], whole, width), strict=True):
        if colour:
            label = share(row.time, own)
            drawn.append(
                label.center(cells) if len(label) + 2 <= cells else " " * cells, f"#16181d on {look(row.place).colour}"
            )
        else:
            drawn.append(row.mark * cells)
    return drawn


def _cells(times: Sequence[int], whole: int, width: int) -> list[int]:
    """Cells that sum to the width that the times have of the whole; whoever has 1% keeps one."""
    if not whole:
        return [0] * len(times)
    exact = [width * time / whole for time in times]
    cells = [max(int(part), 1 if time >= _FOLDED * whole else 0) for part, time in zip(exact, times, strict=True)]
    target = round(sum(exact))
    while sum(cells) != target:
        off = [part - cell for part, cell in zip(exact, cells, strict=True)]
        short = sum(cells) < target
        index = off.index(max(off)) if short else max(range(len(cells)), key=lambda one: (cells[one] > 1, -off[one]))
        cells[index] += 1 if short else -1
    return cells


def _legend(rows: Sequence[Row], colour: bool, whole: int, width: int) -> RenderableType:
    """Name, time and share; what is under 1% stands in one row."""
    shown = [row for row in rows if row.time >= _FOLDED * whole or row.place == COMPUTING]
    small = [row for row in rows if row not in shown]
    entries = list[list[Text]]()
    for row in shown:
        place = look(row.place)
        key = Text("■" if not row.mark.isdigit() else row.mark, f"bold {place.colour}") if colour else Text(row.mark)
        entries.append([key, *map(Text, (place.label, duration(row.time, whole), share(row.time, whole)))])
    if small:
        time = sum(row.time for row in small)
        names = look(small[0].place).label if len(small) == 1 else f"{len(small)} smaller ones"
        entries.append([Text(" "), *(Text(text, FAINT) for text in (names, duration(time, whole), share(time, whole)))])
    columns = 2 if width >= 84 and len(entries) > 3 else 1
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns):
        for justify in ("right", "left", "right", "right"):
            table.add_column(justify=justify, no_wrap=True, min_width=20 if justify == "left" else None)
    height = -(-len(entries) // columns)
    for index in range(height):
        table.add_row(*[cell for entry in entries[index::height] for cell in entry])
    return table


# Very many ranks on a few lines: which of them, and which hosts, the others wait for, and what each of them costs

_STRAGGLERS_NAMED = 8
"""Stragglers that have a line of their own."""
_NEGLIGIBLE = 0.02
"""Of a step: what less of it goes beyond what the slowest rank needs is not worth a sentence."""


def _late_ranks(cluster: Cluster) -> Iterator[RenderableType]:
    """Who is late, then what the others are like."""
    yield line(("Late ranks", STRONG), (f"   a step of these recordings takes {duration(cluster.step)}", FAINT))
    before = cluster.step
    for number, one in enumerate(cluster.stragglers[:_STRAGGLERS_NAMED], 1):
        where = "the GPU computes" if one.computing else "Python takes"
        yield line(
            f"{number}  ", (_who(one), PLACE), f": {where} {duration(one.late)} longer per step than elsewhere   ",
            (f"{figures.transition(before, one.left)} without", GAIN),
        )  # fmt: skip
        before = one.left
    if more := cluster.stragglers[_STRAGGLERS_NAMED:]:
        ranks = sum(len(one.ranks) for one in more)
        yield line(f"   {len(more)} more, {ranks:,} ranks together: {figures.transition(before, more[-1].left)}")
    if not cluster.stragglers:
        yield line("   No rank and no host takes much longer than the others of its kind.")
    yield line((" ".join(_of_the_others(cluster)), FAINT), indent=3)


def _who(one: Straggler) -> str:
    host = tame(one.host, 40)
    if len(one.ranks) == 1:
        return f"rank {one.ranks[0]}{f' on {host}' if host else ''}"
    return f"{host}, {len(one.ranks)} ranks ({_ranks(one.ranks)})"


def _ranks(ranks: Sequence[int]) -> str:
    whole = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}–{ranks[-1]}" if whole else listing([str(rank) for rank in ranks])


def _of_the_others(cluster: Cluster) -> Iterator[str]:
    late = {rank for one in cluster.stragglers for rank in one.ranks}
    others = [one for one in cluster.ranks if one.rank not in late]
    hosts = len({one.host for one in others if one.host})
    on_hosts = f" on {hosts:,} hosts" if hosts > 1 else ""
    if others:
        own = sorted(one.own for one in others)
        name = f"The other {len(others):,}" if late else f"All {len(others):,}"
        yield (
            f"{name} ranks{on_hosts} take {figures.span_of(own[0], own[-1], own[-1])} {figures.unit_of(own[-1])} "
            f"per step by themselves, and half of all ranks {duration(cluster.typical)} or less."
        )
    beyond = cluster.step - max(one.own for one in cluster.ranks)
    if beyond > _NEGLIGIBLE * cluster.step:
        part = f"{duration(beyond)} of the step ({share(beyond, cluster.step)})"
        yield f"{part} is more than the slowest needs: communication, or a different rank is last each time."
    kinds = Counter(one.kind for one in cluster.ranks)
    if len(kinds) > 1:
        first = {kind: next(one.rank for one in cluster.ranks if one.kind == kind) for kind in kinds}
        each = [f"{count:,} like rank {first[kind]}" for kind, count in kinds.most_common(4)]
        yield f"Judging by their collectives, they do {len(kinds)} different things: {listing(each)}."


# Two runs held against each other

_BETTER, _WORSE = GAIN, BROKEN
_VERDICT_STYLES = {GONE: _BETTER, SMALLER: "green", LARGER: "red", NEW: _WORSE}
_WORTH_COMPARING = 0.005
"""Of the longer step: a place with less in both runs is not shown."""


def render_comparison(
    comparison: Comparison, width: int = 100, *, colour: bool = False, unicode: bool = True, wrap: bool = True
) -> str:
    return laid_out(_changes(comparison, width, colour), width if wrap else WITHOUT_END, colour, unicode)


def _changes(comparison: Comparison, width: int, colour: bool) -> Iterator[RenderableType]:
    sides = " → ".join(words.files(side.sources) or "a run" for side in (comparison.before, comparison.after))
    yield line(("keepbusy", STRONG), (f" · {sides}", FAINT))
    yield _BLANK
    yield _step_changed(comparison)
    predicted, step = comparison.predicted, comparison.step
    if predicted is not None and not comparison.foretold:
        span = figures.span_of(predicted.low, predicted.high, step.before)
        yield line(f"Predicted: {figures.transition(step.before, predicted.step)} ({span}).")
    yield from _fixes_made(comparison)
    yield _BLANK
    whole = max(step.before, step.after)
    causes = [change.cause for change in comparison.causes]
    for name, side in (("before", comparison.before), ("after", comparison.after)):
        yield Text.assemble((f"{name:8}", FAINT), bar(rows_of(side.ledger, causes), width - 8, colour, whole))
    yield _BLANK
    yield _places_changed(comparison.ledger, whole)
    if comparison.causes:
        yield _BLANK
    for change in comparison.causes:
        gain = change.predicted_gain
        yield line(
            (f"{change.verdict:11}", _VERDICT_STYLES.get(change.verdict, FAINT)),
            (look(change.cause).label, STRONG),
            f" · fixing it: {figures.transition(gain.before, gain.after)} · ",
            (words.spot(change.where), PLACE),
        )
    if comparison.notes:
        yield _BLANK
    for note in comparison.notes:
        yield line(("note    ", FAINT), tame(note))


def _step_changed(comparison: Comparison) -> RenderableType:
    step, known = comparison.step, comparison.knows_runs_differ
    noise = f" (noise {duration(step.noise)})" if known else f" (noise within a run {duration(step.noise)})"
    if comparison.runs != (1, 1):
        noise = f" (noise {duration(step.noise)}, of {comparison.runs[0]} and {comparison.runs[1]} runs)"
    if not step.significant:
        same = f"An iteration takes the same time within noise: {figures.transition(step.before, step.after)}"
        return line((same, STRONG), (noise, FAINT))
    style = (_BETTER if step.difference < 0 else _WORSE) if known else STRONG
    gain = f"{figures.transition(step.before, step.after)}, {figures.change(step.before, step.after)}"
    return line("An iteration takes ", (gain, style), (noise, FAINT))


def _fixes_made(comparison: Comparison) -> Iterator[RenderableType]:
    """Each fix that was foretold, whether it was made, and what came of those that were."""
    if not comparison.plan:
        return
    yield _BLANK
    for one in comparison.plan:
        fix, verdict = one.fix, "made" if one.made else "not made"
        where = words.at(fix.where[0], 48) if fix.where else ""
        turn = figures.transition(fix.predicted.step + fix.gain, fix.predicted.step)
        yield line((f"{verdict:9}", _BETTER if one.made else FAINT), (words.fix(fix.fix), STRONG), f"{where}   ", turn)
    if comparison.foretold is not None:
        step, foretold = comparison.step, comparison.foretold
        span = figures.span_of(foretold.low, foretold.high, step.before)
        said = f" {figures.transition(step.before, foretold.step)} per iteration ({span}); measured "
        outcome = "faster than predicted" if step.after < foretold.low else "slower than predicted"
        if foretold.low - step.noise <= step.after <= foretold.high + step.noise:  # as far as runs can be told apart
            outcome = "as predicted"
        yield line(("predicted", FAINT), said, f"{duration(step.after, step.before)}: {outcome}")
    if comparison.run is not None and comparison.made:
        run, foretold_run = comparison.run, comparison.run_foretold
        said = f" the run {figures.transition(run.before, foretold_run)}; measured {duration(run.after, run.before)}"
        yield line(("predicted", FAINT), said)


def _places_changed(ledger: Mapping[str, Change], whole: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, change in ledger.items():
        if max(change.before, change.after) < _WORTH_COMPARING * whole and name != COMPUTING:
            continue
        said = figures.change(change.before, change.after) if change.significant and change.before else ""
        style = (
            _VERDICT_STYLES[SMALLER if change.difference < 0 else LARGER]
            if change.significant and name != COMPUTING
            else FAINT
        )
        table.add_row(
            look(name).label,
            *(duration(time, whole) for time in (change.before, change.after)),
            Text(said or ("new" if change.significant else "within noise"), style),
        )
    return table
