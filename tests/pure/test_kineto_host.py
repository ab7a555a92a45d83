"""Kineto's rows -> a timeline: the threads of the host, the work between calls, steps, whole files. Microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handwritten import (
    BACKWARD,
    US,
    Row,
    Show,
    call,
    command,
    flat,
    frame,
    host,
    launched,
    links_of,
    mark,
    rows_of,
    showing,
)
from traces import NCCL, event, trace_of

from keepbusy.timeline.files import BadInput
from keepbusy.timeline.model import EVERY_LANE, NONE, WORKERS, FrameKind, Kind, LinkKind, Timeline
from keepbusy.timeline.replay import replay
from keepbusy.traces import read


@pytest.fixture
def show(tmp_path: Path) -> Show:
    return showing(tmp_path)


# Host threads


def backward(show: Show) -> Timeline:
    """The main thread stands in `backward()` while another one launches."""
    return show(
        frame("train.py(5): main", 0, 400),
        frame("aten::mm", 10, 20, **{"Sequence number": 4}),
        launched(15, 25, 50, 1),
        frame("autograd::engine::evaluate_function: MmBackward0", 100, 200, BACKWARD, **{"Sequence number": 4}),
        launched(120, 130, 60, 2, tid=BACKWARD),
        launched(200, 210, 60, 3, tid=BACKWARD),
        frame("aten::add", 340, 20),
        launched(345, 355, 9, 4),
    )


def test_the_backward_thread_goes_on_where_the_main_thread_stopped(show: Show) -> None:
    handed = links_of(backward(show), LinkKind.HANDOFF)
    assert {(start, to) for _, start, _, to in handed} == {(20, 100), (205, 300)}


def test_nobody_works_while_another_thread_does(show: Show) -> None:
    """The main thread is no lane of its own in those 200 µs: less work there moves whatever comes after."""
    timeline = backward(show)
    main = timeline.spans.lane == 0
    inside = main & (timeline.spans.start >= 100 * US) & (timeline.spans.end <= 300 * US)
    assert not inside.any()
    faster = replay(timeline.change_spans(work=np.where(main | timeline.on_device, timeline.spans.work, 0)))
    assert faster.spans.end[main].max() == timeline.spans.end[main].max() - 200 * US


def test_a_thread_that_works_beside_the_main_one_is_a_lane_of_its_own(show: Show) -> None:
    """A prefetcher: its operators overlap the main thread's."""
    timeline = show(
        [frame("aten::mm", 20 * index, 15) for index in range(10)],
        launched(5, 25, 9, 1),
        frame("aten::copy_", 50, 60, BACKWARD),
        launched(60, 70, 9, 2, stream=20, tid=BACKWARD),
    )
    assert [lane.device for lane in timeline.lanes] == [None, None, 0, 0]
    assert links_of(timeline, LinkKind.HANDOFF) == []


