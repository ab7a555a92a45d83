"""Dumps of PyTorch's flight recorder -> `CollectiveLog`: a pickle or JSON of each rank, written as the job timed out.

The format is PyTorch's, version 2 (PyTorch 2.3 and later); its names stand in this file alone. A dump does not say
whose it is: the rank is the number at the end of the file's name, as PyTorch writes it. Dumps may be strangers': of a
pickle only plain values are read, so that it cannot do anything.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from keepbusy.timeline.files import BadInput, opened
from keepbusy.timeline.frame_roles import Owner, owner_of_file
from keepbusy.torch_names.cpython import PythonUnpickler

# What ranks recorded of their collectives before the job hung: which they began, from which line, which ended


class CallSite(NamedTuple):
    """The user's line that called a collective."""

    file: str
    line: int
    function: str


class Operand(NamedTuple):
    """What one operation of a call takes and gives. Operations that are launched together are one call."""

    kind: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    ends: tuple[int, int] | None  # of a message: from and to, as the group counts its ranks


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One rank's part in a collective."""

    group: str
    number: int  # the group's n-th; messages are counted apart
    operands: tuple[Operand, ...]
    is_message: bool
    ended: bool
    started: bool  # on the device, as far as was seen
    timed_out: bool
    begun: int
    site: CallSite | None


@dataclass(frozen=True)
class CollectiveLog:
    """The calls of one rank, in the order in which it made them. The oldest may be missing."""

    rank: int
    calls: Sequence[CollectiveCall]
    groups: Mapping[str, tuple[int, ...]]  # their members, where they are known
    titles: Mapping[str, str]


# How it is read

_LARGEST = 20 << 20
"""Bytes. Two thousand calls, as many as PyTorch keeps, with their frames are two megabytes."""
_MOST_INSTRUCTIONS = 8 << 20
"""Of one pickle. Two thousand calls take a million."""
_LARGEST_DUMP, _DICT, _VALUE, _LETTERS = 64 << 20, 64, 16, 8
"""The largest dump, in units of the time that it takes to read: a dict counts 64, another value 16, and eight letters
count one more. Two thousand calls with their frames are ten million."""
_PICKLE = pickle.PROTO
_JSON = re.compile(rb'\s*\{\s*"(comm_lib_version|entries|nccl_comm_state|nccl_version|pg_config|pg_status)"')
_RANK = re.compile(r"(\d+)(\.\w+)*$")
_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)$")
_COALESCED = ":coalesced"
"""The end of an entry's name that stands for what was launched together, after its parts."""
_DEEPEST_FRAME = 200
_Entry: TypeAlias = Mapping[str, Any]


def is_dump(path: Path) -> bool:
    """By how the file begins; a trace of the profiler begins otherwise."""
    with opened(path, "a trace or a dump") as file:
        head = file.read(256)
    return head.startswith(_PICKLE) or bool(_JSON.match(head))


def read_dumps(paths: Sequence[Path]) -> list[CollectiveLog]:
    """One log per rank, in order of rank. Equal values are shared: a thousand ranks make two million calls."""
    logs: dict[int, CollectiveLog] = {}
    names: dict[int, Path] = {}
    shared: dict[Any, Any] = {}
    for path in paths:
        log = _read(path, shared)
        if log.rank in logs:
            raise BadInput(f"{path} and {names[log.rank]} are both of rank {log.rank}; give the dumps of one job.")
        logs[log.rank], names[log.rank] = log, path
    return [logs[rank] for rank in sorted(logs)]


def _read(path: Path, shared: dict[Any, Any]) -> CollectiveLog:
    rank_in_name = _RANK.search(path.name)
    if not rank_in_name:
        raise BadInput(f"{path} does not say whose it is; its name must end in the rank, as in nccl_trace_rank_0.")
    with opened(path, "a dump of PyTorch's flight recorder") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise BadInput(f"{path} has more than {_LARGEST >> 20} MB, which no flight recorder writes.")
    try:
        dump = plain_value(data) if data.startswith(_PICKLE) else json.loads(data)
        if _size(dump, {}) > _LARGEST_DUMP:
            raise ValueError("it holds more than any job writes")
        return _log(int(rank_in_name[1]), dump, shared)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no dump of PyTorch's flight recorder ({str(error)[:120]}).") from None


def _size(value: Any, sizes: dict[int, int]) -> int:
    """The time that a value takes to read. A pickle can hold one list a million times, or a list that holds itself."""
    if isinstance(value, str):
        return _VALUE + len(value) // _LETTERS
    if not isinstance(value, dict | list | tuple):
        return _VALUE
    if id(value) not in sizes:
        own, parts = (_DICT, value.values()) if isinstance(value, dict) else (_VALUE, value)
        sizes[id(value)] = own + sum(_size(part, sizes) for part in parts)
    return sizes[id(value)]


