"""Cells under the microscope are learnt by an autoencoder under DDP; every so often a map of held-out ones is drawn, and how well kinds part is worked out."""
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.nn as nn
from job import CUDA, DEVICE, run
from torch.nn.parallel import DistributedDataParallel

mpl.use("Agg")
from matplotlib import pyplot as plt
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, silhouette_score

KINDS = 12


class Autoencoder(nn.Module):
    def __init__(self, wide, small):
        super().__init__()
        widths = [wide, 2 * wide, 4 * wide, 8 * wide]
        down, up = [nn.Conv2d(3, wide, 3, padding=1)], []
        for inner, outer in zip(widths, widths[1:]):
            down += [nn.SiLU(), nn.Conv2d(inner, inner, 3, padding=1), nn.SiLU(), nn.Conv2d(inner, outer, 4, 2, 1)]
            up = [nn.SiLU(), nn.ConvTranspose2d(outer, inner, 4, 2, 1), nn.SiLU(), nn.Conv2d(inner, inner, 3, padding=1), *up]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up, nn.SiLU(), nn.Conv2d(wide, 3, 3, padding=1))
        self.small, self.large = nn.Conv2d(8 * wide, small, 1), nn.Conv2d(small, 8 * wide, 1)

    def encode(self, pictures):
        return self.small(self.down(pictures))

    def forward(self, pictures):
        return self.up(self.large(self.encode(pictures)))


def draw(points, kinds, path):
    groups = KMeans(KINDS, n_init=3, random_state=0).fit_predict(points)
    flat = PCA(2, random_state=0).fit_transform(points)
    figure, axes = plt.subplots(1, 2, figsize=(14, 7))
    for axis, colours in zip(axes, (kinds, groups)):
        axis.scatter(*flat.T, c=colours, s=4, cmap="tab20")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return silhouette_score(points, kinds), adjusted_rand_score(kinds, groups)


def cells(count, edge, chance):
    kinds = torch.randint(0, KINDS, (count,), device=DEVICE, generator=chance)
    waves = torch.sin(torch.arange(edge, device=DEVICE) * (kinds[:, None] + 1) / 12)
    pictures = (waves[:, None, None] * waves[:, None, :, None]).expand(-1, 3, -1, -1)
    return pictures + 0.3 * torch.randn(count, 3, edge, edge, device=DEVICE, generator=chance), kinds


@torch.no_grad()
def latents(net, pictures):
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return torch.cat([net.encode(some).float().mean((2, 3)) for some in pictures.split(256)])


def main(args):
    net = Autoencoder(args.wide, args.small).to(DEVICE, memory_format=torch.channels_last)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=CUDA)
    held, kinds = cells(args.held, args.edge, torch.Generator(DEVICE).manual_seed(5))
    chance = torch.Generator(DEVICE).manual_seed(10 + dist.get_rank())
    folder, asked = Path(tempfile.mkdtemp()), []
    first = dist.get_rank() == 0
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) if first and args.fixed else None
    if pool:
        for _ in range(2):
            pool.submit(int)
    for step in range(1, args.steps + 1):
        pictures, _ = cells(args.batch, args.edge, chance)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = (model(pictures.contiguous(memory_format=torch.channels_last)) - pictures).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0 and first:
            what = latents(net, held).cpu().numpy(), kinds.cpu().numpy(), folder / f"{step}.png"
            asked.append(pool.submit(draw, *what) if pool else draw(*what))
    for number, one in enumerate(asked, 1):
        parted, same = one.result() if pool else one
        print(f"map {number}: parted {parted:.3f}, as the kinds {same:.3f}")
    if pool:
        pool.shutdown()
    if first:
        print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    run(main, steps=260, every=25, batch=160, edge=128, wide=64, small=64, held=5000)
