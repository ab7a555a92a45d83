"""What a page holds of a run: texts and figures as JSON, spans as columns, packed as in a `.busy` file.

8 bytes   how long the header is
header    JSON, compressed: `words_of`, and how the columns are to be read
columns   one after another, each compressed, as the header's `tables` name them

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
from keepbusy.report import race_words, run_report, verdict, words
from keepbusy.report.edges import missing_edges
from keepbusy.report.source import fix_line, source_of, text_of
from keepbusy.report.words import look, tame
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
"""Letters of a name; what is longer loses its middle. C++ names its kernels at length."""
_SPANS = ("lane", "start", "end", "kind", "name", "work", "lag", "awaits", "meeting", "size", "direction", "pinned")


def block_of(diagnosis: Diagnosis, source: str, more: dict[str, Any] | None = None) -> bytes:
    """The same bytes for the same diagnosis. `more` stands in the header as well."""
    tables: dict[str, _Columns] = {}
    moments = {}
    for number, one in enumerate([diagnosis, *(loop.diagnosis for loop in diagnosis.loops)]):
        if one.turns is not None:
            missing = [
                [first, second, one.races.index(race)] for first, second, race in missing_edges(one.turns, one.races)
            ]
            moments[str(number)] = _moment(one.turns) | {"missing": missing}
            tables |= {f"{number}.{name}": table for name, table in _tables(one, one.turns).items()}
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
    run, turns = diagnosis.run, diagnosis.turns
    return {
        "version": __version__,
        "source": _text(source or words.files(diagnosis.sources)),
        "looks": {one: {"name": look(one).label, "sentence": look(one).sentence} for one in LEDGER},
        "run": None if run is None else _part(run),
        "shares": run.shares if run is not None else (),
        "recorded": (turns.timeline.facts.recorded or ()) if turns is not None else (),
        "analyses": [
            _analysis(diagnosis) | {"place": ""},
            *(_analysis(loop.diagnosis) | {"place": _text(loop.place)} for loop in diagnosis.loops),
        ],
        "plain_runs": [
            {"rank": rank, "steps": one.steps, "step": one.step, "course": _course(one, run)}
            for rank, one in sorted(diagnosis.plain_runs.items())
        ],
        "sources": _sources(diagnosis),
    }


def _text(value: str) -> str:
    return tame(value, _LONGEST_TEXT)


def _analysis(diagnosis: Diagnosis) -> dict[str, Any]:
    """The verdict of one loop, the time of its iteration, why the GPU is idle in it, and its plan."""
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
        "reasons": [_cause(one) for one in diagnosis.causes],
        "plan": list(_plan(diagnosis, summary.items)),
        "late": [
            {"rank": one.rank, "late": one.late, "cause": one.cause, "where": _place(one.where)}
            for one in diagnosis.late
        ],
        "notes": [[label, _text(sentence)] for label, sentence in run_report.margin(diagnosis)],
        "races": [_text(f"{race_words.sentence(one)} {race_words.remedy(one)}") for one in diagnosis.races],
    }


def _place(where: Where) -> dict[str, Any]:
    """`file` and `line` only where the recording knows them exactly enough to show the line."""
    source = source_of(where) if where.file else None
    return {
        "text": words.spot(where, 80),
        "file": _text(where.file),
        "line": source.line if source else where.line,
        "function": tame(where.function, 120),
        "exact": where.exact,
        "source": source.text[:_LONGEST_LINE] if source else "",
    }


def _cause(one: Cause) -> dict[str, Any]:
    return {
        "cause": one.cause,
        "wait": one.wait,
        "count": one.count,
        "sites": [{"where": _place(site.where), "wait": site.wait} for site in one.sites],
        "what": _text(one.what),
        "advice": _text(one.advice),
        "code": _text(fix_line(one.fix, one.where, one.remedy)),
        "predicted": [one.predicted.step, one.predicted.low, one.predicted.high],
        "same": one.same_wait_as,
    }


def _plan(diagnosis: Diagnosis, items: tuple[verdict.Item, ...]) -> Iterator[dict[str, Any]]:
    """The fixes of the verdict, in its words and numbers."""
    rows = run_report.planned_rows(diagnosis)
    numbers = {row.fix.named: str(number) for number, row in enumerate(rows, 1)}
    for number, (row, item) in enumerate(zip(rows, items, strict=True)):
        fix = row.fix
        late = [run_report.lateness(rank, diagnosis.given) for rank in fix.late]
        needs = {numbers.get(name) or words.fix(name): None for name in fix.needs if name != fix.named}
        yield {
            "number": number,
            "fix": _text(item.fix),
            "place": _text(item.place),
            "prediction": item.prediction,
            "where": _place(fix.where[0]) if fix.where else None,
            "causes": list(fix.causes),
            "predicted": [row.after, row.low, row.high],
            "iterations": _text(run_report.turns_meant(fix, diagnosis)),
            "alone": fix.alone,
            "needs": [_text(name) for name in needs],
            "instead": [_text(words.fix(other)) for other in fix.instead],
            "says": [_text(sentence) for sentence in (fix.reason, *late, fix.advice) if sentence],
            "code": _text(fix.code),
            "loop": _text(fix.loop),
            "replayed": diagnosis.turns is not None and diagnosis.turns.edit_of(fix) is not None,
        }


def compared(done: Comparison) -> dict[str, Any]:
    """What changed from one run to the other; a change is the time before, the time after, and if it is no noise."""
    run, predicted = done.run, done.foretold
    return {
        "step": _change(done.step),
        "ledger": [[name, *_change(change)] for name, change in done.ledger.items()],
        "plan": [
            {
                "fix": _text(words.fix(one.fix.fix)),
                "where": words.spot(one.fix.where[0], 80) if one.fix.where else "",
                "made": one.made,
                "saves": one.fix.gain,
            }
            for one in done.plan
        ],
        "predicted": None if predicted is None else [predicted.step, predicted.low, predicted.high],
        "run": None if run is None else [run.before, run.after, done.run_foretold],
        "notes": [_text(note) for note in done.notes],
    }


def _change(change: Change) -> list[Any]:
    return [change.before, change.after, change.significant]


def _course(plain: PlainRun, run: Part | None) -> dict[str, Any]:
    """`ended` counts from the run's first moment; where its clock is not known, steps fill the likeliest loop."""
    course = plain.course
    took = [course.each * step for step in course.step]
    ended = [*accumulate(took)]
    if run is not None and run.clock != NONE and course.ended:
        ended = [end - run.clock for end in course.ended]
    elif run is not None and ended:
        loop = min(run.within(), key=lambda part: abs(part.turns - plain.steps - plain.warm_up))
        stretched = loop.time / max(1, ended[-1])
        ended = [loop.began + round(stretched * end) for end in ended]
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
        "parts": [_part(one) for one in part.parts],
    }


