"""`keepbusy.graph`: what it replays is what the plain loop does."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graph_loops
import pytest
from graph_loops import DRAWING, LOOPS, Kept, Loop, adam, batches, net, outcome, schedule_of_floats, whole

from keepbusy.fixes.capture import compared_replays
from keepbusy.runtime.graph.captured_call import CallPattern, StepCall, renew_gradient_nodes
from keepbusy.runtime.graph.graphed_step import ReplayWorth, graph
from keepbusy.runtime.graph.replay_check import is_compared
from keepbusy.runtime.prefetch.prefetch_iterator import prefetch

torch = pytest.importorskip("torch")


@functools.cache
def plain_outcome(loop: Loop) -> list[Any]:
    return outcome(loop, lambda step: step, 12)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_same_values_as_the_plain_loop(loop: Loop) -> None:
    kept = Kept()
    assert outcome(loop, kept, 12) == plain_outcome(loop)
    assert kept.graphed.replays > 5


def test_the_same_random_numbers_as_the_plain_loop(run) -> None:
    """In a process of its own: the GPU of this one draws the host's random numbers."""
    finished = run(
        f"""
import sys
sys.path.insert(0, {str(Path(graph_loops.__file__).parent)!r})
from graph_loops import DRAWING, Kept, outcome
for loop in DRAWING:
    kept = Kept()
    assert outcome(loop, kept, 13) == outcome(loop, lambda step: step, 13), loop
    assert kept.graphed.replays > 5, kept.graphed.report()
print("all", len(DRAWING))
""",
        before=("--clock", "modelled", "--quiet"),
    )
    assert f"all {len(DRAWING)}" in finished.stdout, finished.stderr


