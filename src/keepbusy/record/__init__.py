"""Recordings -> `Timeline`: PyTorch's profiler traces, one file a rank, and programs looked at while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.record.session import Session

__all__ = ["read", "record"]


def read(paths: Sequence[str | Path], on_progress: Callable[[str, float], Any] | None = None) -> Timeline:
    """All ranks of one run, from the files that their profilers wrote."""
    from keepbusy.record.files import read_traces
    from keepbusy.record.kineto import timeline_of
    from keepbusy.record.rank_of import ranks_of
    from keepbusy.timeline.ranks import merge

    traces = read_traces(paths, on_progress)
    ranks = ranks_of(traces)
    ordered = sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0])
    return merge([timeline_of(trace, rank) for rank, trace in ordered])


def record(after: int | None = None) -> Session:
    """Record what runs in a `with` block on a real GPU, and explain it afterwards.

    `after`: how many steps to let pass before looking closely; without it eight, and until they are alike.
    """
    from keepbusy.record.session import Session

    return Session(after)
