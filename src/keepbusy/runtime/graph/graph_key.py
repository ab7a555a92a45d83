"""What besides its arguments decides what a step does: modes, settings, names that it reads, where its weights lie.

All of it is constant in a graph. So it is read before each replay, and another graph is taken where it differs.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from keepbusy.runtime.graph.host_state import settings
from keepbusy.runtime.graph.learning_rates import LearningRates
from keepbusy.runtime.graph.names_read import NameRead, constant
from keepbusy.runtime.graph.participants import Participants

_CODE_TYPES = (FunctionType, BuiltinFunctionType, ModuleType, type)
"""What a name may stand for and nobody rebinds."""


class GraphKey:
    """Of one step."""

    def __init__(self, participants: Participants, names: list[NameRead], rates: LearningRates) -> None:
        self._modules, self._optimizers = participants.modules, participants.optimizers
        self._names = [name for name in names if not isinstance(name.read(), _CODE_TYPES)]
        self._rates = rates
        self._leaves: dict[int, Tensor] = {}

    def add(self, leaves: list[Tensor]) -> None:
        """Tensors that gather gradients in the step."""
        self._leaves |= {id(one): one for one in leaves}

    def kind(self) -> tuple[Any, ...]:
        """What may come back: an evaluation in between, gradients that were cleared, another setting."""
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple([module.training for module in self._modules]),
            tuple([one.grad is None for one in self._leaves.values()]),
            *[
                settings({**group, "lr": None} if self._rates.moves(group) else group)
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ],
            *[constant(name.read()) for name in self._names],
        )

    def addresses(self) -> tuple[Any, ...]:
        """Where weights and optimizer state lie. When they have moved, no graph is of use any more."""
        return (
            *[one.data_ptr() for one in self._leaves.values()],
            *[id(optimizer.state) for optimizer in self._optimizers],
        )

    def held(self) -> list[Any]:
        """What a graph may read without owning it, to be kept alive for it."""
        return [*[name.read() for name in self._names], *[optimizer.state for optimizer in self._optimizers]]

    def labels(self) -> list[str]:
        """What a person calls the parts of `kind`."""
        groups = [f"the settings of {type(one).__name__}" for one in self._optimizers for _ in one.param_groups]
        fixed = [
            "whether gradients are on",
            "autocast",
            "whether modules are in training",
            "which gradients are cleared",
        ]
        return [*fixed, *groups, *[f"`{name.label}`" for name in self._names]]
