"""One rank has a batch more than the others. `join` lets those that are done take part until all are."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 4, device="cuda"), device_ids=[rank])
batches = torch.randn(3 + rank, 8, 16, device="cuda")  # rank 0 has three, rank 1 has four

done = 0
with model.join():
    for batch in batches:
        model(batch).square().mean().backward()
        done += 1
print(f"rank {rank} has trained on {done} batches")
assert done == 3 + rank
dist.destroy_process_group()
