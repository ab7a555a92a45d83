"""Several ranks: who comes late and why, what the wire costs, and collectives that could have travelled beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from build import MB, US, WIRE, Run, inside, loop
from told import cause, explained, names, near, told

from keepbusy.causes import late_ranks as late_ranks_module
from keepbusy.causes.cause import Finding
from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.causes.late_ranks import LateRank
from keepbusy.report import terminal
from keepbusy.timeline.model import Kind

ITEM = ["aten::item"]


def meet(run: Run, wire: float = 100, size: int = MB, read: bool = True) -> None:
    """All ranks meet once their kernels are done, and read the result."""
    for rank in run.ranks:
        run.on(rank).order(7, WIRE)
    run.collective(wire, size)
    for rank in run.ranks:
        run.on(rank).order(WIRE, 7)
        if read:
            run.on(rank).sync(WIRE, at=ITEM)


def loads(run: Run, late: float = 5_000, ranks: int = 4) -> None:
    """2 ms of kernels on each rank; the last one loads something first."""
    for rank in range(ranks):
        mine = run.on(rank)
        if rank == ranks - 1:
            mine.work(late, at=["data.py(3): load"])
        mine.launch(2_000)
    meet(run)


def test_a_rank_whose_host_is_late() -> None:
    """Three ranks wait 5 ms for the fourth."""
    found = told(loads, ranks=4)
    assert found.plain_step == near(5_000 + 2_000 + 100)
    assert names(found)[0] == "peer_late"
    assert cause(found, "peer_late").predicted.step == near(2_100, 0.02)
    (one,) = found.late
    assert (one.rank, one.late, one.cause) == (3, near(5_000), "host_work")
    assert (one.where.file, one.where.line) == ("data.py", 3)
    assert found.ledger["peer_late"] == near(5_000)
    assert found.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("kept", [True, False])
def test_a_rank_that_would_save_nothing_is_not_late(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Rows to blame of which none loses anything, as a damaged file may have them."""

    def with_more(inputs: CauseInputs, finding: Finding) -> tuple[LateRank, ...]:
        of_rank_0 = np.flatnonzero(inputs.timeline.rank_of_rows == 0)
        return late_ranks(
            inputs, replace(finding, rows=np.concatenate([finding.rows if kept else of_rank_0, of_rank_0]))
        )

    late_ranks = late_ranks_module.late_ranks
    monkeypatch.setattr(late_ranks_module, "late_ranks", with_more)
    [late] = [one for one in told(loads, ranks=4).causes if one.cause == "peer_late"]
    assert late.what.startswith("Rank 3 comes late" if kept else "Ranks come late")


def test_a_rank_whose_device_has_more_to_do() -> None:
    """8 ms of kernels on one rank and 2 ms on the other: shared out fairly, 5 ms on each."""

    def body(run: Run) -> None:
        run.launch(2_000)
        run.on(1).launch(8_000)
        meet(run)

    found = told(body, ranks=2)
    assert found.plain_step == near(8_000 + 100)
    assert names(found) == ["peer_late"]
    assert cause(found, "peer_late").predicted.step == near(5_000 + 100)
    (one,) = found.late
    assert (one.rank, one.cause, one.late) == (1, "computing", near(6_000))


def test_what_one_rank_alone_does_is_to_blame() -> None:
    """All ranks train along one path; the last one validates along another, and calls the same model there."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            mine = run.on(rank)
            mine.launch([1_000] * 2, at=["train.py(8): step", "model.py(3): forward"])
            if rank == 1:
                mine.launch([1_500] * 2, at=["train.py(20): validate", "model.py(3): forward"])
        meet(run)

    found = explained(loop(body, 8, 2))
    assert names(found) == ["peer_late"]
    blamed = cause(found, "peer_late")
    assert (blamed.where.file, blamed.where.line) == ("train.py", 20)
    assert blamed.advice.startswith("Only this rank does it, and the others wait.")
    (one,) = found.late
    assert (one.where.line, one.late) == (20, near(3_000))


def test_a_rank_that_is_late_in_every_step_is_found_though_the_ranks_launch_unequally_often() -> None:
    """Rank 1 is a second late; now and then rank 0 launches once more than usual."""
    more = iter("00010000")

    def body(run: Run) -> None:
        run.launch([100] * (20 + int(next(more, 0))))
        run.on(1).work(1_000_000, at=["data.py(3): load"]).launch(2_000)
        meet(run)

    found = told(body, ranks=2)
    assert names(found)[0] == "peer_late"
    (one,) = found.late
    assert (one.rank, one.late, one.where.line) == (1, near(1_000_000), 3)
    assert "Rank 1 comes late" in cause(found, "peer_late").what
    assert "Rank 1 arrives 1.00 s late, and" in terminal.render_full(found)


def test_a_collective_outside_the_recorded_iterations_has_no_name() -> None:
    """They meet after the loop, where rank 0 waits for what took the other one longer in each of its turns."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            run.on(rank).work(5_000 if rank else 500, at=["stay.py(20): ask"]).launch(2_000)

    blamed = cause(told(body, ranks=2), "peer_late")
    assert blamed.what == "Rank 1 comes late to the next collective, which was not recorded. The others wait there."


