"""A trace's file, unpacked block by block -> its events, batch by batch, and the facts around them.

Only the few useful fields of an event are decoded.

A cheap guess usually finds where one event ends and the next begins. If it was wrong, decoding fails, as a cut at the
wrong depth leaves brackets open. Then the text is scanned exactly, with numpy, whatever its layout.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, Union, cast

import msgspec
import numpy as np
import numpy.typing as npt
from isal import igzip, isal_zlib

from keepbusy.timeline.files import BadInput, opened
from keepbusy.timeline.model import NONE, Ints
from keepbusy.traces.kineto_names import ARGUMENTS, CUDA_MEMORY, MEMORY, MEMORY_ARGUMENTS

OnProgress: TypeAlias = Callable[[str, float], Any]
"""Receives progress now and then: what is being done, and which share is done, from 0 to 1."""
RECORD = "record with torch.profiler.profile(...) and give what its export_chrome_trace writes"

BLOCK_SIZE = 256 << 10
"""Small enough that a block and its rows stay in the processor's cache: a quarter faster than 1 MB."""
SMALL = 64 << 20
"""A file that unpacks to fewer bytes is never refused for its size."""
_MOST_RATIO = 200
"""Compressing makes a long trace about 20 times smaller. Only a malicious file shrinks so much more."""
_MOST_BYTES = 64 << 30
_LEAST_EVENT = 4
"""Bytes of the file per event, compressed or not. Real ones take 15 or more."""
FEW_EVENTS = 1 << 20
"""A file with fewer events is never refused for their number."""
_GZIP = b"\x1f\x8b"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, cast("type[Exception]", isal_zlib.error))
_FOREIGN_BEGINNINGS = (
    (b"version https://git-lfs", "the pointer that Git LFS leaves instead of a file", "fetch the file: git lfs pull"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the .json or .json.gz within"),
    (b"SQLite format 3", "an SQLite database, as `nsys export` writes it", RECORD),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it and give the .json"),
    (b"BZh", "compressed with bzip2", "unpack it and give the .json"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it and give the .json"),
    (b"\x80", "a pickle, perhaps of PyTorch's flight recorder", "those of a job that hangs go to keepbusy explain"),
    (b"\x89busy", "a run that keepbusy saved", "open it with keepbusy.load, or give it a name that ends in .busy"),
)

LARGEST_FLOAT_TIME = 2.0**43
"""Microseconds up to which a float distinguishes nanoseconds."""
_ERRORS = (ValueError, RecursionError)
"""What msgspec raises: its own errors and those of UTF-8 are ValueErrors."""

_NOT_A_NUMBER = re.compile(rb"(:\s*)[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NAME = re.compile(rb'("name": ")(.*)(", "p(?:id|h)": )')
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
_SURROGATES = re.compile(rb"(?:\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(\\u[dD][89a-fA-F]..)")
_NO_CONTROL = bytes(32 if code < 32 else code for code in range(256))

_BOUNDARY = re.compile(rb"\}[ \t\r\n]*(,)[ \t\r\n]*\{")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_TRACE_EVENTS = re.compile(rb'"traceEvents"[ \t\r\n]*:[ \t\r\n]*([^ \t\r\n])')
_EVENT_END, _BETWEEN_EVENTS, _LAST_EVENT_END = b"\n  }", b"\n  },\n  {", b"\n  }\n  ]"
"""Kineto's layout; its strings hold no line breaks."""
_WINDOWS = (8 << 10, 256 << 10)
_BOM = b"\xef\xbb\xbf"

_DEPTH = np.zeros(256, np.int64)
_DEPTH[list(b"{[")] = 1
_DEPTH[list(b"}]")] = -1
_MATTERS = np.zeros(256, np.bool_)
_MATTERS[list(b'{}[]"\n')] = True

_MOST_BEFORE = 16 << 20
_MOST_AFTER = 64 << 20
_LONGEST_EVENT = 16 << 20
"""The most bytes before the list of events, after it, and in one event."""
_LINE = re.compile(rb'^\s*"(\w+)": (.*?),?\s*$', re.MULTILINE)


class Arguments(msgspec.Struct, gc=False, rename=ARGUMENTS):
    """`args`. Values can have any type: if a producer writes a string for a number, only that number is lost."""

    correlation: Any = -1
    device: Any = -1
    stream: Any = -1
    size: Any = -1
    grid: msgspec.Raw = msgspec.Raw()  # there are few different grids, so each text is parsed once
    sequence: Any = -1
    awaited_stream: Any = -1
    awaited_record: Any = -1
    collective: Any = None
    elements_in: Any = 0
    elements_out: Any = 0
    dtype: Any = ""
    group: Any = ""
    group_size: Any = 0
    ranks: Any = None
    from_rank: Any = -1
    to_rank: Any = -1


class Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a duration."""

    ts: float
    dur: float
    name: str = ""
    cat: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: Arguments | None = None


class ExactlyTimed(Complete):
    """An event whose times are too large for a float to hold their nanoseconds."""

    ts: Decimal  # type: ignore[assignment]
    dur: Decimal  # type: ignore[assignment]


class Label(msgspec.Struct, gc=False):
    """The `args` of a Naming."""

    name: Any = None


class Naming(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """An event that names a thread or a process."""

    name: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: Label | None = None


class MemoryArguments(msgspec.Struct, gc=False, rename=MEMORY_ARGUMENTS):
    """The `args` of an Instant."""

    kind: Any = -1
    device: Any = 0
    block: Any = 0
    size: Any = 0
    allocated: Any = 0
    reserved: Any = 0


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """An event without a duration, such as memory that is allocated or freed."""

    ts: float = 0.0
    name: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: MemoryArguments | None = None

    @property
    def is_memory(self) -> bool:
        return self.name == MEMORY and self.args is not None and self.args.kind == CUDA_MEMORY


_OTHERS = [
    msgspec.defstruct(f"Other{index}", [], gc=False, tag_field="ph", tag=phase)
    for index, phase in enumerate("BEICbneSTpFstfPNODVvRc()")
]
_Row: Any = Union[(Complete, Naming, Instant, *_OTHERS)]
_ExactRow: Any = Union[(ExactlyTimed, Naming, Instant, *_OTHERS)]


class EventBatch(NamedTuple):
    """The events in a piece of a trace."""

    complete: list[Complete]
    naming: list[Naming]
    memory: list[Instant]


class Batches:
    """Iterates over the events. After that `facts` returns the rest of the file."""

    def __init__(self, path: str, on_progress: OnProgress | None = None) -> None:
        self.path = path
        self.decoder = _Decoder()
        self._blocks = _blocks(path, on_progress)
        self._before = b""
        self._after = b""
        self._closed = False

    def __iter__(self) -> Iterator[EventBatch]:
        text = self._open()
        for block in self._blocks:
            rows, text = self._whole_events(text + block)
            self._refuse_too_many_events()
            yield rows
            if self._closed:
                break
            if len(text) > _LONGEST_EVENT:
                raise BadInput(
                    f"{self.path} has an event of more than {_LONGEST_EVENT >> 20} MB; give a PyTorch profiler trace."
                )
        else:
            rows, text = self._whole_events_exactly(text, patience=0)
            yield rows
        if not self._closed:
            raise self._truncated()
        self._collect_after(text)

    def facts(self) -> dict[str, Any]:
        """Everything besides `traceEvents`."""
        if not self._before:  # the file is the list itself
            return {}
        whole = self._before + b"null" + self._after
        for attempt in (whole, _repair(whole)):
            try:
                facts: dict[str, Any] = msgspec.json.decode(attempt)
                facts.pop("traceEvents", None)
                return facts
            except _ERRORS:
                pass
        if not self._after.rstrip().endswith(b"}"):
            raise self._truncated()
        if not self._after.lstrip().startswith((b",", b"}")):
            raise self._damaged()
        return _facts_by_line(whole)

    def _open(self) -> bytes:
        text = b""
        for block in self._blocks:
            text = text + block if text else block.removeprefix(_BOM).lstrip()
            start = _opening(self.path, text)
            if start != NONE:
                self._before = text[: start - 1]
                return text[start:]
            if len(text) > _MOST_BEFORE:
                raise BadInput(
                    f"{self.path} has no `traceEvents` in its first {_MOST_BEFORE >> 20} MB; "
                    "give a PyTorch profiler trace."
                )
        raise self._without_events(text)

    def _whole_events(self, text: bytes) -> tuple[EventBatch, bytes]:
        """The events up to the last comma that probably separates two events, and the remaining text."""
        for window in _WINDOWS:
            commas = [match.start(1) for match in _BOUNDARY.finditer(text, max(0, len(text) - window))]
            if commas:
                rows = self._together(text, commas[-1])
                return (rows, text[commas[-1] + 1 :]) if rows else self._whole_events_exactly(text)
        return self._whole_events_exactly(text)

    def _whole_events_exactly(self, text: bytes, patience: int = 1 << 20) -> tuple[EventBatch, bytes]:
        piece = scan(text)
        rows = self._together(text, piece.until)
        if rows is None or (piece.until == 0 and len(text) >= patience):
            layout = _scan_layout(text)  # finds events despite stray quotes and brackets
            if len(layout.events) > len(piece.events) and not _is_json(b"[%b]" % text[: piece.until]):
                piece = layout
            rows = self.decoder.one_by_one([text[start:end] for start, end in piece.events])
        self._closed = piece.closing != NONE
        if self._closed and text[piece.closing : piece.closing + 1] != b"]":
            raise self._damaged()
        return rows, text[piece.closing + 1 :] if self._closed else text[piece.until :].lstrip(b" \t\r\n,")

    def _together(self, text: bytes, until: int) -> EventBatch | None:
        try:
            return self.decoder.together(memoryview(text)[:until])
        except _ERRORS:
            return None

    def _collect_after(self, text: bytes) -> None:
        parts, size = [text], len(text)
        for block in self._blocks:
            parts.append(block)
            size += len(block)
            if size > _MOST_AFTER:
                raise BadInput(
                    f"{self.path} has over {_MOST_AFTER >> 20} MB beside its `traceEvents`; "
                    "give a PyTorch profiler trace."
                )
        self._after = b"".join(parts)

    def _refuse_too_many_events(self) -> None:
        size, events = Path(self.path).stat().st_size, self.decoder.read
        if size and events > FEW_EVENTS and events * _LEAST_EVENT > size:  # a pipe has no size
            raise BadInput(
                f"{self.path} has more than {events:,} events in {size >> 10} kB, which no profiler trace has; "
                "check where it comes from, or unpack it yourself and give the .json."
            )

    def _truncated(self) -> BadInput:
        return BadInput(
            f"{self.path} ends in the middle of its JSON, so it was cut off while being written or copied; "
            "export or copy the trace again."
        )

    def _damaged(self) -> BadInput:
        return BadInput(f"{self.path} is damaged: the brackets of its JSON do not match; export or copy it again.")

    def _without_events(self, text: bytes) -> BadInput:
        if not text:
            return BadInput(f"{self.path} is blank; export the trace again, after the profiler has stopped.")
        try:
            keys = list(msgspec.json.decode(text))
        except _ERRORS:
            first, _, rest = text.partition(b"\n")
            if rest.lstrip()[:1] == b"{" and _is_json(first):
                return BadInput(
                    f"{self.path} holds a JSON object a line, as `nsys export --type jsonlines` and logs do, "
                    f"not a trace; {RECORD}."
                )
            return self._truncated()
        some_keys = ", ".join(str(key) for key in keys[:5]) or "none"
        return BadInput(
            f"{self.path} has no `traceEvents` (its keys: {some_keys}); give a trace that PyTorch's profiler exported."
        )


def _blocks(path: str, on_progress: OnProgress | None) -> Iterator[bytes]:
    """The content of the file, unpacked if it is compressed, whatever its name."""
    with opened(path, "a trace of PyTorch's profiler") as file:
        try:
            yield from _decompressed(path, file, on_progress)
        except _DAMAGE as error:
            raise BadInput(f"{path} is a damaged gzip file ({error}); export or copy the trace again.") from None


def _decompressed(path: str, file: IO[bytes], on_progress: OnProgress | None) -> Iterator[bytes]:
    zipped = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]
    source = igzip.IGzipFile(fileobj=file) if zipped else file
    size, total = os.fstat(file.fileno()).st_size, 0
    what = f"reading {''.join(letter if letter.isprintable() else '?' for letter in Path(path).name)}"
    while block := source.read(BLOCK_SIZE):
        if not total:
            _refuse_foreign(path, block)
        total += len(block)
        consumed = file.tell() if file.seekable() else total
        if zipped and total > SMALL and total > min(_MOST_RATIO * consumed, _MOST_BYTES):
            raise BadInput(
                f"{path} unpacks to more than {total >> 20} MB from {consumed >> 10} kB, which no profiler trace does; "
                "check where it comes from, or unpack it yourself and give the .json."
            )
        if on_progress and size:
            on_progress(what, min(1.0, consumed / size))
        yield block
    if not total:
        raise BadInput(f"{path} is empty; export the trace again, after the profiler has stopped.")


def _refuse_foreign(path: str, block: bytes) -> None:
    """Raises BadInput for files whose first bytes or name show that they are no traces."""
    for beginning, kind, advice in _FOREIGN_BEGINNINGS:
        if block.startswith(beginning):
            raise BadInput(f"{path} is {kind}; {advice}.")
    if path.endswith((".nsys-rep", ".qdrep", ".ncu-rep")):
        raise BadInput(f"{path} is a report of NVIDIA Nsight; {RECORD}.")


def _opening(path: str, text: bytes) -> int:
    """The index just after the opening bracket of the list of events; NONE if that is not in this text."""
    if text.startswith(b"["):
        return 1
    if not text.startswith(b"{"):
        if text:
            raise BadInput(f"{path} is not JSON: it begins with {text[:16]!r}; give a PyTorch profiler trace.")
        return NONE
    for match in _TRACE_EVENTS.finditer(text):
        depth = _brackets(text[: match.start()])[2]
        if len(depth) and depth[-1] == 1:  # it is a key of the outermost object
            if match[1] != b"[":
                raise BadInput(f"{path} has a `traceEvents` that is no list; give a PyTorch profiler trace.")
            return match.end()
    return NONE


def _facts_by_line(text: bytes) -> dict[str, Any]:
    """The facts in lines that are JSON. Kineto writes one per line, and does not escape strings that users add."""
    facts = {}
    for name, value in _LINE.findall(text):
        with suppress(*_ERRORS):
            facts[name.decode()] = msgspec.json.decode(value)
    return facts


class _Decoder:
    """Decodes pieces of one trace, and counts the events that it had to skip."""

    def __init__(self) -> None:
        self.bad, self.read, self.fault = 0, 0, ""
        self._kind: type = Complete
        self._many, self._one = msgspec.json.Decoder(list[_Row]), msgspec.json.Decoder(_Row)

    def together(self, events: memoryview) -> EventBatch:
        """Decodes events with commas between them. Raises one of _ERRORS if any of them is faulty."""
        text = b"".join((b"[", events, b"]"))
        rows = self._many.decode(text)
        first = next((row for row in rows if type(row) is Complete), None)
        if self._kind is Complete and first is not None and first.ts > LARGEST_FLOAT_TIME:
            self._kind = ExactlyTimed
            self._many, self._one = msgspec.json.Decoder(list[_ExactRow]), msgspec.json.Decoder(_ExactRow)
            rows = self._many.decode(text)
        return self._sorted(rows)

    def one_by_one(self, events: list[bytes]) -> EventBatch:
        """Decodes the sound ones of these events, and those that can be repaired."""
        return self._sorted([row for event in events if (row := self._repaired(event)) is not None])

    def _repaired(self, event: bytes) -> Any:
        for attempt in _attempts(event):
            try:
                return self._one.decode(attempt)
            except _ERRORS as error:
                fault = error
        self.bad += 1
        self.fault = self.fault or str(fault)
        return None

    def _sorted(self, rows: list[Any]) -> EventBatch:
        self.read += len(rows)
        kind = self._kind
        complete: list[Any] = [row for row in rows if type(row) is kind]
        others = [row for row in rows if type(row) is not kind]
        memory = [row for row in others if type(row) is Instant and row.is_memory]
        return EventBatch(complete, [row for row in others if type(row) is Naming], memory)


def _attempts(event: bytes) -> Iterator[bytes]:
    """The event as it is, then repaired, then without its arguments."""
    yield event
    repaired = _repair(event)
    yield repaired
    head, separator, _ = repaired.partition(b'"args"')
    if separator:
        yield head.rstrip().rstrip(b",") + b"}"


def _repair(text: bytes) -> bytes:
    """Fixes what PyTorch's writer is known to get wrong: quotes, control characters, bytes that are no UTF-8, NaN."""
    text = text.decode("utf-8", "replace").encode()
    text = _NAME.sub(lambda match: match[1] + _BARE_QUOTE.sub(rb"\"", match[2]) + match[3], text)
    text = _SURROGATES.sub(lambda match: rb"\ufffd" if match[1] else match[0], text)
    return _NOT_A_NUMBER.sub(rb"\1null", text.translate(_NO_CONTROL))


def _is_json(text: bytes) -> bool:
    """Whether the text is any JSON."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except _ERRORS:
        return False
    return True


class _Piece(NamedTuple):
    """The complete events in a text that begins within a list: their extents, and where the list is closed."""

    events: list[tuple[int, int]]
    closing: int

    @property
    def until(self) -> int:
        """The end of the text that was scanned."""
        if self.closing != NONE:
            return self.closing
        return self.events[-1][1] if self.events else 0


def scan(text: bytes) -> _Piece:
    """The events in the text, up to the end of the list, found by their brackets."""
    places, characters, depth = _brackets(text)
    closed = np.flatnonzero(depth < 0)
    last = int(closed[0]) if len(closed) else len(places)
    starts = places[:last][(characters[:last] == ord("{")) & (depth[:last] == 1)]
    ends = places[:last][(characters[:last] == ord("}")) & (depth[:last] == 0)] + 1
    events = list(zip(starts.tolist(), ends.tolist(), strict=False))
    return _Piece(events, int(places[last]) if len(closed) else NONE)


def _scan_layout(text: bytes) -> _Piece:
    """The events in the text, found by Kineto's layout, whatever is in them; none if the layout is different."""
    closing = text.find(_LAST_EVENT_END)
    until = text.rfind(_BETWEEN_EVENTS) if closing == NONE else closing
    begin = text.find(b"{")
    if until < begin or begin == NONE:
        return _Piece([], NONE)
    events = []
    for inner in text[begin + 1 : until].split(_BETWEEN_EVENTS):
        events.append((begin, begin + 1 + len(inner) + len(_EVENT_END)))
        begin += len(inner) + len(_BETWEEN_EVENTS)
    return _Piece(events, NONE if closing == NONE else closing + len(_LAST_EVENT_END) - 1)


def _brackets(text: bytes) -> tuple[Ints, npt.NDArray[Any], Ints]:
    """All brackets outside strings: their indices, the characters, and the depth after each."""
    if b"\\" in text:
        text = _ESCAPE.sub(b"  ", text)
    content = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(_MATTERS[content])
    characters = content[places]
    # JSON allows no line break in a string, so quotes are counted by line: a stray one harms its own line only
    quotes = np.cumsum(characters == ord('"'))
    before = np.maximum.accumulate(np.where(characters == ord("\n"), quotes, 0))
    change = np.where((quotes - before) & 1, 0, _DEPTH[characters])
    counts = change != 0
    return places[counts], characters[counts], np.cumsum(change[counts])
