"""The child of the self-test: starts the virtual GPU stage by stage, and writes each finished stage to a pipe.

python -m keepbusy.virtual.selftest_child PIPE
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys

import torch

from keepbusy.torch_names.dispatcher import accelerator, dump_of_operator, operators_with_key
from keepbusy.torch_names.headers import GUARD, HOOKS, slots
from keepbusy.virtual.costs.device import read
from keepbusy.virtual.cpp_hooks import timer_keys
from keepbusy.virtual.virtual_run import Options, bring_up


def main(pipe: int) -> None:
    faulthandler.enable()
    for stage in (_layout, _bring_up, _values, _autograd, _modules, _graphs, _pinned, _natives):
        stage()
        os.write(pipe, f"{stage.__name__[1:]}\n".encode())
    gc.collect()
    os.write(pipe, b"done\n")


def _layout() -> None:
    _must(len(slots(HOOKS)) > 20 and len(slots(GUARD)) > 10, "the headers declare too little")
    timer_keys()  # raises if the map of DDP's timers has another layout


def _bring_up() -> None:
    bring_up(read("h200"), devices=8, rank=0, options=Options(measured=False, one_generator=False))


def _values() -> None:
    for index in (0, 1, 7):  # each replaced method must answer with the right value, not just answer
        with torch.cuda.device(index):
            tensor = torch.arange(6.0, device="cuda").reshape(2, 3)
            _must(tensor.device == torch.device("cuda", index), f"made on {tensor.device}, not on cuda:{index}")
            _must(type(tensor) is torch.Tensor and tensor.sum().item() == 15, "a sum is wrong")
    _must(torch.cuda.current_device() == 0, "the current device did not come back")
    _must(accelerator().type == "cuda", "the accelerator is not CUDA")


def _autograd() -> None:
    for index in (0, 3):
        weight = torch.ones(3, 4, device=f"cuda:{index}", requires_grad=True)
        (torch.ones(2, 3, device=weight.device) @ weight).relu().sum().backward()
        gradient = weight.grad
        _must(gradient is not None and gradient.device == weight.device, "a gradient is on another device")
        _must(gradient is not None and gradient.sum().item() == 24, "a gradient is wrong")
        failing = weight * 2
        failing.register_hook(lambda _gradient: [].pop())
        try:
            failing.sum().backward()
        except IndexError:
            continue
        _must(False, "an exception in a backward pass is lost")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    _must(product.dtype is torch.bfloat16, "autocast does nothing")


def _modules() -> None:
    recurrent = torch.nn.LSTM(4, 4).cuda()
    recurrent(torch.ones(2, 1, 4, device="cuda"))[0].sum().backward()
    _must(recurrent.weight_ih_l0.grad is not None, "a recurrent network has no gradient")


def _graphs() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        drawn = torch.rand(3, device="cuda")
    _must(x.sum().item() == 3, "a capture has run what it captured")
    graph.replay()
    first = drawn.tolist()
    graph.replay()
    _must(x.sum().item() == 9 and drawn.tolist() != first, "a replay computes nothing new")


def _pinned() -> None:
    _must(torch.ones(3).pin_memory().is_pinned() and not torch.ones(3).is_pinned(), "is_pinned() is wrong")


def _natives() -> None:
    """On a CUDA build, a program must not reach native kernels."""
    names = operators_with_key("CUDA")
    dumps = {name: dump_of_operator(name) for name in names if name.startswith("aten::")}
    reachable = [name for name, dump in dumps.items() if re.search(r"^CUDA:.*RegisterCUDA", dump, re.MULTILINE)]
    _must(len(reachable) < 40, f"native kernels are left: {reachable[:5]}")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    main(int(sys.argv[1]))
