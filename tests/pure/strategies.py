"""Small valid timelines, drawn by hypothesis, in issue order and as a recording would have found them.

A drawn program is carried out by a machine of its own, with other code than `replay`: threads issue,
streams execute in order, and each span begins some time after whatever releases it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from keepbusy.timeline.model import (
    EVERY_LANE,
    NONE,
    Direction,
    FrameKind,
    Frames,
    Kind,
    Lane,
    LinkKind,
    Links,
    Meetings,
    Spans,
    Timeline,
)

THREADS, STREAMS = 2, 2
PENDING = 3

times = st.integers(0, 40_000)
names = st.text(st.characters(), max_size=8)  # surrogates too
facts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
ranks, threads, streams = st.integers(0, 1), st.integers(0, THREADS - 1), st.integers(0, STREAMS - 1)

works = st.tuples(st.just("work"), ranks, threads, times)
launches = st.tuples(
    st.just("launch"), ranks, threads, st.lists(st.tuples(streams, times, times), min_size=1, max_size=3)
)
syncs = st.tuples(st.just("sync"), ranks, threads, st.none() | streams, times)
event_syncs = st.tuples(st.just("event_sync"), ranks, threads, streams, times)
orders = st.tuples(st.just("order"), ranks, streams, streams)
handoffs = st.tuples(st.just("handoff"), ranks, times)
collectives = st.tuples(st.just("collective"), ranks, threads, streams, st.lists(times, min_size=6, max_size=6))
actions = st.one_of(works, launches, launches, syncs, event_syncs, orders, handoffs, collectives)


@dataclass
class Machine:
    """One or two ranks, each with two threads and two streams, that note what they do."""

    ranks: int
    spans: list[dict[str, int]] = field(default_factory=list)
    links: list[tuple[int, int, int]] = field(default_factory=list)
    meetings: list[int] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)  # the row that each lane did last
    held: dict[int, int] = field(default_factory=dict)  # the row that a stream's next command must await
    ends: dict[int, list[int]] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        hosts = [
            Lane(rank, None, number, f"thread {number}") for rank in range(self.ranks) for number in range(THREADS)
        ]
        devices = [Lane(rank, rank, number) for rank in range(self.ranks) for number in range(STREAMS)]
        return (*hosts, *devices)

    def host(self, rank: int, thread: int) -> int:
        return rank % self.ranks * THREADS + thread

    def stream(self, rank: int, stream: int) -> int:
        return self.ranks * THREADS + rank % self.ranks * STREAMS + stream

    def add(self, lane: int, kind: Kind, start: int, end: int, **columns: int) -> int:
        self.spans.append({"lane": lane, "kind": kind, "start": start, "end": end, **columns})
        self.clocks[lane], self.last[lane] = end, len(self.spans) - 1
        return len(self.spans) - 1

    def work(self, rank: int, thread: int, time: int) -> None:
        lane = self.host(rank, thread)
        start = self.clocks.get(lane, 0)
        self.add(lane, Kind.WORK, start, start + time)

    def launch(self, rank: int, thread: int, commands: list[tuple[int, int, int]]) -> None:
        launch = self._launched(rank, thread, self.stream(rank, commands[0][0]))
        for stream, lag, time in commands:
            lane = self.stream(rank, stream)
            start = self._released(launch, lane, lag)
            row = self.add(lane, Kind.KERNEL, start, start + time)
            self._linked(launch, lane, row)

    def sync(self, rank: int, thread: int, stream: int | None, time: int) -> None:
        lane = self.host(rank, thread)
        awaited = [self.stream(rank, one) for one in (range(STREAMS) if stream is None else [stream])]
        start = self.clocks.get(lane, 0)
        reached = max(start, *[self.clocks.get(one, 0) for one in awaited])
        self.add(lane, Kind.SYNC, start, reached + time, awaits=EVERY_LANE if stream is None else awaited[0])

    def event_sync(self, rank: int, thread: int, stream: int, time: int) -> None:
        """Awaits one command, by a link."""
        lane, source = self.host(rank, thread), self.last.get(self.stream(rank, stream))
        start = self.clocks.get(lane, 0)
        if source is None or lane not in self.last or self.spans[source]["end"] <= start:  # then nothing waits
            return
        row = self.add(lane, Kind.SYNC, start, self.spans[source]["end"] + time)
        self.links.append((source, row, LinkKind.ORDER))

    def order(self, rank: int, source: int, target: int) -> None:
        """An event recorded on one stream, awaited by the next command of another."""
        row = self.last.get(self.stream(rank, source))
        if row is not None and source != target:
            self.held[self.stream(rank, target)] = row

    def handoff(self, rank: int, time: int) -> None:
        """The second thread goes on where the first one ended, as the backward pass does."""
        source = self.last.get(self.host(rank, 0))
        if source is None:
            return
        lane = self.host(rank, 1)
        start = max(self.spans[source]["end"], self.clocks.get(lane, 0))
        row = self.add(lane, Kind.WORK, start, start + time)
        self.links.append((source, row, LinkKind.HANDOFF))

    def collective(self, _: int, thread: int, stream: int, drawn: list[int]) -> None:
        """All ranks meet; none leaves before the last has come, and they leave at slightly different times."""
        parts, wire, lags = [], drawn[0], drawn[1:3]
        for rank in range(self.ranks):
            lane = self.stream(rank, stream)
            launch = self._launched(rank, thread, lane)
            start = self._released(launch, lane, lags[rank])
            parts.append(self.add(lane, Kind.COLLECTIVE, start, start, meeting=len(self.meetings)))
            self._linked(launch, lane, parts[-1])
        last = max(self.spans[part]["start"] for part in parts)
        for part, late in zip(parts, drawn[3:], strict=False):
            self.spans[part]["end"] = self.clocks[self.spans[part]["lane"]] = last + wire + late
            self.ends[self.spans[part]["lane"]][-1] = last + wire + late
        self.meetings.append(len(parts))

    def _launched(self, rank: int, thread: int, stream: int) -> int:
        """A launch that finds its stream's queue full waits for a place in it."""
        lane = self.host(rank, thread)
        start = self.clocks.get(lane, 0)
        ends = self.ends.get(stream, [])
        free = ends[-PENDING] if len(ends) >= PENDING else 0
        return self.add(lane, Kind.LAUNCH, start, max(start, free) + 5_000)

    def _released(self, launch: int, lane: int, lag: int) -> int:
        held = self.held.get(lane)
        return max(
            self.spans[launch]["start"] + 1_000 + lag % 7_000,
            self.clocks.get(lane, 0) + lag % 3_000,
            self.spans[held]["end"] + lag % 2_000 if held is not None else 0,
        )

    def _linked(self, launch: int, lane: int, row: int) -> None:
        self.links.append((launch, row, LinkKind.LAUNCH))
        self.ends.setdefault(lane, []).append(self.spans[row]["end"])
        if lane in self.held:
            self.links.append((self.held.pop(lane), row, LinkKind.ORDER))


