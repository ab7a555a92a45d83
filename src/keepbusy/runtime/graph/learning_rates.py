"""Optimizers whose steps a graph can hold: they count on the device, and a learning rate that moves is read there.

A Python float is baked into the graph, and a schedule would change nothing. So from its first change on a rate is a
tensor on the device while the step runs; between steps the group holds what it held, and what a schedule wrote there is
sent over before the replay. A rate that never changes stays the constant that it is, and its steps the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class LearningRates:
    """The learning rates of those optimizers that take a tensor for one; of others the rate is a constant."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._counting = [one for one in optimizers if "capturable" in one.defaults]
        self._uncapturable = [group for one in self._counting for group in one.param_groups if not group["capturable"]]
        taking = [group for one in optimizers for group in one.param_groups if _may_be_tensor(one, group)]
        self._rates = [_LearningRate(group) for group in taking]

    def count_on_device(self) -> None:
        """Switch the optimizers to PyTorch's `capturable` path."""
        for group in self._uncapturable:
            group["capturable"] = True
        for optimizer in self._counting:
            _move_counts(optimizer, to_device=True)
            optimizer._warned_capturable_if_run_uncaptured = True

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
        return bool(beginning)

    def send(self) -> None:
        """What the host has written since the last step."""
        for rate in self._moving():
            rate.send()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Meanwhile the optimizers find their rates there."""
        self.send()
        moving = self._moving()
        for rate in moving:
            rate.group["lr"] = rate.sent
        try:
            yield
        finally:
            for rate in moving:
                rate.group["lr"] = rate.written

    def moves(self, group: dict[str, Any]) -> bool:
        """Whether the group's rate is sent over, and so no constant."""
        return any(rate.group is group for rate in self._moving())

    def _moving(self) -> list[_LearningRate]:
        return [rate for rate in self._rates if rate.sent is not None]


class _LearningRate:
    """A group's learning rate as its owner wrote it, and from its first change on as it was sent."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self.written = group, group["lr"]
        self._value = float(self.written)
        self.sent: torch.Tensor | None = None

    def begins_to_move(self) -> bool:
        if self.sent is not None or float(self.group["lr"]) == self._value:
            return False
        self.sent = torch.full((), self._value, dtype=torch.float32, device=self.group["params"][0].device)
        return True

    def send(self) -> None:
        self.written = self.group["lr"]
        value = float(self.written)
        if value != self._value and self.sent is not None:
            self._value = value
            self.sent.fill_(value)


def _may_be_tensor(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """A rate that is a tensor on the device already needs nothing."""
    rate = group["lr"]
    on_device = isinstance(rate, torch.Tensor) and rate.is_cuda
    return not on_device and ("capturable" in optimizer.defaults or bool(group.get("fused")))


def _move_counts(optimizer: Optimizer, to_device: bool) -> None:
    for parameter, state in optimizer.state.items():
        for label, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cuda != to_device:
                state[label] = value.to(parameter.device if to_device else "cpu")