def _log(rank: int, dump: Any, shared: dict[Any, Any]) -> CollectiveLog:
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise ValueError("it has no entries")
    entries = [entry for entry in dump.get("entries", []) if isinstance(entry, dict)]
    titles: dict[str, str] = {}
    calls = list(_calls(entries, titles, shared))
    return CollectiveLog(rank, calls, dict(_groups(dump.get("pg_config"))), titles)


def _groups(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each group with its ranks, which the dump holds as a list in a string: `[0, 1]`."""
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        members = tuple(int(number) for number in re.findall(r"\d{1,9}", _text(ranks)))
        if members:
            yield _text(name), members


def _calls(entries: Sequence[_Entry], titles: dict[str, str], shared: dict[Any, Any]) -> Iterator[CollectiveCall]:
    """Entries that were launched together have one number, and are one call."""
    for (group, is_message, number), together in groupby(entries, _number):
        launched = list(together)
        last, names = launched[-1], [_text(entry.get("profiling_name")) for entry in launched]
        parts = [entry for entry, name in zip(launched, names, strict=True) if not name.endswith(_COALESCED)] or [last]
        operands = tuple(map(_operand, parts))
        site = next(filter(None, (_site(entry.get("frames")) for entry in launched)), None)
        ended = last.get("state") == "completed" or (names[-1].startswith("gloo:") and last.get("retired") is True)
        titles[group] = _text(last["process_group"][-1])
        yield CollectiveCall(
            shared.setdefault(group, group),
            number,
            shared.setdefault(operands, operands),
            is_message,
            ended,
            started=last.get("state") == "started",
            timed_out=last.get("retired") is True and not ended,
            begun=_integer(last, "time_created_ns"),
            site=shared.setdefault(site, site),
        )


def _number(entry: _Entry) -> tuple[str, bool, int]:
    group = entry.get("process_group")
    if not isinstance(group, list | tuple) or not group:
        raise ValueError("an entry has no process group")
    is_message = entry.get("is_p2p") is True
    return _text(group[0]), is_message, _integer(entry, "p2p_seq_id" if is_message else "collective_seq_id")


def _integer(entry: _Entry, name: str) -> int:
    value = entry.get(name, 0)
    if not isinstance(value, int):
        raise ValueError(f"{name} is {type(value).__name__}")
    return value


def _operand(entry: _Entry) -> Operand:
    """`nccl:all_reduce`, `nccl:send 1->2`, `nccl:recv 3<-0`."""
    name = _text(entry.get("profiling_name")).partition(":")[2]
    message = _MESSAGE.match(name)
    ends = None
    if message:
        own, peer = int(message[2]), int(message[4])
        ends, name = ((own, peer) if message[3] == "->" else (peer, own)), message[1]
    dtypes = {_text(dtype) for side in ("input", "output") for dtype in _listed(entry.get(f"{side}_dtypes"))}
    inputs, outputs = (_shapes(entry.get(f"{side}_sizes")) for side in ("input", "output"))
    return Operand(name.removeprefix("_"), inputs, outputs, tuple(sorted(dtypes)), ends)


def _text(value: Any) -> str:
    """Empty for a list: a small file can hold one whose text has no end."""
    return str(value) if isinstance(value, str | int) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(size for size in _listed(shape) if isinstance(size, int)) for shape in _listed(value))


def _site(frames: Any) -> CallSite | None:
    """The user's innermost frame, or else the outermost of all."""
    sites = [
        CallSite(frame["filename"], frame["line"], _text(frame.get("name")))
        for frame in _listed(frames)[:_DEEPEST_FRAME]
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str) and isinstance(frame.get("line"), int)
    ]
    return next((site for site in sites if owner_of_file(site.file) == Owner.USER), sites[-1] if sites else None)


# Pickles of lists, dicts, strings and numbers. Python's own reader would run whatever a pickle names

_BUILDS_PLAIN_VALUES = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
        *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
        *(pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    )
)


class _Instructions(dict[int, Any]):
    """The instructions that build plain values, until there have been too many."""

    def __init__(self) -> None:
        super().__init__((code, PythonUnpickler.dispatch[code]) for code in _BUILDS_PLAIN_VALUES)
        self._remaining = _MOST_INSTRUCTIONS

    def __getitem__(self, code: int) -> Any:
        self._remaining -= 1
        if not self._remaining:
            raise ValueError(f"it has more than {_MOST_INSTRUCTIONS:,} instructions")
        return super().__getitem__(code)


class _PlainUnpickler(PythonUnpickler):  # Python's own in Python, since the one in C has fixed instructions
    @property
    def dispatch(self) -> Mapping[int, Any]:  # type: ignore[override]  # read once per pickle
        return _Instructions()


def plain_value(data: bytes) -> Any:
    """The value in a pickle. ValueError if it uses an instruction that does not build plain values."""
    try:
        return _PlainUnpickler(BytesIO(data)).load()
    except KeyError as error:
        raise ValueError(f"it has instruction {error}, which plain values do not need") from None
    except (pickle.UnpicklingError, EOFError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from None
