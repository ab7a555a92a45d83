"""A fossil inside its stone, out of X-ray pictures from all around: a volume is changed until its shadows are those that were seen. No net."""
import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def turned(volume, angle):
    """All slices [z, y, x] turned by an angle within their plane."""
    cosine, sine = math.cos(angle), math.sin(angle)
    way = torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]]).to(DEVICE, non_blocking=True)
    grid = F.affine_grid(way, (1, 1, *volume.shape[1:]), align_corners=False)
    return F.grid_sample(volume[None], grid, align_corners=False)[0]


def stone(high, edge):
    line = torch.linspace(-1, 1, edge, device=DEVICE)
    tall = torch.linspace(-1, 1, high, device=DEVICE)[:, None, None]
    round_ = line[:, None].square() + line.square()
    spiral = (8 * torch.atan2(line[:, None].expand(edge, edge), line.expand(edge, edge)) + 20 * round_.sqrt() + 3 * tall).sin()
    return (round_ + 0.5 * tall.square() < 0.7) * (1 + (spiral > 0.3) * (round_ < 0.3))


def sweep(volume, shadows, angles):
    """One pass over all angles; returns the squared misfit."""
    edge, misfit = volume.shape[-1], torch.zeros((), device=DEVICE)
    for number, angle in enumerate(angles):
        away = shadows[number] - turned(volume, angle).sum(1)
        misfit += away.square().mean()
        volume += turned((away / edge)[:, None].expand_as(volume).contiguous(), -angle)
        volume.clamp_(min=0)
    return misfit / len(angles)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="nothing is read or written between the sweeps")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--sweeps", type=int, default=5)
    options = parser.parse_args()
    high, edge, views, sweeps = (4, 24, 6, 2) if options.tiny else (512, 640, 360, options.sweeps)
    start = time.perf_counter()
    truth = stone(high, edge).float()
    angles = [math.pi * (number * 0.618034 % 1) for number in range(views)]
    shadows = torch.stack([turned(truth, angle).sum(1) for angle in angles])
    volume = torch.zeros_like(truth)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(sweeps):
            misfit = sweep(volume, shadows, angles)
            if not options.fixed:
                print(f"sweep {number + 1}: misfit {misfit.item():.4f}", flush=True)
                np.save(Path(folder, f"slice-{number}.npy"), volume[high // 2].cpu().numpy())
    print(f"misfit {misfit.item():.5f}, away from the stone {(volume - truth).abs().mean().item():.5f}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
