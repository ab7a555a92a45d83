"""When the gradients travel: all at the end, or each bucket as soon as it is complete, which is what DDP does."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
DDP = True
BUCKET = 64  # MiB

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
parallel = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=BUCKET) if DDP else model
batch = torch.randn(256, 4096, device="cuda")


def step() -> float:
    """Milliseconds of the GPU for forward, backward and the sum of the gradients."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    model.zero_grad()
    dist.barrier()
    begin.record()
    parallel(batch).square().mean().backward()
    if not DDP:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


step(), step()  # DDP puts its buckets in order after the first one
torch.cuda.synchronize()
taken = step()
if rank == 0:
    print(f"{'DDP' if DDP else 'by hand'}: {taken:.2f} ms a step")
dist.destroy_process_group()
