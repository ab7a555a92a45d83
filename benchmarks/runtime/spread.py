"""`keepbusy.spread` against hand-written DDP, FSDP2 and tensor parallelism, Accelerate, Lightning Fabric and DeepSpeed.

    torchrun --nproc-per-node 2 benchmarks/runtime/spread.py [--out FILE] [--small]

First each layout trains a small model for a few steps, and its losses are held against those of one GPU. Then, layout
by layout, the contenders train a GPT of 0.4 billion parameters on the same batches, in turns. The lines of each are
those that it needs beyond the loop of one GPU. It takes some two minutes; what was found is written layout by layout.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from keepbusy.runtime.spread.spread_model import spread

CUDA = torch.cuda.is_available()
REPEATS, STEPS = 7, 3
Step = Callable[[], Any]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = 64 if width > 64 else 8
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        return self.query(x), self.key(x), self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        heads = [one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in self.projected(x)]
        return self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class PackedAttention(Attention):
    """One layer makes queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.query, self.key, self.value
        self.packed = nn.Linear(width, 3 * width)

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        return self.packed(x).chunk(3, -1)


class Block(nn.Module):
    def __init__(self, width: int, packed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PackedAttention(width) if packed else Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, words: int, packed: bool) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, packed) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Layout:
    """What `spread` is asked for, and who else does it."""

    shard: int
    tensor: int | None
    peers: Mapping[str, Any]
    plan: str = "auto"
    packed: bool = False


class Contest:
    """Sizes, and what one GPU would need."""

    def __init__(self, small: bool) -> None:
        self.width, self.layers, self.words = (32, 2, 64) if small else (2048, 7, 16384)
        self.rows, self.length = (2, 16) if small else (8, 1024)
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
        self.batches: list[Tensor] = []

    def draw(self, part: int) -> None:
        """Ranks of one part of the data have the same."""
        generator = torch.Generator(self.device).manual_seed(part)
        shape = (self.rows, self.length)
        self.batches = [torch.randint(self.words, shape, generator=generator, device=self.device) for _ in range(STEPS)]

    def fresh(self, packed: bool = False) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with self.device:
            model = GPT(self.width, self.layers, self.words, packed)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    def stepping(self, model: nn.Module, optimizer: Any, backward: Any = Tensor.backward) -> Step:
        def steps() -> Tensor:
            for x in self.batches:
                loss = self.loss(model, x)
                backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return steps


def ours(contest: Contest, layout: Layout) -> Step:
    model, optimizer = contest.fresh(layout.packed)
    given = {"shard": layout.shard, "tensor": layout.tensor, "plan": layout.plan}
    return contest.stepping(*spread(model, optimizer, example=contest.batches[0], **given))


def ddp(contest: Contest, _layout: Layout) -> Step:
    model, optimizer = contest.fresh()
    model = DistributedDataParallel(model, [contest.device.index] if CUDA else None, gradient_as_bucket_view=True)
    return contest.stepping(model, optimizer)


def redundancy(contest: Contest, _layout: Layout) -> Step:
    model, optimizer = contest.fresh()
    model = DistributedDataParallel(model, [contest.device.index] if CUDA else None, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=CUDA
    )
    return contest.stepping(model, optimizer)


