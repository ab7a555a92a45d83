"""What a captured graph saves on the device itself: the gap between kernels, and whole training steps.

    PYTHONPATH=benchmarks/stalls python benchmarks/gpu/graph_gap.py [--out FILE]      (needs a GPU)

The kernels of a chain stand ready behind a long one, so the host plays no part in what is timed.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "stalls"))
from models import TextClassifier, resnet

CHAIN, REPEATS = 400, 9


def milliseconds(work: Callable[[], object]) -> float:
    """Device time of work that stands ready: a spinning kernel holds the stream until all is enqueued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(60_000_000)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def median(work: Callable[[], object]) -> float:
    return statistics.median(milliseconds(work) for _ in range(REPEATS))


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def chains() -> dict[str, dict[str, float]]:
    rows = {}
    for name, elements in (("tiny", 1 << 10), ("4 MB", 1 << 20), ("64 MB", 1 << 24)):
        x = torch.zeros(elements, device="cuda")

        def chain(x: torch.Tensor = x) -> None:
            for _ in range(CHAIN):
                x.add_(1.0)

        graph = captured(chain)
        stream, replayed = median(chain), median(graph.replay)
        rows[f"add_ {name}"] = {
            "stream_us": stream / CHAIN * 1e3,
            "graph_us": replayed / CHAIN * 1e3,
            "saved_ns": (stream - replayed) / CHAIN * 1e6,
        }
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)

    def products() -> None:
        for _ in range(CHAIN // 2):
            torch.mm(a, a, out=b)
            b.mul_(0.5)

    graph = captured(products)
    stream, replayed = median(products), median(graph.replay)
    rows["mm, mul_ 512"] = {
        "stream_us": stream / CHAIN * 1e3,
        "graph_us": replayed / CHAIN * 1e3,
        "saved_ns": (stream - replayed) / CHAIN * 1e6,
    }
    return rows


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(8000, 1024), nn.LSTM(1024, 1024, 2), nn.Linear(1024, 8000)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(text))[0]).flatten(0, 1)


def steps() -> dict[str, dict[str, float]]:
    """Whole training steps, eager against captured, both as a loop runs them and without the host in the way."""
    images = torch.randn(256, 3, 176, 176, device="cuda").to(memory_format=torch.channels_last)
    cases = {
        "lstm": (Words().cuda(), torch.randint(0, 8000, (70, 128), device="cuda"), contextlib.nullcontext),
        "resnet": (resnet(96), images, bf16),
        "small transformer": (
            TextClassifier(width=256, layers=6, heads=4).cuda(),
            torch.randint(0, 8192, (16, 128), device="cuda"),
            bf16,
        ),
    }
    rows = {}
    for name, (model, x, context) in cases.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        y = torch.randint(0, 20, (x.numel() if name == "lstm" else len(x),), device="cuda")

        def step(model=model, x=x, y=y, optimizer=optimizer, context=context) -> None:
            optimizer.zero_grad(set_to_none=False)
            with context():
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        graph = captured(step)
        rows[name] = {
            "eager_ms": loop(step),
            "graph_ms": loop(graph.replay),
            "eager_device_ms": median(step),
            "graph_device_ms": median(graph.replay),
            "kernels": kernels(step),
        }
    return rows


def bf16() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def loop(work: Callable[[], object], count: int = 20) -> float:
    work()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def kernels(step: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in recorded.events())


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "chains": chains(), "steps": steps()}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text)
