"""Sequence parallelism: between two layers cut by tensor, each rank works on its share of the tokens only."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, layer_norm

RANKS = 2

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
tokens, width = 12, 32
x = torch.randn(tokens, width).cuda()
first, second = torch.randn(width, 128).cuda() / 6, torch.randn(128, width).cuda() / 11
whole = x + gelu(layer_norm(x, (width,)) @ first) @ second

mine = x.chunk(ranks)[rank]  # all that this rank keeps between the layers
normed = layer_norm(mine, (width,))
gathered = [torch.empty_like(normed) for _ in range(ranks)]
dist.all_gather(gathered, normed)
part = gelu(torch.cat(gathered) @ first.chunk(ranks, dim=1)[rank]) @ second.chunk(ranks, dim=0)[rank]
summed = torch.empty_like(mine)
dist.reduce_scatter(summed, list(part.chunk(ranks)))
mine = mine + summed

assert torch.allclose(mine, whole.chunk(ranks)[rank], atol=1e-5)
print(f"rank {rank} keeps {len(mine)} of {tokens} tokens, and they are what one GPU has for them")
dist.destroy_process_group()
