"""Rounds within a turn that could be one call, on hand-built timelines. Microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from build import US, WIRE, Run, inside, loop
from told import TRAIN, explained, near, told

from keepbusy.causes.cause_inputs import CauseInputs
from keepbusy.explain.diagnosis import Diagnosis, PlannedFix
from keepbusy.fixes.repeated_calls import as_one, repeated_calls

ADAM = ["Optimizer.step#Adam.step", "torch/optim/adam.py(347): _single_tensor_adam"]
FORWARD = "model.py(20): forward"
LABELS = "metric.py(8): average_precision"
SENDS = "torch/distributed/optim/zero_redundancy_optimizer.py(711): _broadcast_params_from_rank"


def rest(run: Run) -> None:
    """What the turn does besides: five kernels of 100 µs, and a read of each."""
    for _ in range(5):
        run.work(20, at=["aten::mm"]).launch(100, at=["aten::mm"])
        run.sync(at=["aten::item"])


TURNS = count(1)
"""A turn computes on as much as none before it, so that no graph can hold it."""


def labels(run: Run, rounds: int = 80) -> None:
    """A metric of each label: sorted, summed, divided."""
    blocks = next(TURNS)
    with run.inside(LABELS):
        for _ in range(rounds):
            for operator in ("aten::sort", "aten::cumsum", "aten::div"):
                run.work(30, at=[operator]).launch(4, at=[operator], blocks=blocks)
    rest(run)


def parameters(run: Run, optimizer: Sequence[str] = ADAM) -> None:
    """An optimizer that goes from parameter to parameter."""
    rest(run)
    with run.inside(*optimizer):
        for _ in range(60):
            for operator in ("aten::lerp_", "aten::addcmul_", "aten::addcdiv_"):
                run.work(30, at=[operator]).launch(3, at=[operator])


def tables(run: Run) -> None:
    """Forty tables, as a virtual GPU calls them, and a sparse gradient of each, whose length is read."""
    with run.inside(FORWARD):
        for _ in range(40):
            run.work(20, at=["aten::_embedding_bag"]).launch(10, at=["aten::_embedding_bag"])
    rest(run)
    with run.inside("Optimizer.step#SparseAdam.step", "torch/optim/_functional.py(24): sparse_adam"):
        for _ in range(40):
            run.work(60, at=["aten::coalesce"]).launch(500, at=["aten::coalesce"]).sync(at=["aten::coalesce"])


def layers(run: Run, product: str = "aten::linear") -> None:
    """Each needs the one before it."""
    with run.inside(FORWARD):
        for _ in range(40):
            for operator in ("aten::layer_norm", product, "aten::gelu"):
                run.work(60, at=[operator]).launch(10, at=[operator])


def layers_before_reads(run: Run) -> None:
    """So that no graph can hold them. Weights are cast for each product, as by autocast."""
    with run.inside(FORWARD):
        for _ in range(20):
            for operator in ("aten::layer_norm", "aten::_to_copy", "aten::_to_copy", "aten::linear", "aten::gelu"):
                run.work(60, at=[operator]).launch(10, at=[operator])
    rest(run)


def layers_of_attention(run: Run) -> None:
    layers(run, "aten::_scaled_dot_product_flash_attention")


def blocks(run: Run) -> None:
    """As a virtual GPU and a line log show them: each line of a block again in every block, a product between them."""
    with run.inside(FORWARD):
        for _ in range(20):
            with run.inside("resnet.py(92): forward", exact=True):
                run.work(30, at=["aten::convolution"]).launch(10, at=["aten::convolution"])
            with run.inside("resnet.py(93): forward", exact=True):
                for operator in ("aten::add_", "aten::native_batch_norm"):
                    run.work(60, at=[operator]).launch(10, at=[operator])
    rest(run)


def steps_of_a_sampler(run: Run) -> None:
    """Rounds that call a model: what stands beside it in each of them is no loop of its own."""
    with run.inside("sample.py(5): sample"):
        for _ in range(20):
            run.work(30, at=["aten::mul"]).launch(5, at=["aten::mul"])
            for _ in range(6):
                run.work(30, at=[FORWARD, "aten::linear"]).launch(5, at=[FORWARD, "aten::linear"])


def graphs(run: Run, backward: str = "IndexBackward0") -> None:
    """One graph of a batch after the other, and each again in the backward pass."""
    blocks = next(TURNS)
    with run.inside("gnn.py(90): readout"):
        for _ in range(40):
            for operator in ("aten::eq", "aten::index"):
                run.work(30, at=[operator]).launch(4, at=[operator], blocks=blocks)
    with run.inside("gnn.py(129): main", "backward"):
        for _ in range(40):
            with run.inside(backward):
                run.work(60).launch(4, blocks=blocks)
            run.work(20).launch(4, blocks=blocks)
    rest(run)


def few(run: Run) -> None:
    labels(run, rounds=7)


def fixes(found: Diagnosis) -> list[PlannedFix]:
    return [one for one in found.plan if one.fix in ("do_at_once", "fuse_optimizer", "one_table")]


def test_the_backward_pass_of_rounds_goes_with_them() -> None:
    """40 times 70 µs of the host in the forward pass, and 40 times 90 in the backward pass; not where that is of what
    the rounds did not call."""
    [fix] = fixes(told(graphs))
    assert [str(place) for place in fix.where] == ["gnn.py:90"]
    assert fix.gain == near(39 * (70 + 90) - 39 * 16, 0.15)
    [alone] = [one for one in fixes(told(lambda run: graphs(run, "MmBackward0"))) if str(one.where[0]) == "gnn.py:90"]
    assert alone.gain < 0.6 * fix.gain


def test_of_rounds_nobody_knows_whether_they_need_each_other() -> None:
    """From 80 times 105 µs of the host to one, with all of it still to be done by the GPU; at best, a round's."""
    found = told(labels)
    assert found.plain_step == near(80 * 3 * 35 + 5 * 129)
    [one] = fixes(found)
    assert (one.fix, [place.library or str(place) for place in one.where]) == ("do_at_once", ["metric.py:8"])
    assert one.reason.startswith("240 of the 245 launches per iteration are there, in 80 equal rounds. Where")
    assert one.predicted.step == near(5 * 100 + 80 * 3 * 4, 0.02)
    assert one.predicted.low < one.predicted.step < one.predicted.high
    assert one.predicted.high >= found.plan[0].predicted.step  # where each needs the one before it, it gains nothing


