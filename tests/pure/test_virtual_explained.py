"""A virtual run is explained by the code that explains recordings: its stalls are found, on their exact lines."""

from __future__ import annotations

import numpy as np
import pytest

from keepbusy.explain import explain
from keepbusy.explain.diagnosis import Diagnosis
from keepbusy.timeline.model import Direction, FrameKind, Timeline
from keepbusy.timeline.ranks import merge
from keepbusy.timeline.replay import replay
from keepbusy.virtual.clock.engine import Clock
from keepbusy.virtual.costs.device import read

MS = 1_000_000
H200 = read("h200")
IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class Loop:
    """A training loop of eight steps with twenty kernels each, and whatever `stall` adds to a step."""

    def __init__(self, kernel: int = 500_000) -> None:
        self.on, self.kernel = Clock(H200), kernel
        self.stream = self.on.default_stream()

    def line(self, number: int) -> int:
        return self.on.place(f"train.py({number}): main")

    def step(self, prepare: int = 0, read: bool = False, batch: int = 0) -> None:
        on, stream = self.on, self.stream
        if prepare:
            on.enter(FrameKind.ANNOTATION, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", self.line(10))
            on.work(prepare, "aten::avg_pool2d", self.line(11))
            on.leave()
        if batch:
            on.begin("aten::to", self.line(12))
            on.copy(stream, IN, batch)
            on.end()
        for _ in range(20):
            on.begin("aten::mm", self.line(13))
            on.launch(stream, [("gemm", self.kernel)])
            on.end()
        on.enter(FrameKind.ANNOTATION, "Optimizer.step#SGD.step", self.line(14))
        on.begin("aten::_foreach_add_", self.line(14))
        on.launch(stream, [("multi_tensor", 20_000)])
        on.end()
        on.leave()
        if read:
            on.begin("aten::item", self.line(15))
            on.copy(stream, OUT, 4, pinned=True)
            on.end()

    def run(self, steps: int = 8, **stall: int) -> Timeline:
        for _ in range(steps):
            self.step(**stall)  # type: ignore[arg-type]
        return self.on.timeline(source="train.py")


def first(diagnosis: Diagnosis) -> tuple[str, str, int, bool]:
    where = diagnosis.causes[0].sites[0].where
    return diagnosis.causes[0].cause, where.file, where.line, where.exact


def test_a_healthy_loop_is_left_alone() -> None:
    diagnosis = explain(Loop().run())
    assert diagnosis.causes == ()
    assert sum(diagnosis.ledger.values()) == diagnosis.plain_step == pytest.approx(10 * MS, rel=0.02)


@pytest.mark.parametrize(
    ("stall", "cause", "line"),
    [
        ({"prepare": 30 * MS}, "input_late", 10),
        ({"prepare": 8 * MS, "read": True}, "host_sync", 15),
        ({"batch": 100_000_000}, "blocking_copy", 12),
    ],
)
def test_stalls_are_found_on_their_lines(stall: dict[str, int], cause: str, line: int) -> None:
    diagnosis = explain(Loop().run(**stall))
    assert cause in [one.cause for one in diagnosis.causes]
    found = next(one for one in diagnosis.causes if one.cause == cause).sites[0].where
    assert (found.file, found.line) in (("train.py", line), ("train.py", line + 1))
    assert found.exact
    assert sum(diagnosis.ledger.values()) == diagnosis.plain_step


def test_waiting_for_the_workers_of_a_loader_is_no_work_of_the_loop() -> None:
    """40 ms a batch for 10 ms of kernels: four times the workers are enough."""
    time, loop = [0], Loop()
    loop.on = Clock(H200, real=lambda: lambda: time[0])
    loop.stream = loop.on.default_stream()
    batch = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for _ in range(10):
        loop.on.enter(FrameKind.ANNOTATION, batch, loop.line(10))
        loop.on.work(1, place=loop.line(10))
        loop.on.await_batch()
        time[0] += 40 * MS
        loop.on.take_batch(batch)
        loop.on.leave()
        loop.step()
    diagnosis = explain(loop.on.timeline(source="train.py"))
    assert first(diagnosis) == ("input_late", "train.py", 10, True)
    assert "workers" in diagnosis.causes[0].what
    assert diagnosis.plain_step == pytest.approx(40 * MS, rel=0.05)
    assert diagnosis.causes[0].predicted.step == pytest.approx(10 * MS, rel=0.1)
    assert diagnosis.ledger.get("unknown", 0) < MS


def test_reading_costs_little_where_the_host_sets_the_pace() -> None:
    bound = explain(Loop(kernel=2_000).run(read=True))
    assert bound.causes[0].cause == "launch_bound"
    assert all(bound.plain_step - one.predicted.step < 40_000 for one in bound.causes[1:])


@pytest.mark.parametrize("busy", ["host", "device"])
def test_a_late_rank_is_seen_from_the_others(busy: str) -> None:
    """Whether its host is late or its device: on the other's lane the collective stands as a wait for a peer."""
    ranks = [Clock(H200, rank=rank) for rank in (0, 1)]
    streams = [on.default_stream() for on in ranks]
    wires = [on.new_stream() for on in ranks]
    for _ in range(6):
        for rank, on in enumerate(ranks):
            on.enter(FrameKind.ANNOTATION, "Optimizer.step#SGD.step", on.place("train.py(2): main"))
            on.leave()
            if rank == 1 and busy == "host":
                on.work(5 * MS, "time.sleep", on.place("train.py(3): main"))
            elif rank == 1:
                on.operator("aten::mm", on.place("train.py(3): main"), streams[rank], [("gemm", 5 * MS)])
            on.begin("aten::mm", on.place("train.py(4): main"))
            on.launch(streams[rank], [("gemm", 2 * MS)])
            on.end()
            on.wait(wires[rank], on.record(streams[rank]))
        arrivals = [0, 0]
        for turn in (0, 1):  # the first turn only asks when they arrive
            for rank, on in enumerate(ranks):
                if not turn:
                    arrivals[rank] = on.record(wires[rank]).until
                    continue
                on.begin("c10d::allreduce_", on.place("train.py(5): main"))
                last = max(arrivals) + H200.queue.gap
                on.collective(wires[rank], "ncclDevKernel_AllReduce", 50_000, 4096, 7, 2, lambda mine, to=last: to)
                on.end()
                on.wait(streams[rank], on.record(wires[rank]))
    whole = merge([on.timeline(source=f"rank{rank}") for rank, on in enumerate(ranks)])
    again = replay(whole)
    assert (again.spans.start == whole.spans.start).all()
    assert int(whole.meetings.members.min()) == 2
    works = whole.spans.work[whole.spans.meeting >= 0]
    assert np.median(works) == 50_000
    parts = (whole.spans.meeting >= 0) & np.isin(
        whole.spans.lane, [at for at, one in enumerate(whole.lanes) if not one.rank]
    )
    waited = (whole.spans.end - whole.spans.start - whole.spans.work)[parts]
    assert np.median(waited) == pytest.approx(5 * MS if busy == "device" else 3 * MS, rel=0.1)
    assert explain(whole).causes[0].cause == "peer_late"
