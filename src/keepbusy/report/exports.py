"""Exports a run for other programs: for Perfetto, as CSV, and as SARIF for editors."""

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
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix, Turns
from keepbusy.report import labels
from keepbusy.report.labels import ledger_place, tame
from keepbusy.report.source import source_of
from keepbusy.timeline.figures import change, count, duration, share, transition
from keepbusy.timeline.model import NONE, Direction, FrameKind, Ints, Kind, LinkKind, Timeline

_CHUNK = 4096
"""Rows that are written at a time."""

# Perfetto

_Event: TypeAlias = dict[str, Any]
_OF_GAPS = 1 << 40
"""The ids of flows from causes start here."""
_STEPS = 0  # thread numbers: steps first, then for each lane its spans, its frames and its annotations
_SPANS, _FRAMES, _ANNOTATIONS = 1, 2, 3


def perfetto(timeline: Timeline, diagnosis: Diagnosis | None = None) -> Iterator[str]:
    """For ui.perfetto.dev and chrome://tracing, piece by piece: a trace of millions of spans is never held as text.

    Ranks are processes, lanes are threads, links are flows. The format requires that slices of one thread nest or do
    not overlap, that both ends of a flow lie inside slices, and that times are microseconds. Frames and annotations
    have threads of their own beside their lane, because work may overlap a frame, and a call the end of an annotation.

    With a diagnosis the file also has the gaps of each GPU by cause, the calls that cause them, and the plan. A viewer
    shows all that a file holds, so the file then holds only the iterations that were explained.
    """
    iterations = diagnosis.turns if diagnosis is not None else None
    if iterations is not None:
        timeline = iterations.timeline
    yield '{"displayTimeUnit": "ns", "otherData": {"made by": "keepbusy"}, "traceEvents": [\n'
    separator = ""
    for event in _events(timeline, iterations, diagnosis.plan if diagnosis is not None else ()):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _events(timeline: Timeline, iterations: Turns | None, plan: Sequence[PlannedFix]) -> Iterator[_Event]:
    origin = int(timeline.spans.start.min()) if len(timeline) else 0
    names = [tame(name) for name in timeline.names]
    yield from _headings(timeline)
    yield from _steps(timeline, origin, iterations is not None)
    yield from _frames(timeline, names, origin)
    yield from _spans(timeline, names, origin)
    yield from _flows(timeline, origin)
    yield from _memory(timeline, origin)
    if iterations is not None:
        yield from _gaps(iterations, 3 * len(timeline.lanes) + 1, origin)
        yield from _plan(plan, iterations, 3 * len(timeline.lanes) + 2, origin)


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


def _heading(rank: int, thread: int, kind: str, **values: Any) -> _Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": values}


def _thread(lane: int, part: int = _SPANS) -> int:
    return 3 * lane + part


def _steps(timeline: Timeline, origin: int, ends_with_last_row: bool) -> Iterator[_Event]:
    """A mark begins each step. `ends_with_last_row`: the last row ends the last step; otherwise a mark ends it."""
    host = ~timeline.on_device
    for rank in timeline.ranks:
        edges = timeline.spans.start[timeline.marks_of(rank)].tolist()
        if ends_with_last_row:
            edges.append(int(timeline.spans.end[host & (timeline.rank_of_rows == rank)].max(initial=0)))
        for number, (start, end) in enumerate(pairwise(edges)):
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
    """Ends of slices. Commands of one stream may overlap by microseconds; Perfetto would show them nested."""
    spans = timeline.spans
    order = np.lexsort((spans.start, spans.lane))
    next_start = np.full(len(spans), np.iinfo(np.int64).max)
    is_same_lane = spans.lane[order][1:] == spans.lane[order][:-1]
    next_start[order[:-1][is_same_lane]] = spans.start[order[1:]][is_same_lane]
    ends: Ints = np.minimum(spans.end, next_start)
    return ends


