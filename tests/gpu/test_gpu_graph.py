"""`keepbusy.graph` on a real GPU: values to the last bit over a hundred steps; failed captures leave no trace."""

from __future__ import annotations

import gc
import warnings

import graph_flaws
import pytest
import torch
from graph_flaws import IN_CAPTURE, ON_THE_HOST, Flaw, flawed, losses, place_of
from graph_loops import (
    DRAWING,
    LOOPS,
    Kept,
    Loop,
    adam,
    batches,
    net,
    outcome,
    schedule_of_floats,
    schedules_in_the_step,
    whole,
)
from graph_state import BOUND_ANEW, BY_THE_LOOP, HIDDEN, IN_PLACE, VISIBLE, losses_in_loop, losses_with

from keepbusy.runtime.graph.graphed_step import graph

OF_FLOATS = [schedule_of_floats, schedules_in_the_step]
"""A learning rate that is a number has more digits than one that a graph reads."""


@pytest.mark.parametrize(
    "loop", [loop for loop in DRAWING + LOOPS if loop not in OF_FLOATS], ids=lambda loop: loop.__name__
)
def test_the_same_values_as_the_plain_loop(loop: Loop) -> None:
    kept = Kept()
    assert outcome(loop, kept, 100) == outcome(loop, lambda step: step, 100)
    assert kept.graphed.replays > 80


@pytest.mark.parametrize("loop", OF_FLOATS, ids=lambda loop: loop.__name__)
def test_a_schedule_of_floats_takes_effect_at_each_replay(loop: Loop) -> None:
    kept = Kept()
    found, expected = outcome(loop, kept, 100), outcome(loop, lambda step: step, 100)
    assert found[:100] == pytest.approx(expected[:100], rel=1e-4)
    assert kept.graphed.replays > 80


@pytest.mark.parametrize("flaw", IN_CAPTURE + ON_THE_HOST, ids=lambda flaw: flaw.__name__)
def test_the_line_is_named_and_the_training_goes_on_as_it_was(flaw: Flaw) -> None:
    step, state = flawed(flaw)
    expected = losses(step, 20), state()
    step, state = flawed(flaw)
    with pytest.warns(UserWarning, match="keepbusy.graph runs train eagerly: at ") as told:
        found = losses(graph(step), 20)
    (warning,) = [one for one in told if "keepbusy" in str(one.message)]  # PyTorch 2.11 may tell of streams, too
    assert place_of(flaw) in str(warning.message)
    assert warning.filename == graph_flaws.__file__
    assert (found, state()) == expected


@pytest.mark.parametrize("program", VISIBLE + HIDDEN, ids=lambda program: program.__name__)
def test_a_step_that_keeps_state_stays_as_it_is(program) -> None:
    kept = Kept()
    with pytest.warns(UserWarning, match="keepbusy.graph runs train eagerly: ") as told:
        found = losses_with(program, kept, 40)
    (warning,) = told
    assert ("graph_state.py:" in str(warning.message)) == (program in VISIBLE)
    assert found == losses_with(program, lambda step: step, 40)


@pytest.mark.parametrize("program", IN_PLACE, ids=lambda program: program.__name__)
def test_state_on_the_device_is_renewed_once_a_call(program) -> None:
    kept = Kept()
    assert losses_with(program, kept, 60) == losses_with(program, lambda step: step, 60)
    assert kept.graphed.replays == 57


@pytest.mark.parametrize("program", BOUND_ANEW, ids=lambda program: program.__name__)
def test_what_a_step_binds_anew_is_bound_by_each_replay(program) -> None:
    kept = Kept()
    assert losses_with(program, kept, 60) == losses_with(program, lambda step: step, 60)
    assert kept.graphed.replays > 50


@pytest.mark.parametrize("program", BY_THE_LOOP, ids=lambda program: program.__name__)
def test_what_the_loop_changes_takes_effect(program) -> None:
    kept = Kept()
    assert losses_in_loop(program, kept, 60) == losses_in_loop(program, lambda step: step, 60)
    assert kept.graphed.replays > 20


def test_kernels_that_add_up_in_no_order_are_replayed() -> None:
    """Two eager calls differ in the last bits, and so do two replays."""
    places = torch.randint(0, 16, (1 << 20,), device="cuda")
    weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        sums = torch.zeros(16, device="cuda").index_add(0, places, weight * x)
        loss = sums.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = graph(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            step(torch.randn(1 << 20, device="cuda"))
    assert step.replays == 17


@pytest.mark.parametrize("flaw", IN_CAPTURE, ids=lambda flaw: flaw.__name__)
def test_other_graphs_and_the_allocator_survive_a_capture_that_fails(flaw: Flaw) -> None:
    """Graphs that draw random numbers are what an invalid capture used to break."""
    model = net(dropout=0.3)
    step = graph(whole(model, adam(model)))
    before, after = [*batches(8)], [*batches(8)]
    for x, y in before:
        step(x, y)
    reserved = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses(graph(flawed(flaw)[0]))
        gc.collect()  # a step and its graphs refer to each other; when such garbage goes depends on what ran before
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever used, whatever became of it
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[1:])) == 1
    kept = [(loss, loss.item()) for loss in (step(x, y) for x, y in after)]
    assert [loss.item() for loss, _ in kept] == [value for _, value in kept]
    assert step.report() == "step: 8 replayed, 5 compared, 1 captured, 2 eager"


def test_memory_stays_flat() -> None:
    model = net(dropout=0.1)
    step = graph(whole(model, adam(model)))
    levels = []
    for x, y in batches(300):
        step(x, y)
        levels.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(levels[10:])) == 1


def test_a_batch_of_the_host_travels_beside_the_replay() -> None:
    """Copies stand in a stream of their own, so a trace shows them while kernels of the step before still run."""
    from torch.profiler import ProfilerActivity, profile

    big = torch.randn(4096, 4096, device="cuda")
    step = graph(lambda x: (big @ big @ big).sum() + x.sum())
    host = torch.randn(64 << 20).pin_memory()
    for _ in range(12):  # of the replays the eighth is compared, and the next one is the sixteenth
        step(host)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(6):
            step(host)
        torch.cuda.synchronize()
    spans = [(one.name, one.time_range.start, one.time_range.end) for one in recorded.events()]
    copies = [one for one in spans if "HtoD" in one[0] and one[2] - one[1] > 100]
    kernels = [one for one in spans if "gemm" in one[0].lower() or "nvjet" in one[0].lower()]
    beside = [one for one in copies if any(begin < one[2] and end > one[1] for _, begin, end in kernels)]
    assert len(beside) >= 4, (len(copies), len(kernels))


def test_a_network_that_was_used_outside_with_gradients_is_captured() -> None:
    """What it computed is still alive, and with it what gathers its gradients, on the default stream."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graph
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    chosen = []
    for _ in range(20):
        x = torch.randn(16, 8, device="cuda")
        chosen.append(model(x))
        step(x)
    assert step.replays > 12, step.report()
