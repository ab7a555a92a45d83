"""A log as a timeline: the host's calls with their lines, what it did between them, and the GPU's commands."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import BACK, LAUNCH, US, HandwrittenLog, recorded, times, two_streams_and_an_event
from hypothesis import given
from hypothesis import strategies as st

import keepbusy
from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.log_file import CallFlag, DriverCall, DriverLog, StackFrame
from keepbusy.log.log_timeline import timeline_of_log
from keepbusy.log.rebuild import rebuild
from keepbusy.timeline.model import EVERY_LANE, NONE, Kind, LinkKind, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.replay import replay


def timeline(written: HandwrittenLog, begins: tuple[float, ...] = ()) -> Timeline:
    log = written.log()
    taught = times(log, 2, 50)
    return timeline_of_log(log, rebuild(log, taught), taught, [round(begin * US) for begin in begins])


def told(of: Timeline, lane: int) -> list[tuple[str, int, int]]:
    """Kind, start and end of each span of a lane, in microseconds."""
    rows = of.rows_of(lane)
    columns = of.spans.kind[rows], of.spans.start[rows] // US, of.spans.end[rows] // US
    return [(Kind(kind).name, int(start), int(end)) for kind, start, end in zip(*columns, strict=True)]


def test_between_calls_the_host_works_and_the_gpu_has_a_lane_for_each_stream() -> None:
    written = HandwrittenLog()
    written.call("launch", 64, took=4)
    written.now += 6
    written.call("launch", 1, took=2, stream=3)
    written.call("context_sync", took=60)
    found = timeline(written)
    assert told(found, 0) == [("LAUNCH", 0, 4), ("WORK", 4, 10), ("LAUNCH", 10, 12), ("SYNC", 12, 72)]
    assert told(found, 1) == [("KERNEL", 5, 69)]  # as long as the wait really took
    assert told(found, 2) == [("KERNEL", 15, 17)]
    assert found.spans.awaits[found.spans.kind == Kind.SYNC].tolist() == [EVERY_LANE]
    assert [lane.number for lane in found.lanes] == [0, 0, 3]


def test_a_copy_that_is_waited_for_is_a_launch_and_a_wait() -> None:
    written = HandwrittenLog()
    written.call("launch", 64)
    written.call("copy_to_host", value=4096, took=90, flags=CallFlag.PAGEABLE)
    found = timeline(written)
    assert told(found, 0) == [("LAUNCH", 0, 1), ("LAUNCH", 1, 6), ("SYNC", 6, 91)]
    [copy] = found.rows_of(1)[1:]
    assert (found.spans.size[copy], found.spans.pinned[copy]) == (4096, 0)


def test_an_event_orders_streams_and_the_host() -> None:
    written = two_streams_and_an_event()
    found = timeline(written)
    orders = found.links.take(found.links.kind == LinkKind.ORDER)
    [first], [second] = found.rows_of(1), found.rows_of(2)
    [sync] = np.flatnonzero(found.spans.kind == Kind.SYNC)
    assert {(int(a), int(b)) for a, b in zip(orders.source, orders.target, strict=True)} == {
        (first, second),
        (first, sync),
    }


def test_calls_in_a_row_share_the_frames_that_they_have_in_common() -> None:
    written, main = HandwrittenLog(), StackFrame("train.py", 9, "<module>")
    written.stacks = {
        1: (StackFrame("model.py", 3, "forward"), main),
        2: (StackFrame("model.py", 4, "forward"), main),
    }
    for stack in (1, 1, 2, 0, 1):
        written.call("launch", 1, took=10, stack=stack)
    found = timeline(written)
    frames = [
        (found.names[name], int(parent), int(start) // US, int(end) // US)
        for name, parent, start, end in zip(
            found.frames.name, found.frames.parent, found.frames.start, found.frames.end, strict=True
        )
    ]
    assert frames == [
        ("train.py(9): <module>", NONE, 0, 50),
        ("model.py(3): forward", 0, 0, 20),
        ("model.py(4): forward", 0, 20, 30),
        ("model.py(3): forward", 0, 40, 50),
    ]
    assert found.spans.frame[found.spans.kind == Kind.LAUNCH].tolist() == [1, 1, 2, NONE, 3]


def test_iterations_begin_where_they_are_said_to() -> None:
    written = HandwrittenLog()
    for _ in range(4):
        written.call("launch", 1, took=10)
        written.now += 10
    found = timeline(written, (0, 20, 40, 60))
    assert found.spans.start[found.marks].tolist() == [0, 20 * US, 40 * US, 60 * US]


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 64]), st.integers(0, 2), st.integers(1, 40), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_no_lane_does_two_things_at_once_and_the_run_replays_as_it_was(
    calls: list[tuple[int, int, int, bool]],
) -> None:
    written = HandwrittenLog()
    for grid, stream, took, waits in calls:
        written.call("launch", grid, stream=stream, took=took)
        if waits:
            written.call("context_sync", took=100 + took)
    found = timeline(written)
    for lane in range(len(found.lanes)):
        rows = found.rows_of(lane)
        assert all(found.spans.end[a] <= found.spans.start[b] + 1 for a, b in pairwise(rows))
    assert np.abs(replay(found).spans.end - found.spans.end).max() <= 2


@pytest.mark.parametrize(("name", "lines"), [("graph", {209, 338}), ("copies", {*range(222, 231)})])
def test_a_run_on_an_h100_is_explained_from_its_log_alone(name: str, lines: set[int], tmp_path: Path) -> None:
    """The hundred iterations after the profiler's window; in `graph` one line waits, and one of the benchmark."""
    log, taught, run, begins = recorded(name, tmp_path)
    found = timeline_of_log(log, run, taught, begins, source="driver_log.py")
    assert len(found.marks) == len(begins) == 100
    assert np.abs(replay(found).spans.end - found.spans.end).max() < 100 * US
    told = keepbusy.explain(found)
    assert told.steps == 99
    assert told.plain_step == pytest.approx((begins[-1] - begins[0]) / 99, rel=0.05)
    blamed = {where.line for fix in told.plan for where in fix.where}
    assert blamed
    assert blamed <= lines


