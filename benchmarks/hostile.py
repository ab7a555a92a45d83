"""Hostile files: damaged traces, and `.busy` files with valid checksums, thousands of each, by seed.

    python benchmarks/hostile.py --jobs 30 | tee hostile.txt   # 10,000 of each: some 25 minutes of one core
    python benchmarks/hostile.py --count 500 --kind busy --first 20000
    python benchmarks/hostile.py --again busy:facts:17         # one of them once more: what it says, and the file kept

Every day has files that no day before it had: the number of the first one follows the date, and the last lines of
the output say what came of them, and which command tries exactly the same ones again.

It needs this tree, and Python with numpy, msgspec, isal and rich. Each file is given to `keepbusy explain` (every
fourth to `keepbusy export`) in a worker process whose memory is limited. What may come of it is an answer or a refusal
in one sentence (exit code 0 or 2); whatever else comes is a failure, and listed with its seed: exit code 3, a
traceback, a warning of Python's, a control character on the terminal, a cell of CSV that a spreadsheet would compute,
more than 1 GB, more than 20 s of the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import gzip
import io
import json
import os
import re
import resource
import runpy
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
TRUTH = ROOT / "tests" / "gpu" / "truth"
_SNAPSHOTS = ROOT / "tests" / "snapshots" / "traces"
SOURCES: list[tuple[Path, int | None]] = [
    *((_SNAPSHOTS / f"{name}.trace.json.gz", None) for name in ("images", "images_loaded", "tokens")),
    (TRUTH / "second" / "text_features.stalled.rank0.trace.json.gz", None),
    *((_SNAPSHOTS / "tokens.trace.json.gz", rank) for rank in (0, 1)),
]
"""Sound traces; those with a rank are made one of two that meet in collectives."""
SAVED = [
    *(TRUTH / "live" / f"{name}.busy" for name in ("copy_in_line", "made_on_host", "pageable_copy", "slow_loader")),
    *(TRUTH / "fourth" / f"{name}.busy" for name in ("both_late", "healthy_graph_decoding")),
    TRUTH / "third" / "copy_behind_loader.busy",
]
"""Sound recordings: of one and of two ranks, with loops, loaders, stalls and graphs."""
MEMORY, SECONDS = 1 << 30, 20.0
"""What no file may take."""
ROOM = 3 << 30
"""Address space that a worker may take beyond what it begins with."""
PATIENCE = 60.0
"""Seconds of real time until a worker that says nothing is killed."""
SMALL = 1 << 16
"""Characters from which on a fact is not made a thousand times as large: it is to fit into memory until it is read."""
BATCH = 100
"""Files for one worker process: few enough that thirty workers end together."""
NOUNS = {"trace": "traces", "busy": ".busy files"}
PEER = "rank1.trace.json"
"""The sound trace of another rank, beside which some of the damaged ones are given."""
HUGE = [-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30]
VALUES: list[Any] = [
    *HUGE, None, True, False, "", "x", "7", "1e9", "NaN", 2.5, -0.0, 1e30, 1e308, -1e308, float("nan"), float("inf"),
    [], [1], [[]],
    {}, {"a": 1}, [2**62] * 8, [[2**31, 2**31], [2**31]], "[[4096, 4096], []]",
]  # fmt: skip
NAMES = [
    "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "a\nb", "\r", "\0", "\ud800", "\u202edesrever", "=1+1", "+1", "-1",
    "@sum", "=cmd|' /C calc'!A0",
    "x" * 100_000, "[bold]markup[/]", "%s{0}", "", " ", "\x9b31m", "🙂" * 50, "a.py(1): f\n", "<script>",
    "a.py(99999999999999999999): f",
    "void f<" * 3000, "../../etc/passwd", "\t", "nccl:all_reduce", "ProfilerStep#9999999999999999999999",
    "ProfilerStep#-1",
]  # fmt: skip
TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"null",
    b"NaN",
    b"1e999",
    b"-",
    b"\xff",
    b"\\ud800",
    b"\0",
    b"/*",
    b"'",
]


# -- traces -----------------------------------------------------------------------------------------------------------


def cut_down(path: Path, commands: int = 40) -> dict[str, Any]:
    """A trace cut to some commands with their calls, and some of each other kind of event."""
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kept = {event["args"].get("correlation") for event in device[:: -(-len(device) // commands)]}
    most = {"cpu_op": 30, "python_function": 20, "ac2g": 8, "fwdbwd": 8, "M": 12}
    counts: Counter[str] = Counter()
    chosen = []
    for event in events:
        kind = event.get("cat", event["ph"])
        counts[kind] += 1
        named = event.get("args", {}).get("correlation") in kept or kind == "user_annotation"
        if named or counts[kind] <= most.get(kind, 2):
            chosen.append(event)
    return {**trace, "traceEvents": chosen}


def as_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """One of two ranks: every sixth kernel is an all-reduce of both."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    for event in kernels[::6]:
        event["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        event["args"] |= {
            "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float",
            "Process Group Name": "0", "Group size": 2, "Process Group Ranks": "[0, 1]",
        }  # fmt: skip
    return {**trace, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}


