"""The GPU's timeline, rebuilt from a log and one window of the profiler: logs written by hand, and a real one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import BACK, GAP, LAUNCH, US, HandwrittenLog, recorded, times, two_streams_and_an_event
from hypothesis import given
from hypothesis import strategies as st

from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.kernel_times import DeviceEvent, KernelTimes, learn
from keepbusy.log.log_file import CallFlag, DriverCall, DriverLog, collective_of
from keepbusy.log.rebuild import RebuiltRun, RebuiltWait, how_close, rebuild
from keepbusy.timeline.model import PENDING_LIMIT


def rebuilt(written: HandwrittenLog, small: float, large: float = 0.0) -> RebuiltRun:
    log = written.log()
    return rebuild(log, times(log, small, large))


def test_an_idle_gpu_begins_when_a_launch_arrives_and_a_busy_one_after_what_it_does() -> None:
    written = HandwrittenLog()
    for grid in (1, 64, 1):
        written.call("launch", grid, took=10)
    run = rebuilt(written, 2, 50)
    assert [*run.begin] == [LAUNCH, 10 * US + LAUNCH, 10 * US + LAUNCH + 50 * US + GAP]
    assert [*(run.end - run.begin)] == [2 * US, 50 * US, 2 * US]
    assert run.known == 1


def test_a_wait_ends_once_the_last_command_has() -> None:
    written = HandwrittenLog()
    written.call("launch", 64)
    written.call("launch", 1, stream=1)
    written.call("stream_sync", stream=1)
    written.call("context_sync", took=60)
    one, all_of_it = rebuilt(written, 2, 50).waits
    assert one.predicted == 1 * US + LAUNCH + 2 * US + BACK
    assert all_of_it.predicted == LAUNCH + 50 * US + BACK


def test_a_stream_waits_for_the_event_of_another_and_the_host_does_too() -> None:
    written = two_streams_and_an_event()
    run = rebuilt(written, 2, 50)
    assert run.begin[1] == pytest.approx(run.end[0] + GAP, abs=10)
    assert run.waits[0].predicted == LAUNCH + 50 * US + BACK
    assert run.end[0] == run.waits[0].ended - BACK  # as is known from then on


def test_commands_of_a_graph_run_where_it_is_launched_and_not_where_it_was_captured() -> None:
    written = HandwrittenLog()
    written.call("capture_begin", stream=1)
    written.call("launch", 1, stream=1, flags=CallFlag.CAPTURED)
    written.call("launch", 64, stream=1, flags=CallFlag.CAPTURED)
    written.call("capture_end", stream=1, value=600)
    written.call("graph_create", value=700)
    written.call("graph_launch", stream=1, value=700)
    log = written.log()
    log.calls[written.calls["graph_create", 0]] = DriverCall("graph_create", 600)
    run = rebuild(log, times(log, 2, 50))
    assert [*run.issuers] == [5, 5]
    assert [*run.begin] == [5 * US + LAUNCH, 5 * US + LAUNCH + 2 * US]


def test_a_call_that_failed_ran_nothing() -> None:
    written = HandwrittenLog()
    written.call("launch", 1, flags=CallFlag.FAILED)
    written.call("stream_sync", flags=CallFlag.FAILED)
    run = rebuilt(written, 2)
    assert (len(run.begin), run.waits) == (0, [])


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_waits_tell_how_fast_the_gpu_is_and_the_timeline_ends_with_them(slower: float) -> None:
    written, ends = HandwrittenLog(), list[float]()
    for _ in range(20):
        begin = written.now * US
        for _ in range(40):
            written.call("launch", 64)
        ends.append(begin + LAUNCH + 40 * 50 * US * slower + 39 * GAP)
        written.call("stream_sync", took=(ends[-1] + BACK) / US - written.now)
    run = rebuilt(written, 2, 50)
    assert how_close(run.waits)[0][0] == pytest.approx(abs(1 - 1 / slower) if slower > 1 else 1 - slower, abs=0.03)
    assert (how_close(run.waits)[0][6:] < 0.01).all()
    assert run.end[39::40] == pytest.approx(ends, abs=2 * US)


def test_a_wait_that_finds_the_gpu_done_takes_what_such_calls_take_from_there() -> None:
    written = HandwrittenLog()
    for _ in range(3):
        written.call("launch", 1, took=100)
        written.call("stream_sync", took=4)
    assert [wait.predicted - wait.begin for wait in rebuilt(written, 2).waits] == [BACK, 4 * US, 4 * US]


@given(st.lists(st.tuples(st.sampled_from([1, 64]), st.integers(0, 2), st.integers(1, 40), st.booleans()), max_size=30))
def test_a_stream_runs_one_command_at_a_time_and_none_before_its_call(calls: list[tuple[int, int, int, bool]]) -> None:
    written, streams = HandwrittenLog(), list[int]()
    for grid, stream, took, waits in calls:
        written.call("launch", grid, stream=stream, took=took)
        streams.append(stream)
        if waits:
            written.call("context_sync", took=2 * took)
    if not calls:
        written.call("context_sync")
    run = rebuilt(written, 2, 50)
    log = written.log()
    assert (run.begin >= log.begin[run.issuers]).all()
    for stream in {*streams}:
        mine = [at for at, one in enumerate(streams) if one == stream]
        assert all(run.end[before] <= run.begin[after] + 1 for before, after in pairwise(mine))


def test_an_event_that_is_waited_for_tells_how_far_all_streams_are() -> None:
    """The host waits for one stream's event, and then for what another stream did after it."""
    written = two_streams_and_an_event()
    written.call("stream_sync", stream=1, took=70)
    run = rebuilt(written, 50, 50)
    event, stream = run.waits
    assert run.end[0] == event.ended - BACK
    assert run.begin[1] == pytest.approx(run.end[0] + GAP, abs=500)
    assert stream.predicted == pytest.approx(run.end[0] + GAP + 50 * US + BACK, rel=0.2)


