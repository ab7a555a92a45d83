"""A log as a timeline: the host's calls with their lines, what it did between them, and the GPU's commands."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from handwritten_log import BACK, LAUNCH, US, HandwrittenLog, keys_of, recorded, times, two_streams_and_an_event
from hypothesis import given
from hypothesis import strategies as st

import keepbusy
from keepbusy.log.host_frames import Visits, frames_of
from keepbusy.log.joined_ranks import rebuild_ranks
from keepbusy.log.kernel_times import KernelTimes
from keepbusy.log.log_file import CallFlag, DriverCall, DriverLog, StackFrame
from keepbusy.log.log_timeline import HostSide, LogTimeline
from keepbusy.log.profiler_window import CallOperators, OperatorBetweenCalls, Operators
from keepbusy.log.program_log import BACKWARD_PASS
from keepbusy.log.rebuild import RebuiltRun, rebuild
from keepbusy.program.loops.codes import CodeObjects, read_source
from keepbusy.program.loops.run_loops import LoopEvidence, with_loops
from keepbusy.timeline.frame_roles import LOADER_WITH_WORKERS
from keepbusy.timeline.model import EVERY_LANE, NONE, PENDING_LIMIT, WORKERS, FrameKind, Kind, LinkKind, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.replay import replay
from keepbusy.timeline.run_facts import LOOP, RunFacts

TORCH = getattr(find_spec("torch"), "origin", None) or ""
"""Nothing where it is not installed."""


def timeline_of_log(
    log: DriverLog,
    run: RebuiltRun,
    times: KernelTimes,
    begins: Iterable[int] = (),
    rank: int = 0,
    host: HostSide | None = None,
    **facts: object,
) -> Timeline:
    """`begins`: when iterations began, on the log's clock."""
    about = RunFacts(**facts)  # type: ignore[arg-type]
    return LogTimeline(log, run, times, rank, about, host or HostSide()).timeline(np.array([*begins], np.int64))


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


MAIN, OTHER = StackFrame("train.py", 9, "<module>"), StackFrame("train.py", 12, "<module>")


def host_frames(of: Timeline, lane: int = 0) -> list[tuple[str, int, int]]:
    """Each span of the host, what it stands in from the outside in, and from when to when, in microseconds."""
    found = []
    for row in of.rows_of(lane).tolist():
        names, frame = [], int(of.spans.frame[row])
        while frame != NONE:
            names.append(of.names[of.frames.name[frame]])
            frame = int(of.frames.parent[frame])
        times = int(of.spans.start[row]) // US, int(of.spans.end[row]) // US
        found.append((" | ".join(reversed(names)), *times))
    return found


def told_with(written: HandwrittenLog, host: HostSide) -> Timeline:
    log = written.log()
    taught = times(log, 2, 50)
    return timeline_of_log(log, rebuild(log, taught), taught, host=host)


def test_calls_of_threads_without_python_are_made_in_the_backward_pass_that_goes_on() -> None:
    written = HandwrittenLog(stacks={1: (MAIN,)})
    written.call("note", value=1, took=0, stack=1)
    written.call("launch", 1, took=10, thread=1)
    written.call("note", value=0, took=0, stack=1)
    written.call("launch", 1, took=10, thread=1)
    found = host_frames(told_with(written, HostSide(notes=("", "backward"))))
    assert found == [("train.py(9): <module> | backward", 0, 10), ("", 10, 20)]


def test_a_batch_that_is_late_is_made_from_when_the_one_before_it_was_taken() -> None:
    """Of three batches the second and third are waited for, 5 and 0.4 ms."""
    written = HandwrittenLog(stacks={1: (StackFrame("/program/train.py", 3, "main"),)})
    for waited in (10, 5_000, 400):
        written.call("note", value=1, took=0, stack=1)
        written.now += waited
        written.call("note", value=0, took=0, stack=1)
        for _ in range(10):
            written.call("launch", 1, took=10, stack=1)
    looks = [round(moment * US) for moment in (1_000, 3_000)]  # which part the wait
    name = f"{LOADER_WITH_WORKERS}DataLoaderIter.__next__"
    host = HostSide(notes=("", name), sample_times=looks, sample_chains=[(OTHER,), (MAIN,)])
    found = told_with(written, host)
    [workers] = [number for number, lane in enumerate(found.lanes) if lane.name == WORKERS]
    assert told(found, workers) == [("WORK", 10, 5_110), ("WORK", 5_110, 5_610)]
    assert [one for one in told(found, 0) if one[0] == "SYNC"] == [("SYNC", 110, 5_110), ("SYNC", 5_210, 5_610)]
    assert keepbusy.explain(found).ledger["input_late"] > 0


