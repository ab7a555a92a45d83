"""Random numbers of the device: a generator for each, apart from the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C import Generator as HostGenerator

from keepbusy.virtual.current import CURRENT


class DeviceGenerator(HostGenerator):
    """Draws on the host, and says that it is a device's."""

    _index: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def clone_state(self) -> DeviceGenerator:
        return _made(self._index, self.get_state())


def generator_of(device: int) -> DeviceGenerator:
    generator = DeviceGenerator()
    generator._index = device
    return generator


def _made(index: int, state: torch.Tensor) -> DeviceGenerator:
    generator = generator_of(index)
    generator.set_state(state)
    return generator


class _GeneratorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, HostGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, HostGenerator)


class Generator(metaclass=_GeneratorType):
    """Stands for `torch.Generator`, which this build of PyTorch cannot make for a device."""

    def __new__(cls, device: torch.device | str | int = "cpu") -> Any:
        where = torch.device(device)
        if where.type == "cuda":
            return generator_of(CURRENT.index(where))
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
            generator = self._generators[device] = generator_of(device)
            generator.manual_seed(torch.default_generator.initial_seed())
        return generator

    def all(self) -> tuple[HostGenerator, ...]:
        return tuple(self(device) for device in range(CURRENT.count))


DEFAULTS = Defaults()


def draw(call: Callable[..., Any], device: int, args: list[Any], kwargs: dict[str, Any], takes_generator: bool) -> Any:
    """Call an operator that draws, with the device's generator unless one was given."""
    if kwargs.get("generator") is not None or any(isinstance(one, HostGenerator) for one in args):
        return call(*args, **kwargs)
    if takes_generator:
        return call(*args, **{**kwargs, "generator": DEFAULTS(device)})
    return _instead_of_the_hosts(call, DEFAULTS(device), args, kwargs)


def _instead_of_the_hosts(
    call: Callable[..., Any], generator: HostGenerator, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """For operators that know no generator but the host's: lend it the device's state."""
    host = torch.default_generator
    if generator is host:
        return call(*args, **kwargs)
    before = host.get_state()
    host.set_state(generator.get_state())
    try:
        return call(*args, **kwargs)
    finally:
        generator.set_state(host.get_state())
        host.set_state(before)
