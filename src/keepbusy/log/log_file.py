"""Reads what the library wrote: rows of driver calls, what they refer to by number, and the commands they issued."""

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
"""A file in the folder of a process of another host: nanoseconds by which its clock is behind."""
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
"""Kinds of rows that mark where calls stop leaving rows, and where they leave rows again."""


class CallFlag(IntFlag):
    """Flags of a call."""

    FAILED = 1
    CAPTURED = 2
    """Recorded into a graph: nothing ran."""
    PAGEABLE = 4
    BLOCKING = 8
    GRAPH = 16
    """Launches a graph, which its value names."""


@dataclass(frozen=True)
class DriverCall:
    """What rows with the same function and shape share."""

    kind: str
    function: int = 0
    """The handle of a kernel, a communicator, or the graph that was instantiated."""
    name: str = ""
    """The mangled name of a kernel."""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0

    @property
    def shape(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The shape by which the profiler's events are matched; the profiler knows only one kind of copy."""
        return self.kind if self.kind in ("launch", "set_memory") else "copy", self.grid, self.block


@dataclass(frozen=True)
class StackFrame:
    """A frame of a Python stack, with the line it has reached."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class LoggedStream:
    """A stream of a context; handle 0 is the context's default stream."""

    handle: int
    context: int


@dataclass
class DriverLog:
    """All calls of the driver that a process made."""

    rows: NDArray[Any]
    """Sorted by their begin."""
    begin: NDArray[np.int64]
    """When each call began, in nanoseconds of `time.monotonic_ns`."""
    took: NDArray[np.int64]
    """How long each call took, in nanoseconds."""
    calls: dict[int, DriverCall] = field(default_factory=dict)
    stacks: dict[int, tuple[StackFrame, ...]] = field(default_factory=dict)
    """Innermost frame first."""
    streams: dict[int, LoggedStream] = field(default_factory=dict)
    threads: list[dict[str, int]] = field(default_factory=list)
    """`thread` is the number in rows, `id` the system's, `since` the time from which the number means this thread."""
    communicators: list[dict[str, int]] = field(default_factory=list)

    def take(self, mask: NDArray[np.bool_]) -> DriverLog:
        """The log with these rows alone."""
        return replace(self, rows=self.rows[mask], begin=self.begin[mask], took=self.took[mask])

    def kinds(self) -> NDArray[np.str_]:
        """The kind of each row's call."""
        kinds = np.array(["", *(self.calls[number].kind for number in range(1, len(self.calls) + 1))])
        return kinds[self.rows["call"]]


def gaps_of(log: DriverLog, ended: int) -> LogGaps:
    """The gaps of the log. `ended` is the end of the run; if it is 0 (unknown), a last open gap does not count."""
    kinds = log.kinds()
    begins, ends = log.begin[kinds == THINNED].tolist(), log.begin[kinds == RESUMED].tolist()
    ends = [*(end for end in ends if begins and end > begins[0]), *filter(None, [ended])]
    return LogGaps(begins[: len(ends)], ends[: len(begins)])


def read_log(folder: Path) -> DriverLog:
    """Read the log, even of a process that was killed: a row or a line that is not complete is left out."""
    data = (folder / "rows").read_bytes()
    rows = np.frombuffer(data, ROW, count=len(data) // ROW.itemsize)
    rows = np.sort(rows[rows["begin"] != 0], order="begin", kind="stable")
    took = rows["took"].astype(np.int64)
    took = np.where(rows["took"] & IN_UNITS_OF_1024, (took & 0x7FFFFFFF) << 10, took)
    log = DriverLog(rows, rows["begin"].astype(np.int64), took)
    clock = []
    for line in (folder / "names").read_text(errors="surrogatepass").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        match entry:
            case {"ticks": ticks, "nanoseconds": nanoseconds}:
                clock.append((ticks, nanoseconds))
            case {"call": number, "kind": kind}:
                rest = {name: entry[name] for name in entry.keys() - {"call", "kind"}}
                rest = {name: tuple(value) if isinstance(value, list) else value for name, value in rest.items()}
                log.calls[number] = DriverCall(kind, **rest)
            case {"stack": number, "frames": frames}:
                log.stacks[number] = tuple(StackFrame(*frame) for frame in frames)
            case {"stream": number, "handle": handle, "context": context}:
                log.streams[number] = LoggedStream(handle, context)
            case {"thread": _}:
                log.threads.append(entry)
            case {"communicator": _}:
                log.communicators.append(entry)
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
    """The distinct rows of these columns, sorted, and for each row the index of its distinct row. Rows are sorted as
    single numbers, which is ten times as fast as sorting the rows themselves."""
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


# Commands: what runs on the GPU, also within graphs

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
COMMANDS = ("launch", "copy_to_gpu", "copy_to_host", "copy_on_gpu", "copy", "set_memory")


def device_commands(log: DriverLog) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two columns of row numbers, in issue order: the call that issued a command, and the call that describes it.

    They differ for graphs: the launch of a graph issues all commands that were called while it was captured.
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
        first = np.searchsorted(issuers, row)
        described[first : first + counts[row]] = contents[row]
    return issuers, described


def _graph_contents(log: DriverLog, kinds: NDArray[np.str_], captured: NDArray[np.bool_]) -> dict[int, list[int]]:
    """For each row that launches a graph, the rows of the graph's commands."""
    open_captures: dict[int, list[int]] = {}  # by the stream of `capture_begin`
    graphs: dict[int, list[int]] = {}
    executables: dict[int, list[int]] = {}
    contents = {}
    matters = captured | np.isin(kinds, ("capture_begin", "capture_end", "graph_create", "graph_launch"))
    for row in np.flatnonzero(matters).tolist():
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
                capture = stream if stream in open_captures else [*open_captures][-1]  # other streams join a capture
                open_captures[capture].append(row)
    return contents


def waited_copies(log: DriverLog, kinds: NDArray[np.str_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two masks of rows: calls that wait for their copy to the host, and copies to the GPU that the driver carries in
    pieces, so that the call returns with the last one."""
    flags = log.rows["flags"]
    waited_for = np.isin(kinds, ("copy_to_host", "copy")) & (flags & int(CallFlag.PAGEABLE | CallFlag.BLOCKING) != 0)
    through_host = (kinds == "copy_to_gpu") & (flags & int(CallFlag.PAGEABLE) != 0)
    return waited_for, through_host & (log.rows["value"] > STAGED_BYTES)


def collective_of(log: DriverLog) -> NDArray[np.int64]:
    """For each row that launches a kernel of NCCL, the row of NCCL's call; -1 for all others.

    The launch is made within the call, or within the end of its group, and then belongs to the group's first call.
    """
    kinds, thread = log.kinds(), log.rows["thread"]
    call_of_row = np.full(len(log.rows), -1, np.int64)
    ended = log.begin + log.took
    in_group = dict[int, int]()  # the first call of each thread's open group
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
        call_of_row[inside] = call
    return call_of_row
