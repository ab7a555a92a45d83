"""The block of a page: texts and figures as JSON, spans as columns, packed as in a `.busy` file.

8 bytes   the length of the header
header    compressed JSON: `words_of`, and how to read the columns
columns   each compressed, in the order of the header's `tables`

Times are nanoseconds; the page formats them as reports do.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from keepbusy import __version__
from keepbusy.causes import LEDGER
from keepbusy.causes.places import Where
from keepbusy.explain.comparison import Change, Comparison
from keepbusy.explain.diagnosis import CAUSES, Cause, Diagnosis, Turns
from keepbusy.report import labels, race_words, run_report, verdict
from keepbusy.report.edges import missing_edges
from keepbusy.report.labels import ledger_place, tame
from keepbusy.report.source import fix_line, source_of, text_of
from keepbusy.timeline.busy_file import LENGTH, pack
from keepbusy.timeline.edit import UNLIMITED, Edit
from keepbusy.timeline.model import NONE, Ints, Kind, MemoryUse
from keepbusy.timeline.run_facts import Part, PlainRun

_Columns: TypeAlias = Mapping[str, Ints]

_LONGEST_TEXT = 2_000
_LINES_AROUND = 14
"""Lines of the program above and below each line that the page names."""
_LONGEST_LINE, _MOST_LINES = 240, 6_000
_LONGEST_NAME = 600
"""Characters of a name: a longer one, such as C++ gives to kernels, loses its middle."""
_SPANS = ("lane", "start", "end", "kind", "name", "work", "lag", "awaits", "meeting", "size", "direction", "pinned")
_EXPLAINED = ("place", "call", "cause", "rest", "culprit", "aside")


def block_of(diagnosis: Diagnosis, source: str, more: dict[str, Any] | None = None) -> bytes:
    """The block; equal diagnoses have equal bytes. `more` is added to the header."""
    tables: dict[str, _Columns] = {}
    moments = {}
    for number, explained in enumerate([diagnosis, *(loop.diagnosis for loop in diagnosis.loops)]):
        if explained.turns is not None:
            missing, races = missing_edges(explained.turns, explained.races), explained.races
            missing_rows = [[first, second, races.index(race)] for first, second, race in missing]
            moments[str(number)] = _moment(explained.turns) | {"missing": missing_rows}
            tables |= {f"{number}.{name}": table for name, table in _tables(explained, explained.turns).items()}
    packed, described = [], {}
    for name, table in tables.items():
        columns = list(pack(dict(table)))
        described[name] = {"rows": len(next(iter(table.values()))), "columns": [column for column, _ in columns]}
        packed += [content for _, content in columns]
    header = words_of(diagnosis, source) | {"causes": CAUSES, "moments": moments, "tables": described} | (more or {})
    text = json.dumps(header, separators=(",", ":"), allow_nan=False, default=np.generic.item)
    head = zlib.compress(text.encode("ascii"), 9)
    return b"".join([LENGTH.pack(len(head)), head, *packed])


# Its words


def words_of(diagnosis: Diagnosis, source: str) -> dict[str, Any]:
    """The run as a whole, and the analysis of each loop."""
    run, iterations = diagnosis.run, diagnosis.turns
    return {
        "version": __version__,
        "source": _text(source or labels.files(diagnosis.sources)),
        "looks": {
            place: {"name": ledger_place(place).label, "sentence": ledger_place(place).sentence} for place in LEDGER
        },
        "run": None if run is None else _part(run),
        "shares": run.shares if run is not None else (),
        "recorded": (iterations.timeline.facts.recorded or ()) if iterations is not None else (),
        "analyses": [
            _analysis(diagnosis) | {"place": ""},
            *(_analysis(loop.diagnosis) | {"place": _text(loop.place)} for loop in diagnosis.loops),
        ],
        "plain_runs": [
            {"rank": rank, "steps": plain.steps, "step": plain.step, "course": _course(plain, run)}
            for rank, plain in sorted(diagnosis.plain_runs.items())
        ],
        "sources": _sources(diagnosis),
    }


def _text(value: str) -> str:
    return tame(value, _LONGEST_TEXT)


def _analysis(diagnosis: Diagnosis) -> dict[str, Any]:
    """The verdict of one loop, its ledger and causes, and its plan."""
    summary = verdict.summary(diagnosis)
    return {
        "header": _text(summary.header),
        "headline": summary.headline,
        "largest": summary.largest,
        "statement": _text(summary.statement),
        "total": summary.total,
        "step": diagnosis.plain_step,
        "plain": diagnosis.plain_given,
        "noise": diagnosis.noise,
        "script": diagnosis.one_turn,
        "ledger": [[place, diagnosis.ledger[place]] for place in LEDGER if diagnosis.ledger.get(place, 0) > 0],
        "reasons": [_cause(cause) for cause in diagnosis.causes],
        "plan": list(_plan(diagnosis, summary.items)),
        "late": [
            {"rank": late.rank, "late": late.late, "cause": late.cause, "where": _place(late.where)}
            for late in diagnosis.late
        ],
        "notes": [[label, _text(sentence)] for label, sentence in run_report.margin(diagnosis)],
        "races": [_text(f"{race_words.sentence(race)} {race_words.remedy(race)}") for race in diagnosis.races],
    }


def _place(where: Where) -> dict[str, Any]:
    """A place; `source` is empty if the line is not known or the file does not exist."""
    source = source_of(where) if where.file else None
    return {
        "text": labels.spot(where, 80),
        "file": _text(where.file),
        "line": source.line if source else where.line,
        "function": tame(where.function, 120),
        "exact": where.exact,
        "source": source.text[:_LONGEST_LINE] if source else "",
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.cause,
        "wait": cause.wait,
        "count": cause.count,
        "sites": [{"where": _place(site.where), "wait": site.wait} for site in cause.sites],
        "what": _text(cause.what),
        "advice": _text(cause.advice),
        "code": _text(fix_line(cause.fix, cause.where, cause.remedy)),
        "predicted": [cause.predicted.step, cause.predicted.low, cause.predicted.high],
        "same": cause.same_wait_as,
    }


def _plan(diagnosis: Diagnosis, items: tuple[verdict.Item, ...]) -> Iterator[dict[str, Any]]:
    """The fixes of the verdict, in its words and numbers."""
    rows = run_report.planned_rows(diagnosis)
    numbers = {row.fix.named: str(number) for number, row in enumerate(rows, 1)}
    for number, (row, item) in enumerate(zip(rows, items, strict=True)):
        fix = row.fix
        late = [run_report.lateness(rank, diagnosis.given) for rank in fix.late]
        needs = {numbers.get(name) or labels.fix(name): None for name in fix.needs if name != fix.named}
        yield {
            "number": number,
            "fix": _text(item.fix),
            "place": _text(item.place),
            "prediction": item.prediction,
            "where": _place(fix.where[0]) if fix.where else None,
            "causes": list(fix.causes),
            "predicted": [row.after, row.low, row.high],
            "iterations": _text(run_report.iterations_meant(fix, diagnosis)),
            "alone": fix.alone,
            "needs": [_text(name) for name in needs],
            "instead": [_text(labels.fix(other)) for other in fix.instead],
            "says": [_text(sentence) for sentence in (fix.reason, *late, fix.advice) if sentence],
            "code": _text(fix.code),
            "loop": _text(fix.loop),
            "replayed": diagnosis.turns is not None and diagnosis.turns.edit_of(fix) is not None,
        }


def compared(comparison: Comparison) -> dict[str, Any]:
    """The differences of two runs. A change is the time before, the time after, and whether it exceeds the noise."""
    run, predicted = comparison.run, comparison.foretold
    return {
        "step": _change(comparison.step),
        "ledger": [[name, *_change(change)] for name, change in comparison.ledger.items()],
        "plan": [
            {
                "fix": _text(labels.fix(outcome.fix.fix)),
                "where": labels.spot(outcome.fix.where[0], 80) if outcome.fix.where else "",
                "made": outcome.made,
                "saves": outcome.fix.gain,
            }
            for outcome in comparison.plan
        ],
        "predicted": None if predicted is None else [predicted.step, predicted.low, predicted.high],
        "run": None if run is None else [run.before, run.after, comparison.run_foretold],
        "notes": [_text(note) for note in comparison.notes],
    }


def _change(change: Change) -> list[Any]:
    return [change.before, change.after, change.significant]


def _course(plain: PlainRun, run: Part | None) -> dict[str, Any]:
    """`ended` counts from the run's start; if its clock is unknown, steps fill the loop with the closest number."""
    course = plain.course
    ended = [*accumulate(course.each * step for step in course.step)]
    if run is not None and run.clock != NONE and course.ended:
        ended = [end - run.clock for end in course.ended]
    elif run is not None and ended:
        loop = min(run.within(), key=lambda part: abs(part.turns - plain.steps - plain.warm_up))
        scale = loop.time / max(1, ended[-1])
        ended = [loop.began + round(scale * end) for end in ended]
    return asdict(course) | {"ended": ended}