def fsdp(contest: Contest, layout: Layout) -> Step:
    model, optimizer = contest.fresh()
    mesh = init_device_mesh(contest.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=layout.shard == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    return contest.stepping(model, optimizer)


def by_dtensor(contest: Contest, layout: Layout) -> Step:
    model, optimizer = contest.fresh()
    shape = (dist.get_world_size() // layout.tensor, layout.tensor)
    mesh = init_device_mesh(contest.device.type, shape, mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        if layout.shard:
            fully_shard(block, mesh=mesh["data"], reshard_after_forward=layout.shard == 3)
    if layout.shard:
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    cut = [one for one in model.parameters() if getattr(one, "device_mesh", None) in (mesh, mesh["tensor"])]
    rest = [one for one in model.parameters() if not any(one is other for other in cut)]  # two kinds do not mix
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": rest}], lr=1e-4, fused=CUDA)
    return contest.stepping(model, optimizer)


def by_dtensor_pieces(contest: Contest, layout: Layout) -> Step:
    """As PyTorch's tutorial on tensor parallelism does it; it cuts embeddings and head, too."""
    model, optimizer = contest.fresh()
    mesh = init_device_mesh(contest.device.type, (layout.tensor,))
    piece, whole = Shard(1), Replicate()
    ends = {"words": RowwiseParallel(input_layouts=whole, output_layouts=piece), "norm": SequenceParallel()}
    parallelize_module(model, mesh, ends | {"head": ColwiseParallel(input_layouts=piece, output_layouts=whole)})
    for block in model.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"first": SequenceParallel(), "second": SequenceParallel()}
        plan["attention"] = PrepareModuleInput(input_layouts=piece, desired_input_layouts=whole)
        plan |= {"attention.out": RowwiseParallel(output_layouts=piece), "up": ColwiseParallel(input_layouts=piece)}
        parallelize_module(block, mesh, plan | {"down": RowwiseParallel(output_layouts=piece)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    return contest.stepping(model, optimizer)


def accelerate(contest: Contest, layout: Layout) -> Step:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model, optimizer = contest.fresh()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.shard == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=not CUDA, **({"fsdp_plugin": plugin} if layout.shard else {}))
    model, optimizer = accelerator.prepare(model, optimizer)
    return contest.stepping(model, optimizer, accelerator.backward)


def fabric(contest: Contest, layout: Layout) -> Step:
    try:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
    except ModuleNotFoundError:  # it comes under two names
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    def parallel(model: Any, mesh: Any) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=layout.shard == 3)
        return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)

    ranks = dist.get_world_size()
    strategy = ModelParallelStrategy(parallel, ranks, 1) if layout.shard else DDPStrategy(gradient_as_bucket_view=True)
    run = Fabric(accelerator="cuda" if CUDA else "cpu", devices=ranks, strategy=strategy)
    run.launch()
    model, optimizer = contest.fresh()
    if layout.shard:  # `setup` of both leaves the optimizer with parameters that are no longer there
        model = run.setup_module(model)
        optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA))
    else:
        model, optimizer = run.setup(model, optimizer)
    return contest.stepping(model, optimizer, run.backward)


