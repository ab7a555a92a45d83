"""Profiler files -> `Timeline`: PyTorch's own traces, one file a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from keepbusy.timeline.model import Timeline

READ = 0.7
"""Finding out what released what takes the rest of the time."""


def read(paths: Sequence[str | Path], on_progress: Callable[[str, float], Any] | None = None) -> Timeline:
    """All ranks of one run, from the files that their profilers wrote."""
    from keepbusy.timeline.errors import BadInput
    from keepbusy.timeline.ranks import merge
    from keepbusy.traces.kineto import timeline_of
    from keepbusy.traces.trace_facts import ranks_of
    from keepbusy.traces.trace_file import read_traces

    if isinstance(paths, str | bytes | PathLike):
        raise BadInput(f"{paths!r} is one path; read takes a list of them: read([path]).")
    paths = list(paths)
    if not paths or not all(isinstance(path, str | PathLike) for path in paths):
        raise BadInput(f"read was given {paths!r:.80}; give it a list of paths, one trace of each rank.")
    say = on_progress or (lambda _what, _share: None)
    traces = read_traces(paths, lambda what, share: say(what, READ * share))
    ranks = ranks_of(traces)
    timelines: list[Timeline] = []
    for rank, trace in sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0]):
        say("finding what released what", READ + (1 - READ) * len(timelines) / len(traces))
        timelines.append(timeline_of(trace, rank))
    return merge(timelines)
