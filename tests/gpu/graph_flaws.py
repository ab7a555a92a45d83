"""Training steps that no graph can stand in for, each because of one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from graph_loops import Net, batches, net
from torch import Tensor
from torch.nn.functional import cross_entropy

Flaw = Callable[[Net, Tensor], Any]
Step = Callable[[Tensor, Tensor], Tensor]
calls = 0
seen: list[Tensor] = []


def reads_the_loss(model: Net, loss: Tensor) -> Any:
    return loss.item() > 100  # FLAW


def indexes_with_a_mask(model: Net, loss: Tensor) -> Any:
    return model.first.weight[model.first.weight > 0]  # FLAW


def synchronizes(model: Net, loss: Tensor) -> Any:
    torch.cuda.synchronize()  # FLAW


def waits_for_an_event(model: Net, loss: Tensor) -> Any:
    done = torch.cuda.Event()
    done.record()
    done.synchronize()  # FLAW


FACTORS, MANY_FACTORS = torch.tensor([1.0, 2.0]), torch.ones(1 << 20)


def copies_from_the_host(model: Net, loss: Tensor) -> Any:
    return loss * FACTORS.cuda()  # FLAW


def copies_without_waiting(model: Net, loss: Tensor) -> Any:
    return loss * MANY_FACTORS.to("cuda", non_blocking=True)  # FLAW


def draws_on_the_host(model: Net, loss: Tensor) -> Any:
    return loss if random.random() < 0.5 else -loss  # FLAW


def draws_with_pytorch(model: Net, loss: Tensor) -> Any:
    return float(torch.rand(()))  # FLAW


def counts(model: Net, loss: Tensor) -> Any:
    global calls  # noqa: PLW0603
    calls += 1  # FLAW


def remembers(model: Net, loss: Tensor) -> Any:
    seen.append(loss.detach())  # FLAW


def counts_in_a_module(model: Net, loss: Tensor) -> Any:
    model.calls += 1  # FLAW


IN_CAPTURE: list[Flaw] = [
    reads_the_loss,
    indexes_with_a_mask,
    synchronizes,
    waits_for_an_event,
    copies_from_the_host,
    copies_without_waiting,
]
ON_THE_HOST: list[Flaw] = [
    draws_on_the_host,
    draws_with_pytorch,
    counts,
    remembers,
    counts_in_a_module,
]


def flawed(flaw: Flaw) -> tuple[Step, Callable[[], list[Any]]]:
    """A step with that flaw, and what tells all of its state."""
    model = net()
    model.register_buffer("mean", torch.zeros((), device="cuda"))
    model.calls = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        flaw(model, loss)
        optimizer.step()
        return loss

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers(), *(one.grad for one in model.parameters())]
        moments = [value for held in optimizer.state.values() for value in held.values()]
        drawn = [torch.rand(2, device="cuda"), torch.rand(2)]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return [*(one.tolist() for one in [*tensors, *moments, *drawn]), groups, random.random()]

    return train, state


def losses(step: Step, count: int = 8) -> list[float]:
    torch.manual_seed(3)
    random.seed(3)
    return [one.item() for one in [step(x, y) for x, y in batches(count)]]


def place_of(flaw: Flaw) -> str:
    """The line of the flaw, as a message begins to tell it."""
    lines, start = Path(__file__).read_text(encoding="utf-8").splitlines(), flaw.__code__.co_firstlineno
    return f"graph_flaws.py:{next(line for line in range(start, start + 9) if 'FLAW' in lines[line - 1])} "
