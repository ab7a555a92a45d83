"""Timelines in `.busy` files; docs/reference/busy-file.md describes the format.

A column is stored as its difference from a guess (the row before it, the start of its span). That takes as few bytes
per number as its range needs, all first bytes before all second ones, since the higher bytes are nearly always equal.
Then zlib packs it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from keepbusy.timeline.files import BadInput, opened, write_whole
from keepbusy.timeline.frame_roles import described
from keepbusy.timeline.model import (
    EVERY_LANE,
    LARGEST_RANK,
    NONE,
    Direction,
    FrameKind,
    Frames,
    Ints,
    Kind,
    Lane,
    LinkKind,
    Links,
    Meetings,
    MemoryUse,
    Spans,
    Table,
    Timeline,
    check_times,
)
from keepbusy.timeline.run_facts import RunFacts

VERSION = 1
_MAGIC = b"\x89busy\r\n\n"
_PREFACE = struct.Struct("<8sIIQ")  # magic, version, checksum and length of the rest
LENGTH = struct.Struct("<Q")
"""The length of the header, which precedes it."""
_LEVEL = 6
_TABLES: dict[str, type[Table]] = {"spans": Spans, "links": Links, "frames": Frames, "meetings": Meetings}
_OPTIONAL: dict[str, type[Table]] = {"memory": MemoryUse}
"""Tables that a file has only if they are not empty; older files have none of them."""
_MOST_RATIO = 400
_SMALL = 512 << 20
"""A file may take so many times its size in memory, and this much in any case."""
_SPARE_LANES = 1024
"""A run may have so many threads and streams without spans."""
_PARSED = 4
"""A header takes about so many times its text in memory."""
_FAULTS = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)

Header: TypeAlias = dict[str, Any]
Columns: TypeAlias = dict[str, Ints]
Described: TypeAlias = tuple[str, str, int, int]
"""A packed column: its name, the guess that was subtracted, bytes per number, bytes in all."""

_GUESSES = {
    "start": "lane",
    "end": "start",
    "work": "length",
    "parent": "before",
    "source": "before",
    "target": "before",
    "marks": "before",
    **dict.fromkeys(("time", "block", "allocated", "reserved"), "before"),
}
_NEEDS = {"lane": ("lane",), "start": ("start",), "length": ("start", "end")}
"""The columns that a guess needs."""
_WIDTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def save(timeline: Timeline, path: str | Path) -> None:
    """Writes the whole file or nothing: an existing file stays until the new one is complete."""
    content = to_bytes(timeline)
    try:
        write_whole(path, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be written ({reason}); give a path where a file may be made.") from None


def load(path: str | Path) -> Timeline:
    """Reads what `save` wrote; raises `BadInput` for anything else."""
    with opened(path, "a .busy file that keepbusy saved") as file:
        content = file.read(len(_MAGIC))
        content += file.read() if content == _MAGIC else b""
    return from_bytes(content, str(path))


def to_bytes(timeline: Timeline) -> bytes:
    """The content of the file. Equal timelines give equal bytes."""
    described, contents = {}, []
    for name, table in _columns_of(timeline).items():
        packed = list(pack(table))
        described[name] = {"rows": len(next(iter(table.values()))), "columns": [column for column, _ in packed]}
        contents += [content for _, content in packed]
    header: Header = {
        "lanes": timeline.lanes,
        "names": timeline.names,
        "facts": timeline.facts.as_json(),
        "tables": described,
    }
    further = [to_bytes(window) for window in timeline.further]
    header |= {"further": [len(window) for window in further]} if further else {}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    packed_header = zlib.compress(text.encode("utf-8", "surrogatepass"), _LEVEL)  # names can be any string
    rest = b"".join([LENGTH.pack(len(packed_header)), packed_header, *contents, *further])
    return _PREFACE.pack(_MAGIC, VERSION, zlib.crc32(rest), len(rest)) + rest


def from_bytes(content: bytes, path: str = "these bytes") -> Timeline:
    """The timeline that `to_bytes` packed. `path` is its name in error messages."""
    return _read(content, path, _Budget(max(_SMALL, _MOST_RATIO * len(content))))


class _Budget:
    """How much memory one file may take, including the timelines within it."""

    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, size: int) -> None:
        if not 0 <= size <= self.left:
            raise ValueError(f"it would take {size >> 20} MB of memory, {self.left >> 20} MB are left for it")
        self.left -= size


def _read(content: bytes, path: str, budget: _Budget) -> Timeline:
    rest = _checked(content, path)
    try:
        header, tables, further = _tables(rest, budget)
        timeline = _timeline(header, tables)
        _check(timeline)
        # roles follow from names, so they are computed anew: a file may be older than a role, or than its column
        frames, spans = described(timeline.frames, timeline.names), described(timeline.spans, timeline.names)
        timeline = timeline.change(frames=frames, spans=spans)
        further_windows = tuple(_read(bytes(window), path, budget) for window in further)
        if any(window.further for window in further_windows):
            raise ValueError("moments within a moment")
        timeline = timeline.change(further=further_windows)
    except BadInput:  # from a timeline within it
        raise
    except MemoryError:
        raise BadInput(f"{path} needs more memory than this machine has; open it on a larger one.") from None
    except _FAULTS as error:
        raise BadInput(f"{path} is damaged ({error}); save the run again, from its traces.") from None
    return timeline


def _checked(content: bytes, path: str) -> memoryview:
    """The content after the preface, if it is complete and of this version."""
    if not content:
        raise BadInput(f"{path} is empty; copy it or save the run again.")
    if not content.startswith(_MAGIC):
        raise BadInput(f"{path} is no .busy file; give one that keepbusy saved.")
    if len(content) < _PREFACE.size:
        raise BadInput(f"{path} is cut off after {len(content)} bytes; copy it or save the run again.")
    _, version, checksum, length = _PREFACE.unpack_from(content)
    if version != VERSION:
        raise BadInput(
            f"{path} has format {version}, and this keepbusy reads format {VERSION}; "
            f"{'update keepbusy' if version > VERSION else 'save the run again, from its traces'}."
        )
    rest = memoryview(content)[_PREFACE.size :]
    if len(rest) < length:
        raise BadInput(f"{path} is cut off: {len(rest)} bytes of {length} are there; copy it or save the run again.")
    if zlib.crc32(rest[:length]) != checksum or len(rest) > length:
        raise BadInput(f"{path} is damaged (its checksum does not match); copy it or save the run again.")
    return rest


def _tables(rest: memoryview, budget: _Budget) -> tuple[Header, dict[str, Columns], list[memoryview]]:
    """The header, the tables, and the further timelines, each packed as in a file of its own."""
    (size,) = LENGTH.unpack_from(rest)
    text = _inflated(rest[LENGTH.size : LENGTH.size + size], budget.left // _PARSED)
    budget.spend(_PARSED * len(text))
    header = json.loads(text.decode("utf-8", "surrogatepass"))
    content = rest[LENGTH.size + size :]
    tables = {}
    kinds = _TABLES | _OPTIONAL
    for name in (*_TABLES, "marks", *(optional for optional in _OPTIONAL if optional in header["tables"])):
        rows, described = header["tables"][name]["rows"], header["tables"][name]["columns"]
        columns = len(kinds[name].of(0).columns()) if name in kinds else 1  # a missing column takes memory, too
        if type(rows) is not int or rows < 0 or len(described) > columns:
            raise ValueError(f"{rows} rows of {name}")
        budget.spend(rows * 8 * columns)
        tables[name] = unpack(described, content, rows)
        content = content[sum(column[-1] for column in described) :]
    lengths = header.get("further", ())
    if sum(lengths) != len(content) or min(lengths, default=1) < 1:
        raise ValueError(f"{len(content)} bytes where {sum(lengths)} belong")
    ends = [*accumulate(lengths)]
    return header, tables, [content[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _inflated(content: memoryview, most: int) -> bytes:
    """Unpacks no more than so many bytes, whatever the content claims."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(content, max(1, most))  # 0 would mean without a limit
    if not unpacker.eof and len(text) >= most:
        raise ValueError(f"a part of it would take more than the {most >> 20} MB of memory that are left for it")
    if not unpacker.eof:
        raise ValueError("a part of it does not end")
    return text


