"""How long patients stay: each hospital gets a net of its own, learnt from its own patients, and the ranks share the hospitals."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "eighth" / "ranks"))
from job import DEVICE, run

FEATURES = 96


def hospitals(count, least, most):
    """(name, patients), the largest first, as the ministry's list has them."""
    return [(f"hospital {number}", int(most * (least / most) ** (number / (count - 1)))) for number in range(count)]


def share(listed, fixed):
    """Which hospitals this rank learns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if not fixed:
        each = -(-len(listed) // world)
        return listed[rank * each : (rank + 1) * each]
    loads, mine = [0] * world, []
    for hospital in sorted(listed, key=lambda one: -one[1]):
        least = loads.index(min(loads))
        loads[least] += hospital[1]
        if least == rank:
            mine.append(hospital)
    return mine


class Stay:
    def __init__(self, wide, seed):
        torch.manual_seed(seed)
        parts = [nn.Linear(FEATURES, wide), nn.GELU()]
        for _ in range(3):
            parts += [nn.Linear(wide, wide), nn.GELU()]
        self.net = nn.Sequential(*parts, nn.Linear(wide, 1)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=DEVICE.type == "cuda")

    def fit(self, patients, days, batch, epochs):
        for _ in range(epochs):
            mixed = torch.randperm(len(patients), device=DEVICE)
            for rows in mixed.split(batch):
                loss = (self.net(patients[rows])[:, 0] - days[rows]).abs().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return loss.detach()


def records(patients, seed):
    chance = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(patients, FEATURES, device=DEVICE, generator=chance)
    return x, x[:, :8].exp().mean(1) + 0.1 * torch.randn(patients, device=DEVICE, generator=chance)


def main(args):
    listed = hospitals(args.hospitals, args.least, args.most)
    scores = torch.zeros(len(listed), device=DEVICE)
    for name, patients in share(listed, args.fixed):
        number = listed.index((name, patients))
        x, days = records(patients, number)
        scores[number] = Stay(args.width, number).fit(x, days, args.batch, args.epochs)
    dist.all_reduce(scores)
    if dist.get_rank() == 0:
        print(f"mean of the last losses {scores.mean().item():.4f}")


if __name__ == "__main__":
    run(main, hospitals=14, least=30_000, most=400_000, width=1024, batch=16384, epochs=14)
