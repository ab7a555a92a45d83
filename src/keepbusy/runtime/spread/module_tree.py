"""Parameters by their names, blocks that are gathered as one, and rows in another order.

If parameters are replaced, or their rows are reordered, the optimizer trains the new ones, and saved states are as for
the original model.
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
    """Names of the parameters that an optimizer trains, taken before the model is spread."""

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
        """Put the model's present parameters into the optimizer's groups, with the states, which are cut alike."""
        if self._optimizer is None:
            return
        parameters, orders, states = dict(_all_names(model)), orders_of(model), self._optimizer.state
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            before, group["params"] = group["params"], [parameters[name] for name in names]
            for old, new in zip(before, group["params"], strict=True):
                if old in states:
                    state = states.pop(old)
                    states[new] = {key: _as_parameter(value, new, orders.get(id(new))) for key, value in state.items()}
        if orders:
            original_orders = {key: order.argsort() for key, order in orders.items()}
            self._optimizer.register_state_dict_post_hook(partial(_in_order, orders=original_orders))
            self._optimizer.register_load_state_dict_pre_hook(partial(_in_order, orders=orders))


def _as_parameter(value: Any, parameter: Any, order: Tensor | None) -> Any:
    """A state of the optimizer on the parameter's device, in the same parts."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    value = reordered(value.to(parameter.device), order)
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


# Reordered rows


def reordered(value: Any, order: Tensor | None) -> Any:
    """The value with its rows in that order; a DTensor keeps its placements."""
    if order is None:
        return value
    if not isinstance(value, DTensor):
        return value[order.to(value.device)]
    full = value.full_tensor()[order.to(value.device)]
    return distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None)


def keep_order(module: nn.Module, order: Tensor) -> None:
    """Mark the rows of a module's parameters as reordered; its saved states have the original order."""
    module.row_order = order
    module.register_state_dict_post_hook(partial(_in_state, order=order.argsort()))
    module.register_load_state_dict_pre_hook(partial(_in_state, order=order))


def orders_of(model: nn.Module) -> dict[int, Tensor]:
    """The orders of parameters with reordered rows, by id."""
    packed = [module for module in model.modules() if "row_order" in vars(module)]
    return {id(own): module.row_order for module in packed for own in own_weights(module)}


def _in_state(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any, order: Tensor) -> None:
    for name in module._parameters:
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = reordered(state[f"{prefix}{name}"], order)


def with_states(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], change: Callable[[Any, Tensor], Any]
) -> dict[str, Any]:
    """An optimizer's saved state, with `change(value, parameter)` applied to each value."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]  # numbers, or names
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parameters = dict(zip(keys, weights, strict=True))
    states = {
        key: {name: change(value, parameters[key]) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    return saved | {"state": states}


def _in_order(optimizer: torch.optim.Optimizer, saved: dict[str, Any], orders: Mapping[int, Tensor]) -> dict[str, Any]:
    """An optimizer's saved state, with rows reordered like those of its parameters."""

    def reorder(value: Any, parameter: Tensor) -> Any:
        is_per_row = getattr(value, "shape", None) == parameter.shape
        return reordered(value, orders.get(id(parameter))) if is_per_row else value

    return with_states(optimizer, saved, reorder)


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All names of all parameters. The model may have a `named_parameters()` of its own with other arguments."""
    return list(nn.Module.named_parameters(model, remove_duplicate=False))


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter with several, by id."""
    names: dict[int, list[str]] = {}
    for name, parameter in _all_names(model):
        names.setdefault(id(parameter), []).append(name)
    return {key: several for key, several in names.items() if len(several) > 1}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of a kind that is repeated in a list: each is gathered while the previous one computes. A
    block with a parameter that is also used outside is left out, as the two uses would be cut apart."""
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
    """Dropout rates, by module and attribute."""
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
    """Set all dropout rates to zero, for comparisons."""
    dropouts = dropouts_of(model)
    try:
        for module, name in dropouts:
            setattr(module, name, 0.0)
        yield
    finally:
        for (module, name), value in dropouts.items():
            setattr(module, name, value)
