"""What the library wrote: rows of driver calls, and what they refer to by number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype(
    [
        *(("begin", "u8"), ("value", "u8"), ("took", "u4"), ("call", "u4"), ("stack", "u4")),
        *(("stream", "u2"), ("thread", "u1"), ("flags", "u1")),
    ]
)
"""`struct row` of the library."""
IN_UNITS_OF_1024 = np.uint32(1 << 31)
"""A bit of `took`: it counts units of 1024 ticks, not ticks."""


class CallFlag(IntFlag):
    """What else is known of a call."""

    FAILED = 1
    CAPTURED = 2
    """Recorded into a graph: nothing ran."""
    PAGEABLE = 4
    BLOCKING = 8


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

    def kinds(self) -> NDArray[np.str_]:
        """Of each row."""
        kinds = np.array(["", *(self.calls[number].kind for number in range(1, len(self.calls) + 1))])
        return kinds[self.rows["call"]]


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
        if "ticks" in said:
            clock.append((said["ticks"], said["nanoseconds"]))
        else:
            _take(log, said)
    log.begin, log.took = _nanoseconds(log, clock or [(0, 0)])
    return log


def _nanoseconds(log: DriverLog, clock: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ticks, nanoseconds = (np.array(column, np.int64) for column in zip(*clock, strict=True))
    passed = ticks[-1] - ticks[0]
    rate = (nanoseconds[-1] - nanoseconds[0]) / passed if passed else 1.0
    after = np.clip(np.searchsorted(ticks, log.begin, side="right") - 1, 0, None)
    begin = nanoseconds[after] + ((log.begin - ticks[after]) * rate).astype(np.int64)
    return begin, (log.took * rate).astype(np.int64)


def _take(log: DriverLog, line: dict[str, Any]) -> None:
    match line:
        case {"call": number, "kind": kind}:
            rest: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in line.items()
            }
            log.calls[number] = DriverCall(kind, **{name: rest[name] for name in rest.keys() - {"call", "kind"}})
        case {"stack": number, "frames": frames}:
            log.stacks[number] = tuple(StackFrame(*frame) for frame in frames)
        case {"stream": number, "handle": handle, "context": context}:
            log.streams[number] = LoggedStream(handle, context)
        case {"thread": _}:
            log.threads.append(line)
        case {"communicator": _}:
            log.communicators.append(line)
