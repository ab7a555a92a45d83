"""The optimizer of a model whose parameters were replaced: it trains those that took their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class TrainedNames:
    """Which parameters an optimizer trains, by name; taken before the model is spread."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        names = {id(one): name for name, one in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self._groups: list[list[str]] = []
        for place, group in enumerate(optimizer.param_groups if optimizer else []):
            for own in group["params"]:
                if id(own) not in names:
                    raise ValueError(
                        f"group {place} of {type(optimizer).__name__} has a parameter of shape {tuple(own.shape)} that "
                        "the model does not hold; make the optimizer of model.parameters(), and spread both together"
                    )
            self._groups.append([names[id(own)] for own in group["params"]])

    def repoint(self, model: nn.Module) -> None:
        """The same groups, with their learning rates and decays, of the parameters that the model has now; their
        states go with them, cut as they are."""
        if self._optimizer is None:
            return
        present = dict(model.named_parameters(remove_duplicate=False))
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            replaced = [(old, present[name]) for old, name in zip(group["params"], names, strict=True)]
            group["params"] = [new for _, new in replaced]
            for old, new in replaced:
                if old in self._optimizer.state:
                    state = self._optimizer.state.pop(old)
                    self._optimizer.state[new] = {key: _as_parameter(one, new) for key, one in state.items()}
        self.prove(model)

    def prove(self, model: nn.Module) -> None:
        """Each of them is what the model trains, not a copy from before."""
        held = {id(one) for one in model.parameters()}
        for group, names in zip(self._optimizer.param_groups if self._optimizer else [], self._groups, strict=True):
            for own, name in zip(group["params"], names, strict=True):
                if id(own) not in held:
                    raise RuntimeError(f"the optimizer would train a parameter {name} that the model no longer has")


def _as_parameter(value: Any, parameter: Any) -> Any:
    """What an optimizer keeps for a parameter lies where it does, in the same parts."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