def test_an_annotation_stands_within_the_lines_that_it_was_made_from() -> None:
    step = StackFrame("train.py", 3, "step")
    written = HandwrittenLog(stacks={1: (MAIN,), 2: (step, MAIN)})
    written.call("note", value=1, took=0, stack=1)
    written.call("launch", 1, took=10, stack=2)
    written.call("note", value=0, took=0, stack=1)
    written.call("launch", 1, took=10, stack=2)
    found = host_frames(told_with(written, HostSide(notes=("", "Optimizer.step#SGD.step"))))
    main = "train.py(9): <module>"
    assert found == [
        (f"{main} | Optimizer.step#SGD.step | train.py(3): step", 0, 10),
        (f"{main} | train.py(3): step", 10, 20),
    ]


def test_a_read_of_a_scalar_is_known_without_a_window() -> None:
    """PyTorch copies the bytes and waits."""
    written = HandwrittenLog(stacks={1: (MAIN,)})
    for bytes_read in (8, 4096):
        written.call("copy_to_host", value=bytes_read, took=10, stack=1)
        written.call("stream_sync", took=10, stack=1)
    names = [name for name, *_ in host_frames(told_with(written, HostSide()))]
    main = "train.py(9): <module>"
    assert names == [f"{main} | aten::item | aten::_local_scalar_dense"] * 2 + [main] * 2


@pytest.mark.skipif(not TORCH, reason="which lines are PyTorch's is known where it is installed")
def test_of_lines_in_pytorch_the_one_that_tells_the_purpose_is_kept() -> None:
    folder = Path(TORCH).parent
    inner, saves, outer = (
        StackFrame(str(folder / "serialization.py"), line, name)
        for line, name in ((1_200, "persistent_id"), (1_310, "_save"), (964, "save"))
    )
    written = HandwrittenLog(stacks={1: (inner, saves, outer, MAIN)})
    written.call("launch", 1, took=10, stack=1)
    [(names, *_)] = host_frames(told_with(written, HostSide()))
    assert names.split(" | ") == [
        "train.py(9): <module>",
        "torch/serialization.py(964): save",
        "torch/serialization.py(1200): persistent_id",
    ]


def test_looks_tell_what_the_host_did_between_two_calls_and_of_short_times_all_looks_together_do() -> None:
    written = HandwrittenLog(stacks={1: (MAIN,)})
    looks = []
    for _ in range(4):
        written.call("launch", 1, took=10, stack=1)
        looks.append(round((written.now + 30) * US) if len(looks) % 2 else round((written.now + 70) * US))
        written.now += 100
    written.call("launch", 1, took=10, stack=1)
    host = HostSide(sample_times=looks, sample_chains=[(OTHER,), (MAIN,), (OTHER,), (MAIN,)])
    [first, *_] = [one for one in host_frames(told_with(written, host)) if one[1] == 10]
    assert first == ("train.py(9): <module>", 10, 60)  # half of all looks, and the earlier ones, found it there
    assert ("train.py(12): <module>", 60, 110) in host_frames(told_with(written, host))


def test_what_only_a_look_has_told_is_no_visit_of_a_line() -> None:
    written = HandwrittenLog(stacks={1: (MAIN,)})
    written.call("launch", 1, took=10, stack=1)
    look = round((written.now + 50) * US)
    written.now += 100
    written.call("launch", 1, took=10, stack=1)
    log = written.log()
    taught = times(log, 2, 50)
    host = HostSide(sample_times=[look], sample_chains=[(OTHER,)])
    built = LogTimeline(log, rebuild(log, taught), taught, 0, RunFacts(), host)
    found = built.timeline(np.zeros(0, np.int64))
    names = [found.names[name] for name in found.frames.name]
    assert list(zip(names, built.exact_frames.tolist(), strict=True)) == [
        ("train.py(9): <module>", True), ("train.py(12): <module>", False), ("train.py(9): <module>", True)
    ]  # fmt: skip


