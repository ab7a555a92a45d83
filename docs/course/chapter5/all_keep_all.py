"""Data parallelism as in chapter 4, to compare with: all ranks keep everything."""

import os

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
batches = torch.randn(3, 8, 256).cuda().chunk(ranks, dim=1)[rank]  # three steps; of each this rank's part

model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).cuda()
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters)
for batch in batches:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step()

held = {
    "parameters": sum(one.nbytes for one in parameters),
    "gradients": sum(one.grad.nbytes for one in parameters),
    "states": sum(one.nbytes for state in optimizer.state.values() for one in state.values() if one.dim()),
}
dist.all_reduce(loss)
if rank == 0:
    told = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in held.items())
    print(f"{told}; loss {loss.item() / ranks:.3e}")
assert abs(loss.item() / ranks - 1.275e-4) < 1e-6  # as in all of these programs
dist.destroy_process_group()
