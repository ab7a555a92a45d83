"""One rank of very many: what is kept of its trace when the trace itself is not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from keepbusy.timeline.model import Frames, Kind, Links, MemoryUse, Timeline
from keepbusy.timeline.replay import pace
from keepbusy.timeline.steps import sample, whole_steps
from keepbusy.traces.event_columns import DeviceEvents, Trace
from keepbusy.traces.kineto import timeline_of
from keepbusy.traces.kineto_names import RANK, WORLD_SIZE
from keepbusy.traces.trace_facts import ranks_of
from keepbusy.traces.trace_file import read_trace

_OF_HANDLER = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json")
"""As `torch.profiler.tensorboard_trace_handler` names its files: host, process and time."""


@dataclass(frozen=True, eq=False)
class RankDigest:
    """Times are nanoseconds a step."""

    file: Trace  # without its events but the first and the last: who it is
    collectives: Timeline  # without anything else
    host: str  # "" where nothing tells
    steps: int
    step: int  # as recorded
    own: int  # had it never to wait for a peer
    computing: int
    kind: tuple[tuple[str, int, int], ...]  # of each collective its kernel, its bytes, and how often a step


def digest(path: str) -> RankDigest:
    """Read a rank's trace, and keep what tells it from the others."""
    file = read_trace(path)
    timeline = timeline_of(file, ranks_of([file])[0])
    whole = sample(whole_steps(timeline))
    spans, steps = whole.spans, len(whole.marks_of(whole.ranks[0]))
    meets = spans.kind == Kind.COLLECTIVE
    alone = whole.change_spans(work=np.where(meets, 0, spans.work))
    computes = whole.on_device & ~meets
    met = Counter(zip(spans.name[meets].tolist(), spans.size[meets].tolist(), strict=True))
    return RankDigest(
        file=_outline(file),
        collectives=_collectives(timeline),
        host=_host(file),
        steps=steps,
        step=round(pace(whole)),
        own=round(pace(alone)),
        computing=int(spans.work[computes].sum()) // steps,
        kind=tuple(sorted((whole.names[name], size, round(often / steps)) for (name, size), often in met.items())),
    )


def _outline(file: Trace) -> Trace:
    """Each trace lists the ranks of all groups: of a thousand ranks that would be a million."""
    said, facts = file.facts.get("distributedInfo"), {"deviceProperties": file.facts.get("deviceProperties")}
    if isinstance(said, dict):
        facts["distributedInfo"] = {name: said[name] for name in (RANK, WORLD_SIZE) if name in said}
    extent = [int(file.events.start.argmin()), int(file.events.end.argmax())]
    events, of_device = file.events.take(np.array(extent)), DeviceEvents.of(0)
    file = replace(file, events=events, device_events=of_device, names=(), threads=(), collectives=())
    return replace(file, memory=MemoryUse.of(0), facts=facts)


def _collectives(timeline: Timeline) -> Timeline:
    spans, lanes = timeline.spans, timeline.lanes
    rows = np.flatnonzero(spans.kind == Kind.COLLECTIVE)
    names, name = np.unique(spans.name[rows], return_inverse=True)
    lane_of = np.unique(spans.lane[rows])
    kept = spans.take(rows).change(name=name, lane=np.searchsorted(lane_of, spans.lane[rows]))
    return timeline.change(
        lanes=tuple(lanes[lane] for lane in lane_of.tolist()) or lanes[:1],
        names=tuple(timeline.names[one] for one in names.tolist()),
        spans=kept.change(frame=np.full(len(rows), -1)),
        links=Links.of(0),
        frames=Frames.of(0),
        marks=np.zeros(0, np.int64),
        memory=MemoryUse.of(0),
    )


def _host(file: Trace) -> str:
    """By the name that torch gives the file."""
    named = _OF_HANDLER.match(Path(file.path).name)
    return named[1] if named else ""
