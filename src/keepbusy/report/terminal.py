"""The full report as text: the plan, the run, where a step's time goes, and each cause with its fix.

Also the late ranks of a large job, and the comparison of two runs.
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
from keepbusy.report import labels, race_words, run_report, verdict
from keepbusy.report.labels import ledger_place, tame
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
from keepbusy.timeline import figures
from keepbusy.timeline.figures import duration, listing, share
from keepbusy.timeline.run_facts import Cluster, Straggler

_BLANK = line("")
_WORTH_A_PLACE = 0.05
"""Share of a cause's idle time: places with less are not named."""


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
    subject = "From its first launch on, the script takes " if diagnosis.one_turn else "An iteration takes "
    # `computes for 8.0 ms of it (25%), copies for 22.7 ms (72%) and is idle for 0.7 ms (2%)`
    times = [("computes", ledger.get(COMPUTING, 0)), ("copies", ledger.get(COPYING, 0))]
    times += [("exchanges data", ledger.get(WIRE, 0)), ("is idle", diagnosis.waiting)]
    shown = [(verb, time) for verb, time in times if verb in ("computes", "is idle") or time >= 0.01 * whole]
    texts = [f"{verb} for {duration(time, whole)} ({share(time, whole)})" for verb, time in shown]
    does = listing(texts).replace(" (", " of it (", 1)
    end = ". " if diagnosis.plain_given else " in this recording. "
    yield line(subject, (duration(whole), STRONG), end, f"The GPU {does}.")
    rows = rows_of(ledger, [cause.cause for cause in diagnosis.causes])
    yield _BLANK
    yield bar(rows, width, colour)
    yield _BLANK
    yield _legend(rows, colour, whole, width)


def _cause(diagnosis: Diagnosis, number: int, cause: Cause, width: int) -> Iterator[RenderableType]:
    """A cause: its idle time, its place, and the line that fixes it."""
    step, shown = diagnosis.plain_step, ledger_place(cause.cause)
    reworded = labels.of_a_script if diagnosis.one_turn else str
    per = "" if diagnosis.one_turn else " per iteration"
    idle = f"GPU idle {duration(cause.wait, step)}{per} ({share(cause.wait, step)})"
    yield line((f"{number}  ", f"bold {shown.colour}"), (shown.sentence, STRONG), (f" · {cause.cause}", FAINT))
    if cause.fix == "compile":  # nobody knows what compiling saves before trying it
        yield line(idle, indent=3)
    else:
        yield line(f"{idle} · without it ", *_prediction(step, cause.predicted), indent=3)
    if cause.same_wait_as:
        yield line(_same_wait(diagnosis, cause), indent=3)
    yield _place(cause, width)
    yield line(tame(reworded(cause.what)), indent=3)
    if others := _other_sites(cause):
        yield line((others, FAINT), indent=3)
    for late in diagnosis.late if cause.cause in run_report.AMONG_RANKS else ():
        yield line(run_report.lateness(late, diagnosis.given), indent=3)
    if cause.advice:
        yield line(tame(reworded(cause.advice)), indent=3)
    if code := fix_line(cause.fix, cause.where, cause.remedy):
        yield unbroken(("   fix: ", FAINT), (reworded(code), STRONG))


def _same_wait(diagnosis: Diagnosis, cause: Cause) -> str:
    index = [other.cause for other in diagnosis.causes].index(cause.same_wait_as)
    is_equal = abs(diagnosis.causes[index].predicted.step - cause.predicted.step) <= diagnosis.noise
    remedy = "fix either of them" if is_equal else "fixing that one removes this as well"
    return f"This is the same idle time as in {index + 1}: {remedy}."


def _prediction(step: int, predicted: Prediction) -> list[tuple[str, str] | str]:
    """`31.3 → 8.9 ms (8.4–10.1)`."""
    return [
        (figures.transition(step, predicted.step), GAIN),
        (f" ({figures.span_of(predicted.low, predicted.high, step)})", FAINT),
    ]