def _part(part: Part) -> dict[str, Any]:
    """A part of the run, with all that it contains."""
    slow = next(iter(part.kinds), None)
    return {
        "kind": part.kind,
        "place": _text(part.place),
        "source": tame(part.source, _LONGEST_LINE),
        "function": tame(part.function, 120),
        "began": part.began,
        "time": part.time,
        "busy": None if part.busy == NONE else part.busy,
        "iterations": part.turns,
        "least": part.at_least,
        "iteration": None if part.turn == NONE else [part.turn, part.low, part.high],
        "slow": None if slow is None else [slow.count, slow.every, slow.regular, slow.longer, _text(slow.place)],
        "parts": [_part(inner) for inner in part.parts],
    }


def _sources(diagnosis: Diagnosis) -> dict[str, list[list[Any]]]:
    """For each file that exists, the lines around those that the page names: `[number, text]`."""
    named: dict[str, set[int]] = {}
    for where in _places_named(diagnosis):
        named.setdefault(where.file, set()).add(where.line)
    sources, room = {}, _MOST_LINES
    for file, numbers in named.items():
        lines = _around(text_of(Where(file)).splitlines(), numbers)[:room]
        room -= len(lines)
        if lines:
            sources[_text(file)] = lines
    return sources


def _places_named(diagnosis: Diagnosis) -> Iterator[Where]:
    for explained in (diagnosis, *(loop.diagnosis for loop in diagnosis.loops)):
        yield from (site.where for cause in explained.causes for site in cause.sites)
        yield from (where for fix in explained.plan for where in fix.where)
        yield from explained.turns.places if explained.turns is not None else ()
    for part in diagnosis.run.within() if diagnosis.run is not None else ():
        file, _, line = part.place.rpartition(":")
        if line.isdecimal():
            yield Where(file, int(line))