def late_rank(computes: float) -> DriverLog:
    """Eight iterations: a kernel, a collective that both ranks end at once, and a read of the result."""
    written = HandwrittenLog()
    written.stacks = {1: (StackFrame("train.py", 5, "<module>"),), 2: (StackFrame("train.py", 6, "<module>"),)}
    for _ in range(9):
        step = written.now
        for _ in range(2):
            written.call("launch", 64, took=10, stack=1)
        begin = written.now
        written.call("all_reduce", value=1000, took=2, stack=2)
        written.now = begin + 1
        written.call("launch", 1, took=0.5, stack=2)
        written.now = begin + 3
        end = step + LAUNCH / US + 2 * 400 + 2 + 20 + BACK / US
        written.call("stream_sync", took=end - written.now, stack=2)
    log = written.log()
    log.calls[written.calls["all_reduce", 0]] = DriverCall("all_reduce", 900, grid=(7, 0, 0))
    log.communicators.append({"communicator": 900, "id": 5, "ranks": 2, "rank": int(computes == 400)})
    return log


def test_the_rank_that_computes_more_is_late() -> None:
    logs, taught = [late_rank(50), late_rank(400)], []
    for log, large in zip(logs, (50, 400), strict=True):
        known = times(log, 20, large)
        number = next(number for number, call in log.calls.items() if call.grid[:1] == (1,))
        known.fastest = {(number, 1000, 0): 20.0 * US}
        taught.append(known)
    runs = rebuild_ranks(logs, taught)
    each = zip(logs, runs, taught, strict=True)
    begins = [round(number * (1_000 * LAUNCH / US + (2 * 400 + 22) * US + BACK)) for number in range(9)]
    found = merge([timeline_of_log(*one, begins, rank) for rank, one in enumerate(each)])
    assert len(found.meetings) == 9
    told = keepbusy.explain(found)
    assert [fix.causes for fix in told.plan][:1] == [("peer_late",)]
    assert [(late.rank, str(late.where)) for late in told.late] == [(1, "train.py:5")]