def some(random: Random) -> int:
    return random.choice([1, 3, 40, 400])


def odd(random: Random, *further: Any) -> Any:
    """One of the odd values, or of further ones; a copy, for what holds it may be damaged once more."""
    return copy.deepcopy(random.choice([*VALUES, *further]))


def swapped(trace: dict[str, Any], random: Random) -> None:
    """Values of random keys, by values of random types or of other events; keys lost."""
    events = trace["traceEvents"]
    for _ in range(some(random)):
        where = trace if random.random() < 0.05 else random.choice(events)
        if isinstance(where.get("args"), dict) and random.random() < 0.5:
            where = where["args"]
        if where:
            key = random.choice(list(where))
            where[key] = (
                odd(random)
                if random.random() < 0.4
                else copy.deepcopy(random.choice([random.choice(events).get(key), where.get("dur", 3)]))
            )
            if random.random() < 0.2:
                del where[key]


def counted(trace: dict[str, Any], random: Random) -> None:
    """One key of one kind of event holds something odd, everywhere or here and there."""
    events = trace["traceEvents"]
    keys = sorted({(str(event.get("cat")), key) for event in events for key in (*event, *event.get("args", {}))})
    for kind, key in random.sample(keys, min(len(keys), random.choice([1, 1, 2, 5]))):
        values, often = [odd(random) for _ in range(random.choice([1, 3]))], random.choice([0.1, 1.0])
        for event in events:
            if str(event.get("cat")) == kind and random.random() < often:
                where = event if key in event or not isinstance(event.get("args"), dict) else event["args"]
                where[key] = copy.deepcopy(random.choice(values))


def added(trace: dict[str, Any], random: Random) -> None:
    """Arguments that only some programs have."""
    shapes = random.choice(
        [[[2**31, 2**31]], [[2**62]], [[-1]], [["a"]], "[[1, 2]]", [[1] * 10_000], [[1.5]], [None], [[10**30]]]
    )
    given = {
        "Input Dims": shapes, "Input type": random.choice([["float"], "x", [1], []]),
        "Concrete Inputs": random.choice([["1"], [2**70], "x"]),
        "Collective name": random.choice(["allreduce", "\x1b[1m", 3, None]), "In msg nelems": odd(random),
        "Out msg nelems": odd(random), "Group size": odd(random), "dtype": random.choice(["Float", "x", 3]),
        "Process Group Name": random.choice(["0", 0, None, "x" * 1000]),
        "Process Group Ranks": random.choice(["[0, 1, ..., 7]", [0], "[", [2**70]]),
        "graph id": odd(random), "graph node id": odd(random), "Bytes": odd(random),
        "Total Allocated": odd(random), "Addr": odd(random), "Device Id": odd(random), "wait_on_stream": odd(random),
        "wait_on_cuda_event_record_corr_id": odd(random), "cbid": odd(random), "stream": odd(random),
    }  # fmt: skip
    chosen = random.sample(sorted(given), random.choice([1, 3, 8]))
    for event in trace["traceEvents"]:
        if isinstance(event.get("args"), dict) and random.random() < 0.5:
            event["args"].update({key: copy.deepcopy(given[key]) for key in chosen})
    trace["distributedInfo"] = random.choice(
        [{"rank": odd(random), "world_size": odd(random), "backend": "nccl", "pg_config": odd(random)}, odd(random)]
    )
    trace["deviceProperties"] = random.choice(
        [trace.get("deviceProperties"), odd(random), [{"name": random.choice(NAMES), "numSms": odd(random)}]]
    )


def named(trace: dict[str, Any], random: Random) -> None:
    events = trace["traceEvents"]
    for _ in range(some(random)):
        event = random.choice(events)
        event[random.choice(["name", "name", "cat", "tid", "pid"])] = random.choice(NAMES)
        if isinstance(event.get("args"), dict) and random.random() < 0.2:
            event["args"]["name"] = random.choice(NAMES)
    trace["traceName"] = random.choice(NAMES)


