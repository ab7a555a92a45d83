"""Traces to read: real ones, cut to a few events, and ones written event by event."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from keepbusy.traces.json_events import Batches
from keepbusy.traces.trace_file import Trace, read_trace

Read: TypeAlias = Callable[..., Trace]

TRACES = Path(__file__).parents[1] / "snapshots" / "traces"
_BETWEEN = b"\n  },\n  {"


@functools.cache
def real(name: str) -> bytes:
    """The JSON of a trace that PyTorch wrote on an H200."""
    return gzip.decompress((TRACES / f"{name}.trace.json.gz").read_bytes())


@functools.cache
def small(name: str, commands: int = 40) -> bytes:
    """The same cut to some commands with their calls, and some of each other kind of row, as PyTorch wrote them."""
    head, rows, tail = parts(real(name))
    events = [json.loads(b"{" + row + b"}") for row in rows]
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    device = device[:: -(-len(device) // commands)]
    kept = {event["args"]["correlation"] for event in device}
    counts: dict[str, int] = {}
    chosen = [row for row, event in zip(rows, events, strict=True) if _wanted(event, kept, counts)]
    return head + _BETWEEN.join(chosen) + tail


def parts(text: bytes) -> tuple[bytes, list[bytes], bytes]:
    """What stands before the events, their texts without braces, and what stands behind them, in Kineto's layout."""
    begin = text.index(b'"traceEvents": [\n  {') + len(b'"traceEvents": [\n  {')
    end = text.rindex(b"\n  }\n  ],")
    return text[:begin], text[begin:end].split(_BETWEEN), text[end:]


def _wanted(event: dict[str, Any], correlations: set[int], counts: dict[str, int]) -> bool:
    category = event.get("cat", event["ph"])
    if event.get("args", {}).get("correlation") in correlations or category == "user_annotation":
        return True
    counts[category] = counts.get(category, 0) + 1
    most = {"cpu_op": 20, "python_function": 15, "ac2g": 4, "fwdbwd": 4, "M": 12}
    return counts[category] <= most.get(category, 2)


def event(**fields: Any) -> dict[str, Any]:
    """A kernel of 1 µs, but for what is given."""
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 1.0, "args": {}} | fields


def trace_of(*events: Any, **beside: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, **beside, "traceEvents": list(events)}).encode()


NCCL = {
    "Collective name": "allreduce",
    "In msg nelems": 8,
    "Out msg nelems": 16,
    "Group size": 2,
    "dtype": "Float",
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
    "Process Group Ranks": "[0, 3]",
}
"""What an NCCL kernel says of itself."""


def beside(path: str | Path) -> dict[str, Any]:
    """What stands in a trace's file beside its events."""
    batches = Batches(str(path))
    for _ in batches:
        pass
    return batches.facts()


def reader(folder: Path) -> Read:
    """Writes a trace into the folder and reads it."""

    def read(content: bytes, name: str = "a.trace.json") -> Trace:
        path = folder / name
        path.write_bytes(content)
        return read_trace(path)

    return read
