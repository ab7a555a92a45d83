"""Two runs held against each other, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepbusy.explain.comparison import GONE, LARGER, NEW, SMALLER, CauseChange, Change, Comparison
from keepbusy.explain.diagnosis import COMPUTING
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, WITHOUT_END, laid_out, line
from keepbusy.report.terminal import bar, rows_of
from keepbusy.report.words import duration, look, tame

BETTER, WORSE = "bold green", "bold red"
_STYLES = {GONE: BETTER, SMALLER: "green", LARGER: "red", NEW: WORSE}
_BLANK = line("")
_WORTH_A_ROW = 0.005
"""Of the longer step: a place with less in both runs is not shown."""


def render(
    comparison: Comparison, width: int = 100, *, colour: bool = False, unicode: bool = True, wrap: bool = True
) -> str:
    """What changed, as text."""
    return laid_out(parts(comparison, width, colour), width if wrap else WITHOUT_END, colour, unicode)


def parts(comparison: Comparison, width: int, colour: bool = False) -> Iterator[RenderableType]:
    """The report's paragraphs, from top to bottom."""
    sides = " → ".join(words.files(side.sources) or "a run" for side in (comparison.before, comparison.after))
    yield line(("keepbusy", STRONG), (f" · {sides}", FAINT))
    yield _BLANK
    yield _headline(comparison.step)
    yield from _prediction(comparison) if not comparison.foretold else ()
    yield from _plan(comparison)
    yield _BLANK
    yield from _bars(comparison, width, colour)
    yield _BLANK
    yield _ledger(comparison.ledger, max(comparison.step.before, comparison.step.after))
    yield from _causes(comparison)
    if comparison.notes:
        yield _BLANK
    for note in comparison.notes:
        yield line(("note    ", FAINT), tame(note))


def _headline(step: Change) -> RenderableType:
    if not step.significant:
        same = f"The step is the same within noise: {words.transition(step.before, step.after)}"
        return line((same, STRONG), (f" (noise {duration(step.noise)})", FAINT))
    style = BETTER if step.difference < 0 else WORSE
    gain = f"{words.transition(step.before, step.after)}, {words.change(step.before, step.after)}"
    return line("A step takes ", (gain, style), (f" (noise {duration(step.noise)})", FAINT))


def _prediction(comparison: Comparison) -> Iterator[RenderableType]:
    predicted, step = comparison.predicted, comparison.step
    if predicted is not None:
        span = words.span_of(predicted.low, predicted.high, step.before)
        yield line(f"Predicted was {words.transition(step.before, predicted.step)} ({span}).")


def _plan(comparison: Comparison) -> Iterator[RenderableType]:
    """Each fix that was foretold, whether it was made, and what came of those that were."""
    if not comparison.plan:
        return
    yield _BLANK
    for one in comparison.plan:
        fix, verdict = one.fix, "made" if one.made else "not made"
        where = f" at {words.spot(fix.where[0], 48)}" if fix.where else ""
        turn = words.transition(fix.predicted.step + fix.gain, fix.predicted.step)
        yield line((f"{verdict:9}", BETTER if one.made else FAINT), (words.fix(fix.fix), STRONG), f"{where}   ", turn)
    if comparison.foretold is not None:
        step, foretold = comparison.step, comparison.foretold
        span = words.span_of(foretold.low, foretold.high, step.before)
        said = f"{words.transition(step.before, foretold.step)} a step ({span}); it takes "
        came = f"{duration(step.after, step.before)}: {_how_it_came(foretold.low, foretold.high, step)}"
        yield line(("foretold ", FAINT), said, came)
    if comparison.run is not None and comparison.made:
        run, foretold_run = comparison.run, comparison.run_foretold
        said = f"the run {words.transition(run.before, foretold_run)}; it took {duration(run.after, run.before)}"
        yield line(("foretold ", FAINT), said)


def _how_it_came(low: int, high: int, step: Change) -> str:
    """Whether it came as foretold, as far as two runs can be told apart."""
    if low - step.noise <= step.after <= high + step.noise:
        return "as foretold"
    return "more gained than foretold" if step.after < low else "less gained than foretold"


def _bars(comparison: Comparison, width: int, colour: bool) -> Iterator[RenderableType]:
    whole = max(comparison.step.before, comparison.step.after)
    causes = [change.cause for change in comparison.causes]
    for name, side in (("before", comparison.before), ("after", comparison.after)):
        drawn = bar(rows_of(side.ledger, causes), width - 8, colour, whole)
        yield Text.assemble((f"{name:8}", FAINT), drawn)


def _ledger(ledger: Mapping[str, Change], whole: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, change in ledger.items():
        if max(change.before, change.after) < _WORTH_A_ROW * whole and name != COMPUTING:
            continue
        said = words.change(change.before, change.after) if change.significant and change.before else ""
        style = (
            _STYLES[SMALLER if change.difference < 0 else LARGER] if change.significant and name != COMPUTING else FAINT
        )
        table.add_row(
            look(name).name,
            *(duration(time, whole) for time in (change.before, change.after)),
            Text(said or ("new" if change.significant else "within noise"), style),
        )
    return table


def _causes(comparison: Comparison) -> Iterator[RenderableType]:
    if comparison.causes:
        yield _BLANK
    for change in comparison.causes:
        yield line((f"{change.verdict:11}", _STYLES.get(change.verdict, FAINT)), *_cause(change))


def _cause(change: CauseChange) -> Iterator[tuple[str, str]]:
    yield look(change.cause).name, STRONG
    gain = change.predicted_gain
    yield f" · fixing it gains {words.transition(gain.before, gain.after)} · ", ""
    yield words.spot(change.where), "cyan"
