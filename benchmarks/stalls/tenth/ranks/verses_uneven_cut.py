"""A language model of verses in two stages, one a rank, eight pieces to a batch; the cut was made where a smaller card was full."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import CUDA, DEVICE, run


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


class Front(nn.Module):
    """Words become vectors and pass the first layers."""

    def __init__(self, args, layers):
        super().__init__()
        self.words, self.layers = nn.Embedding(args.words, args.width), nn.Sequential(*(Layer(args.width) for _ in range(layers)))

    def forward(self, ids):
        return self.layers(self.words(ids))


class Rear(nn.Module):
    """The other layers, and which word comes next."""

    def __init__(self, args, layers):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(args.width) for _ in range(layers)))
        self.norm, self.leave = nn.LayerNorm(args.width), nn.Linear(args.width, args.words)

    def forward(self, x, next_words):
        said = self.leave(self.norm(self.layers(x)))
        return F.cross_entropy(said.float().flatten(0, 1), next_words.flatten())


class FrontRank:
    """Sends all pieces on, then takes their slopes back as they come."""

    def __init__(self, args, layers, back):
        self.stage, self.back = Front(args, layers).to(DEVICE), back

    def batch(self, pieces):
        passed, under_way = [], []
        for ids in pieces:
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
                x = self.stage(ids[:, :-1])
            passed.append((x, x.detach()))
            under_way.append(dist.isend(passed[-1][1], 1))
        for x, _ in passed:
            slope = torch.empty_like(x)
            dist.irecv(slope, 1, group=self.back).wait()  # STALL: peer_late
            x.backward(slope)
        for work in under_way:  # STALL: peer_late
            work.wait()
        return torch.zeros((), device=DEVICE)


class RearRank:
    """Goes forward and backward with each piece as it comes. Slopes go back through a group of their own, so that neither way waits for the other."""

    def __init__(self, args, layers, back):
        self.stage, self.back, self.width = Rear(args, layers).to(DEVICE), back, args.width

    def batch(self, pieces):
        total, under_way = torch.zeros((), device=DEVICE), []
        for ids in pieces:
            x = torch.empty(len(ids), ids.shape[1] - 1, self.width, device=DEVICE)
            dist.irecv(x, 0).wait()
            x.requires_grad_()
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
                loss = self.stage(x, ids[:, 1:]) / len(pieces)
            loss.backward()
            under_way.append((x, dist.isend(x.grad, 0, group=self.back)))
            total += loss.detach()
        for _, work in under_way:
            work.wait()
        return total


def main(args):
    front = args.layers // 2 + 1 if args.fixed else args.layers // 4  # STALL: peer_late
    back = dist.new_group()
    mine = FrontRank(args, front, back) if dist.get_rank() == 0 else RearRank(args, args.layers - front, back)
    optimizer = torch.optim.AdamW(mine.stage.parameters(), lr=3e-4, fused=CUDA)
    chance = torch.Generator(DEVICE).manual_seed(0)
    verses = torch.randint(0, args.words, (args.pieces, args.batch // args.pieces, args.length + 1), device=DEVICE, generator=chance)
    total = torch.zeros((), device=DEVICE)
    for _ in range(args.steps):
        total += mine.batch(verses.unbind())
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps:.4f}")


if __name__ == "__main__":
    run(main, steps=55, batch=128, pieces=8, length=512, words=8192, width=1024, layers=20)