def deepspeed(contest: Contest, layout: Layout) -> Step:
    import deepspeed as ds

    model, optimizer = contest.fresh()
    config = {
        "train_micro_batch_size_per_gpu": contest.rows,
        "zero_optimization": {"stage": layout.shard},
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def steps() -> Tensor:
        for x in contest.batches:
            loss = contest.loss(engine, x)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return steps


SHARDING = {"FSDP2": fsdp, "Accelerate": accelerate, "Lightning Fabric": fabric, "DeepSpeed": deepspeed}
LAYOUTS: dict[str, Layout] = {
    "tensor=2": Layout(0, 2, {"DTensor": by_dtensor}),
    'tensor=2, plan="sequence"': Layout(0, 2, {"DTensor": by_dtensor_pieces}, "sequence"),
    "tensor=2, packed": Layout(0, 2, {}, packed=True),
    'tensor=2, packed, plan="sequence"': Layout(0, 2, {}, "sequence", packed=True),
    "shard=1": Layout(1, None, {"ZeroRedundancyOptimizer": redundancy, "DeepSpeed": deepspeed}),
    "shard=0": Layout(0, None, {"DDP": ddp, "Accelerate": accelerate, "Lightning Fabric": fabric}),
    "shard=2": Layout(2, None, SHARDING),
    "shard=3": Layout(3, None, SHARDING),
    "shard=2, tensor=2": Layout(2, 2, {"FSDP2 and DTensor": by_dtensor}),
    "shard=3, tensor=2": Layout(3, 2, {"FSDP2 and DTensor": by_dtensor}),
}


def layouts() -> dict[str, Layout]:
    """Those that these ranks can have: two of them cannot share both batches and layers."""
    ranks = dist.get_world_size()
    return {name: one for name, one in LAYOUTS.items() if not one.tensor or bool(one.shard) == (ranks > 2)}


def lines_of(make: Callable[..., Step]) -> int:
    """Of setting up: all but the signature, the model and optimizer of one GPU, and handing over; of imports too."""
    source = [line for line in inspect.getsource(make).splitlines() if line.strip()]
    return len(source) - 3


def worst_loss(device: torch.device, layout: Layout) -> tuple[float, float]:
    """The largest difference of four losses from those of one process, in 32 bits; and the first loss."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = GPT(64, 3, 64, layout.packed).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def losses(model: nn.Module, optimizer: Any, batches: Any) -> list[Tensor]:
        found = []
        for x in batches:
            loss = cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(64, (16, 32), generator=generator).to(device) for _ in range(4)]
    right = torch.stack(losses(*made(), batches))
    given = {"shard": layout.shard, "tensor": layout.tensor, "plan": layout.plan}
    found = torch.stack(losses(*spread(*made(), batches, example=batches[0], **given)))
    dist.all_reduce(found)
    return float((found / dist.get_world_size() - right).abs().max()), float(right[0])


def forget_accelerate() -> None:
    """Its next accelerator would be configured as its first one was."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(steps: Step) -> float:
    """Milliseconds a step, of the slowest rank."""
    dist.barrier()
    sync()
    began = time.perf_counter()
    steps()
    sync()
    taken = torch.tensor((time.perf_counter() - began) / STEPS * 1e3, device="cuda" if CUDA else "cpu")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def compared(contest: Contest, layout: Layout) -> dict[str, dict[str, Any]]:
    contest.draw(dist.get_rank() // (layout.tensor or 1))
    ready: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in {"keepbusy": ours, **layout.peers}.items():
        began = time.perf_counter()
        if make is accelerate:
            forget_accelerate()
        try:
            ready[name] = make(contest, layout)
            for _ in range(2):
                ready[name]()
            sync()
            rows[name] = {"lines": lines_of(make), "ready_in_s": round(time.perf_counter() - began, 1)}
        except ModuleNotFoundError as error:
            rows[name] = {"failed": f"no module {error.name}"}
        except Exception as error:
            ready.pop(name, None)
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            if dist.get_rank() == 0:
                traceback.print_exc()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(REPEATS):
        for name in list(ready)[:: 1 if turn % 2 else -1]:
            times[name].append(timed(ready[name]))
    for name, taken in times.items():
        loss = ready[name]()  # after as many steps as all others: one that trains nothing is seen
        dist.all_reduce(loss)
        rows[name] |= {"loss": float(loss) / dist.get_world_size()}
        rows[name] |= {"ms": statistics.median(taken), "low": min(taken), "high": max(taken)}
    return rows


def line(name: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"  {name:26} {row['failed']}"
    span, loss = f"({row['low']:.2f}-{row['high']:.2f})", f"loss {row['loss']:.4f}"
    return f"  {name:26} {row['ms']:8.2f} ms {span:18} {row['lines']:3} lines, {loss}, ready in {row['ready_in_s']} s"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--small", action="store_true", help="sizes for a machine without a GPU")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    first = dist.get_rank() == 0
    say = functools.partial(print, flush=True) if first else lambda *_: None
    facts: dict[str, Any] = {"ranks": dist.get_world_size(), "torch": torch.__version__, "losses": {}, "steps": {}}
    contest = Contest(options.small)
    say(f"{facts['ranks']} ranks, PyTorch {facts['torch']}; losses beside one process, in 32 bits:")
    for name, layout in layouts().items():
        off, loss = worst_loss(contest.device, layout)
        facts["losses"][name] = off
        say(f"  {name:36} differ by {off:.1e} at most, of {loss:.3f}")
    for name, layout in layouts().items():
        rows = facts["steps"][name] = compared(contest, layout)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        best = min((row["ms"] for other, row in rows.items() if "ms" in row and other != "keepbusy"), default=None)
        say(
            name
            + (
                f": {rows['keepbusy']['ms'] / best - 1:+.1%} of the best other"
                if best and "ms" in rows["keepbusy"]
                else ""
            )
        )
        for other, row in rows.items():
            say(line(other, row))
        if first and options.out:
            options.out.write_text(json.dumps(facts, indent=1))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