def _around(lines: list[str], numbers: Iterable[int]) -> list[list[Any]]:
    near = {number + step for number in numbers for step in range(-_LINES_AROUND, _LINES_AROUND + 1)}
    shown = (number for number in sorted(near) if 0 < number <= len(lines))
    return [[number, tame(lines[number - 1].expandtabs(4)[:_LONGEST_LINE])] for number in shown]


# Its spans


def _moment(iterations: Turns) -> dict[str, Any]:
    """The iterations of an analysis, without their columns."""
    timeline = iterations.timeline
    used = np.unique(
        np.concatenate([timeline.spans.name, iterations.call[iterations.call != NONE], timeline.meetings.name])
    )
    names = ["" if index not in used else name for index, name in enumerate(timeline.names)] if len(used) else []
    return {
        "lanes": [[lane.rank, lane.device, lane.number, tame(lane.name, 80)] for lane in timeline.lanes],
        "names": [tame(name, _LONGEST_NAME) for name in names],
        "places": [_place(place) for place in iterations.places],
        "pending": timeline.facts.pending_limit,
        "once": timeline.facts.one_turn,
        "ratio": iterations.ratio,
        "link": timeline.facts.pinned_bandwidth,
        "peaks": memory_peaks(iterations),
        "ranks": timeline.ranks,
    }


def _tables(diagnosis: Diagnosis, iterations: Turns) -> dict[str, _Columns]:
    timeline = iterations.timeline
    spans, origin = timeline.spans.columns(), int(timeline.spans.start.min(initial=1 << 62)) if len(timeline) else 0
    rows = {name: spans[name].astype(np.int64) for name in _SPANS}
    rows |= {"start": rows["start"] - origin, "end": rows["end"] - origin}
    rows |= {name: getattr(iterations, name).astype(np.int64) for name in _EXPLAINED}
    tables: dict[str, _Columns] = {"spans": rows, "marks": {"marks": np.asarray(timeline.marks, np.int64)}}
    for part, table in {"links": timeline.links, "meetings": timeline.meetings}.items():
        tables[part] = {name: column.astype(np.int64) for name, column in table.columns().items()}
    if len(timeline.memory):
        tables["memory"] = memory_table(iterations, origin)
    for number, row in enumerate(run_report.planned_rows(diagnosis)):
        edit = iterations.edit_of(row.fix)
        if edit is not None:
            tables[f"fix{number}"] = _flags(edit)
            tables[f"fix{number}.scale"] = _scales(edit)
    return tables


def _flags(edit: Edit) -> _Columns:
    """For each row: bits for what the edit does to it, above them its side lane, and its work (-1 if unchanged)."""
    flags = edit.drop_wait * 1 + edit.drop * 2 + edit.capture * 4 + edit.lane * 8
    return {"flags": flags.astype(np.int64), "limit": np.where(edit.work < UNLIMITED, edit.work, -1).astype(np.int64)}


