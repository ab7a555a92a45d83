"""With a modelled clock: how long operators on the host's own tensors take, and sleeping.

A real clock sees what they take here. A modelled one is told, by what they do with how many bytes
or elements. Large sums and products are not told from small ones, Python between the operators takes
no time, and nor does what other threads and processes do.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from threading import current_thread, local, main_thread
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from keepbusy.instrument import step
from keepbusy.timeline.frame_roles import OWN_STEP
from keepbusy.timeline.model import FrameKind
from keepbusy.virtual.clock.host_threads import BACKWARD_PASS
from keepbusy.virtual.costs.device import Device
from keepbusy.virtual.current_device import CURRENT
from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.memory import host_memory

# What the program does on the host: tensors made there, pinned memory, annotations, the backward pass.

_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "tensor", "arange", "linspace", "eye",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "empty_strided",
)  # fmt: skip
_LOADER = "enumerate(DataLoader)#"
_OF_WORKERS = f"{_LOADER}_MultiProcessing"
_FILLS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "fill_", "zero_")


def patch_host_side() -> None:
    torch.utils._device._device_constructors()  # it remembers the functions themselves: let it see them first
    for name in _FACTORIES:
        setattr(torch, name, _factory(name, getattr(torch, name)))
    for name in _FILLS:
        setattr(Tensor, name, _fill(name, getattr(Tensor, name)))
    Tensor.pin_memory, Tensor.is_pinned = _pin_memory, lambda tensor, device=None: host_memory.is_pinned(tensor)
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
        return host_memory.pin(made) if pins else made

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
        shown = in_training_thread() and not MACHINE.clock.host().pauses
        self.name = name if shown else ""

    def __enter__(self) -> None:
        if self.name:
            MACHINE.enter(FrameKind.OPERATOR, self.name)

    def __exit__(self, *error: object) -> None:
        if self.name:
            MACHINE.clock.leave()


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    with Shown("aten::pin_memory"):
        return host_memory.pinned_copy(tensor)


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
            MACHINE.clock.work(1, place=MACHINE.place())
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
        MACHINE.clock.spend(MACHINE.device.host.module)
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
        MACHINE.clock.enter(FrameKind.ANNOTATION, OWN_STEP, MACHINE.place())
        MACHINE.clock.leave()

    step.ENDED.append(ended)


def _patch_backward() -> None:
    """In the calling thread: its order is then always the same, and the user's line is on the stack."""
    graph = torch.autograd.graph
    engine = graph._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        device = CURRENT.device
        CURRENT.first_is(device)
        MACHINE.enter(FrameKind.ANNOTATION, BACKWARD_PASS)
        MACHINE.clock.spend(MACHINE.device.host.backward_pass)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return engine(*args, **kwargs)
        finally:
            MACHINE.clock.leave()
            CURRENT.first_is(0)
            CURRENT.change(device)

    graph._engine_run_backward = torch.autograd._engine_run_backward = run


# `torch.compile`, which the virtual GPU runs in another way.


def patch_compile() -> None:
    torch.compile = _compile
    torch.nn.Module.compile = _compile_module


_told: list[bool] = []


def _tell() -> None:
    """Once a process."""
    if not _told:
        _told.append(True)
        sys.stderr.write("keepbusy: torch.compile runs eagerly on the virtual GPU; its timing is that of eager code.\n")


def _compile(model: Any = None, **_options: Any) -> Any:
    _tell()
    return (lambda function: function) if model is None else model


def _compile_module(_module: torch.nn.Module, *_args: Any, **_options: Any) -> None:
    _tell()


BRIEF = 20_000
"""What is shorter has no row of its own; it joins the next one."""
_NO_OPERATORS = ("__get__", "__set__", "backward")
_SHUFFLES = ("randperm",)
_DRAWS = ("rand", "normal", "uniform", "bernoulli", "exponential", "dropout", "poisson", "log_normal")
_SORTS = ("sort", "argsort", "topk", "unique", "median", "quantile", "kthvalue", "multinomial")
_EACH = (
    "getitem", "index", "take", "gather", "scatter", "masked", "where", "nonzero", "max", "min", "argm", "cum",
    "conv", "avg_pool", "unfold", "fold", "interpolate", "grid_sample", "embedding", "histc", "bincount", "bucketize",
    "searchsorted",
)  # fmt: skip


def patch_host_operators() -> None:
    """In the thread that calls it, until the end."""
    Priced().__enter__()
    sleep = time.sleep

    def announced(seconds: Any) -> None:
        sleep(seconds)
        if in_training_thread():
            with Shown("sleep"):
                MACHINE.clock.work(round(seconds * 1e9))

    time.sleep = announced


class Priced(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is not typed here
    """Lets every operator on host tensors take its time."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not MACHINE.clock.host().pauses:
            _price(getattr(func, "__name__", ""), args, made)
        return made


def _price(name: str, args: tuple[Any, ...], made: Any) -> None:
    """What was made may be nothing new: then one argument was written into another."""
    taken, given = _tensors(args), _tensors((made,) if made is not None else args[1:])
    if name in _NO_OPERATORS or not given or not all(_is_of_host(one) for one in (*taken, *given)):
        return
    name = name.removeprefix("__").removesuffix("__")
    duration = time_of(MACHINE.device, name, taken if made is not None else given, given)
    if duration < BRIEF:
        MACHINE.clock.spend(duration)
    else:
        with Shown(f"aten::{name}"):
            MACHINE.clock.work(duration)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those of an operator's arguments or results, which may come in lists."""
    listed = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return [one for several in listed for one in several if isinstance(one, Tensor)]


def _is_of_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and type(tensor) in (Tensor, Parameter)


def time_of(device: Device, name: str, taken: list[Tensor], given: list[Tensor]) -> int:
    """Nanoseconds for an operator that made `given` from `taken`: a view, and memory that nobody fills, are free."""
    called, costs = device.host.view, device.host_tensors
    if name.startswith("empty") or _is_view(taken, given[0]):
        return called
    tensors = (*taken, *given)
    for names, each in ((_SHUFFLES, costs.shuffle), (_SORTS, costs.sort), (_DRAWS, costs.draw), (_EACH, costs.each)):
        if name.startswith(names):
            return called + round(max(one.numel() for one in tensors) * each)
    return called + round(sum(one.numel() * one.element_size() for one in tensors) / costs.streaming)


def _is_view(taken: list[Tensor], given: Tensor) -> bool:
    address = given.untyped_storage().data_ptr()
    return any(given is not one and one.untyped_storage().data_ptr() == address for one in taken)
