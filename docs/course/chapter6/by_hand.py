"""A layer on two GPUs: the first matrix cut by columns, the second by rows, and one sum at the end."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

RANKS = 2
ROWS_FIRST = False

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(4, 32).cuda()  # the same on all ranks
first, second = torch.randn(32, 128).cuda() / 6, torch.randn(128, 32).cuda() / 11
whole = gelu(x @ first) @ second

if ROWS_FIRST:
    hidden = x.chunk(ranks, dim=1)[rank] @ first.chunk(ranks, dim=0)[rank]  # all of it, but only a summand
    dist.all_reduce(hidden)  # gelu needs the sum
    part = gelu(hidden).chunk(ranks, dim=1)[rank] @ second.chunk(ranks, dim=0)[rank]
    sums = 2
else:
    hidden = x @ first.chunk(ranks, dim=1)[rank]  # some of its columns, complete
    part = gelu(hidden) @ second.chunk(ranks, dim=0)[rank]
    sums = 1
dist.all_reduce(part)

assert torch.allclose(part, whole, atol=1e-5)
if rank == 0:
    print(f"the same result as on one GPU, with {sums} all-reduce{'s' if sums > 1 else ''}")
dist.destroy_process_group()
