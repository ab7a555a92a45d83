"""Kineto's rows -> a timeline: launches and their commands, copies, syncs, streams, collectives. Microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handwritten import Row, Show, call, command, copied, launched, links_of, rows_of, showing
from traces import NCCL, event

from keepbusy.timeline.model import EVERY_LANE, NONE, Direction, Kind, LinkKind


@pytest.fixture
def show(tmp_path: Path) -> Show:
    return showing(tmp_path)


# Launches


def test_a_command_belongs_to_the_call_of_its_correlation(show: Show) -> None:
    """Named in the file before its call, and with a second stream in between."""
    timeline = show(launched(0, 20, 9, 1)[::-1], launched(10, 30, 5, 2, stream=8), launched(20, 29, 4, 3))
    assert links_of(timeline, LinkKind.LAUNCH) == [
        ("cudaLaunchKernel", 0, "k", 20),
        ("cudaLaunchKernel", 10, "k", 30),
        ("cudaLaunchKernel", 20, "k", 29),
    ]
    assert [lane.name for lane in timeline.lanes] == ["", "stream 7", "stream 8"]


def test_one_graph_launch_is_many_kernels(show: Show) -> None:
    kernels = [command(10 + 4 * index, 3, 1, args={"graph id": 2}) for index in range(5)]
    timeline = show(call("cudaGraphLaunch", 0, 6, 1), kernels)
    assert [source for source, *_ in links_of(timeline, LinkKind.LAUNCH)] == ["cudaGraphLaunch"] * 5
    assert timeline.spans.kind.tolist()[0] == Kind.LAUNCH


@pytest.mark.parametrize(
    "name", ["cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC_v11060", "hipModuleLaunch"]
)
def test_whatever_launched_is_a_launch(show: Show, name: str) -> None:
    """Its name does not matter: something ran that bears its correlation."""
    timeline = show(call(name, 0, 5, 1, cat="cuda_driver"), command(9, 5, 1))
    assert rows_of(timeline, Kind.LAUNCH) == [(name, 0, 5)]


def test_a_call_within_a_call_launches_for_the_outer_one(show: Show) -> None:
    """A lazily loaded module: the driver's launch stands in the runtime's, and copies something of its own."""
    nested = [call("cuLaunchKernel", 3, 4, 2, cat="cuda_driver"), call("cudaMemcpyAsync", 1, 1, 3)]
    memory = command(12, 3, 3, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")
    commands = [memory, command(20, 5, 2), command(30, 9, 1)]
    timeline = show(call("cudaLaunchKernel", 0, 10, 1), nested, commands)
    assert rows_of(timeline, Kind.LAUNCH) == [("cudaLaunchKernel", 0, 10)]
    assert [source for source, *_ in links_of(timeline, LinkKind.LAUNCH)] == ["cudaLaunchKernel"] * 3


def test_work_that_was_queued_before_the_window_has_no_launch(show: Show) -> None:
    timeline = show(command(0, 50, 77), launched(10, 51, 5, 1))
    assert len(timeline.links) == 1
    assert rows_of(timeline, Kind.KERNEL) == [("k", 0, 50), ("k", 51, 56)]


def test_fills_and_copies_are_commands(show: Show) -> None:
    fill = [call("cudaMemsetAsync", 0, 4, 1), command(9, 2, 1, cat="gpu_memset", name="Memset (Device)")]
    timeline = show(fill, copied(10, 4, 20, 3, 2, "DtoD (Device -> Device)", 640))
    assert timeline.spans.kind[timeline.on_device].tolist() == [Kind.FILL, Kind.COPY]
    assert timeline.spans.size[timeline.on_device].tolist() == [0, 640]
    assert timeline.spans.direction[-1] == Direction.DEVICE_TO_DEVICE


# Copies


@pytest.mark.parametrize(("early", "name"), [(0, "HtoD (Pageable -> Device)"), (8, "HtoD (Pageable -> Device)")])
def test_a_pageable_copy_is_a_launch_and_a_wait(show: Show, early: int, name: str) -> None:
    """The call returns up to 10 µs before its command ends. It enqueues for 5 µs and waits for the rest."""
    timeline = show(launched(0, 10, 400, 1), copied(20, 990 - early, 412, 598, 2, name, 1 << 20))
    assert rows_of(timeline, Kind.LAUNCH)[1] == ("cudaMemcpyAsync", 20, 25)
    assert rows_of(timeline, Kind.SYNC) == [("cudaMemcpyAsync", 25, 1_010 - early)]
    copy = timeline.spans.kind == Kind.COPY
    assert timeline.spans.awaits[timeline.spans.kind == Kind.SYNC].tolist() == timeline.spans.lane[copy].tolist()
    assert (timeline.spans.pinned[copy], timeline.spans.direction[copy]) == (0, Direction.HOST_TO_DEVICE)


def test_a_copy_that_was_only_enqueued_is_no_wait(show: Show) -> None:
    """Pinned, or pageable and staged by the driver at once: the call returns long before the copy ends."""
    for name in ("HtoD (Pinned -> Device)", "HtoD (Pageable -> Device)"):
        timeline = show(launched(0, 10, 400, 1), copied(20, 6, 412, 598, 2, name, 1 << 20))
        assert rows_of(timeline, Kind.SYNC) == []


@pytest.mark.parametrize(
    ("grid", "blocks"), [([3, 2, 4], 24), ([1 << 30, 1 << 30, 1], 0), ([-1, 1, 1], 0), ("24", 0), (None, 0), ({}, 0)]
)
def test_a_kernel_knows_how_many_blocks_it_is_launched_with(show: Show, grid: object, blocks: int) -> None:
    timeline = show(call("cudaLaunchKernel", 0, 5, 1), command(10, 9, 1, args={"grid": grid}))
    assert timeline.spans.blocks[timeline.on_device].tolist() == [blocks]


def test_cuda_memcpy_waits_for_itself(show: Show) -> None:
    """The blocking call, pinned or not."""
    row = command(20, 80, 2, cat="gpu_memcpy", name="Memcpy DtoH (Device -> Pinned)", args={"bytes": 64})
    timeline = show(launched(0, 10, 9, 1), call("cudaMemcpy", 12, 90, 2), row)
    assert rows_of(timeline, Kind.SYNC) == [("cudaMemcpy", 17, 102)]


# Syncs


def test_a_stream_sync_waits_for_what_its_thread_launched_last(show: Show) -> None:
    rows = launched(0, 10, 100, 1), launched(6, 16, 30, 2, stream=8), call("cudaStreamSynchronize", 12, 36, 3)
    timeline = show(*rows)
    assert timeline.lanes[timeline.spans.awaits[timeline.spans.kind == Kind.SYNC][0]].number == 8


def recorded_sync(correlation: int, stream: int, kind: str = "Stream Sync", **args: Any) -> Row:
    args = {"cuda_sync_kind": kind, "stream": stream, "correlation": correlation, "device": 0, "context": 1, **args}
    return event(cat="cuda_sync", name=kind, pid=0, tid=stream, ts=13, dur=100, args=args)


@pytest.mark.parametrize("stream", [7, 8])
def test_a_recorded_sync_names_its_stream(show: Show, stream: int) -> None:
    """Traces with enable_cuda_sync_events say what was waited for: nobody has to guess."""
    rows = launched(0, 10, 100, 1), launched(6, 16, 90, 2, stream=8), call("cudaStreamSynchronize", 12, 104, 3)
    timeline = show(*rows, recorded_sync(3, stream))
    assert timeline.lanes[timeline.spans.awaits[timeline.spans.kind == Kind.SYNC][0]].number == stream


def test_a_recorded_sync_of_an_idle_stream_waits_for_nobody(show: Show) -> None:
    rows = launched(0, 10, 100, 1), call("cudaStreamSynchronize", 12, 4, 3), recorded_sync(3, stream=20)
    assert set(show(*rows).spans.awaits.tolist()) == {NONE}


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize", "cudaFree"])
def test_some_calls_wait_for_the_whole_device(show: Show, name: str) -> None:
    timeline = show(launched(0, 10, 100, 1), launched(6, 16, 30, 2, stream=8), call(name, 12, 100, 3))
    assert timeline.spans.awaits[timeline.spans.awaits != NONE].tolist() == [EVERY_LANE]


def test_an_event_sync_waits_for_the_command_that_let_it_go(show: Show) -> None:
    rows = launched(0, 10, 100, 1), launched(6, 111, 500, 2), call("cudaEventSynchronize", 12, 100, 3)
    assert links_of(show(*rows), LinkKind.ORDER) == [("k", 10, "cudaEventSynchronize", 12)]


def test_a_sync_before_anything_was_launched_waits_for_nobody(show: Show) -> None:
    timeline = show(call("cudaStreamSynchronize", 0, 4, 9), launched(10, 20, 5, 1))
    assert rows_of(timeline, Kind.SYNC) == [("cudaStreamSynchronize", 0, 4)]
    assert timeline.spans.awaits.tolist() == [NONE] * len(timeline)


def test_pollers_and_watchdogs_are_no_part_of_the_program(show: Show) -> None:
    polls = [call("cudaEventQuery", 5 * index, 1, 50 + index, tid=999) for index in range(20)]
    timeline = show(launched(0, 10, 100, 1), polls, call("cudaStreamSynchronize", 20, 90, 80, tid=999))
    assert len(timeline.lanes) == 2
    assert rows_of(timeline, Kind.SYNC) == []


# Streams that wait for each other


def waiting(first: float = 100, second: float = 111) -> list[list[Row]]:
    """A kernel on stream 7, an event recorded there, a wait of stream 8 for it, and a kernel there."""
    kernel = launched(0, 10, first, 1)
    between = [call("cudaEventRecordWithFlags", 6, 1, 2), call("cudaStreamWaitEvent", 8, 1, 3)]
    return [kernel, between, launched(10, second, 30, 4, stream=8)]


def test_a_stream_wait_binds_the_next_command(show: Show) -> None:
    assert links_of(show(waiting()), LinkKind.ORDER) == [("k", 10, "k", 111)]


def test_without_a_wait_streams_are_free(show: Show) -> None:
    rows = [row for row in waiting() if not any("Event" in one["name"] for one in row)]
    assert links_of(show(rows), LinkKind.ORDER) == []


def test_commands_that_overlap_did_not_wait_for_each_other(show: Show) -> None:
    assert links_of(show(waiting(second=50)), LinkKind.ORDER) == []


def two_candidates() -> list[list[Row]]:
    """Both kernels of stream 7 end before stream 8 begins; the wait is for the first."""
    return [
        launched(0, 10, 40, 1),
        [call("cudaEventRecordWithFlags", 6, 1, 2)],
        launched(8, 51, 50, 5),
        [call("cudaStreamWaitEvent", 14, 1, 3)],
        launched(16, 104, 30, 4, stream=8),
    ]


def test_a_recorded_wait_names_its_event(show: Show) -> None:
    """`wait_on_cuda_event_record_corr_id` is the record's own correlation: the wait is for what stood before that."""
    said = recorded_sync(3, 8, "Stream Wait Event", wait_on_stream=7, wait_on_cuda_event_record_corr_id=2)
    assert links_of(show(two_candidates(), said), LinkKind.ORDER) == [("k", 10, "k", 104)]
    assert links_of(show(two_candidates()), LinkKind.ORDER) == [("k", 51, "k", 104)]


