"""`keepbusy.graph` of a call whose backward pass comes after it, as of a model whose loss cannot be captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import keepbusy
from keepbusy.virtual.pytorch.randomness import DEFAULTS

Wrap = Callable[[Any], Any]
CALLS = 20
EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture(autouse=True)
def numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device draws from its own generator, as a GPU does."""
    monkeypatch.setattr(DEFAULTS, "shared", False)
    monkeypatch.setattr(torch.cuda, "default_generators", DEFAULTS.all())


def plain(call: Any) -> Any:
    return call


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    return nn.Sequential(*layers).cuda()


def batches(count: int = CALLS) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    of_host = [(torch.randn(8, 6), torch.randint(0, 4, (8,)), torch.rand(8) < 0.7) for _ in range(count)]
    return [(x.cuda(), y.cuda(), mask.cuda()) for x, y, mask in of_host]


def trained(wrap: Wrap, loss_of: Callable[[Any, int, Tensor, Tensor, Tensor], Tensor]) -> tuple[list[Any], Any]:
    """Losses and what the model holds at the end; and the call."""
    model = network()
    call, optimizer, losses = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[float]()
    torch.cuda.manual_seed(2)
    for number, (x, y, mask) in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_of(call, number, x, y, mask)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *[value.tolist() for value in model.state_dict().values()]], call


def masked(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return cross_entropy(call(x)[mask], y[mask])


def of_two_calls(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    first, second = call(x), call(x.flip(0))
    return masked(lambda _: first, 0, x, y, mask) + second.square().mean()


def with_a_call_in_vain(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    call(x).mean().item()
    return masked(call, 0, x, y, mask)


def of_gradients(call: Any, number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A penalty at some iterations alone, as of a discriminator."""
    x = x.requires_grad_()
    out = call(x)
    loss = masked(lambda _: out, 0, x, y, mask)
    if number % 4 == 3:
        [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + slope.square().mean()
    return loss


def gone_back_twice(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = masked(call, 0, x, y, mask)
    loss.backward(retain_graph=True)
    return loss


def behind_another(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """What it is given has a gradient of its own."""
    scale = torch.ones(6, device="cuda", requires_grad=True)
    loss = masked(call, 0, x * scale, y, mask)
    [of_scale] = torch.autograd.grad(loss, scale, retain_graph=True)
    return loss * (1 + of_scale.abs().sum().item())


def in_sixteen_bits(call: Any, _number: int, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return masked(call, 0, x, y, mask)


@pytest.mark.parametrize(
    "loss_of",
    [masked, of_two_calls, with_a_call_in_vain, of_gradients, gone_back_twice, behind_another, in_sixteen_bits],
)
def test_it_trains_as_the_plain_loop(loss_of: Callable[..., Tensor]) -> None:
    """Losses, weights, running means, random numbers, to the bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, call = trained(keepbusy.graph, loss_of)
    made = [torch.tensor(values) for values in found]
    as_written = [torch.tensor(values) for values in trained(plain, loss_of)[0]]
    # autograd adds gradients of gradients up in another order from one step to the next
    torch.testing.assert_close(made, as_written, **({"rtol": 1e-4, "atol": 1e-6} if loss_of is of_gradients else EXACT))
    assert call.replays >= 6


def test_results_are_the_callers_to_keep_and_so_are_gradients() -> None:
    model = network().eval()
    call, kept = keepbusy.graph(model), []
    for x, y, _ in batches():
        model.zero_grad()
        out = call(x)
        cross_entropy(out, y).backward()
        kept.append((out, [weight.grad for weight in model.parameters()]))
    assert call.replays
    for (x, y, _), (out, gradients) in zip(batches(), kept, strict=True):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        assert torch.equal(out, model(x))
        assert all(map(torch.equal, gradients, [weight.grad for weight in model.parameters()]))


def test_gradients_add_up() -> None:
    found = []
    for wrap in (plain, keepbusy.graph):
        model = network()
        call = wrap(model)
        for x, y, _ in batches():
            cross_entropy(call(x), y).backward()
        found.append([weight.grad.tolist() for weight in model.parameters()])
    assert found[0] == found[1]


def test_more_calls_than_there_may_be_graphs_go_on_eagerly_until_their_backward_pass() -> None:
    """As of a cell that is called for each word."""
    found = []
    for wrap in (plain, keepbusy.graph):
        model = network().eval()
        call = wrap(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(5):
                sum(call(x).square().mean() for x, _, _ in batches()[:12]).backward()
        found.append([weight.grad.tolist() for weight in model.parameters()])
    assert found[0] == found[1]
    assert call.replays >= 8
    (message,) = said
    assert "it keeps 8 graphs, and a backward pass through each of them may still come" in str(message.message)


class Doubled(torch.autograd.Function):
    """Its backward pass depends on the host."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Doubled.factor += 1
        return gradient * Doubled.factor


def test_a_backward_pass_that_no_replay_renews_is_found() -> None:
    weight = torch.ones(3, device="cuda", requires_grad=True)

    @keepbusy.graph
    def call(x: Tensor) -> Tensor:
        return Doubled.apply(x * weight)

    x, slopes = torch.ones(3, device="cuda"), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(CALLS):
            weight.grad = None
            call(x).sum().backward()
            slopes.append(weight.grad[0].item())
    (message,) = said
    assert "a replay and an eager call from the same state differ in the gradient of " in str(message.message)
    steps = {later - earlier for earlier, later in pairwise(slopes[4:])}
    assert steps == {1.0}  # eager from then on


def test_weights_with_hooks_are_left_to_autograd() -> None:
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    call, twin = keepbusy.graph(model), network()
    twin[0].weight.register_hook(lambda gradient: gradient * 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y, _ in batches(6):
            for made in (call, twin):
                torch.cuda.manual_seed(2)
                cross_entropy(made(x), y).backward()
    assert "a weight has a hook on its gradient" in str(said[0].message)
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


class Mixing(nn.Module):
    """A layer that goes on with what a layer of the same memory has made, as a decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.other(memory))


@pytest.mark.parametrize("is_twice", [False, True])
def test_arguments_that_are_made_of_one_another_get_each_gradient_once(is_twice: bool) -> None:
    """Also where the gradient is differentiated itself."""

    def gradients(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        encoder, layers = nn.Linear(6, 6).cuda(), [Mixing().cuda() for _ in range(2)]
        calls, found = [wrap(layer) for layer in layers], list[Any]()
        for x, _, _ in batches():
            memory = encoder(x)
            result = calls[1](calls[0](x, memory), memory).square().mean()
            if is_twice:
                [slope] = torch.autograd.grad(result, [encoder.weight], create_graph=True)
                result = result + slope.square().sum()
            weights = [*encoder.parameters(), *[weight for layer in layers for weight in layer.parameters()]]
            found += [gradient.tolist() for gradient in torch.autograd.grad(result, weights)]
        return found

    torch.testing.assert_close(gradients(keepbusy.graph), gradients(plain), rtol=0.0, atol=1e-7)