def test_an_optimizer_does_its_parameters_at_once() -> None:
    found = told(parameters)
    [one] = fixes(found)
    assert one.fix == "fuse_optimizer"
    assert one.predicted.high < found.plain_step - found.noise
    assert one.predicted.low < 700 * US
    assert one is found.plan[0]


def test_an_optimizer_that_has_no_fused_form_gets_none() -> None:
    lbfgs = ["Optimizer.step#LBFGS.step", "torch/optim/lbfgs.py(290): _add_grad"]
    assert fixes(told(lambda run: parameters(run, lbfgs))) == []


def test_a_checkpoint_is_written_tensor_by_tensor() -> None:
    """No call does it at once, and `torch.func.vmap` least of all."""

    def saved(run: Run) -> None:
        rest(run)
        with run.inside("train.py(9): main", "torch/serialization.py(1310): _save"):
            for _ in range(40):
                run.work(30, at=["aten::copy_"]).launch(4, at=["aten::copy_"])

    assert fixes(told(saved)) == []


def test_what_an_optimizer_calls_back_is_not_its_own_loop() -> None:
    """As in trainers, whose whole step is a closure of the optimizer's."""

    def closure(run: Run) -> None:
        with run.inside("Optimizer.step#Adam.step"):
            labels(run)

    [one] = fixes(told(closure))
    assert one.fix == "do_at_once"


def test_tables_and_their_sparse_gradients_are_one_change() -> None:
    """The GPU's own work is what is gained: from forty times 500 µs to between one and all of it."""
    found = told(tables)
    [one] = fixes(found)
    assert (one.fix, len(one.where), found.plan[0]) == ("one_table", 2, one)
    assert one.predicted.step == near(500 + 40 * 510 / 2, 0.06)
    assert one.predicted.low == near(500 + 510, 0.3)
    assert one.predicted.high == near(500 + 40 * 510, 0.06)


@pytest.mark.parametrize("body", [layers, layers_before_reads, layers_of_attention, blocks, steps_of_a_sampler, few])
def test_what_needs_the_one_before_it_is_no_loop_of_rounds(body: Callable[[Run], Any]) -> None:
    assert fixes(told(body)) == []


# Rounds in which ranks meet


def ranked(run: Run, kernel: float, host: float = 20) -> None:
    """What every rank computes besides: four kernels, and a read, so that no graph can hold it."""
    for rank in run.ranks:
        for _ in range(4):
            run.on(rank).work(host, at=["aten::mm"]).launch(kernel, at=["aten::mm"])
        run.on(rank).sync(at=["aten::item"])


def sent(run: Run, rounds: int, wire: float, size: int, host: float = 40, after: str = "", at: str = SENDS) -> None:
    """One tensor after the other, each by a call of its own that waits for the compute, and it for the last of them."""
    with inside(run, at):
        for _ in range(rounds):
            with inside(run, "c10d::allreduce_"):
                for rank in run.ranks:
                    run.on(rank).work(host).order(7, WIRE)
                run.collective(wire, size)
            for rank in run.ranks if after else ():
                run.on(rank).order(WIRE, 7).work(20, at=[after]).launch(5, at=[after])
    for rank in run.ranks:
        run.on(rank).order(WIRE, 7)


def of_ranks(body: Callable[[Run], Any], ranks: int = 2) -> Diagnosis:
    def within(run: Run) -> None:
        with inside(run, TRAIN):
            body(run)

    return explained(loop(within, ranks=ranks))


