"""The main modes of an ocean's warmth, by subspace iteration: each rank has half of the days, and after each product it is asked how far the modes still turned."""
import torch
import torch.distributed as dist
from job import DEVICE, run


def anomalies(days, places, rank):
    """Days of noise that is stronger in some places."""
    chance = torch.Generator(DEVICE).manual_seed(rank)
    table = torch.empty(days, places, device=DEVICE)
    scale = torch.linspace(2, 0.5, places, device=DEVICE)
    for some in table.split(16_384):
        some.normal_(generator=chance).mul_(scale)
    return table


def turned(new, old):
    """How much of the new modes lies outside of the old, at most of any mode."""
    return (new - old @ (old.mT @ new)).square().sum(0).max()


def main(args):
    table = anomalies(args.days, args.places, dist.get_rank())
    modes = torch.linalg.qr(torch.randn(args.places, args.modes, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(9)))[0]
    for number in range(1, args.steps + 1):
        product = table.mT @ (table @ modes)
        dist.all_reduce(product)
        new = torch.linalg.qr(product)[0]
        change = turned(new, modes)
        modes = new
        if (not args.fixed or number % 25 == 0) and change.item() < 1e-12:
            break
        if number % 100 == 0 and dist.get_rank() == 0:
            print(f"{number}: turned by {change.item():.3e}", flush=True)
    strength = (table @ modes).square().sum(0)
    dist.all_reduce(strength)
    if dist.get_rank() == 0:
        print(f"strength of the first {strength.max().item():.4e} after {number}")


if __name__ == "__main__":
    run(main, steps=600, days=400_000, places=8192, modes=64)
