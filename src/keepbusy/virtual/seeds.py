"""Random states as a GPU has them: a seed and an offset in sixteen bytes, and each draw a function of both.

Programs take them apart: ranks that share a tensor draw each its part of it by an offset of its own. The host's
generator has another kind of state; before each draw it is seeded anew from these two numbers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C import Generator

_SIZE, _WORD = 16, 1 << 64
_STEP = 4
"""Numbers that one draw of a GPU's generator gives: offsets are multiples of it."""


class _State:
    __slots__ = ("offset", "seed")

    def __init__(self) -> None:
        self.seed = self.offset = 0


_OF: dict[int, _State] = {}
"""By the address of what is behind a generator: the dispatcher makes a new Python object on its way."""


def own(generator: Any) -> None:
    """From now on it has a seed and an offset."""
    _OF[generator._cdata] = _State()
    weakref.finalize(generator, _OF.pop, generator._cdata, None)


def state_of(generator: Any) -> Tensor:
    """As the program sees it; a generator of the host has the host's."""
    state = _OF.get(generator._cdata)
    if state is None:
        return Generator.get_state(generator)
    return torch.frombuffer(bytearray(_packed(state)), dtype=torch.uint8)


def _packed(state: _State) -> bytes:
    return state.seed.to_bytes(8, "little") + state.offset.to_bytes(8, "little")


def put_state(generator: Any, packed: Tensor) -> None:
    state = _OF.get(generator._cdata)
    if state is None:
        Generator.set_state(generator, packed)
        return
    if packed.dtype != torch.uint8 or packed.device.type != "cpu":
        raise TypeError("RNG state must be a torch.ByteTensor")
    if packed.numel() != _SIZE:
        raise RuntimeError("RNG state is wrong size")
    whole = bytes(packed.tolist())
    state.seed, state.offset = (int.from_bytes(part, "little") for part in (whole[:8], whole[8:]))


def seed_of(generator: Any) -> int:
    return _OF[generator._cdata].seed


def reseed(generator: Any, seed: int) -> None:
    state = _OF[generator._cdata]
    state.seed, state.offset = seed % _WORD, 0


def offset_of(generator: Any) -> int:
    return _OF[generator._cdata].offset


def put_offset(generator: Any, offset: int) -> None:
    if offset % _STEP:
        raise RuntimeError("offset must be a multiple of 4")
    _OF[generator._cdata].offset = offset


def aim(generator: Any) -> None:
    """Before it draws: what it draws follows from its seed and its offset, which moves on."""
    state = _OF.get(generator._cdata)
    if state is not None:
        Generator.manual_seed(generator, _mixed(state.seed + _mixed(state.offset)))
        state.offset += _STEP


def _mixed(number: int) -> int:
    """Numbers that lie close together, far apart (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) % _WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % _WORD
    return number ^ number >> 31
