"""What recording cost the host, by what was recorded. The explanation scales it; see docs/explanation/distortion.md."""

from __future__ import annotations

import numpy as np

from keepbusy.record.events import Category, Trace
from keepbusy.timeline.model import Ints, Kind, Spans

COST = {
    Category.OPERATOR: 1_200,
    Category.PYTHON: 800,
    Category.RUNTIME: 2_200,
    Category.DRIVER: 2_200,
    Category.LINE: 800,
}
"""Nanoseconds that one recorded event adds, measured on a slow host; only the proportions matter."""


def cost_of_recording(trace: Trace, spans: Spans, thread_of_lane: dict[int, int]) -> Ints:
    """Half for every event that begins within a span and half for every one that ends there."""
    events = trace.events
    cost = np.zeros(len(spans), np.float64)
    for lane, thread in thread_of_lane.items():
        mine = np.flatnonzero(spans.lane == lane)
        here = events.thread == thread
        for category, each in COST.items():
            rows = here & (events.category == category)
            for times in (np.sort(events.start[rows]), np.sort(events.end[rows])):
                count = np.searchsorted(times, spans.end[mine]) - np.searchsorted(times, spans.start[mine])
                cost[mine] += count * each / 2
    recorder = spans.kind == Kind.RECORDING
    return np.where(recorder, spans.end - spans.start, cost).astype(np.int64)