def _micro(time: int) -> float:
    """Microseconds that Perfetto, which multiplies by 1000 and truncates, turns back into the same nanosecond.
    Otherwise a slice may end one nanosecond after the slice around it, and Perfetto drops it."""
    microseconds = time / 1e3
    return microseconds if int(microseconds * 1e3) == time else nextafter(microseconds, inf)


def _slice(rank: int, thread: int, name: str, start: int, end: int, **more: Any) -> _Event:
    times = {"ts": _micro(start), "dur": _micro(end - start)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, **times, **more}


def _flows(timeline: Timeline, origin: int) -> Iterator[_Event]:
    """Flows from the source's last nanosecond (of a launch: its first) to the start of the target."""
    spans, links = timeline.spans, timeline.links
    start, end = spans.start - origin, np.maximum(_ends(timeline) - origin - 1, spans.start - origin)
    departure = np.where(links.kind == LinkKind.LAUNCH, start[links.source], end[links.source])
    is_forward = departure <= start[links.target]  # a link from the previous iteration has no arrow
    columns = (links.kind, spans.lane[links.source], departure, spans.lane[links.target], start[links.target])
    for number, (kind, source, begin, target, finish) in enumerate(_rows(*(column[is_forward] for column in columns))):
        flow = {"cat": "link", "name": LinkKind(kind).name.lower(), "id": number}
        yield _end_of_flow("s", timeline.lanes[source].rank, _thread(source), begin, **flow)
        yield _end_of_flow("f", timeline.lanes[target].rank, _thread(target), finish, bp="e", **flow)


def _memory(timeline: Timeline, origin: int) -> Iterator[_Event]:
    memory, last = timeline.memory, int(timeline.spans.end.max(initial=0))
    memory = memory.take((memory.time >= origin) & (memory.time <= last))
    for lane, device, time, allocated, reserved in _rows(
        memory.lane, memory.device, memory.time - origin, memory.allocated, memory.reserved
    ):
        sizes = {"allocated": allocated, "reserved": reserved}
        rank, name = timeline.lanes[lane].rank, f"memory {device}"
        yield {"ph": "C", "pid": rank, "name": name, "ts": _micro(time), "args": sizes}


def _gaps(iterations: Turns, thread: int, origin: int) -> Iterator[_Event]:
    """One thread per rank, with a slice for each gap and a flow from the call that causes it."""
    timeline, spans, number = iterations.timeline, iterations.timeline.spans, _OF_GAPS
    for rank in timeline.ranks:
        yield _heading(rank, thread, "thread_name", name="GPU: gaps by cause")
        gaps = iterations.gaps(rank, np.arange(len(timeline)), spans.start, spans.end)
        for start, end, row in _rows(gaps.start - origin, gaps.end - origin, gaps.row):
            cause, where = iterations.blame(row)
            place = labels.at(where) if where else ""
            yield _slice(rank, thread, f"{ledger_place(cause).label}{place}", start, end, cat=cause)
            culprit = int(iterations.culprit[row])
            begun = int(spans.start[culprit]) - origin
            if culprit != NONE and begun <= start:
                number += 1
                flow = {"cat": "cause", "name": cause, "id": number}
                lane = int(spans.lane[culprit])
                yield _end_of_flow("s", timeline.lanes[lane].rank, _thread(lane), begun, **flow)
                yield _end_of_flow("f", rank, thread, start, bp="e", **flow)


def _end_of_flow(phase: str, rank: int, thread: int, time: int, **more: Any) -> _Event:
    return {"ph": phase, "pid": rank, "tid": thread, "ts": _micro(time), **more}


