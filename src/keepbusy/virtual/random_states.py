"""Random states as a GPU has them: a seed and an offset in sixteen bytes, and each draw a function of both.

Programs take them apart: ranks that share a tensor draw each its part of it by an offset of its own. The host's
generator has another kind of state; before each draw it is seeded anew from these two numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import Generator as HostGenerator

_SIZE, WORD = 16, 1 << 64
STEP = 4
"""Numbers that one draw of a GPU's generator gives: offsets are multiples of it."""


class RandomState:
    """The state of a device's generator."""

    seed = offset = 0


STATES: dict[int, RandomState] = {}
"""By the address of what is behind a generator: the dispatcher makes a new Python object on its way."""


def state_of(generator: Any) -> Tensor:
    """As the program sees it; a generator of the host has the host's."""
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
    whole = bytes(packed.tolist())
    state.seed, state.offset = (int.from_bytes(part, "little") for part in (whole[:8], whole[8:]))


def seed_host(generator: Any, state: RandomState) -> None:
    """What the host's part of a generator draws next follows from its seed and its offset, which moves on."""
    HostGenerator.manual_seed(generator, _mixed(state.seed + _mixed(state.offset)))
    state.offset += STEP


def _mixed(number: int) -> int:
    """Numbers that lie close together, far apart (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31
