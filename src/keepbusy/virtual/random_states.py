"""Random states of a GPU: a seed and an offset in sixteen bytes; each draw is a function of both.

Programs read the two numbers: ranks that share a tensor draw their parts of it with offsets of their own. The host's
generator has another kind of state, so before each draw it is seeded from these two numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepbusy.torch_names.dispatcher import HostGenerator

_SIZE, WORD = 16, 1 << 64
STEP = 4
"""How many numbers a draw of a GPU's generator gives; offsets are multiples of it."""


class RandomState:
    """The state of a device's generator."""

    seed = offset = 0


STATES: dict[int, RandomState] = {}
"""By the address of the C++ generator, since the dispatcher makes new Python objects for it."""


def state_of(generator: Any) -> Tensor:
    """The packed state of a device's generator; a host generator returns its own kind of state."""
    state = STATES.get(generator._cdata)
    if state is None:
        return HostGenerator.get_state(generator)
    packed = state.seed.to_bytes(8, "little") + state.offset.to_bytes(8, "little")
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def put_state(generator: Any, packed: Tensor) -> None:
    state = STATES.get(generator._cdata)
    if state is None:
        HostGenerator.set_state(generator, packed)
        return
    if packed.dtype != torch.uint8 or packed.device.type != "cpu":
        raise TypeError("RNG state must be a torch.ByteTensor")
    if packed.numel() != _SIZE:
        raise RuntimeError("RNG state is wrong size")
    packed_bytes = bytes(packed.tolist())
    state.seed, state.offset = (int.from_bytes(part, "little") for part in (packed_bytes[:8], packed_bytes[8:]))


def seed_host(generator: Any, state: RandomState) -> None:
    """Seed the host's part of a generator from its seed and offset, and advance the offset."""
    HostGenerator.manual_seed(generator, _mixed(state.seed + _mixed(state.offset)))
    state.offset += STEP


def _mixed(number: int) -> int:
    """A hash that separates close numbers (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31
