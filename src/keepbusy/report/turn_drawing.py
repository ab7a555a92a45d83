"""Iterations drawn in characters: host threads, the GPU with its idle times numbered by cause, and a line a stream.

Python              ''~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
GPU                 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓█████████████████
compute             ─────after 10▸21 result = batch][
copies              [10 batch.to(]───────────────────
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
from rich.text import Text

from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, Turns
from keepbusy.report import edges, labels, race_words
from keepbusy.report.labels import ledger_place
from keepbusy.report.paper import FAINT, STRONG, laid_out, line, unbroken
from keepbusy.report.source import source_of
from keepbusy.timeline.figures import duration
from keepbusy.timeline.model import EVERY_LANE, NONE, WORKERS, Ints, Kind, Lane, Mask
from keepbusy.timeline.replay import at_work_from, run, steady

MARGIN = 22
MOST_RANKS = 4
"""More ranks would not fit a screen."""
WORTH_A_NUMBER = 0.01
"""Share of the drawn time: shorter idle times have no line below the drawing."""
LEAST_BOX = 4
"""Cells of the smallest box with a number: `[21]`."""
FEW_LAUNCHES = 0.25
"""Per cell: so few launches are each drawn, however short they are."""
MOST_WAITS = 8
"""Waits are listed below the drawing only if there are no more than this."""
_HOST = {Kind.WORK: "·", Kind.LAUNCH: "'", Kind.SYNC: "~", Kind.ALLOCATE: "m", Kind.RECORDING: " "}
_DEVICE = {Kind.KERNEL: "computing", Kind.COPY: "copying", Kind.FILL: "copying", Kind.COLLECTIVE: "collective"}
_WORK = ("computing", "copying", "collective")
_KINDS_OF_WORK = {place: [kind for kind in _DEVICE if _DEVICE[kind] == place] for place in _WORK}


class Cells(NamedTuple):
    """The drawn window of time, and how many cells it has."""

    begin: float
    length: float
    columns: int

    def occupied(self, start: Ints, end: Ints) -> Ints:
        """How much time of each cell these intervals occupy. They must not overlap."""
        edges = self.begin + self.length * np.arange(self.columns + 1) / self.columns
        order = np.argsort(start, kind="stable")
        start, end = start[order].astype(np.float64), end[order].astype(np.float64)
        before = np.concatenate([[0.0], np.cumsum(end - start)])
        following = np.searchsorted(end, edges, side="right")
        inside = np.append(start, np.inf)[following]
        return np.diff(before[following] + np.maximum(0.0, edges - inside))

    def holding(self, moments: Ints) -> Ints:
        """The drawn cells that these moments fall into."""
        cell = np.floor((moments - self.begin) * self.columns / self.length).astype(np.int64)
        return cell[(cell >= 0) & (cell < self.columns)]


class RowTimes(NamedTuple):
    """Rows, each as often as it runs in the drawn window, with its times."""

    row: Ints
    start: Ints
    end: Ints


class DrawnWait(NamedTuple):
    """What a command waits for, or should: the mark in the first cell of its box, and the words before the box."""

    mark: str
    words: tuple[str, ...]  # the longest first
    colour: str


class Box(NamedTuple):
    """Consecutive commands that one line launched."""

    first: int  # its first cell, and the one after its last
    last: int
    where: Where
    rows: list[int]  # indices into the drawn rows


Numbered: TypeAlias = dict[tuple[str, Where | None], int]
"""Idle time of the GPU by cause and line, in the order of their numbers: the longest first."""


class DrawnTime(NamedTuple):
    """The drawn rows and iterations, from `begin` on."""

    rows: RowTimes
    begin: float
    length: float
    iterations: int


def render(diagnosis: Diagnosis, width: int, colour: bool = False, unicode: bool = True) -> str:
    """Threads, streams, a ruler, and what the numbers in idle times mean."""
    iterations = diagnosis.turns
    if iterations is None or not len(iterations.timeline):
        return ""
    window = _window(iterations, diagnosis.plain_step)
    cells = Cells(window.begin, window.length, max(16, width - MARGIN))
    numbered = _numbered(iterations, window.rows, cells)
    title = "The script" if diagnosis.one_turn else "One iteration" if window.iterations == 1 else "Two iterations"
    parts = [line((title, STRONG), f", {duration(round(window.length * iterations.ratio))}"), line("")]
    waits, listed = _waits(diagnosis, iterations, window, unicode)
    lanes = _lanes(iterations, window.rows, cells, numbered, waits, unicode)
    parts += [_ruler(cells, iterations.ratio), *lanes, line("")]
    parts += [*_meanings(diagnosis, iterations, numbered, window), *listed, _key()]
    return laid_out(parts, width, colour, unicode)


def _window(iterations: Turns, plain_step: int) -> DrawnTime:
    """The iteration whose time is closest to the plain step; two if there are several streams, because a batch that
    is copied in one is used in the next. If the host runs ahead, its iterations are shorter than those of the GPU."""
    timeline, paced = iterations.timeline, steady(iterations.timeline)
    replayed = run(timeline, 1 if timeline.facts.one_turn else paced.passes)
    marks = timeline.marks_of(timeline.ranks[0])
    period = paced.pace * max(1, len(marks))
    if timeline.facts.one_turn:
        rows = RowTimes(np.arange(len(timeline)), replayed.start, replayed.end)
        return DrawnTime(rows, float(replayed.start.min()), period, 1)
    streams = set(timeline.spans.lane[timeline.on_device].tolist())
    has_several_streams = len(streams) > len({timeline.lanes[stream].rank for stream in streams})
    count = min(len(marks), 2 if has_several_streams else 1)
    starts = np.append(replayed.start[marks], replayed.start[marks[0]] + period).astype(np.float64)
    lengths, wanted = starts[count:] - starts[:-count], count * plain_step / iterations.ratio
    best = int(np.abs(lengths - wanted).argmin())
    begin, length = float(starts[best]), max(float(lengths[best]), wanted)
    # a gap at an end of the window lies between a row in it and one outside it
    rows = _occurrences(replayed.start, replayed.end, period, begin - period, begin + length + period)
    return DrawnTime(rows, begin, length, count)


def _occurrences(start: Ints, end: Ints, period: float, begin: float, until: float) -> RowTimes:
    """Rows between these times. Each row runs once per `period`, however far the GPU is behind the host."""
    first = np.ceil((start - until) / period).astype(np.int64)
    last = np.floor((end - begin) / period).astype(np.int64)
    repeats = np.maximum(0, last - first + 1)
    row = np.repeat(np.arange(len(start)), repeats)
    earlier = np.round((first[row] + np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)) * period)
    start, end = start[row] - earlier.astype(np.int64), end[row] - earlier.astype(np.int64)
    order = np.argsort(start, kind="stable")
    return RowTimes(row[order], start[order], end[order])


def _numbered(iterations: Turns, times: RowTimes, cells: Cells) -> Numbered:
    idle: Numbered = {}
    for rank in iterations.timeline.ranks:
        begin, end, row = iterations.gaps(rank, *times)
        begin = np.maximum(begin, cells.begin).astype(np.int64)
        end = np.minimum(end, cells.begin + cells.length).astype(np.int64)
        for first, last, gap_row in zip(begin.tolist(), end.tolist(), row.tolist(), strict=True):
            if last > first:
                key = iterations.blame(gap_row)
                idle[key] = idle.get(key, 0) + last - first
    return dict(sorted(idle.items(), key=lambda entry: -entry[1]))


def _lanes(
    iterations: Turns, times: RowTimes, cells: Cells, numbered: Numbered, waits: Mapping[int, DrawnWait], unicode: bool
) -> Iterator[Text]:
    timeline = iterations.timeline
    kind, lane = timeline.spans.kind[times.row], timeline.spans.lane[times.row]
    main = set(timeline.spans.lane[timeline.marks].tolist())
    for rank in timeline.ranks[:MOST_RANKS]:
        for index, thread in enumerate(timeline.lanes):
            of_lane = lane == index
            if thread.rank != rank or not of_lane.any() or thread.device is not None:
                continue
            if index in main:
                yield _row(_named("your lines", rank, timeline.ranks), _line_numbers(iterations, times, of_lane, cells))
            tones = [(letter, of_lane & (kind == host_kind)) for host_kind, letter in _HOST.items()]
            launches = cells.holding(times.start[of_lane & (kind == Kind.LAUNCH)])
            yield _row(_thread_name(thread, index in main), _thread(times, cells, tones, launches))
        yield _row(_named("GPU", rank, timeline.ranks), _gpu(iterations, times, rank, cells, numbered), STRONG)
        for index, stream in enumerate(timeline.lanes):
            of_lane = lane == index
            if stream.rank == rank and of_lane.any() and stream.device is not None:
                name = _stream_name(stream, _role(kind[of_lane], (times.end - times.start)[of_lane]))
                times_of_lane = RowTimes(*(column[of_lane] for column in times))
                yield _row(name, _stream(iterations, times_of_lane, waits, cells, unicode))


def _named(name: str, rank: int, ranks: list[int]) -> str:
    return f"{rank}: {name}" if len(ranks) > 1 else name


def _thread_name(lane: Lane, is_main: bool) -> str:
    if is_main:
        return "Python"
    return "backward" if "autograd" in lane.name else WORKERS if lane.name == WORKERS else "other thread"


def _row(name: str, drawn: Text, style: str = FAINT) -> Text:
    margin = f"{labels.cut(name, MARGIN - 2):>{MARGIN - 2}}  "
    return Text.assemble((margin, style), drawn, no_wrap=True, overflow="ignore")


def _thread(times: RowTimes, cells: Cells, tones: list[tuple[str, Mask]], launches: Ints) -> Text:
    """The letter of what fills most of each cell. If there are few launches, each of them is drawn."""
    filled = np.array([cells.occupied(times.start[mask], times.end[mask]) for _, mask in tones])
    letters = _letters(cells, filled, [(letter, "") for letter, _ in tones])
    for cell in launches.tolist() if len(launches) <= FEW_LAUNCHES * cells.columns else ():
        letters[cell] = (_HOST[Kind.LAUNCH], "")
    return Text.assemble(*letters)


def _letters(cells: Cells, filled: Ints, letters: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """For each cell the letter that fills most of it, if it fills at least a third."""
    third = cells.length / cells.columns / 3
    fullest = zip(filled.argmax(axis=0).tolist(), filled.max(axis=0).tolist(), strict=True)
    return [letters[index] if time > third else (" ", "") for index, time in fullest]


def _gpu(iterations: Turns, times: RowTimes, rank: int, cells: Cells, numbered: Numbered) -> Text:
    timeline = iterations.timeline
    begin, end, row = iterations.gaps(rank, *times)
    of_rank = (timeline.on_device & (timeline.rank_of_rows == rank))[times.row]
    kind = timeline.spans.kind[times.row]
    start = at_work_from(kind, times.start, times.end, timeline.spans.work[times.row])
    filled, letters = _filled_by_work(cells, kind, start, times.end, of_rank)
    number_of = {key: number for number, key in enumerate(numbered)}
    numbers = np.array([number_of.get(iterations.blame(gap_row), NONE) for gap_row in row.tolist()])
    for number, (cause, _) in enumerate(numbered):
        gaps = numbers == number
        filled.append(cells.occupied(begin[gaps], end[gaps]) if gaps.any() else np.zeros(cells.columns, np.int64))
        letters.append((_mark(number, cause), f"bold {ledger_place(cause).colour}"))
    return Text.assemble(*_letters(cells, np.array(filled), letters))


def _filled_by_work(
    cells: Cells, kind: Ints, start: Ints, end: Ints, mask: Mask
) -> tuple[list[Ints], list[tuple[str, str]]]:
    """How much of each cell computing, copying and collectives fill, and their letters."""
    filled = list[Ints]()
    for place in _WORK:
        working = mask & np.isin(kind, _KINDS_OF_WORK[place])
        filled.append(cells.occupied(*_merged(start[working], end[working])))
    return filled, [(ledger_place(place).letter, ledger_place(place).colour) for place in _WORK]


def _mark(number: int, cause: str) -> str:
    return "?" if cause == "unknown" else str(number + 1) if number < 9 else "+"


def _role(kind: Ints, time: Ints) -> str:
    """What a stream does for most of its time."""
    roles = {"compute": "computing", "copies": "copying", "comm": "collective"}
    return max(roles, key=lambda role: time[np.isin(kind, _KINDS_OF_WORK[roles[role]])].sum())


def _stream_name(lane: Lane, role: str) -> str:
    """`copies`, `side (copies)`, `stream 8 (copies)`, and `default (compute)` for the default stream."""
    name = lane.name or f"stream {lane.number}"
    with_role = name if name == role else f"{name} ({role})"
    return with_role if len(with_role) <= MARGIN - 2 else f"{name.removesuffix(' stream')} ({role})"


def _stream(iterations: Turns, times: RowTimes, waits: Mapping[int, DrawnWait], cells: Cells, unicode: bool) -> Text:
    """A box for what one line launched in one iteration, with the line's number and text if there is room, and before
    it what it waits for."""
    idle, kind = ("─" if unicode else "-", FAINT), iterations.timeline.spans.kind[times.row]
    boxes = list(_boxes(iterations, times, cells))
    wide = [box for box in boxes if box.last - box.first >= LEAST_BOX]
    not_boxed = np.ones(len(times.row), bool)
    not_boxed[[index for box in wide for index in box.rows]] = False
    filled, letters = _filled_by_work(cells, kind, times.start, times.end, not_boxed)
    drawn = [idle if cell[0] == " " else cell for cell in _letters(cells, np.array(filled), letters)]
    for first, last, where, rows in wide:
        shown, room = ledger_place(_DEVICE[Kind(int(kind[rows[-1]]))]), last - first - 2
        name = _line_in(where, room)
        inside = f"{name} "[:room] if name else ""
        drawn[first:last] = [(character, shown.colour) for character in f"[{inside.ljust(room, shown.letter)}]"]

    def fitting(phrases: Iterable[str], neighbours: Sequence[tuple[str, str]]) -> str:
        room = len(list(takewhile(idle.__eq__, neighbours)))
        return next((phrase for phrase in phrases if len(phrase) < room), "")

    for first, last, where, rows in boxes:
        wait = next((waits[row] for row in times.row[rows].tolist() if row in waits), None)
        if wait is None or first >= cells.columns:
            continue
        if last - first >= LEAST_BOX:  # the words end where the box begins
            text = fitting(wait.words, drawn[:first][::-1])
            begin = first - len(text)
        else:  # they follow it, with the line number that it has no room for
            begin = max(last, first + 1)
            text = fitting([f" {where.line} {phrase} " for phrase in wait.words], drawn[begin:])
        drawn[begin : begin + len(text)] = [(character, wait.colour) for character in text]
        drawn[first] = (wait.mark, wait.colour)
    return Text.assemble(*drawn)


def _boxes(iterations: Turns, times: RowTimes, cells: Cells) -> Iterator[Box]:
    """What one line launched in one iteration. If all boxes are wide enough for a name, each visit of the line has its
    own box; if all its commands have the same name, each command has one."""
    cell, timeline, lines = cells.length / cells.columns, iterations.timeline, edges.lines_of_rows(iterations)
    launch, visit = np.full(len(timeline), NONE), edges.visits(iterations)
    launch[timeline.launches.target] = timeline.launches.source
    iteration = np.searchsorted(timeline.marks, launch, side="right")
    boxes, key, reached = list[list[int]](), (NONE, NONE), 0.0
    for index, (row, start, end) in enumerate(zip(*(column.tolist() for column in times), strict=True)):
        before, key = key, (int(iteration[row]), int(lines[row]))
        if not boxes or key != before or start - reached >= cell:
            boxes.append([])
        boxes[-1].append(index)
        reached = max(end, reached)
    for box in boxes:
        rows = times.row[box]
        is_alike = len(set(timeline.spans.name[rows].tolist())) == 1
        part_of = dict(zip(box, box if is_alike else visit[launch[rows]].tolist(), strict=True))
        parts = [list(part) for _, part in groupby(box, part_of.__getitem__)]
        are_wide = all(times.end[part].max() - times.start[part[0]] >= LEAST_BOX * cell for part in parts)
        for part in parts if are_wide else [box]:
            first = max(0, round((times.start[part[0]] - cells.begin) / cell))
            last = min(cells.columns, round((times.end[part].max() - cells.begin) / cell))
            if lines[rows[0]] != NONE and last >= 0:
                yield Box(first, last, iterations.places[lines[rows[0]]], part)


def _line_in(where: Where, room: int) -> str:
    """`21 result = batch @ weights`, or its beginning if there is little room."""
    source, number = source_of(where), str(where.line) if where.line else ""
    file = labels.tame(where.file.replace("\\", "/").rpartition("/")[2])
    text = f"{number} {source.text}".strip() if source else f"{file}:{number}" if number else labels.tame(str(where))
    if room < len(number) + LEAST_BOX or (number and not source and len(text) > room):
        return number if len(number) <= room else ""
    return labels.cut(text, room)


def _merged(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Merge intervals that overlap."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order]) if len(end) else end
    first = np.concatenate([[True], start[1:] > reached[:-1]]) if len(start) else np.zeros(0, bool)
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)] if len(start) else end


def _line_numbers(iterations: Turns, times: RowTimes, mask: Mask, cells: Cells) -> Text:
    """Line numbers of the program, each at the cell where the thread comes to the line, if it stays long enough."""

    def cells_at(moments: Ints) -> list[int]:
        cell = ((moments[mask] - cells.begin) * cells.columns / cells.length).astype(np.int64)
        return np.clip(cell, -1, cells.columns).tolist()

    place_of_cell = np.full(cells.columns, NONE)
    places = iterations.place[times.row[mask]].tolist()
    for place, first, last in zip(places, cells_at(times.start), cells_at(times.end), strict=True):
        place_of_cell[max(first, 0) : last + 1] = place
    drawn = ""
    for place, same in groupby(place_of_cell.tolist()):
        room, number = len(list(same)), str(iterations.places[place].line) if place != NONE else ""
        drawn += f"{number if len(number) < room else '':{room}}"
    return Text(drawn, FAINT)


def _ruler(cells: Cells, ratio: float) -> Text:
    whole, drawn = cells.length * ratio, ""
    ticks = 4 if cells.columns >= 4 * 9 else 2
    for part in range(ticks):
        column = part * cells.columns // ticks
        drawn = f"{drawn:{column}}{'0' if not part else duration(round(whole * part / ticks), round(whole))}"
    return Text(" " * MARGIN + drawn, FAINT, no_wrap=True)


def _meanings(diagnosis: Diagnosis, iterations: Turns, numbered: Numbered, window: DrawnTime) -> Iterator[Text]:
    ranks, per = len(iterations.timeline.ranks), " per iteration" if window.iterations > 1 else ""
    for number, ((cause, where), idle) in enumerate(numbered.items()):
        if number < 9 and idle / ranks >= WORTH_A_NUMBER * window.length:
            place = labels.at(where, 60) if where else ""
            time = duration(round(idle * iterations.ratio / ranks / window.iterations), diagnosis.plain_step) + per
            colour = f"bold {ledger_place(cause).colour}"
            yield Text.assemble((f"{_mark(number, cause)}  ", colour), f"{time}  {ledger_place(cause).label}{place}")


def _waits(
    diagnosis: Diagnosis, iterations: Turns, window: DrawnTime, unicode: bool
) -> tuple[dict[int, DrawnWait], list[Text]]:
    """For each command that waits for an event, what is drawn before it; and the list of waits below the drawing."""
    timeline, spans, lines = iterations.timeline, iterations.timeline.spans, edges.lines_of_rows(iterations)
    is_drawn = np.zeros(len(timeline), bool)
    is_drawn[window.rows.row[(window.rows.end > window.begin) & (window.rows.start < window.begin + window.length)]] = 1
    event, missing = ("▸", "✗") if unicode else (">", "!")

    def number(row: int) -> int:
        return iterations.places[lines[row]].line if lines[row] != NONE else 0

    def stream(lane: int) -> str:
        name = timeline.lanes[lane].name or f"stream {timeline.lanes[lane].number}"
        return f"the {name}" if name == "default stream" else name

    waits, listed = dict[int, DrawnWait](), dict[str, None]()
    links = timeline.links.take(edges.event_links(iterations))
    for source, target in sorted(zip(links.source.tolist(), links.target.tolist(), strict=True)):
        if is_drawn[target] and number(source):
            after = f"{number(source)} on {stream(spans.lane[source])}"
            if timeline.on_device[target]:
                waits[target] = DrawnWait(event, (f"after {after}", f"after {number(source)}"), FAINT)
                waiting = f"{event}  line {number(target)} on {stream(spans.lane[target])} waits for line {after}"
            else:
                waiting = f"{_HOST[Kind.SYNC]}  Python waits in line {number(target)} for line {after}"
            listed[waiting] = None
    for row in np.flatnonzero(is_drawn & (spans.kind == Kind.SYNC) & (spans.awaits != NONE)).tolist():
        awaited = "the whole GPU" if spans.awaits[row] == EVERY_LANE else stream(spans.awaits[row])
        if number(row):
            listed[f"{_HOST[Kind.SYNC]}  Python waits in line {number(row)} for {awaited}"] = None
    below = [Text(sentence) for sentence in listed] if len(listed) <= MOST_WAITS else []
    for edge in edges.missing_edges(iterations, diagnosis.races):
        waits[edge.second] = DrawnWait(missing, (f"not after {number(edge.first)}",), "bold red")
        sentences = f"{race_words.sentence(edge.race)} {race_words.remedy(edge.race)}"
        below.append(Text.assemble((f"{missing}  ", "bold red"), sentences))
    return waits, below


def _key() -> Text:
    letters = {"work": "·", "launch": "'", "sync": "~", "memory": "m"}
    host = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    device = "  ".join(f"{ledger_place(place).letter} {place}" for place in _WORK)
    return unbroken((f"{host}  {device}  number: the GPU is idle", FAINT))