def test_a_launch_that_waits_for_room_tells_to_the_command_how_far_the_gpu_is() -> None:
    """The GPU becomes slower, and nothing waits for it but the full queue."""
    written, room, ends = HandwrittenLog(), PENDING_LIMIT, [0.0]
    for number in range(4 * room):
        free = ends[number - room + 1] if number >= room else 0.0
        written.call("launch", 1, took=max(2.0, free - written.now))
        ends.append(max(ends[-1], written.now) + (200.0 if number > 2 * room else 150.0))
    run = rebuilt(written, 149)
    assert [*run.held_when_full[-3:]] == [room - 1] * 3
    assert run.end[3 * room - 1] / US == pytest.approx(ends[3 * room], abs=500)


def test_a_launch_that_waits_for_room_and_longer_for_something_else_tells_nothing() -> None:
    """PyTorch's profiler holds a launch up for a quarter of a second where it opens."""
    written, room, each = HandwrittenLog(), PENDING_LIMIT, 200.0
    for number in range(4 * room):
        free = (number - room + 1) * each if number >= room else 0.0
        written.call("launch", 1, took=max(250_000.0 if number == 1_500 else 2.0, free - written.now))
    run = rebuilt(written, each - 1)
    assert run.end[1_500] == pytest.approx(1_500 * each * US, rel=0.01)


# several ranks


def rank(group: bool) -> DriverLog:
    """In each of three steps a kernel, then a collective that takes 20 us once all are there."""
    written = HandwrittenLog()
    for _ in range(3):
        step = written.now
        written.call("launch", 64, took=10)
        if group:
            written.call("group_start")
        begin = written.now
        written.call("all_reduce", value=1000, took=2)
        if group:
            begin = written.now
            written.call("group_end", took=2)
        written.now = begin + 1
        written.call("launch", 1, took=0.5)
        written.now = begin + 3
        written.call("stream_sync", took=step + (LAUNCH + 70 * US + GAP + 20 * US + BACK) / US - written.now)
    log = written.log()
    log.calls[written.calls["all_reduce", 0]] = DriverCall("all_reduce", 900)
    log.communicators.append({"communicator": 900, "id": 5, "ranks": 2, "rank": 0})
    return log


