"""`keepbusy.prefetch` against a plain loop, its peers, and the bound. Needs a GPU, and three minutes.

    python benchmarks/runtime/prefetch.py --out prefetch.json
    keepbusy run benchmarks/runtime/prefetch.py --small     # whether it runs at all; its times mean nothing

A step computes for a known time; the copy of its batch takes 0.1 to 1.5 of that. The bound is the larger of the two,
measured in every repeat: a loop over batches that are on the GPU already, and copies of one flat pinned batch, back to
back. All get the same DataLoader over ready batches, of the memory that each is best with. Then a stream reads late,
and the batches are counted whose values had changed by then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

import keepbusy

RATIOS = (0.1, 0.5, 1.0, 1.5)
REPEATS = 5
WARM_UP, AHEAD = 4, 8
SECONDS = 0.15
"""About what one measurement takes."""
LATE = 400_000
"""Cycles, a fifth of a millisecond."""


class Ready(Dataset):
    """Batches that are made already, again and again."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


def loader(batches: list[Any], count: int) -> DataLoader:
    return DataLoader(Ready(batches, count), batch_size=1, collate_fn=lambda items: items[0])


# ways of bringing batches to the device


def plain(batches: DataLoader) -> Iterator[Any]:
    for batch in batches:
        yield tree_map(lambda one: one.to("cuda"), batch)


def non_blocking(batches: DataLoader) -> Iterator[Any]:
    for batch in batches:
        yield tree_map(lambda one: one.to("cuda", non_blocking=True), batch)


def naive(batches: DataLoader) -> Iterator[Any]:
    """A copy stream without any guard, one batch ahead, as in many a training script."""
    side, ahead = torch.cuda.Stream(), None
    for batch in batches:
        with torch.cuda.stream(side):
            following = tree_map(lambda one: one.to("cuda", non_blocking=True), batch)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(side)
        ahead = following
    yield ahead


def timm(batches: DataLoader) -> Iterable[Any]:
    from timm.data.loader import PrefetchLoader

    return PrefetchLoader(batches, (0.0,) * 3, (1 / 255,) * 3, device=torch.device("cuda"), img_dtype=torch.float32)


def pyg(batches: DataLoader) -> Iterable[Any]:
    from torch_geometric.loader import PrefetchLoader

    return PrefetchLoader(batches, device=torch.device("cuda"))


def lightning(batches: DataLoader) -> Iterable[Any]:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cuda", devices=1).setup_dataloaders(batches)


def accelerate(batches: DataLoader) -> Iterable[Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True)).prepare(batches)


Way = tuple[Callable[[DataLoader], Iterable[Any]], bool]
"""And whether its batches come pinned."""
IMAGES: dict[str, Way] = {
    "plain loop": (plain, False),
    "pinned, non_blocking": (non_blocking, True),
    "timm": (timm, True),
    "PyG": (pyg, True),
    "Lightning": (lightning, True),
    "Accelerate": (accelerate, True),
    "keepbusy": (keepbusy.prefetch, True),
    "keepbusy, pageable": (keepbusy.prefetch, False),
}
FEATURES = {name: way for name, way in IMAGES.items() if name != "timm"}  # it takes images and targets alone


class Work:
    """What the data are needed for: matrix products that take as long as asked."""

    def __init__(self, small: bool) -> None:
        self.small, width = small, 64 if small else 2048
        self.a = torch.randn(width, width, device="cuda", dtype=torch.bfloat16) * 0.01
        self.out, self.seen = torch.empty_like(self.a), torch.zeros((), device="cuda")
        self.one = min(self._time(20 if small else 200) for _ in range(3))
        self.count = 1

    def lasting(self, seconds: float) -> Work:
        self.count = 1 if self.small else max(1, round(seconds / self.one))
        return self

    def __call__(self, batch: Any) -> None:
        while not isinstance(batch, torch.Tensor):  # the first leaf; to flatten 500 takes half a millisecond
            batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
        self.seen += batch.view(-1)[0]
        for _ in range(self.count):
            torch.mm(self.a, self.a, out=self.out)

    def _time(self, count: int) -> float:
        return timed(lambda: [torch.mm(self.a, self.a, out=self.out) for _ in range(count)]) / count