def test_a_wait_whose_source_was_not_resolved_is_found_by_its_times(show: Show) -> None:
    """CUDA 12.9 and newer may say -1."""
    said = recorded_sync(3, 8, "Stream Wait Event", wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1)
    assert links_of(show(two_candidates(), said), LinkKind.ORDER) == [("k", 51, "k", 104)]


def test_a_recorded_event_sync_names_its_command(show: Show) -> None:
    """The host waits for the first kernel, and returns while the second runs on another stream."""
    rows = [
        launched(0, 10, 100, 1),
        [call("cudaEventRecordWithFlags", 6, 1, 2)],
        launched(8, 20, 85, 3, stream=8),
        [call("cudaEventSynchronize", 14, 100, 4)],
    ]
    said = recorded_sync(4, -1, "Event Sync", wait_on_stream=8, wait_on_cuda_event_record_corr_id=-1)
    assert links_of(show(rows), LinkKind.ORDER) == [("k", 10, "cudaEventSynchronize", 14)]
    assert links_of(show(rows, said), LinkKind.ORDER) == [("k", 20, "cudaEventSynchronize", 14)]


# Back-pressure


def test_a_launch_that_found_the_queue_full_waits_for_room(show: Show) -> None:
    """500 kernels of 1 ms are pending when a launch takes 2 ms: it is a wait for the kernel that ended meanwhile."""
    rows = [launched(6 * index, 10 + 1_000 * index, 1_000, index + 1) for index in range(500)]
    full = [call("cudaLaunchKernel", 3_005, 2_010, 900), command(500_010, 5, 900)]
    timeline = show(rows, full)
    assert rows_of(timeline, Kind.SYNC) == [("cudaLaunchKernel", 3_005, 5_010)]
    assert rows_of(timeline, Kind.LAUNCH)[-1] == ("cudaLaunchKernel", 5_010, 5_015)
    assert links_of(timeline, LinkKind.ORDER) == [("k", 4_010, "cudaLaunchKernel", 3_005)]


# Collectives


def test_a_collective_knows_its_group_and_its_bytes(show: Show) -> None:
    nccl = command(20, 90, 2, stream=20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", args=NCCL)
    timeline = show(launched(0, 10, 9, 1), call("INVALID", 8, 5, 2), nccl)
    collective = timeline.spans.kind == Kind.COLLECTIVE
    assert timeline.spans.size[collective].tolist() == [16 * 4]
    group = int(timeline.spans.group[collective][0])
    assert timeline.facts.groups[group] == 2


def test_a_collective_of_an_old_trace_is_known_by_its_kernel(show: Show) -> None:
    nccl = command(20, 90, 2, stream=20, name="ncclKernel_AllReduce_RING_LL_Sum_float")
    timeline = show(launched(0, 10, 9, 1), call("cudaLaunchKernelExC", 8, 5, 2), nccl)
    assert timeline.spans.kind[-1] == Kind.COLLECTIVE
