"""Tides and surges of the next days from gauges with gaps, by a transformer under DDP; what a step learns from is cut and mended by NumPy."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FUTURE = 48


def gauges(count, hours, channels):
    rng = np.random.default_rng(0)
    time = np.arange(hours)
    levels = np.stack([np.sin(time[:, None] * (0.5 + 0.01 * gauge) + rng.uniform(0, 6, channels)) for gauge in range(count)]).astype(np.float32)
    levels += 0.2 * rng.standard_normal(levels.shape, dtype=np.float32)
    levels[rng.random(levels.shape) < 0.05] = np.nan
    return levels


class Windows(Dataset):
    """A window of one gauge, its gaps filled between the neighbours and every channel scaled."""

    def __init__(self, levels, past, count):
        self.levels, self.long, self.count = levels, past + FUTURE, count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        rng = np.random.default_rng(row)
        gauge, first = rng.integers(len(self.levels)), rng.integers(self.levels.shape[1] - self.long)
        window, hours = self.levels[gauge, first : first + self.long].copy(), np.arange(self.long)
        for channel in window.T:
            gap = np.isnan(channel)
            channel[gap] = np.interp(hours[gap], hours[~gap], channel[~gap])
            channel -= np.median(channel)
            channel /= channel.std() + 1e-3
        return torch.from_numpy(window)


class Tides(nn.Module):
    def __init__(self, past, channels, width, layers):
        super().__init__()
        self.enter, self.places = nn.Linear(channels, width), nn.Parameter(torch.zeros(past, width))
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, FUTURE * channels)

    def forward(self, past):
        return self.head(self.body(self.enter(past) + self.places)[:, -1])


def handed_out(windows, args):
    """The first rank reads for all, so that no file is opened twice."""
    world = dist.get_world_size()
    part = torch.empty(args.batch, args.past + FUTURE, args.channels, device=DEVICE)
    for step in range(args.steps):
        parts = None
        if dist.get_rank() == 0:
            rows = range(step * world * args.batch, (step + 1) * world * args.batch)
            whole = torch.stack([windows[row] for row in rows]).to(DEVICE)
            parts = list(whole.split(args.batch))
        dist.scatter(part, parts, src=0)
        yield part


def each_for_itself(windows, args):
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [range((step * world + rank) * args.batch, (step * world + rank + 1) * args.batch) for step in range(args.steps)]
    for part in DataLoader(windows, batch_sampler=rows, num_workers=args.workers, pin_memory=CUDA, prefetch_factor=3):
        yield part.to(DEVICE, non_blocking=True)


def main(args):
    windows = Windows(gauges(args.gauges, args.hours, args.channels), args.past, args.steps * args.batch * dist.get_world_size())
    model = DistributedDataParallel(Tides(args.past, args.channels, args.width, args.layers).to(DEVICE), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=CUDA)
    total = torch.zeros((), device=DEVICE)
    for part in (each_for_itself if args.fixed else handed_out)(windows, args):
        past, future = part.split([args.past, FUTURE], 1)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
            said = model(past)
        loss = (said.float() - future.flatten(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"mean loss {total.item() / args.steps / dist.get_world_size():.4f}")


if __name__ == "__main__":
    run(main, steps=80, batch=128, past=336, channels=12, gauges=60, hours=8760, width=640, layers=10, workers=8)
