"""Training steps that keep some state where no replay renews it, or read what the loop changes."""

from __future__ import annotations

import csv
import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from graph_loops import Net, batches, net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Change = Callable[[Tensor], Tensor]
Program = Callable[[Net], Change]


def average_bound_anew(model: Net) -> Change:
    average = net()

    def change(loss: Tensor) -> Tensor:
        for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
            kept.data = kept.data * 0.5 + weight.data * 0.5
        return loss + sum(kept.square().sum() for kept in average.parameters()).detach()

    return change


def average_in_a_dict(model: Net) -> Change:
    state = {"average": torch.zeros(16, 8, device="cuda")}

    def change(loss: Tensor) -> Tensor:
        state["average"] = state["average"] * 0.9 + model.first.weight.detach()
        return loss + state["average"].square().sum()

    return change


def average_in_a_list_of_an_object(model: Net) -> Change:
    holder = SimpleNamespace(averages=[torch.zeros(16, 8, device="cuda")])

    def change(loss: Tensor) -> Tensor:
        holder.averages[0] = holder.averages[0] * 0.9 + model.first.weight.detach()
        return loss + holder.averages[0].square().sum()

    return change


def storage_that_is_set(model: Net) -> Change:
    average = torch.zeros(16, 8, device="cuda")

    def change(loss: Tensor) -> Tensor:
        average.set_(average * 0.9 + model.first.weight.detach())
        return loss + average.square().sum()

    return change


def random_state_of_numpy(model: Net) -> Change:
    source = np.random.RandomState(0)
    return lambda loss: loss * source.beta(0.4, 0.4)


def generator_of_numpy(model: Net) -> Change:
    source = np.random.default_rng(0)
    return lambda loss: loss * source.random()


def method_of_a_generator(model: Net) -> Change:
    draw = np.random.RandomState(0).random_sample
    return lambda loss: loss * draw()


def random_of_python(model: Net) -> Change:
    source = random.Random(0)
    return lambda loss: loss * source.random()


def generator_of_pytorch(model: Net) -> Change:
    source = torch.Generator().manual_seed(0)
    return lambda loss: loss * float(torch.rand((), generator=source))


def random_numbers_deep_in_an_object(model: Net) -> Change:
    settings = SimpleNamespace(data={"sources": [np.random.RandomState(0)]})
    return lambda loss: loss * settings.data["sources"][0].random_sample()


def iterator_of_a_list(model: Net) -> Change:
    factors = iter([0.1 * place for place in range(1000)])
    return lambda loss: loss * next(factors)


def iterator_that_counts(model: Net) -> Change:
    numbers = itertools.count()
    return lambda loss: loss * next(numbers)


def generator_function(model: Net) -> Change:
    def decaying() -> Iterator[float]:
        factor = 1.0
        while True:
            yield factor
            factor *= 0.9

    factors = decaying()
    return lambda loss: loss * next(factors)


def counter_in_a_list(model: Net) -> Change:
    count = [0]

    def change(loss: Tensor) -> Tensor:
        count[0] += 1
        return loss * count[0]

    return change


def counter_of_a_closure(model: Net) -> Change:
    count = 0

    def change(loss: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return loss * count

    return change


class Schedule:
    done = 0

    def factor(self) -> float:
        type(self).done += 1
        return 0.9 ** type(self).done


def counter_of_a_class(model: Net) -> Change:
    schedule = Schedule()
    Schedule.done = 0
    return lambda loss: loss * schedule.factor()


def queue_that_turns(model: Net) -> Change:
    factors = deque([1.0, 2.0, 3.0])

    def change(loss: Tensor) -> Tensor:
        factors.rotate()
        return loss * factors[0]

    return change


def array_of_the_host(model: Net) -> Change:
    factors = np.ones(3)

    def change(loss: Tensor) -> Tensor:
        factors[0] *= 0.9
        return loss * float(factors[0])

    return change


def lines_of_a_file(model: Net) -> Change:
    file = io.StringIO("".join(f"{place / 10}\n" for place in range(100)))
    return lambda loss: loss * float(file.readline())


def average_in_place(model: Net) -> Change:
    """By way of `.data`, so PyTorch does not count that it is written to."""
    average = net()

    def change(loss: Tensor) -> Tensor:
        for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.5).add_(weight.data, alpha=0.5)
        return loss + sum(kept.square().sum() for kept in average.parameters()).detach()

    return change


