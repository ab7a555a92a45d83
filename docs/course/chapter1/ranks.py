"""Two GPUs are two processes: each runs this whole file, knows its rank, and drives a GPU of its own."""

import os

import torch
import torch.distributed as dist

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.full((4096, 4096), float(rank + 1), device="cuda")
for _ in range(1 + rank):  # rank 1 has twice the work
    y = x @ x
dist.all_reduce(x)  # the ranks meet here: each gets the sum of both
torch.cuda.synchronize()
print(f"rank {rank} of {dist.get_world_size()} drives {x.device}")
dist.destroy_process_group()
