"""Kineto's rows, written by hand: a few lines a trace, in microseconds, read by the real reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from traces import event, trace_of

from keepbusy.timeline.model import Kind, LinkKind, Timeline
from keepbusy.timeline.replay import replay
from keepbusy.traces.rank_timeline import timeline_of
from keepbusy.traces.trace_file import read_trace

US = 1_000
MAIN, BACKWARD = 100, 101
Row: TypeAlias = dict[str, Any]
Show: TypeAlias = Callable[..., Timeline]


def showing(folder: Path) -> Show:
    """Reads such rows as one rank's trace, and holds the outcome against its own replay."""

    def written_and_read(*rows: Any, **beside: Any) -> Timeline:
        path = folder / "rank0.trace.json"
        path.write_bytes(trace_of(*flat(rows), **beside))
        timeline = timeline_of(read_trace(path))
        assert (timeline.links.source < timeline.links.target).all()
        np.testing.assert_array_equal(replay(timeline).spans.end, timeline.spans.end)
        return timeline

    return written_and_read


def flat(rows: Any) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, dict):
            yield row
        else:
            yield from flat(row)


def host(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Row:
    return event(cat=cat, name=name, pid=MAIN, tid=tid, ts=ts, dur=dur, args=args)


def call(name: str, ts: float, dur: float, correlation: int, tid: int = MAIN, cat: str = "cuda_runtime") -> Row:
    return host(cat, name, ts, dur, tid, correlation=correlation)


def command(ts: float, dur: float, correlation: int, stream: int = 7, **fields: Any) -> Row:
    args = {"device": 0, "stream": stream, "correlation": correlation} | fields.pop("args", {})
    return event(pid=0, tid=stream, ts=ts, dur=dur, args=args, **fields)


def launched(ts: float, start: float, dur: float, correlation: int, stream: int = 7, tid: int = MAIN) -> list[Row]:
    """A launch of 5 µs and its kernel."""
    return [call("cudaLaunchKernel", ts, 5, correlation, tid), command(start, dur, correlation, stream)]


def copied(ts: float, lasts: float, start: float, dur: float, correlation: int, name: str, size: int) -> list[Row]:
    args = {"bytes": size}
    row = command(start, dur, correlation, cat="gpu_memcpy", name=f"Memcpy {name}", args=args)
    return [call("cudaMemcpyAsync", ts, lasts, correlation), row]


def frame(name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Row:
    return host("cpu_op" if "::" in name else "python_function", name, ts, dur, tid, **args)


def mark(number: int, ts: float, dur: float) -> Row:
    return host("user_annotation", f"ProfilerStep#{number}", ts, dur)


def links_of(timeline: Timeline, kind: LinkKind) -> list[tuple[str, int, str, int]]:
    """Name and start of the source and of the target."""
    pairs = timeline.links.take(np.flatnonzero(timeline.links.kind == kind))
    spans = [(timeline[source], timeline[target]) for source, target in zip(pairs.source, pairs.target, strict=True)]
    return sorted((one.name, one.start // US, other.name, other.start // US) for one, other in spans)


def rows_of(timeline: Timeline, kind: Kind) -> list[tuple[str, int, int]]:
    """Name, start and end, in the order of issue."""
    rows = np.flatnonzero(timeline.spans.kind == kind)
    return [(timeline[row].name, timeline[row].start // US, timeline[row].end // US) for row in rows.tolist()]