def _sources(diagnosis: Diagnosis) -> dict[str, list[list[Any]]]:
    """Of each file that lies where the recording says, the lines around those that are spoken of: `[number, text]`."""
    wanted: dict[str, set[int]] = {}
    for where in _spoken_of(diagnosis):
        wanted.setdefault(where.file, set()).add(where.line)
    shown, room = {}, _MOST_LINES
    for file, lines in wanted.items():
        kept = _around(text_of(Where(file)).splitlines(), lines)[:room]
        room -= len(kept)
        if kept:
            shown[_text(file)] = kept
    return shown


def _spoken_of(diagnosis: Diagnosis) -> Iterator[Where]:
    for one in (diagnosis, *(loop.diagnosis for loop in diagnosis.loops)):
        yield from (site.where for cause in one.causes for site in cause.sites)
        yield from (where for fix in one.plan for where in fix.where)
        yield from one.turns.places if one.turns is not None else ()
    for part in diagnosis.run.within() if diagnosis.run is not None else ():
        file, _, line = part.place.rpartition(":")
        if line.isdecimal():
            yield Where(file, int(line))


def _around(lines: list[str], wanted: Iterable[int]) -> list[list[Any]]:
    near = {line + step for line in wanted for step in range(-_LINES_AROUND, _LINES_AROUND + 1)}
    return [
        [line, tame(lines[line - 1].expandtabs(4)[:_LONGEST_LINE])] for line in sorted(near) if 0 < line <= len(lines)
    ]


# Its spans


def _moment(turns: Turns) -> dict[str, Any]:
    """Iterations without their columns; the header holds them under the number of their analysis."""
    timeline = turns.timeline
    used = np.unique(np.concatenate([timeline.spans.name, turns.call[turns.call != NONE], timeline.meetings.name]))
    names = ["" if index not in used else one for index, one in enumerate(timeline.names)] if len(used) else []
    return {
        "lanes": [[lane.rank, lane.device, lane.number, tame(lane.name, 80)] for lane in timeline.lanes],
        "names": [tame(name, _LONGEST_NAME) for name in names],
        "places": [_place(one) for one in turns.places],
        "pending": timeline.facts.pending_limit,
        "once": timeline.facts.one_turn,
        "ratio": turns.ratio,
        "link": timeline.facts.pinned_bandwidth,
        "peaks": memory_peaks(turns),
        "ranks": timeline.ranks,
    }


def _tables(diagnosis: Diagnosis, turns: Turns) -> dict[str, _Columns]:
    timeline = turns.timeline
    spans, origin = timeline.spans.columns(), int(timeline.spans.start.min(initial=1 << 62)) if len(timeline) else 0
    rows = {name: spans[name].astype(np.int64) for name in _SPANS}
    rows |= {"start": rows["start"] - origin, "end": rows["end"] - origin}
    rows |= {
        name: getattr(turns, name).astype(np.int64) for name in ("place", "call", "cause", "rest", "culprit", "aside")
    }
    tables: dict[str, _Columns] = {"spans": rows, "marks": {"marks": np.asarray(timeline.marks, np.int64)}}
    for part, table in {"links": timeline.links, "meetings": timeline.meetings}.items():
        tables[part] = {name: column.astype(np.int64) for name, column in table.columns().items()}
    if len(timeline.memory):
        tables["memory"] = memory_table(turns, origin)
    for number, row in enumerate(run_report.planned_rows(diagnosis)):
        edit = turns.edit_of(row.fix)
        if edit is not None:
            tables[f"fix{number}"] = _flags(edit)
            tables[f"fix{number}.scale"] = _scales(edit)
    return tables