def timed(trace: dict[str, Any], random: Random) -> None:
    events = trace["traceEvents"]
    whole = random.random() < 0.3
    move, stretch = random.choice([0, 1e6, -1e15, 9e15]), random.choice([0, 1, 1e-9, 1e6, -1])
    for event in events if whole else random.choices(events, k=some(random)):
        event["ts"] = event["ts"] * stretch + move if whole else odd(random, random.choice(events)["ts"])
        if "dur" in event:
            event["dur"] = random.choice([event["dur"], event["dur"] * 1e6, 0, -1, 1e18, *HUGE[:4]])


def linked(trace: dict[str, Any], random: Random) -> None:
    """Numbers by which events point at each other."""
    keys = (
        "id",
        "correlation",
        "External id",
        "Python id",
        "Python parent id",
        "Python module id",
        "stream",
        "device",
        "Sequence number",
        "Fwd thread id",
        "pid",
        "tid",
        "Ev Idx",
    )
    known = [event.get(key, event.get("args", {}).get(key, 0)) for event in trace["traceEvents"] for key in keys[:5]]
    for _ in range(some(random)):
        event, key = random.choice(trace["traceEvents"]), random.choice(keys)
        where = event if key in event else event.setdefault("args", {})
        where[key] = random.choice([random.choice(known), random.choice(HUGE)])


def nested(trace: dict[str, Any], random: Random) -> None:
    value: Any = odd(random)
    for _ in range(random.choice([3, 200, 900])):
        value = [value] if random.random() < 0.5 else {"args": value}
    event = random.choice(trace["traceEvents"])
    event[random.choice(["args", "name", "more"])] = value
    if isinstance(event.get("args"), dict):
        event["args"] = {**event["args"], "Input Dims": random.choice([value, [[1] * 50_000], [[]] * 50_000])}


def shuffled(trace: dict[str, Any], random: Random) -> None:
    """Events deleted, doubled and moved."""
    rows = trace["traceEvents"]
    for _ in range(random.choice([1, 5, 60])):
        rows.insert(
            random.randrange(len(rows)), random.choice([random.choice(rows), rows.pop(random.randrange(len(rows)))])
        )
        if random.random() < 0.5 and len(rows) > 1:
            rows.pop(random.randrange(len(rows)))
    if random.random() < 0.2:
        kind = random.choice(rows).get("cat")
        trace["traceEvents"] = [event for event in rows if event.get("cat") != kind]


