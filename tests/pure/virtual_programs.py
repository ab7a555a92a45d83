"""Small programs on a virtual device with round figures: what the tests of the clock begin with."""

from __future__ import annotations

from dataclasses import replace

from keepbusy.timeline.model import Kind, Timeline
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.costs.device import CopyCosts, QueueLimits, read

US = 1_000
_H200 = read("h200")
ROUND = replace(
    _H200,
    name="round",
    host=replace(
        _H200.host,
        operator=5,
        backward=3,
        launch=10,
        event=1,
        sync=4,
        collective=10,
        graph=20,
        graph_node=1,
        graph_made=40,
        graph_node_made=5,
    ),
    queue=QueueLimits(pending=4, latency=20, gap=2, graph_gap=1),
    copies=CopyCosts(
        latency=5, call=10, pinned=10.0, to_device=1.0, to_host=2.0, to_fresh=0.5, mapped=500, staged=100, staging=5.0
    ),
    memory=replace(_H200.memory, size=1 << 30, malloc=70, free=60),
)
"""Nanoseconds that can be added up in the head."""


def clock(**changes: object) -> Clock:
    return Clock(replace(ROUND, **changes))  # type: ignore[arg-type]


def operator(on: Clock, stream: int, work: int, name: str = "aten::mul", place: int = 0) -> None:
    on.begin(name, place)
    on.launch(stream, [("kernel", work)])
    on.end()


def rows(timeline: Timeline) -> list[tuple[str, str, int, int]]:
    """Lane, kind, start and end of every row."""
    short = {lane: "host" if lane.device is None else lane.name for lane in timeline.lanes}
    return [
        (short[timeline[row].lane], Kind(timeline[row].kind).name.lower(), timeline[row].start, timeline[row].end)
        for row in range(len(timeline))
    ]
