"""What operators on the host's own tensors take, a thread and all of them: `[host]` in the device files goes by it.

    python benchmarks/gpu/host_operators.py [FOLDER]

Prints nanoseconds an element, and writes host_operators.json into the folder. Half a minute; no GPU is used.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

SMALL, PICTURE, BATCH = 16, 3 * 224 * 224, 64 * 3 * 224 * 224
REPEATS, LONGEST = 15, 0.4


def cases(size: int) -> dict[str, Callable[[], Any]]:
    """Each works on so many elements."""
    x, y = torch.rand(size), torch.rand(size)
    pixels, picture = torch.randint(0, 256, (size,), dtype=torch.uint8), x.view(1, 1, -1, 16)
    tokens, places = torch.randint(0, 4096, (size,)), torch.randperm(size)
    rows = list(x.view(-1, max(1, size // 64))) if size >= 64 else [x, y]
    return {
        "empty": lambda: torch.empty(size),
        "zeros": lambda: torch.zeros(size),
        "rand": lambda: torch.rand(size),
        "randn": lambda: torch.randn(size),
        "randint": lambda: torch.randint(0, 4096, (size,)),
        "randperm": lambda: torch.randperm(size),
        "bernoulli": lambda: torch.bernoulli(y.clamp(0, 1)),
        "multinomial": lambda: torch.multinomial(y.abs() + 1e-3, 8),
        "view": lambda: x.view(-1, 4),
        "slice": lambda: x[1 : size // 2],
        "add": lambda: x + y,
        "mul_ in place": lambda: x.mul_(1.0),
        "sqrt": x.sqrt,
        "where": lambda: torch.where(tokens > 2000, tokens, 0),
        "bytes to float": lambda: pixels.to(torch.float32),
        "float to half": lambda: x.to(torch.bfloat16),
        "clone": x.clone,
        "stack of rows": lambda: torch.stack(rows),
        "flip": lambda: picture.flip(-1).contiguous(),
        "roll": lambda: x.roll(7),
        "sum": x.sum,
        "argmax": lambda: x.view(-1, 16).argmax(-1),
        "gather": lambda: x[places],
        "sort": x.sort,
        "avg_pool 3x3": lambda: functional.avg_pool2d(picture, 3, 1, 1),
        "resize": lambda: functional.interpolate(
            picture, scale_factor=1.0, mode="bilinear", recompute_scale_factor=False
        ),
        "conv 3x3": lambda: functional.conv2d(picture, torch.ones(1, 1, 3, 3), padding=1),
        "pin_memory": lambda: x.pin_memory() if torch.cuda.is_available() else x.clone(),
    }


def time_of(call: Callable[[], Any]) -> float:
    """Median of nanoseconds, after a first call."""
    call()
    spent: list[float] = []
    while len(spent) < REPEATS and sum(spent) < LONGEST * 1e9:
        began = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - began)
    return statistics.median(spent)


def product(size: int) -> float:
    one = torch.rand(size, size)
    return 2 * size**3 / time_of(lambda: one @ one)


def main(folder: str = ".") -> None:
    threads = torch.get_num_threads()
    found: dict[str, dict[str, float]] = {}
    for count in (1, threads):
        torch.set_num_threads(count)
        for size in (SMALL, PICTURE, BATCH):
            for name, call in cases(size).items():
                found.setdefault(name, {})[f"{size} x{count}"] = time_of(call)
        found.setdefault("product, GFLOP/s", {})[f"1024 x{count}"] = product(1024)
    facts = {"torch": torch.__version__, "threads": threads, "nanoseconds": found}
    Path(folder, "host_operators.json").write_text(json.dumps(facts, indent=1))
    for name, times in found.items():
        shown = [f"{at}: {t / 1e3:9.1f} us {t / int(at.split()[0]):7.2f} ns/el" for at, t in times.items()]
        print(f"{name:18}", " | ".join(shown))


if __name__ == "__main__":
    main(*sys.argv[1:])