def flipped(text: bytes, random: Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(random.choice([1, 2, 8])):
        damaged[random.randrange(len(text))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def cut(text: bytes, random: Random) -> bytes:
    begin, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    return random.choice([text[:end], text[:begin] + text[end:], text[begin:], text + text[begin:end]])


def sprinkled(text: bytes, random: Random) -> bytes:
    for _ in range(random.choice([1, 2, 5])):
        place = random.randrange(len(text))
        text = text[:place] + random.choice(TOKENS) + text[place + random.choice([0, 0, 1, 3]) :]
    return text


def zipped(text: bytes, random: Random) -> bytes:
    return random.choice([flipped, cut, sprinkled])(gzip.compress(text, 6), random)


OF_TRACES: dict[str, Callable[[dict[str, Any], Random], None]] = {
    one.__name__: one for one in (swapped, counted, added, named, timed, linked, nested, shuffled)
}
OF_TEXTS: dict[str, Callable[[bytes, Random], bytes]] = {one.__name__: one for one in (flipped, cut, sprinkled, zipped)}


# -- .busy files: docs/reference/busy-file.md --------------------------------------------------------------------------

MAGIC = b"\x89busy\r\n\n"
PREFACE = struct.Struct("<8sIIQ")
TABLES = ("spans", "links", "frames", "meetings", "marks")


@dataclass
class Busy:
    """A file taken apart: its header, and what stands in each of its columns, decompressed."""

    header: dict[str, Any]
    columns: dict[tuple[str, int], bytes]
    further: list[bytes]


def taken_apart(content: bytes) -> Busy:
    rest = content[PREFACE.size :]
    (size,) = struct.unpack_from("<Q", rest)
    header = json.loads(zlib.decompress(rest[8 : 8 + size]).decode("utf-8", "surrogatepass"))
    at, columns, further = 8 + size, {}, []
    for table in TABLES:
        for number, (*_, length) in enumerate(header["tables"][table]["columns"]):
            columns[table, number] = zlib.decompress(rest[at : at + length])
            at += length
    for length in header.get("further", ()):
        further.append(rest[at : at + length])
        at += length
    return Busy(header, columns, further)


def put_together(busy: Busy) -> bytes:
    """With sizes and a checksum that fit."""
    contents = []
    for (table, number), planes in busy.columns.items():
        packed = zlib.compress(planes, 1)
        with contextlib.suppress(Exception):  # the header may not be what it was
            busy.header["tables"][table]["columns"][number][3] = len(packed)
        contents.append(packed)
    if busy.further:
        busy.header["further"] = [len(one) for one in busy.further]
    text = json.dumps(busy.header, sort_keys=True).encode("utf-8", "surrogatepass")
    header = zlib.compress(text, 1)
    return sealed(b"".join([struct.pack("<Q", len(header)), header, *contents, *busy.further]))


def sealed(rest: bytes) -> bytes:
    return PREFACE.pack(MAGIC, 1, zlib.crc32(rest), len(rest)) + rest


def facts(busy: Busy, random: Random) -> None:
    """What is known of the run as a whole: any of it of any type, at any depth."""
    for _ in range(random.choice([1, 1, 2, 6])):
        where: Any = busy.header
        key: Any = "facts"
        while isinstance(where[key], dict | list) and where[key] and (key == "facts" or random.random() < 0.8):
            where = where[key]
            key = random.choice(list(where)) if isinstance(where, dict) else random.randrange(len(where))
        several = random.choice([2, 1000]) if len(json.dumps(where[key])) < SMALL else 1
        where[key] = odd(random, random.choice(NAMES), [copy.deepcopy(where[key])] * several)
        if isinstance(where, dict) and where is not busy.header and random.random() < 0.2:
            del where[key]


def new_facts(busy: Busy, random: Random) -> None:
    """Facts that this file has not."""
    known = (
        "pending_limit", "plain_step", "recorded", "notes", "groups", "stacks", "skipped", "marks", "source",
        "device", "sources", "values", "clock",
        "host", "devices", "step", "steps", "window", "windows", "loader", "workers", "queue", "ranks", "rank",
        "world", "missing", "course", "stalls",
    )  # fmt: skip
    for key in random.sample(known, random.choice([1, 3, 8])):
        busy.header["facts"][key] = odd(random, random.choice(NAMES), {"0": [0, 1]}, [[0, 1]], ["a", 1])


def header(busy: Busy, random: Random) -> None:
    for _ in range(random.choice([1, 1, 3])):
        part = random.choice(["lanes", "names", "tables", "column", "column", "all"])
        if part == "all":
            busy.header[random.choice([*busy.header, "more"])] = odd(random)
        elif part == "tables":
            table = busy.header["tables"][random.choice(TABLES)]
            table[random.choice([*table, "more"])] = odd(random)
        elif part == "column":
            columns = busy.header["tables"][random.choice(TABLES)]["columns"]
            if isinstance(columns, list) and columns:
                column = random.choice(columns)
                column[random.randrange(3)] = odd(
                    random, 1, 2, 4, 8, "lane", "start", "before", "length", "end", "work", "kind"
                )
                if random.random() < 0.3:
                    random.choice([columns.append, columns.remove])(column)
        else:
            rows = busy.header[part]
            if isinstance(rows, list) and rows:
                at = random.randrange(len(rows))
                if part == "lanes" and isinstance(rows[at], list) and random.random() < 0.8:
                    rows[at][random.randrange(4)] = odd(random, *NAMES)
                else:
                    rows[at] = odd(random, *NAMES)
                if random.random() < 0.2:
                    rows.extend(rows[-1:] * random.choice([1, 100_000]))


def counts(busy: Busy, random: Random) -> None:
    """Rows where there are none, or none where there are rows."""
    for name in random.sample(TABLES, random.choice([1, 1, 5])):
        table = busy.header["tables"][name]
        kept = random.choice([0, 0, 1, len(table["columns"])])
        table["columns"] = table["columns"][:kept]
        for number in [at for table_, at in list(busy.columns) if table_ == name and at >= kept]:
            del busy.columns[name, number]
        table["rows"] = random.choice([*HUGE, table["rows"], 10**6, 10**7, 10**8, 10**9])


def columns(busy: Busy, random: Random) -> None:
    """Numbers of tables: extremes, or each other's."""
    tables = [name for name in TABLES if busy.header["tables"][name]["rows"]]
    for name in random.sample(tables, random.choice([1, 1, 2, len(tables)])):
        numbers = decoded(busy, name)
        rows, often = busy.header["tables"][name]["rows"], random.choice([0.0, 0.5, 1.0])
        for column in random.sample(sorted(numbers), random.choice([1, 1, 2])):
            values = numbers[column]
            for _ in range(random.choice([1, 3, 40, rows])):
                value = (
                    random.choice([*HUGE[:9], -(2**63), -2, 7, 10**9, 10**12])
                    if random.random() < often
                    else random.choice(values)
                )
                values[random.randrange(rows)] = value
        encoded(busy, name, numbers)


def all_columns(busy: Busy, random: Random) -> None:
    """Columns of one number, or in another order, so that a file says something else throughout."""
    tables = [name for name in TABLES if busy.header["tables"][name]["rows"]]
    for name in random.sample(tables, random.choice([1, 2])):
        numbers = decoded(busy, name)
        for column in random.sample(sorted(numbers), random.choice([1, 1, 3])):
            values = numbers[column]
            one = random.choice([*values[:3], -1, 0, 1, 2, 3, 5, 7, 10**6, 2**40, 2**62, -(2**62)])
            many = [
                [one] * len(values),
                values[::-1],
                sorted(values),
                [-value for value in values],
                [value * 10**6 for value in values],
            ]
            numbers[column] = [(value + 2**63) % 2**64 - 2**63 for value in random.choice(many)]
        encoded(busy, name, numbers)


def decoded(busy: Busy, name: str) -> dict[str, list[int]]:
    """A table's columns, as what they say."""
    found: dict[str, list[int]] = {}
    for number, (column, guess, width, _) in enumerate(busy.header["tables"][name]["columns"]):
        values = from_planes(busy.columns[name, number], width)
        if guess == "before":
            values = [*accumulate(values)]
        elif guess == "lane":
            order = sorted(range(len(values)), key=found["lane"].__getitem__)
            summed = [*accumulate(values)]
            values = [0] * len(values)
            for at, value in zip(order, summed, strict=True):
                values[at] = value
        elif guess == "start":
            values = [value + start for value, start in zip(values, found["start"], strict=True)]
        elif guess == "length":
            values = [
                value + end - start for value, start, end in zip(values, found["start"], found["end"], strict=True)
            ]
        found[column] = values
    return found


def encoded(busy: Busy, name: str, numbers: dict[str, list[int]]) -> None:
    """The same with no guess in any column."""
    busy.header["tables"][name]["columns"] = [[column, "", 8, 0] for column in numbers]
    for number, values in enumerate(numbers.values()):
        busy.columns[name, number] = to_planes(values)


def from_planes(planes: bytes, width: int) -> list[int]:
    rows = len(planes) // width
    return [int.from_bytes(planes[row::rows], "little", signed=True) for row in range(rows)]


def to_planes(numbers: Sequence[int]) -> bytes:
    rows = (number.to_bytes(8, "little", signed=True) for number in numbers)
    return b"".join(bytes(plane) for plane in zip(*rows, strict=True))


def deeper(busy: Busy, random: Random) -> None:
    """Timelines within timelines."""
    whole = put_together(busy)
    for _ in range(random.choice([1, 2, 30])):
        inner = taken_apart(whole)
        stall = {
            "count": 3,
            "every": 5.0,
            "library": "",
            "lines": [],
            "regular": True,
            "share": 0.1,
            "time": 10**7,
            "total": 3 * 10**7,
            "what": "",
        }
        about = {"step": 12, "began": 9, "stall": stall}
        if random.random() < 0.8:
            inner.header["facts"] |= {"why": random.choice(["stall", "drift"]), "about": about}
        if random.random() < 0.5:
            random.choice([facts, facts, columns, counts, header])(inner, random)
        busy.further = [put_together(inner)] * random.choice([1, 1, 3])
        if random.random() < 0.3 and len(whole) < 1 << 20:
            whole = put_together(busy)


def other_names(busy: Busy, random: Random) -> None:
    given = busy.header["names"]
    for _ in range(some(random)):
        if given:
            given[random.randrange(len(given))] = random.choice(NAMES)
    for lane in busy.header["lanes"]:
        lane[3] = random.choice([lane[3], *NAMES])
    for key in ("source", "device"):
        busy.header["facts"][key] = random.choice(NAMES)


OF_BUSY: dict[str, Callable[[Busy, Random], None]] = {
    one.__name__: one for one in (facts, new_facts, header, counts, columns, all_columns, deeper, other_names)
}


def resealed(text: bytes, random: Random) -> bytes:
    """Bytes of the file, with a checksum that fits again."""
    return sealed(random.choice([flipped, cut, sprinkled])(text[PREFACE.size :], random))


def bomb(text: bytes, random: Random) -> bytes:
    """Few bytes that unpack to many."""
    busy = taken_apart(text)
    place = random.choice(sorted(busy.columns))
    busy.columns[place] = bytes(random.choice([10**6, 3 * 10**8]))
    if random.random() < 0.5:
        column = busy.header["tables"][place[0]]["columns"][place[1]]
        busy.header["tables"][place[0]]["rows"] = len(busy.columns[place]) // column[2]
    if random.random() < 0.3:
        busy.header["names"] = random.choice([["x" * 50_000_000], [""] * 3_000_000])
    return put_together(busy)


OF_FILES: dict[str, Callable[[bytes, Random], bytes]] = {"resealed": resealed, "bomb": bomb}
KINDS = {"trace": [*OF_TRACES, *OF_TEXTS], "busy": [*OF_BUSY, *OF_FILES]}


# -- one file ----------------------------------------------------------------------------------------------------------


class Stock:
    """The sound files, read once."""

    def __init__(self) -> None:
        self._traces: dict[tuple[Path, int | None], str] = {}
        self._saved: dict[Path, bytes] = {}

    def trace(self, source: tuple[Path, int | None]) -> dict[str, Any]:
        path, rank = source
        if source not in self._traces:
            cut = cut_down(path)
            self._traces[source] = json.dumps(cut if rank is None else as_rank(cut, rank))
        trace: dict[str, Any] = json.loads(self._traces[source])
        return trace

    def busy(self, path: Path) -> bytes:
        if path not in self._saved:
            self._saved[path] = path.read_bytes()
        return self._saved[path]


def damaged(kind: str, mutation: str, seed: int, stock: Stock) -> bytes:
    random = Random(f"{kind} {mutation} {seed}")
    if kind == "trace":
        trace = stock.trace(random.choice(SOURCES))
        if mutation in OF_TRACES:
            OF_TRACES[mutation](trace, random)
        text = json.dumps(trace, indent=random.choice([None, 1, 2])).encode("utf-8", "surrogatepass")
        return OF_TEXTS[mutation](text, random) if mutation in OF_TEXTS else text
    content = stock.busy(random.choice(SAVED))
    if mutation in OF_FILES:
        return OF_FILES[mutation](content, random)
    busy = taken_apart(content)
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError, ValueError):  # at what it damaged before
        OF_BUSY[mutation](busy, random)
    return put_together(busy)


@dataclass(frozen=True)
class Outcome:
    kind: str
    mutation: str
    seed: int
    code: int
    failure: str = ""
    """In which way it is one."""
    where: str = ""
    """What was said, or the place of the mistake."""
    megabytes: int = 0
    seconds: float = 0.0


def command(kind: str, seed: int, path: Path, out: Path) -> list[str]:
    if seed % 4 == 3:
        form = ("perfetto", "csv", "json")[seed // 4 % 3]
        return ["export", str(path), "--to", form, "-o", str(out), "--quiet"]
    asked = [[], ["--json"], ["--plain-step", "25ms"]][seed % 4]
    beside = [str(path)]
    if kind == "trace" and seed % 40 == 0:  # beside the sound trace of another rank
        beside.append(str(path.parent / PEER))
    return ["explain", *beside, *asked, "--quiet"]


def path_of(kind: str, seed: int, folder: Path) -> Path:
    name = "da\x1b[31mma\nged" if seed % 20 == 1 else "damaged"
    return folder / f"{name}.{'busy' if kind == 'busy' else 'trace.json'}"


def tried(kind: str, mutation: str, seed: int, stock: Stock, folder: Path) -> Outcome:
    path, out = path_of(kind, seed, folder), folder / "out"
    path.write_bytes(damaged(kind, mutation, seed, stock))
    out.unlink(missing_ok=True)
    asked = command(kind, seed, path, out)
    forget_peak()
    began = time.process_time()
    code, stdout, stderr, fault = invoked(asked)
    seconds, megabytes = time.process_time() - began, peak() >> 20
    failure = what_failed(code, stdout, stderr, asked, out) or beyond(seconds, megabytes)
    where = fault or (of_own_fault(asked) if code == 3 else last_line(stderr)) if failure else ""
    path.unlink()
    return Outcome(kind, mutation, seed, code, failure, where, megabytes, round(seconds, 2))


def invoked(asked: Sequence[str]) -> tuple[int, str, str, str]:
    """What `keepbusy` would do in a process of its own: exit code (1: a traceback), output, the mistake's place."""
    stdout, stderr = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors="surrogatepass", write_through=True) for _ in range(2)
    )
    sys.argv = ["keepbusy", *asked]
    code, fault = 0, ""
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            runpy.run_module("keepbusy", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            code, fault = 1, place_of(traceback.extract_tb(error.__traceback__), error)
    said = [one.buffer.getvalue().decode("utf-8", "backslashreplace") for one in (stdout, stderr)]  # type: ignore[attr-defined]
    return code, said[0], said[1], fault


def place_of(stack: Sequence[traceback.FrameSummary], error: BaseException) -> str:
    ours = [frame for frame in stack if "keepbusy" in frame.filename and "benchmarks" not in frame.filename] or list(
        stack
    )
    at = (
        f"{Path(ours[-1].filename).parent.name}/{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
        if ours
        else ""
    )
    return f"{at}: {type(error).__name__}"


_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)')
_ERROR = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Warning)\b.*)$", re.MULTILINE)


