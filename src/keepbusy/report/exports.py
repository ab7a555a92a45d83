"""A run for other programs: Perfetto, a spreadsheet, an editor."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf, nextafter
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from keepbusy import __version__
from keepbusy.causes.places import Where
from keepbusy.explain.diagnosis import Diagnosis, Turns
from keepbusy.report import words
from keepbusy.report.source import source_of
from keepbusy.report.words import look, tame
from keepbusy.timeline.figures import change, count, duration, share, transition
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind, LinkKind, Timeline

_CHUNK = 4096
"""Rows that are written at a time."""

# Perfetto

_Event: TypeAlias = dict[str, Any]
_OF_GAPS = 1 << 40
"""Flows from causes are numbered from here on."""
_STEPS = 0  # thread numbers: steps first, then for each lane its spans, its frames and its annotations
_SPANS, _FRAMES, _ANNOTATIONS = 1, 2, 3


def perfetto(timeline: Timeline, told: Diagnosis | None = None) -> Iterator[str]:
    """For ui.perfetto.dev and chrome://tracing, piece by piece: a trace of millions of spans is never held as text.

    Ranks are processes, lanes threads, links flows. Three rules of that format matter: slices of one thread nest or
    stand apart, a flow's ends lie inside slices, and times are microseconds. Frames get a thread of their own beside
    their lane, for work may reach across them, and annotations another, for they end inside the call that ends them.

    With what was explained: beside each GPU's lanes its gaps by their causes, what is to blame, and the plan. A viewer
    opens on all that a file holds, so then it holds the turns that were explained.
    """
    if told is not None and told.turns is not None:
        timeline = told.turns.timeline
    yield '{"displayTimeUnit": "ns", "otherData": {"made by": "keepbusy"}, "traceEvents": [\n'
    separator = ""
    for event in _events(timeline, told):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _events(timeline: Timeline, told: Diagnosis | None) -> Iterator[_Event]:
    origin = int(timeline.spans.start.min()) if len(timeline) else 0
    names = [tame(name) for name in timeline.names]
    yield from _headings(timeline)
    yield from _steps(timeline, origin, told is not None and told.turns is not None)
    yield from _frames(timeline, names, origin)
    yield from _spans(timeline, names, origin)
    yield from _flows(timeline, origin)
    yield from _memory(timeline, origin)
    if told is not None and told.turns is not None:
        yield from _gaps(told.turns, 3 * len(timeline.lanes) + 1, origin)
        yield from _plan(told, told.turns, 3 * len(timeline.lanes) + 2, origin)


def _headings(timeline: Timeline) -> Iterator[_Event]:
    for rank in timeline.ranks:
        yield _heading(rank, _STEPS, "process_name", name=f"rank {rank}")
        yield _heading(rank, _STEPS, "thread_name", name="steps")
    framed = set(np.unique(timeline.frames.lane).tolist())
    for index, lane in enumerate(timeline.lanes):
        name = tame(lane.name) or (f"stream {lane.number}" if lane.device is not None else f"host {lane.number}")
        suffixes = {_SPANS: "", _FRAMES: ": calls", _ANNOTATIONS: ": annotations"} if index in framed else {_SPANS: ""}
        for part, suffix in suffixes.items():
            yield _heading(lane.rank, _thread(index, part), "thread_name", name=name + suffix)
            yield _heading(lane.rank, _thread(index, part), "thread_sort_index", sort_index=_thread(index, part))


def _heading(rank: int, thread: int, what: str, **values: Any) -> _Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": values}


def _thread(lane: int, part: int = _SPANS) -> int:
    return 3 * lane + part


def _steps(timeline: Timeline, origin: int, whole: bool) -> Iterator[_Event]:
    """`whole`: the last step ends with the last row; else a mark ends it."""
    host = ~timeline.on_device
    for rank in timeline.ranks:
        starts = timeline.spans.start[timeline.marks_of(rank)].tolist()
        over = [int(timeline.spans.end[host & (timeline.rank_of_rows == rank)].max(initial=0))] if whole else []
        for number, (start, end) in enumerate(pairwise([*starts, *over])):
            yield _slice(rank, _STEPS, f"step {number}", start - origin, end - origin)


def _frames(timeline: Timeline, names: list[str], origin: int) -> Iterator[_Event]:
    frames = timeline.frames.take(timeline.frames.end > origin)
    columns = (frames.lane, frames.kind, frames.name, np.maximum(frames.start - origin, 0), frames.end - origin)
    for lane, kind, name, start, end in _rows(*columns):
        thread = _thread(lane, _ANNOTATIONS if kind == FrameKind.ANNOTATION else _FRAMES)
        yield _slice(timeline.lanes[lane].rank, thread, names[name], start, end, cat=FrameKind(kind).name.lower())


def _spans(timeline: Timeline, names: list[str], origin: int) -> Iterator[_Event]:
    spans = timeline.spans
    columns = (
        spans.lane,
        spans.kind,
        spans.name,
        spans.start - origin,
        _ends(timeline) - origin,
        spans.work,
        spans.size,
    )
    for lane, kind, name, start, end, work, size in _rows(*columns):
        facts = {"work": work / 1e3} | ({"bytes": size} if size > 0 else {})
        rank, category = timeline.lanes[lane].rank, Kind(kind).name.lower()
        yield _slice(rank, _thread(lane), names[name], start, end, cat=category, args=facts)


def _ends(timeline: Timeline) -> Ints:
    """Commands of one stream may overlap by microseconds; as slices they would be taken for nested ones."""
    spans = timeline.spans
    order = np.lexsort((spans.start, spans.lane))
    following = np.full(len(spans), np.iinfo(np.int64).max)
    same = spans.lane[order][1:] == spans.lane[order][:-1]
    following[order[:-1][same]] = spans.start[order[1:]][same]
    ends: Ints = np.minimum(spans.end, following)
    return ends


def _micro(time: int) -> float:
    """Microseconds such that a reader who multiplies and cuts off, as Perfetto does, has the same nanosecond again: one
    that is missing lets a slice reach over the end of the one around it, and Perfetto drops it."""
    told = time / 1e3
    return told if int(told * 1e3) == time else nextafter(told, inf)


def _slice(rank: int, thread: int, name: str, start: int, end: int, **more: Any) -> _Event:
    times = {"ts": _micro(start), "dur": _micro(end - start)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, **more}


def _flows(timeline: Timeline, origin: int) -> Iterator[_Event]:
    """From inside the source, which is its last nanosecond where its end releases, to the start of the target."""
    spans, links = timeline.spans, timeline.links
    start, end = spans.start - origin, np.maximum(_ends(timeline) - origin - 1, spans.start - origin)
    leaves = np.where(links.kind == LinkKind.LAUNCH, start[links.source], end[links.source])
    ahead = leaves <= start[links.target]  # a link of the round before has no arrow to draw
    columns = (links.kind, spans.lane[links.source], leaves, spans.lane[links.target], start[links.target])
    for number, (kind, source, left, target, reached) in enumerate(_rows(*(column[ahead] for column in columns))):
        flow = {"cat": "link", "name": LinkKind(kind).name.lower(), "id": number}
        yield _end_of_flow("s", timeline.lanes[source].rank, _thread(source), left, **flow)
        yield _end_of_flow("f", timeline.lanes[target].rank, _thread(target), reached, bp="e", **flow)


def _memory(timeline: Timeline, origin: int) -> Iterator[_Event]:
    memory, last = timeline.memory, int(timeline.spans.end.max(initial=0))
    memory = memory.take((memory.time >= origin) & (memory.time <= last))
    for lane, device, time, allocated, reserved in _rows(
        memory.lane, memory.device, memory.time - origin, memory.allocated, memory.reserved
    ):
        held = {"allocated": allocated, "reserved": reserved}
        rank, name = timeline.lanes[lane].rank, f"memory {device}"
        yield {"ph": "C", "pid": rank, "name": name, "ts": _micro(time), "args": held}


def _gaps(turns: Turns, thread: int, origin: int) -> Iterator[_Event]:
    """A thread of each rank: a slice a gap, and a flow from the call that is to blame for it."""
    timeline, spans, number = turns.timeline, turns.timeline.spans, _OF_GAPS
    for rank in timeline.ranks:
        yield _heading(rank, thread, "thread_name", name="GPU: gaps by cause")
        gaps = turns.gaps(rank, np.arange(len(timeline)), spans.start, spans.end)
        for start, end, row in _rows(gaps.start - origin, gaps.end - origin, gaps.row):
            cause, where = turns.blame(row)
            at = words.at(where) if where else ""
            yield _slice(rank, thread, f"{look(cause).label}{at}", start, end, cat=cause)
            culprit = int(turns.culprit[row])
            begun = int(spans.start[culprit]) - origin
            if culprit != NONE and begun <= start:
                number += 1
                flow = {"cat": "cause", "name": cause, "id": number}
                lane = int(spans.lane[culprit])
                yield _end_of_flow("s", timeline.lanes[lane].rank, _thread(lane), begun, **flow)
                yield _end_of_flow("f", rank, thread, start, bp="e", **flow)


def _end_of_flow(phase: str, rank: int, thread: int, time: int, **more: Any) -> _Event:
    return {"ph": phase, "pid": rank, "tid": thread, "ts": _micro(time), **more}


def _plan(told: Diagnosis, turns: Turns, thread: int, origin: int) -> Iterator[_Event]:
    """A thread of each rank for each fix: the calls that it changes."""
    spans, rank = turns.timeline.spans, turns.timeline.rank_of_rows
    for number, fix in enumerate(told.plan, 1):
        edit = turns.edit_of(fix)
        if edit is None:
            continue
        for one in turns.timeline.ranks:
            name = f"fix {number}: {words.fix(fix.fix)}"
            yield _heading(one, thread + number, "thread_name", name=tame(name))
            rows = np.flatnonzero(edit.touched & (rank == one) & ~turns.timeline.on_device)
            rows = rows[np.argsort(spans.start[rows], kind="stable")]
            start, end = spans.start[rows] - origin, np.maximum.accumulate(spans.end[rows]) - origin
            first = np.flatnonzero(np.append(True, start[1:] > end[:-1] + 1_000)) if len(rows) else rows
            last = np.append(first[1:], len(rows))[: len(first)] - 1  # a fix may change no call of this rank
            for begun, ended in _rows(start[first], end[last]):
                yield _slice(one, thread + number, tame(name), begun, ended, cat="plan")


def _rows(*columns: Ints) -> Iterable[tuple[int, ...]]:
    """Rows as plain numbers, without a list of them all."""
    for first in range(0, len(columns[0]), _CHUNK):
        yield from zip(*(column[first : first + _CHUNK].tolist() for column in columns), strict=True)


# CSV

CSV_COLUMNS = ("row", "rank", "device", "lane", "kind", "name", "inside", "start", "end", "work", "size", "direction")


def csv_table(timeline: Timeline) -> Iterator[str]:
    """The spans for a spreadsheet or a data frame, one a line, piece by piece. Times are nanoseconds."""
    names = [tame(name) for name in timeline.names]
    # a spreadsheet would compute what begins like a formula
    names = [f"'{name}" if name.startswith(("=", "+", "-", "@")) else name for name in names]
    around, spans = timeline.frames.name.tolist(), timeline.spans
    columns = (spans.lane, spans.kind, spans.name, spans.frame, spans.start, spans.end, spans.work, spans.size)
    yield _lines([CSV_COLUMNS])
    for first in range(0, len(timeline), _CHUNK):
        cut = [column[first : first + _CHUNK].tolist() for column in (*columns, spans.direction)]
        rows: list[tuple[object, ...]] = []
        for row, (lane, kind, name, frame, *times, size, direction) in enumerate(zip(*cut, strict=True), first):
            rank, device, number, _ = timeline.lanes[lane]
            inside = names[around[frame]] if frame != NONE else ""
            where = "" if device is None else device
            way = Direction(direction).name.lower() if direction else ""
            rows.append((row, rank, where, number, Kind(kind).name.lower(), names[name], inside, *times, size, way))
        yield _lines(rows)


def _lines(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# SARIF

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def sarif(diagnosis: Diagnosis) -> str:
    """For editors and code scanners, SARIF 2.1.0: each line with what it costs a step.

    Places without a line of the program are left out: nobody could show them.
    """
    return sarif_document([*_blamed(diagnosis), *_harmless(diagnosis)])


def sarif_document(results: Sequence[dict[str, Any]]) -> str:
    """The whole file; its rules are those of the results."""
    rules = [
        {"id": rule, "shortDescription": {"text": rule.replace("_", " ")}}
        for rule in dict.fromkeys(one["ruleId"] for one in results)
    ]
    tool = {"driver": {"name": "keepbusy", "version": __version__, "rules": rules}}
    run = {"tool": tool, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"


def _blamed(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    step = diagnosis.plain_step
    for cause in diagnosis.causes:
        for site in cause.sites:
            if lines := lines_of(site.where):
                rank = round(100 * min(1.0, site.wait / step), 1) if step else 0.0
                waits = f"The GPU waits {duration(site.wait)} of a step for this line ({share(site.wait, step)})"
                often = f", {count(site.count)} times" if site.count > 1 else ""
                after = cause.predicted.step
                fixed = f"Fixed, a step takes {transition(step, after)}, {change(step, after)}."
                text, level = f"{waits}{often}. {cause.what} {fixed} {cause.advice}", "warning" if rank else "note"
                text = text.strip()
                yield {"ruleId": cause.cause, "level": level, "message": {"text": text}, "rank": rank, **lines}


def _harmless(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    for one in diagnosis.harmless:
        if lines := lines_of(one.where):
            text = f"Costs nothing here: {one.why}."
            yield {"ruleId": one.cause, "level": "note", "message": {"text": text}, **lines}


def lines_of(where: Where) -> dict[str, Any]:
    """Where the recording knows no more than the function, the line that calls it, if there is only one. Code scanning
    wants paths below the folder that was checked out."""
    source = source_of(where)
    line = source.line if source else where.line
    if not where.file or line < 1:
        return {}
    path, root = Path(where.file).absolute(), Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    uri = quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()
    region = {"startLine": line, **({"snippet": {"text": source.text}} if source else {})}
    return {"locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}]}
