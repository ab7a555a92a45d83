"""Iterations drawn in characters: host threads, the GPU with its idle times numbered by cause, and a line a stream.

Python              ''~~~~~~~~~~~~~~~~~~
GPU                 ████████████████████
stream 7 (compute)  [21 result = batch][
stream 8 (copies)   ─[10 batch.to(]─────
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.text import Text

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, Turns
from keepbusy.report import words
from keepbusy.report.paper import FAINT, STRONG, laid_out, line, unbroken
from keepbusy.report.source import source_of
from keepbusy.report.words import look
from keepbusy.timeline.figures import duration
from keepbusy.timeline.model import NONE, WORKERS, Ints, Kind, Lane, LinkKind, Mask
from keepbusy.timeline.replay import at_work_from, run, steady

MARGIN = 22
MOST_RANKS = 4
"""So many ranks are drawn; more would not fit a screen."""
WORTH_A_NUMBER = 0.01
"""Of what is drawn: idle times of a cause and a line that take less are not named below it."""
LEAST_BOX = 4
"""Cells: `[21]`."""
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


class RowTimes(NamedTuple):
    """Rows as often as they run in the window that is drawn, and when."""

    row: Ints
    start: Ints
    end: Ints


class DrawnTime(NamedTuple):
    """What is drawn: so many iterations, from `begin` on."""

    rows: RowTimes
    begin: float
    length: float
    iterations: int


def render(diagnosis: Diagnosis, width: int, colour: bool = False, unicode: bool = True) -> str:
    """Threads, streams, a ruler, and what the numbers where the GPU is idle mean."""
    turns = diagnosis.turns
    if turns is None or not len(turns.timeline):
        return ""
    window = _window(turns, diagnosis.plain_step)
    cells = Cells(window.begin, window.length, max(16, width - MARGIN))
    numbered = _numbered(turns, window.rows, cells)
    what = "The script" if diagnosis.one_turn else "One iteration" if window.iterations == 1 else "Two iterations"
    parts = [line((what, STRONG), f", {duration(round(window.length * turns.ratio))}"), line("")]
    parts += [_ruler(cells, turns.ratio), *_lanes(turns, window.rows, cells, numbered, unicode), line("")]
    parts += [*_meanings(diagnosis, turns, numbered, window), _key()]
    return laid_out(parts, width, colour, unicode)


def _window(turns: Turns, plain_step: int) -> DrawnTime:
    """The iteration whose time is closest to the plain step; two if there are several streams, because a batch that
    is copied in one is used in the next. If the host runs ahead, its iterations are shorter than those of the GPU."""
    timeline, paced = turns.timeline, steady(turns.timeline)
    done = run(timeline, 1 if timeline.facts.one_turn else paced.rounds)
    marks = timeline.marks_of(timeline.ranks[0])
    around = paced.pace * max(1, len(marks))
    if timeline.facts.one_turn:
        rows = RowTimes(np.arange(len(timeline)), done.start, done.end)
        return DrawnTime(rows, float(done.start.min()), around, 1)
    streams = set(timeline.spans.lane[timeline.on_device].tolist())
    has_several_streams = len(streams) > len({timeline.lanes[stream].rank for stream in streams})
    iterations = min(len(marks), 2 if has_several_streams else 1)
    starts = np.append(done.start[marks], done.start[marks[0]] + around).astype(np.float64)
    lengths, wanted = starts[iterations:] - starts[:-iterations], iterations * plain_step / turns.ratio
    best = int(np.abs(lengths - wanted).argmin())
    begin, length = float(starts[best]), max(float(lengths[best]), wanted)
    # a gap at an end of the window lies between a row in it and one outside it
    rows = _occurrences(done.start, done.end, around, begin - around, begin + length + around)
    return DrawnTime(rows, begin, length, iterations)


def _occurrences(start: Ints, end: Ints, around: float, begin: float, until: float) -> RowTimes:
    """Rows between these times. All rows run every `around`, so this holds however far the GPU is behind the host."""
    first = np.ceil((start - until) / around).astype(np.int64)
    last = np.floor((end - begin) / around).astype(np.int64)
    often = np.maximum(0, last - first + 1)
    row = np.repeat(np.arange(len(start)), often)
    earlier = np.round((first[row] + np.arange(len(row)) - np.repeat(np.cumsum(often) - often, often)) * around)
    begun, ended = start[row] - earlier.astype(np.int64), end[row] - earlier.astype(np.int64)
    order = np.argsort(begun, kind="stable")
    return RowTimes(row[order], begun[order], ended[order])


def _numbered(turns: Turns, laid: RowTimes, cells: Cells) -> dict[tuple[str, Where | None], int]:
    """Causes and their lines, and how long the GPU is idle for each; the longest first."""
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
    turns: Turns, laid: RowTimes, cells: Cells, numbered: dict[tuple[str, Where | None], int], unicode: bool
) -> Iterator[Text]:
    timeline = turns.timeline
    kind, lane = timeline.spans.kind[laid.row], timeline.spans.lane[laid.row]
    links, launch = timeline.links, np.full(len(timeline), NONE)
    launched = links.kind == LinkKind.LAUNCH
    launch[links.target[launched]] = links.source[launched]
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
        yield _row(_named("GPU", rank, timeline.ranks), _gpu(turns, laid, rank, cells, numbered), STRONG)
        for index, about in enumerate(timeline.lanes):
            mine = lane == index
            if about.rank == rank and mine.any() and about.device is not None:
                role = _role(kind[mine], (laid.end - laid.start)[mine])
                name = f"{about.name or f'stream {about.number}'} ({role})"
                yield _row(name, _stream(turns, RowTimes(*(column[mine] for column in laid)), launch, cells, unicode))


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


def _drawn(laid: RowTimes, cells: Cells, tones: list[tuple[str, str, Mask]]) -> Text:
    """In each cell the letter of what takes most of it, if anything takes a third."""
    taken = np.array([cells.taken(laid.start[mine], laid.end[mine]) for _, _, mine in tones])
    return _text(cells, taken, [(letter, style) for letter, style, _ in tones])


def _text(cells: Cells, taken: Ints, letters: list[tuple[str, str]]) -> Text:
    return Text.assemble(*_letters(cells, taken, letters))


def _letters(cells: Cells, taken: Ints, letters: list[tuple[str, str]]) -> list[tuple[str, str]]:
    most, time = taken.argmax(axis=0).tolist(), taken.max(axis=0).tolist()
    third = cells.length / cells.columns / 3
    return [letters[which] if part > third else (" ", "") for which, part in zip(most, time, strict=True)]


def _gpu(turns: Turns, laid: RowTimes, rank: int, cells: Cells, numbered: dict[tuple[str, Where | None], int]) -> Text:
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


def _role(kind: Ints, time: Ints) -> str:
    """What a stream does most of its time."""
    roles = {"compute": "computing", "copies": "copying", "comm": "collective"}
    return max(
        roles, key=lambda role: sum(time[kind == one].sum() for one, its in _DEVICE.items() if its == roles[role])
    )


def _stream(turns: Turns, laid: RowTimes, launch: Ints, cells: Cells, unicode: bool) -> Text:
    """A box for what one line launched in one iteration, with the line's number and text where there is room."""
    timeline, idle = turns.timeline, "─" if unicode else "-"
    kind = timeline.spans.kind[laid.row]
    places = np.array([_DEVICE[one] for one in kind.tolist()])
    shown = [place for place in dict.fromkeys(_DEVICE.values()) if (places == place).any()]
    taken = np.array([cells.taken(*_joined(*(time[places == place] for time in laid[1:]))) for place in shown])
    letters = [(look(place).letter, look(place).colour) for place in shown]
    drawn = [(idle, FAINT) if cell[0] == " " else cell for cell in _letters(cells, taken, letters)]
    for first, last, row in _boxes(turns, laid, launch, cells):
        place = look(_DEVICE[Kind(int(timeline.spans.kind[row]))])
        name = _line_in(turns.places[turns.place[launch[row]]], last - first - 2)
        inside = f"{name} " if name and len(name) < last - first - 2 else name
        text = f"[{inside}{place.letter * (last - first - 2 - len(inside))}]"
        drawn[first:last] = [(character, place.colour) for character in text]
    return Text.assemble(*drawn)