def _timeline(header: Header, tables: dict[str, Columns]) -> Timeline:
    kinds = {name: kind for name, kind in (_TABLES | _OPTIONAL).items() if name in tables}
    content = {name: table.of(header["tables"][name]["rows"], **tables[name]) for name, table in kinds.items()}
    lanes = tuple(
        Lane(int(rank), None if device is None else int(device), int(number), str(name))
        for rank, device, number, name in header["lanes"]
    )
    return Timeline(
        lanes=lanes,
        names=tuple(header["names"]),
        marks=np.sort(tables["marks"]["marks"]),
        facts=RunFacts.of_json(header["facts"]),
        **content,  # type: ignore[arg-type]
    )


def _columns_of(timeline: Timeline) -> dict[str, Columns]:
    tables = {name: getattr(timeline, name).columns() for name in _TABLES}
    optional = {name: getattr(timeline, name).columns() for name in _OPTIONAL if len(getattr(timeline, name))}
    return tables | {"marks": {"marks": np.asarray(timeline.marks)}} | optional


def _check(timeline: Timeline) -> None:
    """Raises ValueError if an index points nowhere, or times are those of no run."""
    spans, links, frames, meetings = timeline.spans, timeline.links, timeline.frames, timeline.meetings
    lanes, names = len(timeline.lanes), len(timeline.names)
    if lanes > _SPARE_LANES + len(spans):
        raise ValueError(f"{lanes} threads and streams, but {len(spans)} spans")
    sizes = {"lanes": lanes, "names": names, "spans": len(spans), "frames": len(frames), "meetings": len(meetings)}
    for part, numbers, low, high in (
        *_numbering(timeline, sizes),
        ("direction", spans.direction, 0, len(Direction)),
        ("kind of link", links.kind, 0, len(LinkKind)),
        ("kind of frame", frames.kind, 0, len(FrameKind)),
        ("rank of a meeting", meetings.members, 0, LARGEST_RANK),
        ("part of a meeting", meetings.present, 0, LARGEST_RANK),
        ("mark", timeline.marks, 0, len(spans)),
        ("mark after a mark", np.diff(timeline.marks), 1, len(spans) + 1),
    ):
        if len(numbers) and not (low <= int(numbers.min()) and int(numbers.max()) < high):
            raise ValueError(f"a {part} that does not exist")
    for fault, is_sound in {
        "a rank that does not exist": [0 <= lane.rank < LARGEST_RANK for lane in timeline.lanes],
        "a device that does not exist": [(lane.device or 0) >> 31 == 0 for lane in timeline.lanes],
        "a name that is no text": [isinstance(name, str) for name in timeline.names],
        "a kind of span that does not exist": np.isin(spans.kind, list(Kind)),
        "a launch of what is no command": timeline.on_device[links.target[links.kind == LinkKind.LAUNCH]],
        "a frame that stands before its parent": (frames.parent >= NONE) & (frames.parent < np.arange(len(frames))),
    }.items():
        if not np.all(is_sound):
            raise ValueError(fault)
    check_times(timeline)