def together(found: Diagnosis) -> list[PlannedFix]:
    return [one for one in found.plan if one.fix in ("send_together", "do_at_once")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_that_are_broadcast_one_by_one_are_sent_together(ranks: int) -> None:
    """As ZeroRedundancyOptimizer does: 60 times 45 µs of the host, and the wire is idle for most of them."""

    def body(run: Run) -> None:
        ranked(run, 500)
        with inside(run, "Optimizer.step#ZeroRedundancyOptimizer.step"):
            sent(run, 60, wire=20, size=24_000)

    found = of_ranks(body, ranks)
    assert found.plain_step == near(4 * 500 + 60 * 45, 0.05)
    one = found.plan[0]
    assert (one.fix, one.causes, [str(place) for place in one.where]) == (
        "send_together",
        ("exposed_collective",),
        ["train.py:9"],
    )
    assert one.predicted.step == near(4 * 500 + 45 + 20 + 60, 0.05)
    assert one.predicted.low < one.predicted.step <= one.predicted.high < found.plain_step
    assert one.reason.startswith("60 of the 64 launches per iteration are there, in 60 equal rounds.")


def test_on_the_wire_many_cost_their_price_once_and_their_bytes() -> None:
    """80 of 50 µs, whose megabyte takes 4 at the speed that a large one shows: 50 and 320 are left of 4,000."""

    def body(run: Run) -> None:
        ranked(run, 3_000)
        sent(run, 1, wire=400, size=100_000_000, host=2, at="train.py(40): exchange")
        sent(run, 80, wire=50, size=1_000_000, host=2)

    found = of_ranks(body)
    assert found.plain_step == near(12_000 + 400 + 4_000, 0.02)
    scene = CauseInputs(loop(body, ranks=2))
    scale = as_one(scene, repeated_calls(scene), 0.5).edit.scale
    assert scale[scale != 1] == pytest.approx((50 + 80_000_000 / 250_000) / 50)


def test_what_travels_as_fast_as_its_bytes_gains_nothing_on_the_wire() -> None:
    """Ten of 100 MB: to lay them into one saves ten launches."""

    def body(run: Run) -> None:
        ranked(run, 500)
        sent(run, 10, wire=400, size=100_000_000, host=2)

    assert together(of_ranks(body)) == []


def test_means_that_are_made_beside_do_not_hold_them_apart() -> None:
    """As an old tutorial averages gradients: each is reduced, and divided by the number of ranks."""

    def body(run: Run) -> None:
        ranked(run, 200)
        sent(run, 99, wire=8, size=20_000, after="aten::div_")

    found = of_ranks(body, 4)
    assert found.plan[0].fix == "send_together"
    assert found.plan[0].gain > 0.9 * 98 * 70 * US


def test_of_sums_that_are_worked_on_only_their_author_knows_whether_they_can_be_one() -> None:
    """A metric of each label, summed over the ranks."""

    def body(run: Run) -> None:
        ranked(run, 500)
        sent(run, 40, wire=20, size=400, after="aten::cumsum")

    found = of_ranks(body)
    [one] = together(found)
    assert one.fix == "do_at_once"
    assert one.predicted.high >= found.plan[0].predicted.step


def laid_out(run: Run) -> None:
    """A network whose layers are cut: the second needs what came of the first."""
    with inside(run, FORWARD):
        for _ in range(24):
            for rank in run.ranks:
                run.on(rank).work(20, at=["aten::mm"]).launch(50, at=["aten::mm"]).order(7, WIRE)
            with inside(run, "c10d::allreduce_"):
                run.collective(15, 400_000)
            for rank in run.ranks:
                run.on(rank).order(WIRE, 7)


def gathered(run: Run) -> None:
    """What FSDP gathers before each layer."""
    ranked(run, 100)
    with inside(run, FORWARD):
        for _ in range(24):
            with inside(run, "FSDP::all_gather"):
                run.collective(15, 400_000)
            for rank in run.ranks:
                run.on(rank).order(WIRE, 7)


def to_and_fro(run: Run) -> None:
    """Messages, each of which is awaited before the next."""
    ranked(run, 100)
    with inside(run, "train.py(50): exchange"):
        for _ in range(24):
            for sender, receiver in ((0, 1), (1, 0)):
                with run.on(sender).inside("nccl:send"), run.on(receiver).inside("nccl:recv"):
                    run.collective(10, 400, ranks=(0, 1))


def test_gradients_that_travel_during_the_backward_pass_are_in_buckets_already() -> None:
    """Large enough to be worth overlapping: that is what DistributedDataParallel does, and both at once."""

    def body(run: Run) -> None:
        with inside(run, "autograd::engine::evaluate_function: MmBackward0"):
            ranked(run, 2_000)
        sent(run, 60, wire=60, size=200_000, host=30)
        with inside(run, "Optimizer.step#SGD.step"):
            for rank in run.ranks:
                run.on(rank).launch(10)

    found = of_ranks(body)
    assert [one.fix for one in found.plan if one.causes == ("exposed_collective",)] == ["overlap_collectives"]


@pytest.mark.parametrize("body", [laid_out, gathered, to_and_fro])
def test_what_is_needed_before_the_next_comes_is_no_round(body: Callable[[Run], Any]) -> None:
    assert together(of_ranks(body)) == []
