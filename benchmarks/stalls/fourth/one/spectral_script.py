"""Spectral embedding of points on a few noisy rings, from top to bottom: kernel, eigenvectors, neighbours, agreement."""
import numpy as np
import torch
from script import DEVICE, run

from models import size

POINTS, NEIGHBOURS = size(12000, 64), 16


def main(tick, fixed=False):
    """`fixed` may also be "median" or "neighbours", to mend one of the two alone."""
    rng = np.random.default_rng(0)
    ring = rng.integers(0, 5, POINTS)
    angle = rng.uniform(0, 2 * np.pi, POINTS)
    points = np.stack([(1 + ring) * np.cos(angle), (1 + ring) * np.sin(angle)], 1) + 0.05 * rng.standard_normal((POINTS, 2))
    points = torch.from_numpy(np.concatenate([points, 0.05 * rng.standard_normal((POINTS, 62))], 1).astype(np.float32)).to(DEVICE)

    # the kernel's width by the median heuristic
    distances = torch.cdist(points, points)
    if fixed in (True, "median"):
        width = distances.view(-1).median() / 8
    else:
        width = float(np.median(distances.cpu().numpy())) / 8  # STALL: host_work

    # the random walk's leading eigenvectors
    kernel = torch.exp(-((distances / width) ** 2))
    degree = kernel.sum(1).rsqrt()
    u, s, _ = torch.svd_lowrank(degree[:, None] * kernel * degree, q=min(64, POINTS // 2), niter=6)
    embedded = torch.nn.functional.normalize(u[:, :16] * s[:16], dim=1)

    # who is near whom there
    alike = embedded @ embedded.T
    alike.fill_diagonal_(-1)
    if fixed in (True, "neighbours"):
        near = alike.topk(NEIGHBOURS, dim=1).indices
    else:
        near = torch.from_numpy(np.argpartition(-alike.cpu().numpy(), NEIGHBOURS, axis=1)[:, :NEIGHBOURS]).to(DEVICE)  # STALL: host_work

    # how often it is one of the same ring
    rings = torch.from_numpy(ring).to(DEVICE)
    agreement = (rings[near] == rings[:, None]).float().mean().item()
    assert agreement > 0.1
    tick()


if __name__ == "__main__":
    run(main)
