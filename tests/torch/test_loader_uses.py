"""What is known of the loaders of a program that is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from keepbusy.program.loader_uses import KEPT_ITERATIONS, Loaders

MS = 1_000_000


def watched(loader: Iterable[object], loaders: Loaders, clock: Callable[[], int]) -> Iterator[object]:
    """Its batches, each told as it comes."""
    iterator, nothing = iter(loader), object()
    while True:
        before = clock()
        batch = next(iterator, nothing)
        if batch is nothing:
            return
        loaders.batch_taken(iterator, before, clock())
        yield batch


def test_of_very_many_turns_a_loader_keeps_means_of_neighbours() -> None:
    """Every turn that waits for nothing takes 5 ms, but each 100th takes 2 s."""
    now = [0]
    loaders = Loaders(clock=lambda: now[0])
    loaders.begin()
    try:
        for number, _ in enumerate(watched(DataLoader(range(3 * KEPT_ITERATIONS)), loaders, lambda: now[0])):
            now[0] += 2_000 * MS if number % 100 == 0 else 5 * MS
    finally:
        loaders.end()
    [use] = loaders.used()
    counts = use.batches, use.passes, use.each, len(use.turns)
    assert counts == (3 * KEPT_ITERATIONS, 1, 4, (3 * KEPT_ITERATIONS - 1) // 4)
    assert use.iteration == 5 * MS
    assert max(use.turns) == (2_000 + 3 * 5) * MS // 4


class OwnFiles(IterableDataset):  # type: ignore[type-arg]
    """Each worker reads files of its own, and there are two."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        about = get_worker_info()
        assert about is not None
        return iter(torch.ones(6 if about.id < 2 else 0, 3))


def test_workers_that_gave_batches_are_counted() -> None:
    loaders = Loaders(clock=time.perf_counter_ns)
    loaders.begin()
    try:
        loader = DataLoader(OwnFiles(), num_workers=3, batch_size=2)
        assert len([*watched(loader, loaders, time.perf_counter_ns)]) == 6
    finally:
        loaders.end()
    [use] = loaders.used()
    assert (use.workers, use.busy, use.idle, use.batches) == (3, 2, 1, 6)