@pytest.mark.parametrize("group", [False, True])
def test_a_collective_ends_for_all_once_the_last_rank_has_arrived(group: bool) -> None:
    logs = [rank(group), rank(group)]
    collective = [collective_of(log) for log in logs]
    taught = list[KernelTimes]()
    for log, large in zip(logs, (40, 70), strict=True):
        known = times(log, 20, large)
        number = next(number for number, call in log.calls.items() if call.grid[:1] == (1,))
        known.fastest = {(number, 1000, 0): 20 * US}
        taught.append(known)
    assert [int((one >= 0).sum()) for one in collective] == [3, 3]
    early, late = rebuild_ranks(logs, taught)
    assert early.end[1::2] == pytest.approx(late.end[1::2])
    assert late.end[1] == pytest.approx(late.begin[0] + 70 * US + GAP + 20 * US)
    assert early.begin[1] == pytest.approx(late.begin[1] - 30 * US)
    for run in (early, late):
        assert [wait.predicted for wait in run.waits] == pytest.approx([wait.ended for wait in run.waits], abs=US)


# what a window teaches


def event(kind: str, grid: int, issued: float, start: float, duration: float) -> DeviceEvent:
    shape = ((grid, 1, 1), (32, 1, 1)) if kind == "launch" else ((), ())
    return DeviceEvent(kind, *shape, 7, issued * US, start * US, duration * US)


def test_durations_are_those_of_commands_of_the_same_grid() -> None:
    written = HandwrittenLog()
    for grid in (1, 64, 1, 64):
        written.call("launch", grid, took=100)
    written.call("launch", 32)
    log = written.log()
    seen = [
        event("launch", grid, at, at + 6, took)
        for grid, at, took in ((1, 0, 2), (64, 100, 50), (1, 200, 4), (64, 300, 50))
    ]
    taught = learn(log, 0, 350 * US, seen)
    durations, known = taught.of(log, np.arange(5))
    assert [*durations] == [3 * US, 50 * US, 3 * US, 50 * US, taught.by_function[7]]
    assert [*known] == [True] * 4 + [False]
    assert taught.launch == pytest.approx(6 * US)


def test_another_order_is_no_hindrance_and_a_shape_that_was_not_seen_as_often_teaches_nothing() -> None:
    written = HandwrittenLog()
    for grid in (1, 64, 64):
        written.call("launch", grid)
    log = written.log()
    taught = learn(log, 0, 100 * US, [event("launch", 64, 1, 9, 50), event("launch", 1, 0, 60, 2)])
    assert {key[0]: duration for key, duration in taught.durations.items()} == {1: 2 * US}


def test_a_copy_of_another_size_takes_what_its_bytes_take() -> None:
    written = HandwrittenLog()
    for size in (1_000_000, 2_000_000, 4_000_000):
        written.call("copy_to_gpu", value=size, took=1000)
    log = written.log()
    seen = [event("copy", 0, at, at + 5, took) for at, took in ((0, 60), (1000, 110))]
    durations, known = learn(log, 0, 1_500 * US, seen).of(log, np.arange(3))
    assert durations[2] == pytest.approx(210 * US)
    assert known.all()


def test_a_copy_that_was_waited_for_alone_tells_of_its_like_and_nothing_of_kernels() -> None:
    """From fresh memory it takes three times what its bytes would."""
    written = HandwrittenLog()
    for _ in range(5):
        written.call("copy_to_host", value=1_000_000, flags=CallFlag.PAGEABLE, took=300)
        written.call("launch", 64)
        written.call("stream_sync", took=(LAUNCH + 50 * US + BACK) / US - 1)
    run = rebuilt(written, 2, 50)
    copies, kernels = run.waits[0::2], run.waits[1::2]
    assert abs(copies[0].predicted - copies[0].ended) > 100 * US
    assert all(abs(one.predicted - one.ended) < 3 * US for one in (*copies[1:], *kernels))


def test_most_of_what_was_waited_says_how_close_it_is() -> None:
    waits = [RebuiltWait(0, 0, 10 * US, 11 * US)] * 98 + [RebuiltWait(0, 0, 100 * US, 20 * US)] * 2
    wrong, apart, share = how_close(waits)
    assert ([*wrong], np.median(apart)) == ([0.8, 0.8], US)
    assert share == pytest.approx(200 / (200 + 98 * 11))
    assert [len(one) for one in how_close([])[:2]] == [0, 0]


