"""Random numbers of the devices: each has a generator apart from the host's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from keepbusy.torch_names.dispatcher import HostGenerator
from keepbusy.virtual.machine import CURRENT, MACHINE
from keepbusy.virtual.pytorch import refusal
from keepbusy.virtual.random_states import STATES, STEP, WORD, RandomState, put_state, seed_host, state_of


class DeviceGenerator(HostGenerator):
    """A host generator that claims to be a device's. As on a GPU, few of its methods are allowed in a capture."""

    _index: int
    _cdata: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def clone_state(self) -> DeviceGenerator:
        copy = _generator_of(self._index)
        copy.set_state(state_of(self))
        return copy

    def initial_seed(self) -> int:
        return STATES[self._cdata].seed

    def get_offset(self) -> int:
        return STATES[self._cdata].offset

    def set_offset(self, offset: int) -> DeviceGenerator:
        if offset % STEP:
            raise RuntimeError("offset must be a multiple of 4")
        STATES[self._cdata].offset = offset
        return self

    def manual_seed(self, seed: int) -> DeviceGenerator:
        state = STATES[self._cdata]
        if not MACHINE.captures(self._index):
            state.seed, state.offset = seed % WORD, 0
        elif seed != state.seed:
            raise RuntimeError(
                "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same "
                "as the original seed."
            )
        return self

    def seed(self) -> int:
        if MACHINE.captures(self._index):
            raise RuntimeError("Cannot call CUDAGeneratorImpl::seed during CUDA graph capture.")
        return self.manual_seed(int(super().seed())).initial_seed()

    def get_state(self) -> torch.Tensor:
        state, recording = state_of(self), MACHINE.records(self._index)
        if recording is not None:
            recording.note_state(self, state)
        return state

    def set_state(self, state: torch.Tensor) -> DeviceGenerator:
        recording = MACHINE.records(self._index)
        if recording is not None:
            recording.put_back(self, state)
        else:
            put_state(self, state)
        return self

    graphsafe_get_state = graphsafe_set_state = refusal(
        "has no graph-safe random states; use get_state and set_state instead"
    )


def _generator_of(device: int) -> DeviceGenerator:
    generator = DeviceGenerator()
    generator._index = device
    STATES[generator._cdata] = RandomState()
    weakref.finalize(generator, STATES.pop, generator._cdata, None)
    return generator


class _GeneratorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, HostGenerator)


class GeneratorOfAnyDevice(metaclass=_GeneratorType):
    """In place of `torch.Generator`, which PyTorch without CUDA cannot make for a device."""

    def __new__(cls, device: torch.device | str | int = "cpu") -> Any:
        parsed_device = torch.device(device)
        if parsed_device.type == "cuda":
            return _generator_of(CURRENT.index(parsed_device))
        return HostGenerator(device)


class Defaults:
    """The default generator of each device."""

    def __init__(self) -> None:
        self.shared = False  # whether the devices draw from the host's generator instead
        self._generators: dict[int, DeviceGenerator] = {}

    def __call__(self, device: int) -> HostGenerator:
        if self.shared:
            return cast(HostGenerator, torch.default_generator)
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = _generator_of(device)
            generator.manual_seed(torch.default_generator.initial_seed())
        return generator

    def all(self) -> tuple[HostGenerator, ...]:
        return tuple(self(device) for device in range(CURRENT.count))


DEFAULTS = Defaults()


def refuse_generator(generator: Any, device: str) -> None:
    """Refuse a generator of another device, with PyTorch's message."""
    own_device = "cuda" if generator._cdata in STATES else "cpu"
    if own_device != device and not DEFAULTS.shared:
        raise RuntimeError(f"Expected a '{device}' device type for generator but found '{own_device}'")


def draw(call: Callable[..., Any], device: int, args: list[Any], kwargs: dict[str, Any], takes_generator: bool) -> Any:
    """Call an operator that draws, with the device's generator unless one was given."""
    own = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, HostGenerator)), None)
    if own is not None:
        refuse_generator(own, "cuda")
    generator: Any = own or DEFAULTS(device)
    recording = MACHINE.records(device)
    if recording is not None:
        recording.draws_from(generator)
    state = STATES.get(generator._cdata)
    if state is not None:
        seed_host(generator, state)
    if own is not None:
        return call(*args, **kwargs)
    if takes_generator:
        return call(*args, **{**kwargs, "generator": generator})
    host = torch.default_generator
    if generator is host:
        return call(*args, **kwargs)
    # an operator that uses only the host's default generator: give that the device's state meanwhile
    host_state = host.get_state()
    host.set_state(HostGenerator.get_state(generator))
    try:
        return call(*args, **kwargs)
    finally:
        host.set_state(host_state)
