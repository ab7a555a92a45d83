"""What `keepbusy.graph` cannot capture: named by its line, run eagerly, and nothing of the state is lost over it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import graph_flaws
import pytest
from graph_flaws import IN_CAPTURE, ON_THE_HOST, Flaw, flawed, losses, place_of
from graph_loops import adam, batches, net, whole

from keepbusy.runtime.graph.graphed_step import graph
from keepbusy.runtime.host_constants import CapturedConstants

torch = pytest.importorskip("torch")
cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("flaw", IN_CAPTURE + ON_THE_HOST, ids=lambda flaw: flaw.__name__)
def test_the_line_is_named_and_the_training_goes_on_as_it_was(flaw: Flaw) -> None:
    step, state = flawed(flaw)
    expected = losses(step), state()
    step, state = flawed(flaw)
    graphed = graph(step)
    with pytest.warns(UserWarning, match="keepbusy.graph runs train eagerly: at ") as told:
        found = losses(graphed)
    (warning,) = told
    assert place_of(flaw) in str(warning.message)
    assert warning.filename == graph_flaws.__file__
    assert (found, state()) == expected
    assert graphed.report().startswith("train: 0 replayed, 0 captured, 8 eager; ")


def refusal(step: Callable[..., Any], inputs: list[Any], after: Callable[[], object] = lambda: None) -> str:
    """The one warning that a loop brings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one in inputs:
            step(*one)
            after()
    (warning,) = [one for one in told if "keepbusy" in str(one.message)]
    return str(warning.message)


def test_a_schedule_whose_rate_the_step_looks_at_is_named() -> None:
    """Else it steps once the replay is enqueued; here the step would find the rate of before."""
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    @graph
    def train(x, y):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr())

    rates: list[list[float]] = []
    told = refusal(train, [*batches(4)])
    assert "it changes the epoch of StepLR on the host" in told
    assert "(schedule.step())" in told
    assert len(rates) == 4


def test_an_optimizer_that_counts_on_the_host_is_named() -> None:
    model = net()
    told = refusal(graph(whole(model, torch.optim.Adagrad(model.parameters()))), [*batches(4)])
    assert "it changes the step count of Adagrad on the host" in told


def test_settings_that_change_at_each_step_are_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)

    def warm() -> None:
        optimizer.param_groups[0]["momentum"] += 0.01

    told = refusal(graph(whole(model, optimizer)), [*batches(20)], warm)
    assert "it keeps 8 graphs, and the settings of SGD would need another" in told


def test_too_many_shapes_are_named() -> None:
    model = net()
    step = graph(whole(model, adam(model)))
    told = refusal(step, [next(batches(1, size=size)) for _ in range(3) for size in range(2, 12)])
    assert "it keeps 8 graphs, and an input of shape (2, 8) would need another; pad inputs" in told
    assert step.report().startswith("step: 0 replayed, 8 compared, 8 captured, 14 eager; ")


weight = 1.0


def test_a_global_that_changes_gets_a_graph_of_its_own(monkeypatch) -> None:
    def trained(wrap) -> list[float]:
        model = net()
        optimizer = adam(model)

        def train(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y) * weight
            loss.backward()
            optimizer.step()
            return loss

        step, found = wrap(train), []
        for number, (x, y) in enumerate(batches(12)):
            monkeypatch.setitem(globals(), "weight", 2.0 if number > 6 else 1.0)
            found.append(step(x, y))
        return [one.item() for one in found]

    assert trained(graph) == trained(lambda step: step)


def test_a_counter_named_as_a_method_is_not_read(monkeypatch) -> None:
    """Every script has one: `for step in range(100): ...`, and in it `optimizer.step()`."""
    model = net()
    optimizer = adam(model)

    def train(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graphed = graph(train)
    for number, (x, y) in enumerate(batches(14)):
        monkeypatch.setitem(globals(), "step", number)
        graphed(x, y)
    assert graphed.report().startswith("train: 6 replayed, 5 compared, 1 captured, 2 eager")


def test_a_backward_pass_outside_stays_possible_where_derivatives_are_part_of_the_loss() -> None:
    """As of a network for a differential equation: `autograd.grad` leaves the graph for the backward pass to come."""
    model = net()

    @graph
    def residual(x):
        x = x.requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope**2).mean()

    slopes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (residual, residual.__wrapped__):
            for x, _ in batches(8):
                model.zero_grad()
                call(x).backward()
            slopes.append(model.first.weight.grad)
    assert torch.allclose(*slopes)


