"""Overlap hides the wire. It does not hide a rank that comes late: all wait for the slowest, in each step."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
LATE = 0.01  # seconds, by which the host of rank 1 needs longer for its batch

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(4096, 4096).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(256, 4096, device="cuda")

for step in range(12):
    if step == 2:
        torch.cuda.synchronize()
        start = time.perf_counter()
    time.sleep(LATE * rank)  # rank 1 prepares its batch
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
taken = (time.perf_counter() - start) * 100
print(f"rank {rank}: {taken:.1f} ms a step")
assert taken > LATE * 1e3  # on both ranks
dist.destroy_process_group()
