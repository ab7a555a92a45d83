"""Moving the values of a collective: at once, or when the replay of a graph gets there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from keepbusy.virtual.machine import MACHINE
from keepbusy.virtual.recording import lasting
from keepbusy.virtual.tensors import map_tensors


def exchange(does: Callable[..., Any], tensors: list[Any]) -> None:
    """Let values move between ranks, and wait until they have."""
    done = does(*tensors)
    if done is not None:
        done.wait()


def at_replay(does: Callable[..., Any], tensors: list[Any], meet: Callable[[int], int]) -> Callable[[int], int]:
    """A captured collective moves nothing. When a replay gets there, it does, and then the ranks meet."""
    held = [map_tensors(lasting, detached(one)) for one in tensors]
    move = partial(exchange, does, held)
    move_then = move if MACHINE.recording is None else MACHINE.recording.later(move)

    def meet_later(mine: int) -> int:
        move_then()
        return meet(mine)

    return meet_later


def detached(value: Any) -> Any:
    """Tensors in nested lists, apart from autograd."""
    if isinstance(value, Tensor):
        return value.detach()
    return [detached(one) for one in value]
