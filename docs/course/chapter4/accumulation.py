"""Gradient accumulation: several small batches, one step. With DDP, only the last of them needs the other ranks."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
BATCHES = 4
ROWS = 128  # of a batch

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
parallel = DistributedDataParallel(model, device_ids=[rank])
batches = torch.randn(BATCHES, ROWS, 4096, device="cuda")


def step(quiet: bool) -> float:
    """Milliseconds of the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    model.zero_grad()
    dist.barrier()
    begin.record()
    for number, batch in enumerate(batches, 1):
        with parallel.no_sync() if quiet and number < BATCHES else nullcontext():
            loss = parallel(batch).square().mean() / BATCHES  # so that the sum over the batches is their mean
            loss.backward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


step(False), step(False)
torch.cuda.synchronize()
always, once = step(False), step(True)
if rank == 0:
    print(f"{BATCHES} batches a step: gradients sent with each {always:.2f} ms, with the last {once:.2f} ms")
assert once < always or BATCHES == 1
dist.destroy_process_group()
