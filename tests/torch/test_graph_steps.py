"""`keepbusy.graph` of steps as people write them: each is captured whole, and trains as it does without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graph_loops import Kept, Wrap, adam, batches, net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


def gradient_penalty(wrap: Wrap) -> list[Tensor]:
    """A tensor that the step makes gathers a gradient, and is gone with it."""
    model = net()
    optimizer = adam(model)

    def train(x: Tensor) -> Tensor:
        mixed = (0.5 * x).requires_grad_(True)
        out = model(mixed)
        (slope,) = torch.autograd.grad(out.sum(), mixed, create_graph=True)
        loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(train)
    return [step(x) for x, _ in batches(12)] + [*model.parameters()]


def scaled_sgd(wrap: Wrap) -> list[Tensor]:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler()

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = wrap(train)
    return [step(x, y) for x, y in batches(12)] + [*model.parameters()]


def mixed_up(wrap: Wrap) -> list[Tensor]:
    """A number that is another at each call: rounded to a float as the graph takes it in."""
    model = net()
    optimizer = adam(model)

    def train(x: Tensor, y: Tensor, share: float) -> Tensor:
        out = model(share * x + (1 - share) * x.flip(0))
        loss = share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(train)
    return [step(x, y, 1 / (3 + turn)) for turn, (x, y) in enumerate(batches(14))]


@dataclass(frozen=True)
class Answer:
    loss: Tensor
    parts: dict[str, Tensor]
    name: str = "answer"


def dataclass_of_results(wrap: Wrap) -> list[Tensor]:
    model = net()
    optimizer = adam(model)

    def train(x: Tensor, y: Tensor) -> Answer:
        optimizer.zero_grad()
        out = model(x)
        loss = cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return Answer(loss.detach(), {"out": out.detach()})

    step = wrap(train)
    answers = [step(x, y) for x, y in batches(12)]
    assert {(type(one), one.name) for one in answers} == {(Answer, "answer")}
    return [part for one in answers for part in (one.loss, one.parts["out"])]


def state_handed_on(wrap: Wrap) -> list[Tensor]:
    """What one call returns is given to the next, also where a setting has changed and the call is eager once more."""
    cell, rates = nn.GRUCell(8, 8).cuda(), [0.1]

    def train(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        cell.zero_grad()
        after = cell(x, hidden.detach())
        loss = after.square().mean()
        loss.backward()
        for weight in cell.parameters():
            weight.data.add_(weight.grad, alpha=-rates[0])
        return loss, after

    torch.manual_seed(0)
    for weight in cell.parameters():
        nn.init.normal_(weight, std=0.1)
    step, hidden, found = wrap(train), torch.zeros(6, 8, device="cuda"), []
    for turn, (x, _) in enumerate(batches(16)):
        loss, hidden = step(x, hidden)
        found += [loss.detach(), hidden.detach()]
        rates[0] = 0.1 if turn < 8 else 0.05
    return found


@pytest.mark.parametrize("loop", [gradient_penalty, scaled_sgd, mixed_up, dataclass_of_results, state_handed_on])
def test_it_is_captured_and_trains_as_before(loop: Callable[[Wrap], list[Tensor]]) -> None:
    def values(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        return [one.tolist() for one in loop(wrap)]

    kept = Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = values(kept)
    assert kept.graphed.replays >= 8
    for value, expected in zip(found, values(lambda step: step), strict=True):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_module_alone_is_captured() -> None:
    kept, model = Kept(), net().eval()
    called = kept(model)
    with torch.no_grad():
        assert all(torch.equal(called(x), model(x)) for x, _ in batches(8))
    assert kept.graphed.replays == 5


def test_recomputed_dropout_is_that_of_the_forward_pass() -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    kept = checkpoint(nn.Dropout(0.5), x, use_reentrant=False)
    kept.sum().backward()
    assert torch.equal(x.grad, kept.detach())
