"""Data parallelism by hand: the same model everywhere, a batch for each rank, and the mean of the gradients."""

import os

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
SAME_START = True

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(3, 8, 16, device="cuda")  # three steps of eight, the same on all ranks
alone = nn.Linear(16, 4, device="cuda")
shared = nn.Linear(16, 4, device="cuda")
if SAME_START:
    shared.load_state_dict(alone.state_dict())
elif rank > 0:
    shared.reset_parameters()

for batch in images:  # one GPU, the whole batch
    alone.zero_grad()
    alone(batch).square().mean().backward()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter -= 0.1 * parameter.grad

for batch in images:  # each rank its own part of it
    shared.zero_grad()
    shared(batch.chunk(ranks)[rank]).square().mean().backward()
    with torch.no_grad():
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
            parameter -= 0.1 * parameter.grad / ranks

everywhere = [torch.empty_like(shared.weight) for _ in range(ranks)]
dist.all_gather(everywhere, shared.weight.detach())
apart = max((one - everywhere[0]).abs().max().item() for one in everywhere)
off = (shared.weight - alone.weight).abs().max().item()
if rank == 0:
    print(f"the ranks' models differ by {'nothing' if apart == 0 else 'something'}, ", end="")
    print(f"and from that of one GPU by {'rounding' if off < 1e-6 else 'more than rounding'}")
assert (apart == 0) == (off < 1e-6) == SAME_START
dist.destroy_process_group()
