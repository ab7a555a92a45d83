"""What a step does on the host, where a replay does nothing: counters, schedules, random numbers, lists that grow.

And what brings it back to where it was: a capture might leave it half done. The device's side no capture touches.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from keepbusy.runtime.graph.names_read import PLAIN, NameRead, StepNames, constant, is_a
from keepbusy.runtime.graph.participants import Participants
from keepbusy.runtime.graph.reachable import ObjectState, SameObject, TensorState, held_as, reach, state_of
from keepbusy.torch_names.pytorch import FORWARD_HOOKS, foreach_copy, states_by_optimizer, tree_leaves


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
        self._participants, self.names = participants, names

    def read(self) -> dict[StateKey, Any]:
        return {key: read() for key, read in self._readers()}

    def reader(self, key: StateKey) -> Callable[[], Any]:
        """What reads this alone."""
        return dict(self._readers())[key]

    def reached(self) -> list[tuple[str, Any]]:
        """Every object that the step may find, and what a person calls it."""
        found = self._participants
        named = [(name.label, name.read()) for name in self.names.reads]
        others = (*found.modules, *found.optimizers, *found.schedulers, *found.scalers)
        return reach(named, [(type(participant).__name__, participant) for participant in others])

    def _readers(self) -> Iterator[tuple[StateKey, Callable[[], Any]]]:
        yield ("the random numbers of the host", 0), random_state
        for place, name in enumerate(self.names.reads):
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


COPIES_KEPT = 4
"""Of what is bound anew: where it is kept, what the program finds, a comparison's, and one to spare."""


class _Place(NamedTuple):
    """Where the program keeps a tensor that each call binds anew."""

    holder: Any
    name: Any
    """Of a dict's or a list's entry, or of an attribute; None where the tensor stays and its memory is another one."""

    def read(self) -> Any:
        return self.holder.data if self.name is None else self._entries()[self.name]

    def bind(self, tensor: Tensor) -> None:
        if self.name is None:
            self.holder.data = tensor
        else:
            self._entries()[self.name] = tensor

    def is_made_by_a_hook(self) -> bool:
        """As a weight that is normed: before each forward pass, so nobody goes back from it later."""
        hooks = getattr(self.holder, FORWARD_HOOKS).values() if is_a(self.holder, torch.nn.Module) else ()
        return any(getattr(hook, "name", None) == self.name for hook in hooks)

    def _entries(self) -> Any:
        if is_a(self.holder, dict, list):
            return self.holder
        held = vars(self.holder)
        of_module = (held.get(kind) or {} for kind in ("_parameters", "_buffers"))
        return next((part for part in of_module if self.name in part), held)


