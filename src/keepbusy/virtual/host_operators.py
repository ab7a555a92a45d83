"""With a modelled clock: how long operators on the host's own tensors take, and sleeping.

A real clock sees what they take here. A modelled one is told, by what they do with how many bytes
or elements. Large sums and products are not told from small ones, Python between the operators takes
no time, and nor does what other threads and processes do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from keepbusy.virtual.device import Device
from keepbusy.virtual.host_side import Shown, in_training_thread
from keepbusy.virtual.machine import MACHINE

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


def patch() -> None:
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
        if not MACHINE.clock.host().passing.inside:
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
