"""What the library wrote: rows of driver calls, what they refer to by number, and which commands they issued."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepbusy.program.loops.log_gaps import LogGaps
from keepbusy.timeline.model import STAGED_BYTES

CLOCK = "clock"
"""In the folder of a process of another host: nanoseconds by which its clock is behind."""
ROW = np.dtype(
    [
        *(("begin", "u8"), ("value", "u8"), ("took", "u4"), ("call", "u4"), ("stack", "u4")),
        *(("stream", "u2"), ("thread", "u1"), ("flags", "u1")),
    ]
)
"""`struct row` of the library."""
IN_UNITS_OF_1024 = np.uint32(1 << 31)
"""A bit of `took`: it counts units of 1024 ticks, not ticks."""


THINNED, RESUMED = "thinned", "resumed"
"""Kinds of rows that stand where calls began to leave no row, and where they left one again."""


class CallFlag(IntFlag):
    """What else is known of a call."""

    FAILED = 1
    CAPTURED = 2
    """Recorded into a graph: nothing ran."""
    PAGEABLE = 4
    BLOCKING = 8
    GRAPH = 16
    """Launches a graph, which its value names."""


@dataclass(frozen=True)
class DriverCall:
    """What rows of the same function and shape have in common."""

    kind: str
    function: int = 0
    """A kernel's handle, a communicator's, or that of the graph that was instantiated."""
    name: str = ""
    """Of the kernel, as the compiler mangled it."""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0

    @property
    def shape(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """As the profiler tells commands apart, which knows copies of one kind."""
        return self.kind if self.kind in ("launch", "set_memory") else "copy", self.grid, self.block


@dataclass(frozen=True)
class StackFrame:
    """A call in a Python stack: the line that it has reached."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class LoggedStream:
    """Handle 0 is the default stream of its context."""

    handle: int
    context: int


@dataclass
class DriverLog:
    """All calls of the driver that a process made."""

    rows: NDArray[Any]
    """In the order of their begin."""
    begin: NDArray[np.int64]
    """Of each row, in nanoseconds of `time.monotonic_ns`."""
    took: NDArray[np.int64]
    """Nanoseconds."""
    calls: dict[int, DriverCall] = field(default_factory=dict)
    stacks: dict[int, tuple[StackFrame, ...]] = field(default_factory=dict)
    """Innermost frame first."""
    streams: dict[int, LoggedStream] = field(default_factory=dict)
    threads: list[dict[str, int]] = field(default_factory=list)
    """`thread`, its `id` for the system, and `since` when the number means it."""
    communicators: list[dict[str, int]] = field(default_factory=list)

    def take(self, kept: NDArray[np.bool_]) -> DriverLog:
        """With these rows alone."""
        return replace(self, rows=self.rows[kept], begin=self.begin[kept], took=self.took[kept])

    def kinds(self) -> NDArray[np.str_]:
        """Of each row."""
        kinds = np.array(["", *(self.calls[number].kind for number in range(1, len(self.calls) + 1))])
        return kinds[self.rows["call"]]


def gaps_of(log: DriverLog, ended: int) -> LogGaps:
    """`ended`: when the run did; 0 where it is not known, and it is told as far as it was recorded."""
    kinds = log.kinds()
    begins, ends = log.begin[kinds == THINNED].tolist(), log.begin[kinds == RESUMED].tolist()
    ends = [*(end for end in ends if begins and end > begins[0]), *filter(None, [ended])]
    return LogGaps(begins[: len(ends)], ends[: len(begins)])


