"""How optimizers step within a graph: they count on the device, and a learning rate that moves is read there.

A Python float is baked into the graph, and a schedule would change nothing. So from its first change on a rate is a
tensor on the device while the step runs; between steps the group holds what it held, and what a schedule wrote there is
sent over before the replay. A rate that never changes stays the constant that it is, and its steps the same to the bit;
so does the rate of an optimizer that takes no tensor for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from keepbusy.torch_names.pytorch import FIRST_FUSED_STEP, STEPS_BY_ITSELF, WARNED_OF_CAPTURE

_COUNTS = ("step", "mu_product", "eta", "mu")
"""What PyTorch's optimizers count: numbers, whatever the shape of the weight."""


class LearningRates:
    """The optimizers of a step, switched to what a graph can hold and back."""

    def __init__(self, optimizers: list[Optimizer], sparse: Collection[int] = (), is_scaled: bool = False) -> None:
        """`sparse`: weights, by their identity, that get sparse gradients, for which no step is fused. `is_scaled`:
        whether a GradScaler takes part, which asks the device whether to step, unless the step is fused."""
        fusible = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        self._scaled: list[Optimizer] = []
        """Fused, they leave out a step by themselves where gradients overflowed."""
        self._counting = [optimizer for optimizer in optimizers if "capturable" in optimizer.defaults]
        self._uncapturable = [
            group for optimizer in self._counting for group in optimizer.param_groups if not group["capturable"]
        ]
        self._rates: list[_LearningRate] = []
        for optimizer in optimizers:
            groups, kind = optimizer.param_groups, type(optimizer)
            if kind is torch.optim.SGD:  # it notes so at its first fused step, whose weights are looked at here
                vars(optimizer).setdefault(FIRST_FUSED_STEP, False)
            if is_scaled and kind in fusible and all(_may_be_fused(group, sparse) for group in groups):
                self._scaled.append(optimizer)
                self._rates += [_LearningRate(group, {"fused": True, "foreach": False}, True) for group in groups]
                continue
            for group in groups:
                rate = group["lr"]
                on_device = isinstance(rate, Tensor) and rate.is_cuda  # it needs nothing
                if not on_device and ("capturable" in optimizer.defaults or group.get("fused")):
                    self._rates.append(_LearningRate(group, {}))
                elif kind is torch.optim.SGD and _may_be_fused(
                    group, sparse
                ):  # it takes a tensor only where it is fused
                    self._rates.append(_LearningRate(group, {"fused": True}))
        self._moving: list[_LearningRate] = []

    def count_on_device(self) -> None:
        """Switch the optimizers to PyTorch's `capturable` path."""
        for group in self._uncapturable:
            group["capturable"] = True
        for optimizer in self._counting:
            _move_counts(optimizer, to_device=True)
            setattr(optimizer, WARNED_OF_CAPTURE, True)

    def count_on_host(self) -> None:
        """As it was before."""
        for group in self._uncapturable:
            group["capturable"] = False
        for optimizer in self._counting:
            if not all(group["capturable"] or group.get("fused") for group in optimizer.param_groups):
                _move_counts(optimizer, to_device=False)

    def moved(self) -> bool:
        """Whether some rate has changed for the first time: graphs so far hold it as a constant."""
        beginning = [rate for rate in self._rates if rate.begins_to_move()]  # each of them is asked
        self._moving += beginning
        return bool(beginning)

    def send(self) -> None:
        """What the host has written since the last step."""
        for rate in self._moving:
            rate.send()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Meanwhile the optimizers find their rates there."""
        self.send()
        other_on_device = [rate for rate in self._rates if rate.always or rate.sent is not None]
        for rate in other_on_device:
            rate.group |= rate.on_device()
        for optimizer in self._scaled:
            vars(optimizer)[STEPS_BY_ITSELF] = True
        try:
            yield
        finally:
            for rate in other_on_device:
                rate.group |= rate.on_host()
            for optimizer in self._scaled:
                vars(optimizer).pop(STEPS_BY_ITSELF, None)

    def of_its_own(self, group: dict[str, Any]) -> dict[str, Any]:
        """Settings of the group that no graph keeps: where it counts, and a rate that is sent over."""
        where = dict.fromkeys(("capturable", "fused", "foreach"))
        return where | {"lr": None} if self.is_sent(group) else where

    def is_sent(self, group: dict[str, Any]) -> bool:
        """Whether its rate is read on the device."""
        return any(rate.group is group for rate in self._moving)


class _LearningRate:
    """A group's learning rate as its owner wrote it, and from its first change on as it was sent."""

    def __init__(self, group: dict[str, Any], settings: dict[str, Any], always: bool = False) -> None:
        """`settings`: others that the group has in a graph along with a rate that is sent, or `always`."""
        self.group, self.always, self.written = group, always, group["lr"]
        self._settings, self._chosen = settings, {name: group[name] for name in settings}
        self._value = float(self.written)
        self.sent: Tensor | None = None

    def begins_to_move(self) -> bool:
        if self.sent is not None or float(self.group["lr"]) == self._value:
            return False
        self.sent = torch.full((), self._value, dtype=torch.float32, device=self.group["params"][0].device)
        return True

    def on_device(self) -> dict[str, Any]:
        """Settings of the group while the step runs."""
        return self._settings if self.sent is None else self._settings | {"lr": self.sent}

    def on_host(self) -> dict[str, Any]:
        """And as its owner wrote them."""
        return self._chosen if self.sent is None else self._chosen | {"lr": self.written}

    def send(self) -> None:
        self.written = self.group["lr"]
        value = float(self.written)
        if value != self._value and self.sent is not None:
            self._value = value
            self.sent.fill_(value)


def warm_up(optimizer: Optimizer, stream: torch.cuda.Stream) -> None:
    """Loads what its step runs on the device, by a step of a twin that nobody sees: a capture is no time for that."""
    kind: Any = type(optimizer)
    if "capturable" not in optimizer.defaults or not kind.__module__.startswith("torch.optim"):
        return
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))
    twin.param_groups, twin.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        alike = {weight.dtype: weight for weight in group["params"] if weight.is_cuda}.values()
        weights = [torch.zeros(2, dtype=like.dtype, device=like.device, requires_grad=True) for like in alike]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        twin.param_groups.append(group | {"params": weights})
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), suppress(Exception):  # a capture that fails then says so itself
        getattr(kind.step, "__wrapped__", kind.step)(twin)  # without hooks
    torch.cuda.current_stream().wait_stream(stream)


def _may_be_fused(group: dict[str, Any], sparse: Collection[int]) -> bool:
    """Where nobody chose another implementation, and its gradients are dense."""
    chosen = any(group.get(name) for name in ("fused", "foreach", "differentiable", "maximize"))
    plain = all(
        weight.is_cuda and weight.is_floating_point() and id(weight) not in sparse for weight in group["params"]
    )
    return not chosen and plain and not isinstance(group["lr"], Tensor)


def _move_counts(optimizer: Optimizer, to_device: bool) -> None:
    for parameter, state in optimizer.state.items():
        for label in [label for label in _COUNTS if isinstance(state.get(label), Tensor)]:
            if state[label].is_cuda != to_device:
                state[label] = state[label].to(parameter.device if to_device else "cpu")
