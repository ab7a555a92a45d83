"""Replay: an unchanged run stays where it was measured, and a change moves only what it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import timelines

from keepbusy.timeline.model import NONE, Kind, Lane, LinkKind, Links, Meetings, Spans, Timeline
from keepbusy.timeline.replay import replay
from keepbusy.timeline.settle import settle

LANES = (Lane(0, None, 0, "main"), Lane(0, 0, 7), Lane(0, 0, 8))
LAUNCH, ORDER = LinkKind.LAUNCH, LinkKind.ORDER

seldom = settings(max_examples=120, deadline=None)


def settled(
    rows: list[tuple[int, Kind, int, int]], links: list[tuple[int, int, LinkKind]], **columns: list[int]
) -> Timeline:
    """A timeline of rows (lane, kind, start, end), in microseconds."""
    lane, kind, start, end = zip(*rows, strict=True)
    source, target, link = zip(*links, strict=True) if links else ((), (), ())
    times = {"start": np.array(start) * 1_000, "end": np.array(end) * 1_000}
    spans = Spans.of(len(rows), lane=lane, kind=kind, **times, **columns)
    return settle(Timeline(LANES, ("span",), spans, Links.of(len(links), source=source, target=target, kind=link)))


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
    gone = (timeline.links.kind == ORDER) & np.array(data.draw(some_of(len(timeline.links))), bool)
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
            gaps = one.gaps(lane)
            assert busy(start, end) + int((gaps[:, 1] - gaps[:, 0]).sum()) == int(end.max() - start.min())


def busy(start: np.ndarray, end: np.ndarray) -> int:
    """Length of the union, counted instant by instant between all edges."""
    edges = np.unique(np.concatenate([start, end]))
    inside = ((start[:, None] <= edges[:-1]) & (edges[:-1] < end[:, None])).any(axis=0)
    return int(np.diff(edges)[inside].sum())


@given(timelines(), st.integers(2, 3))
@seldom
def test_rounds_follow_each_other(timeline: Timeline, rounds: int) -> None:
    timeline = settle(timeline)
    later = replay(timeline, rounds)
    assert (later.spans.end >= timeline.spans.end).all()
    assert (later.spans.end - later.spans.start >= 0).all()


def test_a_sync_waits_no_longer_than_its_stream() -> None:
    """Launch, kernel of 100 µs, sync: a kernel half as long ends the sync 50 µs earlier."""
    rows = [(0, Kind.LAUNCH, 0, 5), (1, Kind.KERNEL, 6, 106), (0, Kind.SYNC, 5, 108)]
    timeline = settled(rows, [(0, 1, LAUNCH)], awaits=[NONE, NONE, 1])
    assert timeline.spans.work.tolist() == [5_000, 100_000, 2_000]
    shorter = replay(timeline.change_spans(work=timeline.spans.work // [1, 2, 1]))
    assert shorter.spans.end.tolist() == [5_000, 56_000, 58_000]


def test_an_event_sync_waits_for_one_command_only() -> None:
    """The same by an event: the wait is a consequence of the kernel, not work of the sync."""
    rows = [
        (0, Kind.LAUNCH, 0, 5),
        (1, Kind.KERNEL, 6, 106),
        (0, Kind.LAUNCH, 5, 10),
        (1, Kind.KERNEL, 106, 900),
        (0, Kind.SYNC, 10, 108),
    ]
    timeline = settled(rows, [(0, 1, LAUNCH), (2, 3, LAUNCH), (1, 4, ORDER)])
    shorter = replay(timeline.change_spans(work=timeline.spans.work // [1, 2, 1, 1, 1]))
    assert shorter.spans.end[4] == 58_000


def test_a_command_waits_for_another_stream() -> None:
    rows = [(0, Kind.LAUNCH, 0, 5), (1, Kind.KERNEL, 6, 106), (0, Kind.LAUNCH, 5, 10), (2, Kind.KERNEL, 107, 120)]
    timeline = settled(rows, [(0, 1, LAUNCH), (2, 3, LAUNCH), (1, 3, ORDER)])
    shorter = replay(timeline.change_spans(work=timeline.spans.work // [1, 2, 1, 1]))
    assert shorter.spans.start[3] == 57_000


def test_a_full_queue_holds_up_the_launch() -> None:
    """Two commands may be pending: the third launch waits for the first command."""
    rows = [
        (0, Kind.LAUNCH, 0, 5),
        (1, Kind.KERNEL, 6, 106),
        (0, Kind.LAUNCH, 5, 10),
        (1, Kind.KERNEL, 106, 206),
        (0, Kind.LAUNCH, 10, 109),
        (1, Kind.KERNEL, 206, 306),
    ]
    links = [(0, 1, LAUNCH), (2, 3, LAUNCH), (4, 5, LAUNCH)]
    unlimited = settled(rows, links)
    timeline = settle(unlimited.change(facts={"pending_limit": 2}))
    assert timeline.spans.work[4] == 3_000
    assert replay(timeline).spans.end.tolist() == timeline.spans.end.tolist()


@pytest.mark.parametrize("late", [0, 30])
def test_nobody_leaves_a_collective_before_the_last_has_come(late: int) -> None:
    lanes = (Lane(0, None, 0), Lane(0, 0, 7), Lane(1, None, 0), Lane(1, 1, 7))
    rows = [(0, 0, 5), (1, 6, 90), (2, 0, 45), (3, 46, 92)]
    kinds = [Kind.LAUNCH, Kind.COLLECTIVE, Kind.LAUNCH, Kind.COLLECTIVE]
    lane, start, end = (np.array(one) for one in zip(*rows, strict=True))
    spans = Spans.of(4, lane=lane, kind=kinds, start=start * 1_000, end=end * 1_000, meeting=[NONE, 0, NONE, 0])
    links = Links.of(2, source=[0, 2], target=[1, 3])
    timeline = settle(Timeline(lanes, ("span",), spans, links, meetings=Meetings.of(1, members=2, present=2)))
    assert timeline.spans.work.tolist() == [5_000, 44_000, 45_000, 46_000]
    later = timeline.change_spans(start=timeline.spans.start + np.array([0, 0, late, 0]) * 1_000)
    assert replay(later).spans.end.tolist() == [5_000, (90 + late) * 1_000, (45 + late) * 1_000, (92 + late) * 1_000]