def _flags(edit: Edit) -> _Columns:
    """Bits of what becomes of a row with its side lane above them, and the work that it keeps, or -1 for all of it."""
    flags = edit.drop_wait * 1 + edit.drop * 2 + edit.capture * 4 + edit.lane * 8
    return {"flags": flags.astype(np.int64), "limit": np.where(edit.work < UNLIMITED, edit.work, -1).astype(np.int64)}


def _scales(edit: Edit) -> _Columns:
    """The few rows that take another share of their time; each share as the two halves of a double's bits."""
    rows = np.flatnonzero(edit.scale != 1.0)
    low, high = edit.scale[rows].astype("<f8").view("<u4").reshape(-1, 2).astype(np.int64).T
    return {"row": rows.astype(np.int64), "low": low, "high": high}


# What the device's memory held over the iterations, where the recording knows

_PEAK_LINES = 8
"""That hold most of the peak; the others together."""


def memory_table(turns: Turns, origin: int) -> Mapping[str, Ints]:
    """All that was allocated and freed during the iterations; times count from `origin`."""
    memory = turns.timeline.memory.take(_within(turns))
    return {
        "rank": _ranks(turns, memory),
        "device": memory.device.astype(np.int64),
        "time": memory.time - origin,
        "row": _rows(turns, memory),
        "allocated": memory.allocated,
        "reserved": memory.reserved,
    }


def memory_peaks(turns: Turns) -> list[dict[str, Any]]:
    """Of each rank's devices the moment at which most was allocated, and the lines that had taken it.

    Of several such moments it is the last: of what it holds most was seen being taken.
    """
    memory, found = turns.timeline.memory, []
    ranks, places, within = _ranks(turns, memory), _places(turns, memory), _within(turns)
    for rank, device in sorted(set(zip(ranks[within].tolist(), memory.device[within].tolist(), strict=True))):
        mine = np.flatnonzero((ranks == rank) & (memory.device == device))
        seen = mine[np.isin(mine, within)]
        peak = int(seen[np.flatnonzero(memory.allocated[seen] == memory.allocated[seen].max())[-1]])
        held: Counter[int] = Counter()
        for row in _alive(memory, mine[mine <= peak]):
            held[int(places[row])] += int(memory.size[row])
        allocated = int(memory.allocated[peak])
        lines = [(place, size) for place, size in held.most_common() if place != NONE][:_PEAK_LINES]
        found.append(
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
    return found


def _within(turns: Turns) -> Ints:
    """Rows of the memory from the first row of the host to the last."""
    host, time = turns.timeline.spans.take(~turns.timeline.on_device), turns.timeline.memory.time
    return np.flatnonzero((time >= host.start.min(initial=1 << 62)) & (time <= host.end.max(initial=0)))


def _ranks(turns: Turns, memory: MemoryUse) -> Ints:
    return turns.timeline.rank_of_lanes[memory.lane]


def _rows(turns: Turns, memory: MemoryUse) -> Ints:
    """The row of its thread that ran then, or before; NONE before the first."""
    timeline, found = turns.timeline, np.full(len(memory), NONE, np.int64)
    for lane in np.unique(memory.lane).tolist():
        mine, rows = np.flatnonzero(memory.lane == lane), timeline.rows_of(lane)
        at = np.searchsorted(timeline.spans.start[rows], memory.time[mine], side="right") - 1
        found[mine] = np.where(at >= 0, rows[np.maximum(at, 0)], NONE) if len(rows) else NONE
    return found


def _places(turns: Turns, memory: MemoryUse) -> Ints:
    """Whose it is: memory is taken just before the command that is to fill it is launched."""
    spans, found = turns.timeline.spans, _rows(turns, memory)
    for lane in np.unique(memory.lane).tolist():
        launches = np.flatnonzero((spans.lane == lane) & (spans.kind == Kind.LAUNCH))
        mine = np.flatnonzero((memory.lane == lane) & (memory.time >= spans.start.min(initial=1 << 62)))
        at = np.searchsorted(spans.start[launches], memory.time[mine])
        known = at < len(launches)
        found[mine[known]] = launches[at[known]]
    return np.where(found == NONE, NONE, turns.place[found])


def _alive(memory: MemoryUse, rows: Ints) -> list[int]:
    """Rows that took memory which none of these rows has given back."""
    taken: dict[int, int] = {}
    for row, block, size in zip(rows.tolist(), memory.block[rows].tolist(), memory.size[rows].tolist(), strict=True):
        if size > 0:
            taken[block] = row
        else:
            taken.pop(block, None)
    return list(taken.values())