def timed(does: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    does()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_time(batches: Iterable[Any], work: Work, steps: int) -> float:
    """The loader has more batches than these: what is fetched ahead at the end was fetched ahead at the start."""
    start = 0.0
    for index, batch in enumerate(islice(batches, WARM_UP + steps)):
        if index == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        work(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def copy_time(batch: Any, count: int = 20) -> float:
    """Of the whole batch in one piece, back to back: no way of copying is faster."""
    size = sum(one.nbytes for one in tree_leaves(batch))
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    target.copy_(source)
    return timed(lambda: [target.copy_(source, non_blocking=True) for _ in range(count)]) / count


def compare(ways: dict[str, Way], batches: list[Any], ratio: float, work: Work, small: bool) -> dict[str, Any]:
    """Times of a step, interleaved. `compute` is the loop over batches that are there already."""
    pinned = [tree_map(lambda one: one.pin_memory(), batch) for batch in batches]
    resident = [tree_map(lambda one: one.cuda(), batch) for batch in batches]
    expected = copy_time(batches[0]) / ratio
    work.lasting(expected)
    steps = 2 if small else max(10, min(30, round(SECONDS / expected)))
    count = WARM_UP + steps + AHEAD
    times: dict[str, list[float]] = {"copy": [], "compute": [], **{name: [] for name in ways}}
    failed: dict[str, str] = {}
    for _ in range(1 if small else REPEATS):
        times["copy"].append(copy_time(batches[0]))
        times["compute"].append(step_time(loader(resident, count), work, steps))
        for name, (way, wants_pinned) in ways.items():
            try:
                times[name].append(step_time(way(loader(pinned if wants_pinned else batches, count)), work, steps))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    bound = max(statistics.median(times["copy"]), statistics.median(times["compute"]))
    return {"ratio": ratio, "bound": bound, "seconds": {name: one for name, one in times.items() if one}} | (
        {"failed": failed} if failed else {}
    )


def wrong(way: Callable[[DataLoader], Iterable[Any]], count: int) -> int:
    """How many batches had other values when a stream that is late read them."""
    values = [(torch.full((16, 3, 32, 32), float(n)), torch.full((16,), n)) for n in range(97)]
    pinned = [tree_map(lambda one: one.pin_memory(), batch) for batch in values]
    sums = torch.zeros(count, 2, device="cuda", dtype=torch.float64)
    for index, (images, targets) in enumerate(way(loader(pinned, count))):
        torch.cuda._sleep(LATE)
        sums[index, 0], sums[index, 1] = images.double().mean(), targets.double().mean()
        del images, targets
    return int((sums.cpu() != (torch.arange(count) % 97)[:, None]).any(dim=1).sum())


def rows(result: dict[str, Any]) -> Iterator[str]:
    bound = result["bound"]
    yield f"copy/compute {result['ratio']}: bound {bound * 1e3:.3f} ms"
    for name, times in result["seconds"].items():
        middle, low, high = (of(times) * 1e3 for of in (statistics.median, min, max))
        over = middle / bound / 1e3 - 1
        yield f"  {name:22s} {middle:8.3f} ms ({low:.3f}–{high:.3f}) {over:+8.1%}"
    yield from (f"  {name}: {error}" for name, error in result.get("failed", {}).items())


def images(small: bool) -> list[Any]:
    return [(torch.randn(2 if small else 128, 3, 224, 224), torch.zeros(8, dtype=torch.int64)) for _ in range(2)]


def features(small: bool) -> list[Any]:
    """A recommender's: 500 columns of ids and values, for 8192 examples."""
    rows = 64 if small else 8192
    column = (lambda: torch.randint(0, 99, (rows,)), lambda: torch.randn(rows), lambda: torch.randn(rows, 2))
    return [{f"feature {index}": column[index % 3]() for index in range(20 if small else 500)} for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": {}}

    def keep(name: str, result: Any) -> None:
        found["results"][name] = result
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1))

    for name, way in {"naive": naive, **{name: way for name, (way, pinned) in IMAGES.items() if pinned}}.items():
        try:
            keep(f"wrong: {name}", wrong(way, 50 if asked.small else 1500))
        except Exception as error:
            keep(f"wrong: {name}", f"{type(error).__name__}: {error}")
        print(f"wrong batches, {name}: {found['results'][f'wrong: {name}']}", flush=True)
    work = Work(asked.small)
    for name, ways, make in (("images", IMAGES, images), ("features", FEATURES, features)):
        batches = make(asked.small)
        for ratio in RATIOS:
            result = compare(ways, batches, ratio, work, asked.small)
            keep(f"{name} {ratio}", result)
            print(name, *rows(result), sep="\n", flush=True)


if __name__ == "__main__":
    main()
