"""A timeline's spans as CSV, one a line, for a spreadsheet or a data frame. Times are nanoseconds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from keepbusy.report.words import tame
from keepbusy.timeline.model import NONE, Direction, Kind, Timeline

COLUMNS = ("row", "rank", "device", "lane", "kind", "name", "inside", "start", "end", "work", "size", "direction")
_CHUNK = 4096


def parts(timeline: Timeline) -> Iterator[str]:
    """The file, piece by piece."""
    names = [_no_formula(tame(name)) for name in timeline.names]
    yield _text([COLUMNS])
    for first in range(0, len(timeline), _CHUNK):
        yield _text(_rows(timeline, names, first))


def _no_formula(name: str) -> str:
    """A spreadsheet would compute what begins like a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def _text(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rows(timeline: Timeline, names: list[str], first: int) -> list[tuple[object, ...]]:
    spans = timeline.spans
    columns = (
        spans.lane,
        spans.kind,
        spans.name,
        spans.frame,
        spans.start,
        spans.end,
        spans.work,
        spans.size,
        spans.direction,
    )
    cut = [column[first : first + _CHUNK].tolist() for column in columns]
    around = timeline.frames.name.tolist()
    rows: list[tuple[object, ...]] = []
    for row, (lane, kind, name, frame, *times, size, direction) in enumerate(zip(*cut, strict=True), first):
        rank, device, number, _ = timeline.lanes[lane]
        inside = names[around[frame]] if frame != NONE else ""
        where = "" if device is None else device
        way = Direction(direction).name.lower() if direction else ""
        rows.append((row, rank, where, number, Kind(kind).name.lower(), names[name], inside, *times, size, way))
    return rows
