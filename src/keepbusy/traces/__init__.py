"""Profiler files -> `Timeline`: PyTorch's own traces, one file per rank. Of very many ranks a few are kept whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepbusy.timeline.model import Timeline

if TYPE_CHECKING:
    from keepbusy.traces.trace_file import EachOf

READ = 0.7
"""The share of the time that reading takes. Finding what released what takes the rest."""
WHOLE = 16
"""Up to so many ranks are all kept whole: two hosts of eight. Of more, only a few are."""


def read(
    paths: Sequence[str | Path],
    on_progress: Callable[[str, float], Any] | None = None,
    each: EachOf | None = None,
) -> Timeline:
    """All ranks of one run, from the files of their profilers. Of more than 16 a few are kept whole, and figures
    of all are in `facts.cluster`. `each` reads very many files, if not one process per core does."""
    from keepbusy.timeline.files import BadInput
    from keepbusy.timeline.ranks import merge
    from keepbusy.traces.rank_timeline import timeline_of
    from keepbusy.traces.trace_file import ranks_of, read_traces

    if isinstance(paths, str | bytes | PathLike):
        raise BadInput(f"{paths!r} is one path; read takes a list of them: read([path]).")
    paths = list(paths)
    if not paths or not all(isinstance(path, str | PathLike) for path in paths):
        raise BadInput(f"read was given {paths!r:.80}; give it a list of paths, one trace of each rank.")
    say = on_progress or (lambda _what, _share: None)
    if len(paths) > WHOLE:
        from keepbusy.traces.many_ranks import chosen

        paths, cluster, notes = chosen([os.fspath(path) for path in paths], say, each)
        timeline = read(paths)
        return timeline.change_facts(cluster=cluster, notes=(*notes, *timeline.facts.notes))
    traces = read_traces(paths, lambda what, share: say(what, READ * share))
    ranks = ranks_of(traces)
    timelines: list[Timeline] = []
    for rank, trace in sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0]):
        say("finding what released what", READ + (1 - READ) * len(timelines) / len(traces))
        timelines.append(timeline_of(trace, rank).change_facts(traced=True))
    return merge(timelines)