def _scales(edit: Edit) -> _Columns:
    """The few rows whose work is scaled, and their factors as the low and the high half of a double's bits."""
    rows = np.flatnonzero(edit.scale != 1.0)
    low, high = edit.scale[rows].astype("<f8").view("<u4").reshape(-1, 2).astype(np.int64).T
    return {"row": rows.astype(np.int64), "low": low, "high": high}


# Memory of the device during the iterations, if the recording has it

_PEAK_LINES = 8
"""So many lines that hold most of a peak are named; the others are summed."""


def memory_table(iterations: Turns, origin: int) -> Mapping[str, Ints]:
    """What was allocated and freed during the iterations. Times count from `origin`."""
    memory = iterations.timeline.memory.take(_within(iterations))
    return {
        "rank": _ranks(iterations, memory),
        "device": memory.device.astype(np.int64),
        "time": memory.time - origin,
        "row": _rows(iterations, memory),
        "allocated": memory.allocated,
        "reserved": memory.reserved,
    }


def memory_peaks(iterations: Turns) -> list[dict[str, Any]]:
    """For each device of each rank, the moment with most memory allocated, and the lines that had allocated it.

    Of several such moments it is the last, because most of its allocations were recorded.
    """
    memory, peaks = iterations.timeline.memory, []
    ranks, places, within = _ranks(iterations, memory), _places(iterations, memory), _within(iterations)
    for rank, device in sorted(set(zip(ranks[within].tolist(), memory.device[within].tolist(), strict=True))):
        of_device = np.flatnonzero((ranks == rank) & (memory.device == device))
        drawn = of_device[np.isin(of_device, within)]
        peak = int(drawn[np.flatnonzero(memory.allocated[drawn] == memory.allocated[drawn].max())[-1]])
        size_of_place: Counter[int] = Counter()
        for row in _alive(memory, of_device[of_device <= peak]):
            size_of_place[int(places[row])] += int(memory.size[row])
        allocated = int(memory.allocated[peak])
        lines = [(place, size) for place, size in size_of_place.most_common() if place != NONE][:_PEAK_LINES]
        peaks.append(
            {
                "rank": rank,
                "device": device,
                "time": int(memory.time[peak]),
                "allocated": allocated,
                "reserved": int(memory.reserved[peak]),
                "lines": [[place, size] for place, size in lines],
                "rest": allocated - sum(size for _, size in lines),
            }
        )
    return peaks


def _within(iterations: Turns) -> Ints:
    """Rows of the memory between the first and the last row of the host."""
    host, time = iterations.timeline.spans.take(~iterations.timeline.on_device), iterations.timeline.memory.time
    return np.flatnonzero((time >= host.start.min(initial=1 << 62)) & (time <= host.end.max(initial=0)))


def _ranks(iterations: Turns, memory: MemoryUse) -> Ints:
    return iterations.timeline.rank_of_lanes[memory.lane]


def _rows(iterations: Turns, memory: MemoryUse) -> Ints:
    """The last row of the thread that began before each row of the memory, or NONE."""
    timeline, row_before = iterations.timeline, np.full(len(memory), NONE, np.int64)
    for lane in np.unique(memory.lane).tolist():
        of_lane, rows = np.flatnonzero(memory.lane == lane), timeline.rows_of(lane)
        before = np.searchsorted(timeline.spans.start[rows], memory.time[of_lane], side="right") - 1
        row_before[of_lane] = np.where(before >= 0, rows[np.maximum(before, 0)], NONE) if len(rows) else NONE
    return row_before


def _places(iterations: Turns, memory: MemoryUse) -> Ints:
    """The place of the next launch: memory is allocated just before the launch of the command that fills it."""
    spans, rows = iterations.timeline.spans, _rows(iterations, memory)
    for lane in np.unique(memory.lane).tolist():
        launches = np.flatnonzero((spans.lane == lane) & (spans.kind == Kind.LAUNCH))
        of_lane = np.flatnonzero((memory.lane == lane) & (memory.time >= spans.start.min(initial=1 << 62)))
        following = np.searchsorted(spans.start[launches], memory.time[of_lane])
        has_launch = following < len(launches)
        rows[of_lane[has_launch]] = launches[following[has_launch]]
    return np.where(rows == NONE, NONE, iterations.place[rows])


def _alive(memory: MemoryUse, rows: Ints) -> list[int]:
    """Rows that allocated memory which none of these rows freed."""
    allocated_by: dict[int, int] = {}
    for row, block, size in zip(rows.tolist(), memory.block[rows].tolist(), memory.size[rows].tolist(), strict=True):
        if size > 0:
            allocated_by[block] = row
        else:
            allocated_by.pop(block, None)
    return list(allocated_by.values())
