"""One turn drawn in characters: host threads above, the GPU below, its gaps by the numbers of their causes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.text import Text

from keepbusy.explain.diagnosis import Diagnosis, Turns, Where
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, laid_out, line, unbroken
from keepbusy.report.words import look
from keepbusy.timeline.figures import duration
from keepbusy.timeline.model import NONE, WORKERS, Ints, Kind, Lane, Mask
from keepbusy.timeline.replay import at_work_from, run, steady

MARGIN = 16
MOST_RANKS = 4
"""So many ranks are drawn; more would not fit a screen."""
WORTH_A_NUMBER = 0.01
"""Of the turn: gaps of a cause and a line that take less are not named below the drawing."""
_HOST = {Kind.WORK: "·", Kind.LAUNCH: "'", Kind.SYNC: "~", Kind.ALLOCATE: "m", Kind.RECORDING: " "}
_DEVICE = {Kind.KERNEL: "computing", Kind.COPY: "copying", Kind.FILL: "copying", Kind.COLLECTIVE: "collective"}


class Cells(NamedTuple):
    """The window of time that is drawn, in so many cells."""

    begin: float
    length: float
    columns: int

    def taken(self, start: Ints, end: Ints) -> Ints:
        """How much of each cell these intervals take, which do not overlap."""
        edges = self.begin + self.length * np.arange(self.columns + 1) / self.columns
        order = np.argsort(start, kind="stable")
        start, end = start[order].astype(np.float64), end[order].astype(np.float64)
        before = np.concatenate([[0.0], np.cumsum(end - start)])
        at = np.searchsorted(end, edges, side="right")
        inside = np.append(start, np.inf)[at]
        return np.diff(before[at] + np.maximum(0.0, edges - inside))


class RoundRows(NamedTuple):
    """The rows of a steady round and of the one before it, which was alike: the GPU may be that far behind."""

    row: Ints
    start: Ints
    end: Ints


def render(diagnosis: Diagnosis, width: int, colour: bool = False, unicode: bool = True) -> str:
    """Lanes, a ruler, and what the numbers in the gaps mean."""
    turns = diagnosis.turns
    if turns is None or not len(turns.timeline):
        return ""
    laid, begin, length = _turn(turns, diagnosis.plain_step)
    cells = Cells(begin, length, max(16, width - MARGIN))
    numbered = _numbered(turns, laid, cells)
    parts = [line(("One turn", STRONG), f" of {duration(round(length * turns.ratio))}"), line("")]
    parts += [_ruler(cells, turns.ratio), *_lanes(turns, laid, cells, numbered), line("")]
    parts += [*_meanings(diagnosis, turns, numbered, round(length)), _key()]
    return laid_out(parts, width, colour, unicode)


def _turn(turns: Turns, plain_step: int) -> tuple[RoundRows, float, float]:
    """The turn that takes most nearly what a turn takes."""
    timeline, paced = turns.timeline, steady(turns.timeline)
    done = run(timeline, 1 if timeline.facts.one_turn else paced.rounds)
    marks = timeline.marks_of(timeline.ranks[0])
    starts = done.start[marks].astype(np.float64)
    around = paced.pace * max(1, len(marks))
    lengths = np.diff(np.append(starts, starts[0] + around))
    rows = np.arange(len(timeline))
    if timeline.facts.one_turn:
        return RoundRows(rows, done.start, done.end), float(done.start.min()), around
    best = int(np.abs(lengths * turns.ratio - plain_step).argmin())
    earlier = round(around)
    both = RoundRows(
        np.concatenate([rows, rows]),
        np.concatenate([done.start - earlier, done.start]),
        np.concatenate([done.end - earlier, done.end]),
    )
    return both, float(starts[best]), float(lengths[best])


def _numbered(turns: Turns, laid: RoundRows, cells: Cells) -> dict[tuple[str, Where | None], int]:
    """Causes and their lines, and how long their gaps in this turn last; the longest first."""
    lasts: dict[tuple[str, Where | None], int] = {}
    for rank in turns.timeline.ranks:
        begin, end, row = turns.gaps(rank, *laid)
        begin = np.maximum(begin, cells.begin).astype(np.int64)
        end = np.minimum(end, cells.begin + cells.length).astype(np.int64)
        for first, last, one in zip(begin.tolist(), end.tolist(), row.tolist(), strict=True):
            if last > first:
                key = turns.blame(one)
                lasts[key] = lasts.get(key, 0) + last - first
    return dict(sorted(lasts.items(), key=lambda one: -one[1]))


def _lanes(
    turns: Turns, laid: RoundRows, cells: Cells, numbered: dict[tuple[str, Where | None], int]
) -> Iterator[Text]:
    timeline = turns.timeline
    kind, lane = timeline.spans.kind[laid.row], timeline.spans.lane[laid.row]
    main = set(timeline.spans.lane[timeline.marks].tolist())
    for rank in timeline.ranks[:MOST_RANKS]:
        for index, about in enumerate(timeline.lanes):
            mine = lane == index
            if about.rank != rank or not mine.any() or about.device is not None:
                continue
            if index in main:
                yield _row(_named("your lines", rank, timeline.ranks), _line_numbers(turns, laid, mine, cells))
            tones = [(letter, "", mine & (kind == one)) for one, letter in _HOST.items()]
            yield _row(_lane_name(about, index in main), _drawn(laid, cells, tones))
        yield _row("GPU", _gpu(turns, laid, rank, cells, numbered), STRONG)


def _named(name: str, rank: int, ranks: list[int]) -> str:
    return f"{rank}: {name}" if len(ranks) > 1 else name


def _lane_name(lane: Lane, main: bool) -> str:
    if main:
        return "Python"
    return "backward" if "autograd" in lane.name else WORKERS if lane.name == WORKERS else "other thread"


def _row(name: str, drawn: Text, style: str = FAINT) -> Text:
    return Text.assemble(
        (f"{words.cut(name, MARGIN - 2):>{MARGIN - 2}}  ", style), drawn, no_wrap=True, overflow="ignore"
    )


def _drawn(laid: RoundRows, cells: Cells, tones: list[tuple[str, str, Mask]]) -> Text:
    """In each cell the letter of what takes most of it, if anything takes a third."""
    taken = np.array([cells.taken(laid.start[mine], laid.end[mine]) for _, _, mine in tones])
    return _text(cells, taken, [(letter, style) for letter, style, _ in tones])


def _text(cells: Cells, taken: Ints, letters: list[tuple[str, str]]) -> Text:
    drawn, cell = Text(), cells.length / cells.columns
    for most, time in zip(taken.argmax(axis=0).tolist(), taken.max(axis=0).tolist(), strict=True):
        letter, style = letters[most] if time > cell / 3 else (" ", "")
        drawn.append(letter, style)
    return drawn


def _gpu(turns: Turns, laid: RoundRows, rank: int, cells: Cells, numbered: dict[tuple[str, Where | None], int]) -> Text:
    timeline = turns.timeline
    begin, end, row = turns.gaps(rank, *laid)
    mine = (timeline.on_device & (timeline.rank_of_rows == rank))[laid.row]
    kind = timeline.spans.kind[laid.row]
    start = at_work_from(kind, laid.start, laid.end, timeline.spans.work[laid.row])
    places = ("computing", "copying", "collective")
    taken, letters = list[Ints](), []
    for place in places:
        these = mine & np.isin(kind, [one for one, its in _DEVICE.items() if its == place])
        taken.append(cells.taken(*_joined(start[these], laid.end[these])))
        letters.append((look(place).letter, look(place).colour))
    keys = list(numbered)
    which = np.array([keys.index(key) if (key := turns.blame(one)) in numbered else NONE for one in row.tolist()])
    for number, (cause, _) in enumerate(keys):
        these = which == number
        taken.append(cells.taken(begin[these], end[these]) if these.any() else np.zeros(cells.columns, np.int64))
        letters.append((_mark(number, cause), f"bold {look(cause).colour}"))
    return _text(cells, np.array(taken), letters)


def _mark(number: int, cause: str) -> str:
    return "?" if cause == "unknown" else str(number + 1) if number < 9 else "+"


def _joined(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Those that overlap as one."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.zeros(0, bool)
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)] if len(start) else end


def _line_numbers(turns: Turns, laid: RoundRows, mine: Mask, cells: Cells) -> Text:
    """Where a line of the program begins to hold the thread for long enough, its number stands."""
    place = turns.place[laid.row[mine]]
    cell = np.clip(
        ((laid.start[mine] - cells.begin) * cells.columns / cells.length).astype(np.int64), -1, cells.columns
    )
    until = np.clip(((laid.end[mine] - cells.begin) * cells.columns / cells.length).astype(np.int64), -1, cells.columns)
    held = np.full(cells.columns, NONE)
    for one, first, last in zip(place.tolist(), cell.tolist(), until.tolist(), strict=True):
        held[max(first, 0) : last + 1] = one
    drawn, at = "", 0
    while at < cells.columns:
        last = at
        while last < cells.columns and held[last] == held[at]:
            last += 1
        number = str(turns.places[held[at]].line) if held[at] != NONE else ""
        drawn += f"{number if len(number) < last - at else '':{last - at}}"
        at = last
    return Text(drawn, FAINT)


def _ruler(cells: Cells, ratio: float) -> Text:
    whole, drawn = cells.length * ratio, ""
    ticks = 4 if cells.columns >= 4 * 9 else 2
    for part in range(ticks):
        at = part * cells.columns // ticks
        drawn = f"{drawn:{at}}{'0' if not part else duration(round(whole * part / ticks), round(whole))}"
    return Text(" " * MARGIN + drawn, FAINT, no_wrap=True)


def _meanings(
    diagnosis: Diagnosis, turns: Turns, numbered: dict[tuple[str, Where | None], int], length: int
) -> Iterator[Text]:
    ranks = len(turns.timeline.ranks)
    for number, ((cause, where), lasts) in enumerate(numbered.items()):
        if number < 9 and lasts / ranks >= WORTH_A_NUMBER * length:
            at = words.at(where, 60) if where else ""
            took = duration(round(lasts * turns.ratio / ranks), diagnosis.plain_step)
            colour = f"bold {look(cause).colour}"
            yield Text.assemble((f"{_mark(number, cause)}  ", colour), f"{took}  {look(cause).name}{at}")


def _key() -> Text:
    letters = {"work": "·", "launch": "'", "sync": "~", "memory": "m"}
    places = ("computing", "copying", "collective")
    host = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    device = "  ".join(f"{look(place).letter} {place}" for place in places)
    return unbroken((f"{host}  {device}  number: a gap", FAINT))