@st.composite
def timelines(draw: st.DrawFn, most_ranks: int = 2, most: int = 30) -> Timeline:
    """A recording: measured times and links, with neither `work` nor `lag` (`settle` derives them)."""
    machine = Machine(draw(st.integers(1, most_ranks)))
    begins = draw(st.lists(times, min_size=THREADS * machine.ranks, max_size=THREADS * machine.ranks))
    machine.clocks = dict(enumerate(begins))
    machine.add(0, Kind.WORK, machine.clocks[0], machine.clocks[0] + draw(times))
    for name, *arguments in draw(st.lists(actions, min_size=min(6, most), max_size=most)):
        getattr(machine, name)(*arguments)
    spans = machine.spans
    columns = {name: [span.get(name, fill) for span in spans] for name, fill in _COLUMNS.items()}
    links = np.array(machine.links, np.int64).reshape(-1, 3).T
    hosts = [row for row, span in enumerate(spans) if span["lane"] % (THREADS * machine.ranks) == span["lane"]]
    return Timeline(
        lanes=machine.lanes,
        names=("span",),
        spans=Spans.of(len(spans), **columns),
        links=Links.of(links.shape[1], source=links[0], target=links[1], kind=links[2]),
        meetings=Meetings.of(len(machine.meetings), members=machine.meetings, present=machine.meetings),
        marks=np.array(sorted(draw(st.sets(st.sampled_from(hosts), min_size=1, max_size=4))), np.int64),
        facts={"pending_limit": PENDING},
    )


_COLUMNS = {"lane": 0, "kind": 0, "start": 0, "end": 0, "awaits": NONE, "meeting": NONE}


@st.composite
def decorated(draw: st.DrawFn) -> Timeline:
    """The same with everything else that a timeline may hold: frames, names, sizes and facts."""
    timeline = draw(timelines(most=12))
    known = tuple(draw(st.lists(names, min_size=1, max_size=4)))
    length, frames = len(timeline), draw(_frames(len(timeline.lanes), len(known)))
    spans = timeline.spans.change(
        name=_drawn(draw, length, 0, len(known) - 1),
        frame=_drawn(draw, length, NONE, len(frames) - 1),
        size=_drawn(draw, length, -(1 << 63), (1 << 63) - 1),
        work=_drawn(draw, length, -(1 << 63), (1 << 63) - 1),
        direction=_drawn(draw, length, 0, len(Direction) - 1),
        pinned=_drawn(draw, length, NONE, 1),
        recording=_drawn(draw, length, 0, 5_000),
    )
    said: dict[str, Any] = draw(st.dictionaries(names, facts, max_size=4))
    return timeline.change(names=known, spans=spans, frames=frames, facts=said)


@st.composite
def _frames(draw: st.DrawFn, lanes: int, known: int) -> Frames:
    rows: list[dict[str, int]] = []
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(NONE, len(rows) - 1))
        above = rows[parent] if parent != NONE else None
        start = draw(st.integers(above["start"], above["end"]) if above else times)
        end = draw(st.integers(start, above["end"] if above else start + 40_000))
        lane = above["lane"] if above else draw(st.integers(0, lanes - 1))
        rows.append({"lane": lane, "parent": parent, "start": start, "end": end})
    columns = {name: [row[name] for row in rows] for name in ("lane", "parent", "start", "end")}
    kind, name = _drawn(draw, len(rows), 0, len(FrameKind) - 1), _drawn(draw, len(rows), 0, known - 1)
    return Frames.of(len(rows), kind=kind, name=name, **columns)


def _drawn(draw: st.DrawFn, length: int, low: int, high: int) -> np.ndarray:
    return np.array(draw(st.lists(st.integers(low, high), min_size=length, max_size=length)), np.int64)