def read_log(folder: Path) -> DriverLog:
    """Also of a process that was killed: a row or a line that was being written is left out."""
    data = (folder / "rows").read_bytes()
    rows = np.frombuffer(data, ROW, count=len(data) // ROW.itemsize)
    rows = np.sort(rows[rows["begin"] != 0], order="begin", kind="stable")
    took = rows["took"].astype(np.int64)
    took = np.where(rows["took"] & IN_UNITS_OF_1024, (took & 0x7FFFFFFF) << 10, took)
    log = DriverLog(rows, rows["begin"].astype(np.int64), took)
    clock = []
    for line in (folder / "names").read_text(errors="surrogatepass").splitlines():
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            break
        match said:
            case {"ticks": ticks, "nanoseconds": nanoseconds}:
                clock.append((ticks, nanoseconds))
            case {"call": number, "kind": kind}:
                rest = {name: said[name] for name in said.keys() - {"call", "kind"}}
                rest = {name: tuple(value) if isinstance(value, list) else value for name, value in rest.items()}
                log.calls[number] = DriverCall(kind, **rest)
            case {"stack": number, "frames": frames}:
                log.stacks[number] = tuple(StackFrame(*frame) for frame in frames)
            case {"stream": number, "handle": handle, "context": context}:
                log.streams[number] = LoggedStream(handle, context)
            case {"thread": _}:
                log.threads.append(said)
            case {"communicator": _}:
                log.communicators.append(said)
    log.begin, log.took = _nanoseconds(log, clock or [(0, 0)])
    return log


def _nanoseconds(log: DriverLog, clock: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ticks, nanoseconds = (np.array(column, np.int64) for column in zip(*clock, strict=True))
    passed = ticks[-1] - ticks[0]
    rate = (nanoseconds[-1] - nanoseconds[0]) / passed if passed else 1.0
    after = np.clip(np.searchsorted(ticks, log.begin, side="right") - 1, 0, None)
    begin = nanoseconds[after] + ((log.begin - ticks[after]) * rate).astype(np.int64)
    return begin, (log.took * rate).astype(np.int64)


def different_rows(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The different rows of these columns, in order, and of each row which of them it is. One number stands for a row:
    to sort rows themselves takes ten times as long."""
    columns = tuple(column.astype(np.int64) for column in columns)
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        rank = column - column.min(initial=0)
        if float(number.max(initial=0) + 1) * float(rank.max(initial=0) + 1) >= 2.0**62:
            number, rank = (np.unique(each, return_inverse=True)[1].astype(np.int64) for each in (number, rank))
        number = number * (rank.max(initial=0) + 1) + rank
    count, which = np.unique(number, return_inverse=True)
    first = np.zeros(len(count), np.intp)
    first[which[::-1]] = np.arange(len(number))[::-1]
    return np.stack([column[first] for column in columns], axis=1), which.reshape(-1)


# Commands: what ran on the GPU, also within graphs

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
COMMANDS = ("launch", "copy_to_gpu", "copy_to_host", "copy_on_gpu", "copy", "set_memory")


def device_commands(log: DriverLog) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two columns of row numbers, in issue order: the call that issued a command, and the call that describes it.

    They differ for graphs: a launch issues all that was called while the graph was captured.
    """
    kinds = log.kinds()
    flags = log.rows["flags"]
    succeeded = flags & CallFlag.FAILED == 0
    commands = np.isin(kinds, COMMANDS) & succeeded
    contents = _graph_contents(log, kinds, commands & (flags & CallFlag.CAPTURED != 0))
    issued = commands & (flags & CallFlag.CAPTURED == 0)
    launches = (kinds == "graph_launch") & succeeded & (flags & CallFlag.CAPTURED == 0)
    counts = issued.astype(np.int64)
    for row in np.flatnonzero(launches).tolist():
        counts[row] = len(contents.get(row, ()))
    issuers = np.repeat(np.arange(len(counts)), counts)
    described = issuers.copy()
    for row in np.flatnonzero(launches & (counts > 0)).tolist():
        begins = np.searchsorted(issuers, row)
        described[begins : begins + counts[row]] = contents[row]
    return issuers, described


def _graph_contents(log: DriverLog, kinds: NDArray[np.str_], captured: NDArray[np.bool_]) -> dict[int, list[int]]:
    """Of each row that launches a graph: the rows of its commands."""
    open_captures: dict[int, list[int]] = {}  # by the stream where it began
    graphs: dict[int, list[int]] = {}
    executables: dict[int, list[int]] = {}
    contents = {}
    of_interest = captured | np.isin(kinds, ("capture_begin", "capture_end", "graph_create", "graph_launch"))
    for row in np.flatnonzero(of_interest).tolist():
        stream, value = int(log.rows["stream"][row]), int(log.rows["value"][row])
        match kinds[row]:
            case "capture_begin":
                open_captures[stream] = []
            case "capture_end":
                graphs[value] = open_captures.pop(stream, [])
            case "graph_create":
                executables[value] = graphs.get(log.calls[int(log.rows["call"][row])].function, [])
            case "graph_launch" if not captured[row]:
                contents[row] = executables.get(value, [])
            case _ if open_captures:
                began = stream if stream in open_captures else [*open_captures][-1]  # other streams join a capture
                open_captures[began].append(row)
    return contents


def waited_copies(log: DriverLog, kinds: NDArray[np.str_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each row, whether the call waits for a copy to the host or between the two; and whether the driver carries a
    copy to the GPU piece by piece, and returns with the last one."""
    flags = log.rows["flags"]
    waited_for = np.isin(kinds, ("copy_to_host", "copy")) & (flags & int(CallFlag.PAGEABLE | CallFlag.BLOCKING) != 0)
    through_host = (kinds == "copy_to_gpu") & (flags & int(CallFlag.PAGEABLE) != 0)
    return waited_for, through_host & (log.rows["value"] > STAGED_BYTES)


def collective_of(log: DriverLog) -> NDArray[np.int64]:
    """Of each row that launches NCCL's kernel, the call of NCCL that did so; -1 for all others.

    The launch lies within the call, or within the end of its group, of which it is the first.
    """
    kinds, thread = log.kinds(), log.rows["thread"]
    found = np.full(len(log.rows), -1, np.int64)
    ended = log.begin + log.took
    in_group = dict[int, int]()  # by thread: the first call of its group
    for row in np.flatnonzero(np.isin(kinds, (*COLLECTIVES, "group_start", "group_end"))).tolist():
        caller, call = int(thread[row]), row
        if kinds[row] == "group_start":
            in_group[caller] = -1
            continue
        if kinds[row] == "group_end":
            call = in_group.pop(caller, -1)
        elif caller in in_group:
            in_group[caller] = row if in_group[caller] < 0 else in_group[caller]
            continue
        inside = np.arange(row, np.searchsorted(log.begin, ended[row], side="right"))
        inside = inside[(kinds[inside] == "launch") & (thread[inside] == caller)]
        found[inside] = call
    return found
