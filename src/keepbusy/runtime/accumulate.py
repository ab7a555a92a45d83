"""`accumulate`: several micro-batches to an optimizer step, and gradients that travel once.

    for micro in keepbusy.accumulate(model, loader, count=4):
        loss = criterion(model(micro.batch))
        (loss * micro.scale).backward()
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()

The division is the caller's: `scale` is one over the number of micro-batches of the group, also of a last one that is
short. Wrappers go on averaging over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

from keepbusy.runtime.deferral import Deferral

T = TypeVar("T")


class Micro(NamedTuple, Generic[T]):
    """A micro-batch, and its place in the group that makes one optimizer step."""

    batch: T
    scale: float
    last: bool


def accumulate(
    model: torch.nn.Module, batches: Iterable[T], *, count: int, keep_sharded: bool = False
) -> Iterator[Micro[T]]:
    """The batches in groups of `count`; the model's gradients travel between ranks with the last of each group.

    The model is a plain module, or is or holds DDP, FSDP2 or HSDP; that its gradients waited and then travelled is
    verified, and `NotDeferred` says what kept them. `keep_sharded` is for HSDP: gradients are scattered at every
    micro-batch, which keeps them small, and only the reduction between replicas waits.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accumulate got a {type(model).__name__} for its model; give it the torch.nn.Module in it")
    if count < 1:
        raise ValueError(f"accumulate got count={count}; a group has at least one micro-batch")
    return _deferred(Deferral(model, keep_sharded), batches, count)


def _deferred(deferral: Deferral, batches: Iterable[T], count: int) -> Iterator[Micro[T]]:
    with deferral:
        for micro in _grouped(batches, count):
            deferral.begin(micro.last)
            yield micro
            deferral.end()


def _grouped(batches: Iterable[T], count: int) -> Iterator[Micro[T]]:
    try:
        total = len(batches)  # type: ignore[arg-type]
    except TypeError:
        return _of_unknown_length(batches, count)
    return _of_known_length(batches, count, total)


def _of_known_length(batches: Iterable[T], count: int, total: int) -> Iterator[Micro[T]]:
    place, last = -1, True
    for place, batch in enumerate(batches):
        before = place % count
        size = min(count, total - place + before) if place < total else count
        last = before == size - 1
        yield Micro(batch, 1 / size, last)
    if not last:
        raise RuntimeError(
            f"accumulate counted on len(batches) = {total} and got {place + 1}, so the gradients of the last "
            f"{place % count + 1} have not travelled; give it an iterable without a length, or with the right one"
        )


def _of_unknown_length(batches: Iterable[T], count: int) -> Iterator[Micro[T]]:
    """One batch is taken ahead, to know which is the last. That its group is short is known too late for `scale`."""
    ahead, nothing = iter(batches), object()
    following, place = next(ahead, nothing), 0
    while following is not nothing:
        batch, following = following, next(ahead, nothing)
        last = place % count == count - 1 or following is nothing
        yield Micro(batch, 1 / count, last)  # type: ignore[arg-type]
        place += 1
