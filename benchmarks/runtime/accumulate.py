"""`keepbusy.accumulate` against the loop that sends every time, Accelerate and Lightning Fabric: what travels.

    torchrun --nproc-per-node 2 benchmarks/runtime/accumulate.py --wrapper ddp [--out FILE] [--small]
    torchrun --nproc-per-node 2 benchmarks/runtime/accumulate.py --wrapper fsdp

Each contender trains a model of its own on the same micro-batches, four to an optimizer step, and takes turns with the
others. `bound` computes the same and sends nothing. Collectives are counted in a trace of one more group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from keepbusy.runtime.accumulate import accumulate

COUNT, REPEATS, GROUPS = 4, 5, 3
CUDA = torch.cuda.is_available()
Group = Callable[[], None]
"""Trains on one group of micro-batches."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Contest:
    """Sizes, and what all contenders share."""

    def __init__(self, small: bool, wrapper: str) -> None:
        self.width, self.layers, self.tokens = (32, 2, 8) if small else (4096, 6, 1024)
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
        self.wrapper = wrapper
        torch.manual_seed(dist.get_rank())
        self.batches = [torch.randn(self.tokens, self.width, device=self.device) for _ in range(COUNT)]

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        with self.device:
            return nn.Sequential(*[Block(self.width) for _ in range(self.layers)])

    def wrapped(self, **options: Any) -> nn.Module:
        if self.wrapper == "ddp":
            return DistributedDataParallel(self.model(), gradient_as_bucket_view=True)
        return sharded(self.model(), init_device_mesh(self.device.type, (dist.get_world_size(),)), **options)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return model(x).float().square().mean() / COUNT


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def stepping(contest: Contest, model: nn.Module, holding: Callable[[bool], Any] | None = None) -> Group:
    optimizer = contest.optimizer(model)

    def group() -> None:
        for place, x in enumerate(contest.batches):
            with holding(place < COUNT - 1) if holding else nullcontext():
                contest.loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return group


def naive(contest: Contest) -> Group:
    return stepping(contest, contest.wrapped())


def bound(contest: Contest) -> Group:
    return stepping(contest, contest.model())


def ours(contest: Contest, **options: Any) -> Group:
    model = contest.wrapped(**options)
    optimizer = contest.optimizer(model)

    def group() -> None:
        for micro in accumulate(model, contest.batches, count=COUNT):
            contest.loss(model, micro.batch).backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()

    return group


def accelerate(contest: Contest) -> Group:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    options = {"fsdp_plugin": plugin} if contest.wrapper == "fsdp" else {}
    accelerator = Accelerator(gradient_accumulation_steps=COUNT, cpu=not CUDA, **options)
    model = contest.model()
    model, optimizer = accelerator.prepare(model, contest.optimizer(model))

    def group() -> None:
        for x in contest.batches:
            with accelerator.accumulate(model):
                accelerator.backward(contest.loss(model, x) * COUNT)  # it divides by itself
                optimizer.step()
                optimizer.zero_grad()

    return group


def lightning(contest: Contest) -> Group:
    try:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
    except ModuleNotFoundError:  # it comes under two names
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    world = dist.get_world_size()
    strategy = DDPStrategy() if contest.wrapper == "ddp" else ModelParallelStrategy(_parallel, world, 1)
    fabric = Fabric(accelerator="cuda" if CUDA else "cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = contest.model()
    model, optimizer = fabric.setup(model, contest.optimizer(model))

    def group() -> None:
        for place, x in enumerate(contest.batches):
            with fabric.no_backward_sync(model, enabled=place < COUNT - 1):
                fabric.backward(contest.loss(model, x))
        optimizer.step()
        optimizer.zero_grad()

    return group


def _parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return sharded(model, mesh["data_parallel"])


def contenders(wrapper: str) -> dict[str, Callable[[Contest], Group]]:
    whole = {"keepbusy, weights kept whole": partial(ours, reshard_after_forward=False)} if wrapper == "fsdp" else {}
    peers = {"Accelerate": accelerate, "Lightning Fabric": lightning}
    alone = {"bound": bound} if wrapper == "ddp" else {}
    return {"naive": naive, "keepbusy.accumulate": ours, **whole, **peers, **alone}


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(group: Group) -> float:
    """Milliseconds a group."""
    dist.barrier()
    sync()
    began = time.perf_counter()
    for _ in range(GROUPS):
        group()
    sync()
    return (time.perf_counter() - began) / GROUPS * 1e3


def collectives(group: Group) -> dict[str, int]:
    """By name, of one group."""
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as recorded:
        group()
        sync()
    names = [one.name for one in recorded.events()]
    return dict(Counter(kind for name in names if (kind := _kind(name))))


def _kind(name: str) -> str:
    kernels = {"AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter", "AllGather": "all_gather"}
    if name.startswith("ncclDev"):
        return next((kind for part, kind in kernels.items() if part in name), "")
    return name.removeprefix("gloo:") if name.startswith("gloo:") else ""


def found_of(contest: Contest) -> Iterator[tuple[str, dict[str, Any]]]:
    ready, failed = {}, {}
    for name, make in contenders(contest.wrapper).items():
        try:
            ready[name] = make(contest)
            for _ in range(3):
                ready[name]()
        except Exception as error:
            failed[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            ready.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(REPEATS):
        for name, group in ready.items():
            times[name].append(timed(group))
    for name, group in ready.items():
        median, low, high = statistics.median(times[name]), min(times[name]), max(times[name])
        yield name, {"ms": median, "low": low, "high": high, "collectives": collectives(group)}
    yield from failed.items()


def line(name: str, one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"  {name:30} {one['failed']}"
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(one["collectives"].items()))
    return f"  {name:30} {one['ms']:8.2f} ms ({one['low']:.2f}-{one['high']:.2f})   {counts}"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--wrapper", choices=["ddp", "fsdp"], required=True)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--small", action="store_true", help="sizes for a machine without a GPU")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    rows = {}
    first = dist.get_rank() == 0
    if first:
        print(f"{options.wrapper} on {dist.get_world_size()} ranks, {COUNT} micro-batches a group", flush=True)
    for name, one in found_of(Contest(options.small, options.wrapper)):
        rows[name] = one
        if first:
            print(line(name, one), flush=True)
            if options.out:
                facts = {"ranks": dist.get_world_size(), "torch": torch.__version__, "rows": rows}
                options.out.write_text(json.dumps(facts, indent=1))
    dist.destroy_process_group()