def test_a_backward_pass_outside_stays_possible_where_another_one_is_inside() -> None:
    """As of a generator, whose pictures a discriminator was trained with."""
    found = []
    for wrap in (graph, lambda step: step):
        model, other = net(), net()

        def half(x, y, model=model, other=other):
            made = model(x)
            cross_entropy(other(made.detach()), y).backward() if made.shape == (6, 8) else made.detach()
            cross_entropy(other(x), y).backward()
            return made

        step = wrap(half)
        for x, y in batches(10):
            step(x, y).sum().backward()
        found.append([weight.grad for weight in (*model.parameters(), *other.parameters())])
    assert all(map(torch.equal, *found))


def test_what_is_computed_beside_the_loss_goes_back_no_more() -> None:
    model = net()

    @graph
    def train(x, y):
        out = model(x)
        loss = cross_entropy(out, y)
        loss.backward()
        return loss, out.mean()

    for x, y in batches(6):
        loss, mean = train(x, y)
        assert not loss.requires_grad
        assert not mean.requires_grad
    assert train.replays


def test_what_the_step_makes_and_asks_gradients_of_is_no_state() -> None:
    """As of a critic with a gradient penalty: the returned loss keeps it alive until the step is over."""
    found = []
    for wrap in (graph, lambda step: step):
        model = net()
        optimizer = adam(model)

        def train(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            between = (x * 0.5).requires_grad_()
            [slope] = torch.autograd.grad(model(between).sum(), between, create_graph=True)
            loss = cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(train)
        losses = [step(x, y).item() for x, y in batches(14)]
        assert wrap is not graph or step.replays > 5
        found.append(torch.tensor([*losses, model.first.weight.sum().item()]))
    assert torch.allclose(*found, rtol=1e-4)


def test_weights_that_a_step_returns_are_the_weights_themselves() -> None:
    """As of a gradient descent that is written by hand."""
    found = []
    for wrap in (graph, lambda step: step):
        weights = torch.arange(8.0, device="cuda").requires_grad_()
        every_other = torch.arange(8, device="cuda")[::2]  # not in one piece of memory

        def update(weights, every_other, rate):
            with torch.no_grad():
                norm = weights.grad[every_other].norm()
                weights -= rate * weights.grad / norm
                weights.grad.zero_()
            return norm, weights, every_other + 0

        step, norms = wrap(update), []
        for x, _ in batches(12):
            (weights * x[0]).sum().backward()
            norm, returned, _ = step(weights, every_other, torch.tensor(0.1, device="cuda"))
            assert returned is weights
            norms.append(norm.item())
        assert wrap is not graph or step.replays > 5
        found.append([norms, weights.tolist()])
    assert found[0] == found[1]


class Agent:
    """Its own method is called like one of the optimizer's, and fills a memory."""

    def __init__(self) -> None:
        self.model, self.memory = net(), list[torch.Tensor]()
        self.optimizer = adam(self.model)
        self.update = graph(self.learn)

    def step(self, x, y):
        self.memory.append(x)
        return self.update(x, y)

    def learn(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def test_methods_of_the_object_are_told_from_those_of_its_parts() -> None:
    agent = Agent()
    for x, y in batches(9):
        agent.step(x, y)
    assert agent.update.report().startswith("learn: 2 replayed, 4 compared, 1 captured, 2 eager")


def test_calls_that_find_something_new_each_time_are_not_tried_for_ever() -> None:
    model, seen = net(), list[list[int]]()

    @graph
    def forward(x):
        if x.shape[0] == 5:
            seen.append([])  # each is another object from now on
            seen[-1].append(1)
        return model(x).detach()

    first, other = next(batches(1))[0], next(batches(1, size=5))[0]
    for _ in range(6):
        forward(first)
    assert "it keeps 8 graphs, and what it reads has grown" in refusal(forward, [(other,)] * 12)
    assert len(seen) == 12


def test_a_backward_pass_outside_stays_possible_where_earlier_calls_had_none() -> None:
    """As in a model's forward pass, which an evaluation calls first."""
    model = net()

    def forward(x, y):
        return cross_entropy(model(x), y)

    step = graph(forward)
    with torch.inference_mode():
        step(*next(batches(1)))
    with torch.no_grad():
        for x, y in batches(6):
            step(x, y)
    assert step.replays
    for x, y in batches(6):
        model.zero_grad()
        step(x, y).backward()
        slope = model.first.weight.grad
        model.zero_grad()
        forward(x, y).backward()
        assert torch.equal(slope, model.first.weight.grad)


def test_a_tensor_of_the_host_among_the_results_is_named() -> None:
    train = graph(lambda x, y: (x.sum(), torch.ones(3)))
    assert "it returns a tensor of the host" in refusal(train, [*batches(5)])


def test_a_number_that_changes_among_the_results_is_named() -> None:
    numbers = iter(range(100))
    train = graph(lambda x, y: next(numbers))
    assert "it returned [0] first and [1] then" in refusal(train, [*batches(5)])


class Batch:
    def __init__(self, x) -> None:
        self.x = x


def test_other_objects_in_each_call_are_named() -> None:
    train = graph(lambda batch: batch.x.sum())
    calls = [(Batch(torch.ones(3, device="cuda")),) for _ in range(12)]
    assert "it is given other objects again and again" in refusal(train, calls)


def test_objects_that_give_way_before_their_graphs_pay_get_none_any_more() -> None:
    """As a sampler does that makes a function for each batch."""

    @graph
    def denoise(x, noise_of):
        return x - 0.1 * noise_of(x)

    told = []
    for batch in range(6):
        scale = torch.full((3,), batch / 10, device="cuda")
        calls = [(torch.ones(3, device="cuda"), lambda x, scale=scale: x * scale) for _ in range(1)] * 8
        told.append(refusal(denoise, calls) if batch == 3 else [denoise(*call) for call in calls])
    assert "it is given other objects again and again" in told[3]
    assert denoise.report().startswith("denoise: 3 replayed, 12 compared, 3 captured, 30 eager")


def test_distributed_modules_run_eagerly(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        told = refusal(graph(lambda x: model(x).sum()), [(torch.ones(2, 3),)] * 3)
    finally:
        torch.distributed.destroy_process_group()
    assert "it runs DistributedDataParallel, whose collectives are not captured" in told


def test_a_list_among_the_arguments_that_the_step_changes_is_named_and_stays_changed() -> None:
    train, losses = graph(lambda x, losses: losses.append(x.sum())), list[torch.Tensor]()
    assert "it changes a list or a dict among its arguments" in refusal(train, [(torch.ones(2), losses)] * 5)
    assert len(losses) == 5


def test_an_error_of_the_step_is_its_own() -> None:
    def train(x):
        raise ValueError("not today")

    step = graph(train)
    for _ in range(5):
        with pytest.raises(ValueError, match="not today"):
            step(torch.ones(1))


def test_a_call_that_fails_while_it_is_watched_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reads of constants is looked for once; nothing of that call is left, and the program goes on."""

    def refuse(*_: object) -> None:
        raise NotImplementedError("watched")

    monkeypatch.setattr(CapturedConstants, "_note", refuse)
    losses = []
    for wrap in (lambda step: step, graph):
        torch.manual_seed(0)
        weights = torch.ones(4, device="cuda")

        def step(x: torch.Tensor, weights: torch.Tensor = weights) -> torch.Tensor:
            weights.mul_(0.5).add_(torch.rand(4, device="cuda"))
            return (weights * x)[torch.eye(4, device="cuda")[0] > 0].sum() + (x.sum().item() > 0)

        called = wrap(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append([called(torch.full((4,), 0.5 + number, device="cuda")).item() for number in range(8)])
    assert losses[0] == losses[1]


def test_what_a_failed_capture_has_bound_is_put_back() -> None:
    """A step that rebinds a weight, and then reads a value."""
    losses = []
    for wrap in (lambda step: step, graph):
        torch.manual_seed(0)
        average = torch.nn.Linear(4, 4).cuda().requires_grad_(False)

        def step(x: torch.Tensor, average: torch.nn.Linear = average) -> torch.Tensor:
            average.weight.data = average.weight.data * 0.5 + x
            return average(x).sum() if x[0, 0].item() > 0 else x.sum()

        called = wrap(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append([called(torch.full((4, 4), 0.5 + number, device="cuda")).item() for number in range(8)])
    assert losses[0] == losses[1]


def test_an_argument_that_is_bound_to_new_memory_is_refused() -> None:
    def step(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kept.data = kept.data * 0.5 + x
        return x.sum()

    kept, graphed = torch.zeros(4, device="cuda"), graph(step)
    with pytest.warns(UserWarning, match="it binds an argument to new memory"):
        graphed(kept, torch.ones(4, device="cuda"))
    for _ in range(5):
        graphed(kept, torch.ones(4, device="cuda"))
    assert kept.tolist() == [1.96875] * 4
