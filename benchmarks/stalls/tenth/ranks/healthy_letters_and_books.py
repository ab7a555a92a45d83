"""A language model under DDP, four pieces to an update: each piece of a rank is of another length, but the four of a rank are as long as the other's."""
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run

PIECES = 4


class Layer(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.heads, self.first, self.second = max(1, wide // 64), nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.asked, self.told = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x):
        query, key, value = self.asked(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.told(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Writer(nn.Module):
    def __init__(self, words, wide, deep):
        super().__init__()
        self.words, self.layers = nn.Embedding(words, wide), nn.ModuleList(Layer(wide) for _ in range(deep))
        self.norm, self.leave = nn.LayerNorm(wide), nn.Linear(wide, words)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.leave(self.norm(x))


def lengths(update, longest, rank, fixed):
    """Of the four pieces: a quarter, a half, three quarters and the whole of the longest, in an order of the rank's own."""
    begin = update if fixed else update + 2 * rank
    return [longest * (1 + (begin + 3 * piece) % PIECES) // PIECES for piece in range(PIECES)]


def main(args):
    rank = dist.get_rank()
    model = DistributedDataParallel(Writer(args.words, args.width, args.layers).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=CUDA)
    texts = torch.randint(0, args.words, (args.batch, args.length + 1), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(rank))
    total = torch.zeros((), device=DEVICE)
    for update in range(1, args.updates + 1):
        optimizer.zero_grad()
        for piece, length in enumerate(lengths(update, args.length, rank, args.fixed), 1):
            with contextlib.nullcontext() if piece == PIECES else model.no_sync():
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
                    said = model(texts[:, :length])
                loss = F.cross_entropy(said.float().flatten(0, 1), texts[:, 1 : length + 1].flatten()) / PIECES
                loss.backward()
                total += loss.detach()
        optimizer.step()
        if update % 20 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"{update}: mean loss {total.item() / 20 / dist.get_world_size():.4f}", flush=True)
            total = torch.zeros((), device=DEVICE)


if __name__ == "__main__":
    run(main, updates=80, batch=24, length=1024, words=8192, width=1024, layers=12)