def test_operators_that_called_nothing_stand_where_the_profiler_saw_them() -> None:
    written = HandwrittenLog(stacks={1: (MAIN,)})
    written.call("launch", 1, took=10, stack=1)
    written.now += 100
    written.call("launch", 1, took=10, stack=1)
    log = written.log()
    first, second = keys_of(log)
    operators = CallOperators(between={(first, second): [OperatorBetweenCalls("aten::randn", 0.2, 0.7)]})
    operators.around[second][Operators(("aten::mul",), 0)] += 1
    found = host_frames(told_with(written, HostSide(operators=operators)))
    main = "train.py(9): <module>"
    assert found[1:] == [
        (main, 10, 30),
        (f"{main} | aten::randn", 30, 80),
        (main, 80, 110),
        (f"{main} | aten::mul", 110, 120),
    ]


def test_an_operator_that_makes_several_calls_goes_on_between_them() -> None:
    """As `nonzero` does, of what a mask chooses."""
    written = HandwrittenLog(stacks={1: (MAIN,)})
    for grid in (1, 64, 64, 1):  # four kinds, by the call before
        written.now += 10
        written.call("launch", grid, took=10, stack=1)
    log = written.log()
    operators = CallOperators()
    shared = [Operators(("aten::index", "aten::nonzero"), 0), Operators(("aten::index", "aten::nonzero"), 2)]
    for key, around in zip(
        keys_of(log), [*shared, Operators(("aten::index",), 1), Operators(("aten::mul",))], strict=True
    ):
        operators.around[key][around] += 1
    found = told_with(written, HostSide(operators=operators))
    main, index = "train.py(9): <module>", "train.py(9): <module> | aten::index"
    assert host_frames(found) == [
        (f"{index} | aten::nonzero", 0, 10),
        (f"{index} | aten::nonzero", 10, 20),
        (f"{index} | aten::nonzero", 20, 30),
        (index, 30, 40),
        (index, 40, 50),
        (main, 50, 60),
        (f"{main} | aten::mul", 60, 70),
    ]
    assert [found.names[name] for name in found.frames.name].count("aten::index") == 1


def test_each_thread_with_python_has_a_lane_of_its_own() -> None:
    written = HandwrittenLog(stacks={1: (MAIN,), 2: (OTHER,)})
    for stack, thread in ((1, 0), (1, 0), (2, 7)):
        written.call("launch", 1, took=10, stack=stack, thread=thread)
    found = told_with(written, HostSide())
    assert [lane.name for lane in found.lanes] == ["program", "", "thread 1"]
    assert host_frames(found, 2)[-1] == ("train.py(12): <module>", 20, 30)


def test_python_in_a_backward_pass_stands_at_the_line_that_waits_for_it() -> None:
    """A hook, or a checkpoint, is called in a thread of PyTorch's own, most of whose calls have no stack."""
    hook = StackFrame("train.py", 30, "backward")
    written = HandwrittenLog(stacks={1: (MAIN,), 2: (hook,)})
    written.call("note", value=1, took=0, stack=1)
    for stack in (0, 2, 2):
        written.call("launch", 1, took=10, stack=stack, thread=7)
    written.call("note", value=0, took=0, stack=1)
    written.call("launch", 1, took=10, stack=1)
    found = told_with(written, HostSide(notes=("", BACKWARD_PASS)))
    assert [lane.name for lane in found.lanes] == ["program", ""]
    main = "train.py(9): <module>"
    assert host_frames(found) == [
        (f"{main} | {BACKWARD_PASS}", 0, 10),
        (f"{main} | {BACKWARD_PASS} | train.py(30): backward", 10, 20),
        (f"{main} | {BACKWARD_PASS} | train.py(30): backward", 20, 30),
        (main, 30, 40),
    ]