def test_ranks_that_do_the_same_are_not_late() -> None:
    """Each waits for the others now and then: nobody is to blame for that."""
    found = told(lambda run: loads(run, late=0), ranks=4)
    assert "peer_late" not in names(found)
    assert found.late == ()


def test_the_wire_is_what_the_last_to_come_shows() -> None:
    """Rank 0 spins in its collective for 5 ms: that is neither computing nor the wire."""
    found = told(lambda run: loads(run, ranks=2), ranks=2)
    assert found.ledger["computing"] == near(2_000)
    assert found.ledger.get("collective", 0) + found.ledger.get("exposed_collective", 0) <= 150_000


def test_a_rank_late_in_one_step_only_is_no_late_rank() -> None:
    """Rank 3 loads for 5 ms in the third step alone."""
    step = iter(range(10_000))

    def body(run: Run) -> None:
        loads(run, late=5_000 if next(step) == 2 else 0)

    found = told(body, ranks=4)
    assert found.late == ()


# On the wire


def reduced(run: Run, wire: float) -> None:
    """4 ms of kernels, then the gradients of the whole model."""
    for rank in run.ranks:
        run.on(rank).launch([1_000] * 4)
    meet(run, wire, 100 * MB, read=False)


def test_a_collective_after_the_compute_is_exposed() -> None:
    found = told(lambda run: reduced(run, 3_000), ranks=2)
    assert found.plain_step == near(4_000 + 3_000)
    assert names(found) == ["exposed_collective"]
    assert cause(found, "exposed_collective").predicted.step == near(4_000)
    assert found.ledger["exposed_collective"] == near(3_000)


