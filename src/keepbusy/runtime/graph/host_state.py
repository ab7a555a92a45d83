"""What a step does on the host, where a replay does nothing: counters, schedules, random numbers, lists that grow.

And what brings it back to where it was: a capture might leave it half done. The device's side no capture touches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.names_read import PLAIN, NameRead, constant, container_size
from keepbusy.runtime.graph.participants import Participants


def random_state() -> tuple[Any, ...]:
    """Of Python, of NumPy where it is in use, and of PyTorch on the CPU, as a value that can be compared."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy and (of_numpy[1].tolist(), of_numpy[2:])


StateKey: TypeAlias = tuple[str, int]
"""What a person calls it, and whose it is."""


class _SameObject:
    """Equal to nothing but the same object, which it keeps alive meanwhile."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


class HostState:
    """Reads everything that a step may change there."""

    def __init__(self, participants: Participants, names: list[NameRead]) -> None:
        self._modules, self._optimizers = [*participants.modules], [*participants.optimizers]
        self._schedulers, self._scalers = [*participants.schedulers], [*participants.scalers]
        self._names = names

    def read(self) -> dict[StateKey, Any]:
        return dict(self._items())

    def _items(self) -> Iterator[tuple[StateKey, Any]]:
        yield ("the random numbers of the host", 0), random_state()
        for name in self._names:
            value = name.read()
            yield (f"`{name.label}`", 0), (constant(value), container_size(value))
        for module in self._modules:
            yield from _of_module(module)
        for optimizer in self._optimizers:
            yield from _of_optimizer(optimizer)
        for scheduler in self._schedulers:
            yield (f"the epoch of {type(scheduler).__name__}", id(scheduler)), getattr(scheduler, "last_epoch", None)
        for scaler in self._scalers:
            stages = [str(one["stage"]) for one in scaler._per_optimizer_states.values()]
            yield ("the stage of GradScaler", id(scaler)), stages


def first_change(before: dict[StateKey, Any], after: dict[StateKey, Any]) -> StateKey | None:
    """What differs first."""
    return next((key for key, value in after.items() if key in before and before[key] != value), None)


def settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """A parameter group's hyperparameters."""
    return tuple(
        constant(value) if isinstance(value, torch.Tensor) else value
        for label, value in group.items()
        if label != "params" and isinstance(value, (*PLAIN, tuple, torch.Tensor))
    )


def _of_module(module: torch.nn.Module) -> Iterator[tuple[StateKey, Any]]:
    """Its numbers, and its buffers themselves: one that is bound anew at each step would be read stale by a replay."""
    kind = type(module).__name__
    for label, value in vars(module).items():
        if type(value) in PLAIN:
            yield (f"`{kind}.{label}`", id(module)), value
    for label, buffer in module._buffers.items():
        yield (f"the buffer `{kind}.{label}`", id(module)), _SameObject(buffer)


def _of_optimizer(optimizer: Optimizer) -> Iterator[tuple[StateKey, Any]]:
    kind = type(optimizer).__name__
    yield (f"the settings of {kind}", id(optimizer)), [settings(group) for group in optimizer.param_groups]
    if "capturable" not in optimizer.defaults:
        yield (f"the step count of {kind}", id(optimizer)), [*map(_counts_of, optimizer.state.values())]


def _counts_of(state: Any) -> tuple[Any, ...]:
    """Numbers and host tensors of one parameter's state."""
    held = state.values() if isinstance(state, dict) else ()
    return tuple(
        constant(one) for one in held if type(one) in PLAIN or (isinstance(one, torch.Tensor) and not one.is_cuda)
    )


def rollback_to_now(participants: Participants) -> list[Callable[[], None]]:
    """What brings random numbers, optimizers and scalers back to where they are now."""
    return [
        _rollback_of_random_numbers(),
        *map(_rollback_of_optimizer, participants.optimizers),
        *map(_rollback_of_scaler, participants.scalers),
    ]


def _rollback_of_random_numbers() -> Callable[[], None]:
    numpy = sys.modules.get("numpy")
    python, host = random.getstate(), torch.get_rng_state()
    of_numpy = numpy.random.get_state() if numpy else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy:
            numpy.random.set_state(of_numpy)

    return restore


def _rollback_of_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    groups = [dict(group) for group in optimizer.param_groups]
    states = [
        # tensors of the host are written to in a capture, those of the device are not
        (
            parameter,
            state,
            {
                label: value.clone() if isinstance(value, torch.Tensor) and not value.is_cuda else value
                for label, value in state.items()
            },
        )
        for parameter, state in optimizer.state.items()
    ]
    known, names = {id(parameter) for parameter, _, _ in states}, set(vars(optimizer))

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            group.update(before)
        for parameter in [one for one in optimizer.state if id(one) not in known]:
            del optimizer.state[parameter]
        for _, state, before in states:
            state.clear()
            state.update(before)
        for name in set(vars(optimizer)) - names:  # GradScaler hangs its tensors here while the optimizer steps
            delattr(optimizer, name)

    return restore


def _rollback_of_scaler(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    stages = {optimizer: dict(stage) for optimizer, stage in scaler._per_optimizer_states.items()}
    found = [(stage["found_inf_per_device"], dict(stage["found_inf_per_device"])) for stage in stages.values()]

    def restore() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(stages)
        for now, before in found:
            now.clear()
            now.update(before)

    return restore
