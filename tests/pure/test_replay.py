"""Replay: an unchanged run stays where it was measured, and a change moves only what it must."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from build import Run, gaps, loop
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import loops, timelines

from keepbusy.timeline.model import NEVER, NONE, Kind, LinkKind, Timeline, settle
from keepbusy.timeline.replay import _Engine, replay, run
from keepbusy.timeline.steps import whole_steps

seldom = settings(max_examples=120)


@given(timelines())
@seldom
def test_an_unchanged_replay_is_the_identity(timeline: Timeline) -> None:
    again = replay(settle(timeline))
    np.testing.assert_array_equal(again.spans.start, timeline.spans.start)
    np.testing.assert_array_equal(again.spans.end, timeline.spans.end)


@given(timelines())
@seldom
def test_settling_twice_changes_nothing(timeline: Timeline) -> None:
    once = settle(timeline)
    twice = settle(replay(once))
    for name, column in once.spans.columns().items():
        np.testing.assert_array_equal(column, getattr(twice.spans, name), err_msg=name)
    np.testing.assert_array_equal(once.links.lag, twice.links.lag)


@given(timelines(), st.data())
@seldom
def test_removing_a_wait_never_lengthens_a_run(timeline: Timeline, data: st.DataObject) -> None:
    timeline = settle(timeline)
    awaits = np.where(data.draw(some_of(len(timeline))), NONE, timeline.spans.awaits)
    freed = replay(timeline.change_spans(awaits=awaits))
    assert (freed.spans.end <= timeline.spans.end).all()


@given(timelines(), st.data())
@seldom
def test_removing_a_link_never_lengthens_a_run(timeline: Timeline, data: st.DataObject) -> None:
    timeline = settle(timeline)
    gone = (timeline.links.kind == LinkKind.ORDER) & np.array(data.draw(some_of(len(timeline.links))), bool)
    links = timeline.links.take(np.flatnonzero(~gone))
    assert (replay(timeline.change(links=links)).spans.end <= timeline.spans.end).all()


def some_of(count: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=count, max_size=count)


@given(timelines(), st.data())
@seldom
def test_less_work_never_lengthens_a_run(timeline: Timeline, data: st.DataObject) -> None:
    timeline = settle(timeline)
    work = timeline.spans.work
    work = np.where(data.draw(some_of(len(timeline))), work - np.abs(work) // 2, work)
    assert (replay(timeline.change_spans(work=work)).spans.end <= timeline.spans.end).all()


@given(timelines(), st.data())
@seldom
def test_rows_that_are_dropped_never_lengthen_a_run(timeline: Timeline, data: st.DataObject) -> None:
    timeline = settle(timeline)
    host = np.isin(timeline.spans.kind, [Kind.WORK, Kind.SYNC])
    kept = ~(host & np.array(data.draw(some_of(len(timeline))), bool))
    assert (replay(timeline.keep(kept)).spans.end <= timeline.spans.end[kept]).all()


@given(timelines())
@seldom
def test_busy_and_gaps_make_the_extent_of_a_lane(timeline: Timeline) -> None:
    for one in (timeline, replay(settle(timeline))):
        for lane in range(len(one.lanes)):
            rows = one.rows_of(lane)
            if not len(rows):
                continue
            start, end = one.spans.start[rows], one.spans.end[rows]
            idle = gaps(one, lane)
            assert busy(start, end) + int((idle[:, 1] - idle[:, 0]).sum()) == int(end.max() - start.min())


def busy(start: np.ndarray, end: np.ndarray) -> int:
    """Length of the union, counted instant by instant between all edges."""
    edges = np.unique(np.concatenate([start, end]))
    inside = ((start[:, None] <= edges[:-1]) & (edges[:-1] < end[:, None])).any(axis=0)
    return int(np.diff(edges)[inside].sum())


@given(timelines(), st.integers(2, 3))
@seldom
def test_passes_follow_each_other(timeline: Timeline, passes: int) -> None:
    timeline = settle(timeline)
    later = replay(timeline, passes)
    assert (later.spans.end >= timeline.spans.end).all()
    assert (later.spans.end - later.spans.start >= 0).all()


def faster(timeline: Timeline, names: str, times: int = 2) -> Timeline:
    """Replayed with so much less work in all spans of that name."""
    mine = timeline.spans.name == timeline.names.index(names)
    return replay(timeline.change_spans(work=np.where(mine, timeline.spans.work // times, timeline.spans.work)))


def end_of(timeline: Timeline, kind: Kind) -> int:
    """Of the last span of that kind, in microseconds."""
    return int(timeline.spans.end[timeline.spans.kind == kind][-1]) // 1_000


def test_a_sync_waits_no_longer_than_its_stream() -> None:
    """A kernel of 100 µs, awaited: half as long, it lets the host go 50 µs earlier."""
    timeline = Run.of().launch(kernel=100, name="k").sync().timeline()
    assert end_of(timeline, Kind.SYNC) - end_of(faster(timeline, "k"), Kind.SYNC) == 50


def test_an_event_sync_waits_for_one_command_only() -> None:
    timeline = Run.of().launch(kernel=100, name="k").launch(kernel=8).event_sync().launch(kernel=900).timeline()
    assert end_of(timeline, Kind.SYNC) - end_of(faster(timeline, "k"), Kind.SYNC) == 50


def test_a_command_waits_for_another_stream() -> None:
    timeline = Run.of().launch(kernel=100, name="k").order(7, 8).launch(kernel=20, stream=8, name="late").timeline()
    assert end_of(timeline, Kind.KERNEL) - end_of(faster(timeline, "k"), Kind.KERNEL) == 50


def test_a_full_queue_holds_up_the_launch() -> None:
    """Two commands may be pending: the third launch waits for the first command."""
    run = Run.of(pending=2)
    for _ in range(3):
        run.launch(kernel=100, name="k")
    timeline = run.timeline()
    assert end_of(timeline, Kind.LAUNCH) - end_of(faster(timeline, "k"), Kind.LAUNCH) == 50


@pytest.mark.parametrize("late", [0, 30])
def test_nobody_leaves_a_collective_before_the_last_has_come(late: int) -> None:
    """Rank 1 is 40 µs late as recorded, and `late` µs later still in the replay."""
    run = Run.of(ranks=2).on(1).work(40).on(0).collective(wire=44)
    timeline = run.timeline()
    later = np.where(timeline.spans.kind == Kind.WORK, timeline.spans.work + late * 1_000, timeline.spans.work)
    left = replay(timeline.change_spans(work=later)).spans.end[timeline.spans.kind == Kind.COLLECTIVE]
    assert left.tolist() == [(40 + 6 + 44 + late) * 1_000] * 2


@given(loops())
@seldom
def test_what_nothing_waits_for_may_be_joined(timeline: Timeline) -> None:
    """The brief replay leaves out rows, and puts all others where the whole one does."""
    whole = whole_steps(settle(timeline))
    assert_the_same(whole, passes=6)


def assert_the_same(timeline: Timeline, passes: int) -> None:
    brief, full = run(timeline, passes, brief=True), run(timeline, passes)
    assert brief.pace == full.pace
    known = brief.end > NEVER // 2
    assert (brief.start[known] == full.start[known]).all()
    assert (brief.end[known] == full.end[known]).all()


@given(loops(), st.integers(3, 9))
@seldom
def test_what_is_told_ahead_is_what_every_row_of_every_pass_comes_to(timeline: Timeline, passes: int) -> None:
    """And a launch played with its command is played as the two rows that they are."""
    whole = whole_steps(settle(timeline))
    quick, no_rows = run(whole, passes), np.zeros(0, np.int64)
    with (
        patch("keepbusy.timeline.replay._Engine._advance", return_value=None),
        patch("keepbusy.timeline.replay._paired", return_value=(no_rows, no_rows)),
    ):
        every = run(whole, passes)
    np.testing.assert_array_equal(quick.start, every.start)
    np.testing.assert_array_equal(quick.end, every.end)
    np.testing.assert_array_equal(quick.progress, every.progress)


@pytest.mark.parametrize("kernel", [20, 199])
def test_a_run_is_told_ahead_once_it_repeats_itself(kernel: int) -> None:
    """Whether it is the host that sets the pace, or the device once its queue is full: ten passes are not played."""
    whole = whole_steps(loop(lambda run: run.work(55).launch(kernel=kernel), pending_limit=20))
    with patch("keepbusy.timeline.replay._Engine.play_once", autospec=True, side_effect=_Engine.play_once) as played:
        assert run(whole, passes=10).pace == {20: 60_000, 199: 200_000}[kernel]
    assert played.call_count < 10


def test_what_somebody_waits_for_is_not_joined() -> None:
    """Workers that are slower than the loop: it waits for the batch that comes next, not for the last one so far."""

    def body(run: Run) -> None:
        run.batch(900).launch(300).work(50)

    assert_the_same(whole_steps(loop(body, steps=8)), passes=3)


def test_the_slowest_lane_sets_the_pace() -> None:
    """The host needs 60 µs a step and the device 200: their pace is the device's, once its queue is full."""
    whole = whole_steps(loop(lambda run: run.work(55).launch(kernel=199), pending_limit=20))
    steady_run = run(whole, passes=10)
    assert steady_run.pace == 200_000
    assert whole.lanes[steady_run.slowest].name == "stream 7"