def test_what_is_annotated_is_a_part_of_its_loop(tmp_path: Path) -> None:
    """As the forward pass of a model in DistributedDataParallel."""
    file = tmp_path / "train.py"
    file.write_text("def forward():\n    op()\nfor batch in range(9):\n    forward()\n    op()\n")
    in_loop, forward = (StackFrame(str(file), line, name) for line, name in ((4, "<module>"), (2, "forward")))
    after = StackFrame(str(file), 5, "<module>")
    written = HandwrittenLog(stacks={1: (in_loop,), 2: (forward, in_loop), 3: (after,)})
    for _ in range(9):
        written.call("note", value=1, took=0, stack=1)
        written.call("launch", 1, took=20, stack=2)
        written.call("note", value=0, took=0, stack=1)
        written.call("launch", 1, took=10, stack=3)
    log = written.log()
    taught = times(log, 2, 50)
    host = HostSide(notes=("", "DistributedDataParallel.forward"), codes=CodeObjects(read_source))
    built = LogTimeline(log, rebuild(log, taught), taught, 0, RunFacts(logged=True), host)
    found = built.timeline(np.zeros(0, np.int64))
    run = with_loops(found, LoopEvidence(built.source_lines.of_name, exact=built.exact_frames)).facts.run
    assert run is not None
    [loop] = [part for part in run.parts if part.kind == LOOP]
    assert loop.time == pytest.approx(9 * 30 * US, abs=20 * US)
    assert {Path(line.place).name: round(line.time / US) for line in loop.lines} == {
        "train.py:4": 180,
        "train.py:5": 90,
    }


def test_a_large_copy_from_pageable_memory_ends_with_its_call() -> None:
    written = HandwrittenLog()
    written.call("launch", 64, took=4)
    written.call("copy_to_gpu", value=1 << 20, took=90, flags=CallFlag.PAGEABLE)
    found = timeline(written)
    assert told(found, 0)[1:] == [("LAUNCH", 4, 9), ("SYNC", 9, 94)]
    assert int(found.spans.end[found.rows_of(1)[1]]) == 94 * US - BACK


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4), st.booleans()), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=9, max_size=9),
)
def test_frames_are_those_of_a_stack_that_grows_and_shrinks(
    visited: list[tuple[int, int, bool]], made_of: list[list[int]]
) -> None:
    """Against opening and closing them one after the other."""
    chains = [(), *(tuple((FrameKind.LINE, f"{name}") for name in one) for one in made_of)]
    chain = np.array([number + 1 for number, _, _ in visited])
    exact = np.array([one for _, _, one in visited])
    at_most = np.array([one for _, one, _ in visited])
    start = 10 * np.arange(len(visited))
    names = {f"{number}": number for number in range(3)}
    found, exact_frames, innermost = frames_of(Visits(chain, start, start + 10, at_most, exact), chains, names, 0)
    opened: list[list[int]] = []  # name, parent, start, end, exact
    stack: list[int] = []
    for visit, (number, shared, is_exact) in enumerate(visited):
        wanted, kept = made_of[number], 0
        while kept < min(len(stack), len(wanted), shared):
            same = opened[stack[kept]][0] == wanted[kept] and (opened[stack[kept]][4] or not is_exact)
            if not same:
                break
            kept += 1
        del stack[kept:]
        for name in wanted[kept:]:
            stack.append(len(opened))
            opened.append([name, stack[-2] if len(stack) > 1 else NONE, 10 * visit, 0, is_exact])
        for one in stack:
            opened[one][3] = 10 * visit + 10
        assert innermost[visit] == stack[-1]
    columns = found.name, found.parent, found.start, found.end, exact_frames
    assert list(map(list, zip(*(one.tolist() for one in columns), strict=True))) == opened


def test_a_launch_that_waits_for_room_in_the_queue_does_no_work_meanwhile() -> None:
    written, each = HandwrittenLog(), 150.0
    for number in range(4 * PENDING_LIMIT):
        free = (number - PENDING_LIMIT + 1) * each if number >= PENDING_LIMIT else 0.0
        written.call("launch", 1, took=max(2.0, free - written.now))
    log = written.log()
    taught = times(log, each - 1)
    found = timeline_of_log(log, rebuild(log, taught), taught, logged=True)
    launches = found.spans.kind == Kind.LAUNCH
    took = (found.spans.end - found.spans.start)[launches]
    assert np.median(took[-PENDING_LIMIT:]) == pytest.approx(each * US, rel=0.01)
    assert np.median(found.spans.work[launches][-PENDING_LIMIT:]) < 10 * US
