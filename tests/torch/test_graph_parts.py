"""`keepbusy.graph` of a step that cannot be captured whole: parts of it are, and the rest runs as it is written."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from graph_loops import Net, adam, batches, net
from torch.nn.functional import cross_entropy

import keepbusy
from keepbusy.fix.source import step_parts
from keepbusy.runtime.graph.graphed_step import graph

Step = Callable[..., Any]


class Trainer:
    """Counts, reads and averages within its step."""

    def __init__(self) -> None:
        self.model, self.seen, self.best = net(), 0, float("inf")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.average = [weight.detach().clone() for weight in self.model.parameters()]

    def train(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = cross_entropy(out, y)
        loss.backward()
        self.optimizer.step()
        self.seen += 1
        if self.seen % 3 == 0:
            for kept, weight in zip(self.average, self.model.parameters(), strict=True):
                kept.lerp_(weight.detach(), 0.1)
        value = loss.item()
        self.best = min(self.best, value)
        return value

    def state(self) -> list[Any]:
        return [self.seen, self.best, *[weight.tolist() for weight in (*self.model.parameters(), *self.average)]]


class Averaged:
    """What it calls counts, too."""

    def __init__(self) -> None:
        self.model, self.steps = net(), 0
        self.optimizer = adam(self.model)
        self.average = [weight.detach().clone() for weight in self.model.parameters()]

    def keep(self) -> None:
        self.steps += 1
        for kept, weight in zip(self.average, self.model.parameters(), strict=True):
            kept.lerp_(weight.detach(), min(0.5, 1 / self.steps))

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.keep()
        return loss.detach()

    def state(self) -> list[Any]:
        return [self.steps, *[weight.tolist() for weight in (*self.model.parameters(), *self.average)]]


class OneCycle:
    """Its schedule writes another momentum at each step, which an optimizer's kernels take as a number."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.2, total_steps=40)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def state(self) -> list[Any]:
        group = self.optimizer.param_groups[0]
        return [group["lr"], group["momentum"], *[weight.tolist() for weight in self.model.parameters()]]


class MaskedLoss:
    """Its loss is of as many tokens as were drawn, which a graph cannot hold."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*[net(), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh()]).cuda()
        self.optimizer = adam(self.model)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = y < y.max()
        out = self.model(x)
        loss = cross_entropy(out[mask], y[mask])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[Any]:
        return [weight.tolist() for weight in self.model.parameters()]


class InAClosure:
    """A function within another, with names of its own and of the one around it."""

    def __init__(self) -> None:
        model, losses, scale = net(), list[float](), 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: torch.Tensor, y: torch.Tensor, *, smoothing: float = 0.1) -> None:
            nonlocal scale
            if random.random() < 0.5:
                scale *= 0.9
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y, label_smoothing=smoothing)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * scale)

        self.train, self.state = train, lambda: [losses, scale, *[one.tolist() for one in model.parameters()]]


class Sampling:
    """Weights gather gradients for a while, a list is filled, and a distribution checks its arguments."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> float:
        for weight in self.model.parameters():
            weight.requires_grad = True
        losses = []
        for _ in range(2):
            policy = torch.distributions.Categorical(logits=self.model(x))
            losses.append(-policy.log_prob(y).mean())
            self.optimizer.zero_grad()
            losses[-1].backward()
            self.optimizer.step()
        for weight in self.model.parameters():
            weight.requires_grad = False
        return losses[-1].item()

    def state(self) -> list[Any]:
        return [weight.tolist() for weight in self.model.parameters()]


def run_of(kind: type[Any], wrap: Callable[[Step], Step], count: int = 16) -> tuple[list[Any], Any]:
    random.seed(0)
    made = kind()
    step = wrap(made.train)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [step(x, y) for x, y in batches(count)]
    returned = [one.item() if isinstance(one, torch.Tensor) else one for one in found]
    return [returned, made.state()], (step, [str(one.message) for one in said])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Trainer, "it returned"),
        (InAClosure, "random.random()"),
        (Averaged, "self.steps += 1"),
        (Sampling, "it returned"),
        (MaskedLoss, "loss = cross_entropy(out[mask], y[mask])"),
    ],
)
def test_values_are_those_of_the_plain_step(kind: type[Any], named: str) -> None:
    found, (step, messages) = run_of(kind, keepbusy.graph)
    assert found == run_of(kind, lambda step: step)[0]
    assert step.replays >= 6
    (message,) = messages
    assert message.startswith("keepbusy.graph runs train in parts: ")
    assert named in message


def test_a_part_ends_before_what_was_refused_in_it() -> None:
    """What `keep` counts is seen only once the lines before it were captured along with it."""
    _, (step, _) = run_of(Averaged, keepbusy.graph)
    whole, part = step.report().splitlines()
    assert whole.startswith("train: 0 replayed, 0 captured, 4 eager; keepbusy.graph runs train in parts: ")
    assert part == "part 1 of Averaged.train: 4 replayed, 5 compared, 1 captured, 2 eager"