def _place(cause: Cause, width: int) -> RenderableType:
    """The place of a cause, its operator and library, and the source of the line."""
    where = cause.where
    operator = where.operator if where.file and where.file not in where.operator else ""
    details = "".join(f" · {tame(part, 50)}" for part in (operator, where.library) if part)
    source = source_of(where)
    likely = f"likely line {source.line}: " if source and source.likely else ""
    return line(
        (labels.spot(where, max(24, width - 40)), PLACE + link_to(where)),
        (details, FAINT),
        *((("\n", ""), (likely, FAINT), labels.cut(source.text, width - 3 - len(likely))) if source else ()),
        indent=3,
    )


def _other_sites(cause: Cause) -> str:
    """The cause's other places that matter; the first two by name."""
    waits: dict[str, int] = {}
    for site in cause.sites:
        place = labels.spot(site.where, 40)
        waits[place] = waits.get(place, 0) + site.wait
    own_place = labels.spot(cause.where, 40)
    others = [place for place, wait in waits.items() if place != own_place and wait >= _WORTH_A_PLACE * cause.wait]
    named = [f"{place} ({duration(waits[place])})" for place in others[:2]]
    if len(others) > 2:
        named.append(f"{len(others) - 2} more place{'s' if len(others) > 3 else ''}")
    return f"also {listing(named)}" if named else ""


