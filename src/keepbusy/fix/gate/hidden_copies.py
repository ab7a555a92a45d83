"""How much of the copies ran beside the computation."""

from __future__ import annotations

import numpy as np

from keepbusy.timeline.model import Ints, Kind, Timeline


def hidden_share(timeline: Timeline, since: int = 0) -> float | None:
    """The share of the time of copies in which kernels ran as well; None where nothing was copied."""
    spans = timeline.spans
    later = spans.start >= since
    copies = _union(spans.start[later & (spans.kind == Kind.COPY)], spans.end[later & (spans.kind == Kind.COPY)])
    kernels = _union(spans.start[spans.kind == Kind.KERNEL], spans.end[spans.kind == Kind.KERNEL])
    total = int((copies[1] - copies[0]).sum())
    if not total:
        return None
    both = sum(
        int(np.maximum(np.minimum(kernels[1], end) - np.maximum(kernels[0], start), 0).sum())
        for start, end in zip(*copies, strict=True)
    )
    return both / total


def _union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Stretches that do not overlap, in order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(order) else ends
    first = np.concatenate([[True], starts[1:] > ends[:-1]]) if len(starts) else np.zeros(0, bool)
    last = np.append(np.flatnonzero(first)[1:] - 1, len(starts) - 1) if len(starts) else np.zeros(0, int)
    return starts[first], ends[last]
