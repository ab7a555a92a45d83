"""Whatever the program: the device keeps its order, and what the clock wrote down replays to itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from build import gaps
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_programs import ROUND

from keepbusy.timeline.busy_file import from_bytes, to_bytes
from keepbusy.timeline.model import Direction, Kind, LinkKind, Timeline, previous_on_lane, settle
from keepbusy.timeline.replay import replay
from keepbusy.virtual.clock.captures import Moment
from keepbusy.virtual.clock.engine import Clock

WORK = st.integers(0, 3_000)
STREAM = st.integers(0, 2)
SIZE = st.sampled_from([8, 64, 99, 101, 5_000])
WAYS = st.sampled_from([Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST])
ACTION = st.one_of(
    st.tuples(st.just("launch"), STREAM, WORK),
    st.tuples(st.just("operator"), STREAM, WORK),
    st.tuples(st.just("copy"), STREAM, st.tuples(WAYS, SIZE, st.booleans(), st.booleans())),
    st.tuples(st.just("record"), STREAM, WORK),
    st.tuples(st.just("wait"), STREAM, WORK),
    st.tuples(st.just("sync_event"), STREAM, WORK),
    st.tuples(st.just("sync_stream"), STREAM, WORK),
    st.tuples(st.just("sync_device"), STREAM, WORK),
    st.tuples(st.just("release"), STREAM, WORK),
    st.tuples(st.just("work"), STREAM, WORK),
    st.tuples(st.just("query"), STREAM, WORK),
    st.tuples(st.just("graph"), STREAM, WORK),
)
PROGRAM = st.lists(ACTION, max_size=60)


def act(on: Clock, streams: list[int], moments: list[Moment], what: str, which: int, argument: object) -> None:
    stream = streams[which]
    last = moments[-1] if moments else on.record(stream)
    if what == "launch":
        on.begin("aten::mul")
        on.launch(stream, [("kernel", argument)])  # type: ignore[arg-type]
        on.end()
    elif what == "operator":
        on.operator("aten::add", on.place(f"train.py({which}): main"), stream, [("one", argument), ("two", 40)])  # type: ignore[list-item]
    elif what == "copy":
        on.copy(stream, *argument)  # type: ignore[misc]
    elif what == "graph":
        on.capture(stream)
        on.launch(stream, [("one", 30), ("two", argument)])  # type: ignore[list-item]
        on.replay(on.end_capture(stream), stream)
    elif what == "record":
        moments.append(on.record(stream))
    else:
        {
            "wait": lambda: on.wait(stream, last),
            "sync_event": lambda: on.sync_moment(last),
            "sync_stream": lambda: on.sync_stream(stream),
            "sync_device": lambda: on.sync_device(on_device(which)),
            "release": lambda: on.release("cudaFree", 60),
            "work": lambda: on.work(argument),  # type: ignore[arg-type]
            "query": lambda: on.query(last),
        }[what]()


def on_device(which: int) -> int:
    return which // 2


def run(program: list[tuple[str, int, object]], devices: int = 1) -> Timeline:
    on = Clock(ROUND)
    streams = [on.new_stream(0), on.new_stream(0), on.new_stream(devices - 1)]
    moments: list[Moment] = []
    for what, which, argument in program:
        act(on, streams, moments, what, which if devices > 1 or what != "sync_device" else 0, argument)
    return on.timeline()


def same(one: Timeline, other: Timeline) -> bool:
    return bool((one.spans.start == other.spans.start).all() and (one.spans.end == other.spans.end).all())


@settings(max_examples=100)
@given(PROGRAM, st.integers(1, 2))
def test_it_replays_to_itself_also_settled_like_a_recording(
    program: list[tuple[str, int, object]], devices: int
) -> None:
    timeline = run(program, devices)
    assert same(timeline, replay(timeline))
    assert same(timeline, replay(settle(timeline)))


@settings(max_examples=100)
@given(PROGRAM)
def test_lanes_are_in_order_and_nothing_happens_before_its_cause(program: list[tuple[str, int, object]]) -> None:
    timeline = run(program)
    assert_in_order(timeline)
    assert_after_their_causes(timeline)
    assert len(gaps(timeline, 0)) == 0, "host lanes have no holes"


def assert_in_order(timeline: Timeline) -> None:
    """And no lane does two things at once."""
    spans = timeline.spans
    before = previous_on_lane(spans.lane)
    known = before >= 0
    assert (spans.end >= spans.start).all()
    assert (spans.start[known] >= spans.end[before[known]]).all()
    for direction in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST):
        mine = (spans.kind == Kind.COPY) & (spans.direction == direction)
        order = np.argsort(spans.start[mine], kind="stable")
        start, end = spans.start[mine][order], spans.end[mine][order]
        assert (start[1:] >= end[:-1]).all()


def assert_after_their_causes(timeline: Timeline) -> None:
    spans, links = timeline.spans, timeline.links
    assert (links.source < links.target).all()
    launched = links.kind == LinkKind.LAUNCH
    released = np.where(launched, spans.start[links.source], spans.end[links.source])
    reached = np.where(spans.kind[links.target] == Kind.SYNC, spans.end[links.target], spans.start[links.target])
    host = spans.kind[links.target] < Kind.KERNEL
    assert (np.where(host, spans.end[links.target], reached) >= released).all()
    assert launched.sum() == timeline.on_device.sum()


@settings(max_examples=30)
@given(PROGRAM)
def test_two_runs_give_the_same_bytes(program: list[tuple[str, int, object]]) -> None:
    content = to_bytes(run(program))
    assert content == to_bytes(run(program))
    assert to_bytes(from_bytes(content)) == content


@settings(max_examples=100)
@given(st.lists(st.tuples(STREAM, st.lists(WORK, max_size=3), st.booleans()), max_size=30))
def test_the_quick_way_writes_what_the_careful_one_does(program: list[tuple[int, list[int], bool]]) -> None:
    written = []
    for quick in (True, False):
        on = Clock(ROUND)
        streams = [on.new_stream() for _ in range(3)]
        for which, works, waits in program:
            kernels, place = [("kernel", work) for work in works], on.place(f"train.py({which}): main")
            if waits:
                on.wait(streams[which], on.record(streams[which - 1]))
            if quick:
                on.operator("aten::mul", place, streams[which], kernels)
            else:
                on.begin("aten::mul", place)
                on.launch(streams[which], kernels)
                on.end()
        written.append(to_bytes(on.timeline()))
    assert written[0] == written[1]


HANDSHAKE = st.sampled_from(["record_wait", "wait", "launch", "copy", "graph", "peer"])


@settings(max_examples=40)
@given(st.lists(st.tuples(HANDSHAKE, STREAM, STREAM), min_size=1, max_size=8))
def test_what_a_call_costs_does_not_grow_with_the_run(turn: list[tuple[str, int, int]]) -> None:
    """Streams that wait for each other's events all through a run: at most one row a lane is ever waited for."""
    on = Clock(ROUND)
    streams = [on.new_stream() for _ in range(3)]
    moments = [on.record(stream) for stream in streams]
    links = [len(on.timeline().links)]
    for _ in range(15):
        for what, which, other in turn:
            stream = streams[which]
            if what == "record_wait":
                moments[other] = on.record(streams[other])
            if what in ("record_wait", "wait"):
                on.wait(stream, moments[other])
            elif what == "peer":
                on.copy_to_peer(stream, streams[other], 100)
            else:
                copied = (Direction.HOST_TO_DEVICE, 64, True, True)
                act(on, streams, moments, what, which, copied if what == "copy" else 9)
            moment = on.record(stream)
            lanes = len(on.rows.lanes)
            assert len(moment.awaited) <= lanes
            assert len(on.queues.streams[stream].awaited) < lanes
        links.append(len(on.timeline().links))
    assert max(after - before for before, after in pairwise(links)) <= len(turn) * 2 * len(on.rows.lanes)
    timeline = on.timeline()
    assert same(timeline, replay(timeline))