def of_own_fault(asked: Sequence[str]) -> str:
    """The place of a bug, from the traceback that keepbusy shows when asked to."""
    os.environ["KEEPBUSY_DEBUG"] = "1"
    try:
        said = invoked(asked)[2]
    finally:
        del os.environ["KEEPBUSY_DEBUG"]
    frames = [match for match in _FRAME.findall(said) if f"{os.sep}keepbusy{os.sep}" in match[0]]
    errors = _ERROR.findall(said)
    at = "/".join(Path(frames[-1][0]).parts[-2:]) + f":{frames[-1][1]} {frames[-1][2]}" if frames else "?"
    return f"{at}: {re.sub(r'[0-9]+', 'N', errors[-1])[:90] if errors else '?'}"


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def what_failed(code: int, stdout: str, stderr: str, asked: Sequence[str], out: Path) -> str:
    if code not in (0, 2):
        return f"exit {code}" if code == 3 else "a traceback"
    if "Traceback (most recent" in stderr:
        return "a traceback"
    if _CONTROL.search(stdout) or _CONTROL.search(stderr):
        return "a control character"
    if "Warning:" in stderr:
        return "a warning"
    if code == 2:
        if "more memory than this machine has" in stderr:
            return "too much memory"
        return "" if re.fullmatch(r"keepbusy: [^\n]*\.\n", stderr) else "no sentence"
    if stderr:
        return "said on stderr"
    return not_sound(asked, stdout, out)


