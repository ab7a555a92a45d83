"""Blocks are left out at random, decided by `torch.rand(1).item()`: a tensor of the CPU, so nothing waits for the GPU."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import STEPS, run, size


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.spread, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.body(self.norm(self.spread(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def main(tick, fixed=False):
    torch.manual_seed(0)
    width, depth = size(256, 8), size(12, 3)
    with torch.device("cuda"):
        stem, head = nn.Conv2d(3, width, 8, 8), nn.Linear(width, 1000)
        blocks = nn.ModuleList(Block(width) for _ in range(depth))
    model = nn.ModuleList([stem, blocks, head]).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(size(96, 2), 3, size(224, 32), size(224, 32), device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, x.shape[:1], device="cuda")
    torch.manual_seed(1)
    lots = torch.rand(STEPS * depth).tolist() if fixed else None  # the same numbers, drawn at once
    for step in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            features = stem(x)
            for number, block in enumerate(blocks):
                lot = lots[step * depth + number] if fixed else torch.rand(1).item()  # STALL: host_sync
                if lot >= 0.2 * number / depth:
                    features = block(features)
            loss = F.cross_entropy(head(features.mean((2, 3))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


if __name__ == "__main__":
    run(main)
