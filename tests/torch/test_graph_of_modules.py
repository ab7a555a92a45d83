"""`keepbusy.graph` of a step that cannot be captured: the modules that it calls are, each with its backward pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import keepbusy
from keepbusy.runtime.graph_of_modules import CalledModules


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layers(x) + self.layers(-x))


class Network(nn.Module):
    """`reads`: whether its forward pass waits for the GPU, so that only its blocks can be captured."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(8), Block(8), nn.Linear(8, 4)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reads and x.abs().max() > 1e6:
            x = x / 2
        return self.head(self.second(x))


def trained(wrap: Callable[[Any], Any], reads: bool) -> tuple[list[Any], Any, list[str]]:
    torch.manual_seed(0)
    model = Network(reads).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(x: Tensor, y: Tensor, mask: Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(x)[mask], y[mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    step, losses = wrap(train), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(20):
            x, y, mask = torch.randn(8, 8), torch.randint(0, 4, (8,)), torch.rand(8) < 0.7
            losses.append(step(x.cuda(), y.cuda(), mask.cuda()))
    assert all("forward" not in vars(module) for module in model.modules())
    copy.deepcopy(model)
    return [losses, [weight.tolist() for weight in model.parameters()]], step, [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("reads", "captured"), [(False, {"Network"}), (True, {"Block"})], ids=["whole", "what can be of it"]
)
def test_values_are_those_of_the_plain_step(reads: bool, captured: set[str]) -> None:
    values, step, messages = trained(keepbusy.graph, reads)
    assert values == trained(lambda step: step, reads)[0]
    (message,) = messages
    assert message.startswith("keepbusy.graph runs train module by module: it returned ")
    whole, *modules = step.report().splitlines()
    assert whole.startswith("train: 0 replayed, 0 captured, 20 eager; ")
    assert {line.split()[0] for line in modules} == captured
    assert all("1 captured" in line for line in modules)
    assert step.replays >= 8


def test_modules_with_enough_work_are_worth_a_graph_unless_something_stands_in_for_them_already() -> None:
    block, small, replaced = Block(4).cuda(), nn.Linear(4, 4).cuda(), Block(4).cuda()
    replaced.forward = replaced.forward
    with CalledModules() as called:
        for module in (block, small, replaced, block):
            module(torch.ones(2, 4, device="cuda"))
    assert [one.module for one in called.step.worth_a_graph()] == [block]
    assert called.step.called[0].worth_a_graph() == []  # of its layers none has enough