def test_gaps_are_those_of_commands_that_were_issued_in_time() -> None:
    written = HandwrittenLog()
    for _ in range(4):
        written.call("launch", 64)
    written.call("stream_sync", took=205 + 3 * 1.5 + 4 - 4)
    seen = [event("launch", 64, at, 5 + at * 51.5, 50) for at in range(4)]
    taught = learn(written.log(), 0, 4 * US, seen)
    assert (taught.gap, taught.launch) == (pytest.approx(1_500), pytest.approx(LAUNCH))
    assert taught.back == pytest.approx(4 * US, abs=US)


@pytest.mark.parametrize("name", ["graph", "copies"])
def test_a_run_on_an_h100_closes_at_its_waits(name: str, tmp_path: Path) -> None:
    """Recorded by `benchmarks/driver_log.py complete`; of the trace what is read of it, and of files their names."""
    _, _, run, begins = recorded(name, tmp_path)
    later = [wait for wait in run.waits if wait.begin > begins[0]]
    wrong = np.array([wait.predicted - wait.ended for wait in later])
    assert len(later) >= 100
    assert run.known > 0.99
    assert np.median(np.abs(wrong)) < 2 * US
    wrong_by, *_ = how_close(run.waits)
    assert np.median(wrong_by) < 0.03 if name == "graph" else not len(wrong_by[run.waits[0].row :])


def test_a_large_copy_from_pageable_memory_ends_when_its_call_does() -> None:
    written = HandwrittenLog()
    written.call("launch", 64)
    written.call("copy_to_gpu", value=1 << 20, took=400, flags=CallFlag.PAGEABLE)
    written.call("launch", 1)
    run = rebuilt(written, 2, 50)
    assert run.end[1] == 401 * US - BACK
    assert run.begin[1] == run.end[0] + GAP
    assert run.begin[2] == 401 * US + LAUNCH
    assert not run.waits


@pytest.mark.parametrize("slower", [0.9, 1.0, 1.1])
def test_a_full_queue_tells_how_fast_the_gpu_is(slower: float) -> None:
    """No other wait does: the host only launches, and from the thousandth command on waits for room each time."""
    written, room, each = HandwrittenLog(), 1000, 200.0 * slower
    for number in range(6_000):
        ready = (number - room) * each if number >= room else 0.0
        written.call("launch", 1, took=max(2.0, ready - written.now))
    run = rebuilt(written, 199)
    assert run.end[-1] == pytest.approx(6_000 * each * US, rel=0.02)
    lasted = run.end[3_000:-1_000] - run.begin[3_000:-1_000]
    assert np.median(lasted) == pytest.approx(each * US, rel=0.02)


# copies that are waited for


def copied_home(size: int, kernels: float, copies: list[float]) -> HandwrittenLog:
    """In each iteration ten kernels, and a copy of so many bytes home: its call ends when all that is done."""
    written = HandwrittenLog()
    for copy in copies:
        begin = written.now
        for _ in range(10):
            written.call("launch", 64, took=5)
        written.now += 5
        until = begin + LAUNCH / US + 10 * kernels + 9 * GAP / US + GAP / US + copy + BACK / US
        written.call("copy_to_host", took=until - written.now, value=size, flags=CallFlag.PAGEABLE)
        written.now += 20
    return written


def kernels_and_copies(written: HandwrittenLog) -> tuple[float, float]:
    """What the last kernel and the last copy take, rebuilt, in microseconds; the window saw kernels of 50."""
    log = written.log()
    run = rebuild(log, times(log, 2, 50))
    took = (run.end - run.begin) / US
    return float(took[-2]), float(took[-1])


def test_what_a_large_copy_takes_longer_than_usual_makes_no_kernel_faster_or_slower() -> None:
    """Its host memory is new at first, and then it is not."""
    kernels, copy = kernels_and_copies(copied_home(1 << 24, 50, [8_000.0, 8_000.0, *[1_700.0] * 30]))
    assert kernels == pytest.approx(50, rel=0.02)
    assert copy == pytest.approx(1_700, rel=0.02)


def test_a_small_copy_tells_how_fast_kernels_are() -> None:
    kernels, copy = kernels_and_copies(copied_home(4, 65, [1.5] * 30))
    assert kernels == pytest.approx(65, rel=0.05)
    assert copy < 10
