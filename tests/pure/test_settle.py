"""Settle: durations of work are facts, durations of waits are consequences."""

from __future__ import annotations

import numpy as np
import pytest
from build import LAUNCH, MB, SYNC, US, WIRE, Run
from hypothesis import given, settings
from strategies import timelines

from keepbusy.timeline.model import (
    NONE,
    TYPICAL_GAP,
    TYPICAL_LATENCY,
    WORKERS,
    Kind,
    LinkKind,
    Spans,
    Timeline,
    settle,
    typical_lags,
)
from keepbusy.timeline.replay import replay


def work_of(timeline: Timeline, kind: Kind) -> list[int]:
    """In microseconds."""
    return (timeline.spans.work[timeline.spans.kind == kind] // US).tolist()


def lags_into(timeline: Timeline, kind: Kind) -> tuple[list[int], list[int]]:
    """Of the spans of a kind: the lag after the one before it on its lane, and that of its links."""
    into = timeline.spans.kind[timeline.links.target] == kind
    return timeline.spans.lag[timeline.spans.kind == kind].tolist(), timeline.links.lag[into].tolist()


# The lag belongs to the release that bound


def test_a_command_that_its_launch_held_up_keeps_that_lag() -> None:
    """The stream has been idle for 80 µs: had it not been, the command would have begun a typical gap after it."""
    timeline = Run.of().launch(kernel=10).work(86).launch(kernel=10).timeline()
    on_lane, on_link = lags_into(timeline, Kind.KERNEL)
    assert on_link[1] == TYPICAL_LATENCY
    assert on_lane[1] == TYPICAL_GAP


def test_a_command_that_its_stream_held_up_keeps_that_lag() -> None:
    timeline = Run.of().launch(kernel=500).launch(kernel=10).timeline()
    on_lane, on_link = lags_into(timeline, Kind.KERNEL)
    assert on_lane[1] == 1_000
    assert on_link == [TYPICAL_LATENCY, TYPICAL_LATENCY]


def test_a_command_that_another_stream_held_up_keeps_that_lag() -> None:
    run = Run.of().launch(kernel=10, stream=8).launch(kernel=300).order(7, 8)
    run.command(run.call(8), 8, 10, lags=(6_000, 1_000, 4_000))
    timeline = run.timeline()
    order = timeline.links.lag[timeline.links.kind == LinkKind.ORDER]
    assert order.tolist() == [4_000]
    assert timeline.spans.lag[-1] == TYPICAL_GAP


def test_an_unusual_lag_stays_with_whoever_caused_it() -> None:
    """The second kernel came 50 µs after its launch, on an idle stream: only that release is known to be slow."""
    run = Run.of().launch(kernel=10).work(100)
    run.command(run.call(7), 7, 10, lags=(50_000, 1_000, 1_000))
    timeline = run.timeline()
    assert timeline.links.lag.tolist() == [TYPICAL_LATENCY, 50_000]
    assert timeline.spans.lag[-1] == TYPICAL_GAP


def test_what_is_typical_is_read_from_a_long_recording() -> None:
    """Here a launch takes 9 µs to reach an idle stream, and 2 µs lie between commands that stood ready."""
    run = Run.of()
    for _ in range(60):
        rows = [run.call(7) for _ in range(12)]
        for row in rows:
            run.command(row, 7, 100, lags=(9_000, 2_000, 1_000))
        run.sync().work(50)
    assert typical_lags(run.timeline()) == (2_000, 9_000)
    assert typical_lags(Run.of().launch().timeline()) == (TYPICAL_GAP, TYPICAL_LATENCY)


# Waits


def test_a_sync_keeps_only_its_own_time() -> None:
    timeline = Run.of().launch(kernel=500).sync().work(5).sync().timeline()
    assert work_of(timeline, Kind.SYNC) == [SYNC, SYNC]


def test_a_sync_of_the_whole_device_waits_for_every_stream_of_its_rank() -> None:
    run = Run.of(ranks=2).launch(kernel=20).launch(kernel=900, stream=8)
    run.on(1).launch(kernel=5_000)
    timeline = run.sync(None).timeline()
    sync = timeline.spans.kind == Kind.SYNC
    assert work_of(timeline, Kind.SYNC) == [SYNC]
    assert (timeline.spans.end - timeline.spans.start)[sync].tolist() == [(5 + 6 + 900 - 10 + SYNC) * US]


def test_an_event_sync_waits_for_one_command() -> None:
    timeline = Run.of().launch(kernel=100).launch(kernel=5).event_sync().launch(kernel=900).timeline()
    assert work_of(timeline, Kind.SYNC) == [SYNC]
    faster = replay(timeline.change_spans(work=np.where(timeline.on_device, 0, timeline.spans.work)))
    assert faster.spans.end[faster.spans.kind == Kind.SYNC].tolist() == [(5 + 6 + SYNC) * US]


def test_an_event_sync_of_a_command_that_is_past_is_all_work() -> None:
    timeline = Run.of().launch(kernel=10).work(200).event_sync(time=8).timeline()
    assert work_of(timeline, Kind.SYNC) == [8]


def test_a_blocking_copy_waits_for_what_stands_before_it_on_its_stream() -> None:
    """5 ms of kernels, then 2 ms of copying: the host's own part is the call alone."""
    timeline = Run.of().launch(kernel=5_000).copy(16 * MB, 2_000).timeline()
    assert work_of(timeline, Kind.SYNC) == [SYNC]
    assert work_of(timeline, Kind.COPY) == [2_000]
    assert work_of(timeline, Kind.LAUNCH) == [LAUNCH, LAUNCH]


@pytest.mark.parametrize("early", [0, 9, 29])
def test_a_call_may_return_a_little_before_its_copy_ends(early: int) -> None:
    """Pageable copies do: it waited all the same, and its own part is less than nothing."""
    timeline = returned_early(early)
    assert work_of(timeline, Kind.SYNC) == [-early]
    np.testing.assert_array_equal(replay(timeline).spans.end, timeline.spans.end)
    shorter = replay(timeline.change_spans(work=np.where(timeline.spans.kind == Kind.COPY, 0, timeline.spans.work)))
    assert shorter.spans.end[-1] == timeline.spans.end[-1] - 2_000 * US


def test_a_call_that_returned_long_before_waited_for_nobody() -> None:
    timeline = returned_early(500)
    assert timeline.spans.awaits.tolist() == [NONE, NONE, NONE]
    assert work_of(timeline, Kind.SYNC) == [2_001 - 500]
    np.testing.assert_array_equal(replay(timeline).spans.end, timeline.spans.end)


def returned_early(early: int) -> Timeline:
    recorded = Run.of().copy(16 * MB, 2_000).recorded()
    end = recorded.spans.end.copy()
    end[-1] = end[1] - early * US
    return settle(recorded.change_spans(end=end))


def test_memory_that_is_given_back_waits_for_the_device() -> None:
    timeline = Run.of().launch(kernel=700).allocate(40, waits=True).allocate(30).timeline()
    assert work_of(timeline, Kind.ALLOCATE) == [40, 30]


def test_a_thread_that_goes_on_for_another_leaves_no_wait_behind() -> None:
    """The backward pass: the main thread's next row begins when the other thread has ended."""
    run = Run.of().work(10)
    run.handoff(1).launch(kernel=10).work(400).handoff(0).work(7)
    timeline = run.timeline()
    handoff = timeline.links.kind == LinkKind.HANDOFF
    assert timeline.links.lag[handoff].tolist() == [0, 0]
    shorter = replay(timeline.change_spans(work=timeline.spans.work // 2))
    assert shorter.spans.end[-1] == timeline.spans.end[-1] // 2


# Back-pressure


def test_a_full_queue_holds_up_the_launch() -> None:
    """Three may be pending: from the fourth on, each launch waits until a kernel of 100 µs has ended."""
    run = Run.of(pending=3)
    for _ in range(8):
        run.launch(kernel=100)
    timeline = run.timeline()
    lasted = ((timeline.spans.end - timeline.spans.start)[timeline.spans.kind == Kind.LAUNCH] // US).tolist()
    assert lasted == [5, 5, 5, 96, 101, 101, 101, 101]
    assert work_of(timeline, Kind.LAUNCH) == [LAUNCH] * 8


def test_faster_kernels_make_room_earlier() -> None:
    run = Run.of(pending=3)
    for _ in range(8):
        run.launch(kernel=100)
    timeline = run.timeline()
    faster = replay(timeline.change_spans(work=np.where(timeline.on_device, 20 * US, timeline.spans.work)))
    assert (faster.spans.end - faster.spans.start)[-2] == 21 * US


def test_a_graph_takes_one_place_whatever_its_kernels() -> None:
    """Of graphs with one kernel and with a hundred, 1021 may be pending (H200, benchmarks/gpu/graph_costs.py)."""
    run = Run.of(pending=2)
    for _ in range(3):
        run.launch(kernel=[50, 60, 70])
    timeline = run.timeline()
    launches, kernels = (np.flatnonzero(timeline.spans.kind == kind) for kind in (Kind.LAUNCH, Kind.KERNEL))
    ended = int(timeline.spans.end[kernels[2]])
    assert timeline.spans.end[launches].tolist() == [5 * US, 10 * US, ended + LAUNCH * US]
    assert work_of(timeline, Kind.LAUNCH) == [LAUNCH] * 3
    np.testing.assert_array_equal(replay(timeline).spans.end, timeline.spans.end)


def test_a_queue_holds_at_least_what_it_was_seen_to_hold() -> None:
    """Another device, another limit: nine launches returned at once while eight kernels were pending."""
    run = Run.of(pending=9)
    for _ in range(12):
        run.launch(kernel=100)
    timeline = run.timeline(pending_limit=3)
    np.testing.assert_array_equal(replay(timeline).spans.end, timeline.spans.end)
    assert work_of(timeline, Kind.LAUNCH) == [LAUNCH] * 12


def test_each_stream_has_a_queue_of_its_own() -> None:
    run = Run.of(pending=2)
    for _ in range(2):
        run.launch(kernel=1_000).launch(kernel=1_000, stream=8)
    assert ((run.timeline().spans.end - run.timeline().spans.start)[::2] == LAUNCH * US).all()


# The loader's workers


def test_batches_are_made_by_a_lane_that_the_loop_waits_for() -> None:
    """A batch takes 300 µs and the rest of a step 100 µs: the loop waits, until batches are made as fast."""
    run = Run.of()
    for _ in range(4):
        run.batch(300).work(100)
    timeline = run.timeline()
    assert timeline.lanes[1].name == WORKERS
    assert work_of(timeline, Kind.SYNC) == [SYNC] * 4
    faster = timeline.spans.work // np.where(timeline.spans.lane == 1, 3, 1)
    later = replay(timeline.change_spans(work=faster), passes=2)
    assert (later.spans.end - later.spans.start)[timeline.spans.kind == Kind.SYNC].tolist() == [SYNC * US] * 4


# Collectives


@pytest.mark.parametrize("late", [0, 700])
def test_of_a_collective_only_the_wire_is_work(late: int) -> None:
    run = Run.of(ranks=2).launch(kernel=20)
    run.on(1).work(late).launch(kernel=20)
    timeline = run.collective(wire=80, late=(0, 4_000)).timeline()
    assert work_of(timeline, Kind.COLLECTIVE) == [80, 84]


def test_a_collective_without_peers_is_work_from_end_to_end() -> None:
    """What it waits for is not in the recording."""
    run = Run.of(ranks=2)
    run.on(1).work(500)
    recorded = run.collective(wire=80, stream=WIRE).recorded()
    lone = settle(recorded.change_spans(meeting=np.full(len(recorded), NONE)))
    assert work_of(lone, Kind.COLLECTIVE) == [580, 80]


# Whatever was recorded


@given(timelines())
@settings(max_examples=100)
def test_only_syncs_may_have_less_than_no_work_of_their_own(timeline: Timeline) -> None:
    settled = settle(timeline)
    own = settled.spans.kind != Kind.SYNC
    assert (settled.spans.work[own] >= 0).all()
    assert (settled.spans.work <= settled.spans.end - settled.spans.start).all()


@given(timelines())
@settings(max_examples=100)
def test_a_release_that_did_not_bind_keeps_no_more_than_what_is_typical(timeline: Timeline) -> None:
    settled = settle(timeline)
    spans, links = settled.spans, settled.links
    gap, latency = typical_lags(settled)
    links = links.take(np.flatnonzero(settled.on_device[links.target]))
    by_launch = links.kind == LinkKind.LAUNCH
    released = np.where(by_launch, spans.start[links.source], spans.end[links.source]) + links.lag
    loose = released < spans.start[links.target]
    assert (released <= spans.start[links.target]).all()
    assert (links.lag <= np.where(by_launch, latency, gap))[loose].all()


def test_an_empty_timeline_is_settled() -> None:
    empty = Timeline((), ("",), Spans.of(0))
    assert settle(empty) is empty