GRADIENTS = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def passes_of(run: Run, passes: int, average: Callable[[Run], None] = lambda run: None, wire: float = 0) -> None:
    """So many micro-batches of 4 ms before the optimizer, whose gradients travel as they are done, or by hand."""
    for _ in range(passes):
        for rank in run.ranks:
            run.on(rank).launch([2_000] * 2)
        with inside(run, GRADIENTS):
            for rank in run.ranks:
                run.on(rank).launch([1_000] * 2).order(7, WIRE)
            for size in (100 * MB, 30 * MB) if wire else ():
                run.collective(wire / 2, size, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
            for rank in run.ranks:
                run.on(rank).order(WIRE, 7)
        average(run)
    with inside(run, "Optimizer.step#SGD.step"):
        for rank in run.ranks:
            run.on(rank).launch(10)


@pytest.mark.parametrize(
    ("passes", "api", "fixed"),
    [(1, "torch.nn.parallel.DistributedDataParallel", 6_000), (3, "keepbusy.accumulate", 22_000)],
)
def test_gradients_that_travel_several_times_a_step_are_to_be_accumulated(passes: int, api: str, fixed: float) -> None:
    """Those of the last micro-batch still travel as they did."""
    found = told(lambda run: passes_of(run, passes, wire=4_000), ranks=2)
    assert found.plain_step == near(passes * 10_000, 0.02)
    assert cause(found, "exposed_collective").api == api
    assert cause(found, "exposed_collective").predicted.step == near(fixed, 0.02)


def test_what_the_program_averages_by_hand_leaves_with_all_that_is_called_for_it() -> None:
    """5 ms of launching copies beside each collective, which the host of a launch-bound step pays, too."""

    def average(run: Run) -> None:
        with inside(run, "train.py(31): average"):
            for rank in run.ranks:
                run.on(rank).launch(500, host=2_500)
            run.collective(1_000, 100 * MB, stream=7)
            for rank in run.ranks:
                run.on(rank).launch(500, host=2_500)

    found = told(lambda run: passes_of(run, 4, average), ranks=2)
    fix = next(one for one in found.plan if one.fix == "average_once")
    assert found.plain_step == near(4 * 8_000, 0.03)
    assert fix.predicted.step == near(4 * 6_000 + 2_000, 0.03)
    assert "3 times per iteration too often" in cause(found, "exposed_collective").what


@pytest.mark.parametrize("wrapped", ["layers", "blocks"])
def test_blocks_are_sharded_whole_where_each_layer_is(wrapped: str) -> None:
    """Twelve blocks of six layers: Python is at work for FSDP 72 times, and could be twelve times."""

    def body(run: Run) -> None:
        for block in range(12):
            for layer in range(6):
                name = f"blocks.{block}.layer{layer}" if wrapped == "layers" else f"layer{6 * block + layer}"
                with inside(run, "train.py(98): main", f"FSDP::all_gather ({name})"):
                    for rank in run.ranks:
                        run.on(rank).launch(5, host=500)
                    run.collective(20, 1 * MB, stream=7)
                with inside(run, "train.py(99): main"):
                    for rank in run.ranks:
                        run.on(rank).launch(20, host=100)

    found = told(body, ranks=2)
    fixes = [one for one in found.plan if one.fix == "shard_blocks"]
    if wrapped == "blocks":
        assert fixes == []
        return
    assert fixes == [found.plan[0]]
    assert [str(place) for place in fixes[0].where] == ["train.py:98"]
    assert fixes[0].reason.startswith("72 groups of parameters are gathered for 12 blocks.")
    assert fixes[0].predicted.step == near(12 * 500 + 72 * 100, 0.1)


def test_what_fsdp_gathers_for_each_micro_batch_are_no_gradients() -> None:
    """Its forward passes call for them along the same path each time, also in the turn that begins behind the last."""

    def gathers(run: Run) -> None:
        with inside(run, "train.py(98): main", "FSDP::all_gather"):
            run.collective(2_000, 100 * MB, stream=7)

    def body(run: Run) -> None:
        gathers(run)
        passes_of(run, 2, gathers)

    found = told(body, ranks=2)
    assert cause(found, "exposed_collective").fix == "gather_ahead"
    assert "micro-batch" not in cause(found, "exposed_collective").what


def test_ranks_that_are_sent_the_weights_take_no_step_and_have_no_micro_batches() -> None:
    """Rank 0 alone has an optimizer; the other one's gradients are no more often sent than they are used."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            run.on(rank).launch([2_000] * 2)
            with run.on(rank).inside(GRADIENTS):
                run.on(rank).launch([1_000] * 2)
        with inside(run, "train.py(49): step"):
            run.collective(1_000, 100 * MB, stream=7)
        with run.on(0).inside("Optimizer.step#SGD.step"):
            run.on(0).launch(10)
        with inside(run, "train.py(54): step"):
            run.collective(1_000, 100 * MB, stream=7)

    found = told(body, ranks=2)
    assert {one.fix for one in found.plan} == {"overlap_collectives"}
    assert "micro-batch" not in cause(found, "exposed_collective").what


OBJECTS = "torch/distributed/distributed_c10d.py(3237): all_gather_object"


def test_objects_that_travel_leave_with_all_that_is_done_for_them() -> None:
    """A length, then the bytes: 2 ms of pickling, two collectives and two waits, in a step of 10 ms of launches."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            for _ in range(100):
                run.on(rank).work(90, at=["aten::add"]).launch(10, at=["aten::add"], host=10)
        with inside(run, "train.py(49): main", OBJECTS):
            for rank in run.ranks:
                run.on(rank).work(2_000)
            for _ in range(2):
                run.collective(50, 16, stream=7)
                for rank in run.ranks:
                    run.on(rank).sync(7, at=ITEM)

    found = told(body, ranks=2)
    assert found.plain_step == near(10_000 + 2_000, 0.05)
    fix = next(one for one in found.plan if one.fix == "send_tensors")
    assert [str(place) for place in fix.where] == ["train.py:49"]
    assert found.plain_step - cause(found, "host_sync").predicted.step == near(2_000, 0.2)


def test_objects_are_pickled_for_those_that_send_them() -> None:
    """As a log shows it: each line of the call is a frame, and what it calls stands beside those lines."""
    lines = ["torch/distributed/distributed_c10d.py(3305): all_gather_object"]
    pickles = "torch/distributed/distributed_c10d.py(3209): _object_to_tensor"

    def body(run: Run) -> None:
        for rank in run.ranks:
            for _ in range(100):
                run.on(rank).work(90, at=["aten::add"]).launch(10, at=["aten::add"], host=10)
        with inside(run, "train.py(49): main", pickles):
            for rank in run.ranks:
                run.on(rank).work(2_000)
        with inside(run, "train.py(49): main", *lines):
            run.collective(50, 16, stream=7)
            for rank in run.ranks:
                run.on(rank).sync(7, at=ITEM)

    [fix, *others] = told(body, ranks=2).plan
    assert (fix.fix, [str(place) for place in fix.where]) == ("send_tensors", ["train.py:49"])
    assert fix.gain == near(2_000, 0.2)
    assert {one.fix for one in others} <= {"compile"}


def test_collectives_within_a_forward_pass_are_no_gradients() -> None:
    """Tensor parallel: each micro-batch needs them."""

    def body(run: Run) -> None:
        for _ in range(3):
            with inside(run, "train.py(12): forward"):
                run.collective(2_000, 100 * MB, stream=7)
            for rank in run.ranks:
                with run.on(rank).inside(GRADIENTS):
                    run.on(rank).launch([1_000] * 4)
        with inside(run, "Optimizer.step#SGD.step"):
            for rank in run.ranks:
                run.on(rank).launch(10)

    assert cause(told(body, ranks=2), "exposed_collective").fix == "compute_meanwhile"


FSDP = "FSDP::all_gather (body.layers.1)"
BUFFERS = ("DistributedDataParallel.forward", "c10d::broadcast_", "nccl:broadcast")
BY_HAND = ("DistributedDataParallel.forward", "model.py(7): forward", "c10d::broadcast_", "nccl:broadcast")


@pytest.mark.parametrize(
    ("around", "fix"),
    [
        ((), "overlap_collectives"),
        ((GRADIENTS,), "size_buckets"),
        ((FSDP,), "gather_ahead"),
        (BUFFERS, "turn_off_broadcasts"),
        (BY_HAND, "overlap_collectives"),
    ],
)
def test_what_is_advised_fits_whose_collective_it_is(around: tuple[str, ...], fix: str) -> None:
    """By hand after the backward pass, DDP's own, FSDP's, buffers that DDP sends, and what a model does itself."""

    def body(run: Run) -> None:
        with inside(run, "autograd::engine::evaluate_function: MmBackward0"):
            for rank in run.ranks:
                run.on(rank).launch([1_000] * 4)
        with inside(run, *around):
            meet(run, 3_000, 100 * MB, read=False)
        with inside(run, "Optimizer.step#SGD.step"):
            for rank in run.ranks:
                run.on(rank).launch(10)

    assert cause(told(body, ranks=2), "exposed_collective").fix == fix


def test_all_of_the_host_that_a_collective_of_gradients_takes_leaves_with_it() -> None:
    """In a launch-bound step that is most of what it costs: 8 calls of 400 µs after each of four micro-batches."""

    def body(run: Run) -> None:
        for _ in range(4):
            for rank in run.ranks:
                run.on(rank).work(600).launch(10)
            with inside(run, GRADIENTS):
                for rank in run.ranks:
                    run.on(rank).launch(10)
                for _ in range(8):
                    with inside(run, "c10d::allreduce_"):
                        for rank in run.ranks:
                            run.on(rank).work(400)
                        run.collective(20)
        with inside(run, "Optimizer.step#SGD.step"):
            for rank in run.ranks:
                run.on(rank).launch(10)

    found = told(body, ranks=2)
    assert cause(found, "exposed_collective").predicted.step == near(found.plain_step / US - 3 * 8 * 405, 0.02)


def test_no_collective_is_faster_than_its_wire() -> None:
    found = told(lambda run: reduced(run, 9_000), ranks=2)
    assert found.plain_step == near(4_000 + 9_000)
    assert cause(found, "exposed_collective").predicted.step == near(9_000)
    assert found.ledger["collective"] == near(5_000)


def test_a_collective_that_travels_beside_the_compute_costs_nothing() -> None:
    """Half of the kernels, the collective, and the other half meanwhile."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            run.on(rank).launch([1_000] * 4).order(7, WIRE)
        run.collective(1_500, 100 * MB)
        for rank in run.ranks:
            run.on(rank).launch([1_000] * 4).order(WIRE, 7)

    found = told(body, ranks=2)
    assert found.plain_step == near(8_000)
    assert names(found) == []
    assert found.ledger["computing"] == near(8_000)


def test_one_rank_alone_shows_no_peers() -> None:
    """What it waits for is not in its trace, and the report says so."""

    def body(run: Run) -> None:
        run.launch([1_000] * 4)
        launch = run.call(WIRE, "INVALID")
        run.order(7, WIRE).command(launch, WIRE, 3_000, Kind.COLLECTIVE, name="nccl", size=100 * MB)
        run.order(WIRE, 7)

    found = told(body)
    assert found.late == ()
    assert any("Other ranks were not recorded" in note for note in found.notes)
    assert found.ledger["exposed_collective"] == near(3_000)


# Stages of a pipeline


def message(run: Run, sender: int, receiver: int) -> None:
    with (
        run.on(sender).inside(f"nccl:send {sender}->{receiver}"),
        run.on(receiver).inside(f"train.py({20 + receiver}): stage", f"nccl:recv {receiver}<-{sender}"),
    ):
        run.collective(10, 16 * MB, stream=7, ranks=(0, 1))


def forward(run: Run) -> None:
    run.on(0).launch(1_000)
    message(run, 0, 1)
    run.on(1).launch(1_000)


def backward(run: Run) -> None:
    run.on(1).launch(2_000)
    message(run, 1, 0)
    run.on(0).launch(2_000)


def one_at_a_time(run: Run) -> None:
    for _ in range(4):
        forward(run)
        backward(run)


def all_there_then_all_back(run: Run) -> None:
    for _ in range(4):
        run.on(0).launch(1_000)
        message(run, 0, 1)
        run.on(1).launch(1_000)
    for _ in range(4):
        backward(run)


def in_one_piece(run: Run) -> None:
    forward(run)
    backward(run)


@pytest.mark.parametrize(
    ("body", "fix", "step", "after"),
    [
        (one_at_a_time, "overlap_stages", 4 * 6_000, 5 * 3_000),
        (all_there_then_all_back, "cut_into_micro_batches", 5 * 3_000, 4 * 3_000 + 1_500),
        (in_one_piece, "cut_into_micro_batches", 6_000, 3_000 + 750),
    ],
)
def test_stages_that_wait_for_each_other_are_in_the_plan(
    body: Callable[[Run], None], fix: str, step: float, after: float
) -> None:
    """What stays is that the pipeline fills and drains: of one piece, however many there are."""
    found = told(body, ranks=2)
    assert found.plain_step == near(step, 0.02)
    first = found.plan[0]
    assert (first.fix, first.causes) == (fix, ("pipeline_bubble",))
    assert {str(place) for place in first.where} == {"train.py:20", "train.py:21"}
    assert first.predicted.step == near(after, 0.02)
    assert first.predicted.low <= first.predicted.step <= first.predicted.high


def test_a_schedule_of_pytorchs_own_is_known_by_its_pieces() -> None:
    """Two of them, there and back; nothing says which way a message goes, and a sum of the stage's own is none."""

    def passed(run: Run, number: int, piece: str) -> None:
        with inside(run, f"{piece} {number}"):
            run.collective(10, 16 * MB, stream=7, name="ncclDevKernel_SendRecv", at=["nccl:coalesced"])
            run.collective(10, 16 * MB, stream=7, name="ncclDevKernel_AllReduce", at=["c10d::allreduce_"])

    def body(run: Run) -> None:
        for number in range(2):
            run.on(0).launch(1_000)
            passed(run, number, "Forward")
            run.on(1).launch(1_000)
        for number in range(2):
            run.on(1).launch(2_000)
            passed(run, number, "Backward")
            run.on(0).launch(2_000)

    first = told(body, ranks=2).plan[0]
    assert (first.fix, first.code.partition("  #")[0]) == (
        "cut_into_micro_batches",
        "Schedule1F1B(stage, n_microbatches=4)",
    )
    assert first.reason
    assert first.predicted.high >= told(body, ranks=2).plain_step - US


def test_ranks_that_exchange_messages_are_no_stages() -> None:
    """A ring: each sends to its neighbour, and then receives."""

    def body(run: Run) -> None:
        for rank in run.ranks:
            run.on(rank).launch(1_000 + 1_000 * rank)
        message(run, 0, 1)
        with run.on(1).inside("nccl:send 1->0"), run.on(0).inside("nccl:recv 0<-1"):
            run.collective(10, 16 * MB, stream=7)

    def ring(run: Run) -> None:
        for rank in run.ranks:
            with run.on(rank).inside(f"nccl:send {rank}->{1 - rank}"):
                run.on(rank).launch(10)
        body(run)

    assert not any("pipeline_bubble" in one.causes for one in told(ring, ranks=2).plan)