def _all_fixed(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The step with the chosen causes fixed, or with all of them."""
    if diagnosis.fixed:
        fixed = f"With {listing(list(diagnosis.fixed))} fixed: "
    elif len(diagnosis.causes) > 1:
        fixed = "All of this fixed: "
    else:
        return
    noise = (f" · noise: ±{duration(diagnosis.noise)}" if diagnosis.noise else "", FAINT)
    yield line((fixed, STRONG), *_prediction(diagnosis.plain_step, diagnosis.predicted), noise)
    yield _BLANK


# Where a step's time goes: a bar, and what its cells mean

_WORK_OF_THE_DEVICE = {"copying", "computing", "collective"}
_SMALL = 0.01
"""Share of a step: shorter rows are summed."""


class Row(NamedTuple):
    """One place of the ledger, as bar and rows show it."""

    place: str
    time: int
    mark: str  # the number of its cause in the report, or the place's own letter


def rows_of(ledger: Mapping[str, int], causes: Sequence[str]) -> list[Row]:
    """The device's work first, then the causes as the report numbers them, then the rest."""
    numbered = [cause for cause in causes if cause not in _WORK_OF_THE_DEVICE]
    order = [place for place in LEDGER if place in _WORK_OF_THE_DEVICE]
    order += [*numbered, *(place for place in LEDGER if place not in order and place not in numbered)]
    numbers = {cause: str(number) for number, cause in enumerate(numbered[:9], 1)}
    present = [place for place in order if ledger.get(place, 0) > 0]
    return [Row(place, ledger[place], numbers.get(place) or ledger_place(place).letter) for place in present]


def bar(rows: Sequence[Row], width: int, colour: bool, whole: int = 0) -> Text:
    """One line of at most `width` cells: `whole` fills it, without `whole` the rows do."""
    total = sum(row.time for row in rows)
    whole = whole or total
    drawn = Text(no_wrap=True)
    for row, cells in zip(rows, _cells([row.time for row in rows], whole, width), strict=True):
        if colour:
            label = share(row.time, total)
            text = label.center(cells) if len(label) + 2 <= cells else " " * cells
            drawn.append(text, f"#16181d on {ledger_place(row.place).colour}")
        else:
            drawn.append(row.mark * cells)
    return drawn


def _cells(times: Sequence[int], whole: int, width: int) -> list[int]:
    """Cells per row, which sum to the rows' share of the width; a row with 1% or more gets at least one."""
    if not whole:
        return [0] * len(times)
    exact = [width * time / whole for time in times]
    cells = [max(int(part), 1 if time >= _SMALL * whole else 0) for part, time in zip(exact, times, strict=True)]
    target = round(sum(exact))
    while sum(cells) != target:
        off = [part - cell for part, cell in zip(exact, cells, strict=True)]
        short = sum(cells) < target
        index = off.index(max(off)) if short else max(range(len(cells)), key=lambda cell: (cells[cell] > 1, -off[cell]))
        cells[index] += 1 if short else -1
    return cells


def _legend(rows: Sequence[Row], colour: bool, whole: int, width: int) -> RenderableType:
    """Name, time and share of each row; rows under 1% are summed in one."""

    def entry(mark: Text, label: str, time: int, style: str = "") -> list[Text]:
        return [mark, *(Text(text, style) for text in (label, duration(time, whole), share(time, whole)))]

    shown = [row for row in rows if row.time >= _SMALL * whole or row.place == COMPUTING]
    small = [row for row in rows if row not in shown]
    entries = list[list[Text]]()
    for row in shown:
        place, mark = ledger_place(row.place), "■" if colour and not row.mark.isdigit() else row.mark
        entries.append(entry(Text(mark, f"bold {place.colour}"), place.label, row.time))
    if small:
        label = ledger_place(small[0].place).label if len(small) == 1 else f"{len(small)} smaller ones"
        entries.append(entry(Text(" "), label, sum(row.time for row in small), FAINT))
    columns = 2 if width >= 84 and len(entries) > 3 else 1
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right", "right") * columns:
        table.add_column(justify=justify, no_wrap=True, min_width=20 if justify == "left" else None)
    height = -(-len(entries) // columns)
    for index in range(height):
        table.add_row(*[cell for entry in entries[index::height] for cell in entry])
    return table


# A large job: the ranks and hosts that the others wait for, and what each of them costs

_STRAGGLERS_NAMED = 8
"""Stragglers that have a line of their own."""
_NEGLIGIBLE = 0.02
"""Share of a step: if the step takes hardly longer than the slowest rank needs, no sentence says so."""


def _late_ranks(cluster: Cluster) -> Iterator[RenderableType]:
    """The stragglers, then a summary of the other ranks."""
    yield line(("Late ranks", STRONG), (f"   a step of these recordings takes {duration(cluster.step)}", FAINT))
    before = cluster.step
    for number, straggler in enumerate(cluster.stragglers[:_STRAGGLERS_NAMED], 1):
        verb = "the GPU computes" if straggler.computing else "Python takes"
        longer = f": {verb} {duration(straggler.late)} longer per step than elsewhere   "
        without = f"{figures.transition(before, straggler.left)} without"
        yield line(f"{number}  ", (_ranks_and_host(straggler), PLACE), longer, (without, GAIN))
        before = straggler.left
    if more := cluster.stragglers[_STRAGGLERS_NAMED:]:
        ranks = sum(len(straggler.ranks) for straggler in more)
        yield line(f"   {len(more)} more, {ranks:,} ranks together: {figures.transition(before, more[-1].left)}")
    if not cluster.stragglers:
        yield line("   No rank and no host takes much longer than the others of its kind.")
    yield line((" ".join(_other_ranks(cluster)), FAINT), indent=3)


def _ranks_and_host(straggler: Straggler) -> str:
    host, ranks = tame(straggler.host, 40), straggler.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}{f' on {host}' if host else ''}"
    is_range = ranks[-1] - ranks[0] == len(ranks) - 1
    listed = f"{ranks[0]}–{ranks[-1]}" if is_range else listing([str(rank) for rank in ranks])
    return f"{host}, {len(ranks)} ranks ({listed})"


def _other_ranks(cluster: Cluster) -> Iterator[str]:
    late = {rank for straggler in cluster.stragglers for rank in straggler.ranks}
    others = [rank for rank in cluster.ranks if rank.rank not in late]
    hosts = len({rank.host for rank in others if rank.host})
    on_hosts = f" on {hosts:,} hosts" if hosts > 1 else ""
    if others:
        own = sorted(rank.own for rank in others)
        name = f"The other {len(others):,}" if late else f"All {len(others):,}"
        yield (
            f"{name} ranks{on_hosts} take {figures.span_of(own[0], own[-1], own[-1])} {figures.unit_of(own[-1])} "
            f"per step by themselves, and half of all ranks {duration(cluster.typical)} or less."
        )
    beyond = cluster.step - max(rank.own for rank in cluster.ranks)
    if beyond > _NEGLIGIBLE * cluster.step:
        part = f"{duration(beyond)} of the step ({share(beyond, cluster.step)})"
        yield f"{part} is more than the slowest needs: communication, or a different rank is last each time."
    kinds = Counter(rank.kind for rank in cluster.ranks)
    if len(kinds) > 1:
        first = {kind: next(rank.rank for rank in cluster.ranks if rank.kind == kind) for kind in kinds}
        each = [f"{count:,} like rank {first[kind]}" for kind, count in kinds.most_common(4)]
        yield f"Judging by their collectives, they do {len(kinds)} different things: {listing(each)}."


# The comparison of two runs

_BETTER, _WORSE = GAIN, BROKEN
_VERDICT_STYLES = {GONE: _BETTER, SMALLER: "green", LARGER: "red", NEW: _WORSE}
_WORTH_COMPARING = 0.005
"""Share of the longer step: a place with less in both runs is not shown."""


def render_comparison(
    comparison: Comparison, width: int = 100, *, colour: bool = False, unicode: bool = True, wrap: bool = True
) -> str:
    return laid_out(_changes(comparison, width, colour), width if wrap else WITHOUT_END, colour, unicode)


def _changes(comparison: Comparison, width: int, colour: bool) -> Iterator[RenderableType]:
    sides = " → ".join(labels.files(side.sources) or "a run" for side in (comparison.before, comparison.after))
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
            (ledger_place(change.cause).label, STRONG),
            f" · fixing it: {figures.transition(gain.before, gain.after)} · ",
            (labels.spot(change.where), PLACE),
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
    """Each predicted fix, whether it was made, and how the measured times compare with the prediction."""
    if not comparison.plan:
        return
    yield _BLANK
    for outcome in comparison.plan:
        fix, verdict = outcome.fix, "made" if outcome.made else "not made"
        where = labels.at(fix.where[0], 48) if fix.where else ""
        change = figures.transition(fix.predicted.step + fix.gain, fix.predicted.step)
        style = _BETTER if outcome.made else FAINT
        yield line((f"{verdict:9}", style), (labels.fix(fix.fix), STRONG), f"{where}   ", change)
    if comparison.foretold is not None:
        step, predicted = comparison.step, comparison.foretold
        span = figures.span_of(predicted.low, predicted.high, step.before)
        prediction = f" {figures.transition(step.before, predicted.step)} per iteration ({span}); measured "
        result = "faster than predicted" if step.after < predicted.low else "slower than predicted"
        if predicted.low - step.noise <= step.after <= predicted.high + step.noise:
            result = "as predicted"
        yield line(("predicted", FAINT), prediction, f"{duration(step.after, step.before)}: {result}")
    if comparison.run is not None and comparison.made:
        run, predicted_run = comparison.run, comparison.run_foretold
        prediction = f" the run {figures.transition(run.before, predicted_run)}; measured "
        yield line(("predicted", FAINT), f"{prediction}{duration(run.after, run.before)}")


def _places_changed(ledger: Mapping[str, Change], whole: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, change in ledger.items():
        if max(change.before, change.after) < _WORTH_COMPARING * whole and name != COMPUTING:
            continue
        difference = figures.change(change.before, change.after) if change.significant and change.before else ""
        style = (
            _VERDICT_STYLES[SMALLER if change.difference < 0 else LARGER]
            if change.significant and name != COMPUTING
            else FAINT
        )
        table.add_row(
            ledger_place(name).label,
            *(duration(time, whole) for time in (change.before, change.after)),
            Text(difference or ("new" if change.significant else "within noise"), style),
        )
    return table
