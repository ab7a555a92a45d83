"""The collectives, on two numbers a rank: what each rank holds before and after."""

import os

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
everybody = range(dist.get_world_size())


def fresh() -> torch.Tensor:
    """Rank 0 holds 1, 2; rank 1 holds 11, 12."""
    return torch.tensor([1.0, 2.0], device="cuda") + 10 * rank


def show(name: str, *tensors: torch.Tensor) -> None:
    print(f"rank {rank}  {name:16}{fresh().tolist()}  ->  {', '.join(str(one.tolist()) for one in tensors)}")


x = fresh()
dist.broadcast(x, src=0)
show("broadcast", x)
x, parts = fresh()[:1], list(fresh().chunk(2)) if rank == 0 else None
dist.scatter(x, parts, src=0)
show("scatter", x)
lists = [torch.empty(2, device="cuda") for _ in everybody]
dist.gather(fresh(), lists if rank == 0 else None, dst=0)
show("gather", *(lists if rank == 0 else ()))
dist.all_gather(lists, fresh())
show("all_gather", *lists)
x = fresh()
dist.reduce(x, dst=0)
show("reduce", *([x] if rank == 0 else ()))
x = fresh()
dist.all_reduce(x)
show("all_reduce", x)
assert x.tolist() == [12, 14]
x = torch.empty(1, device="cuda")
dist.reduce_scatter(x, list(fresh().chunk(2)))
show("reduce_scatter", x)
assert x.item() == 12 + 2 * rank
x = torch.empty(2, device="cuda")
dist.all_to_all_single(x, fresh())
show("all_to_all", x)
assert x.tolist() == [1 + rank, 11 + rank]
dist.destroy_process_group()
