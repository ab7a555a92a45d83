"""CUDA graphs on the clock: what is captured, what a capture forbids, and how a replay runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from virtual_programs import clock, operator, rows

from keepbusy.timeline.model import Direction, FrameKind, Kind
from keepbusy.timeline.replay import replay
from keepbusy.virtual.clock.captures import CaptureError, Graph, Moment
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.device_memory import SMALL_SEGMENT, Memory
from keepbusy.virtual.memory_blocks import Block

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
MB = 1 << 20
UNSUPPORTED = "operation not permitted when stream is capturing"


def captured(*works: int) -> tuple[Clock, int]:
    """A clock with a capture under way, and the stream that it began on."""
    on = clock()
    stream = on.new_stream()
    on.capture(stream)
    for work in works:
        operator(on, stream, work)
    return on, stream


def after(on: Clock, begun: int) -> list[tuple[str, str, int, int]]:
    return [row for row in rows(on.timeline()) if row[2] >= begun and row[1] != "work"]


def test_nothing_runs_during_a_capture() -> None:
    on, stream = captured(100, 50)
    on.copy(stream, IN, 10, pinned=True, non_blocking=True)
    on.end_capture(stream)
    assert {row[1] for row in rows(on.timeline())} == {"work"}


def test_a_replay_is_one_launch_and_its_kernels_follow_closely() -> None:
    on, stream = captured(100, 50)
    graph = on.end_capture(stream)
    begun = on.now()
    on.replay(graph, stream)
    launch, first, second = after(on, begun)
    assert [launch[1], first[1], second[1]] == ["launch", "kernel", "kernel"]
    assert launch[3] - launch[2] == 20 + 2  # the graph, and each of its commands
    assert first[2] == launch[2] + 20
    assert second[2] == first[3] + 1


def test_it_is_replayed_on_any_stream_behind_what_stands_there() -> None:
    on, stream = captured(100)
    graph, other = on.end_capture(stream), on.default_stream()
    operator(on, other, 5_000)
    on.replay(graph, other)
    *_, before, kernel = (row for row in rows(on.timeline()) if row[1] == "kernel")
    assert (kernel[0], kernel[2]) == (before[0], before[3] + 2)


def test_an_unchanged_replay_of_replays_is_the_identity() -> None:
    on, stream = captured(100, 50, 70)
    graph = on.end_capture(stream)
    for _ in range(5):
        on.replay(graph, stream)
        on.sync_stream(stream)
    timeline = on.timeline()
    again = replay(timeline)
    assert (again.spans.start == timeline.spans.start).all()
    assert (again.spans.end == timeline.spans.end).all()


def test_a_stream_that_waits_joins_until_the_end() -> None:
    on, stream = captured(100)
    side = on.new_stream()
    on.wait(side, on.record(stream))
    assert on.capturing(side)
    operator(on, side, 50)
    on.wait(stream, on.record(side))
    graph = on.end_capture(stream)
    assert not on.capturing(side)
    assert [node.work for node in graph.nodes] == [100, 50]


def forked(*, early: bool = False, last: bool = False) -> tuple[Clock, int]:
    """A clock and a replayed graph of two branches: 100 and 300, and 80 after both unless the side comes `last`."""
    on, stream = captured()
    side = on.new_stream()
    if early:
        on.wait(side, on.record(stream))
    operator(on, stream, 50)
    if not early:
        on.wait(side, on.record(stream))
    operator(on, side, 300)
    operator(on, stream, 100)
    on.wait(stream, on.record(side))
    if not last:
        operator(on, stream, 80)
    graph = on.end_capture(stream)
    on.replay(graph, stream)
    return on, stream


def kernels(on: Clock) -> list[tuple[str, int, int]]:
    return [(lane, start, end) for lane, kind, start, end in rows(on.timeline()) if kind == "kernel"]


def test_branches_run_side_by_side_and_meet_where_events_say() -> None:
    (here, _, forked_at), (beside, side_begun, side_end), second, third = kernels(forked()[0])
    assert (side_begun, side_end - side_begun) == (forked_at + 2, 300)
    assert second == (here, forked_at + 1, forked_at + 101)
    assert third == (here, side_end + 2, side_end + 82)
    assert beside != here


def test_a_branch_from_the_beginning_comes_after_what_stands_in_the_stream() -> None:
    on, stream = forked(early=True)
    end = kernels(on)[-1][2]
    operator(on, stream, 5_000)
    graph = captured_again(on, stream)
    on.replay(graph, stream)
    *_, long, main, side = kernels(on)
    assert long[1] >= end
    assert main[1] == side[1] == long[2] + 2


def captured_again(on: Clock, stream: int) -> Graph:
    """Two branches of one kernel each, apart from the beginning."""
    on.capture(stream)
    side = on.new_stream()
    on.wait(side, on.record(stream))
    operator(on, stream, 10)
    operator(on, side, 10)
    on.wait(stream, on.record(side))
    return on.end_capture(stream)


def test_what_follows_a_graph_waits_for_all_its_branches() -> None:
    on, stream = forked(last=True)
    operator(on, stream, 10)
    _, (_, _, side_end), _, after = kernels(on)
    assert after[1] == side_end + 2
    on, stream = forked(last=True)
    on.sync_stream(stream)
    assert on.now() == kernels(on)[1][2] + 4


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_replays_of_branches_replay_to_themselves(early: bool, last: bool) -> None:
    on, stream = forked(early=early, last=last)
    graph = captured_again(on, stream)
    for _ in range(6):
        on.replay(graph, stream)
        operator(on, stream, 30)
    on.sync_device()
    timeline = on.timeline()
    again = replay(timeline)
    assert (again.spans.start == timeline.spans.start).all()
    assert (again.spans.end == timeline.spans.end).all()


def test_work_that_never_comes_back_spoils_the_graph() -> None:
    on, stream = captured(100)
    side = on.new_stream()
    on.wait(side, on.record(stream))
    operator(on, side, 50)
    with pytest.raises(CaptureError, match="unjoined work") as refused:
        on.end_capture(stream)
    assert refused.value.code == 904
    assert not on.capturing(stream)


def test_a_stream_that_joins_and_does_nothing_need_not_come_back() -> None:
    on, stream = captured(100)
    on.wait(on.new_stream(), on.record(stream))
    assert len(on.end_capture(stream).nodes) == 1


EARLIER = Moment(0, 0)
FORBIDDEN: dict[str, Callable[[Clock, int], object]] = {
    "cudaStreamSynchronize": lambda on, stream: on.sync_stream(stream),
    "cudaDeviceSynchronize": lambda on, stream: on.sync_device(),
    "cudaStreamQuery": lambda on, stream: on.idle(stream),
    "cudaEventQuery": lambda on, stream: on.query(EARLIER),
    "cudaEventSynchronize": lambda on, stream: on.sync_moment(EARLIER),
    "cudaEventElapsedTime": lambda on, stream: on.elapsed(EARLIER, EARLIER),
    "cudaMemcpyAsync": lambda on, stream: on.copy(stream, OUT, 10, non_blocking=True),
    "cudaGraphLaunch": lambda on, stream: on.replay(on.captures[stream], stream),
    "cudaStreamBeginCapture": lambda on, stream: on.capture(stream),
}


@pytest.mark.parametrize("call", FORBIDDEN)
def test_what_a_capture_forbids_ends_it(call: str) -> None:
    on, stream = captured(100)
    with pytest.raises(CaptureError, match=UNSUPPORTED) as refused:
        FORBIDDEN[call](on, stream)
    assert call in str(refused.value)
    with pytest.raises(CaptureError, match="previous error during capture"):
        operator(on, stream, 50)
    on.end()
    with pytest.raises(CaptureError, match="previous error during capture"):
        on.end_capture(stream)
    on.sync_stream(stream)


def test_an_operator_that_a_failed_capture_refuses_leaves_no_frame_open() -> None:
    """Else the time between later operators would not count."""
    on, stream = captured(100)
    with pytest.raises(CaptureError):
        on.sync_stream(stream)
    with pytest.raises(CaptureError):
        on.operator("aten::mul", 0, stream, [("kernel", 10)])
    with pytest.raises(CaptureError):
        on.end_capture(stream)
    begun = on.now()
    on.operator("aten::mul", 0, stream, [("kernel", 10)])
    assert on.now() - begun == 5 + 10  # dispatched, and launched


def test_a_blocking_copy_is_a_sync_and_forbidden() -> None:
    on, stream = captured()
    with pytest.raises(CaptureError, match="cudaStreamSynchronize"):
        on.copy(stream, IN, 10, pinned=True)


def test_a_capture_is_ended_once_and_is_the_only_one() -> None:
    on, stream = captured(100)
    with pytest.raises(NotImplementedError, match="one CUDA graph at a time"):
        on.capture(on.new_stream())
    on.end_capture(stream)
    with pytest.raises(CaptureError, match="cannot be performed in the present state"):
        on.end_capture(stream)


def test_a_capture_waits_for_nothing_from_outside() -> None:
    on = clock()
    stream, side = on.new_stream(), on.new_stream()
    operator(on, side, 100)
    earlier = on.record(side)
    on.capture(stream)
    with pytest.raises(CaptureError, match="uncaptured work in another stream"):
        on.wait(stream, earlier)
    with pytest.raises(CaptureError, match="previous error"):
        on.end_capture(stream)


def test_an_event_of_a_capture_may_not_be_asked_for() -> None:
    for use in ("query", "sync_moment"):
        on, stream = captured(100)
        with pytest.raises(CaptureError, match="last recorded in a capturing stream"):
            getattr(on, use)(on.record(stream))
        with pytest.raises(CaptureError, match="previous error"):
            on.end_capture(stream)


def test_an_event_of_a_capture_is_of_no_use_afterwards() -> None:
    on, stream = captured(100)
    moment = on.record(stream)
    on.end_capture(stream)
    for use in (on.query, on.sync_moment, lambda moment: on.wait(on.default_stream(), moment)):
        with pytest.raises(CaptureError, match="invalid argument"):
            use(moment)


def test_a_copy_elsewhere_must_not_make_the_host_wait() -> None:
    on, _ = captured(100)
    on.copy(on.default_stream(), IN, 10, pinned=True, non_blocking=True)
    with pytest.raises(CaptureError, match="cudaStreamSynchronize"):
        on.copy(on.default_stream(), OUT, 10, pinned=True)


def test_a_graph_takes_one_place_in_the_queue() -> None:
    """The queue holds four: three graphs of three kernels leave room for one more launch."""
    on, stream = captured(1_000, 1_000, 1_000)
    graph = on.end_capture(stream)
    for _ in range(4):
        on.replay(graph, stream)
    launches = [end - start for _, kind, start, end in rows(on.timeline()) if kind == "launch"]
    assert launches == [23] * 4
    on.replay(graph, stream)
    timeline = on.timeline()
    assert rows(timeline)[-4][3] > 3_000
    assert (replay(timeline).spans.end == timeline.spans.end).all()


@pytest.mark.parametrize(("mode", "here", "elsewhere"), [("global", 0, 0), ("thread_local", 0, 1), ("relaxed", 1, 1)])
def test_how_far_a_capture_reaches_is_its_mode(mode: str, here: bool, elsewhere: bool) -> None:
    for thread, allowed in ((False, here), (True, elsewhere)):
        on = clock()
        earlier, stream = on.record(on.default_stream()), on.new_stream()
        on.capture(stream, mode)
        found: list[bool] = []

        def ask(on: Clock = on, earlier: object = earlier, found: list[bool] = found) -> None:
            try:
                found.append(on.query(earlier) is not None)  # type: ignore[arg-type]
            except CaptureError:
                found.append(False)

        runs = threading.Thread(target=ask) if thread else None
        runs.start() if runs else ask()
        if runs:
            runs.join()
        assert found == [bool(allowed)]


def test_a_captured_collective_meets_the_others_at_each_replay() -> None:
    on, stream = captured()
    asked: list[int] = []

    def meet(arrival: int) -> int:
        asked.append(arrival)
        return 900

    on.collective(stream, "ncclDevKernel_AllReduce", wire=100, size=64, group=3, members=2, last_arrival=meet)
    graph = on.end_capture(stream)
    assert asked == []
    on.replay(graph, stream)
    assert len(asked) == 1
    assert rows(on.timeline())[-1][1:] == ("collective", asked[0], 1_000)


def test_replays_are_the_steps_once_the_warm_up_is_over() -> None:
    on = clock()
    stream = on.new_stream()
    for step in range(3):
        on.enter(FrameKind.ANNOTATION, f"Optimizer.step#SGD.step{step}")
        operator(on, stream, 10)
        on.leave()
    on.capture(stream)
    operator(on, stream, 10)
    graph = on.end_capture(stream)
    for _ in range(3):
        on.replay(graph, stream)
    timeline = on.timeline()
    assert [timeline[row].name for row in timeline.marks.tolist()] == ["cudaGraphLaunch"] * 3
    assert {Kind(timeline[row].kind) for row in timeline.marks.tolist()} == {Kind.LAUNCH}


def test_an_optimizer_s_step_within_a_graph_is_one_at_each_replay() -> None:
    """And the last batch, of another shape, is a step like those before it."""
    on = clock()
    stream = on.new_stream()

    def step(number: int) -> None:
        on.enter(FrameKind.ANNOTATION, f"Optimizer.step#SGD.step{number}")
        operator(on, stream, 10)
        on.leave()

    step(0)
    on.capture(stream)
    step(1)
    graph = on.end_capture(stream)
    for _ in range(3):
        on.replay(graph, stream)
    step(2)
    timeline = on.timeline()
    names = [timeline[row].name for row in timeline.marks.tolist()]
    assert [at for at, name in enumerate(names) if name == "cudaGraphLaunch"] == [2, 3, 4], names
    assert len(names) == 6


def test_steps_that_go_on_beside_the_replays_stay_the_steps() -> None:
    on, stream = captured(10)
    graph = on.end_capture(stream)
    for step in range(3):
        on.replay(graph, stream)
        on.enter(FrameKind.ANNOTATION, f"Optimizer.step#SGD.step{step}")
        operator(on, stream, 10)
        on.leave()
    timeline = on.timeline()
    assert [timeline[row].name for row in timeline.marks.tolist()] != ["cudaGraphLaunch"] * 3
    assert len(timeline.marks) == 3


# memory

POOL = (1, 0)


def pooled() -> tuple[Clock, Memory, int, int]:
    on = clock()
    memory, stream = Memory(on), on.new_stream()
    on.capture(stream)
    memory.capture(0, POOL, on.capturing)
    return on, memory, stream, on.default_stream()


def end(on: Clock, memory: Memory, stream: int) -> None:
    on.end_capture(stream)
    memory.end_capture(0, POOL)


def made(memory: Memory, size: int, stream: int) -> Block:
    block = memory.allocate(0, size, stream)
    assert block is not None
    return block


def test_a_graph_has_segments_of_its_own() -> None:
    on, memory, stream, other = pooled()
    inside, outside = made(memory, 512, stream), made(memory, 512, other)
    assert abs(inside.address - outside.address) >= SMALL_SEGMENT
    assert memory.stats()["reserved_bytes.all.current"] == 2 * SMALL_SEGMENT
    end(on, memory, stream)


def test_what_dies_in_a_capture_serves_in_it_again_and_nowhere_else() -> None:
    on, memory, stream, _ = pooled()
    first = made(memory, MB, stream)
    memory.free(first)
    assert made(memory, MB, stream).address == first.address
    memory.free(first)
    end(on, memory, stream)
    assert made(memory, MB, stream).address != first.address


def test_a_pool_is_kept_for_its_graphs() -> None:
    on, memory, stream, _ = pooled()
    memory.free(made(memory, MB, stream))
    end(on, memory, stream)
    memory.empty_cache()
    assert memory.stats()["reserved_bytes.all.current"] == SMALL_SEGMENT
    memory.forget(0, POOL)
    assert memory.stats()["reserved_bytes.all.current"] == SMALL_SEGMENT
    memory.empty_cache()
    assert memory.stats()["reserved_bytes.all.current"] == 0


def test_tensors_of_a_graph_that_is_gone_keep_their_memory() -> None:
    on, memory, stream, _ = pooled()
    block = made(memory, MB, stream)
    end(on, memory, stream)
    memory.forget(0, POOL)
    memory.empty_cache()
    assert memory.stats()["allocated_bytes.all.current"] == MB
    memory.free(block)
    memory.empty_cache()
    assert memory.stats()["reserved_bytes.all.current"] == 0


def test_memory_goes_back_to_the_driver_in_no_capture() -> None:
    on, memory, stream, other = pooled()
    memory.free(made(memory, MB, other))
    memory.empty_cache()
    assert memory.stats()["reserved_bytes.all.current"] == SMALL_SEGMENT
    end(on, memory, stream)
    memory.empty_cache()
    assert memory.stats()["reserved_bytes.all.current"] == 0
