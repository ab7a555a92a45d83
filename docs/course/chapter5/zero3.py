"""ZeRO stage 3: each rank keeps a part of every layer, which is gathered when it is used, and then forgotten."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
batches = torch.randn(3, 8, 256).cuda().chunk(ranks, dim=1)[rank]  # three steps; of each this rank's part

weights = (nn.Linear(256, 256, bias=False).weight.detach() for _ in range(8))
parts = [weight.chunk(ranks)[rank].cuda().requires_grad_() for weight in weights]
optimizer = torch.optim.Adam(parts)


class Gathered(torch.autograd.Function):
    """All of a layer; its gradient goes back in parts."""

    @staticmethod
    def forward(ctx, part):
        whole = part.new_empty(ranks * len(part), part.shape[1])
        dist.all_gather(list(whole.chunk(ranks)), part)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        part = gradient.new_empty(len(gradient) // ranks, gradient.shape[1])
        dist.reduce_scatter(part, list(gradient.chunk(ranks)))
        return part / ranks


for x in batches:
    optimizer.zero_grad()
    for part in parts:  # checkpoint keeps nothing of a layer, and computes it again in the backward pass
        x = checkpoint(
            lambda x, part: x @ Gathered.apply(part).T, x, part, use_reentrant=False, preserve_rng_state=False
        )
    loss = x.square().mean()
    loss.backward()
    optimizer.step()

held = {
    "parameters": sum(one.nbytes for one in parts),
    "gradients": sum(one.grad.nbytes for one in parts),
    "states": sum(one.nbytes for state in optimizer.state.values() for one in state.values() if one.dim()),
}
dist.all_reduce(loss)
if rank == 0:
    told = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in held.items())
    print(f"{told}; loss {loss.item() / ranks:.3e}")
assert abs(loss.item() / ranks - 1.275e-4) < 1e-6  # as in all of these programs
dist.destroy_process_group()
