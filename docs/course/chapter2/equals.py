"""An all-reduce is a reduce-scatter and then an all-gather; a reduce and then a broadcast gives the same, later."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

RANKS = 2
NUMBERS = 2**24  # 64 MiB

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
given = torch.arange(NUMBERS, device="cuda", dtype=torch.float32) % 1000 + rank
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
part = torch.empty(NUMBERS // dist.get_world_size(), device="cuda")


def scattered_and_gathered(x: torch.Tensor) -> None:
    scatter(part, x)
    gather(x, part)


def reduced_and_broadcast(x: torch.Tensor) -> None:
    dist.reduce(x, dst=0)
    dist.broadcast(x, src=0)


def timed(name: str, does: Callable[[torch.Tensor], object]) -> torch.Tensor:
    for _ in range(2):  # the first time to warm up
        x = given.clone()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        begin.record()
        does(x)
        end.record()
        end.synchronize()
    took[name] = begin.elapsed_time(end)
    return x


took: dict[str, float] = {}
whole = timed("all_reduce", dist.all_reduce)
assert timed("reduce_scatter, all_gather", scattered_and_gathered).equal(whole)
assert timed("reduce, broadcast", reduced_and_broadcast).equal(whole)
if rank == 0:
    for name, taken in took.items():
        print(f"{name:27}{taken:.2f} ms")
dist.destroy_process_group()