def not_sound(asked: Sequence[str], stdout: str, out: Path) -> str:
    """Whether what was written can be read by those for whom it is."""
    try:
        if asked[0] == "export" and "csv" in asked:
            with out.open(newline="", encoding="utf-8", errors="surrogatepass") as file:
                cells = (cell for row in csv.reader(file) for cell in row)
                dangerous = any(cell[:1] in "=+-@" and cell and not is_number(cell) for cell in cells)
            return "a cell of CSV that computes" if dangerous else ""
        if asked[0] == "export":
            json.loads(out.read_bytes())
        elif "--json" in asked:
            json.loads(stdout, parse_constant=refuse)
    except (ValueError, csv.Error):
        return "no JSON" if "csv" not in asked else "no CSV"
    return ""


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def beyond(seconds: float, megabytes: int) -> str:
    if megabytes << 20 > MEMORY:
        return "too much memory"
    return "too slow" if seconds > SECONDS else ""


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return re.sub(r"[0-9]+", "N", lines[-1].replace(tempfile.gettempdir(), ""))[:120] if lines else ""


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# -- many of them ------------------------------------------------------------------------------------------------------


def work(kind: str, first: int, last: int) -> None:
    """In a worker: a line of JSON before each file, and one after it."""
    invoked(["explain", str(SAVED[0])])  # so that everything is imported
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    stock = Stock()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        (Path(folder) / PEER).write_text(json.dumps(stock.trace(SOURCES[-1])))
        for number in range(first, last):
            mutation, seed = chosen(kind, number)
            print(json.dumps([mutation, seed]), flush=True)
            print(json.dumps(asdict(tried(kind, mutation, seed, stock, Path(folder)))), flush=True)


