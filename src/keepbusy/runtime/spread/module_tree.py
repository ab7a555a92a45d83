"""What the module tree holds: parameters by their names, and the modules that are gathered as one.

Where parameters were replaced, or their rows lie in another order, the optimizer trains those that took their place,
and what is saved is as the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from keepbusy.runtime.module_parts import own_weights


class TrainedNames:
    """Which parameters an optimizer trains, by name; taken before the model is spread."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        names = {id(weight): name for name, weight in reversed(_all_names(model))}
        self._groups: list[list[str]] = []
        for place, group in enumerate(optimizer.param_groups if optimizer else []):
            for weight in group["params"]:
                if id(weight) not in names:
                    kind, shape = type(optimizer).__name__, tuple(weight.shape)
                    raise ValueError(
                        f"group {place} of {kind} has a parameter of shape {shape} that the model does not hold; "
                        "make the optimizer of model.parameters(), and spread both together"
                    )
            self._groups.append([names[id(weight)] for weight in group["params"]])

    def repoint(self, model: nn.Module) -> None:
        """The same groups, with their learning rates and decays, of the parameters that the model has now; their
        states go with them, cut as they are."""
        if self._optimizer is None:
            return
        present, orders, states = dict(_all_names(model)), orders_of(model), self._optimizer.state
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            before, group["params"] = group["params"], [present[name] for name in names]
            for old, new in zip(before, group["params"], strict=True):
                if old in states:
                    held = states.pop(old)
                    states[new] = {key: _as_parameter(value, new, orders.get(id(new))) for key, value in held.items()}
        if orders:
            back = {key: order.argsort() for key, order in orders.items()}
            self._optimizer.register_state_dict_post_hook(partial(_turned, orders=back))
            self._optimizer.register_load_state_dict_pre_hook(partial(_turned, orders=orders))


def _as_parameter(value: Any, parameter: Any, order: Tensor | None) -> Any:
    """What an optimizer keeps for a parameter lies where it does, in the same parts."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    value = reordered(value.to(parameter.device), order)
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


# Rows in another order


def reordered(value: Any, order: Tensor | None) -> Any:
    """Rows in that order; those of a DTensor are in the same parts afterwards."""
    if order is None:
        return value
    if not isinstance(value, DTensor):
        return value[order.to(value.device)]
    whole = value.full_tensor()[order.to(value.device)]
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)


def keep_order(module: nn.Module, order: Tensor) -> None:
    """From now on the rows of its parameters lie so; in a state they are as the module has them by itself."""
    module.row_order = order
    module.register_state_dict_post_hook(partial(_in_state, order=order.argsort()))
    module.register_load_state_dict_pre_hook(partial(_in_state, order=order))


def orders_of(model: nn.Module) -> dict[int, Tensor]:
    """Of parameters whose rows lie in another order, by id."""
    packed = [module for module in model.modules() if "row_order" in vars(module)]
    return {id(own): module.row_order for module in packed for own in own_weights(module)}


def _in_state(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any, order: Tensor) -> None:
    for name in module._parameters:
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = reordered(state[f"{prefix}{name}"], order)


def with_states(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], change: Callable[[Any, Tensor], Any]
) -> dict[str, Any]:
    """An optimizer's saved state, with each value as `change(value, parameter)` makes it."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]  # numbers, or names
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    parameters = dict(zip(keys, held, strict=True))
    states = {
        key: {name: change(value, parameters[key]) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    return saved | {"state": states}


def _turned(optimizer: torch.optim.Optimizer, saved: dict[str, Any], orders: Mapping[int, Tensor]) -> dict[str, Any]:
    """An optimizer's saved state, whose rows are turned with those of its parameters."""

    def turn(value: Any, parameter: Tensor) -> Any:
        alike = getattr(value, "shape", None) == parameter.shape
        return reordered(value, orders.get(id(parameter))) if alike else value

    return with_states(optimizer, saved, turn)


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Tied parameters by each of their names, whatever arguments the model's own `named_parameters()` takes."""
    return list(nn.Module.named_parameters(model, remove_duplicate=False))


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """By id, the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in _all_names(model):
        names.setdefault(id(parameter), []).append(name)
    return {key: held for key, held in names.items() if len(held) > 1}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of a kind that comes again and again in one list: each is gathered while the one before
    it computes. A parameter that is also held outside its block would be cut apart, so that block is left whole."""
    tied = tied_parameters(model)
    return {
        path: block
        for path, block in _repeated(model, "")
        if all(name.startswith(f"{path}.") for weight in block.parameters() for name in tied.get(id(weight), ()))
    }


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    listed = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    kinds = Counter(type(child) for child in module.children() if any(True for _ in child.parameters()))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if listed and kinds[type(child)] > 1 and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path, child
        else:
            yield from _repeated(child, f"{path}.")


def dropouts_of(model: nn.Module) -> dict[tuple[nn.Module, str], float]:
    """Attributes that are shares to drop."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and ("drop" in name or (name == "p" and "Drop" in type(module).__name__))
    }


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Comparisons are of what is computed, not of what is drawn."""
    dropouts = dropouts_of(model)
    try:
        for module, name in dropouts:
            setattr(module, name, 0.0)
        yield
    finally:
        for (module, name), value in dropouts.items():
            setattr(module, name, value)
