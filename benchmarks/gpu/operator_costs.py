"""What operators cost on a real GPU and its host: the figures that the virtual one is held against.

    python benchmarks/gpu/operator_costs.py --out FILE.json          (needs a GPU; two minutes)
    keepbusy run --values none benchmarks/gpu/operator_costs.py      (the same calls on the virtual GPU)

Host times come first, with no profiler near: a call's share of a row of calls whose kernels are
too short to matter. Kernels come from a profiler's trace, each call by itself.
"""

import argparse
import contextlib
import gc
import gzip
import json
import platform
import statistics
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from calls import Call
from host_calls import host, work
from kernel_calls import kernels

ROW, BATCHES, TIMES = 40, 5, 3


def host_time(label: str, prepare) -> float:
    """Nanoseconds a call, the best of the usual ones: the median of the batches."""
    call = prepare()
    for _ in range(3):
        call()
    spent = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        with record_function(f"host: {label}"):
            begun = time.perf_counter_ns()
            for _ in range(ROW):
                call()
            spent.append((time.perf_counter_ns() - begun) / ROW)
    torch.cuda.synchronize()
    return statistics.median(spent)


def work_time(prepare) -> float:
    call = prepare()
    call()
    spent = []
    for _ in range(BATCHES):
        begun = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - begun)
    return statistics.median(spent)


def run_kernels(calls: list[Call]) -> None:
    for label, prepare in calls:
        with skipped(label):
            call = prepare()
            call()
            for _ in range(TIMES):
                torch.cuda.synchronize()
                with record_function(f"kernels: {label}"):
                    call()
                    torch.cuda.synchronize()
            del call


@contextlib.contextmanager
def skipped(label: str):
    """What this build of PyTorch refuses is left out, and named."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError) as error:
        print(f"left out: {label} ({str(error).splitlines()[0]})")


def host_times() -> dict[str, float]:
    found = {}
    for label, prepare in host():
        with skipped(label):
            found[label] = host_time(label, prepare)
    return found


def traced(calls: list[Call], folder: Path) -> dict[str, list]:
    """Of each call the kernels of its median run: names and nanoseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run_kernels(calls)
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    device = sorted(
        (one["ts"], one["name"], one["dur"])
        for one in events
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    found = defaultdict(list)
    for one in events:
        if one.get("cat") == "user_annotation" and one["name"].startswith("kernels: "):
            begin, end = one["ts"], one["ts"] + one["dur"]
            among = device[bisect_left(device, (begin,)) : bisect_left(device, (end,))]
            inside = [[name[:60], round(dur * 1e3)] for _, name, dur in among]
            found[one["name"].removeprefix("kernels: ")].append(inside)
    return {
        label: sorted(runs, key=lambda run: sum(ns for _, ns in run))[len(runs) // 2] for label, runs in found.items()
    }


def copies() -> dict[str, float]:
    """Microseconds that the host spends in a copy, by way and size."""
    found = {}
    for size in (64, 1 << 12, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        there, here = torch.empty(size, dtype=torch.uint8, device="cuda"), torch.ones(size, dtype=torch.uint8)
        pinned = here.pin_memory()
        ways = {
            "pageable to device": lambda: there.copy_(here),
            "pageable to device, not blocking": lambda: there.copy_(here, non_blocking=True),
            "pinned to device": lambda: there.copy_(pinned),
            "device to pageable, again": lambda: here.copy_(there),
            "device to new memory": lambda: there.cpu(),
            "device to pinned": lambda: pinned.copy_(there),
            "pin": lambda: here.pin_memory(),
        }
        for name, does in ways.items():
            spent = []
            for _ in range(3 if size > 1 << 24 else 7):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                kept = does()
                spent.append((time.perf_counter() - begun) * 1e6)
                del kept
                torch.cuda.synchronize()
            found[f"{name} {size}"] = statistics.median(spent)
    return found


def driver() -> dict[str, float]:
    """Microseconds of cudaMalloc and cudaFree by size, and of launching a graph by its nodes."""
    found = {}
    for megabytes in (2, 20, 64, 256, 1024, 4096):
        made, freed = [], []
        for _ in range(5):
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            held = [torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
            between = time.perf_counter()
            del held
            again = time.perf_counter()
            torch.cuda.empty_cache()
            made.append((between - begun) / 4 * 1e6)
            freed.append((time.perf_counter() - again) / 4 * 1e6)
        found[f"cudaMalloc {megabytes} MB"] = statistics.median(made)
        found[f"cudaFree {megabytes} MB"] = statistics.median(freed)
    x = torch.zeros(64, device="cuda")
    for nodes in (10, 100, 1000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                x.add_(1.0)
        graph.replay()
        spent = []
        for _ in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            graph.replay()
            spent.append((time.perf_counter() - begun) * 1e6)
        found[f"graph of {nodes}"] = statistics.median(spent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="measure a real GPU, and write what was found")
    options = parser.parse_args()
    calls = list(kernels())
    gc.disable()
    if options.out is None:  # the virtual GPU: its clock knows what everything took
        host_times()
        run_kernels(calls)
        return
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }

    def keep(name: str, measure) -> None:
        begun = time.perf_counter()
        try:
            found[name] = measure()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        options.out.write_text(json.dumps(found))
        print(f"{name:12s} {time.perf_counter() - begun:6.1f} s", flush=True)

    keep("host", host_times)
    keep("again", host_times)
    keep("work", lambda: {label: work_time(prepare) for label, prepare in work()})
    torch.set_num_threads(1)
    keep("work_alone", lambda: {label: work_time(prepare) for label, prepare in work()})
    keep("copies", copies)
    keep("driver", driver)
    with tempfile.TemporaryDirectory() as folder:
        keep("kernels", lambda: traced(calls, Path(folder)))
    with gzip.open(f"{options.out}.gz", "wt") as packed:
        packed.write(json.dumps(found))
    first = {one: found["host"].get(one) for one in ("add", "mul_", "linear half", "linears half", "item", "view")}
    print({name: None if ns is None else round(ns / 1e3, 1) for name, ns in first.items()})


if __name__ == "__main__":
    main()
