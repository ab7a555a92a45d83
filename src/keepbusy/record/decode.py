"""JSON events, decoded into the few fields that are of use; everything else is passed over unread.

What each row may carry was read in Kineto's sources (output_json.cpp writes the rows and copies the
collective's facts from `record_param_comms` to the kernel; CuptiActivity.h names the arguments of
kernels, copies, syncs and events; RoctracerActivity_inl.h those of AMD, whose runtime rows name
streams by address) and in saveNcclMeta of PyTorch's profiler.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, NamedTuple, Union

import msgspec

_ARGUMENTS = {
    "size": "bytes",
    "sequence": "Sequence number",
    "graph": "graph id",
    "awaited_stream": "wait_on_stream",
    "awaited_record": "wait_on_cuda_event_record_corr_id",
    "awaited_event": "wait_on_cuda_event_id",
    "recorded_event": "event_id",
    "collective": "Collective name",
    "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems",
    "group": "Process Group Name",
    "group_size": "Group size",
    "ranks": "Process Group Ranks",
    "from_rank": "Src Rank",
    "to_rank": "Dst Rank",
    "collective_sequence": "Seq",
}


class Arguments(msgspec.Struct, gc=False, rename=_ARGUMENTS):
    """`args`. Of any type: a producer that writes a string for a number loses that number, not the event."""

    correlation: Any = -1
    device: Any = -1
    stream: Any = -1
    size: Any = -1
    sequence: Any = -1
    graph: Any = 0
    awaited_stream: Any = -1
    awaited_record: Any = -1
    awaited_event: Any = -1
    recorded_event: Any = -1
    collective: Any = None
    elements_in: Any = 0
    elements_out: Any = 0
    dtype: Any = ""
    group: Any = ""
    group_size: Any = 0
    ranks: Any = None
    from_rank: Any = -1
    to_rank: Any = -1
    collective_sequence: Any = -1


class Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a duration."""

    ts: float
    dur: float
    name: str = ""
    cat: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: Arguments | None = None


class ExactlyTimed(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The same, for times too large for a float to hold their nanoseconds."""

    ts: Decimal
    dur: Decimal
    name: str = ""
    cat: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: Arguments | None = None


class Label(msgspec.Struct, gc=False):
    """`args` of a Naming."""

    name: Any = None


class Naming(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """What names a thread or a process."""

    name: str = ""
    pid: int | str | float | None = 0
    tid: int | str | float | None = 0
    args: Label | None = None


_OTHERS = [
    msgspec.defstruct(f"Other{index}", [], gc=False, tag_field="ph", tag=phase)
    for index, phase in enumerate("BEIiCbneSTpFstfPNODVvRc()")
]
_Row: Any = Union[(Complete, Naming, *_OTHERS)]
_ExactRow: Any = Union[(ExactlyTimed, Naming, *_OTHERS)]

LARGEST_FLOAT_TIME = 2.0**43
"""Microseconds up to which a float keeps each nanosecond apart from the next."""
ERRORS = (ValueError, RecursionError)
"""What msgspec raises: its own errors and those of UTF-8 are ValueErrors."""

_NOT_A_NUMBER = re.compile(rb"(:\s*)[-+]?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NAME = re.compile(rb'("name": ")(.*)(", "p(?:id|h)": )')
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
_SURROGATES = re.compile(rb"(?:\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(\\u[dD][89a-fA-F]..)")
_NO_CONTROL = bytes(32 if code < 32 else code for code in range(256))


class Rows(NamedTuple):
    """What a piece of a trace holds."""

    complete: list[Complete]
    naming: list[Naming]


class Decoder:
    """Decodes pieces of one trace, and counts what it had to pass over."""

    def __init__(self) -> None:
        self.bad, self.read, self.fault = 0, 0, ""
        self._kind: type = Complete
        self._many, self._one = msgspec.json.Decoder(list[_Row]), msgspec.json.Decoder(_Row)

    def together(self, events: memoryview) -> Rows:
        """Events with commas between them, all sound; else raises one of ERRORS."""
        return self._sorted(self._decoded(b"".join((b"[", events, b"]"))))

    def one_by_one(self, events: list[bytes]) -> Rows:
        """Of these events the sound ones, and of the others those that can be repaired."""
        return self._sorted([row for event in events if (row := self._repaired(event)) is not None])

    def _decoded(self, events: bytes) -> list[Any]:
        rows = self._many.decode(events)
        if self._kind is Complete and any(row.ts > LARGEST_FLOAT_TIME for row in _first_complete(rows)):
            self._kind = ExactlyTimed
            self._many, self._one = msgspec.json.Decoder(list[_ExactRow]), msgspec.json.Decoder(_ExactRow)
            return self._many.decode(events)
        return rows

    def _repaired(self, event: bytes) -> Any:
        for attempt in (_as_it_is, repair, _without_arguments):
            try:
                return self._one.decode(attempt(event))
            except ERRORS as error:
                fault = error
        self.bad += 1
        self.fault = self.fault or str(fault)
        return None

    def _sorted(self, rows: list[Any]) -> Rows:
        self.read += len(rows)
        complete: list[Any] = [row for row in rows if type(row) is self._kind]
        return Rows(complete, [row for row in rows if type(row) is Naming])


def _first_complete(rows: list[Any]) -> list[Complete]:
    first = next((row for row in rows if type(row) is Complete), None)
    return [first] if first else []


def repair(text: bytes) -> bytes:
    """Mends what PyTorch's writer is known to get wrong: quotes, control characters, bytes that are no UTF-8, NaN."""
    text = text.decode("utf-8", "replace").encode()
    text = _NAME.sub(lambda found: found[1] + _BARE_QUOTE.sub(rb"\"", found[2]) + found[3], text)
    text = _SURROGATES.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)
    return _NOT_A_NUMBER.sub(rb"\1null", text.translate(_NO_CONTROL))


def is_json(text: bytes) -> bool:
    """Whether the text can be read at all, whatever it says."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except ERRORS:
        return False
    return True


def _as_it_is(event: bytes) -> bytes:
    return event


def _without_arguments(event: bytes) -> bytes:
    head, found, _ = repair(event).partition(b'"args"')
    return head.rstrip().rstrip(b",") + b"}" if found else event
