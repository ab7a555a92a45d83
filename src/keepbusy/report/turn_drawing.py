"""Iterations drawn in characters: host threads, the GPU with its idle times numbered by cause, and a line a stream.

Python              ''~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
GPU                 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓█████████████████
compute             ─────after 10▸21 result = batch][
copies              [10 batch.to(]───────────────────
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from rich.text import Text

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, Turns
from keepbusy.report import edges, race_words, words
from keepbusy.report.paper import FAINT, STRONG, laid_out, line, unbroken
from keepbusy.report.source import source_of
from keepbusy.report.words import look
from keepbusy.timeline.figures import duration
from keepbusy.timeline.model import EVERY_LANE, NONE, WORKERS, Ints, Kind, Lane, Mask
from keepbusy.timeline.replay import at_work_from, run, steady

MARGIN = 22
MOST_RANKS = 4
"""So many ranks are drawn; more would not fit a screen."""
WORTH_A_NUMBER = 0.01
"""Of what is drawn: idle times of a cause and a line that take less are not named below it."""
LEAST_BOX = 4
"""Cells: `[21]`."""
FEW_LAUNCHES = 0.25
"""Of the cells: as many launches as that are each drawn, however short they are."""
MOST_WAITS = 8
"""Who waits for whom is listed below a drawing that has no more of it."""
_HOST = {Kind.WORK: "·", Kind.LAUNCH: "'", Kind.SYNC: "~", Kind.ALLOCATE: "m", Kind.RECORDING: " "}
_DEVICE = {Kind.KERNEL: "computing", Kind.COPY: "copying", Kind.FILL: "copying", Kind.COLLECTIVE: "collective"}
_WORK = ("computing", "copying", "collective")


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

    def holding(self, moments: Ints) -> Ints:
        """Which cells these moments are in, of those that are drawn."""
        cell = np.floor((moments - self.begin) * self.columns / self.length).astype(np.int64)
        return cell[(cell >= 0) & (cell < self.columns)]


class RowTimes(NamedTuple):
    """Rows as often as they run in the window that is drawn, and when."""

    row: Ints
    start: Ints
    end: Ints


class DrawnWait(NamedTuple):
    """What a command waits for, or should wait for: the mark that its box opens with, and a word in front of it."""

    mark: str
    words: tuple[str, ...]  # the longest first
    colour: str


class Box(NamedTuple):
    """Commands in a row that one line launched."""

    first: int  # its first cell, and the one after its last
    last: int
    where: Where
    rows: list[int]  # where they stand among the rows that are drawn


Numbered: TypeAlias = dict[tuple[str, Where | None], int]
"""Causes and their lines, and how long the GPU is idle for each; the longest first, for they are numbered so."""


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
    waits, listed = _waits(diagnosis, turns, window, unicode)
    parts += [_ruler(cells, turns.ratio), *_lanes(turns, window.rows, cells, numbered, waits, unicode), line("")]
    parts += [*_meanings(diagnosis, turns, numbered, window), *listed, _key()]
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


def _numbered(turns: Turns, laid: RowTimes, cells: Cells) -> Numbered:
    lasts: Numbered = {}
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
    turns: Turns, laid: RowTimes, cells: Cells, numbered: Numbered, waits: Mapping[int, DrawnWait], unicode: bool
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
            launches = cells.holding(laid.start[mine & (kind == Kind.LAUNCH)])
            yield _row(_lane_name(about, index in main), _drawn(laid, cells, tones, launches))
        yield _row(_named("GPU", rank, timeline.ranks), _gpu(turns, laid, rank, cells, numbered), STRONG)
        for index, about in enumerate(timeline.lanes):
            mine = lane == index
            if about.rank == rank and mine.any() and about.device is not None:
                name = _stream_name(about, _role(kind[mine], (laid.end - laid.start)[mine]))
                yield _row(name, _stream(turns, RowTimes(*(column[mine] for column in laid)), waits, cells, unicode))


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


def _drawn(laid: RowTimes, cells: Cells, tones: list[tuple[str, str, Mask]], launches: Ints) -> Text:
    """In each cell the letter of what takes most of it, if anything takes a third. Of a few launches each is drawn."""
    taken = np.array([cells.taken(laid.start[mine], laid.end[mine]) for _, _, mine in tones])
    letters = _letters(cells, taken, [(letter, style) for letter, style, _ in tones])
    for cell in launches.tolist() if len(launches) <= FEW_LAUNCHES * cells.columns else ():
        letters[cell] = (_HOST[Kind.LAUNCH], "")
    return Text.assemble(*letters)


def _letters(cells: Cells, taken: Ints, letters: list[tuple[str, str]]) -> list[tuple[str, str]]:
    most, time = taken.argmax(axis=0).tolist(), taken.max(axis=0).tolist()
    third = cells.length / cells.columns / 3
    return [letters[which] if part > third else (" ", "") for which, part in zip(most, time, strict=True)]


def _gpu(turns: Turns, laid: RowTimes, rank: int, cells: Cells, numbered: Numbered) -> Text:
    timeline = turns.timeline
    begin, end, row = turns.gaps(rank, *laid)
    mine = (timeline.on_device & (timeline.rank_of_rows == rank))[laid.row]
    kind = timeline.spans.kind[laid.row]
    start = at_work_from(kind, laid.start, laid.end, timeline.spans.work[laid.row])
    taken, letters = _taken_by_work(cells, kind, start, laid.end, mine)
    keys = list(numbered)
    which = np.array([keys.index(key) if (key := turns.blame(one)) in numbered else NONE for one in row.tolist()])
    for number, (cause, _) in enumerate(keys):
        these = which == number
        taken.append(cells.taken(begin[these], end[these]) if these.any() else np.zeros(cells.columns, np.int64))
        letters.append((_mark(number, cause), f"bold {look(cause).colour}"))
    return Text.assemble(*_letters(cells, np.array(taken), letters))


def _taken_by_work(
    cells: Cells, kind: Ints, start: Ints, end: Ints, mine: Mask
) -> tuple[list[Ints], list[tuple[str, str]]]:
    """How much of each cell computing, copying and collectives take, and the letters that stand for them."""
    taken = list[Ints]()
    for place in _WORK:
        these = mine & np.isin(kind, [one for one, its in _DEVICE.items() if its == place])
        taken.append(cells.taken(*_joined(start[these], end[these])))
    return taken, [(look(place).letter, look(place).colour) for place in _WORK]


def _mark(number: int, cause: str) -> str:
    return "?" if cause == "unknown" else str(number + 1) if number < 9 else "+"


def _role(kind: Ints, time: Ints) -> str:
    """What a stream does most of its time."""
    roles = {"compute": "computing", "copies": "copying", "comm": "collective"}
    return max(
        roles, key=lambda role: sum(time[kind == one].sum() for one, its in _DEVICE.items() if its == roles[role])
    )


def _stream_name(lane: Lane, role: str) -> str:
    """`copies`, `side (copies)`, `stream 8 (copies)`. Where there is no room it is `default (compute)`."""
    name = lane.name or f"stream {lane.number}"
    whole = name if name == role else f"{name} ({role})"
    return whole if len(whole) <= MARGIN - 2 else f"{name.removesuffix(' stream')} ({role})"


def _stream(turns: Turns, laid: RowTimes, waits: Mapping[int, DrawnWait], cells: Cells, unicode: bool) -> Text:
    """A box for what one line launched in one iteration, with the line's number and text where there is room. In front
    of it stands what it waits for."""
    timeline, idle = turns.timeline, ("─" if unicode else "-", FAINT)
    boxes, kind = list(_boxes(turns, laid, cells)), timeline.spans.kind[laid.row]
    wide = [box for box in boxes if box.last - box.first >= LEAST_BOX]
    apart = np.ones(len(laid.row), bool)
    apart[[at for box in wide for at in box.rows]] = False
    taken, letters = _taken_by_work(cells, kind, laid.start, laid.end, apart)
    drawn = [idle if cell[0] == " " else cell for cell in _letters(cells, np.array(taken), letters)]
    for first, last, where, rows in wide:
        its = look(_DEVICE[Kind(int(kind[rows[-1]]))])
        name = _line_in(where, last - first - 2)
        inside = f"{name} " if name and len(name) < last - first - 2 else name
        text = f"[{inside}{its.letter * (last - first - 2 - len(inside))}]"
        drawn[first:last] = [(character, its.colour) for character in text]
    for first, last, where, rows in boxes:
        wait = next((waits[row] for row in laid.row[rows].tolist() if row in waits), None)
        if wait is None or first >= cells.columns:
            continue
        is_wide = last - first >= LEAST_BOX
        beside = drawn[:first][::-1] if is_wide else drawn[max(last, first + 1) :]
        room = next((at for at, one in enumerate(beside) if one != idle), len(beside))
        words_shown = wait.words if is_wide else [f" {where.line} {one} " for one in wait.words]
        word = next((one for one in words_shown if len(one) < room), "")
        begin = first - len(word) if is_wide else max(last, first + 1)
        drawn[begin : begin + len(word)] = [(character, wait.colour) for character in word]
        drawn[first] = (wait.mark, wait.colour)
    return Text.assemble(*drawn)


def _boxes(turns: Turns, laid: RowTimes, cells: Cells) -> Iterator[Box]:
    """What one line launched in one iteration. Where all of them are wide enough for a name, each time that the line
    was run has a box of its own, and so has each command if they are all alike."""
    cell, timeline, lines = cells.length / cells.columns, turns.timeline, edges.lines_of_rows(turns)
    launch, visit = np.full(len(timeline), NONE), edges.visits(turns)
    launch[timeline.launches.target] = timeline.launches.source
    iteration = np.searchsorted(timeline.marks, launch, side="right")
    boxes, key, reached = list[list[int]](), (NONE, NONE), 0.0
    for at, (row, start, end) in enumerate(zip(*(column.tolist() for column in laid), strict=True)):
        before, key = key, (int(iteration[row]), int(lines[row]))
        if not boxes or key != before or start - reached >= cell:
            boxes.append([])
        boxes[-1].append(at)
        reached = max(end, reached)
    for box in boxes:
        rows = laid.row[box]
        is_alike = len(set(timeline.spans.name[rows].tolist())) == 1
        number = dict(zip(box, box if is_alike else visit[launch[rows]].tolist(), strict=True))
        parts = [list(part) for _, part in groupby(box, number.__getitem__)]
        are_wide = all(laid.end[part].max() - laid.start[part[0]] >= LEAST_BOX * cell for part in parts)
        for part in parts if are_wide else [box]:
            first = max(0, round((laid.start[part[0]] - cells.begin) / cell))
            last = min(cells.columns, round((laid.end[part].max() - cells.begin) / cell))
            if lines[rows[0]] != NONE and last >= 0:
                yield Box(first, last, turns.places[lines[rows[0]]], part)


def _line_in(where: Where, room: int) -> str:
    """`21 result = batch @ weights`, as much of it as there is room for."""
    source, number = source_of(where), str(where.line) if where.line else ""
    file = words.tame(where.file.replace("\\", "/").rpartition("/")[2])
    text = f"{number} {source.text}".strip() if source else f"{file}:{number}" if number else words.tame(str(where))
    if room < len(number) + LEAST_BOX or (number and not source and len(text) > room):
        return number if len(number) <= room else ""
    return words.cut(text, room)


def _joined(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Merge intervals that overlap."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.zeros(0, bool)
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)] if len(start) else end


def _line_numbers(turns: Turns, laid: RowTimes, mine: Mask, cells: Cells) -> Text:
    """Where a line of the program begins to hold the thread for long enough, its number stands."""

    def cells_at(moments: Ints) -> list[int]:
        cell = ((moments[mine] - cells.begin) * cells.columns / cells.length).astype(np.int64)
        return np.clip(cell, -1, cells.columns).tolist()

    held = np.full(cells.columns, NONE)
    places = turns.place[laid.row[mine]].tolist()
    for place, first, last in zip(places, cells_at(laid.start), cells_at(laid.end), strict=True):
        held[max(first, 0) : last + 1] = place
    drawn = ""
    for place, same in groupby(held.tolist()):
        room, number = len(list(same)), str(turns.places[place].line) if place != NONE else ""
        drawn += f"{number if len(number) < room else '':{room}}"
    return Text(drawn, FAINT)


def _ruler(cells: Cells, ratio: float) -> Text:
    whole, drawn = cells.length * ratio, ""
    ticks = 4 if cells.columns >= 4 * 9 else 2
    for part in range(ticks):
        at = part * cells.columns // ticks
        drawn = f"{drawn:{at}}{'0' if not part else duration(round(whole * part / ticks), round(whole))}"
    return Text(" " * MARGIN + drawn, FAINT, no_wrap=True)


def _meanings(diagnosis: Diagnosis, turns: Turns, numbered: Numbered, window: DrawnTime) -> Iterator[Text]:
    ranks, per = len(turns.timeline.ranks), " per iteration" if window.iterations > 1 else ""
    for number, ((cause, where), lasts) in enumerate(numbered.items()):
        if number < 9 and lasts / ranks >= WORTH_A_NUMBER * window.length:
            at = words.at(where, 60) if where else ""
            took = duration(round(lasts * turns.ratio / ranks / window.iterations), diagnosis.plain_step) + per
            colour = f"bold {look(cause).colour}"
            yield Text.assemble((f"{_mark(number, cause)}  ", colour), f"{took}  {look(cause).label}{at}")


def _waits(
    diagnosis: Diagnosis, turns: Turns, window: DrawnTime, unicode: bool
) -> tuple[dict[int, DrawnWait], list[Text]]:
    """Of each command that an event holds up what is drawn before it; and below the drawing who waits for whom."""
    timeline, spans, lines = turns.timeline, turns.timeline.spans, edges.lines_of_rows(turns)
    is_drawn = np.zeros(len(timeline), bool)
    is_drawn[window.rows.row[(window.rows.end > window.begin) & (window.rows.start < window.begin + window.length)]] = 1
    event, missing = ("▸", "✗") if unicode else (">", "!")

    def number(row: int) -> int:
        return turns.places[lines[row]].line if lines[row] != NONE else 0

    def stream(lane: int) -> str:
        name = timeline.lanes[lane].name or f"stream {timeline.lanes[lane].number}"
        return f"the {name}" if name == "default stream" else name

    waits, listed = dict[int, DrawnWait](), dict[str, None]()
    links = timeline.links.take(edges.event_links(turns))
    for source, target in sorted(zip(links.source.tolist(), links.target.tolist(), strict=True)):
        if is_drawn[target] and number(source):
            after = f"{number(source)} on {stream(spans.lane[source])}"
            if timeline.on_device[target]:
                waits[target] = DrawnWait(event, (f"after {after}", f"after {number(source)}"), FAINT)
                listed |= {
                    f"{event}  line {number(target)} on {stream(spans.lane[target])} waits for line {after}": None
                }
            else:
                listed |= {f"{_HOST[Kind.SYNC]}  Python waits in line {number(target)} for line {after}": None}
    for row in np.flatnonzero(is_drawn & (spans.kind == Kind.SYNC) & (spans.awaits != NONE)).tolist():
        whom = "the whole GPU" if spans.awaits[row] == EVERY_LANE else stream(spans.awaits[row])
        if number(row):
            listed |= {f"{_HOST[Kind.SYNC]}  Python waits in line {number(row)} for {whom}": None}
    below = [Text(one) for one in listed] if len(listed) <= MOST_WAITS else []
    for one in edges.missing_edges(turns, diagnosis.races):
        waits[one.second] = DrawnWait(missing, (f"not after {number(one.first)}",), "bold red")
        said = f"{race_words.sentence(one.race)} {race_words.remedy(one.race)}"
        below.append(Text.assemble((f"{missing}  ", "bold red"), said))
    return waits, below


def _key() -> Text:
    letters = {"work": "·", "launch": "'", "sync": "~", "memory": "m"}
    host = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    device = "  ".join(f"{look(place).letter} {place}" for place in _WORK)
    return unbroken((f"{host}  {device}  number: the GPU is idle", FAINT))
