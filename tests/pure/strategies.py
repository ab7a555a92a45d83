"""Small valid timelines, drawn by hypothesis, in issue order and as a recording would have found them.

A drawn program is carried out on paper (`build`), with other code than `replay`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from build import US, Run
from hypothesis import strategies as st

from keepbusy.timeline.frame_roles import described
from keepbusy.timeline.model import NONE, Direction, FrameKind, Frames, Timeline
from keepbusy.timeline.run_facts import LOOP, PlainRun, RunFacts, WindowReason

THREADS, STREAMS = 2, 2
PENDING = 3

times = st.integers(0, 40_000)
names = st.text(st.characters(), max_size=8)  # surrogates too
counts = st.integers(0, 1 << 50)
facts = st.builds(
    RunFacts,
    source=names,
    sources=st.lists(names, max_size=3).map(tuple),
    groups=st.dictionaries(counts, counts, max_size=3),
    pending_limit=st.none() | st.integers(1, 5_000),
    virtual=st.booleans(),
    recorded=st.none() | st.lists(counts, max_size=3).map(tuple),
    plain_runs=st.dictionaries(counts, st.just(PlainRun("step", 3, 4, 3, 5)), max_size=2),
    reason=st.none() | st.just(WindowReason(LOOP, "train.py:3")),
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


@st.composite
def timelines(draw: st.DrawFn, most_ranks: int = 2, most: int = 30) -> Timeline:
    """A recording: measured times and links, with neither `work` nor `lag` (`settle` derives them)."""
    run = begun(draw, most_ranks).work(draw(times) / US)
    carry_out(run, draw(st.lists(actions, min_size=min(6, most), max_size=most)))
    recorded = run.recorded()
    marks = draw(st.sets(st.sampled_from(np.flatnonzero(~recorded.on_device).tolist()), min_size=1, max_size=4))
    return recorded.change(marks=np.array(sorted(marks), np.int64), facts=RunFacts(pending_limit=PENDING))


@st.composite
def loops(draw: st.DrawFn, most_ranks: int = 2, most: int = 12) -> Timeline:
    """A recording of a loop: steps of the same actions, with a launch in each."""
    run = begun(draw, most_ranks)
    body = draw(st.lists(actions, max_size=most))
    for _ in range(draw(st.integers(3, 6))):
        for rank in run.ranks:
            run.on(rank).step().launch(kernel=50)
        carry_out(run, body)
    return run.recorded()


def begun(draw: st.DrawFn, most_ranks: int) -> Run:
    run = Run.of(draw(st.integers(1, most_ranks)), pending=PENDING)
    for rank in run.ranks:
        for thread in range(THREADS):
            run.on(rank, thread).begin(draw(times) / US)
        for stream in range(STREAMS):
            run.paper.lanes.setdefault(run.on(rank).stream(stream), len(run.paper.lanes))
    return run


def carry_out(run: Run, drawn: list[tuple[Any, ...]]) -> None:
    """Actions by name; those that nobody would take at that point are left out."""
    for name, rank, *arguments in drawn:
        _ACTIONS[name](run.on(rank % len(run.ranks)), *arguments)


def _work(run: Run, thread: int, time: int) -> None:
    run.on(thread=thread).work(time / US)


def _launch(run: Run, thread: int, commands: list[tuple[int, int, int]]) -> None:
    mine = run.on(thread=thread)
    row = mine.call(commands[0][0])
    for stream, lag, time in commands:
        mine.command(row, stream, time / US, lags=(1_000 + lag % 7_000, lag % 3_000, lag % 2_000))


def _sync(run: Run, thread: int, stream: int | None, time: int) -> None:
    run.on(thread=thread).sync(stream, time / US)


def _event_sync(run: Run, thread: int, stream: int, time: int) -> None:
    """A host that has not begun, and an event that is past, have nothing to wait for."""
    mine, source = run.on(thread=thread), run.paper.last.get(run.stream(stream))
    if source is not None and mine.lane in run.paper.last and run.paper.spans[source]["end"] > mine.clock:
        mine.event_sync(stream, time / US)


def _order(run: Run, source: int, target: int) -> None:
    run.order(source, target)


def _handoff(run: Run, time: int) -> None:
    if run.lane in run.paper.last:
        run.handoff(1).work(time / US)


def _collective(run: Run, thread: int, stream: int, drawn: list[int]) -> None:
    wire, lags, late = drawn[0], [1_000 + lag % 7_000 for lag in drawn[1:3]], drawn[3:]
    run.on(thread=thread).collective(wire / US, stream=stream, lags=lags, late=late)


_ACTIONS = {
    "work": _work,
    "launch": _launch,
    "sync": _sync,
    "event_sync": _event_sync,
    "order": _order,
    "handoff": _handoff,
    "collective": _collective,
}


@st.composite
def decorated(draw: st.DrawFn) -> Timeline:
    """The same with everything else that a timeline may hold: frames, names, sizes and facts."""
    timeline = draw(timelines(most=12))
    known = tuple(draw(st.lists(names, min_size=1, max_size=4)))
    length, frames = len(timeline), draw(_frames(len(timeline.lanes), len(known)))
    spans = timeline.spans.change(
        name=_drawn(draw, length, 0, len(known) - 1),
        frame=_drawn(draw, length, NONE, len(frames) - 1),
        size=_drawn(draw, length, 0, 1 << 48),
        work=_drawn(draw, length, -(1 << 48), 1 << 48),
        direction=_drawn(draw, length, 0, len(Direction) - 1),
        pinned=_drawn(draw, length, NONE, 1),
        recording=_drawn(draw, length, 0, 5_000),
    )
    return timeline.change(
        names=known, spans=described(spans, known), frames=described(frames, known), facts=draw(facts)
    )


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
