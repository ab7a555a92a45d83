"""Profiler files -> `Timeline`: PyTorch's own traces, one file a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepbusy.timeline.model import Timeline


def read(paths: Sequence[str | Path], on_progress: Callable[[str, float], Any] | None = None) -> Timeline:
    """All ranks of one run, from the files that their profilers wrote."""
    from keepbusy.timeline.ranks import merge
    from keepbusy.traces.kineto import timeline_of
    from keepbusy.traces.rank_of import ranks_of
    from keepbusy.traces.trace_file import read_traces

    traces = read_traces(paths, on_progress)
    ranks = ranks_of(traces)
    ordered = sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0])
    return merge([timeline_of(trace, rank) for rank, trace in ordered])