def _plan(plan: Sequence[PlannedFix], iterations: Turns, thread: int, origin: int) -> Iterator[_Event]:
    """One thread per rank and fix, with the calls that the fix changes."""
    timeline, spans = iterations.timeline, iterations.timeline.spans
    for number, fix in enumerate(plan, 1):
        edit = iterations.edit_of(fix)
        if edit is None:
            continue
        name = tame(f"fix {number}: {labels.fix(fix.fix)}")
        for rank in timeline.ranks:
            yield _heading(rank, thread + number, "thread_name", name=name)
            rows = np.flatnonzero(edit.touched & (timeline.rank_of_rows == rank) & ~timeline.on_device)
            rows = rows[np.argsort(spans.start[rows], kind="stable")]
            start, end = spans.start[rows] - origin, np.maximum.accumulate(spans.end[rows]) - origin
            first = np.flatnonzero(np.append(True, start[1:] > end[:-1] + 1_000)) if len(rows) else rows
            last = np.append(first[1:], len(rows))[: len(first)] - 1  # a fix may change no call of this rank
            for begun, ended in _rows(start[first], end[last]):
                yield _slice(rank, thread + number, name, begun, ended, cat="plan")


def _rows(*columns: Ints) -> Iterable[tuple[int, ...]]:
    """Rows as plain numbers, in chunks: there may be millions."""
    for first in range(0, len(columns[0]), _CHUNK):
        yield from zip(*(column[first : first + _CHUNK].tolist() for column in columns), strict=True)


# CSV

CSV_COLUMNS = ("row", "rank", "device", "lane", "kind", "name", "inside", "start", "end", "work", "size", "direction")


def csv_table(timeline: Timeline) -> Iterator[str]:
    """The spans for a spreadsheet or a data frame, one per line, in pieces. Times are nanoseconds."""
    names = [tame(name) for name in timeline.names]
    # a spreadsheet would evaluate what looks like a formula
    names = [f"'{name}" if name.startswith(("=", "+", "-", "@")) else name for name in names]
    around, spans = timeline.frames.name.tolist(), timeline.spans
    columns = (spans.lane, spans.kind, spans.name, spans.frame, spans.start, spans.end, spans.work, spans.size)
    yield _lines([CSV_COLUMNS])
    for first in range(0, len(timeline), _CHUNK):
        chunk = [column[first : first + _CHUNK].tolist() for column in (*columns, spans.direction)]
        rows: list[tuple[object, ...]] = []
        for row, (lane, kind, name, frame, *times, size, direction) in enumerate(zip(*chunk, strict=True), first):
            rank, device, number, _ = timeline.lanes[lane]
            inside = names[around[frame]] if frame != NONE else ""
            gpu = "" if device is None else device
            toward = Direction(direction).name.lower() if direction else ""
            rows.append((row, rank, gpu, number, Kind(kind).name.lower(), names[name], inside, *times, size, toward))
        yield _lines(rows)


def _lines(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# SARIF

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def sarif(diagnosis: Diagnosis) -> str:
    """Lines and what each costs per step, as SARIF 2.1.0 for editors and code scanners.

    Places without a line of the program are left out because an editor cannot show them.
    """
    return sarif_document([*_blamed(diagnosis), *_harmless(diagnosis)])


def sarif_document(results: Sequence[dict[str, Any]]) -> str:
    """The whole file, with the rules that its results name."""
    rules = [
        {"id": rule, "shortDescription": {"text": rule.replace("_", " ")}}
        for rule in dict.fromkeys(result["ruleId"] for result in results)
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
                text = f"{waits}{often}. {cause.what} {fixed} {cause.advice}".strip()
                level = "warning" if rank else "note"
                yield {"ruleId": cause.cause, "level": level, "message": {"text": text}, "rank": rank, **lines}


def _harmless(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    for harmless in diagnosis.harmless:
        if lines := lines_of(harmless.where):
            text = f"Costs nothing here: {harmless.why}."
            yield {"ruleId": harmless.cause, "level": "note", "message": {"text": text}, **lines}


def lines_of(where: Where) -> dict[str, Any]:
    """The place as SARIF's `locations`. If the recording knows only the function, it is the line that `source_of`
    infers. Paths are relative to the checkout, as code scanning requires."""
    source = source_of(where)
    line = source.line if source else where.line
    if not where.file or line < 1:
        return {}
    path, root = Path(where.file).absolute(), Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    uri = quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()
    region = {"startLine": line, **({"snippet": {"text": source.text}} if source else {})}
    return {"locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}]}