def _boxes(turns: Turns, laid: RowTimes, launch: Ints, cells: Cells) -> Iterator[tuple[int, int, int]]:
    """The first cell, the one after the last, and a row of each box that is wide enough for a name."""
    cell, marks = cells.length / cells.columns, turns.timeline.marks
    boxes = list[tuple[tuple[int, int], float, float, int]]()
    for row, start, end in zip(*(column.tolist() for column in laid), strict=True):
        launched_by = int(launch[row])
        place = int(turns.place[launched_by]) if launched_by != NONE else NONE
        key = (int(np.searchsorted(marks, launched_by, side="right")), place)
        if boxes and boxes[-1][0] == key and start - boxes[-1][2] < cell:
            boxes[-1] = (key, boxes[-1][1], max(end, boxes[-1][2]), row)
        else:
            boxes.append((key, start, end, row))
    for (_, place), start, end, row in boxes:
        first = max(0, round((start - cells.begin) / cell))
        last = min(cells.columns, round((end - cells.begin) / cell))
        if place != NONE and last - first >= LEAST_BOX:
            yield first, last, row


def _line_in(where: Where, room: int) -> str:
    """`21 result = batch @ weights`, as much of it as there is room for."""
    source, number = source_of(where), str(where.line) if where.line else ""
    file = words.tame(where.file.replace("\\", "/").rpartition("/")[2])
    text = f"{number} {source.text}".strip() if source else f"{file}:{number}" if number else words.tame(str(where))
    if room < len(number) + LEAST_BOX:
        return number if len(number) <= room else ""
    return words.cut(text, room)


def _joined(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Those that overlap as one."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.zeros(0, bool)
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)] if len(start) else end


def _line_numbers(turns: Turns, laid: RowTimes, mine: Mask, cells: Cells) -> Text:
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
    diagnosis: Diagnosis, turns: Turns, numbered: dict[tuple[str, Where | None], int], window: DrawnTime
) -> Iterator[Text]:
    ranks, per = len(turns.timeline.ranks), " per iteration" if window.iterations > 1 else ""
    for number, ((cause, where), lasts) in enumerate(numbered.items()):
        if number < 9 and lasts / ranks >= WORTH_A_NUMBER * window.length:
            at = words.at(where, 60) if where else ""
            took = duration(round(lasts * turns.ratio / ranks / window.iterations), diagnosis.plain_step) + per
            colour = f"bold {look(cause).colour}"
            yield Text.assemble((f"{_mark(number, cause)}  ", colour), f"{took}  {look(cause).label}{at}")


def _key() -> Text:
    letters = {"work": "·", "launch": "'", "sync": "~", "memory": "m"}
    places = ("computing", "copying", "collective")
    host = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    device = "  ".join(f"{look(place).letter} {place}" for place in places)
    return unbroken((f"{host}  {device}  number: the GPU is idle", FAINT))
