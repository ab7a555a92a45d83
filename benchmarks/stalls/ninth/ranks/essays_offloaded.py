"""A transformer that goes on with essays, sharded by FSDP2; its weights and AdamW's state live on the host, since they once did not fit."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run


class Block(nn.Module):
    def __init__(self, wide, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.asked, self.told = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x):
        query, key, value = self.asked(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.told(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Writer(nn.Module):
    def __init__(self, words, length, wide, deep):
        super().__init__()
        self.words, self.places = nn.Embedding(words, wide), nn.Parameter(0.02 * torch.randn(length, wide))
        self.blocks = nn.ModuleList(Block(wide, max(1, wide // 64)) for _ in range(deep))
        self.norm, self.leave = nn.LayerNorm(wide), nn.Linear(wide, words)

    def forward(self, ids):
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


def sharded(model, offload):
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if CUDA else MixedPrecisionPolicy()}
    policy["offload_policy"] = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **policy)
    return fully_shard(model, **policy)


def main(args):
    model = Writer(args.words, args.length, args.width, args.layers)
    if args.fixed:
        model.to(DEVICE)
    sharded(model, offload=CUDA and not args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    chance = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    essays = torch.randint(0, args.words // 8, (4, args.batch, args.length + 1), device=DEVICE, generator=chance)
    total = torch.zeros((), device=DEVICE)
    for step in range(args.steps):
        ids = essays[step % 4]
        said = model(ids[:, :-1])
        loss = F.cross_entropy(said.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=12, batch=48, length=1024, words=8192, width=768, layers=12)