def test_the_thread_that_takes_the_steps_is_the_main_one(show: Show) -> None:
    others = [frame("aten::add", 10 * index, 5, BACKWARD) for index in range(30)]
    timeline = show(
        others, launched(2, 10, 5, 1, tid=BACKWARD), mark(1, 0, 100), mark(2, 100, 100), launched(50, 60, 5, 2)
    )
    assert [timeline.spans.lane[row] for row in timeline.marks.tolist()] == [0, 0]
    assert [timeline[row].start // US for row in timeline.marks.tolist()] == [0, 100]


# What else the host does


def test_time_between_calls_is_work(show: Show) -> None:
    timeline = show(frame("train.py(5): main", 0, 300), launched(100, 110, 9, 1), launched(200, 210, 9, 2))
    assert rows_of(timeline, Kind.WORK) == [
        ("train.py(5): main", 0, 100),
        ("train.py(5): main", 105, 200),
        ("train.py(5): main", 205, 300),
    ]


def test_frames_nest_as_they_were_entered(show: Show) -> None:
    timeline = show(
        frame("train.py(5): main", 0, 300),
        frame("aten::linear", 90, 50),
        frame("aten::mm", 95, 30),
        launched(100, 110, 9, 1),
    )
    names = [timeline.names[name] for name in timeline.frames.name]
    assert (names, timeline.frames.parent.tolist()) == (["train.py(5): main", "aten::linear", "aten::mm"], [NONE, 0, 1])
    assert timeline.frames.kind.tolist() == [FrameKind.PYTHON, FrameKind.OPERATOR, FrameKind.OPERATOR]
    assert timeline.spans.frame[timeline.spans.kind == Kind.LAUNCH].tolist() == [2]


def test_what_the_recorder_did_for_itself_is_no_work_of_the_program(show: Show) -> None:
    """A flush between two calls; and a full buffer, which stands within a launch and is none of it."""
    flush = event(cat="overhead", name="Buffer Flush", pid=-1, tid=0, ts=120, dur=60)
    full = event(cat="overhead", name="Command Buffer Full", pid=-1, tid=0, ts=201, dur=3)
    timeline = show(frame("train.py(5): main", 0, 300), launched(100, 110, 9, 1), launched(200, 210, 9, 2), flush, full)
    recording = timeline.spans.kind == Kind.RECORDING
    assert rows_of(timeline, Kind.RECORDING) == [("train.py(5): main", 120, 180)]
    assert timeline.spans.recording[recording].tolist() == [60 * US]


def test_what_recording_cost_grows_with_what_was_recorded(show: Show) -> None:
    few = show(frame("train.py(5): main", 0, 300), launched(200, 210, 9, 1))
    operators = [frame("aten::view", 10 * index, 5) for index in range(10)]
    many = show(frame("train.py(5): main", 0, 300), operators, launched(200, 210, 9, 1))
    assert many.spans.recording[0] == few.spans.recording[0] + 10 * 1_200


def test_memory_calls_are_told_apart(show: Show) -> None:
    timeline = show(launched(0, 10, 100, 1), call("cudaMalloc", 10, 50, 2), call("cudaFree", 70, 60, 3))
    assert rows_of(timeline, Kind.ALLOCATE) == [("cudaMalloc", 10, 60), ("cudaFree", 70, 130)]
    assert timeline.spans.awaits[timeline.spans.kind == Kind.ALLOCATE].tolist() == [NONE, EVERY_LANE]


def test_waiting_for_a_loaders_workers_is_a_wait(show: Show) -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    loads = [host("user_annotation", name, 1_000 * step, 600) for step in range(3)]
    steps = [launched(1_000 * step + 700, 1_000 * step + 710, 200, step + 1) for step in range(3)]
    timeline = show(loads, steps)
    workers = [index for index, lane in enumerate(timeline.lanes) if lane.name == WORKERS]
    assert len(workers) == 1
    batches = timeline.rows_of(workers[0])
    assert (timeline.spans.end[batches] // US).tolist() == [600, 1_600, 2_600]
    assert timeline.spans.awaits[timeline.spans.kind == Kind.SYNC].tolist() == workers * 3


# Steps


def loop(*marks: Row, steps: int = 4) -> list[Any]:
    return [launched(100 * step + 20, 100 * step + 30, 60, step + 1) for step in range(steps)] + list(marks)


def test_profiler_steps_mark_the_steps(show: Show) -> None:
    timeline = show(loop(*[mark(step, 100 * step, 99) for step in range(4)]))
    assert [timeline[row].start // US for row in timeline.marks.tolist()] == [0, 100, 200, 300]


def test_optimizer_steps_mark_them_where_the_profiler_does_not(show: Show) -> None:
    steps = [host("user_annotation", "Optimizer.step#AdamW.step", 100 * step + 90, 9) for step in range(4)]
    timeline = show(loop(*steps))
    assert [timeline[row].start // US for row in timeline.marks.tolist()] == [90, 190, 290, 390]


def test_a_trace_without_marks_has_none(show: Show) -> None:
    assert len(show(loop()).marks) == 0


# Whole files


def test_what_is_known_of_the_run(show: Show, tmp_path: Path) -> None:
    timeline = show(loop(), deviceProperties=[{"name": "NVIDIA H200"}], with_stack=1)
    assert timeline.facts.device == "NVIDIA H200"
    assert timeline.facts.stacks is True
    assert timeline.facts.source == str(tmp_path / "rank0.trace.json")


@pytest.mark.parametrize("properties", [None, [], {}, ["x"], [{"name": None}], 3])
def test_odd_facts_do_no_harm(show: Show, properties: Any) -> None:
    assert isinstance(show(loop(), deviceProperties=properties).facts.device, str)


def test_an_old_trace_reads_as_well(show: Show) -> None:
    """PyTorch before 2.5: whole microseconds, a bare list, streams named by thread alone, no stacks."""
    rows = loop(*[mark(step, 100 * step, 99) for step in range(4)])
    for row in flat(rows):
        row["args"].pop("stream", None)
        row["ts"], row["dur"] = int(row["ts"]), int(row["dur"])
    timeline = show(rows)
    assert [lane.number for lane in timeline.lanes] == [0, 7]
    assert timeline.facts.stacks is False


REFUSED = {
    "shows nothing that ran on a GPU; record with activities=": [frame("aten::mm", 0, 10)],
    "shows commands of the device but no call that launched them": [command(0, 10, 1), frame("aten::mm", 0, 10)],
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_trace_of_one_side_only_is_refused(show: Show, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        show(REFUSED[said])
    assert str(caught.value).endswith(".")


def test_the_ranks_of_a_run_are_read_together(tmp_path: Path) -> None:
    paths = []
    for rank in (1, 0):
        nccl = [
            call("INVALID", 8, 5, 2),
            command(20 + rank, 90 - rank, 2, stream=20, name="nccl", args=NCCL | {"rank": 0}),
        ]
        about = {"rank": rank, "world_size": 2, "backend": "nccl"}
        paths.append(tmp_path / f"{rank}.json")
        paths[-1].write_bytes(trace_of(*launched(0, 10, 9, 1), *nccl, distributedInfo=about))
    timeline = read(paths)
    assert timeline.ranks == [0, 1]
    assert timeline.facts.sources == (str(paths[1]), str(paths[0]))
    assert len(timeline.meetings) == 1


def test_long_work_of_two_functions_is_told_apart(show: Show) -> None:
    """Both launch something: what the first did after its launch is not what the second did before its own."""
    rows = [
        launched(0, 10, 5, 1),
        frame("data.py(3): crop", 20, 3_000),
        launched(30, 40, 5, 2),
        frame("data.py(9): save", 3_020, 2_000),
        launched(5_000, 5_010, 5, 3),
    ]
    timeline = show(frame("train.py(12): step", -10, 6_000), *rows)
    work = timeline.spans.kind == Kind.WORK
    names = [timeline.names[name] for name in timeline.spans.name[work & (timeline.spans.work > 1_000 * US)]]
    assert names == ["data.py(3): crop", "data.py(9): save"]