def chosen(kind: str, number: int) -> tuple[str, int]:
    """All mutations in turns."""
    return KINDS[kind][number % len(KINDS[kind])], number // len(KINDS[kind])


def batch(kind: str, first: int, last: int) -> list[Outcome]:
    """As many workers as it takes: one that dies or hangs is a failure of the file that it had."""
    outcomes: list[Outcome] = []
    while first < last:
        process = subprocess.Popen(
            [sys.executable, "-W", "always", __file__, "--worker", kind, str(first), str(last)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        begun, hung = None, False
        for line in said(process):
            if line is None:
                hung = True
                process.send_signal(signal.SIGKILL)
                break
            told = json.loads(line)
            if isinstance(told, list):
                begun = told
            else:
                outcomes.append(Outcome(**told))
                begun, first = None, first + 1
        errors = process.communicate()[1].decode(errors="replace")
        if begun:
            how = "too slow" if hung else f"the process ended ({process.returncode})"
            outcomes.append(Outcome(kind, begun[0], begun[1], process.returncode, how, last_line(errors)))
            first += 1
        elif process.returncode:
            sys.exit(f"a worker did not begin: {errors}")
    return outcomes


def said(process: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """Its lines; None once it says nothing for too long."""
    pipe, held = process.stdout.fileno() if process.stdout else -1, b""
    while True:
        if not select.select([pipe], [], [], PATIENCE)[0]:
            yield None
            return
        read = os.read(pipe, 1 << 16)
        if not read:
            return
        *lines, held = (held + read).split(b"\n")
        yield from lines


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KEEPBUSY"))}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"{'':22}{'files':>8}{'explained':>11}{'refused':>9}{'failed':>8}{'most MB':>9}{'slowest s':>11}"
    for kind, mutations in KINDS.items():
        for mutation in mutations:
            ours = [one for one in outcomes if (one.kind, one.mutation) == (kind, mutation)]
            if ours:
                fine = [sum(one.code == code and not one.failure for one in ours) for code in (0, 2)]
                failed = sum(bool(one.failure) for one in ours)
                most, slowest = max(one.megabytes for one in ours), max(one.seconds for one in ours)
                found = f"{len(ours):>8}{fine[0]:>11}{fine[1]:>9}{failed:>8}{most:>9}{slowest:>11.1f}"
                yield f"{kind + ': ' + mutation:22}{found}"
    for what, key in (("slowest", "seconds"), ("most memory", "megabytes")):
        top = sorted(outcomes, key=lambda one: -getattr(one, key))[:3]
        yield f"{what}: " + ", ".join(f"{one.kind}:{one.mutation}:{one.seed} ({getattr(one, key)})" for one in top)


def failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """By how and where; three seeds of each."""
    groups: defaultdict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        if one.failure:
            groups[one.kind, one.failure, one.where].append(one)
    for (kind, failure, where), ours in sorted(groups.items(), key=lambda item: (item[0][:2], -len(item[1]))):
        again = " ".join(f"{one.kind}:{one.mutation}:{one.seed}" for one in ours[:3])
        yield f"{len(ours):6}  {kind}: {failure}  {where}\n        {again}"


def show_again(name: str) -> int:
    kind, mutation, seed = name.split(":")
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    path = path_of(kind, int(seed), folder)
    path.write_bytes(damaged(kind, mutation, int(seed), Stock()))
    asked = command(kind, int(seed), path, folder / "out")
    os.environ["KEEPBUSY_DEBUG"] = "1"
    code, stdout, stderr, fault = invoked(asked)
    print(f"keepbusy {shlex.join(asked)}\n{stdout}{stderr}{fault}\nexit code {code}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="so many files of each kind (default 10,000)")
    today = date.today().toordinal() * 10_000
    parser.add_argument(
        "--first", type=int, default=today, help="the number of the first of them (default: by the date)"
    )
    parser.add_argument("--kind", choices=KINDS, help="only traces, or only .busy files")
    parser.add_argument("--jobs", type=int, default=2, help="so many workers (default 2)")
    parser.add_argument("--again", metavar="KIND:MUTATION:SEED", help="one of them: what is said, with tracebacks")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], *map(int, options.worker[1:]))
        return 0
    if options.again:
        return show_again(options.again)
    began = time.monotonic()
    kinds, last = [options.kind] if options.kind else list(KINDS), options.first + options.count
    parts = [(kind, first, min(first + BATCH, last)) for kind in kinds for first in range(options.first, last, BATCH)]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for part in pool.map(lambda part: batch(*part), parts):
            outcomes += part
            print(*failures(part), sep="\n", end="", flush=True)
    print(*table(outcomes), "", *failures(outcomes), sep="\n")
    failed = sum(bool(one.failure) for one in outcomes)
    numbers = " and ".join(f"{sum(one.kind == kind for one in outcomes):,} {NOUNS[kind]}" for kind in kinds)
    print(f"\n{numbers}: {failed or 'none'} failed (limits: 1 GB and 20 s of the processor a file).")
    same = f"--count {options.count} --first {options.first}" + (f" --kind {options.kind}" if options.kind else "")
    print(f"{time.monotonic() - began:.0f} s; the same again: hostile.py {same}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT / "src"))
    sys.exit(main())
