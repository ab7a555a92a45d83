"""What a step does on the host, where a replay does nothing: counters, schedules, random numbers, lists that grow.

And what brings it back to where it was: a capture might leave it half done. The device's side no capture touches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from keepbusy.runtime.graph.names_read import PLAIN, NameRead, StepNames, constant, is_a
from keepbusy.runtime.graph.participants import Participants
from keepbusy.runtime.graph.reachable import ObjectState, SameObject, TensorState, held_as, reach, state_of


def random_state() -> tuple[Any, ...]:
    """Of Python, of NumPy where it is in use, and of PyTorch on the CPU, as a value that can be compared."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy and (of_numpy[1].tolist(), of_numpy[2:])


StateKey: TypeAlias = tuple[str, int]
"""What a person calls it, and whose it is."""


class HostState:
    """Reads everything that a step may change there."""

    def __init__(self, participants: Participants, names: StepNames) -> None:
        self._participants, self._names = participants, names

    def read(self) -> dict[StateKey, Any]:
        return {key: read() for key, read in self._readers()}

    def reader(self, key: StateKey) -> Callable[[], Any]:
        """What reads this alone."""
        return dict(self._readers())[key]

    def reached(self) -> list[tuple[str, Any]]:
        """Every object that the step may find, and what a person calls it."""
        found = self._participants
        named = [(name.label, name.read()) for name in self._names.reads]
        others = (*found.modules, *found.optimizers, *found.schedulers, *found.scalers)
        return reach(named, [(type(one).__name__, one) for one in others])

    def _readers(self) -> Iterator[tuple[StateKey, Callable[[], Any]]]:
        yield ("the random numbers of the host", 0), random_state
        for place, name in enumerate(self._names.reads):
            yield (f"`{name.label}`", place), partial(_binding, name)
        counters: set[int] = set()
        for optimizer in self._participants.optimizers:
            kind = type(optimizer).__name__
            yield (f"the settings of {kind}", id(optimizer)), partial(_all_settings, optimizer)
            if "capturable" in optimizer.defaults:  # it will count on the device
                counters |= {id(leaf) for leaf in tree_leaves([*optimizer.state.values()]) if _is_of_host(leaf)}
            else:
                yield (f"the step count of {kind}", id(optimizer)), partial(_counts_of, optimizer)
        for scheduler in self._participants.schedulers:
            label = f"the epoch of {type(scheduler).__name__}"
            yield (label, id(scheduler)), partial(getattr, scheduler, "last_epoch", None)
        for scaler in self._participants.scalers:
            yield ("the stage of GradScaler", id(scaler)), partial(_stages_of, scaler)
        for label, value in self.reached():
            if id(value) not in counters:
                yield (label, id(value)), partial(state_of, value)


class HostChange(NamedTuple):
    """Something that is no more what it was, and why no replay makes it so, as the end of a sentence."""

    key: StateKey
    why: str


def changes_between(before: dict[StateKey, Any], after: dict[StateKey, Any]) -> list[HostChange]:
    return [
        HostChange(key, _why(key[0], before[key], value))
        for key, value in after.items()
        if key in before and before[key] != value
    ]


def _why(label: str, before: Any, after: Any) -> str:
    if isinstance(before, ObjectState):
        old, new = before.parts, after.parts
        suffix = next((name for name in old.keys() | new.keys() if old.get(name) != new.get(name)), None)
        before, after = (before.own, after.own) if suffix is None else (old.get(suffix), new.get(suffix))
        label = f"`{label}{suffix or ''}`"
    if is_a(before.held if isinstance(before, SameObject) else before, torch.Tensor, TensorState):
        return f"binds {label} to new memory, where a replay goes on with the old; write to it in place"
    return f"changes {label} on the host, where a replay does nothing; move that out of the step"


def _binding(name: NameRead) -> Any:
    return held_as(name.read())


def _is_of_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cuda


def _all_settings(optimizer: Optimizer) -> list[Any]:
    return [settings(group) for group in optimizer.param_groups]


def _counts_of(optimizer: Optimizer) -> list[Any]:
    """Numbers and host tensors of its parameters' states."""
    held = tree_leaves([*optimizer.state.values()])
    return [constant(value) for value in held if type(value) in PLAIN or _is_of_host(value)]


def _stages_of(scaler: torch.amp.GradScaler) -> list[str]:
    return [str(one["stage"]) for one in scaler._per_optimizer_states.values()]


def settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """A parameter group's hyperparameters."""
    return tuple(
        constant(value) if isinstance(value, torch.Tensor) else value
        for label, value in group.items()
        if label != "params" and isinstance(value, (*PLAIN, tuple, torch.Tensor))
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