def average_in_a_list(model: Net) -> Change:
    holder = SimpleNamespace(averages=[torch.zeros_like(weight) for weight in model.parameters()])

    def change(loss: Tensor) -> Tensor:
        for kept, weight in zip(holder.averages, model.parameters(), strict=True):
            kept.lerp_(weight.detach(), 0.1)
        return loss + sum(kept.square().sum() for kept in holder.averages)

    return change


def queue_in_a_buffer(model: Net) -> Change:
    """What it holds changes places, and its sum stays the same."""
    model.register_buffer("queue", torch.arange(7.0, device="cuda"))

    def change(loss: Tensor) -> Tensor:
        model.queue.data.copy_(model.queue.roll(1))
        return loss * model.queue[0]

    return change


def counter_that_begins_later(model: Net) -> Change:
    """As GradScaler's: PyTorch does not count that it is written to, and at first it keeps its value."""
    calls, seen = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")

    def change(loss: Tensor) -> Tensor:
        calls.add_(1)
        seen.data.add_((calls > 6).float())
        return loss * (1 + 0.01 * seen)

    return change


IN_PLACE: list[Program] = [average_in_place, average_in_a_list, queue_in_a_buffer, counter_that_begins_later]
"""State on the device that a replay renews."""


class NormedLayer(nn.Linear):
    """It binds its weight before each forward pass, and a loss of its own in it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.direction, self.length = nn.Parameter(self.weight.detach().clone()), nn.Parameter(torch.ones(4, 1))
        del self.weight
        self.weight, self.own_loss = self.direction.data, torch.zeros(())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        self.calls = self.calls + 1
        self.own_loss = self.weight.square().mean() / self.calls
        return super().forward(x)


def layer_that_is_normed(model: Net) -> Change:
    layer, x = NormedLayer().cuda(), torch.ones(2, 4, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def change(loss: Tensor) -> Tensor:
        optimizer.zero_grad()
        own = layer(x).square().mean() + layer.own_loss
        own.backward()
        optimizer.step()
        return loss + own.detach() + layer.own_loss.detach()

    return change


def norm_by_a_hook(model: Net) -> Change:
    layer, x = nn.utils.spectral_norm(nn.Linear(4, 4)).cuda(), torch.ones(2, 4, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def change(loss: Tensor) -> Tensor:
        optimizer.zero_grad()
        own = layer(x).square().mean()
        own.backward(retain_graph=True)
        optimizer.step()
        return loss + own.detach()

    return change


def codes_that_follow_their_data(model: Net) -> Change:
    """As codebooks do that are weights of a module, and are bound anew at each call."""
    book = nn.Module()
    book.register_buffer("sizes", torch.ones(4, device="cuda"))
    book.codes = nn.Parameter(torch.eye(4, 8, device="cuda"))

    def change(loss: Tensor) -> Tensor:
        nearest = torch.cdist(model.first.weight.detach(), book.codes.detach()).argmin(1)
        chosen = nn.functional.one_hot(nearest, 4).float()
        book.sizes = book.sizes * 0.9 + 0.1 * chosen.sum(0)
        book.codes = nn.Parameter(book.codes * 0.9 + 0.1 * chosen.T @ model.first.weight / book.sizes[:, None])
        return loss + book.codes.detach().square().sum()

    return change


BOUND_ANEW: list[Program] = [
    average_bound_anew,
    average_in_a_dict,
    average_in_a_list_of_an_object,
    storage_that_is_set,
    layer_that_is_normed,
    norm_by_a_hook,
    codes_that_follow_their_data,
]
"""What the step binds to new tensors at each call."""


VISIBLE: list[Program] = [
    random_state_of_numpy,
    generator_of_numpy,
    method_of_a_generator,
    random_of_python,
    generator_of_pytorch,
    random_numbers_deep_in_an_object,
    iterator_of_a_list,
    iterator_that_counts,
    generator_function,
    counter_in_a_list,
    counter_of_a_closure,
    counter_of_a_class,
    queue_that_turns,
    array_of_the_host,
    lines_of_a_file,
]
"""What a run of the step changes can be seen, and its line is named."""


def rows_of_a_table(model: Net) -> Change:
    rows = csv.reader(f"{place / 10}" for place in itertools.count())
    return lambda loss: loss * float(next(rows)[0])


def random_numbers_of_the_system(model: Net) -> Change:
    """No two calls draw the same, so the losses cannot be compared."""
    source = random.SystemRandom()
    return lambda loss: loss * (1 + source.random())


def counts_from_the_sixth_call_on(model: Net) -> Change:
    """Not yet when the first calls are looked at."""
    rows = csv.reader(f"{max(place, 5)}" for place in itertools.count())
    return lambda loss: loss * float(next(rows)[0])


HIDDEN: list[Program] = [rows_of_a_table, counts_from_the_sixth_call_on]
"""Nothing shows that state; only a comparison does."""


def number_of_an_object(model: Net) -> tuple[Change, Callable[[int], None]]:
    config = SimpleNamespace(rate=1.0)
    return (lambda loss: loss * config.rate), lambda turn: setattr(config, "rate", 1.0 + turn // 6)


def number_that_was_left_out(model: Net) -> tuple[Change, Callable[[int], None]]:
    config = SimpleNamespace()

    def loop(turn: int) -> None:
        if turn >= 6:
            config.rate = 1.0 + turn // 6

    return (lambda loss: loss * getattr(config, "rate", 1.0)), loop


def number_in_a_list(model: Net) -> tuple[Change, Callable[[int], None]]:
    rates = [1.0]
    return (lambda loss: loss * rates[0]), lambda turn: rates.__setitem__(0, 1.0 + turn // 6)


def number_in_a_dict_of_an_object(model: Net) -> tuple[Change, Callable[[int], None]]:
    config = SimpleNamespace(rates={"loss": 1.0})
    return (lambda loss: loss * config.rates["loss"]), lambda turn: config.rates.update(loss=1.0 + turn // 6)


def number_of_a_module(model: Net) -> tuple[Change, Callable[[int], None]]:
    model.temperature = 1.0
    return (lambda loss: loss * model.temperature), lambda turn: setattr(model, "temperature", 1.0 + turn // 6)


def number_that_a_local_name_stands_for(model: Net) -> tuple[Change, Callable[[int], None]]:
    config = SimpleNamespace(parts=[SimpleNamespace(rate=1.0)])

    def change(loss: Tensor) -> Tensor:
        for part in config.parts:
            loss = loss * part.rate
        return loss

    return change, lambda turn: setattr(config.parts[0], "rate", 1.0 + turn // 6)


def object_that_is_replaced(model: Net) -> tuple[Change, Callable[[int], None]]:
    holder = SimpleNamespace(config=SimpleNamespace(rate=1.0))

    def loop(turn: int) -> None:
        holder.config = SimpleNamespace(rate=1.0 + turn // 6)

    return (lambda loss: loss * holder.config.rate), loop


def tensor_that_the_loop_binds(model: Net) -> tuple[Change, Callable[[int], None]]:
    holder = {"rate": torch.ones((), device="cuda")}
    kept: list[Tensor] = []

    def loop(turn: int) -> None:
        if turn % 6 == 0:
            holder["rate"] = torch.full((), 1.0 + turn // 6, device="cuda")
            kept.append(holder["rate"])

    return (lambda loss: loss * holder["rate"]), loop


def buffer_that_the_loop_binds(model: Net) -> tuple[Change, Callable[[int], None]]:
    model.register_buffer("rate", torch.ones((), device="cuda"))

    def loop(turn: int) -> None:
        if turn % 6 == 0:
            model.rate = torch.full((), 1.0 + turn // 6, device="cuda")

    return (lambda loss: loss * model.rate), loop


def weights_that_thaw(model: Net) -> tuple[Change, Callable[[int], None]]:
    model.first.requires_grad_(False)
    return (lambda loss: loss), lambda turn: model.first.requires_grad_(turn >= 9) and None


BY_THE_LOOP: list[Callable[[Net], tuple[Change, Callable[[int], None]]]] = [
    number_of_an_object,
    number_that_was_left_out,
    number_in_a_list,
    number_in_a_dict_of_an_object,
    number_of_a_module,
    number_that_a_local_name_stands_for,
    object_that_is_replaced,
    tensor_that_the_loop_binds,
    buffer_that_the_loop_binds,
    weights_that_thaw,
]
"""What the loop changes between the calls takes effect at the next."""


def step_with(change: Change, model: Net) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = change(cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        return loss

    return train


def losses_with(program: Program, wrap: Callable[[Any], Any], count: int) -> list[Any]:
    """Losses, and the weights at the end."""
    model = net()
    step = wrap(step_with(program(model), model))
    losses = [step(x, y) for x, y in batches(count)]
    return [one.detach().cpu().tolist() for one in (*losses, *model.parameters())]


def losses_in_loop(program: Any, wrap: Callable[[Any], Any], count: int) -> list[Any]:
    model = net()
    change, loop = program(model)
    step, losses = wrap(step_with(change, model)), []
    for turn, (x, y) in enumerate(batches(count)):
        loop(turn)
        losses.append(step(x, y))
    return [one.detach().cpu().tolist() for one in (*losses, *model.parameters())]
