"""Rounds within a turn that could be one call, on hand-built timelines. Microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from build import US, Run
from told import near, told

from keepbusy.explain.diagnosis import Diagnosis, PlannedFix

ADAM = ["Optimizer.step#Adam.step", "torch/optim/adam.py(347): _single_tensor_adam"]
FORWARD = "model.py(20): forward"
LABELS = "metric.py(8): average_precision"


def rest(run: Run) -> None:
    """What the turn does besides: five kernels of 100 µs, and a read of each, so that no graph can hold it."""
    for _ in range(5):
        run.work(20, at=["aten::mm"]).launch(100, at=["aten::mm"])
        run.sync(at=["aten::item"])


def labels(run: Run, rounds: int = 80) -> None:
    """A metric of each label: sorted, summed, divided."""
    with run.inside(LABELS):
        for _ in range(rounds):
            for operator in ("aten::sort", "aten::cumsum", "aten::div"):
                run.work(30, at=[operator]).launch(4, at=[operator])
    rest(run)


def parameters(run: Run) -> None:
    """An optimizer that goes from parameter to parameter."""
    rest(run)
    with run.inside(*ADAM):
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


def layers_of_attention(run: Run) -> None:
    layers(run, "aten::_scaled_dot_product_flash_attention")


def steps_of_a_sampler(run: Run) -> None:
    """Rounds that call a model: what stands beside it in each of them is no loop of its own."""
    with run.inside("sample.py(5): sample"):
        for _ in range(20):
            run.work(30, at=["aten::mul"]).launch(5, at=["aten::mul"])
            for _ in range(6):
                run.work(30, at=[FORWARD, "aten::linear"]).launch(5, at=[FORWARD, "aten::linear"])


def few(run: Run) -> None:
    labels(run, rounds=7)


def fixes(found: Diagnosis) -> list[PlannedFix]:
    return [one for one in found.plan if one.fix in ("do_at_once", "fuse_optimizer", "one_table")]


def test_of_rounds_nobody_knows_whether_they_need_each_other() -> None:
    """From 80 times 105 µs of the host to one, with all of it still to be done by the GPU; at best, a round's."""
    found = told(labels)
    assert found.plain_step == near(80 * 3 * 35 + 5 * 129)
    [one] = fixes(found)
    assert (one.fix, [place.library or str(place) for place in one.where]) == ("do_at_once", ["metric.py:8"])
    assert one.reason.startswith("240 of the 245 launches a step are there, in 80 rounds that do the same. Where")
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


@pytest.mark.parametrize("body", [layers, layers_of_attention, steps_of_a_sampler, few])
def test_what_needs_the_one_before_it_is_no_loop_of_rounds(body: Callable[[Run], Any]) -> None:
    assert fixes(told(body)) == []