def _numbering(timeline: Timeline, sizes: dict[str, int]) -> Iterator[tuple[str, Ints, int, int]]:
    for part in (*_TABLES, *_OPTIONAL):
        table = getattr(timeline, part)
        for name, numbered, fill in table.numbering():
            yield f"{name} of {part}", getattr(table, name), EVERY_LANE if name == "awaits" else fill, sizes[numbered]


def _plain(value: Any) -> Any:
    """Facts may hold numpy's numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a timeline's facts cannot hold {type(value).__name__}: {value!r}")


def pack(table: Columns) -> Iterator[tuple[Described, bytes]]:
    """Each column, described and packed, after those from which it is guessed."""
    for name in sorted(table, key=lambda column: {"lane": 0, "start": 1, "end": 2}.get(column, 3)):
        guess = _GUESSES.get(name, "")
        guess = guess if all(needed in table for needed in _NEEDS.get(guess, ())) else ""
        numbers = table[name].astype(np.int64)
        if guess in ("before", "lane"):
            numbers = np.diff(numbers if guess == "before" else numbers[_by_lane(table)], prepend=np.int64(0))
        else:
            numbers = numbers - _expected(guess, table)
        low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
        width = next(size for size, kind in _WIDTHS.items() if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        planes = numbers.astype(_WIDTHS[width]).view(np.uint8).reshape(len(numbers), width).T
        content = zlib.compress(np.ascontiguousarray(planes).tobytes(), _LEVEL)
        yield (name, guess, width, len(content)), content


def unpack(described: list[Described], content: memoryview, rows: int) -> Columns:
    """The columns that `pack` packed; raises ValueError or the like for anything else."""
    table: Columns = {}
    for name, guess, width, size in described:
        kind = _WIDTHS[width]  # any other width is refused here
        planes = _inflated(content[:size], rows * width + 1)
        if len(planes) != rows * width:
            raise ValueError("a column of another length")
        bytes_of_rows = np.stack([*np.frombuffer(planes, np.uint8).reshape(width, rows)], axis=1)
        numbers = bytes_of_rows.view(kind).reshape(rows).astype(np.int64)
        if guess in ("before", "lane"):  # sums wrap around as the differences did, so all 64-bit numbers are restored
            numbers = np.cumsum(numbers)
        if guess == "lane":
            place = np.empty(rows, np.int64)
            place[_by_lane(table)] = np.arange(rows)
            numbers = numbers[place]
        table[name] = numbers + _expected(guess, table)
        content = content[size:]
    return table


def _by_lane(table: Columns) -> Ints:
    return np.argsort(table["lane"], kind="stable")


def _expected(guess: str, table: Columns) -> Ints:
    if guess == "start":
        return table["start"]
    return table["end"] - table["start"] if guess == "length" else np.zeros(1, np.int64)
