"""Attention: its heads know nothing of each other, so each rank takes some of them."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

RANKS = 2
HEADS, SIZE = 4, 16

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
width = HEADS * SIZE
x = torch.randn(2, 10, width).cuda()  # two texts of ten tokens
query, key, value, out = (torch.randn(width, width).cuda() / 8 for _ in range(4))


def attention(heads: int, *weights: torch.Tensor) -> torch.Tensor:
    q, k, v = ((x @ weight).unflatten(-1, (heads, SIZE)).transpose(1, 2) for weight in weights)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


whole = attention(HEADS, query, key, value) @ out
columns = [weight.chunk(ranks, dim=1)[rank] for weight in (query, key, value)]  # those of its heads
part = attention(HEADS // ranks, *columns) @ out.chunk(ranks, dim=0)[rank]
dist.all_reduce(part)
assert torch.allclose(part, whole, atol=1e-4)
print(f"rank {rank}: {HEADS // ranks} heads here, and the sum is the attention of all {HEADS}")
dist.destroy_process_group()
