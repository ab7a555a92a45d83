"""`keepbusy.prefetch` on a real GPU, where a batch that is overwritten too early has wrong values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import keepbusy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="needs a real GPU")

COUNT = 10_000
LATE = 400_000
"""Cycles, a fifth of a millisecond: more than the host takes for a batch, so it is far ahead of a loop that reads so
late, and the memory of batches is used again while they are still to be read."""
MADE = 97


def batches(count: int) -> Iterator[dict[str, Any]]:
    """Small ones that differ, made beforehand: packed, strided, and pinned and large enough to be copied directly."""
    made = [
        {
            "packed": torch.full((2048,), index),
            "turned": torch.full((64, 33), index, dtype=torch.uint8).t(),
            "pinned": torch.full((1 << 16,), float(index)).pin_memory(),
        }
        for index in range(MADE)
    ]
    yield from (made[index % MADE] for index in range(count))


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "packed": batch["packed"] * 2, "pinned": batch["pinned"] * 2}


def checksum(batch: dict[str, Any]) -> Any:
    return batch["packed"].sum() + batch["turned"].sum() + batch["pinned"].double().sum().long()


def wrong(loader: Any, count: int, scale: int = 1) -> int:
    """How many batches had other values when a delayed stream read them."""
    sums = torch.zeros(count, dtype=torch.int64, device="cuda")
    for index, batch in enumerate(loader):
        torch.cuda._sleep(LATE)
        sums[index] = checksum(batch)
        del batch
    expected = torch.arange(count) % MADE * ((2048 + (1 << 16)) * scale + 64 * 33)
    return int((sums.cpu() != expected).sum())


def naive(loader: Any) -> Iterator[Any]:
    """A copy stream without any guard, one batch ahead, as in many a training script."""
    side, ahead = torch.cuda.Stream(), None
    for batch in loader:
        with torch.cuda.stream(side):
            following = {name: one.to("cuda", non_blocking=True) for name, one in batch.items()}
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(side)
        ahead = following
    yield ahead


@pytest.mark.parametrize(("depth", "then", "scale"), [(2, None, 1), (1, None, 1), (2, doubled, 2)])
def test_no_batch_is_wrong_under_a_delayed_reader(depth: int, then: Callable[[Any], Any] | None, scale: int) -> None:
    assert wrong(keepbusy.prefetch(batches(COUNT), depth=depth, then=then), COUNT, scale) == 0


def refilled(count: int) -> Iterator[dict[str, Any]]:
    """Two megabytes in many tensors and a large one, by a loader that fills the same memory again and again."""
    batch = {f"column {index}": torch.empty(2048, dtype=torch.int64) for index in range(60)}
    batch["large"] = torch.empty(1 << 17, dtype=torch.int64)
    for index in range(count):
        torch._foreach_zero_(list(batch.values()))
        torch._foreach_add_(list(batch.values()), index % MADE)
        yield batch


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_what_threads_pack_is_right_under_a_delayed_reader(depth: int) -> None:
    """None is overwritten: by the next batch in pinned memory, by the loader, or on the device."""
    count = COUNT // 4
    sums = torch.zeros(count, dtype=torch.int64, device="cuda")
    for index, batch in enumerate(keepbusy.prefetch(refilled(count), depth=depth)):
        torch.cuda._sleep(4 * LATE)
        sums[index] = torch.cat(list(batch.values())).sum()
        del batch
    expected = torch.arange(count) % MADE * (60 * 2048 + (1 << 17))
    assert int((sums.cpu() != expected).sum()) == 0


class Numbered(torch.utils.data.Dataset):
    """What workers join: nothing is pinned, and each batch is made anew."""

    def __len__(self) -> int:
        return COUNT // 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "packed": torch.full((2048,), index % MADE),
            "turned": torch.full((64, 33), index % MADE, dtype=torch.uint8).t(),
            "pinned": torch.full((1 << 16,), float(index % MADE)),
        }


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"persistent_workers": True}])
def test_no_batch_of_workers_is_wrong_under_a_delayed_reader(options: dict[str, Any]) -> None:
    """Their buffers are filled again as soon as they are given back."""
    loader = torch.utils.data.DataLoader(Numbered(), batch_size=None, num_workers=4, **options)
    batches = keepbusy.prefetch(loader)
    for _ in range(2):
        assert wrong(batches, len(loader)) == 0


def test_the_same_reader_finds_a_naive_one_wrong() -> None:
    assert wrong(naive(batches(500)), 500) > 0


def test_batches_that_were_kept_stay_right() -> None:
    kept = list(keepbusy.prefetch(batches(300), depth=1))
    torch.cuda._sleep(LATE)
    assert [int(batch["packed"][0]) for batch in kept] == [index % MADE for index in range(300)]


def test_what_takes_the_memory_of_batches_that_nobody_got_is_not_overwritten() -> None:
    torch.cuda.synchronize()
    for index in range(200):
        iterator = iter(keepbusy.prefetch(torch.full((1 << 22,), 7.0).pin_memory() for _ in range(9)))
        next(iterator)
        del iterator
        mine = [torch.full((1 << 22,), float(index), device="cuda") for _ in range(4)]
        assert all(bool((one == index).all()) for one in mine)


def memory(loader: Callable[[int], Any], count: int, move: bool) -> tuple[int, int]:
    """The most that was allocated on the device beyond what was there, and what is pinned afterwards, in bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in loader(count):
        there = {name: one.to("cuda", non_blocking=True) for name, one in batch.items()} if move else batch
        torch.cuda._sleep(LATE)
        checksum(there)
        del batch, there
    torch.cuda.synchronize()
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return torch.cuda.max_memory_allocated() - before, int(stats.get("allocated_bytes.current", 0))


def test_memory_is_as_flat_as_the_plain_loops() -> None:
    size = sum(one.nbytes for one in next(batches(1)).values())
    plain, _ = memory(batches, 300, move=True)
    first, pinned = memory(lambda count: keepbusy.prefetch(batches(count)), 300, move=False)
    later, pinned_later = memory(lambda count: keepbusy.prefetch(batches(count)), 3_000, move=False)
    assert later <= first
    assert pinned_later <= pinned + 8 * size  # the loader's own pinned tensors come and go as events pass
    assert first <= plain + 3 * (size + 4096)


def losses(loader: Any, move: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for x, y in loader:
        there = (x.cuda(), y.cuda()) if move else (x, y)
        loss = torch.nn.functional.cross_entropy(model(there[0]), there[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def test_losses_are_those_of_the_plain_loop_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,))) for _ in range(500)]
    assert losses(keepbusy.prefetch(data), move=False) == losses(data, move=True)


def test_the_report_of_copies_that_the_compute_hides() -> None:
    loader = [torch.zeros(1 << 24).pin_memory()] * 30
    fetched = keepbusy.prefetch(loader)
    for _ in fetched:
        torch.cuda._sleep(20 * LATE)
    torch.cuda.synchronize()
    report = fetched.report()
    assert report.batches == 29
    assert report.hidden > 0.95, str(report)