class BoundAnew:
    """What each call of a step binds to new tensors of the same shapes: an average, a weight that is normed, a loss
    that a layer keeps. While a call runs these are the same ones at each, which it writes to in the end, and so does a
    graph of it. After the call the program finds new ones, as it would without a graph."""

    def __init__(self, places: list[_Place]) -> None:
        self._places, self._is_given_up = places, False
        with torch.no_grad():
            self.kept = [_like(place.read(), place.read().detach().clone()) for place in places]

    def fits(self) -> bool:
        """Whether what the program has there now could be kept."""
        if self._is_given_up:
            return False
        try:
            now = [place.read() for place in self._places]
        except (KeyError, IndexError):  # it is gone
            return False
        return all(
            is_a(tensor, Tensor) and _are_alike(tensor, kept) for tensor, kept in zip(now, self.kept, strict=True)
        )

    @contextmanager
    def kept_in_place(self) -> Iterator[None]:
        """While a call runs."""
        _copy_all(self.kept, [place.read() for place in self._places])
        self._bind(self.kept)
        try:
            yield
        finally:
            if not self._is_given_up:
                new = [_like(kept, torch.empty_like(kept)) for kept in self.kept]
                _copy_all(new, self.kept)
                self._bind(new)

    def settle(self) -> None:
        """What the step has bound goes to where it is kept. What has another shape stays, and all else with it."""
        self._is_given_up = not self.fits()
        if self._is_given_up:
            return
        now = [place.read() for place in self._places]
        bound = [pair for pair in zip(self.kept, now, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
        if bound:
            _copy_all([kept for kept, _ in bound], [tensor for _, tensor in bound])
            self._bind(self.kept)

    def put_back(self) -> None:
        """What a capture has bound, of which nothing has run."""
        self._bind(self.kept)

    def _bind(self, tensors: list[Tensor]) -> None:
        for place, tensor in zip(self._places, tensors, strict=True):
            place.bind(tensor)


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    return torch.nn.Parameter(made, tensor.requires_grad) if is_a(tensor, torch.nn.Parameter) else made


def _are_alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device, tensor.layout) == (
        other.shape,
        other.dtype,
        other.device,
        other.layout,
    )


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        foreach_copy(targets, [source.detach() for source in sources])


def bound_anew(host: HostState, before: dict[StateKey, Any], after: dict[StateKey, Any]) -> list[_Place]:
    """All that has changed between the two, if that is nothing but names that stand for new tensors of the device, of
    the same shapes, and there is memory to keep them; else nothing."""
    objects = {(label, id(value)): value for label, value in host.reached()}
    names = {(f"`{name.label}`", place): name for place, name in enumerate(host.names.reads)}
    found: dict[Any, _Place] = {}
    for key, old in before.items():
        new = after.get(key, old)
        if old == new:
            continue
        if key in names:
            places = [(_place_of(names[key]), old)]
        elif key in objects and old.parts.keys() == new.parts.keys():
            places = [
                (_part_of(objects[key], name), part) for name, part in old.parts.items() if part != new.parts[name]
            ]
            places += [(_Place(objects[key], None), old.own)] if old.own != new.own else []
        else:
            return []
        if not all(place is not None and _may_be_kept(place, value) for place, value in places):
            return []
        found |= {(id(place.holder), place.name): place for place, _ in places if place is not None}
    needed = COPIES_KEPT * sum(place.read().nbytes for place in found.values())
    return [*found.values()] if needed <= torch.cuda.mem_get_info()[0] else []


def _place_of(name: NameRead) -> _Place | None:
    """Where a name that the step reads is kept."""
    read = name.read
    if not isinstance(read, partial):
        return None
    holder = read.args[0] if read.func is getattr else getattr(read.func, "__self__", None)
    return _Place(holder, read.args[1 if read.func is getattr else 0]) if holder is not None else None


def _part_of(holder: Any, suffix: str) -> _Place | None:
    if is_a(holder, dict):
        return next((_Place(holder, key) for key in holder if suffix == f"[{key!r}]"), None)
    if is_a(holder, list):
        return _Place(holder, int(suffix.strip("[]")))
    return _Place(holder, suffix.removeprefix("."))


def _may_be_kept(place: _Place, before: Any) -> bool:
    """Whether it was a tensor of the device, and is one of that shape again."""
    try:
        now = place.read()
    except (KeyError, IndexError, TypeError, AttributeError):  # a class has it, or a slot
        return False
    if (
        type(now) not in (Tensor, torch.nn.Parameter)
        or not now.is_cuda
        or not now.is_contiguous()
        or now.is_inference()
    ):
        return False
    if place.name is None:
        return isinstance(before, TensorState) and TensorState(now).is_like(before)
    return isinstance(before, SameObject) and is_a(before.held, Tensor) and _are_alike(now, before.held)


def _why(label: str, before: Any, after: Any) -> str:
    if isinstance(before, ObjectState):
        old, new = before.parts, after.parts
        suffix = next((name for name in old.keys() | new.keys() if old.get(name) != new.get(name)), None)
        before, after = (before.own, after.own) if suffix is None else (old.get(suffix), new.get(suffix))
        label = f"`{label}{suffix or ''}`"
    if isinstance(before, TensorState) and before.is_of_host:
        return f"writes to {label} on the host, where a replay does nothing; keep it on the device"
    if is_a(before.held if isinstance(before, SameObject) else before, Tensor, TensorState):
        return f"binds {label} to new memory, where a replay goes on with the old; write to it in place"
    return f"changes {label} on the host, where a replay does nothing; move that out of the step"


def _binding(name: NameRead) -> Any:
    return held_as(name.read())


def _is_of_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cuda


def _all_settings(optimizer: Optimizer) -> list[Any]:
    return [settings(group) for group in optimizer.param_groups]


def _counts_of(optimizer: Optimizer) -> list[Any]:
    """Numbers and host tensors of its parameters' states."""
    held = tree_leaves([*optimizer.state.values()])
    return [constant(value) for value in held if type(value) in PLAIN or _is_of_host(value)]


def _stages_of(scaler: torch.amp.GradScaler) -> list[str]:
    return [str(state["stage"]) for state in states_by_optimizer(scaler).values()]


def settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """A parameter group's hyperparameters."""
    return tuple(
        constant(value) if isinstance(value, Tensor) else value
        for label, value in group.items()
        if label != "params" and isinstance(value, (*PLAIN, tuple, Tensor))
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
                label: value.clone() if isinstance(value, Tensor) and not value.is_cuda else value
                for label, value in state.items()
            },
        )
        for parameter, state in optimizer.state.items()
    ]
    known, names = {id(parameter) for parameter, _, _ in states}, set(vars(optimizer))

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            group.update(before)
        for parameter in [weight for weight in optimizer.state if id(weight) not in known]:
            del optimizer.state[parameter]
        for _, state, before in states:
            state.clear()
            state.update(before)
        for name in set(vars(optimizer)) - names:  # GradScaler hangs its tensors here while the optimizer steps
            delattr(optimizer, name)

    return restore


def _rollback_of_scaler(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    stages = {optimizer: dict(stage) for optimizer, stage in states_by_optimizer(scaler).items()}
    found = [(stage["found_inf_per_device"], dict(stage["found_inf_per_device"])) for stage in stages.values()]

    def restore() -> None:
        states_by_optimizer(scaler).clear()
        states_by_optimizer(scaler).update(stages)
        for now, before in found:
            now.clear()
            now.update(before)

    return restore