def test_a_setting_that_changes_at_each_step_leaves_the_optimizer_out_of_the_graph() -> None:
    (losses, (*settings, _, _, _, bias)), (step, messages) = run_of(OneCycle, keepbusy.graph, 24)
    (plain_losses, (*plain_settings, _, _, _, plain_bias)), _ = run_of(OneCycle, lambda step: step, 24)
    assert settings == plain_settings
    # a graph reads the rate in 32 bits
    assert [*losses, *bias] == pytest.approx([*plain_losses, *plain_bias], rel=1e-4)
    assert "in parts: it keeps 8 graphs, and the settings of SGD would need another" in messages[-1]
    assert "part 1 of OneCycle.train: 4 replayed, 5 compared" in step.report()


def test_two_steps_of_one_name_have_parts_of_their_own() -> None:
    first, second = Trainer(), Averaged()
    steps = keepbusy.graph(first.train), keepbusy.graph(second.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(16):
            for step in steps:
                step(x, y)
    assert [first.state(), second.state()] == [run_of(kind, lambda step: step)[0][1] for kind in (Trainer, Averaged)]


def test_a_step_that_is_given_its_model_is_divided_as_well() -> None:
    def train(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    found = []
    for wrap in (lambda step: step, keepbusy.graph):
        step, model = wrap(train), net()
        optimizer = adam(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([step(model, optimizer, x, y) for x, y in batches(12)])
    assert found[0] == found[1]
    assert step.replays >= 5
    assert step.report().splitlines()[1].startswith("part 1 of ")


def test_an_error_names_the_lines_of_the_file() -> None:
    made = Trainer()
    step = keepbusy.graph(made.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(8):
            step(x, y)
    made.best = "none"
    with pytest.raises(TypeError) as failed:
        step(x, y)
    frames = [frame for frame in traceback.extract_tb(failed.value.__traceback__) if frame.filename == __file__]
    assert frames[-1].line == "self.best = min(self.best, value)"


def without_source() -> FunctionType:
    source = "def train(model, optimizer, counts, x):\n    counts.append(1)\n    return model(x).detach()\n"
    names: dict[str, Any] = {}
    exec(compile(source, "<made>", "exec"), names)
    return names["train"]


def test_a_step_without_a_source_stays_as_it_is() -> None:
    model, counts = net(), list[int]()
    step = keepbusy.graph(without_source())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, _ in batches(6):
            step(model, None, counts, x)
    assert [str(one.message).split(":")[0] for one in said] == ["keepbusy.graph runs train eagerly"]
    assert (len(counts), step.replays) == (6, 0)


def test_a_source_that_changed_since_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts.linecache, "getlines", lambda *_: ["def train(self, x, y):\n", "    return 0\n"])
    _, (step, messages) = run_of(Trainer, keepbusy.graph)
    assert step.replays == 0
    assert messages[0].startswith("keepbusy.graph runs train eagerly: ")


def test_clearing_gradients_is_no_part_and_is_repeated_in_one() -> None:
    """Of weights that nothing else in the graphed function tells of."""
    found = []
    for wrap in (lambda step: step, graph):
        model, other = net(), net()
        clear = wrap(lambda x, model=model, other=other: (other.zero_grad(), (x * 2).sum())[1])
        for x, y in batches(10):
            clear(x)
            cross_entropy(other(x), y).backward()
            cross_entropy(model(x), y).backward()
        found.append([weight.grad.tolist() for one in (model, other) for weight in one.parameters()])
    assert found[0] == found[1]
    assert clear.replays >= 5
    alone = graph(other.zero_grad)
    with pytest.warns(UserWarning, match="it has the GPU do nothing"):
        assert [alone() for _ in range(4)] == [None] * 4


def captured(body: Callable[[Net, torch.Tensor], torch.Tensor], between: Callable[[], None] = lambda: None) -> Any:
    """A step with this in it, and whether its losses were those of the plain one."""
    losses = []
    for wrap in (lambda step: step, keepbusy.graph):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: torch.Tensor, model: Net = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = body(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, found = wrap(train), []
        for x, _ in batches(9):
            found.append(step(x).item())
            between()
        losses.append(found)
    assert losses[0] == losses[1]
    return step


CONSTANTS: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "positions": lambda model, x: (model(x) * torch.arange(4).to("cuda")).mean(),
    "labels": lambda model, x: cross_entropy(model(x), torch.cat([torch.arange(3) for _ in range(2)]).cuda()),
    "a mask": lambda model, x: (model(x) @ torch.triu(torch.ones(4, 4)).to(x.device)).mean(),
    "a list": lambda model, x: (model(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)).mean(),
    "as the input is": lambda model, x: (model(x) * x.new_tensor([1.0, 2.0, 3.0, 4.0])).mean(),
    "rows by their numbers": lambda model, x: model(x)[torch.arange(3), torch.tensor([0, 1, 2])].mean(),
    "a part of one": lambda model, x: (model(x) * torch.ones(2, 4)[1].mul_(3).cuda()).mean(),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_graph_holds_copies_of_constants(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert captured(CONSTANTS[name]).replays >= 5


def others(x: torch.Tensor) -> torch.Tensor:
    return ~torch.eye(x.shape[0], dtype=torch.bool).to(x.device)


def negatives(model: Net, x: torch.Tensor) -> torch.Tensor:
    similar = model(x) @ model(x).T
    return similar[others(x)].view(len(x), -1).logsumexp(1).mean()


READ: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "a mask": negatives,
    "a mask beside all": lambda model, x: model(x).T[:, others(x)[0]].mean(),
    "a mask of the CPU": lambda model, x: model(x)[torch.arange(x.shape[0]) > 0].mean(),
    "what a mask chooses is written to": lambda model, x: (
        model(x).masked_fill(others(x)[:, :1], 0).index_put((others(x)[0],), model(x)[1:]).mean()
    ),
    "places": lambda model, x: model(x)[torch.where(others(x)[0])[0].add_(0)].mean(),
    "whether to": lambda model, x: model(x).mean() * (2 if others(x).any() else 3),
    "a number": lambda model, x: model(x)[:, : int(torch.ones(2, device=x.device).sum())].mean(),
}


@pytest.mark.parametrize("name", READ)
def test_what_the_host_reads_of_constants_is_known_in_a_graph(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert captured(READ[name]).replays >= 5


class Host:
    """What a step reads of the CPU, which is another at each call."""

    def __init__(self) -> None:
        self.turn, self.rows, self.kept = 0, np.linspace(0, 1, 64, dtype=np.float32).reshape(16, 4), torch.zeros(4)
        torch.manual_seed(3)

    def next(self) -> None:
        self.turn += 1
        self.kept.add_(1)


def partly_written(host: Host) -> torch.Tensor:
    made = torch.zeros(4)
    made[1:3] = host.kept[:2]
    return made


CHANGING: dict[str, Callable[[Host], torch.Tensor]] = {
    "rows of an array": lambda host: torch.from_numpy(host.rows[host.turn]),
    "an array": lambda host: torch.tensor(host.rows[host.turn]),
    "random numbers": lambda host: torch.randn(4),
    "what is written to in place": lambda host: host.kept * 1.0,
    "written to by something else": lambda host: torch.zeros(4).copy_(host.kept),
    "written to through a view": lambda host: torch.zeros(2, 4).index_copy_(0, torch.tensor([1]), host.kept[None])[1],
    "written to in a part": lambda host: partly_written(host),
}


OF_THE_BATCH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mask": lambda y, x: y[x[:, 0] > 0].sum(),
    "a mask that was written to": lambda y, x: y[torch.zeros(len(x), device=x.device).add_(x[:, 0]) > 0].sum(),
    "a mask that a list wrote to": lambda y, x: y[written_in_a_list(x) > 0].sum(),
    "whether to": lambda y, x: y.sum() if others(x).logical_and(x[:1, :1] > 0).any() else y.sum() * 2,
    "a drawn one": lambda y, x: y[torch.rand(len(x), device=x.device) > 0.5].sum(),
}


def written_in_a_list(x: torch.Tensor) -> torch.Tensor:
    made = [torch.zeros(len(x), device=x.device)]
    torch._foreach_add_(made, [x[:, 0]])
    return made[0]


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_what_the_host_reads_of_a_batch_is_read_at_each_call(name: str) -> None:
    found = []
    for wrap in (lambda step: step, keepbusy.graph):
        model = net()
        torch.cuda.manual_seed(1)

        def step(x: torch.Tensor, model: Net = model) -> torch.Tensor:
            weight = others(x).float()[0].nonzero().sum()  # a constant, read beside it
            return (OF_THE_BATCH[name](model(x), x) * weight).detach()

        called = wrap(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([called(x - 0.2 * number).item() for number, (x, _) in enumerate(batches(10))])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", CHANGING)
def test_what_is_no_constant_is_not_held(name: str) -> None:
    found = []
    for wrap in (lambda step: step, keepbusy.graph):
        model, host = net(), Host()

        def step(x: torch.Tensor, model: Net = model, host: Host = host) -> torch.Tensor:
            return (model(x) * CHANGING[name](host).to(x.device)).mean().detach()

        called, values = wrap(step), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for x, _ in batches(10):
                values.append(called(x).item())
                host.next()
        found.append(values)
    assert found[0] == found[1]
