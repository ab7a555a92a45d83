"""FSDP2 does stage 3 for you: it gathers the next layer while this one computes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
ROWS = 256  # of a batch
WIDTH = 8192
AGAIN = True  # gather each layer again for the backward pass, and keep none of them until then

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(6)))
for layer in model:
    fully_shard(layer, reshard_after_forward=AGAIN)
fully_shard(model, reshard_after_forward=AGAIN)
optimizer = torch.optim.Adam(model.parameters(), foreach=True)
batch = torch.randn(ROWS, WIDTH, device="cuda")


def step() -> float:
    """Milliseconds of the GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


step(), step()
torch.cuda.synchronize()
taken = step()
mine = sum(parameter.to_local().numel() for parameter in model.parameters())
whole = sum(parameter.numel() for parameter in model.parameters())
if rank == 0:
    print(f"{taken:.1f} ms a step, with {mine / whole:.0%} of the parameters on this rank")
assert mine * dist.get_world_size() == whole
dist.destroy_process_group()
