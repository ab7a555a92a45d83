"""What CUDA graphs cost the host, and how many may be pending: figures for the device file.

python benchmarks/gpu/graph_costs.py [--out FILE]      (needs a GPU)
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch


def chain(x: torch.Tensor, length: int) -> tuple[torch.cuda.CUDAGraph, dict[str, float]]:
    """A graph of so many small kernels, and what capturing and instantiating them took."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        began = time.perf_counter()
        for _ in range(length):
            x.add_(1.0)
        captured = time.perf_counter()
        graph.capture_end()
        ended = time.perf_counter()
    return graph, {"capture_us": (captured - began) * 1e6, "end_us": (ended - captured) * 1e6}


def launch(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Of a replay on an idle device: what the call takes, and until the device has done it."""
    calls, whole = [], []
    first = None
    for _ in range(60):
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        called = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        first = (called - began) * 1e6 if first is None else first
        calls.append((called - began) * 1e6)
        whole.append((ended - began) * 1e6)
    return {"first_us": first, "call_us": statistics.median(calls), "whole_us": statistics.median(whole)}


def device_time(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds on the device where the host plays no part."""
    found = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def pending(graph: torch.cuda.CUDAGraph, most: int = 1500) -> int:
    """How many replays go in behind a kernel that spins before one takes more than a millisecond."""
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    for count in range(most):
        began = time.perf_counter()
        graph.replay()
        if time.perf_counter() - began > 1e-3 and count > 3:
            torch.cuda.synchronize()
            return count
    torch.cuda.synchronize()
    return most


def eager(x: torch.Tensor, length: int = 400) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(length):
        x.add_(1.0)
    return (time.perf_counter() - began) / length * 1e6


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    x = torch.zeros(1024, device="cuda")
    chain(x, 10)
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "eager_us": eager(x), "graphs": {}}
    for length in (1, 10, 100, 400, 1000, 3000):
        graph, made = chain(x, length)
        launched = launch(graph)
        found["graphs"][length] = {
            **made,
            **launched,
            "device_us": device_time(graph),
            "pending": pending(graph, 1500 if length < 400 else 200),
        }
        print(length, found["graphs"][length], flush=True)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
