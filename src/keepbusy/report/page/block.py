"""What a page holds of a run: its words as JSON, its spans as columns, packed as in a `.busy` file.

8 bytes   how long the header is
header    JSON, compressed: `contents` says what stands in it
columns   one after another, each compressed, as the header's `tables` name them
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from keepbusy.explain.diagnosis import CAUSES, Diagnosis
from keepbusy.explain.edit import UNLIMITED, Edit
from keepbusy.explain.turns import Turns
from keepbusy.report.page import contents, memory
from keepbusy.report.words import tame
from keepbusy.timeline.busy_file import pack
from keepbusy.timeline.model import NONE, Ints

Columns: TypeAlias = Mapping[str, Ints]

LONGEST_NAME = 600
"""Letters of a name; what is longer loses its middle. C++ names its kernels at length."""
_LENGTH = struct.Struct("<Q")
_SPANS = ("lane", "start", "end", "kind", "name", "work", "lag", "awaits", "meeting", "size", "direction", "pinned")


def block_of(diagnosis: Diagnosis, source: str, more: Mapping[str, Any] | None = None) -> bytes:
    """The same bytes for the same diagnosis. `more` stands in the header as well."""
    tables: dict[str, Columns] = {}
    moments = {}
    for number, one in enumerate([diagnosis, *(loop.diagnosis for loop in diagnosis.loops)]):
        if one.turns is not None:
            moments[str(number)] = _moment(one.turns)
            tables |= {f"{number}.{name}": table for name, table in _tables(one, one.turns).items()}
    packed, described = [], {}
    for name, table in tables.items():
        columns = list(pack(dict(table)))
        described[name] = {"rows": len(next(iter(table.values()))), "columns": [column for column, _ in columns]}
        packed += [content for _, content in columns]
    header = contents.of(diagnosis, source) | {
        "causes": CAUSES,
        "moments": moments,
        "tables": described,
        **(more or {}),
    }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False, default=_plain)
    head = zlib.compress(text.encode("ascii"), 9)
    return b"".join([_LENGTH.pack(len(head)), head, *packed])


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a page cannot hold {type(value).__name__}")


def _moment(turns: Turns) -> dict[str, Any]:
    """Turns without their columns; the header holds them under the number of what is told of them."""
    timeline = turns.timeline
    used = np.unique(np.concatenate([timeline.spans.name, turns.call[turns.call != NONE], timeline.meetings.name]))
    names = ["" if index not in used else one for index, one in enumerate(timeline.names)] if len(used) else []
    return {
        "lanes": [[lane.rank, lane.device, lane.number, tame(lane.name, 80)] for lane in timeline.lanes],
        "names": [tame(name, LONGEST_NAME) for name in names],
        "places": [contents.place(one) for one in turns.places],
        "pending": timeline.facts.pending_limit,
        "once": timeline.facts.one_turn,
        "ratio": turns.ratio,
        "link": timeline.facts.pinned_bandwidth,
        "peaks": memory.peaks(turns),
        "ranks": timeline.ranks,
    }


def _tables(diagnosis: Diagnosis, turns: Turns) -> dict[str, Columns]:
    timeline = turns.timeline
    spans, origin = timeline.spans.columns(), int(timeline.spans.start.min(initial=1 << 62)) if len(timeline) else 0
    rows = {name: spans[name].astype(np.int64) for name in _SPANS}
    rows |= {"start": rows["start"] - origin, "end": rows["end"] - origin}
    rows |= {
        name: getattr(turns, name).astype(np.int64) for name in ("place", "call", "cause", "rest", "culprit", "aside")
    }
    tables: dict[str, Columns] = {"spans": rows, "marks": {"marks": np.asarray(timeline.marks, np.int64)}}
    for part, table in {"links": timeline.links, "meetings": timeline.meetings}.items():
        tables[part] = {name: column.astype(np.int64) for name, column in table.columns().items()}
    if len(timeline.memory):
        tables["memory"] = memory.table(turns, origin)
    for number, fix in enumerate(diagnosis.plan):
        edit = contents.edit_in(turns, fix)
        if edit is not None:
            tables[f"fix{number}"] = _flags(edit)
            tables[f"fix{number}.scale"] = _scales(edit)
    return tables


def _flags(edit: Edit) -> Columns:
    """Bits of what becomes of a row with its side lane above them, and the work that it keeps, or -1 for all of it."""
    flags = edit.drop_wait * 1 + edit.drop * 2 + edit.capture * 4 + edit.lane * 8
    return {"flags": flags.astype(np.int64), "limit": np.where(edit.work < UNLIMITED, edit.work, -1).astype(np.int64)}


def _scales(edit: Edit) -> Columns:
    """The few rows that take another share of their time; each share as the two halves of a double's bits."""
    rows = np.flatnonzero(edit.scale != 1.0)
    low, high = edit.scale[rows].astype("<f8").view("<u4").reshape(-1, 2).astype(np.int64).T
    return {"row": rows.astype(np.int64), "low": low, "high": high}
