"""Crops told apart from orbit: first the usual range of every band is measured, then a net learns, then a table of what is taken for what."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CROPS = 12


def survey(count, bands, edge):
    """Reflectances as the satellite sends them, whole numbers on the host, and the crop of each place."""
    chance = torch.Generator(DEVICE).manual_seed(0)
    like = torch.rand(CROPS, bands, device=DEVICE, generator=chance)
    cubes, crops = torch.empty(count, bands, edge, edge, dtype=torch.int16), torch.empty(count, edge, edge, dtype=torch.int64)
    for first in range(0, count, 250):
        fields = torch.randint(0, CROPS, (min(250, count - first), edge // 8, edge // 8), device=DEVICE, generator=chance)
        fields = fields.repeat_interleave(8, 1).repeat_interleave(8, 2)
        light = like[fields].permute(0, 3, 1, 2)
        light = light + 0.4 * torch.randn(light.shape, device=DEVICE, generator=chance)
        cubes[first : first + 250], crops[first : first + 250] = (light * 4000).short().cpu(), fields.cpu()
    return cubes, crops


def usual_range(cubes):
    """The 2nd and 98th percentile of each band, averaged over the cubes: robust against clouds."""
    lows, highs = [], []
    for cube in cubes:
        light = cube.to(DEVICE).float().flatten(1)
        lows.append(torch.quantile(light, 0.02, dim=1).cpu())
        highs.append(torch.quantile(light, 0.98, dim=1).cpu())
    return torch.stack(lows).mean(0).to(DEVICE), torch.stack(highs).mean(0).to(DEVICE)


def usual_range_of_many(cubes):
    ends = torch.tensor([0.02, 0.98], device=DEVICE)
    total = torch.zeros(2, cubes.shape[1], device=DEVICE)
    for some in cubes.split(64):
        total += torch.quantile(some.to(DEVICE).float().flatten(2), ends, dim=2).sum(1)
    return (total / len(cubes)).unbind()


class Crops(nn.Module):
    def __init__(self, bands, wide, deep):
        super().__init__()
        self.enter = nn.Conv2d(bands, wide, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, wide), nn.GELU(), nn.Conv2d(wide, wide, 3, padding=1)) for _ in range(deep))
        self.leave = nn.Conv2d(wide, CROPS, 1)

    def forward(self, cubes, low, high):
        x = (cubes.float() - low[:, None, None]) / (high - low)[:, None, None]
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)
            return self.leave(x).float()


def sent(part):
    return part.pin_memory().to(DEVICE, non_blocking=True) if DEVICE == "cuda" else part


def learn(model, cubes, crops, ends, batch, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    chance, total = torch.Generator().manual_seed(1), torch.zeros((), device=DEVICE)
    for _ in range(steps):
        rows = torch.randint(0, len(cubes), (batch,), generator=chance)
        some, true = (sent(part[rows]) for part in (cubes, crops))
        loss = F.cross_entropy(model(some, *ends), true)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / steps


@torch.inference_mode()
def confusion(model, cubes, crops, ends, batch):
    table = [[0] * CROPS for _ in range(CROPS)]
    for some, true in zip(cubes.split(batch), crops.split(batch)):
        said = model(some.to(DEVICE), *ends).argmax(1)
        for right, taken in zip(true.flatten().tolist(), said.flatten().tolist()):
            table[right][taken] += 1
    return torch.tensor(table)


@torch.inference_mode()
def confusion_on_device(model, cubes, crops, ends, batch):
    table = torch.zeros(CROPS * CROPS, dtype=torch.int64, device=DEVICE)
    one = torch.ones((), dtype=torch.int64, device=DEVICE)
    for some, true in zip(cubes.split(batch), crops.split(batch)):
        said = model(some.to(DEVICE), *ends).argmax(1)
        places = (true.to(DEVICE) * CROPS + said).flatten()
        table.scatter_add_(0, places, one.expand_as(places))
    return table.view(CROPS, CROPS).cpu()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    count, bands, edge, wide, deep, batch, steps = (20, 8, 16, 16, 1, 4, 5) if options.tiny else (3200, 48, 64, 192, 8, 64, options.steps)
    torch.manual_seed(0)
    cubes, crops = survey(count, bands, edge)
    model = Crops(bands, wide, deep).to(DEVICE)
    start = time.perf_counter()
    ends = (usual_range_of_many if options.fixed else usual_range)(cubes)
    loss = learn(model, cubes, crops, ends, batch, steps)
    table = (confusion_on_device if options.fixed else confusion)(model, cubes, crops, ends, batch)
    print(f"mean loss {loss.item():.3f}, right {table.diagonal().sum().item() / table.sum().item():.3f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