@pytest.mark.parametrize("loop", LOOPS[:4], ids=lambda loop: loop.__name__)
def test_the_heap_is_not_searched_and_what_is_frozen_stays_so(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Production processes freeze it: to thaw it makes the next collections slow, to freeze it anew keeps garbage."""
    expected = plain_outcome(loop)

    def refuse(*_arguments: object) -> None:
        raise AssertionError("the heap was touched")

    kept = Kept()
    with monkeypatch.context() as patched:
        for name in ("freeze", "unfreeze", "get_objects", "get_referrers", "get_referents"):
            patched.setattr(gc, name, refuse)
        assert outcome(loop, kept, 12) == expected
    assert kept.graphed.replays > 1


def test_schedulers_and_scalers_are_as_they_were_when_nobody_watches() -> None:
    before = torch.autograd.backward, torch.optim.lr_scheduler.LRScheduler.step, torch.amp.GradScaler.step
    model = net()
    step = graph(whole(model, adam(model)))
    for x, y in batches(5):
        step(x, y)
    after = torch.autograd.backward, torch.optim.lr_scheduler.LRScheduler.step, torch.amp.GradScaler.step
    assert after == before


def test_a_scheduler_that_only_counts_within_the_step_counts_on() -> None:
    """Its rate does not move for a long time; its count does with each replay."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = {"of": [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]}
    train = whole(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = train(x, y)
        schedulers["of"][0].step()
        return loss

    graphed = graph(step)
    for x, y in batches(6):
        graphed(x, y)
    assert graphed.replays > 1
    assert schedulers["of"][0].last_epoch == 6


def test_a_schedule_of_floats_takes_effect_at_each_replay() -> None:
    """The rate is rounded to float32 on its way to the device, and its schedule goes on in float64."""
    kept = Kept()
    found, expected = outcome(schedule_of_floats, kept, 24), outcome(schedule_of_floats, lambda step: step, 24)
    assert found[:24] == pytest.approx(expected[:24], rel=1e-5)
    assert kept.graphed.replays > 12


@pytest.mark.parametrize("failing", range(4))
def test_a_call_that_fails_is_no_step_and_ends_nothing(failing: int) -> None:
    weight, fails = torch.ones(3, device="cuda", requires_grad=True), [False]
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise KeyError("no data")
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed, x, losses = graph(step), torch.ones(3, device="cuda"), []
    for turn in range(9):
        fails[0] = turn == failing
        try:
            losses.append(round(float(graphed(x)), 4))
        except KeyError:
            assert turn == failing
    assert losses == [3.0, 2.7, 2.4, 2.1, 1.8, 1.5, 1.2, 0.9]


def test_gradients_that_are_cleared_behind_the_step_or_left() -> None:
    """What gathers gradients is known although nothing is left of them when the next call begins."""

    def losses(made: Callable[[Any], Any]) -> list[float]:
        weight = torch.ones(3, device="cuda", requires_grad=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (weight * x).square().sum()
            loss.backward()
            return loss.detach()

        graphed, found = made(step), []
        for turn in range(14):
            found.append(float(graphed(torch.ones(3, device="cuda"))))
            with torch.no_grad():
                weight -= 0.01 * weight.grad
            if turn < 8 or turn % 2:
                weight.grad = None
        return found

    assert losses(graph) == losses(lambda step: step)


class Learner(graph_loops.Net):
    """As in code for meta-learning: its `parameters()` is its own, and takes no arguments."""

    def parameters(self):
        return [*self.first.parameters(), *self.last.parameters()]


def test_a_module_may_define_its_own_parameters() -> None:
    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = Learner().cuda()
        step = wrap(whole(model, adam(model)))
        return [loss.item() for loss in [step(x, y) for x, y in batches(9)]]

    kept = Kept()
    assert losses(kept) == losses(lambda step: step)
    assert kept.graphed.replays == 6


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_gradients_that_are_gone_when_the_step_ends(how: str) -> None:
    """The backward pass lies within the step, though nothing is left of it."""

    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        model = net()
        weights = [*model.parameters()]

        def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if how == "grad":
                gradients = torch.autograd.grad(loss, weights)
            else:
                loss.backward()
                gradients = [weight.grad for weight in weights]
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(0.1 * gradient)
                    weight.grad = None
            return loss

        step = wrap(train)
        return [loss.item() for loss in [step(x, y) for x, y in batches(9)]]

    kept = Kept()
    assert losses(kept) == losses(lambda step: step)
    assert kept.graphed.replays == 6


def test_what_a_caller_keeps_never_changes() -> None:
    model = net()
    step = graph(whole(model, adam(model)))
    kept = [(loss, loss.item()) for loss in (step(x, y) for x, y in batches(12))]
    assert [loss.item() for loss, _ in kept] == [value for _, value in kept]


def test_memory_stays_flat() -> None:
    model = net()
    step = graph(whole(model, adam(model)))
    levels = []
    for x, y in batches(20):
        step(x, y)
        levels.append(torch.cuda.memory_allocated())
    assert len(set(levels[10:])) == 1


def test_replays_that_are_slower_than_the_step_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayWorth, "SLOWER", 0.0)
    kept = Kept()
    with pytest.warns(UserWarning, match=r"a replay takes Python \S+ ms, and the call as it is written \S+ ms"):
        assert outcome(LOOPS[0], kept, 40) == outcome(LOOPS[0], lambda step: step, 40)
    assert kept.graphed.report().startswith(f"step: {ReplayWorth.REPLAYS} replayed, 6 compared, 1 captured, 21 eager; ")


@pytest.mark.parametrize("replays", [0, 2, 3, 4, 15, 16, 100])
def test_a_plan_counts_the_comparisons_that_are_made(replays: int) -> None:
    assert compared_replays(replays) == sum(map(is_compared, range(1, replays + 1)))


def test_weights_that_moved_are_trained_where_they_are() -> None:
    model = net()
    step = graph(whole(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for number, (x, y) in enumerate(batches(12)):
        if number == 6:
            for one in model.parameters():
                one.data = one.data.clone()
        before = model.first.weight.clone()
        step(x, y)
        assert not torch.equal(model.first.weight, before)


def test_another_model_under_the_same_name_gets_a_graph_of_its_own() -> None:
    models = [net(), net(dropout=0.5)]
    model = models[0]

    def evaluate(x):
        with torch.no_grad():
            return model(x)

    step, (x, _) = graph(evaluate), next(batches(1))
    for _ in range(6):
        step(x)
    model = net(norm=True).eval()
    torch.testing.assert_close(step(x), evaluate(x), rtol=0, atol=0)


def test_what_is_made_when_it_is_first_needed_does_not_count() -> None:
    made: list[int] = []
    is_needed = [False]

    def evaluate(x):
        if is_needed[0] and not made:
            made.append(1)
        return x * 2

    step, x = graph(evaluate), torch.ones(3, device="cuda")
    for _ in range(10):
        step(x)
        is_needed[0] = True
    assert step.replays > 3


def test_a_call_from_another_stream_comes_after_the_one_before() -> None:
    model = net()
    step = graph(whole(model, adam(model)))
    losses = []
    for number, (x, y) in enumerate(batches(10)):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if number % 2 else torch.cuda.default_stream()):
            losses.append(step(x, y))
    model = net()
    plain = whole(model, adam(model))
    assert [one.item() for one in losses] == [plain(x, y).item() for x, y in batches(10)]


def test_batches_that_prefetch_brings() -> None:
    """It needs to know nothing of graphs: its batches are copied on the device, in the order of the stream."""

    def trained(wrap, fetch) -> list[float]:
        model = net()
        step = wrap(whole(model, adam(model)))
        return [one.item() for one in [step(x, y) for x, y in fetch([*batches(12, device="cpu")])]]

    by_hand = trained(lambda step: step, lambda loader: ((x.cuda(), y.cuda()) for x, y in loader))
    assert trained(graph, lambda loader: prefetch(loader, depth=2)) == by_hand


def test_the_report_counts_calls() -> None:
    model = net()
    step = graph(whole(model, adam(model)))
    for x, y in batches(10):
        step(x, y)
    assert step.report() == "step: 3 replayed, 4 compared, 1 captured, 2 eager"


def test_without_a_gpu_it_is_the_step_itself(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = torch.ones(3, requires_grad=True)
    step = graph(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(x).requires_grad
    assert step.report() == "<lambda>: 0 replayed, 0 captured, 1 eager"


def test_calls_of_one_kind_are_told_from_others_by_their_pattern() -> None:
    """Whatever a pattern takes for the same is the same to a graph, and its tensors are those that it reads."""

    def batch(scale: float = 1.0, **changes: object) -> dict[str, object]:
        inputs = [torch.full((4,), scale), torch.full((2,), scale)]
        return {
            "ids": inputs,
            "more": {"x": (torch.full((3,), scale), None)},
            "kind": "a",
            "type": torch.Tensor,
        } | changes

    pattern = CallPattern(StepCall((batch(), 3), {"on": True}))
    for scale in (1.0, 2.0):
        given = ((batch(scale), 3), {"on": True})
        found = pattern.tensors_of(given)
        assert found is not None
        assert [id(one) for one in found] == [id(one) for one in StepCall(*given).tensors]
    others = [
        ((batch(), 3.0), {"on": True}), ((batch(), 3), {"on": 1}), ((batch(), 3), {}), ((batch(), 3, 3), {"on": True}),
        ((batch(kind="b"), 3), {"on": True}), ((batch(type=int), 3), {"on": True}), ([batch(), 3], {"on": True}),
        ((batch(ids=(torch.ones(4), torch.ones(2))), 3), {"on": True}),
        ((batch(ids=[torch.ones(4), torch.ones(3)]), 3), {"on": True}),
        ((batch(ids=[torch.ones(4), torch.ones(2).double()]), 3), {"on": True}),
        ((batch(ids=[torch.ones(4), torch.ones(2, device="cuda")]), 3), {"on": True}),
        ((batch(ids=[torch.ones(4), None]), 3), {"on": True}),
        ((batch(ids=[torch.ones(4)]), 3), {"on": True}),
        ((dict(reversed(batch().items())), 3), {"on": True}),
    ]  # fmt: skip
    assert [pattern.tensors_of(other) for other in others] == [None] * len(others)
    pair = namedtuple("Pair", "x y")
    named = CallPattern(StepCall((pair(torch.ones(2), 1),), {}))
    assert named.tensors_of(((pair(torch.zeros(2), 1),), {})) is not None
    assert named.tensors_of((((torch.zeros(2), 1),), {})) is None
    ordered = OrderedDict(x=torch.ones(2))
    assert CallPattern(StepCall((ordered,), {})).tensors_of(((ordered,), {})) is None  # taken apart every time


class Trainer:
    def __init__(self) -> None:
        self.model, self.scale, self.moment = net(), 1.0, torch.ones(4, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @staticmethod
    def step(trainer, weights, settings, x, y):
        trainer.optimizer.zero_grad()
        loss = (trainer.model(x) * trainer.scale * trainer.moment)[:, settings["column"]].mean() + y.sum() * 0
        loss = loss + weights.square().sum()
        loss.backward()
        trainer.optimizer.step()
        trainer.moment.add_(0.5)
        return loss


def test_objects_among_the_arguments_are_bound() -> None:
    """A trainer, a weight, settings: what a method or the function of an epoch hands to a step that it calls."""

    def run(wrap):
        step = wrap(Trainer.step)
        found = []
        weights, settings = torch.nn.Parameter(torch.ones(3, device="cuda")), {"column": 1}
        for trainer in (Trainer(), Trainer()):
            for number, (x, y) in enumerate(batches(16)):
                trainer.scale = 1.0 if number < 10 else 2.0  # a number of the trainer's is watched
                found.append(step(trainer, weights, settings, x, y=y))
            found += [*trainer.model.parameters(), trainer.moment, weights.grad]
        return [one.tolist() for one in found], step

    (plain, _), (graphed, step) = run(lambda step: step), run(graph)
    assert graphed == plain
    assert step.replays > 16, step.report()
    assert step.report().startswith("step: ")


def test_a_scaler_that_is_off_and_checked_distributions_are_captured() -> None:
    def run(wrap):
        model = net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(enabled=False)

        def train(x, y):
            optimizer.zero_grad()
            normal = torch.distributions.Normal(model(x), torch.ones((), device="cuda"))
            loss = -normal.log_prob(torch.zeros((), device="cuda")).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        step = wrap(train)
        return [step(x, y).tolist() for x, y in batches(12)], step

    (plain, _), (graphed, step) = run(lambda step: step), run(graph)
    assert graphed == plain
    assert step.replays > 5, step.report()


def test_a_step_within_a_step_is_captured_with_it() -> None:
    """As it stands outside: a policy that acts in its environment, and is trained on what it did."""
    model = net()
    inner = graph(lambda x: model(x).detach())

    @graph
    def outer(x):
        return (inner(x) ** 2).sum()

    for x, _ in batches(16):
        assert torch.equal(outer(x), (model(x).detach() ** 2).sum())
        assert torch.equal(inner(x), model(x))
    assert outer.replays > 8, outer.report()
    assert (inner.calls, inner.replays > 8) == (16, True), inner.report()


def test_gradients_of_each_sample() -> None:
    """`torch.func` computes with tensors that have no memory of their own."""
    model = net()

    def loss_of(weights, x, y):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))

    def step(x, y):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        return sum(gradient.norm() for gradient in each(weights, x, y).values())

    graphed = graph(step)
    for x, y in batches(8):
        assert torch.equal(graphed(x, y), step(x, y))
    assert graphed.replays


def test_a_number_that_is_another_at_each_call_is_taken_in() -> None:
    """As the weight of a loss that rises: a tensor in its place computes the same."""

    def training(wrap):
        model = net()
        optimizer = adam(model)

        def step(x, y, weight):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y) + weight * model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = wrap(step)
        return step, [float(step(x, y, at / 100)) for at, (x, y) in enumerate(batches(12))]

    graphed, losses = training(graph)
    assert losses == training(lambda step: step)[1]
    assert graphed.report().startswith("step: 4 replayed, 5 compared, 1 captured, 2 eager")


def test_a_number_that_is_another_now_and_then_is_taken_in_later() -> None:
    """As an entropy weight that every second step updates: it would need a graph for each value."""
    model = net()
    graphed = graph(lambda x, weight: (model(x) * weight).detach().sum())
    weights = [1.0 if at < 4 else 1.0 - at // 2 / 100 for at in range(60)]
    for (x, _), weight in zip(batches(60), weights, strict=True):
        assert graphed(x, weight).item() == (model(x) * weight).sum().item()
    assert graphed.replays > 20, graphed.report()


def test_gradients_are_gathered_anew_where_they_were_gathered_before() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    place, version, seen = weight.data_ptr(), weight._version, []
    weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
    alive = weight * 2  # holds the node that gathers its gradient
    before = alive.grad_fn.next_functions[0][0]
    renew_gradient_nodes([weight])
    again = weight * 3
    assert again.grad_fn.next_functions[0][0] is not before
    alive.sum().backward()
    again.sum().backward()
    assert (weight.data_ptr(), weight._version, weight.grad.tolist()) == (place, version, [5.0] * 3)
    assert seen == [[2.0] * 3, [3.0] * 3]


def test_a_number_that_counts_is_not_taken_in() -> None:
    model = net()
    graphed = graph(lambda x, count: model(x[:count]).detach())
    with pytest.warns(UserWarning, match="the argument 3 is another number at each call; pass it as a tensor"):
        shapes = [len(graphed(x, at + 1)) for at, (x, _) in enumerate(batches(5))]
    assert shapes == [1, 2, 3, 4, 5]


def test_a_scaler_is_captured_with_an_optimizer_that_is_fused_meanwhile() -> None:
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # gradients overflow at first

    @graph
    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for x, y in batches(28):
        step(x, y)
    assert step.replays
    assert scaler.get_scale() < 2.0**30
    assert not optimizer.param_groups[0]["fused"]
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_module_that_each_call_makes_anew() -> None:
    model = net()
    optimizer = adam(model)

    @graph
    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in batches(9):
        step(x, y)
    assert step.report().startswith("step: 2 replayed, 4 compared, 1 captured, 2 eager")


def test_a_weight_that_is_a_number_keeps_its_state_on_the_device() -> None:
    """As the scale of a loss: only what the optimizer counts moves, to the device and back."""
    model, scale = net(), torch.nn.Parameter(torch.zeros((), device="cuda"))
    optimizer = torch.optim.Adam([*model.parameters(), scale])

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.exp(-scale) * torch.nn.functional.cross_entropy(model(x), y) + scale
        loss.backward()
        optimizer.step()
        return loss

    graphed = graph(step)
    for x, y in batches(5):
        graphed(x, y)
    graphed.release()
    state = optimizer.state[scale]
    assert state["exp_avg"].is_cuda
    assert not state["step"].is_cuda
    step(*next(batches(1)))
