"""What the program does on the host: tensors made there, pinned memory, annotations, the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import current_thread, local, main_thread
from typing import Any

import torch
import torch.utils._device
from torch import Tensor

from keepbusy.script import steps
from keepbusy.timeline.model import FrameKind
from keepbusy.virtual import pinned
from keepbusy.virtual.current import CURRENT
from keepbusy.virtual.dispatches import BACKWARD_PASS, MODULE, PASS
from keepbusy.virtual.machine import MACHINE

_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "tensor", "arange", "linspace", "eye",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_strided",
)  # fmt: skip
_LOADER = "enumerate(DataLoader)#"
_OF_WORKERS = f"{_LOADER}_MultiProcessing"
_FILLS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "fill_", "zero_")


def patch() -> None:
    torch.utils._device._device_constructors()  # it remembers the functions themselves: let it see them first
    for name in _FACTORIES:
        setattr(torch, name, _factory(name, getattr(torch, name)))
    for name in _FILLS:
        setattr(Tensor, name, _fill(name, getattr(Tensor, name)))
    Tensor.pin_memory, Tensor.is_pinned = _pin_memory, lambda tensor, device=None: pinned.is_pinned(tensor)
    Tensor.record_stream = _record_stream
    _patch_annotations()
    _patch_forward()
    _follow_steps()
    _patch_backward()


def _factory(name: str, makes: Callable[..., Any]) -> Callable[..., Any]:
    """Pins its result where that was asked for, and stands in the timeline by its name where it works on the host."""
    shown = f"aten::{name}"

    @functools.wraps(makes)
    def make(*args: Any, **kwargs: Any) -> Any:
        pins = kwargs.pop("pin_memory", False)
        with Shown(shown):
            made = makes(*args, **kwargs)
        return pinned.pin(made) if pins else made

    return make


def _fill(name: str, fills: Callable[..., Any]) -> Callable[..., Any]:
    shown = f"aten::{name}"

    @functools.wraps(fills)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda:
            return fills(tensor, *args, **kwargs)
        with Shown(shown):
            return fills(tensor, *args, **kwargs)

    return fill


def in_training_thread() -> bool:
    return current_thread() is main_thread()


class Shown:
    """An operator of the host, in the timeline; not in threads that help the loader, which wait most of the time, nor
    where we compute."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        shown = in_training_thread() and not MACHINE.clock.host().passing.inside
        self.name = name if shown else ""

    def __enter__(self) -> None:
        if self.name:
            MACHINE.enter(FrameKind.OPERATOR, self.name)

    def __exit__(self, *error: object) -> None:
        if self.name:
            MACHINE.clock.leave()


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    with Shown("aten::pin_memory"):
        return pinned.pinned_copy(tensor)


def _record_stream(tensor: Tensor, stream: Any) -> None:
    MACHINE.record_stream(tensor, stream.lane)


def _patch_annotations() -> None:
    """Loaders, optimizers and the program itself annotate what they do; the clock marks its steps by these."""
    annotation = torch.autograd.profiler.record_function
    enter, leave = annotation.__enter__, annotation.__exit__

    def entered(self: Any) -> Any:
        MACHINE.enter(FrameKind.ANNOTATION, self.name)
        if self.name.startswith(_LOADER):
            # input is late where the loop asks for it, whatever the loader does then
            MACHINE.clock.work(1, place=MACHINE.here())
        if self.name.startswith(_OF_WORKERS):
            MACHINE.clock.await_batch()
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        if self.name.startswith(_OF_WORKERS):
            MACHINE.clock.take_batch(self.name)
        MACHINE.clock.leave()
        return leave(self, *error)

    annotation.__enter__, annotation.__exit__ = entered, left


def _patch_forward() -> None:
    """The outermost module's forward passes: they mark the steps of a program without an optimizer."""
    module, inside = torch.nn.Module, local()
    call = module.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        MACHINE.clock.spend(MODULE * MACHINE.device.host.operator)
        if getattr(inside, "module", False) or current_thread() is not main_thread():
            return call(self, *args, **kwargs)
        inside.module = True
        MACHINE.enter(FrameKind.ANNOTATION, f"Forward#{type(self).__name__}")
        try:
            return call(self, *args, **kwargs)
        finally:
            MACHINE.clock.leave()
            inside.module = False

    module.__call__ = called


def _follow_steps() -> None:
    """`keepbusy.step()` marks a step, whatever else does."""

    def ended() -> None:
        MACHINE.clock.enter(FrameKind.ANNOTATION, "keepbusy.step#", MACHINE.here())
        MACHINE.clock.leave()

    steps.ENDED.append(ended)


def _patch_backward() -> None:
    """In the calling thread: its order is then always the same, and the user's line is on the stack."""
    graph = torch.autograd.graph
    engine = graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        device = CURRENT.device
        CURRENT.first_is(device)
        MACHINE.enter(FrameKind.ANNOTATION, BACKWARD_PASS)
        MACHINE.clock.spend(PASS * MACHINE.device.host.backward)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return engine(*args, **kwargs)
        finally:
            MACHINE.clock.leave()
            CURRENT.first_is(0)
            CURRENT.change(device)

    graph._engine_run_backward = torch.autograd._engine_run_backward = run
