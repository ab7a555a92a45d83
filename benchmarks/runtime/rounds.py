"""What the benchmarks of this folder share: variants take turns, and what they found is written down."""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

REPEATS = int(os.environ.get("BENCH_REPEATS", "5"))


def milliseconds(work: Callable[[], object], count: int = 1) -> float:
    """Of one of `count` steps that `work` does, to the moment when the device has done them too."""
    gc.collect()  # nobody pays for what the one before left behind
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def take_turns(variants: dict[str, Callable[[], float]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """All variants `repeats` times, one after the other, after a round to warm up. One that fails is left out."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + repeats):
        for name in list(found):
            try:
                found[name].append(variants[name]())
            except Exception as error:
                print(f"left out: {name}: {type(error).__name__}: {error}")
                del found[name]
    return {name: times[1:] for name, times in found.items()}


def show(title: str, found: dict[str, list[float]], bound: str) -> None:
    """A row a variant: median, spread, and what it costs over the bound."""
    base = statistics.median(found[bound])
    print(f"\n{title}")
    for name, times in found.items():
        median = statistics.median(times)
        print(
            f"  {name:28} {median:9.3f} ms   {min(times):9.3f} to {max(times):9.3f}   "
            f"{median - base:+9.3f} ms  {(median / base - 1) * 100:+6.1f}%"
        )


def write(name: str, found: object) -> None:
    folder = Path(os.environ.get("OUT", "."))
    about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "repeats": REPEATS}
    (folder / f"{name}.json").write_text(json.dumps({**about, "found": found}, indent=1))
