"""Lidar scans of very different sizes, classified by a point network under DDP. Batches hold all points one after another."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel

KINDS = 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PointNet(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, KINDS)

    def forward(self, points, members):
        x = self.stem(points)
        for block in self.blocks:
            x = block(x)
        return self.head(members @ x)  # of each scan the mean of its points


class SortedSampler:
    """Scans of like size share a batch, so that no batch outgrows the memory: the scans of a step are sorted, then dealt."""

    def __init__(self, sizes, batch, rank, world, dealt_in_turn):
        self.sizes, self.batch, self.rank, self.world, self.dealt_in_turn = sizes, batch, rank, world, dealt_in_turn

    def __iter__(self):
        rng = np.random.default_rng(1)
        while True:
            drawn = rng.choice(len(self.sizes), self.batch * self.world, replace=False)
            ordered = drawn[np.argsort(self.sizes[drawn])]
            yield ordered[self.rank :: self.world] if self.dealt_in_turn else np.split(ordered, self.world)[self.rank]


def main(args):
    rng = np.random.default_rng(0)
    sizes = rng.integers(args.points // 8, args.points, args.scans)
    kinds = torch.from_numpy(rng.integers(0, KINDS, args.scans)).to(DEVICE)
    cloud = torch.randn(args.scans, args.points, 6, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    model = DistributedDataParallel(PointNet(args.width, args.blocks).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=CUDA)
    sampler = SortedSampler(sizes, args.batch, dist.get_rank(), dist.get_world_size(), args.fixed)
    total = torch.zeros((), device=DEVICE)
    for step, chosen in zip(range(args.steps), sampler):
        points = torch.cat([cloud[scan, : sizes[scan]] for scan in chosen.tolist()])
        numbers = torch.from_numpy(np.stack([chosen, sizes[chosen]]))
        numbers = (numbers.pin_memory() if CUDA else numbers).to(DEVICE, non_blocking=True)
        order = torch.arange(len(chosen), device=DEVICE)
        scan_of = torch.repeat_interleave(order, numbers[1], output_size=len(points))
        members = (scan_of == order[:, None]) / numbers[1][:, None]
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(points, members), kinds[numbers[0]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=200, batch=24, scans=400, points=8192, width=1024, blocks=4)
