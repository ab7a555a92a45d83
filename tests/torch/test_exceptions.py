"""What goes wrong within a backward pass, or within a call into C++, comes out as the exception that it is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from warm_python import Run


class OwnError(Exception):
    """The program's own."""


def fail(*_args: Any) -> Any:
    raise OwnError("out of a hook")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OwnError("out of a backward")


def on_tensor(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(fail)
    return y


def on_node(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(fail)
    return y


def before_node(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(fail)
    return y


def on_leaf(x: Tensor) -> Tensor:
    x.register_post_accumulate_grad_hook(fail)
    return x * 2


def on_module(x: Tensor) -> Tensor:
    module = nn.Linear(3, 3).to(x.device)
    module.register_full_backward_hook(fail)
    return module(x)


def on_saved(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, fail):
        return x * x


WAYS = [Failing.apply, on_tensor, on_node, before_node, on_leaf, on_module, on_saved]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cuda:0", "cuda:3"])
def test_an_exception_in_a_backward_pass_is_the_programs_own(way: Callable[[Tensor], Tensor], device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(OwnError):
        way(x).sum().backward()
    y = torch.ones(3, device=device, requires_grad=True)
    (y * 2).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [2, 2, 2]


def test_ctrl_c_in_a_backward_pass_is_a_keyboard_interrupt() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _gradient: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)


ASKS = """\
import sys, torch
calls = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.endswith("cpp_hooks.py"):
        calls.add(frame.f_code.co_name)
layer = torch.nn.Linear(4, 4).cuda()
sys.setprofile(note)
layer(torch.randn(2, 4).to("cuda")).sum().backward()
print(torch.ones(3, device="cuda").add(1).sum().item())
sys.setprofile(None)
print(calls)
"""


def test_cpp_asks_no_python_of_ours_which_would_lose_what_a_signal_raises(run: Run) -> None:
    assert run(ASKS).stdout.splitlines()[:2] == ["6.0", "set()"]


def test_memory_that_runs_out_in_a_backward_pass_says_so() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _gradient: torch.empty(1 << 50, device="cuda"))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        y.sum().backward()


def test_an_operator_that_fails_in_a_backward_pass_says_why() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient @ torch.ones(4, 4, device="cuda"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        y.sum().backward()


@pytest.mark.parametrize("device", ["cuda:0", "cuda:3"])
def test_an_index_that_does_not_fit_is_an_index_error(device: str) -> None:
    """C++ enters the tensor's device to index it, and leaves it with the exception on its way."""
    x = torch.arange(6.0, device=device)
    with pytest.raises(IndexError):
        x[torch.ones(7, dtype=torch.bool, device=device)]
    with pytest.raises((IndexError, RuntimeError)):
        x[torch.ones(7, dtype=torch.bool, device=device)] = torch.ones(2, 2, device=device)
    assert x.sum().item() == 15


def test_what_is_made_like_a_tensor_is_on_its_device() -> None:
    x = torch.ones(3, device="cuda:3")
    made = (x.new(2), x.new([1.0]), x.new_zeros(2), x.new_tensor([1.0]), x[x > 0])
    assert [one.device.index for one in made] == [3, 3, 3, 3, 3]
